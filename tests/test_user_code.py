"""Functions of users are found by their path, or refused in one sentence."""

import math

import pytest

from fedquilt.errors import ConfigError
from fedquilt.user_code import find_function_path, load_function


def test_a_function_is_found_in_a_file_and_in_a_module(tmp_path):
    (tmp_path / "mine.py").write_text("def double(x):\n    return 2 * x\n")
    assert load_function(f"{tmp_path}/mine.py:double", "loss")(4) == 8
    assert load_function("math:sqrt", "loss") is math.sqrt


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("nowhere.py:make", "loss file 'nowhere.py' does not exist"),
        ("no_such_module:make", "loss module 'no_such_module' cannot be imported"),
        ("math:nothing", "'math' has no function 'nothing'"),
        ("math:pi", "'math' has no function 'pi'"),
    ],
)
def test_a_path_without_a_function_is_refused_in_one_sentence(path, reason):
    with pytest.raises(ConfigError, match=reason) as refusal:
        load_function(path, "loss")
    assert "\n" not in str(refusal.value)


def test_a_function_has_a_path_only_if_the_path_leads_back_to_it():
    def inner():
        pass

    assert find_function_path(math.sqrt) == "math:sqrt"
    assert find_function_path(find_function_path) == "fedquilt.user_code:find_function_path"
    assert find_function_path(inner) is None
    assert find_function_path(lambda: None) is None
    assert find_function_path(ConfigError.with_traceback) is None  # a method
