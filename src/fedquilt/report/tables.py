"""Tables for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from fedquilt.methods.method import SIZE_NAMES

Row = Mapping[str, Any]  # one size, as programs read it


def prefixed(value: float, unit: str = "") -> str:
    """A number with a decimal prefix.

    >>> prefixed(39_974_912), prefixed(26_888, "B"), prefixed(12), prefixed(980.182)
    ('39.97 M', '26.89 kB', '12', '980.2')
    """
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.2f} {prefix}{unit}"
    return f"{value:.4g} {unit}".rstrip()


def percent(value: float | None) -> str:
    """A share of one as a percentage.

    >>> percent(0.9838), percent(None)
    ('98.4%', '-')
    """
    return "-" if value is None else f"{100 * value:.1f}%"


COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "width": ("width", "{:g}".format),
    "robustness": ("robustness", "{:g}".format),
    "share": ("of the\nparameters", "{:.3f}".format),
    "params": ("parameters", "{:,}".format),
    "macs": ("MACs", prefixed),
    "bytes": ("upload", lambda value: prefixed(value, "B")),
    "memory": ("training memory", lambda value: prefixed(value, "B")),
    "perplexity": ("perplexity", lambda value: "-" if value is None else f"{value:,.1f}"),
    "accuracy": ("accuracy", percent),
    "local_accuracy": ("local\naccuracy", percent),
    "user_accuracy": ("user\naccuracy", percent),
    "personal_accuracy": ("own nets'\naccuracy", percent),
    "robust_accuracy": ("robust\naccuracy", percent),
}
ABOUT_DIALS = ("robustness", "robust_accuracy")
SIZES = {  # what the sizes of a method are, by their kind
    "width": "the fraction of the channels of every layer",
    "parameters": "the share of the whole model's parameters",
    "exits": "the share of the model's exits, from its first layers on",
    "bases": "the share of the base nets whose answers are mixed",
}
MEANINGS = {
    "bytes": "what a client of that size sends in a round",
    "accuracy": "on the server's held-out data",
    "local_accuracy": "on clients' own test data, answers only among the classes that each has",
    "user_accuracy": "on each client's own test data, mean over clients",
    "personal_accuracy": "of the nets that clients have for themselves, each on its own test data",
    "robust_accuracy": "under attack, on each client's own test data, mean over clients",
}


def sizes(rows: Sequence[Row]) -> Table:
    """One line per point, with the columns that have something to say."""
    names = shown_columns(rows)
    kind = rows[0].get("kind", "width") if rows else "width"
    return _tabled(
        head_of(names, kind), [[COLUMNS[name][1](row[name]) for name in names] for row in rows]
    )


def shown_columns(rows: Sequence[Row]) -> list[str]:
    """The columns that have something to say.

    Local and user accuracy are left out where they are no other than accuracy; upload and local
    accuracy where robustness is shown, and the latter where clients have nets of their own, so that
    eighty columns are enough.
    """
    names = [name for name in COLUMNS if any(row.get(name) is not None for row in rows)]
    hidden = {
        name
        for name in ("local_accuracy", "user_accuracy")
        if all(row.get(name) in (None, row.get("accuracy")) for row in rows)
    }
    if any(name in names for name in ABOUT_DIALS):
        hidden |= {"bytes", "local_accuracy"}
    if "personal_accuracy" in names:
        hidden.add("local_accuracy")
    return [name for name in names if name not in hidden]


def head_of(names: Sequence[str], kind: str = "width") -> list[str]:
    """The head of a table with these columns, of sizes of that kind."""
    return [SIZE_NAMES[kind] if name == "width" else COLUMNS[name][0] for name in names]


def legend(
    names: Sequence[str], kind: str = "width", accuracy_is: str = MEANINGS["accuracy"]
) -> list[str]:
    """What the columns mean, a line for each that needs one; ``accuracy_is``: of the first."""
    meanings = {"width": SIZES[kind], **MEANINGS, "accuracy": accuracy_is}
    heads = zip(names, head_of(names, kind), strict=True)
    told = {head.replace("\n", " "): meanings.get(name) for name, head in heads}
    return [f"{head}: {meaning}" for head, meaning in told.items() if meaning]


def domains(rows: Sequence[Row]) -> Table:
    """User accuracy in each domain, one column per size."""
    return _tabled(*by_domain(rows))


def by_domain(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The head and the lines of a table of user accuracy in each domain; no lines: not known.

    Where there is a robustness dial this is at its first point alone.
    """
    shown = [row for row in rows if row.get("group_accuracy")]
    shown = [row for row in shown if row.get("robustness") == shown[0].get("robustness")]
    names = dict.fromkeys(name for row in shown for name in row["group_accuracy"])
    kind = shown[0].get("kind", "width") if shown else "width"
    head = [SIZE_NAMES[kind], *(f"{row['width']:g}" for row in shown)]
    return head, [[n, *(percent(row["group_accuracy"].get(n)) for row in shown)] for n in names]


def _tabled(head: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE)
    for word in head:
        table.add_column(word, justify="right", no_wrap=True, vertical="bottom")
    for line in lines:
        table.add_row(*line)
    return table
