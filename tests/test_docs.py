"""Every command and code block of README and docs/ runs as typed, or says why it is not run.

A block is run unless the comment before it says otherwise:

    <!-- docs-test: slow -->                 takes many seconds: run by make test-docs only
    <!-- docs-test: parse: the reason -->    its commands are parsed, and their settings made
    <!-- docs-test: skip: the reason -->     nothing is done
    <!-- docs-test: page: parse: … -->       as above, for all blocks of the page

The blocks of a page are run in order, in one directory that looks like a clone after ``make demo``.
Each Python block is a program of its own. make test-docs starts a new Python for each; make test
forks them from one that has imported fedquilt, as it does with commands of ours.
"""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

from fedquilt.cli import app
from fedquilt.cli import train as train_command
from fedquilt.comparison.from_settings import split_settings
from fedquilt.comparison.variants import list_variants
from fedquilt.settings.load import flatten_settings, load_config, override_settings
from fedquilt.settings.resolve import build_method, build_model
from fedquilt.settings.toml import tomllib

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMENT = re.compile(r"<!-- docs-test: (page: )?(slow|parse|skip)(?:: (.+))? -->")
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
LANGUAGES = ("sh", "python", "toml", "text", "mermaid")
COMMANDS = typer.main.get_command(app).commands


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    mode: str  # run, slow, parse or skip
    reason: str | None

    def __str__(self):
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self):
        """The words of each command of ours."""
        lines = self.text.replace("\\\n", " ").splitlines()
        found = [shlex.split(line, comments=True) for line in lines if line.startswith("fedquilt ")]
        return [words[1:] for words in found]

    @property
    def is_commands_alone(self):
        """Whether it holds nothing but commands of ours, without help of the shell."""
        lines = [line for line in self.text.replace("\\\n", " ").splitlines() if line.strip()]
        return len(lines) == len(self.commands) and not re.search(r"[$|&;<>`~(]", self.text)


def blocks_of(page):
    text = page.read_text()
    whole = next((c for c in COMMENT.finditer(text) if c[1]), None)
    found = []
    for fence in FENCE.finditer(text):
        before = text[: fence.start()].rstrip("\n").rpartition("\n")[2]
        comment = COMMENT.fullmatch(before) or whole
        mode, reason = (comment[2], comment[3]) if comment else ("run", None)
        line = text.count("\n", 0, fence.start()) + 1
        found.append(Block(page, line, fence[1], fence[2], mode, reason))
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def pages_with(*modes):
    """Pages with blocks that are run in these modes."""
    languages = ("sh", "python")
    pages = {b.page: None for b in BLOCKS if b.mode in modes and b.language in languages}
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


def test_there_is_something_to_check():
    for page in ("README.md", "docs/data.md", "docs/deploy.md", "docs/results.md"):
        assert any(block.page == ROOT / page for block in BLOCKS), page
    assert sum(len(block.commands) for block in BLOCKS) > 30


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_says_what_it_is_and_why_it_is_not_run(block):
    assert block.language in LANGUAGES, f"start it with one of {LANGUAGES}"
    assert block.mode in ("run", "slow") or block.reason, "say why"
    assert block.text.count("fedquilt ") == 0 or block.language != "text"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_comment_and_no_fence_is_overlooked(page):
    text, blocks = page.read_text(), blocks_of(page)
    assert len(re.findall(r"^ *```", text, re.MULTILINE)) == 2 * len(blocks)
    comments = COMMENT.findall(text)
    assert text.count("docs-test") == len(comments)
    modes = [block.mode for block in blocks if block.mode != "run"]
    assert any(c[0] for c in comments) or [c[1] for c in comments] == modes


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "python"], ids=str)
def test_python_is_python(block):
    compile(block.text, str(block), "exec")


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "toml"], ids=str)
def test_toml_holds_settings(block):
    settings = tomllib.loads(block.text)
    if "compare" in settings:
        options, flat = split_settings(settings)
        named = {name: flatten_settings(own) for name, own in options.variants.items()}
        for variant in list_variants(flat, options.methods, named):
            build_method(load_config(override_settings({}, variant.settings)))
    elif block.mode != "skip":
        build_method(load_config(settings))


