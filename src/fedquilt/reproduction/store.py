"""Where values of experiments are stored: a small JSON file each, and a picture for each curve."""

from __future__ import annotations

import json
from pathlib import Path

from fedquilt.errors import CorruptFileError
from fedquilt.figures.drawing import draw_figure
from fedquilt.files import write_text
from fedquilt.reproduction.experiment import Experiment
from fedquilt.reproduction.table import Reproduction, make_figures


def store(experiment: Experiment, done: Reproduction, folder: Path) -> None:
    """Writes the values of an experiment, and draws its curves."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(get_path(folder, done.name), json.dumps(done.to_document(), indent=1) + "\n")
    pictures = list_pictures(experiment, done.name)
    for figure, picture in zip(make_figures(experiment, done), pictures, strict=True):
        draw_figure(figure, folder / picture)


def load(folder: Path, name: str) -> Reproduction | None:
    """The stored values of an experiment; None if it was never stored."""
    path = get_path(folder, name)
    if not path.is_file():
        return None
    try:
        return Reproduction.from_document(json.loads(path.read_text()))
    except ValueError as problem:
        raise CorruptFileError(f"{path} is no JSON ({problem}); reproduce again") from problem


def get_path(folder: Path, name: str) -> Path:
    """The file with the values of an experiment."""
    return folder / f"{_flatten(name)}.json"


def list_pictures(experiment: Experiment, name: str) -> list[str]:
    """The names of the pictures of an experiment's curves."""
    return [f"{_flatten(name)}-{i}.svg" for i in range(1, len(experiment.curves) + 1)]


def _flatten(name: str) -> str:
    return name.replace("/", "-")
