"""Tables of scores and costs for people, laid out for a console of 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from fedquilt.evaluation.scores import name_in_json
from fedquilt.evaluation.summary import name_score
from fedquilt.formatting import format_percent, format_si
from fedquilt.learning.metric import MetricInfo
from fedquilt.learning.task import CLASSIFICATION
from fedquilt.methods.method import SIZE_NAMES
from fedquilt.runs.attacks import BACKDOOR_SUCCESS

Row = Mapping[str, Any]  # one size, as in JSON

MAX_WIDTH = 80
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {  # header and format
    "width": ("width", "{:g}".format),
    "robustness": ("robustness", "{:g}".format),
    "share": ("fraction of\nparameters", "{:.3f}".format),
    "params": ("parameters", "{:,}".format),
    "macs": ("MACs", format_si),
    "bytes": ("upload", lambda value: format_si(value, "B")),
    "memory": ("training\nmemory", lambda value: format_si(value, "B")),
    "perplexity": ("perplexity", lambda value: "-" if value is None else f"{value:,.1f}"),
}
DIALS = ("width", "robustness")  # which name a row
COSTS = ("share", "params", "macs", "bytes", "memory")
SIZES = {  # what the sizes of a method are, by their kind
    "width": "the fraction of the channels of every layer",
    "parameters": "the fraction of the full model's parameters",
    "exits": "the fraction of the model's exits, counted from the input",
    "bases": "the fraction of the base networks whose logits are averaged",
}
MEANINGS = {
    "bytes": "what a client of that size sends in a round",
    "value": "on the server's held-out data",
    "local_value": "on clients' own test data, among the classes of each client",
    "user_value": "on each client's own test data, mean over clients",
    "personal_value": "of clients' own models or own statistics, each on its own test data",
    "robust_value": "under attack, on each client's own test data, mean over clients",
}
VALUES = tuple(name for name in MEANINGS if name != "bytes")  # of the metric


@dataclass(frozen=True)
class Column:
    """A column of a table of sizes."""

    header: str
    format: Callable[[Any], str]
    meaning: str | None = None


KNOWN_METRICS = {  # that come on top of a task's own
    BACKDOOR_SUCCESS: Column(
        "backdoor\nsuccess",
        format_percent,
        "test images of other classes that are taken for the target once they have the trigger",
    )
}


def list_columns(rows: Sequence[Row]) -> dict[str, Column]:
    """The columns that rows may have, by their names in JSON: costs, and values of the metric."""
    given = next((row["metric"] for row in rows if "metric" in row), None)
    metric = CLASSIFICATION.metric if given is None else MetricInfo(**given)
    columns = {name: Column(*about, MEANINGS.get(name)) for name, about in COLUMNS.items()}
    for name in VALUES:
        header = name_score(name, metric).replace(" ", "\n")
        columns[name_in_json(name, metric)] = Column(header, metric.format, MEANINGS[name])
    others = dict.fromkeys(name for row in rows for name in row.get("metrics") or ())
    for name in others:
        if name != metric.name:
            known = KNOWN_METRICS.get(name, Column(name, _format_number))
            columns[f"{METRICS_KEY}.{name}"] = known
    return columns


METRICS_KEY = "metrics"


def _format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def get_cell(row: Row, name: str) -> Any:
    """What a row has in a column."""
    if name.startswith(f"{METRICS_KEY}."):
        return (row.get(METRICS_KEY) or {}).get(name.removeprefix(f"{METRICS_KEY}."))
    return row.get(name)


def make_size_table(rows: Sequence[Row]) -> RenderableType:
    """A table with one row per size; two tables, of costs and scores, if one is too wide."""
    names = select_columns(rows)
    if _measure_width(rows, names) <= MAX_WIDTH:
        return make_table(*_make_cells(rows, names))
    dials = [name for name in names if name in DIALS]
    costs = [name for name in names if name in COSTS]
    scores = [name for name in names if name not in (*DIALS, *COSTS)]
    return Group(*(make_table(*_make_cells(rows, [*dials, *part])) for part in (costs, scores)))


def select_columns(rows: Sequence[Row]) -> list[str]:
    """The columns that have values, and that differ from others.

    Local and user values are left out where they are equal to the value on the server's data. Local
    ones and upload are left out beside robustness, and local ones beside personal ones.
    """
    columns = list_columns(rows)
    names = [name for name in columns if any(get_cell(row, name) is not None for row in rows)]
    by_field = {meaning: name for name, column in columns.items() if (meaning := column.meaning)}
    main, local, user, personal, robust = (by_field[MEANINGS[name]] for name in VALUES)
    hidden = {
        name
        for name in (local, user)
        if all(row.get(name) in (None, row.get(main)) for row in rows)
    }
    if "robustness" in names or robust in names:
        hidden |= {"bytes", local}
    if personal in names:
        hidden.add(local)
    return [name for name in names if name not in hidden]


def make_header(rows: Sequence[Row], names: Sequence[str], kind: str = "width") -> list[str]:
    """The header of a table with these columns; ``kind`` is what sizes are fractions of."""
    columns = list_columns(rows)
    return [SIZE_NAMES[kind] if name == "width" else columns[name].header for name in names]


def make_legend(
    rows: Sequence[Row],
    names: Sequence[str],
    kind: str = "width",
    value_is: str = MEANINGS["value"],
) -> list[str]:
    """One line for each column that needs an explanation; ``value_is`` explains the metric's."""
    columns, lines = list_columns(rows), []
    for name, header in zip(names, make_header(rows, names, kind), strict=True):
        meaning = SIZES[kind] if name == "width" else columns[name].meaning
        meaning = value_is if meaning == MEANINGS["value"] else meaning
        if meaning:
            lines.append(f"{header.replace(chr(10), ' ')}: {meaning}")
    return lines


def make_domain_table(rows: Sequence[Row]) -> Table:
    """A table of the metric of users in each domain, with one column per size."""
    return make_table(*make_domain_rows(rows))


def make_domain_rows(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of users' values in each domain; no rows if they are not known.

    Where sizes have several robustness levels, only the first of them is shown.
    """
    given = next((row["metric"] for row in rows if "metric" in row), None)
    metric = CLASSIFICATION.metric if given is None else MetricInfo(**given)
    key = name_in_json("group_values", metric)
    shown = [row for row in rows if row.get(key)]
    shown = [row for row in shown if row.get("robustness") == shown[0].get("robustness")]
    domains = dict.fromkeys(name for row in shown for name in row[key])
    kind = shown[0].get("kind", "width") if shown else "width"
    header = [SIZE_NAMES[kind], *(f"{row['width']:g}" for row in shown)]
    return header, [
        [name, *(metric.format(row[key].get(name)) for row in shown)] for name in domains
    ]


def _make_cells(rows: Sequence[Row], names: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    kind = rows[0].get("kind", "width") if rows else "width"
    columns = list_columns(rows)
    cells = [[columns[name].format(get_cell(row, name)) for name in names] for row in rows]
    return make_header(rows, names, kind), cells


def _measure_width(rows: Sequence[Row], names: Sequence[str]) -> int:
    """The characters of a table's row: two of padding and one of border for each column."""
    header, cells = _make_cells(rows, names)
    columns = zip(header, *cells, strict=True)
    widths = [max(len(line) for cell in column for line in cell.split("\n")) for column in columns]
    return sum(widths) + 3 * len(widths) + 1


def make_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table of texts, without lines between rows."""
    table = Table(box=box.SIMPLE)
    for title in header:
        table.add_column(title, justify="right", no_wrap=True, vertical="bottom")
    for row in rows:
        table.add_row(*row)
    return table