PARSED = [pytest.param(words, id=f"{b}-{n}") for b in BLOCKS for n, words in enumerate(b.commands)]


@pytest.mark.parametrize("words", PARSED)
def test_commands_are_known_and_their_settings_can_be_made(words, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    name, *arguments = words
    if "fedquilt.toml" in arguments:  # which init has written
        monkeypatch.chdir(tmp_path)
        COMMANDS["init"].main([], standalone_mode=False)
    if name != "train":
        COMMANDS[name].make_context(name, arguments)
        return
    made = []

    def note(changes, *others, **more):
        config = load_config(override_settings({}, changes))
        made.append((build_method(config), build_model(config)))

    for way in ("_start_new", "_resume_stopped", "_train_on_flower"):
        monkeypatch.setattr(train_command, way, note)
    COMMANDS[name].main(arguments, standalone_mode=False)
    assert len(made) == 1


SPANS = sorted(
    {
        (str(page.relative_to(ROOT)), span)
        for page in PAGES
        for span in re.findall(r"`(fedquilt (?:\w+)[^`]*)`", FENCE.sub("", page.read_text()))
    }
)


@pytest.mark.parametrize(("page", "span"), SPANS)
def test_commands_in_the_text_have_the_options_that_there_are(page, span):
    name, *arguments = shlex.split(span)[1:]
    known = {option for parameter in COMMANDS[name].params for option in parameter.opts}
    assert {word for word in arguments if word.startswith("--")} <= known | {"--help"}


@pytest.fixture
def clone(tmp_path):
    """A directory that has what a clone has after ``make demo``, as far as the pages need it."""
    for name in ("experiments", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


def fork(block, clone, python):
    """Runs a block as typed, in processes that need not import fedquilt."""
    if block.language == "python":
        (clone / "block.py").write_text(block.text)
        done = [python.run_program(clone / "block.py", clone)]
    elif block.is_commands_alone:
        done = [python.run_command(words, clone) for words in block.commands]
    else:
        run(block, clone)
        return
    for one in done:
        assert one.returncode == 0, f"{block} {one.args}\n{one.stdout}\n{one.stderr}"


def run(block, clone):
    """Runs a block as typed."""
    if block.language == "python":
        (clone / "block.py").write_text(block.text)
        command = [sys.executable, "-W", "error", "block.py"]
    else:
        command = ["bash", "-euo", "pipefail", "-c", block.text]
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        command,
        cwd=clone,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"


def blocks_to_run(page, *modes):
    return [b for b in blocks_of(page) if b.mode in modes and b.language in ("sh", "python")]


@pytest.mark.timeout(1200)  # as many seconds as a busy machine may need
@pages_with("run")
def test_quick_blocks_run_as_typed(page, clone, forking_python):
    for block in blocks_to_run(page, "run"):
        fork(block, clone, forking_python)


@pytest.mark.docs
@pytest.mark.timeout(600)  # the promise of the page, kept by a busy machine as well
def test_from_own_data_to_a_compared_table_are_five_commands_and_ten_minutes(clone):
    page = ROOT / "docs" / "compare.md"
    text = page.read_text()
    start, end = (
        text[: text.index(title)].count("\n") for title in ("## Ten minutes", "## In Python")
    )
    tutorial = [block for block in blocks_of(page) if start < block.line <= end]
    shell = "\n".join(block.text for block in tutorial if block.language == "sh")
    assert len([line for line in shell.replace("\\\n", " ").splitlines() if line.strip()]) == 5
    for block in tutorial:
        if block.mode != "skip":
            run(block, clone)
    table = (clone / "comparisons" / "my" / "table.csv").read_text()
    assert all(f"\n{method}," in table for method in ("heterofl", "fjord", "splitmix"))
    assert (clone / "small.onnx").stat().st_size > 0


@pytest.mark.docs
@pytest.mark.timeout(3 * 3600)
@pages_with("run", "slow")
def test_all_blocks_run_as_typed(page, clone):
    for block in blocks_to_run(page, "run", "slow"):
        run(block, clone)
