"""Which code made a result: a hash of the source that decides results, and the commit.

The hash is over the syntax trees of all packages that a run's numbers depend on, without comments
and docstrings. So a run is done again when code changes that it may depend on, and not when only
the command line, reports or words change.
"""

from __future__ import annotations

import ast
import hashlib
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]  # of the package

# they read results and never change one
WITHOUT_INFLUENCE = (
    "cli",
    "comparison",
    "deploy",
    "engines/flower",
    "report",
    "reproduction",
    "serve",
    "version.py",
    "watch",
    "web",
)
SCORING = ("execute.py", "outcomes.py", "results.py", "scoring.py", "spending.py", "validation.py")


@cache
def compute_code_hash() -> str:
    """The hash of the code that decides results."""
    digest = hashlib.sha256()
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if decides_results(name):
            digest.update(f"{name}\n{normalize_source(path.read_text())}\n".encode())
    return digest.hexdigest()[:8]


def decides_results(name: str) -> bool:
    """Whether the numbers of a run depend on a file of the package.

    >>> [decides_results(name) for name in ("methods/nefl.py", "cli/main.py", "report/page.py")]
    [True, False, False]
    >>> [decides_results(f"comparison/{name}") for name in ("spending.py", "table.py")]
    [True, False]
    """
    if name.removeprefix("comparison/") in SCORING:
        return True
    return name != "__init__.py" and not name.startswith(WITHOUT_INFLUENCE)


def normalize_source(source: str) -> str:
    """The syntax tree of a source as text, without docstrings.

    >>> before = normalize_source("def f(x):\\n    return x + 1")
    >>> before == normalize_source('def f(x):  # adds\\n    "Adds one."\\n    return x + 1')
    True
    >>> before == normalize_source("def f(x):\\n    return x + 2")
    False
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if (
            isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            and ast.get_docstring(node, clean=False) is not None
        ):
            del node.body[0]
    return ast.dump(tree)


@cache
def read_commit() -> str | None:
    """The commit of the source, with a + if files were changed since; None if it is not known."""
    commit = _ask_git(ROOT, "rev-parse", "--short=10", "HEAD")
    if not commit:
        return None
    return commit + ("+" if _ask_git(ROOT, "status", "--porcelain", "--", ".") else "")


def _ask_git(folder: Path, *words: str) -> str:
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""
