"""What records say about a run's health, and where it is said."""

from __future__ import annotations

import json
import math

import pytest
import torch

import fedquilt as fq
from fedquilt.federation.client import NOT_NEEDED
from fedquilt.runs.event_lines import EventLines
from fedquilt.runs.events import Evaluated, ProblemFound, RoundDone
from fedquilt.runs.health import FEWEST_ROUNDS, RECENT, add_to_history, find_problems

CLASSES, CLIENTS = 10, 6
GUESS = math.log(CLASSES)


def rounds(means, phase="train", **changes):
    """Records of rounds of training with these losses."""
    return [
        {
            "round": number,
            "phase": phase,
            "loss": loss,
            "failures": [],
            "sent": {str(c): 8 for c in range(CLIENTS)},
            "losses": {str(c): loss for c in range(CLIENTS)},
            "scales": {},
            **changes,
        }
        for number, loss in enumerate(means, 1)
    ]


def scored(accuracy=0.9, loss=0.3, width=1.0, examples=1000, **changes):
    score = {
        "width": width,
        "accuracy": accuracy,
        "user_accuracy": None,
        "personal_accuracy": None,
        "loss": loss,
        "num_examples": examples,
    }
    return {"round": 9, "scores": [{**score, **changes}], "failures": [], "scales": {}}


FALLING = [2.3 * 0.8**i for i in range(9)]


def kinds(records, num_classes=CLASSES):
    return [(finding.kind, finding.is_severe) for finding in find_problems(records, num_classes)]


def test_nothing_is_found_where_nothing_is_wrong():
    assert kinds([]) == []
    assert kinds([*rounds(FALLING), scored()]) == []
    assert kinds(rounds(FALLING), None) == []


@pytest.mark.parametrize("losses", [[GUESS] * 9, [2.2, 2.3, 2.4, 2.5, 2.6, 2.7, 2.8]])
def test_a_loss_that_does_not_fall_is_found(losses):
    assert kinds(rounds(losses)) == [("loss", True)]
    assert kinds(rounds(losses)[: FEWEST_ROUNDS - 1]) == []  # too soon to know


def test_a_loss_that_rises_beyond_guessing_is_found_after_three_rounds():
    assert kinds(rounds([1.0, 1.2, 6.0])) == []  # one bad round
    assert kinds(rounds([1.0, 5.0, 6.0])) == [("rising", True)]
    assert kinds(rounds([2.3, 1.0, 0.5, 4.9, 4.8])) == [("rising", True)]
    assert kinds(rounds([0.1, 0.5, 1.0])) == []  # many times as much, and better than guessing
    assert kinds(rounds([1.0, 3.0, 4.0]), None) == [("rising", True)]  # of an error
    assert kinds(rounds([4.0, 1.0, 3.0, 3.0]), None) == []
    assert kinds(rounds([-1.0, 3.0, 4.0]), None) == []  # may be negative, so has no ratio


def test_a_loss_that_is_low_already_need_not_fall():
    assert kinds(rounds([0.02, 0.019, 0.02, 0.02, 0.021, 0.02, 0.02])) == []


def test_only_the_last_phase_is_looked_at():
    warm_up = rounds([GUESS] * 9, phase="warm-up")
    assert kinds([*warm_up, *rounds(FALLING)]) == []


def odd_scales(times):
    return {str(c): times if c == 3 else 1.0 for c in range(CLIENTS)}


@pytest.mark.parametrize(
    "early",
    [
        rounds([1.0, 0.1, 0.5]),  # the lowest loss is long ago
        rounds([0.5, 0.4, 1.0]),  # the first ones are lower than the last
        [*rounds([2.0], scales=odd_scales(500.0)), *rounds([2.0], scales=odd_scales(300.0))],
        rounds([None, None], scales=odd_scales(500.0)),
        rounds([None, 9.0, 8.0]),
    ],
)
@pytest.mark.parametrize("late", [0.3, 3.0])
def test_a_history_stays_short_and_says_the_same(early, late):
    """Rounds of another phase and old evaluations are of no use."""
    warm_up = rounds([0.01] * 5, phase="warm-up", scales=odd_scales(900.0))
    training = [*early, *rounds([late] * 3 * RECENT, losses={})]
    records = [*warm_up, scored(accuracy=0.1), *training, scored()]
    history = []
    for record in records:
        add_to_history(history, record)
        assert len(history) <= 2 * RECENT + 5
    assert history[-1] == records[-1]
    assert find_problems(history, CLASSES) == find_problems(records, CLASSES)


