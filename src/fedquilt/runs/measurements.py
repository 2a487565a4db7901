"""The numbers of a run by name: what trackers log, and what a run's history has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedquilt.evaluation.scores import VALUES, SizeScore, name_in_json
from fedquilt.evaluation.summary import summarize
from fedquilt.runs.events import Evaluated, Event, RoundDone

FINAL = "final"  # what starts the names of the scores of the finished model
SCORED = tuple(field for field in VALUES if field != "group_values")


def measure_event(event: Event) -> dict[str, float]:
    """The numbers of a round or an evaluation by name; none of other events.

    A name has a group and a slash, which the pages of trackers sort by.

    >>> measure_event(RoundDone(3, "train", 0.4, 10, (), 800, 600, 2.1))["train/loss"]
    0.4
    >>> score = SizeScore(0.5, 35, 32, 0.8, None, 0.3, 50)
    >>> measure_event(Evaluated(3, (score,), (), 0, 0, False, 0.1))["accuracy/0.5"]
    0.8
    """
    match event:
        case RoundDone():
            return _measure_round(event)
        case Evaluated():
            values = dict(_measure_scores(event.scores))
            if event.validation is not None:
                values["validation/score"] = event.validation
            return values | (
                {f"{FINAL}/{name}": value for name, value in values.items()}
                if event.is_final
                else {}
            )
    return {}


def _measure_round(event: RoundDone) -> dict[str, float]:
    values: dict[str, float | None] = {
        "train/loss": event.loss,
        "train/local_accuracy": event.local_accuracy,
        "train/clients": event.num_clients,
        "train/failures": len(event.failures),
        "train/bytes_down": event.bytes_down,
        "train/bytes_up": event.bytes_up,
        "train/seconds": event.seconds,
        "privacy/epsilon": None if event.privacy is None else event.privacy.epsilon,
        **{f"merging/{name}": value for name, value in event.merging.items()},
    }
    return _drop_unknown(values)


def _measure_scores(scores: Sequence[SizeScore]) -> Iterator[tuple[str, float]]:
    """The values of every size, and the worst and the mean over sizes."""
    for score in scores:
        size = f"{score.width:g}"
        if score.robustness is not None:
            size = f"{size}-robustness-{score.robustness:g}"
        named: dict[str, float | None] = {
            name_in_json(field, score.metric): getattr(score, field) for field in SCORED
        }
        named |= {"loss": score.loss, "perplexity": score.perplexity}
        named |= {name: value for name, value in score.metrics.items() if name not in named}
        for name, value in _drop_unknown(named).items():
            yield f"{name}/{size}", value
        for group, value in (score.group_values or {}).items():
            yield f"{name_in_json('group_values', score.metric)}/{group}/{size}", value
    summary = summarize(scores) if scores else None
    if summary is not None:
        yield f"{summary.score}/worst", summary.worst
        yield f"{summary.score}/mean", summary.mean


def _drop_unknown(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if value is not None}
