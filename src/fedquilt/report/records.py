"""What a run has written down about itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from fedquilt.evaluation.scores import SizeScore
from fedquilt.evaluation.summary import get_main_value
from fedquilt.federation.aggregation.robust import HELD_CELLS, KEPT_CELLS
from fedquilt.runs.directory import RunDirectory
from fedquilt.runs.records import is_known_record, read_records, read_times


@dataclass(frozen=True)
class Milestone:
    """Where a run stood at an evaluation; seconds and bytes are those of all rounds by then.

    Bytes are what clients received and sent, in every phase but the closing ones, which finish a
    copy of the model for each evaluation.
    """

    round: int
    phase: str  # of this round; empty if none was recorded
    seconds: float
    bytes: int
    score: SizeScore  # the largest net's


@dataclass(frozen=True)
class LocalTest:
    """How clients' own models did in one round, before they were merged, each on its own data."""

    round: int
    phase: str
    accuracy: float  # the mean over the round's clients
    clients: int  # how many


@dataclass(frozen=True)
class RoundRecord:
    """One round of training, as it was recorded."""

    round: int
    phase: str
    loss: float | None
    seconds: float | None
    bytes_down: int
    bytes_up: int
    clients: int  # whose updates were merged
    failures: int
    epsilon: float | None = None  # spent so far by a private run
    kept_fraction: float | None = None  # of the weights that a robust rule did not merge


@dataclass(frozen=True)
class ClientSummary:
    """What one client did in all rounds."""

    client: int
    rounds: int
    failures: int
    bytes: int
    loss: float | None  # the last one
    problem: str = ""  # the last one


@is_known_record
def read_rounds(directory: RunDirectory) -> list[RoundRecord]:
    """Every round of training."""
    seconds = {t["round"]: t["seconds"] for t in read_times(directory) if t["event"] == "RoundDone"}
    return [
        RoundRecord(
            record["round"],
            record["phase"],
            record["loss"],
            seconds.get(record["round"]),
            record["bytes_down"],
            record["bytes_up"],
            record["num_clients"],
            len(record["failures"]),
            (record.get("privacy") or {}).get("epsilon"),
            _read_kept_fraction(record.get("merging") or {}),
        )
        for record in read_records(directory)
        if "scores" not in record
    ]


def _read_kept_fraction(merging: Mapping[str, float]) -> float | None:
    held = merging.get(HELD_CELLS)
    return merging.get(KEPT_CELLS, 0) / held if held else None


@is_known_record
def read_evaluations(directory: RunDirectory) -> list[tuple[int, tuple[SizeScore, ...]]]:
    """The scores of every size at each evaluation, with the number of its round."""
    return [
        (record["round"], tuple(SizeScore.from_json(score) for score in record["scores"]))
        for record in read_records(directory)
        if record.get("scores")
    ]


@is_known_record
def read_client_summaries(directory: RunDirectory, limit: int) -> list[ClientSummary]:
    """What clients did in all rounds: those that failed most often first, and no more than a limit.

    Clients that never took part are in no record.
    """
    rounds: Counter[int] = Counter()
    failures: Counter[int] = Counter()
    sent: Counter[int] = Counter()
    losses: dict[int, float | None] = {}
    problems: dict[int, str] = {}
    for record in read_records(directory):
        for client, size in record.get("sent", {}).items():
            rounds[int(client)] += 1
            sent[int(client)] += size
        losses |= {int(client): loss for client, loss in record.get("losses", {}).items()}
        for failure in record["failures"]:
            failures[failure["client"]] += 1
            problems[failure["client"]] = failure["reason"]
    order = sorted({*rounds, *failures}, key=lambda c: (-failures[c], -rounds[c], c))
    return [
        ClientSummary(c, rounds[c], failures[c], sent[c], losses.get(c), problems.get(c, ""))
        for c in order[:limit]
    ]


@is_known_record
def read_local_tests(directory: RunDirectory) -> list[LocalTest]:
    """Every round in which clients tested their own models."""
    return [
        LocalTest(record["round"], record["phase"], fmean(local.values()), len(local))
        for record in read_records(directory)
        if (local := record.get("local"))
    ]


@is_known_record
def read_last_local_tests(directory: RunDirectory) -> dict[int, float]:
    """What each client's own model got the last time that it was tested."""
    found: dict[int, float] = {}
    for record in read_records(directory):
        found |= {int(client): value for client, value in record.get("local", {}).items()}
    return dict(sorted(found.items()))


@is_known_record
def read_traffic(directory: RunDirectory) -> dict[str, float]:
    """Bytes that a client sends and receives in a round of the last phase, in the mean."""
    rounds = [record for record in read_records(directory) if "scores" not in record]
    rounds = [record for record in rounds if record["phase"] == rounds[-1]["phase"]]
    answered = sum(record["num_clients"] for record in rounds)
    asked = answered + sum(len(record["failures"]) for record in rounds)
    if not answered:
        return {}
    return {
        "up": sum(record["bytes_up"] for record in rounds) / answered,
        "down": sum(record["bytes_down"] for record in rounds) / asked,
    }


@is_known_record
def read_milestones(directory: RunDirectory) -> list[Milestone]:
    """Every evaluation of a run, in order."""
    found: list[Milestone] = []
    seconds, spent = 0.0, {0: 0.0}
    for record in read_times(directory):
        if record["event"] == "RoundDone":
            seconds += record["seconds"]
            spent[record["round"]] = seconds
    phase, sent = "", 0
    for record in read_records(directory):
        if "scores" not in record:
            phase, sent = record["phase"], sent + record["bytes_down"] + record["bytes_up"]
        elif record["scores"]:
            score = max((SizeScore.from_json(s) for s in record["scores"]), key=lambda s: s.width)
            if any(milestone.round == record["round"] for milestone in found):
                continue  # the model that was selected, which was evaluated after its round too
            spent_by_then = spent.get(record["round"], seconds)
            found.append(Milestone(record["round"], phase, spent_by_then, sent, score))
    return found


Dated = TypeVar("Dated", Milestone, LocalTest)


def filter_last_phase(progress: Sequence[Dated]) -> list[Dated]:
    """What belongs to the last phase: earlier ones may train other nets than the one in the end."""
    return [event for event in progress if event.phase == progress[-1].phase]


def count_bytes_to_reach(
    progress: Sequence[Milestone],
    target: float,
    of: Callable[[SizeScore], float | None] = get_main_value,
) -> int | None:
    """What had been sent at the first evaluation that reached a target; None: there is none.

    ``of`` says which value of a score is meant, such as that of clients' own nets.
    """
    for milestone in progress:
        reached = of(milestone.score)
        if reached is not None and milestone.score.metric.reaches(reached, target):
            return milestone.bytes
    return None
