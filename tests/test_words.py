"""README and docs/ are plain: short lines, narrow tables, words of the field, names that exist."""

import ast
import inspect
import re
from functools import cache
from pathlib import Path

import pytest

from fedquilt.models import MODELS
from fedquilt.settings.compare import CompareSection
from fedquilt.settings.schema import CHOICES, list_sections, list_settings

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "fedquilt"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MAX_COLUMNS = 110
MAX_TABLE = 80  # columns of a terminal, in which a table has its cells aligned
FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[([^]]*)\]\(([^)\s]+)\)|\[(\w+)\](?!:)")
TABLE = re.compile(r"^\|.*\n\|[-:| ]+\n(?:\|.*\n)+", re.MULTILINE)
SPAN = re.compile(r"`([^`\n]+)`")

# what was called by these words has the field's name now
OLD_WORDS = {
    *(
        "workbench",
        "bench",
        "apology",
        "office",
        "hello",
        "envelope",
        "spool",
        "ledger",
    ),
    *("begun", "told", "anew", "optimiser", "keptstates", "kept_states", "usual_budgets"),
}
OLD_PHRASES = re.compile(
    r"\b(workbench|apolog\w+|the office|hello|letters of|nobody|kept states|home tensors|optimiser"
    r"|is refused|are refused|normalis\w+|initialis\w+|so many)\b",
    re.IGNORECASE,
)

# names of other projects that pages mention
FOREIGN = {
    *("DependencyGraph", "TorchDispatchMode", "ModuleList", "TransformerEncoder"),
    *("ServerApp", "ClientApp", "SuperLink", "SuperNode", "LocalDpMod"),
}

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page):
    """The page without its code blocks, which stay as empty lines."""
    return FENCE.sub(lambda block: "\n" * block[0].count("\n"), page.read_text())


def rendered(line):
    """A line as a reader sees it: links are their text."""
    return LINK.sub(lambda link: link[1] or link[3], line)


@pages
def test_lines_are_short(page):
    lines = enumerate(TABLE.sub("", prose(page)).splitlines(), start=1)
    wide = [n for n, line in lines if len(rendered(line)) > MAX_COLUMNS and "docs-test" not in line]
    assert not wide, f"lines {wide} have more than {MAX_COLUMNS} columns"


def cells(row):
    """What a terminal shows of a row."""
    shown = re.sub(r"[`*]", "", rendered(row)).replace(r"\|", "/")
    return [cell.strip() for cell in shown.strip().strip("|").split("|")]


@pages
def test_tables_fit_a_terminal(page):
    is_wide = page.name == "architecture.md" or page.parent.name == "results"  # paths; deviations
    most = MAX_COLUMNS if is_wide else MAX_TABLE
    for table in TABLE.findall(prose(page)):
        head, _, *rows = table.splitlines()
        columns = zip(*map(cells, (head, *rows)), strict=True)
        widths = [max(map(len, column)) for column in columns]
        assert sum(widths) + 3 * len(widths) + 1 <= most, f"{head} is {widths} wide"


@pages
def test_code_is_not_wider_than_prose(page):
    blocks = "".join(FENCE.findall(page.read_text()))
    assert max(map(len, blocks.splitlines()), default=0) <= MAX_COLUMNS


@pages
def test_pages_use_the_words_of_the_field(page):
    old = sorted({phrase[0].lower() for phrase in OLD_PHRASES.finditer(prose(page))})
    assert not old, f"say it in the field's words: {old}"


