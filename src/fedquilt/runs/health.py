"""What a run's records say about its health: findings, each a sentence with what to do about it.

Records in, findings out: nothing here trains, prints or reads a file. A severe finding means that
the model, or one of the clients, is most likely not what somebody wanted; others are worth a look.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from fedquilt.federation.aggregation.robust import HELD_CELLS, KEPT_CELLS
from fedquilt.federation.client import NOT_NEEDED, Failure
from fedquilt.federation.growing import ClientValues

Record = Mapping[str, Any]  # of a round or of an evaluation, as a run writes it down

FEWEST_ROUNDS = 6  # before anything is said about a loss
RECENT = 100  # rounds in which clients are looked at
LATE = 3  # rounds that say where a loss is now
STILL = 0.98  # of where the loss was, above which it has not fallen
RISEN = 2.0  # times a lower loss, from which on it has risen
LEARNED = 0.5  # of the loss of guessing, below which a net has learned something
FEWEST_CLIENTS = 4  # that one can be compared with
ODD_LOSS, ODD_DATA = 20.0, 100.0  # times the others' median: a loss, and statistics
SPREAD = 8.0  # times the others' own deviations
OFTEN = 3  # failures of a client
SHARE = 0.25  # of all answers that are missing, above which a run is ill
VALUES = ("", "user_", "personal_")  # of accuracy; one is enough
NAMED = 3  # clients in one sentence
ODD_SCALES = "odd_scales"  # of rounds long ago, instead of all scales
LOOKED_AT = ("round", "phase", "loss", "losses", "sent", "failures", "merging", "secure", "privacy")
MAX_VALUES = 50_000  # of clients in the records that are looked at, beyond a few rounds


@dataclass(frozen=True)
class Finding:
    """Something that whoever runs this should know.

    ``kind`` is ``loss``, ``rising``, ``chance``, ``parted``, ``diverged``, ``odd loss``,
    ``odd data``, ``failing``, ``kept``, ``closed`` or ``untested``; ``clients`` are those that it
    is about.
    """

    kind: str
    is_severe: bool
    sentence: str
    clients: tuple[int, ...] = ()


def find_problems(records: Sequence[Record], num_classes: int | None) -> tuple[Finding, ...]:
    """What the records of a run show so far, what is severe first."""
    rounds = [record for record in records if "scores" not in record]
    tests = [record for record in records if "scores" in record]
    trained = [r for r in rounds if r["phase"] == rounds[-1]["phase"]]
    recent = trained[-RECENT:]
    guess = math.log(num_classes) if num_classes and num_classes > 1 else None
    last = tests[-1] if tests else None
    found = [
        *(_find_rising(trained, guess) or _find_still(trained, guess)),
        *_find_diverged(recent),
        *_find_odd_losses(trained, guess),
        *_find_odd_data([*trained, *([last] if last else [])]),
        *_find_failing(recent),
        *_find_kept_cells(recent),
        *_find_closed(recent),
    ]
    if last is not None:
        found += [*_find_chance_level(last, num_classes), *_find_untested(last)]
        found += _find_parted(last, trained, guess)
    return tuple(sorted(found, key=lambda finding: not finding.is_severe))


def _find_rising(rounds: Sequence[Record], guess: float | None) -> list[Finding]:
    """A loss that was lower, and is now worse than guessing, or else than at the start."""
    losses = [record["loss"] for record in rounds if record["loss"] is not None]
    if len(losses) < LATE:
        return []
    low, late = min(losses[:-1]), min(losses[-2:])  # one bad round may be chance
    high = losses[0] if guess is None else max(losses[0], guess)
    if low <= 0 or late < RISEN * low or late < RISEN * high:
        return []
    sentence = (
        f"the training loss rises: {low:.4g} at its lowest and {late:.4g} or more in the last "
        "rounds; training diverges: lower local_training.lr, warm it up (local_training.schedule), "
        "or clip gradients (local_training.max_grad_norm)"
    )
    return [Finding("rising", True, sentence)]


def _find_still(rounds: Sequence[Record], guess: float | None) -> Iterable[Finding]:
    losses = [record["loss"] for record in rounds if record["loss"] is not None]
    if len(losses) < (FEWEST_ROUNDS if guess is not None else 2 * FEWEST_ROUNDS):
        return
    first, late = fmean(losses[:2]), min(losses[-LATE:])  # whoever falls does so at times
    if late >= STILL * first and (guess is None or late >= LEARNED * guess):
        yield Finding(
            "loss",
            True,
            f"the training loss does not fall: {first:.4g} in the first rounds and {late:.4g} "
            "or more in the last; try another learning rate (local_training.lr), and look at "
            "the data",
        )


def _find_kept_cells(rounds: Sequence[Record]) -> Iterable[Finding]:
    """Cells that a robust rule never merged."""
    merging = [record["merging"] for record in rounds if KEPT_CELLS in record.get("merging", {})]
    if len(merging) < FEWEST_ROUNDS:
        return
    share = min(numbers[KEPT_CELLS] / max(numbers[HELD_CELLS], 1) for numbers in merging)
    if share > 0:
        yield Finding(
            "kept",
            True,
            f"{100 * share:.1f}% of the cells that clients train are never merged, because too few "
            "clients hold them for the hostile ones that aggregation.hostile allows; lower it, "
            "or let more clients train the largest sizes",
        )


def _find_closed(rounds: Sequence[Record]) -> Iterable[Finding]:
    """Weights that secure sums leave as they are in the last rounds."""
    last = [record["secure"] for record in rounds if record.get("secure")][-LATE:]
    closed = [sum(size for size, _ in secure["closed"]) for secure in last]
    if len(closed) == LATE and min(closed) > 0:
        reason = last[-1]["closed"][-1][1]
        yield Finding(
            "closed",
            True,
            f"{min(closed):,} weights or more did not change in the last {LATE} rounds, because "
            f"their secure sums were not opened ({reason}); lower secure_aggregation.threshold, or "
            "give more clients the largest budgets",
        )


def _find_diverged(rounds: Sequence[Record]) -> Iterable[Finding]:
    """Clients whose last losses were no numbers."""
    ill = sorted(
        c for c, losses in _group_by_client(rounds, "losses").items() if None in losses[-LATE:]
    )
    if ill:
        yield Finding(
            "diverged",
            False,
            f"{_name_clients(ill)} reported a loss that is no number; training diverges there: "
            "lower local_training.lr, or clip gradients (local_training.max_grad_norm)",
            tuple(ill),
        )


def _find_odd_losses(rounds: Sequence[Record], guess: float | None) -> Iterable[Finding]:
    """Clients whose losses are far above those of all others."""
    means = {
        client: fmean(known[-LATE:])
        for client, losses in _group_by_client(rounds[-2 * FEWEST_ROUNDS :], "losses").items()
        if (known := [loss for loss in losses if loss is not None])
    }
    odd = _find_far_above(means, ODD_LOSS, least=guess or 1.0)
    if odd:
        times = means[odd[0]] / median(v for c, v in means.items() if c not in odd)
        yield Finding(
            "odd loss",
            True,
            f"the training loss of {_name_clients(odd)} is {_format_times(times)} that of "
            "others; look at its data: their scale, their labels",
            odd,
        )


def _find_odd_data(records: Sequence[Record]) -> Iterable[Finding]:
    """Clients in whose statistics there are numbers far above those of all others.

    Round by round: what clients share draws their statistics after the odd ones.
    """
    most = _find_largest(map(_measure_odd_scales, records))
    clients = tuple(sorted(most, key=lambda client: -most[client]))
    if clients:
        yield Finding(
            "odd data",
            True,
            f"the statistics of {_name_clients(clients)} reach {_format_times(most[clients[0]])} "
            "those of others; look at the scale of its inputs: averaging them spoils the model",
            clients,
        )


def _find_largest(scales: Iterable[Mapping[int, float]]) -> dict[int, float]:
    """The largest number of each client."""
    most: dict[int, float] = {}
    for own in scales:
        for client, times in own.items():
            most[client] = max(times, most.get(client, 0.0))
    return most


def _measure_odd_scales(record: Record) -> dict[int, float]:
    """Clients whose statistics are far above those of others, and how many times."""
    if ODD_SCALES in record:
        known: dict[int, float] = record[ODD_SCALES]
        return known
    scales = {int(client): scale for client, scale in record.get("scales", {}).items()}
    odd = _find_far_above(scales, ODD_DATA, least=0.0)
    if not odd:
        return {}
    usual = median(scale for client, scale in scales.items() if client not in odd)
    return {client: scales[client] / usual if usual else math.inf for client in odd}


def add_to_history(history: list[Record], record: Record) -> None:
    """Adds a record to those that ``find_problems`` looks at, of which there are never many.

    Of evaluations the last one stays. Of rounds those of the same phase stay, and of rounds long
    ago a summary: so a run of many thousand rounds needs no more memory than one of a hundred.
    With many clients in a round, fewer rounds stay.

    Args:
        history: The records so far; it is changed.
        record: The next one.
    """
    if "scores" in record:
        history[:] = [known for known in history if "scores" not in known]
        history.append(record)
        return
    tests = [known for known in history if "scores" in known]
    rounds = [known for known in history if known.get("phase") == record["phase"]]
    scales = {int(client): scale for client, scale in record.get("scales", {}).items()}
    looked_at = {name: value for name, value in record.items() if name in LOOKED_AT}
    rounds.append({**looked_at, "scales": ClientValues(scales)})
    count = MAX_VALUES // max(len(record.get("sent", ())), 1)
    count = min(max(count, 2 * FEWEST_ROUNDS), 2 * RECENT) + 1
    history[:] = [*tests, *_summarize(rounds[:-count]), *rounds[-count:]]


def _summarize(rounds: Sequence[Record]) -> list[Record]:
    """At most three records: of the first two losses and the lowest one, and of odd scales."""
    losses = [record["loss"] for record in rounds if record["loss"] is not None]
    odd = _find_largest(map(_measure_odd_scales, rounds))
    kept = [*losses[:2], *([min(losses[2:])] if losses[2:] else [])]
    if odd and not kept:
        kept = [None]
    scales = [odd, {}, {}]
    return [
        {"phase": rounds[-1]["phase"], "loss": loss, ODD_SCALES: own}
        for loss, own in zip(kept, scales, strict=False)
    ]


def _find_failing(rounds: Sequence[Record]) -> Iterable[Finding]:
    """Clients that fail more often than they answer."""
    reasons: dict[int, list[str]] = {}
    for record in rounds:
        for failure in record.get("failures", ()):
            if failure["reason"] != NOT_NEEDED:
                reasons.setdefault(failure["client"], []).append(failure["reason"])
    answers = Counter(int(client) for record in rounds for client in record.get("sent", ()))
    often = sorted(
        (c for c, why in reasons.items() if len(why) >= OFTEN and len(why) > answers[c]),
        key=lambda client: -len(reasons[client]),
    )
    if often:
        lacking, given = sum(map(len, reasons.values())), answers.total()
        why = Failure(often[0], reasons[often[0]][-1])
        yield Finding(
            "failing",
            lacking > SHARE * (lacking + given),
            f"{_name_clients(often)} failed more often than they answered, and the model has "
            f"little of them; {why}",
            tuple(often),
        )


def _find_chance_level(test: Record, num_classes: int | None) -> Iterable[Finding]:
    """Sizes that are right no more often than by guessing, where enough was asked to know."""
    if not num_classes or num_classes < 2:
        return
    guess = 1 / num_classes
    widths = []
    for score in test["scores"]:
        known = [v for kind in VALUES if (v := score.get(f"{kind}accuracy")) is not None]
        count = score["num_examples"]
        is_enough = bool(known) and count * guess >= 16 * (1 - guess)
        if is_enough and max(known) <= guess + 2 * math.sqrt(guess * (1 - guess) / count):
            widths.append(score["width"])
    if not widths:
        return
    is_all = len(widths) == len(test["scores"])
    who = "the model answers" if is_all else f"nets of width {_format_list(widths)} answer"
    yield Finding(
        "chance",
        is_all,
        f"{who} no better than by guessing among {num_classes} classes; train for more rounds, or "
        "look at learning rate, labels and clients' data",
    )


def _find_parted(test: Record, rounds: Sequence[Record], guess: float | None) -> Iterable[Finding]:
    """A test that is worse than guessing, of a net that has learned its training data."""
    losses = [record["loss"] for record in rounds[-LATE:] if record["loss"] is not None]
    scores = [score for score in test["scores"] if score["loss"] is not None]
    if not losses or not scores or guess is None:
        return
    whole, late = max(scores, key=lambda score: score["width"]), fmean(losses)
    if whole["loss"] > 1.5 * guess and late < LEARNED * guess:
        yield Finding(
            "parted",
            False,
            f"test and training part ways: the loss is {late:.3g} in training and "
            f"{whole['loss']:.3g} in the test, where guessing has {guess:.3g}; look for clients "
            "whose data are of another kind or scale, and at statistics of normalisation",
        )


def _find_untested(test: Record) -> Iterable[Finding]:
    lost = {f["client"]: f["reason"] for f in test["failures"] if f["client"] >= 0}
    if lost:
        clients = tuple(sorted(lost))
        why = Failure(clients[0], lost[clients[0]])
        yield Finding(
            "untested",
            False,
            f"the last evaluation lacks {_name_clients(clients)}; {why}",
            clients,
        )


def _group_by_client(records: Iterable[Record], name: str) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for record in records:
        for client, value in record.get(name, {}).items():
            found.setdefault(int(client), []).append(value)
    return found


def _find_far_above(values: Mapping[int, float], times: float, least: float) -> tuple[int, ...]:
    """Clients whose value is many times the median, and beyond what the others differ by."""
    if len(values) < FEWEST_CLIENTS:
        return ()
    middle = median(values.values())
    spread = median(abs(value - middle) for value in values.values())
    limit = max(times * middle, middle + SPREAD * spread, least)
    odd = [client for client, value in values.items() if value > limit]
    return tuple(sorted(odd, key=lambda client: -values[client]))


def _name_clients(clients: Sequence[int]) -> str:
    """Some clients by their numbers.

    >>> _name_clients([3]), _name_clients([3, 5]), _name_clients(range(9))
    ('client 3', 'clients 3, 5', 'clients 0, 1, 2 and 6 others')
    """
    some = ", ".join(map(str, clients[:NAMED]))
    rest = f" and {len(clients) - NAMED} others" if len(clients) > NAMED else ""
    return f"client{'s' * (len(clients) > 1)} {some}{rest}"


def _format_list(widths: Sequence[float]) -> str:
    return ", ".join(f"{width:g}" for width in widths)


def _format_times(factor: float) -> str:
    return f"{factor:,.0f} times" if factor < 1e6 else f"{factor:.0e} times"