def test_of_rounds_with_very_many_clients_few_stay_in_memory():
    everybody = dict.fromkeys(range(6000), 8)
    history = []
    for record in rounds([3.0] * 40, sent=everybody):
        add_to_history(history, record)
    assert sum(len(record.get("sent", ())) for record in history) <= 13 * len(everybody)
    assert history[0]["loss"] == 3.0


@pytest.mark.parametrize(
    ("test", "found"),
    [
        (scored(accuracy=0.101), [("chance", True)]),
        (scored(accuracy=0.16), []),
        (scored(accuracy=0.101, examples=20), []),  # too few to know
        (scored(accuracy=0.101, user_accuracy=0.8), []),  # personal models, say
    ],
)
def test_answers_at_chance_are_found(test, found):
    assert kinds([*rounds(FALLING), test]) == found


def test_small_nets_at_chance_are_named():
    small = scored(accuracy=0.1, width=0.0625)["scores"]
    test = {**scored(), "scores": scored()["scores"] + small}
    (finding,) = find_problems([*rounds(FALLING), test], CLASSES)
    assert not finding.is_severe
    assert "nets of width 0.0625 answer no better than by guessing" in finding.sentence


def test_a_test_worse_than_guessing_of_a_net_that_has_learned_is_found():
    low = rounds([2.0, 1.0, 0.5, 0.2, 0.1, 0.1, 0.1])
    assert kinds([*low, scored(accuracy=0.3, loss=6.5)]) == [("parted", False)]
    assert kinds([*rounds([GUESS, 2.2, 2.0, 1.9]), scored(accuracy=0.3, loss=6.5)]) == []


@pytest.mark.parametrize("name", ["losses", "scales"])
@pytest.mark.parametrize(("factor", "is_odd"), [(1.0, False), (3.0, False), (1000.0, True)])
def test_a_client_that_is_far_from_all_others_is_named(name, factor, is_odd):
    own = {str(c): (factor if c == 3 else 1.0) * (1 + c / 10) for c in range(CLIENTS)}
    records = rounds(FALLING, **{name: own})
    found = find_problems(records, CLASSES)
    assert [finding.clients for finding in found] == ([(3,)] if is_odd else [])
    assert all("client 3" in finding.sentence and finding.is_severe for finding in found)


def test_among_few_clients_nobody_is_odd():
    records = rounds(FALLING, losses={"0": 1.0, "1": 1.0, "2": 1e5})
    assert kinds(records) == []


def test_a_client_whose_loss_is_no_number_is_named():
    records = rounds(FALLING, losses={str(c): None if c == 2 else 1.0 for c in range(CLIENTS)})
    (finding,) = find_problems(records, CLASSES)
    assert (finding.kind, finding.clients) == ("diverged", (2,))


def failed(clients, reason="out of memory"):
    return {
        "failures": [{"client": c, "reason": reason} for c in clients],
        "sent": {str(c): 8 for c in range(CLIENTS) if c not in clients},
    }


def test_clients_that_keep_failing_are_named():
    (finding,) = find_problems(rounds(FALLING, **failed([4])), CLASSES)
    assert (finding.kind, finding.is_severe, finding.clients) == ("failing", False, (4,))
    assert "client 4: out of memory" in finding.sentence
    assert kinds(rounds(FALLING, **failed([1, 4]))) == [("failing", True)]
    assert kinds(rounds(FALLING[:2], **failed([4]))) == []  # not often yet
    assert kinds([*rounds(FALLING), *rounds(FALLING[:3], **failed([4]))]) == []
    assert kinds(rounds(FALLING, **failed([4], NOT_NEEDED))) == []


