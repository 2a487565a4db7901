"""Formats numbers and tables for people, and for the libraries they use."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedquilt.errors import ConfigError


def format_si(value: float, unit: str = "") -> str:
    """A number with an SI prefix.

    >>> format_si(39_974_912), format_si(26_888, "B"), format_si(12), format_si(980.182)
    ('39.97 M', '26.89 kB', '12', '980.2')
    """
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.2f} {prefix}{unit}"
    return f"{value:.4g} {unit}".rstrip()


def format_percent(value: float | None) -> str:
    """A fraction as a percentage; a dash for None.

    >>> format_percent(0.9838), format_percent(None)
    ('98.4%', '-')
    """
    return "-" if value is None else f"{100 * value:.1f}%"


def format_duration(seconds: float) -> str:
    """A time in hours, minutes and seconds.

    >>> format_duration(83.4), format_duration(7384)
    ('1:23', '2:03:04')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def list_values(title: str, values: Mapping[str, float], unit: str = "") -> str:
    """Lists named values in a sentence.

    >>> list_values("Sent", {"fedavg": 2e6, "heterofl": 5e5}, "B")
    'Sent: fedavg 2.00 MB, heterofl 500.00 kB.'
    """
    return f"{title}: {', '.join(f'{name} {format_si(v, unit)}' for name, v in values.items())}."


def format_count(count: int, noun: str) -> str:
    """Writes a number of things.

    >>> format_count(1, "round"), format_count(3, "epoch")
    ('1 round', '3 epochs')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def make_html_table(header: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> str:
    """A table in HTML, as notebooks show it.

    >>> make_html_table(["width", "<b>"], [["1", "2"]])
    '<table><tr><th>width</th><th>&lt;b&gt;</th></tr><tr><td>1</td><td>2</td></tr></table>'
    """

    def write(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    body = "".join(write(cells, "td") for cells in rows)
    return f"<table>{title}{write(header, 'th')}{body}</table>"


def make_data_frame(rows: Sequence[Mapping[str, Any]], index: str) -> Any:
    """Rows as a data frame of pandas, with one of the columns as its index."""
    try:
        import pandas
    except ImportError:
        raise ConfigError("to_pandas needs pandas: pip install pandas") from None
    frame = pandas.DataFrame(list(rows), columns=None if rows else [index])
    return frame.set_index(index)
