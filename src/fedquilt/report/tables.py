"""Tables of scores and costs for people, laid out for a console of 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from fedquilt.formatting import format_percent, format_si
from fedquilt.methods.method import SIZE_NAMES

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
    "accuracy": ("accuracy", format_percent),
    "local_accuracy": ("local\naccuracy", format_percent),
    "user_accuracy": ("user\naccuracy", format_percent),
    "personal_accuracy": ("personal\naccuracy", format_percent),
    "robust_accuracy": ("robust\naccuracy", format_percent),
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
    "accuracy": "on the server's held-out data",
    "local_accuracy": "on clients' own test data, among the classes of each client",
    "user_accuracy": "on each client's own test data, mean over clients",
    "personal_accuracy": "of clients' personal models, each on its own test data",
    "robust_accuracy": "under attack, on each client's own test data, mean over clients",
}


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

    Local and user accuracy are left out where they are equal to accuracy. Local accuracy and
    upload are left out beside robustness, and local accuracy beside personal accuracy.
    """
    names = [name for name in COLUMNS if any(row.get(name) is not None for row in rows)]
    hidden = {
        name
        for name in ("local_accuracy", "user_accuracy")
        if all(row.get(name) in (None, row.get("accuracy")) for row in rows)
    }
    if "robustness" in names or "robust_accuracy" in names:
        hidden |= {"bytes", "local_accuracy"}
    if "personal_accuracy" in names:
        hidden.add("local_accuracy")
    return [name for name in names if name not in hidden]


def make_header(names: Sequence[str], kind: str = "width") -> list[str]:
    """The header of a table with these columns; ``kind`` is what sizes are fractions of."""
    return [SIZE_NAMES[kind] if name == "width" else COLUMNS[name][0] for name in names]


def make_legend(
    names: Sequence[str], kind: str = "width", accuracy_is: str = MEANINGS["accuracy"]
) -> list[str]:
    """One line for each column that needs an explanation; ``accuracy_is`` explains accuracy."""
    meanings = {"width": SIZES[kind], **MEANINGS, "accuracy": accuracy_is}
    headers = zip(names, make_header(names, kind), strict=True)
    texts = {header.replace("\n", " "): meanings.get(name) for name, header in headers}
    return [f"{header}: {meaning}" for header, meaning in texts.items() if meaning]


def make_domain_table(rows: Sequence[Row]) -> Table:
    """A table of user accuracy in each domain, with one column per size."""
    return make_table(*make_domain_rows(rows))


def make_domain_rows(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of user accuracy in each domain; no rows if it is not known.

    Where sizes have several robustness levels, only the first of them is shown.
    """
    shown = [row for row in rows if row.get("group_accuracy")]
    shown = [row for row in shown if row.get("robustness") == shown[0].get("robustness")]
    domains = dict.fromkeys(name for row in shown for name in row["group_accuracy"])
    kind = shown[0].get("kind", "width") if shown else "width"
    header = [SIZE_NAMES[kind], *(f"{row['width']:g}" for row in shown)]
    return header, [
        [name, *(format_percent(row["group_accuracy"].get(name)) for row in shown)]
        for name in domains
    ]


def _make_cells(rows: Sequence[Row], names: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    kind = rows[0].get("kind", "width") if rows else "width"
    cells = [[COLUMNS[name][1](row[name]) for name in names] for row in rows]
    return make_header(names, kind), cells


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
