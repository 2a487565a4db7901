"""Formats numbers for people."""

from __future__ import annotations

from collections.abc import Mapping


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
