"""One sentence of advice, with its reason."""

from __future__ import annotations

from collections.abc import Sequence

from fedquilt.comparison.metric import format_score
from fedquilt.comparison.significance import FEW_SEEDS, LEVEL
from fedquilt.comparison.table import Analysis, Row, choose_best
from fedquilt.formatting import format_count, format_si
from fedquilt.learning.metric import MetricInfo

UNITS = {"bytes": "B", "macs": "MACs", "seconds": "s"}


def write_advice(rows: Sequence[Row], metric: MetricInfo) -> str:
    """Which variant to take, why, and which others are as good as far as can be told."""
    done = [row for row in rows if row.mean is not None]
    best = choose_best(done, metric)
    if best is None or best.mean is None:
        return "No run is done, so there is no advice."
    value = format_score(metric, best.mean.mean)
    sentence = f"Take {best.variant}: it has the best mean {metric.label} over budgets, {value}"
    if len(done) == 1:
        return f"{sentence}; nothing else was compared."
    if best.exceeds_budgets:
        sentence += ", but no variant that serves all budgets stays within them"
    rivals = [row for row in done if is_rival(row, best)]
    if not rivals:
        if len(best.seeds) == 1:
            return f"{sentence}; with one seed it is not known how much of this is training noise."
        return f"{sentence}, and the differences to all others are more than noise."
    names = ", ".join(_name_rival(row) for row in rivals)
    cheapest = min([best, *rivals], key=lambda row: row.bytes or 0.0)
    sentence += f"; but these runs cannot tell it from {names}"
    if cheapest is not best and cheapest.bytes and best.bytes:
        share = cheapest.bytes / best.bytes
        sentence += (
            f", and {cheapest.variant} sends {share:.0%} of its bytes: take it if bytes count"
        )
    return sentence + "."


def is_rival(row: Row, best: Row) -> bool:
    """Whether a row may be as good as the best: it serves as much, and no test tells them apart."""
    if row.variant == best.variant or (best.serves_all and not row.serves_all):
        return False
    if row.exceeds_budgets and not best.exceeds_budgets:
        return False
    return row.p_value is None or row.p_value >= LEVEL


def _name_rival(row: Row) -> str:
    return row.variant if row.p_value is None else f"{row.variant} (p = {row.p_value:.2g})"


def write_notes(analysis: Analysis, metric: MetricInfo) -> list[str]:
    """What a reader must know to trust the table."""
    rows, target = analysis.rows, analysis.target
    done = [row for row in rows if row.mean is not None]
    notes = []
    tests = sorted({row.test for row in done if row.p_value is not None})
    if tests:
        notes.append(
            f"p: paired test over {' or '.join(tests)} against the best mean, two-sided, corrected "
            f"for {format_count(len(done) - 1, 'comparison')} (Holm); the best was chosen by the "
            "same numbers."
        )
    count = max((len(row.seeds) for row in done), default=0)
    if 0 < count < FEW_SEEDS:
        seeds = format_count(count, "seed")
        notes.append(
            f"With {seeds} the test is weak: differences within the deviations are no evidence, "
            "and a p above 0.05 does not show that two are equal."
        )
    if target is not None:
        notes.append(f"Target: a mean {metric.label} of {format_score(metric, target)}.")
    if analysis.amounts:
        amounts = " or ".join(
            format_si(analysis.amounts[name], unit) for name, unit in UNITS.items()
        )
        notes.append(f"Equal cost: the last evaluation within {amounts}, of the same runs.")
    for row in done:
        if row.exceeds_budgets:
            notes.append(f"{row.variant} {row.exceeds_budgets}.")
        if not row.serves_all and row.tiers:
            missing = [label for label, value in row.tiers.items() if value is None]
            notes.append(
                f"{row.variant} has no model for budgets {', '.join(missing)}: its mean, in "
                "parentheses, is over the others."
            )
    notes += [f"{row.variant}: {row.problem}" for row in rows if row.problem]
    return notes
