"""Pages of the gallery: each example with its question, its code and what it prints."""

from __future__ import annotations

import ast
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from docsite.links import ROOT, Page

EXAMPLES = ROOT / "examples"
APP_FILES = ("pyproject.toml", "quilt/app.py")


def read_example(path: Path) -> tuple[str, str, str]:
    """The question, the explanation and the code of an example."""
    text = path.read_text()
    doc = ast.get_docstring(ast.parse(text)) or ""
    question, _, explanation = doc.partition("\n")
    code = text.split('"""', 2)[2].strip()
    return question.replace("``", "`"), explanation.strip().replace("``", "`"), code


def make_gallery(outputs: Mapping[str, str]) -> list[Page]:
    """A page for each example, and one that lists them by their questions.

    Args:
        outputs: What examples printed, by name.
    """
    examples = sorted(EXAMPLES.glob("*.py"))
    pages = [make_example_page(path, outputs.get(path.stem)) for path in examples]
    links = [f"- [{read_example(path)[0]}]({path.stem}.md)" for path in examples]
    links.append("- [How do I make an app for Flower's own commands?](flower_app.md)")
    text = (
        "# Examples\n\n"
        "For everyone who has a question that a short program can answer. Each example runs as it\n"
        "is on a laptop, without a download. The tests run all of them.\n\n"
        + "\n".join(links)
        + "\n"
    )
    return [Page("gallery/index.md", text), *pages, make_app_page()]


def make_example_page(path: Path, output: str | None) -> Page:
    """The page of one example."""
    question, explanation, code = read_example(path)
    parts = [f"# {question}", explanation, f"```python\n{code}\n```"]
    if output:
        parts += ["It prints:", f"```text\n{output.rstrip()}\n```"]
    parts.append(f"Run it with `python examples/{path.name}`.")
    return Page(f"gallery/{path.stem}.md", "\n\n".join(parts) + "\n")


def make_app_page() -> Page:
    """The page of the example that is an app of Flower."""
    parts = [
        "# How do I make an app for Flower's own commands?",
        "A Flower app is a folder with a `pyproject.toml` and two objects. See\n"
        "[From one machine to many](../deploy.md) for runs that need no app of your own.",
    ]
    for name in APP_FILES:
        text = (EXAMPLES / "flower_app" / name).read_text().strip()
        language = "toml" if name.endswith("toml") else "python"
        parts += [f"`examples/flower_app/{name}`:", f"```{language}\n{text}\n```"]
    return Page("gallery/flower_app.md", "\n\n".join(parts) + "\n")


def run_examples(cache: Path) -> dict[str, str]:
    """What each example prints. An example is run again if it or the library has changed."""
    cache.mkdir(parents=True, exist_ok=True)
    library = hashlib.sha256()
    for path in sorted((ROOT / "src").rglob("*.py")):
        library.update(path.read_bytes())
    outputs = {}
    for path in sorted(EXAMPLES.glob("*.py")):
        key = hashlib.sha256(library.digest() + path.read_bytes()).hexdigest()[:16]
        stored = cache / f"{path.stem}-{key}.txt"
        if not stored.exists():
            stored.write_text(run_example(path))
        outputs[path.stem] = stored.read_text()
    return outputs


def run_example(path: Path) -> str:
    """Runs one example in an empty folder, with warnings as errors."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-W", "error", str(path)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise RuntimeError(f"{path.name} failed:\n{done.stderr}")
    return done.stdout
