"""Models that cannot be made say so in a sentence, whatever PyTorch or a user's code raises."""

import pytest

import fedquilt as fq
from fedquilt.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("mlp", {"hidden": [-3]}, r"cannot be made with hidden=\[-3\]"),
        ("mlp", {"hidden": "foo"}, "cannot be made with hidden='foo'"),
        ("mlp", {"hidden": [0]}, "model 'mlp' has nothing in"),
        ("heterofl-cnn", {"width": 0}, "a width is above 0"),
        ("heterofl-cnn", {"in_channels": 0}, "has nothing in"),
    ],
)
def test_sizes_that_leave_nothing_are_refused_in_a_sentence(name, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        fq.make_model(name, options)


def test_a_function_of_the_user_that_raises_is_named_with_its_line(tmp_path):
    (tmp_path / "net.py").write_text("def make():\n    return 1 / 0\n")
    with pytest.raises(ConfigError, match=r"net\.py:make.*ZeroDivisionError.*net\.py:2"):
        fq.make_model(f"{tmp_path / 'net.py'}:make")
