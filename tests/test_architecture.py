"""docs/architecture.md is drawn from the contracts, and names only files that exist."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
sys.path.insert(0, str(ROOT / "tools"))

import draw_layers  # noqa: E402


def test_the_graph_on_the_page_is_that_of_the_contract():
    drawing = draw_layers.draw_layers(draw_layers.read_layers())
    text = PAGE.read_text()
    assert draw_layers.update_page(text, drawing) == text, "run python tools/draw_layers.py"


def named_paths() -> set[str]:
    """Words in code font that look like paths."""
    words = re.findall(r"`([\w./*-]+)`", PAGE.read_text())
    return {word for word in words if "/" in word or word.endswith((".py", ".md", ".toml"))}


RUN_FILES = ("config.toml", "checkpoints/", "clients/", "model/")  # of a run's directory


@pytest.mark.parametrize("path", sorted(named_paths() - set(RUN_FILES)))
def test_every_file_that_the_page_names_exists(path):
    places = (ROOT, ROOT / "src" / "fedquilt", ROOT / "docs")
    assert any((place / path).exists() for place in places), f"{path} is not in the repository"


def test_lines_fit():
    wide = [line for line in PAGE.read_text().splitlines() if len(line) > 110]
    assert not wide


SLOW_TO_IMPORT = {"scipy", "matplotlib", "sklearn", "flwr", "fastapi", "opacus", "dp_accounting"}


@pytest.mark.parametrize(
    "package", ["structure", "federation", "training", "evaluation", "runs", "settings", "report"]
)
def test_what_is_slow_to_import_and_seldom_needed_is_imported_where_it_is_needed(package):
    for path in (ROOT / "src" / "fedquilt" / package).rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert SLOW_TO_IMPORT.isdisjoint(name.split(".")[0] for name in names), path
