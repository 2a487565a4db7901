"""The shape of the code: no long functions, no long files, no loop of training twice."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "fedquilt"
MAX_BODY = 50  # lines of a function, without signature and docstring
MAX_FILE = 430  # lines
FILES = sorted(ROOT.rglob("*.py"))


def functions(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_can_be_read_at_once(path):
    assert path.read_text().count("\n") <= MAX_FILE
    for function in functions(path):
        body = function.body[bool(ast.get_docstring(function)) :]
        if body:
            length = body[-1].end_lineno - body[0].lineno + 1
            assert length <= MAX_BODY, f"{function.name} has {length} lines"


def test_one_loop_draws_training_batches():
    """Epochs and shuffled batches are iterated in one file, whatever a recipe does in a step."""
    with_loops = {
        path.relative_to(ROOT).as_posix()
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.For)
        and any(
            isinstance(part, ast.Attribute) and part.attr == "epochs"
            for part in ast.walk(node.iter)
        )
    }
    assert with_loops == {"training/loop.py"}
