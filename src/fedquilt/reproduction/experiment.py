"""A table or figure of a paper: the settings of its rows, its columns, and the paper's values."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from fedquilt.comparison.scoring import Scoring
from fedquilt.errors import ConfigError, describe_unknown
from fedquilt.settings.load import flatten_settings
from fedquilt.settings.schema import Section
from fedquilt.settings.toml import read_toml

FILE = "experiment.toml"
SCALES = {"%": 100.0, "MB": 1e-6}


class Column(Section):
    """What is read of a finished run."""

    name: str
    """Its title."""
    score: str = "accuracy"
    """The score, a cost of the size, or what the run spent: bytes_up, bytes_down, macs, seconds."""
    size: float | None = None
    """The size of the model. Left out: what ``over`` makes of all sizes."""
    robustness: float | None = None
    """The point of the robustness dial, of those that ``scoring`` names."""
    over: Literal["worst", "mean", "largest"] = "largest"
    """What is made of all sizes: the lowest value, the mean, or the value of the largest size."""
    round: int | None = None
    """The round whose evaluation counts. Left out: the finished model."""
    unit: str = "%"
    """With %, a fraction is written in percent, and with MB, bytes in millions. Otherwise the value
    is written as it is."""
    is_optional: bool = False
    """Whether runs may lack this score; they have a dash."""

    @property
    def scale(self) -> float:
        """What values are multiplied by when they are written."""
        return SCALES.get(self.unit, 1.0)


class Curve(Section):
    """What is drawn over rounds, a line for each row: the evaluations on the way."""

    name: str
    """The title of the panel."""
    score: str = "accuracy"
    """The score."""
    size: float | None = None
    """The size of the model. Left out: the largest."""


class ExperimentRow(Section):
    """Runs that differ in their seeds alone."""

    name: str
    """What it is called in the table."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """What differs from the settings of all rows."""
    scoring: Scoring | None = None
    """How these runs are scored. Left out: as all rows."""
    paper: dict[str, float] = Field(default_factory=dict)
    """The paper's values by column."""
    note: str = ""
    """Why it differs from the paper, as far as that is known."""


class Contrast(Section):
    """Two rows whose difference is what the table is about."""

    row: str
    """The row."""
    than: str
    """The row that it is compared with, seed by seed."""


class Experiment(Section):
    """A table or a figure."""

    title: str
    """The paper, the table or figure, and what it is about."""
    hours: float = Field(gt=0)
    """About how long all runs take on one core."""
    differences: tuple[str, ...] = ()
    """What is not as in the paper, a sentence each."""
    note: str = "why is not known"
    """Why values differ from the paper's, for rows that do not say."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """The seeds of each row."""
    settings: dict[str, Any]
    """The settings of all rows."""
    quick: dict[str, Any] = Field(default_factory=dict)
    """What a small version changes."""
    scoring: Scoring | None = None
    """How finished runs are scored. Left out: as every run is at its end."""
    columns: tuple[Column, ...] = Field(min_length=1)
    """The columns."""
    curves: tuple[Curve, ...] = ()
    """The panels of a picture over rounds; they need run.evaluate_every."""
    rows: tuple[ExperimentRow, ...] = Field(min_length=1)
    """The rows."""
    contrasts: tuple[Contrast, ...] = ()
    """Rows whose differences are listed, seed by seed."""

    def list_settings(self, row: ExperimentRow, seed: int, *, quick: bool) -> dict[str, Any]:
        """The settings of a run by dotted name; a small version changes rows, too."""
        flat = {**_flatten(self.settings), **_flatten(row.settings)}
        return {**flat, **(_flatten(self.quick) if quick else {}), "seed": seed}


def load_experiment(folder: Path) -> Experiment:
    """Reads the experiment of a folder; an error names the file, and what is wrong in it."""
    path = folder / FILE
    try:
        experiment = Experiment.model_validate(read_toml(path))
    except ValidationError as problem:
        error = problem.errors()[0]
        place = ".".join(map(str, error["loc"]))
        raise ConfigError(f"{path}: '{place}': {error['msg']}") from None
    columns = [column.name for column in experiment.columns]
    for row in experiment.rows:
        for name in row.paper:
            if name not in columns:
                raise ConfigError(
                    f"{path}: row '{row.name}': {describe_unknown('column', name, columns)}"
                )
    rows = [row.name for row in experiment.rows]
    for contrast in experiment.contrasts:
        for name in (contrast.row, contrast.than):
            if name not in rows:
                raise ConfigError(f"{path}: contrast: {describe_unknown('row', name, rows)}")
    return experiment


def find_experiments(folder: Path) -> dict[str, Path]:
    """The folders of all experiments by name, such as ``heterofl/table-4``."""
    found = sorted(path.parent for path in folder.glob(f"*/*/{FILE}"))
    return {path.relative_to(folder).as_posix(): path for path in found}


def choose_experiments(names: list[str], known: Mapping[str, Path]) -> dict[str, Path]:
    """Experiments by name; a paper's name means all of its experiments.

    >>> known = {"nefl/table-2": Path("a"), "nefl/table-3": Path("b"), "apfl/table-1": Path("c")}
    >>> list(choose_experiments(["nefl"], known))
    ['nefl/table-2', 'nefl/table-3']
    """
    chosen: dict[str, Path] = {}
    for given in names:
        name = given.strip("/")
        own = {n: path for n, path in known.items() if name in (n, n.partition("/")[0])}
        if not own:
            papers = dict.fromkeys(n.partition("/")[0] for n in known)
            raise ConfigError(describe_unknown("experiment", given, [*known, *papers]))
        chosen |= own
    return chosen


def choose_rows(experiment: Experiment, names: list[str]) -> list[str]:
    """Rows by name; a pattern such as ``LOW*`` means all rows that match."""
    known = [row.name for row in experiment.rows]
    chosen: list[str] = []
    for name in names:
        own = [one for one in known if one == name or fnmatchcase(one, name)]
        if not own:
            raise ConfigError(describe_unknown("row", name, known))
        chosen += own
    return chosen


def _flatten(settings: Mapping[str, Any]) -> dict[str, Any]:
    return flatten_settings(settings)
