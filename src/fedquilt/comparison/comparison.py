"""A finished comparison: its rows, what they mean, and how to pass them on."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedquilt.comparison.advice import write_advice, write_notes
from fedquilt.comparison.picture import draw_pareto
from fedquilt.comparison.render import make_sections, to_html, to_markdown
from fedquilt.comparison.table import Analysis, Estimate, Row, flatten_row
from fedquilt.errors import CorruptFileError
from fedquilt.files import write_text
from fedquilt.formatting import make_data_frame
from fedquilt.learning.metric import MetricInfo

FORMAT = 1
ESTIMATES = ("mean", "worst")


@dataclass(frozen=True)
class Comparison:
    """What came of a comparison.

    Args:
        metric: The score that decided.
        analysis: The rows, the best first.
        left_out: Variants that do not fit, and their reasons.
        about: What was compared: settings, seeds, code and environment.
        folder: Where the runs are; None: not known.

    >>> row = Row("heterofl", tiers={"1": Estimate(0.8)}, mean=Estimate(0.8))
    >>> table = Comparison(MetricInfo(is_fraction=True), Analysis((row,)))
    >>> [row["mean_accuracy"] for row in table]
    [0.8]
    """

    metric: MetricInfo
    analysis: Analysis
    left_out: Mapping[str, str] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None

    @property
    def rows(self) -> tuple[Row, ...]:
        """One row for each variant, the best first."""
        return self.analysis.rows

    @property
    def advice(self) -> str:
        """Which variant to take, and why."""
        return write_advice(self.rows, self.metric)

    @property
    def notes(self) -> list[str]:
        """What a reader must know to trust the table."""
        return write_notes(self.analysis, self.metric)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The rows as plain values, one after another."""
        return iter(self.to_dicts())

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"{self.to_markdown()}\n{self.advice}"

    def _repr_html_(self) -> str:
        return f"{to_html(make_sections(self.analysis, self.metric))}<p>{self.advice}</p>"

    def to_dicts(self) -> list[dict[str, Any]]:
        """The rows as plain values by name."""
        return [flatten_row(row, self.metric) for row in self.rows]

    def to_pandas(self) -> Any:
        """The rows as a pandas data frame, with the variants as its index."""
        return make_data_frame(self.to_dicts(), "variant")

    def to_markdown(self) -> str:
        """The rows as tables in Markdown."""
        return to_markdown(make_sections(self.analysis, self.metric))

    def to_csv(self) -> str:
        """The rows as comma-separated values, with a header."""
        rows, text = self.to_dicts(), io.StringIO()
        names = list(dict.fromkeys(name for row in rows for name in row))
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    def to_document(self) -> dict[str, Any]:
        """The whole comparison as JSON."""
        return {
            "format": FORMAT,
            "metric": asdict(self.metric),
            "advice": self.advice,
            "notes": self.notes,
            "left_out": dict(self.left_out),
            "about": dict(self.about),
            **json.loads(json.dumps(asdict(self.analysis))),
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Comparison:
        """The comparison that ``to_document`` wrote."""
        try:
            rows = tuple(_read_row(row) for row in document["rows"])
            analysis = Analysis(rows, document["target"], document["amounts"])
            metric = MetricInfo(**document["metric"])
            return cls(metric, analysis, document["left_out"], document["about"])
        except (KeyError, TypeError, ValueError) as problem:
            raise CorruptFileError(
                f"this is not a comparison that this fedquilt writes ({problem}); compare again"
            ) from problem

    def draw(self, path: str | Path) -> Path:
        """Draws the mean against bytes and MACs, with the Pareto front, into .png or .svg."""
        return draw_pareto(self.analysis, self.metric, Path(path))

    @property
    def best_run(self) -> Path | None:
        """The directory of the best variant's first run; None if runs were not kept."""
        best = next((row for row in self.rows if row.is_best and row.runs), None)
        if best is None or self.folder is None:
            return None
        return self.folder / "runs" / best.runs[0]

    def save(self, folder: str | Path) -> None:
        """Writes comparison.json, table.md, table.csv, pareto.png and pareto.svg into a folder.

        ``best`` in it is a link to the best variant's first run.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        document = json.dumps(self.to_document(), indent=1)
        write_text(folder / "comparison.json", document + "\n")
        text = "\n\n".join([self.to_markdown().strip(), self.advice, *self.notes])
        write_text(folder / "table.md", text + "\n")
        write_text(folder / "table.csv", self.to_csv())
        for suffix in ("png", "svg"):
            self.draw(folder / f"pareto.{suffix}")
        if self.best_run is not None and self.best_run.parent.parent == folder:
            with suppress(OSError):  # a system without links
                (folder / "best").unlink(missing_ok=True)
                (folder / "best").symlink_to(self.best_run.relative_to(folder))


def _read_row(document: Mapping[str, Any]) -> Row:
    values = dict(document)

    def read(estimate: Mapping[str, Any] | None) -> Estimate | None:
        return None if estimate is None else Estimate(**estimate)

    for name in ESTIMATES:
        values[name] = read(values[name])
    for name in ("tiers", "at_equal"):
        values[name] = {label: read(estimate) for label, estimate in values[name].items()}
    values |= {name: tuple(values.get(name, ())) for name in ("seeds", "runs")}
    return Row(**values)
