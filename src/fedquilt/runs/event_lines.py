"""Describes the events of a run in one line each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from fedquilt.evaluation.scores import SizeScore
from fedquilt.evaluation.summary import get_main_value
from fedquilt.federation.aggregation.robust import HELD_CELLS, KEPT_CELLS
from fedquilt.federation.client import client_label
from fedquilt.formatting import format_count, format_percent
from fedquilt.runs.attacks import BACKDOOR_SUCCESS
from fedquilt.runs.events import (
    CheckpointDamaged,
    ClientDone,
    EnvironmentChanged,
    Evaluated,
    Event,
    PassSizeChosen,
    ProblemFound,
    RoundDone,
    RoundRepeated,
    RoundStarted,
    SecureRound,
    StoppedEarly,
    WaitingForLock,
)
from fedquilt.runs.health import Finding

SEPARATOR = " · "
MAX_VALUES = 58  # characters, so that a line fits into 80 columns


class EventLines:
    """A callback that passes one line for every event worth reading to a function.

    Args:
        write: Called with every line.
        num_rounds: The rounds of the run, until its first event tells.

    >>> from fedquilt.runs.events import ClientDone
    >>> EventLines(print, 10)(ClientDone(3, "out of memory"))
    client 3 failed: out of memory
    """

    def __init__(self, write: Callable[[str], None], num_rounds: int) -> None:
        self._write, self._num_rounds = write, num_rounds

    def __call__(self, event: Event) -> None:
        """Writes the line of an event, if it has one."""
        if isinstance(event, RoundStarted):
            self._num_rounds = event.total
        line = describe_event(event, self._num_rounds)
        if line:
            self._write(line)


def describe_event(event: Event, num_rounds: int) -> str:
    """Describes an event in one line; an empty one for events that most users do not need.

    >>> describe_event(RoundDone(3, "train", 0.4123, 10, (), 0, 0, 2.1), 10)
    'round 3/10 · loss 0.4123 · 10 clients · 2.1 s'
    """
    match event:
        case ClientDone(problem=str() as problem):
            label = client_label(event.client)
            return f"{label} failed: {problem.removeprefix(f'{label} ')}"
        case RoundDone():
            return _describe_round(event, num_rounds)
        case RoundRepeated():
            replies = f"{event.num_clients} of {event.quorum} required replies"
            return _join_facts(f"round {event.round}/{num_rounds}", replies, "repeating the round")
        case Evaluated():
            values, chosen = describe_values(event.scores), _describe_selection(event)
            success = _describe_backdoor(event.scores)
            return _join_facts(f"round {event.round}/{num_rounds}", values, success, chosen)
        case StoppedEarly():
            return _describe_stop(event, num_rounds)
        case ProblemFound(finding=finding):
            return _join_facts(f"round {event.round}/{num_rounds}", describe_finding(finding))
        case CheckpointDamaged():
            return f"{event.problem}; resuming from the checkpoint of round {event.round}"
        case PassSizeChosen():
            how = "one by one" if event.clients == 1 else f"{event.clients} in one pass"
            return f"clients with {event.size} values train {how}: {event.reason}"
        case WaitingForLock():
            return (
                f"another process is training in {event.folder}; waiting up to {event.seconds:g} s"
            )
        case EnvironmentChanged():
            return (
                f"resuming after round {event.round} in another environment ({event.change}): the "
                "last bits of results may differ"
            )
    return ""


def describe_finding(finding: Finding) -> str:
    """Describes a finding in one line.

    >>> describe_finding(Finding("loss", True, "the training loss does not fall"))
    'warning: the training loss does not fall'
    """
    return f"{'warning' if finding.is_severe else 'note'}: {finding.sentence}"


def describe_privacy(spent: Mapping[str, Any]) -> str:
    """Describes what a private run has spent, as its records have it.

    >>> spent = {"epsilon": 3.98, "delta": 1e-5, "noise_multiplier": 0.9, "clip": 0.5}
    >>> describe_privacy({**spent, "tier_epsilon": {}, "mechanism": "central"})
    'ε 3.98 at δ 1e-05 for every client (central; noise multiplier 0.9, clipping norm 0.5)'
    """
    epsilon = spent["epsilon"]
    protected = "example" if spent["mechanism"] == "dp-sgd" else "client"
    tiers = sorted(spent["tier_epsilon"].items(), key=lambda tier: -int(tier[0]))
    by_tier = ", ".join(f"{value:.3g} with {size} parameters" for size, value in tiers if value)
    return (
        f"{'no bound of ε' if epsilon is None else f'ε {epsilon:.3g}'} at δ {spent['delta']:.3g} "
        f"for every {protected} ({spent['mechanism']}; noise multiplier "
        f"{spent['noise_multiplier']:.3g}, clipping norm {spent['clip']:.3g})"
        + (f"; by what a client holds: {by_tier}" if by_tier else "")
    )


def describe_attack_line(attack: Mapping[str, Any]) -> str:
    """Describes what hostile clients of a run did, as it is stored with the run.

    >>> settings = {"clients": 0.2, "target": 3}
    >>> attack = {"name": "backdoor", "settings": settings, "num_hostile": 2, "num_clients": 10}
    >>> describe_attack_line({**attack, "hostile": [4, 7]})
    'simulated attack: 2 of 10 clients are hostile (backdoor, target 3): 4, 7'
    """
    settings = {name: value for name, value in attack["settings"].items() if name != "clients"}
    what = ", ".join([attack["name"], *(f"{name} {value}" for name, value in settings.items())])
    named = ", ".join(map(str, attack["hostile"]))
    more = ", ..." if len(attack["hostile"]) < attack["num_hostile"] else ""
    count = f"{attack['num_hostile']} of {format_count(attack['num_clients'], 'client')}"
    verb = "is" if attack["num_hostile"] == 1 else "are"
    return f"simulated attack: {count} {verb} hostile ({what}): {named}{more}"


def describe_values(scores: Sequence[SizeScore]) -> str:
    """The metric at each size; the range and the mean where these would make a long line."""
    if not scores:
        return "nothing was measured"
    metric = scores[0].metric
    known = [(get_main_value(score), score.width) for score in scores]
    parts = [f"{metric.format(value)} at {width:g}" for value, width in known]
    text = ", ".join(parts)
    if len(text) <= MAX_VALUES:
        return f"{metric.name} {text}"
    values = [value for value, _ in known if value is not None]
    mean = metric.format(fmean(values) if values else None)
    return f"{metric.name} {parts[0]} to {parts[-1]}, mean {mean} of {len(parts)} sizes"


def _describe_round(event: RoundDone, num_rounds: int) -> str:
    local = event.local_accuracy
    return _join_facts(
        f"round {event.round}/{num_rounds}",
        "" if event.loss is None else f"loss {event.loss:.4f}",
        "" if local is None else f"local accuracy {format_percent(local)}",
        f"{event.num_clients} client{'s' if event.num_clients != 1 else ''}",
        f"{len(event.failures)} failed" if event.failures else "",
        _describe_closed(event.secure),
        "" if event.privacy is None else str(event.privacy),
        _describe_kept(event.merging),
        f"{event.seconds:.1f} s",
    )


def _describe_selection(event: Evaluated) -> str:
    """The validation score, if models are selected by it, and the best round so far."""
    if not event.best_round or event.is_final or not event.scores:
        return ""
    best = "best" if event.best_round == event.round else f"best of round {event.best_round}"
    return f"validation {event.scores[0].metric.format(event.validation)}, {best}"


def _describe_stop(event: StoppedEarly, num_rounds: int) -> str:
    best = f" since round {event.best_round}" if event.best_round else ""
    evaluations = format_count(event.num_evaluations, "evaluation")
    return _join_facts(
        f"round {event.round}/{num_rounds}", f"no better model in {evaluations}{best}", "stopping"
    )


def _describe_backdoor(scores: Sequence[SizeScore]) -> str:
    """The success of a backdoor in the largest size, if there is one."""
    success = scores[0].metrics.get(BACKDOOR_SUCCESS) if scores else None
    return "" if success is None else f"backdoor {format_percent(success)}"


def _describe_kept(merging: Mapping[str, float]) -> str:
    """The part of the cells that a robust rule did not merge.

    >>> _describe_kept({HELD_CELLS: 200, KEPT_CELLS: 30})
    '15.0% of cells kept: too few updates'
    """
    kept = merging.get(KEPT_CELLS, 0)
    if not kept:
        return ""
    return f"{format_percent(kept / merging[HELD_CELLS])} of cells kept: too few updates"


def _describe_closed(secure: SecureRound | None) -> str:
    """What of the model a secure sum has left as it was."""
    closed = sum(size for size, _ in secure.closed) if secure is not None else 0
    return f"{closed:,} weights not opened" if closed else ""


def _join_facts(*facts: str) -> str:
    return SEPARATOR.join(filter(None, facts))
