"""What users write as text: paths of functions, ``file.py:function``, and calls, ``name(3)``."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from fedquilt.errors import ConfigError

USER_MODULE = "fedquilt_user_"  # how names of modules begin that were loaded from files


def is_function_path(name: str) -> bool:
    """Whether a name is the path of a function, which runs when it is used.

    >>> is_function_path("net.py:make"), is_function_path("mlp")
    (True, False)
    """
    return ":" in name


def is_call(text: str) -> bool:
    """Whether a text is a call, as ``parse_call`` takes it, and so no path.

    >>> is_call("mlflow(uri='http://localhost:5000')"), is_call("mine (1).py:make")
    (True, False)
    """
    return text.rstrip().endswith(")")


def parse_call(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """The name, the values and the named values of a call of plain values; nothing is run.

    A name alone is a call without values. Anything else raises a ValueError.

    >>> parse_call("RandomCrop(32, padding=4)"), parse_call("csv")
    (('RandomCrop', [32], {'padding': 4}), ('csv', [], {}))
    """
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, RecursionError) as problem:
        raise ValueError(str(problem)) from problem
    if isinstance(call, ast.Name):
        return call.id, [], {}
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError("it is no call")
    values = [ast.literal_eval(value) for value in call.args]
    named = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    return call.func.id, values, named


def load_function(path: str, noun: str) -> Callable[..., Any]:
    """Imports a function.

    Args:
        path: ``file.py:function``, from the current folder, or ``package.module:function``.
        noun: What the function is for, such as ``model``. Errors name it.

    >>> load_function("math:sqrt", "schedule")(9)
    3.0
    """
    where, _, attribute = path.rpartition(":")
    is_file = where.endswith(".py") or "/" in where or Path(where).is_file()
    module = _load_file(where, noun) if is_file else _import_module(where, noun)
    function: Any = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(f"'{where}' has no function '{attribute}'; give {noun} file.py:function")
    return function  # type: ignore[no-any-return]


def _load_file(path: str, noun: str) -> ModuleType:
    if not Path(path).is_file():
        raise ConfigError(f"{noun} file '{path}' does not exist; give file.py:function")
    module = load_file(f"{USER_MODULE}{Path(path).stem}", Path(path))
    if module is None:
        raise ConfigError(f"{noun} file '{path}' is not a Python file; give file.py:function")
    return module


def load_file(name: str, path: Path) -> ModuleType | None:
    """Runs a file as a module of this name; None if it is not a Python file.

    Args:
        name: The module's name.
        path: The file.
    """
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def list_loaded_files() -> dict[str, str]:
    """The files that were loaded as modules so far, by the modules' names."""
    files = {n: getattr(m, "__file__", None) for n, m in sys.modules.items()}
    return {
        name: str(Path(file).absolute())
        for name, file in files.items()
        if name.startswith(USER_MODULE) and file is not None
    }


def _import_module(name: str, noun: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as problem:
        raise ConfigError(
            f"{noun} module '{name}' cannot be imported ({problem}); give file.py:function, or the "
            "name of a module that is installed"
        ) from problem


def find_function_path(function: Callable[..., Any]) -> str | None:
    """The path by which a function can be imported elsewhere; None if there is none.

    >>> import math
    >>> find_function_path(math.sqrt), find_function_path(lambda x: x)
    ('math:sqrt', None)
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    is_named = isinstance(module, str) and isinstance(name, str) and "." not in name
    if not is_named or module in ("__main__", "__mp_main__"):
        return None
    is_same = getattr(sys.modules.get(str(module)), str(name), None) is function
    return f"{module}:{name}" if is_same else None