def identifiers(path):
    """Every name that a file defines or uses, and the names of its folder and itself."""
    tree = ast.parse(path.read_text())
    yield path.stem
    for node in ast.walk(tree):
        for field in ("name", "id", "attr", "arg"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                yield name


def parts(name):
    """The words of an identifier, and the whole of it, in small letters."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)
    return {name.lower().strip("_"), *(word.lower() for word in words)}


def test_the_library_uses_the_words_of_the_field():
    old = {
        f"{path.relative_to(SRC)}: {name}"
        for path in SRC.rglob("*.py")
        for name in identifiers(path)
        if parts(name) & OLD_WORDS
    }
    assert not old


def headings(page):
    """The anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", rendered(t)).strip().lower().replace(" ", "-") for t in titles}


@pages
def test_links_lead_somewhere(page):
    text = prose(page)
    targets = [link[2] for link in LINK.finditer(text) if link[2]]
    targets += re.findall(r"^\[\w+\]: (\S+)$", text, re.MULTILINE)
    for target in targets:
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        there = page if not path else page.parent / path
        assert there.exists(), target
        assert not anchor or anchor in headings(there), target


@cache
def definitions():
    """What the library defines: names by module stem, and attributes by class, bases included."""
    modules, classes, bases = {}, {}, {}
    for path in SRC.rglob("*.py"):
        stem = path.parent.name if path.stem == "__init__" else path.stem
        tree = ast.parse(path.read_text())
        modules.setdefault(stem, set()).update(names_in(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, set()).update(names_in(node))
                bases.setdefault(node.name, set()).update(
                    b.id for b in node.bases if isinstance(b, ast.Name)
                )
    for package in SRC.rglob("__init__.py"):
        below = {p.stem for p in package.parent.iterdir() if p.suffix == ".py" or p.is_dir()}
        modules.setdefault(package.parent.name, set()).update(below)
    return modules, {name: inherited(name, classes, bases) for name in classes}


def names_in(scope):
    """The names that the body of a module or class binds, imports included."""
    found = set()
    for node in scope.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Assign):
            found.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return found


def inherited(name, classes, bases):
    """The attributes of a class and of those it is built on."""
    above = [inherited(base, classes, bases) for base in bases.get(name, ()) if base in classes]
    return classes[name].union(*above)


@cache
def settings():
    """The settings that exist, by section; a method's and a model's are those of all of them."""
    known = {name: set(section.model_fields) for name, section in list_sections().items()}
    for name, sections in CHOICES.items():
        known[name] = {key for section in sections.values() for key in section.model_fields}
    for factory in MODELS.values():
        known["model"] |= set(inspect.signature(factory).parameters)
    return {**known, "compare": set(CompareSection.model_fields)}


def test_all_settings_are_described():
    page = (ROOT / "docs" / "settings.md").read_text()
    described = set(re.findall(r"^\| `([a-z_.]+)` \|", page, re.MULTILINE))
    chosen = (
        "method.",
        "server_optimizer.",
        "attacks.",
    )  # they depend on a name, and have pages of their own
    expected = {name for name in list_settings() if not name.startswith(chosen)}
    expected |= {f"compare.{name}" for name in CompareSection.model_fields}
    assert expected == {name for name in described if not name.startswith(chosen)}


def missing(name):
    """Why a dotted name is none, or None if it is a setting, a class or something in a module."""
    first, *rest = name.split(".")
    modules, classes = definitions()
    if first in ("fq", "fedquilt") and rest:
        first, *rest = ("fedquilt", *rest)
    owners = [
        known
        for known in (settings().get(first), classes.get(first), modules.get(first))
        if known is not None
    ]
    variables = {"run": "Run", "context": "ClientContext"}  # as the documentation names them
    if first in variables:
        owners.append(classes[variables[first]])
    if not owners:
        return None  # of another project, or a file
    if rest and not any(rest[0] in known for known in owners):
        return f"{first} has no {rest[0]}"
    return missing(".".join(rest)) if len(rest) > 1 else None


def is_defined(name):
    """Whether some module defines a name, such as an alias of types."""
    return any(name in names for names in definitions()[0].values())


@pages
def test_names_in_the_text_exist(page):
    wrong = []
    for span in SPAN.findall(prose(page)):
        named = re.match(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", span)
        if named is None or re.search(
            r"\.(py|md|toml|npz|onnx|txt|json|jsonl|db|crt|key|pub|example|csv|svg|png)\b", span
        ):
            continue
        name = named[0]
        if re.fullmatch(r"(?:[A-Z][a-z0-9]+){2,}", name) and name == span:
            known = name in FOREIGN or is_defined(name)
            wrong += [] if known else [f"no class {name}"]
        elif "." in name and (why := missing(name)):
            wrong.append(why)
    assert not wrong


@pages
def test_files_in_the_text_exist(page):
    named = re.findall(r"`((?:[\w.-]+/)+[\w.-]*(?:\.py|\.md|/))`", prose(page))
    named += re.findall(
        r"\b((?:benchmarks|tests|examples|experiments)/[\w/.-]+\.\w+)", page.read_text()
    )
    gone = [p for p in named if not any((base / p).exists() for base in (ROOT, SRC, page.parent))]
    generated = (
        "build/docs/html/",
        "logs/",
        "state/",
        "app/",
        "flower/",
        "femnist/",
        "shakespeare/",
        "runs/",
        "build/",
        "model/",
    )
    assert not [
        path
        for path in gone
        if not path.startswith((*generated, "train/", "test/", "data/", "sent140/", "wikitext-2/"))
    ]
