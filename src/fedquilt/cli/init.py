"""``fedquilt init``: files to start with, for your own data."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from jinja2 import Environment, PackageLoader, StrictUndefined

from fedquilt.cli.console import make_console, print_json, print_lines
from fedquilt.cli.options import AsJson
from fedquilt.cli.program import find_python, write_command
from fedquilt.data import Dataset
from fedquilt.data.load import DATASETS, load_dataset
from fedquilt.errors import ConfigError
from fedquilt.files import write_text
from fedquilt.settings.json_schema import make_json_schema
from fedquilt.settings.template import make_template

EXAMPLE = "fedquilt init my-project --data my-data.npz"
SCRIPT, CONFIG, SCHEMA = "train.py", "fedquilt.toml", "fedquilt.schema.json"
MAX_CLIENTS = 10  # fewer if there are fewer examples
HEAD = (
    "All settings are described in docs/settings.md. Run this file, from its folder, with:",
    "    fedquilt train fedquilt.toml",
    "Lines that start with '# name = value' are defaults or examples; remove the # to set them.",
)


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="Where to write; this folder if left out.")
    ] = Path(),
    data: Annotated[
        str, typer.Option(help="Your data: an .npz file, a folder, or a known name.")
    ] = "digits",
    as_json: AsJson = False,
) -> None:
    """Write a commented TOML file and a Python file to start with, for your own data.

    An .npz file has x_train, y_train, x_test and y_test. The Python file shows where your own data
    and model go; both files run as they are.
    """
    texts = make_files(data, folder)
    for name in texts:
        if (folder / name).exists():
            raise ConfigError(
                f"{folder / name} exists and is not overwritten; choose another folder: "
                "fedquilt init DIR"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_text(folder / name, text)
    except OSError as problem:
        raise ConfigError(f"{folder} cannot be written to ({problem})") from problem
    if as_json:
        print_json({"files": [str(folder / name) for name in texts]})
        return
    python = find_python(folder)
    commands = [write_command(["train", CONFIG], folder), shlex.join([python, SCRIPT])]
    enter = [] if folder == Path() else [shlex.join(["cd", str(folder)])]
    print_lines(
        make_console(),
        *(f"wrote {folder / name}" for name in texts),
        "",
        "Next:",
        *(f"  {line}" for line in (*enter, *commands)),
    )


def make_files(data: str, folder: Path) -> dict[str, str]:
    """The texts of the files by name; the data are read once, to choose a model that fits."""
    dataset = load_dataset(data)
    source = data if data in DATASETS else str(Path(data).expanduser().resolve())
    if source != data and Path(source).is_relative_to(folder.resolve()):
        source = str(Path(source).relative_to(folder.resolve()))
    chosen = {
        "rounds": 10,
        "data.source": source,
        "data.clients": min(MAX_CLIENTS, len(dataset.train)),
        "data.budgets": [1.0, 0.5, 0.25],
        "model.name": f"{SCRIPT}:make_model",
        "method.name": "heterofl",
        "local_training.lr": 0.05,
        "local_training.epochs": 2,
    }
    environment = Environment(
        loader=PackageLoader("fedquilt.cli"), undefined=StrictUndefined, keep_trailing_newline=True
    )
    template = environment.get_template(f"{SCRIPT}.jinja")
    return {
        CONFIG: make_template(chosen, HEAD),
        SCRIPT: template.render(
            source=json.dumps(source), clients=chosen["data.clients"], **_describe_inputs(dataset)
        ),
        SCHEMA: json.dumps(make_json_schema(), indent=1) + "\n",
    }


def _describe_inputs(dataset: Dataset) -> dict[str, Any]:
    """What a model must know of its inputs."""
    shape, facts = dataset.shape, {"num_classes": dataset.num_classes}
    if dataset.num_tokens is not None:
        return {**facts, "kind": "text", "num_tokens": dataset.num_tokens}
    if len(shape) == 3:
        return {**facts, "kind": "image", "channels": shape[0]}
    return {**facts, "kind": "vector", "num_features": math.prod(shape)}