def test_clients_without_a_test_are_named():
    test = {**scored(), "failures": [{"client": 2, "reason": "asleep"}]}
    (finding,) = find_problems([*rounds(FALLING), test], CLASSES)
    assert (finding.kind, finding.clients) == ("untested", (2,))


@pytest.fixture
def odd_people(people):
    """Six clients, of whom one has inputs × 1000."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(20) % 3
    sets = [(torch.randn(20, 5, generator=generator) + y.view(-1, 1), y) for _ in range(6)]
    sets[3] = (sets[3][0] * 1000, y)
    return fq.make_clients(sets, test=(torch.cat([x for x, _ in sets[:3]]), y.repeat(3)))


FEDAVG = fq.FedAvg(fq.LocalTraining(lr=0.05, epochs=1, batch_size=5), fraction=1.0)


def test_a_client_whose_inputs_are_a_thousand_times_too_large_is_named(
    train, odd_people, traced, tmp_path
):
    seen, lines = [], []
    write = EventLines(lines.append, 6)

    def watch(event):
        seen.append(event)
        write(event)

    settings = {"method": FEDAVG, "clients": odd_people, "rounds": 6}
    run = train(tmp_path / "run", callbacks=[watch], **settings)
    (odd,) = (finding for finding in run.findings if finding.kind == "odd data")
    assert odd.clients == (3,)
    assert odd.is_severe
    said = [
        event for event in seen if isinstance(event, ProblemFound) and event.finding.clients == (3,)
    ]
    assert len(said) == 1  # once, and in the middle of the run
    assert said[0].round < 6
    assert any("warning: the statistics of client 3 reach" in line for line in lines)
    (final,) = (event for event in seen if isinstance(event, Evaluated) and event.is_final)
    assert final.findings == run.findings
    records = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(records[-1])["findings"][0]["clients"] == [3]
    net, _ = traced
    assert fq.open_run(tmp_path / "run", net, FEDAVG).findings == run.findings


def test_a_resumed_run_finds_the_same(train, odd_people, interrupting, tmp_path):
    settings = {"method": FEDAVG, "clients": odd_people, "rounds": 6}
    whole = train(tmp_path / "whole", **settings)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", callbacks=[interrupting(RoundDone, 3)], **settings)
    again = train(tmp_path / "run", resume=True, **settings)
    assert again.findings == whole.findings
    assert again.findings


@pytest.mark.parametrize(
    ("settings", "kind", "latest"),
    [
        ({"lr": 1e-9}, "loss", FEWEST_ROUNDS),
        ({"lr": 0.1, "schedule": "milestones:3:1000"}, "rising", 5),
    ],
)
def test_a_run_that_goes_wrong_says_so_while_it_runs(settings, kind, latest):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(48, 4, generator=generator), torch.arange(48) % 3
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    local = fq.LocalTraining(momentum=0, weight_decay=0, epochs=1, batch_size=4, **settings)
    events, lines = [], []
    fq.train(
        model,
        x[:1],
        fq.FedAvg(local, fraction=1.0),
        fq.make_clients((x, y), count=3),
        rounds=9,
        workers=0,
        callbacks=[events.append, EventLines(lines.append, 9)],
    )
    (found,) = (e for e in events if isinstance(e, ProblemFound) and e.finding.kind == kind)
    assert found.round <= latest
    last = max(i for i, event in enumerate(events) if isinstance(event, RoundDone))
    assert events.index(found) < last
    assert any(line.startswith(f"round {found.round}/9 · warning: the training") for line in lines)


def test_weights_that_secure_sums_never_open_are_said():
    def secure(*closed):
        return {"threshold": 3, "opened": 10, "closed": list(closed), "clipped": 0}

    few = [2718, "2 clients sent it, and 3 are needed"]
    assert ("closed", True) in kinds(rounds(FALLING, secure=secure(few)))
    assert ("closed", True) not in kinds(rounds(FALLING, secure=secure()))
    once = [*rounds(FALLING, secure=secure(few))[:-1], *rounds(FALLING[-1:], secure=secure())]
    assert ("closed", True) not in kinds(once)
