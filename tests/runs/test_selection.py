"""The best round is kept, a run stops when none is better, and both survive being stopped."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedquilt as fq
from fedquilt.engines.client_state import read_client_state
from fedquilt.errors import ConfigError
from fedquilt.learning.metric import MetricInfo
from fedquilt.runs.event_lines import describe_event
from fedquilt.runs.events import StoppedEarly
from fedquilt.runs.selection import SelectionProgress, compute_score

BEST = fq.Selection(keep="best")
EVERY = fq.Cadence(evaluate_every=1, checkpoint_every=2)
# from the third round on weights are thrown about
SPOILED = fq.LocalTraining(
    lr=0.05, epochs=3, batch_size=6, max_grad_norm=0.5, schedule="milestones:2:300"
)
METHODS = {
    "heterofl": fq.HeteroFL(SPOILED, fraction=1.0),
    "pfedme": fq.PFedMe(  # its closing phase writes to clients' states, and training reads them
        replace(SPOILED, max_grad_norm=1.0, keep_optimizer=True), fraction=1.0, steps=2
    ),
    "apfl": fq.APFL(SPOILED, fraction=1.0, warm_up=0.34, ratio=0.3, nets=3),
}


def make_data(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    return torch.randn(count, 1, 4, 4, generator=generator) + labels.view(-1, 1, 1, 1), labels


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3)
    )


@pytest.fixture(scope="module")
def clients() -> fq.Population:
    return fq.make_clients(
        make_data(72, 1), test=make_data(30, 2), count=3, budgets=(1.0, 0.5), validation=0.25
    )


def train(clients: fq.Population, method: Any = "heterofl", rounds: int = 4, **more: Any) -> fq.Run:
    method = METHODS.get(method, method)
    settings = {"selection": BEST, "cadence": EVERY, "workers": 0, **more}
    return fq.train(make_net(), torch.zeros(1, 1, 4, 4), method, clients, rounds, **settings)


def bits(run: fq.Run) -> dict[str, bytes]:
    return {name: t.contiguous().numpy().tobytes() for name, t in run.state.params.items()}


@pytest.mark.parametrize("method", METHODS)
def test_the_model_that_is_kept_is_that_of_a_run_that_ended_with_its_round(
    method, clients, tmp_path
):
    events: list[Any] = []
    kept = train(clients, method, callbacks=[events.append], out=tmp_path)
    compared = {
        e.round: e.validation for e in events if isinstance(e, fq.Evaluated) and not e.is_final
    }
    last = max(e.round for e in events if isinstance(e, fq.RoundDone))
    known = {round: value for round, value in compared.items() if value is not None}
    best = max(known, key=lambda round: (known[round], -round))
    assert kept.info.model_round == kept.state.round == best
    assert kept.info.trained_rounds == last
    assert best < last  # or this test would see nothing
    if method != "apfl":  # whose phases follow from the number of rounds
        alone = train(clients, method, rounds=best, selection=None)
        assert bits(kept) == bits(alone)
        assert kept.scores == alone.scores
    final = next(e for e in events if isinstance(e, fq.Evaluated) and e.is_final)
    same = next(e for e in events if isinstance(e, fq.Evaluated) and e.round == best)
    assert final.scores == same.scores == tuple(kept.evaluate(workers=0))


def test_without_selection_the_last_round_is_kept_as_before(clients):
    plain, last = train(clients, selection=None), train(clients, selection=fq.Selection())
    assert bits(plain) == bits(last)
    assert plain.state.round == 4
    assert plain.info.model_round is None


class StopNow(KeyboardInterrupt):
    pass


def stop_after(count: int) -> Any:
    left = iter(range(count))

    def watch(event: Any) -> None:
        if next(left, None) is None:
            raise StopNow

    return watch


def read_states(run: fq.Run) -> dict[int, dict[str, bytes]]:
    """What clients keep that belongs to the model."""
    states = {}
    for client, version in run.info.client_versions.items():
        tensors = read_client_state(run.directory.client_states.path(client, version)) or {}
        states[client] = {n: t.numpy().tobytes() for n, t in sorted(tensors.items())}
    return states


@pytest.mark.parametrize("method", METHODS)
def test_stopped_and_resumed_selects_the_same_as_uninterrupted(method, clients, tmp_path):
    patient = fq.Selection(keep="best", patience=2)
    whole = train(clients, method, 6, selection=patient, out=tmp_path / "whole")
    draw, is_stopped = random.Random(1), False
    for attempt in range(30):
        watch = stop_after(draw.randrange(4, 14)) if attempt < 20 else lambda event: None
        try:
            more = {"out": tmp_path / "cut", "resume": attempt > 0, "callbacks": [watch]}
            cut = train(clients, method, 6, selection=patient, **more)
            break
        except StopNow:
            is_stopped = True
    assert is_stopped
    assert bits(cut) == bits(whole)
    assert cut.scores == whole.scores
    assert cut.info.model_round == whole.info.model_round < whole.info.trained_rounds
    assert read_states(cut) == read_states(whole)
    records = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "cut")]
    assert records[0] == records[1]


@pytest.mark.parametrize("method", ["heterofl", "pfedme"])
def test_a_finished_run_goes_on_from_its_last_round_and_not_from_the_best(
    method, clients, tmp_path
):
    """Clients' states of the model that is kept are beside those of the last round."""
    train(clients, method, 3, out=tmp_path / "run")
    longer = train(clients, method, 5, out=tmp_path / "run", resume=True)
    straight = train(clients, method, 5, out=tmp_path / "straight")
    records = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("run", "straight")]
    assert records[0] == records[1]
    assert bits(longer) == bits(straight)
    assert longer.info.model_round == straight.info.model_round
    assert read_states(longer) == read_states(straight)


