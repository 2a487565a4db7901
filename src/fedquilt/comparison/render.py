"""Rows of a comparison as text: tables that fit a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedquilt.comparison.metric import format_score
from fedquilt.comparison.table import Analysis, Estimate, Row
from fedquilt.formatting import format_si, make_html_table
from fedquilt.learning.metric import MetricInfo
from fedquilt.settings.compare import RESOURCES


@dataclass(frozen=True)
class Section:
    """One of the tables: its title, its header and its cells."""

    title: str
    header: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]


def make_sections(analysis: Analysis, metric: MetricInfo) -> list[Section]:
    """The tables: scores by budget, the comparison with the best, equal costs, costs, speed."""
    rows = [row for row in analysis.rows if row.mean is not None]
    unit = " in %" if metric.is_fraction else ""
    tiers = list(dict.fromkeys(label for row in rows for label in row.tiers))
    scores = Section(
        f"{metric.label}{unit}, by the budget of a device",
        ("", *tiers),
        tuple(
            (row.variant, *(_format(metric, row.tiers.get(label)) for label in tiers))
            for row in rows
        ),
    )
    summary = Section(
        f"{metric.label}{unit}, over budgets, and against the best",
        ("", "mean", "worst", "behind best", "p"),
        tuple(_list_summary(row, metric) for row in rows),
    )
    equal = Section(
        f"mean {metric.label}{unit}, at equal cost",
        ("", "equal bytes", "equal MACs", "equal seconds"),
        tuple(
            (
                row.variant,
                *(_format_partial(metric, row, row.at_equal.get(name)) for name in RESOURCES),
            )
            for row in rows
        ),
    )
    costs = Section(
        "costs of a run, all clients together, and the memory of the largest size",
        ("", "rounds", "received", "sent", "MACs", "memory"),
        tuple(_list_costs(row) for row in rows),
    )
    speed = Section(
        "seconds on simulated devices, and what it took to reach the target",
        ("", "seconds", "rounds to target", "bytes to target"),
        tuple(_list_speed(row) for row in rows),
    )
    return [scores, summary, equal, costs, speed]


def _list_summary(row: Row, metric: MetricInfo) -> tuple[str, ...]:
    behind = "best" if row.is_best else format_score(metric, row.difference, row.interval)
    return (
        row.variant,
        _format_partial(metric, row, row.mean),
        _format_partial(metric, row, row.worst),
        behind.removesuffix(" %"),
        "" if row.p_value is None else format_p(row.p_value),
    )


def _list_costs(row: Row) -> tuple[str, ...]:
    return (
        row.variant,
        str(row.rounds),
        _format_amount(row.bytes_down, "B"),
        _format_amount(row.bytes_up, "B"),
        _format_amount(row.macs, ""),
        _format_amount(row.memory, "B"),
    )


def _list_speed(row: Row) -> tuple[str, ...]:
    return (
        row.variant,
        _format_amount(row.seconds, "s"),
        _format_amount(row.rounds_to_target, ""),
        _format_amount(row.bytes_to_target, "B"),
    )


def _format(metric: MetricInfo, estimate: Estimate | None) -> str:
    """A score; in percent without the sign, which is in the title."""
    if estimate is None:
        return "-"
    return format_score(metric, estimate.mean, estimate.deviation).removesuffix(" %")


def _format_partial(metric: MetricInfo, row: Row, estimate: Estimate | None) -> str:
    """A score over budgets; in parentheses if some budgets get no model."""
    text = _format(metric, estimate)
    return text if row.serves_all or estimate is None else f"({text})"


def _format_amount(value: float | None, unit: str) -> str:
    return "-" if value is None else format_si(value, unit)


def format_p(p_value: float) -> str:
    """A p-value with the digits that mean something.

    >>> format_p(0.0312), format_p(0.00004), format_p(0.5)
    ('0.031', '< 0.001', '0.50')
    """
    if p_value < 0.001:
        return "< 0.001"
    return f"{p_value:.3f}" if p_value < 0.1 else f"{p_value:.2f}"


def to_markdown(sections: Sequence[Section]) -> str:
    """The tables in Markdown, with their cells aligned."""
    return "\n\n".join(f"{s.title.capitalize()}:\n\n{_to_markdown(s)}" for s in sections) + "\n"


def _to_markdown(section: Section) -> str:
    lines = [section.header, *section.cells]
    widths = [max(len(line[i]) for line in lines) for i in range(len(section.header))]

    def write(cells: Sequence[str]) -> str:
        first, *others = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        return "| " + " | ".join([first, *others]) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([write(section.header), rule, *map(write, section.cells)])


def to_html(sections: Sequence[Section]) -> str:
    """The tables in HTML."""
    return "".join(make_html_table(s.header, s.cells, s.title) for s in sections)