def test_a_run_stops_after_as_many_evaluations_as_it_has_patience(clients, tmp_path):
    events: list[Any] = []
    patient = fq.Selection(keep="last", patience=2)
    run = train(clients, rounds=9, selection=patient, callbacks=[events.append], out=tmp_path)
    (stop,) = (e for e in events if isinstance(e, StoppedEarly))
    assert stop.num_evaluations == 2
    assert stop.round == stop.best_round + 2 == run.state.round == run.info.trained_rounds < 9
    line = describe_event(stop, 9)
    assert line.endswith(
        f"no better model in 2 evaluations since round {stop.best_round} · stopping"
    )
    again = fq.open_run(tmp_path, make_net(), METHODS["heterofl"])
    assert again.info.model_round == run.info.model_round
    assert again.scores == run.scores
    assert f"model of round {stop.round}; {stop.round} of 9 trained" in repr(again)


def compare_all(values: list[float | None], **settings: Any) -> list[tuple[int, int]]:
    """The best round and the evaluations since, after each of these scores."""
    metric = MetricInfo(higher_is_better=settings.pop("higher_is_better", True))
    selection, progress, found = fq.Selection(keep="best", **settings), SelectionProgress(), []
    for number, value in enumerate(values, 1):
        progress = progress.compare(selection, fq.State(number, "train", {}), {}, value, metric)
        found.append((progress.best_round, progress.num_worse))
    return found


def test_a_score_must_be_better_by_more_than_the_least_difference():
    values = [0.5, 0.55, 0.61, 0.61, None, 0.7]
    assert compare_all(values) == [(1, 0), (2, 0), (3, 0), (3, 1), (3, 2), (6, 0)]
    by_more = compare_all(values, min_delta=0.1)
    assert by_more == [(1, 0), (1, 1), (3, 0), (3, 1), (3, 2), (3, 3)]
    assert compare_all([None, 0.1]) == [(0, 1), (2, 0)]


def test_of_an_error_the_smaller_one_is_better():
    values = [3.0, 2.0, 1.95, 2.5, 1.0]
    assert compare_all(values, higher_is_better=False)[-1] == (5, 0)
    by_more = compare_all(values, higher_is_better=False, min_delta=0.1)
    assert by_more == [(1, 0), (2, 0), (2, 1), (2, 2), (5, 0)]


def test_sizes_are_compared_by_their_mean_or_by_the_worst():
    scores = [fq.SizeScore(w, 1, 1, a, None, None, 10) for w, a in ((1.0, 0.8), (0.5, 0.2))]
    assert compute_score(scores, fq.Selection()) == pytest.approx(0.5)
    assert compute_score(scores, fq.Selection(over="worst")) == pytest.approx(0.2)
    assert compute_score([], fq.Selection()) is None


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("make", [fq.SplitMix, fq.fedavg_at])
def test_models_are_compared_as_split_mix_selects(make, share):
    """The mean over clients at the largest size: (1 - share) · clean + share · under attack."""
    pixels, labels = make_data(72, 1)
    pixels = torch.sigmoid(3 * (pixels - 1))
    people = fq.make_clients(
        (pixels[:48], labels[:48]), test=(pixels[48:], labels[48:]), count=3, validation=0.3
    )
    training = fq.LocalTraining(lr=0.05, epochs=2, batch_size=6)
    options = {"base": 0.5, "robust": True} if make is fq.SplitMix else {}
    method = make(training, epsilon=0.2, steps=2, **options)
    events: list[Any] = []
    run = train(
        people,
        method,
        rounds=2,
        selection=fq.Selection(over="largest", robust=share, patience=9),
        callbacks=[events.append],
    )
    compared = [e.validation for e in events if isinstance(e, fq.Evaluated) and not e.is_final]
    held = replace(people, test=people.validation)
    dials = (0.0, 1.0) if make is fq.SplitMix else ()
    clean, *_, attacked = 2 * run.evaluate(
        held, widths=1.0, robustness=dials, attack=method.attack, workers=0
    )
    expected = (1 - share) * clean.user_accuracy + share * attacked.robust_accuracy
    assert compared[-1] == pytest.approx(expected)
    assert clean.user_accuracy != attacked.robust_accuracy


def test_a_selection_that_cannot_be_made_is_refused_at_the_door(clients, tmp_path):
    unheld = fq.make_clients(make_data(24, 1), count=2)
    with pytest.raises(ConfigError, match=r"no client has any; hold some back: validation=0\.1"):
        train(unheld, out=tmp_path / "run")
    with pytest.raises(ConfigError, match="evaluate_every is 0"):
        train(clients, cadence=fq.Cadence(), out=tmp_path / "run")
    with pytest.raises(ConfigError, match="no part of the privacy budget pays for it"):
        train(clients, "fedavg", privacy=fq.Privacy(epsilon=8.0), out=tmp_path / "run")
    with pytest.raises(ConfigError, match="HeteroFL trains against no attack, so models cannot"):
        train(clients, selection=fq.Selection(keep="best", robust=0.5), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    for wrong in ({"keep": "first"}, {"patience": 0}, {"min_delta": -1.0}, {"over": "best"}):
        with pytest.raises(ConfigError, match=f"setting '{next(iter(wrong))}' of Selection"):
            fq.Selection(**wrong)


def test_the_best_so_far_is_part_of_a_checkpoint(clients, tmp_path):
    run = train(clients, rounds=4, out=tmp_path)
    newest = sorted((tmp_path / "checkpoints").glob("round-*"))[-1]
    selection = json.loads((newest / "state.json").read_text())
    selection = selection.get("document", selection)["selection"]
    assert selection["best"]["round"] == run.info.model_round
    assert selection["num_worse"] == 4 - run.info.model_round
    assert Path(newest / "best-params.safetensors").is_file()
