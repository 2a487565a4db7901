"""Centralised training: everybody's data in one place."""

from __future__ import annotations

import pytest
import torch

import fedquilt as fq
from fedquilt.data import Examples
from fedquilt.data.pipeline import get_augmentation
from fedquilt.errors import TrainingError
from fedquilt.evaluation.clients import compute_client_scores, compute_trained_fractions
from fedquilt.federation.client import EVERYONE, SERVER
from fedquilt.report.progress import ProgressState
from fedquilt.report.run_report import build_report
from fedquilt.runs.event_lines import describe_event
from fedquilt.runs.events import ClientDone, RoundDone
from fedquilt.training.context import ClientContext

STEPS = fq.LocalTraining(lr=0.05, epochs=2, batch_size=5, max_grad_norm=None)


def images(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(256, (count, 1, 5, 5), generator=generator, dtype=torch.uint8)
    return Examples(x, torch.randint(4, (count,), generator=generator))


def bits(run):
    return {n: t.numpy().tobytes() for n, t in run.state.params.items()}


@pytest.mark.parametrize("workers", [0, 2])
def test_it_is_fedavg_with_one_client_that_has_all_the_data(world, workers):
    model, example = world.setup.model, world.setup.example
    whole = images(23, 0)
    parts = [whole.select(rows) for rows in torch.arange(23).split([4, 1, 11, 7])]
    alone = fq.train(
        model, example, fq.FedAvg(STEPS, fraction=1.0), fq.make_clients([whole]), 3, workers=0
    )
    gathered = fq.train(
        model, example, fq.Centralised(STEPS), fq.make_clients(parts), 3, workers=workers
    )
    assert bits(gathered) == bits(alone)
    assert not gathered.state.params["classifier.bias"].equal(model.classifier.bias)


def test_who_is_sampled_and_in_which_order_data_are_given_does_not_matter(world):
    method, setup = fq.Centralised(STEPS), world.setup
    state = world.start(method)
    for cohort in (setup.clients, setup.clients[::-1], setup.clients[2:3], ()):
        (task,) = method.plan(setup, state, cohort)
        assert (task.client, task.subnets) == (EVERYONE, (fq.Subnet(),))
        assert task.recipe.labels == (0, 1, 2, 3)
    data = world.people.data
    turned = {split: dict(reversed(list(own.items()))) for split, own in data.items()}
    found = [
        ClientContext(setup.model, setup.structure, given).examples("train", EVERYONE)
        for given in (data, turned)
    ]
    assert found[0].labels.tolist() == [y for c in range(4) for y in data["train"][c].labels]
    assert found[0].labels.equal(found[1].labels)
    assert len(found[0]) == sum(client.num_examples for client in setup.clients)


def test_the_servers_held_out_data_are_nobodys(world):
    context = ClientContext(world.setup.model, world.setup.structure, world.people.data)
    assert SERVER in world.people.test
    assert len(context.examples("test", EVERYONE)) == 4 * 5
    assert context.examples("test", EVERYONE) is context.examples("test", EVERYONE)


def test_augmented_images_give_the_same_bits_with_any_workers_and_after_a_stop(world, tmp_path):
    model, example = world.setup.model, world.setup.example
    people = fq.make_clients(
        [images(9, seed) for seed in range(3)], transforms=get_augmentation("crop-flip").training
    )
    method = fq.Centralised(STEPS)

    class Stop(KeyboardInterrupt):
        pass

    def stop(event):
        if isinstance(event, RoundDone) and event.round == 2:
            raise Stop

    def go(people=people, **settings):
        settings = {"workers": 0, **settings}
        return bits(fq.train(model, example, method, people, 3, **settings))

    expected = go()
    assert go(workers=2) == expected
    with pytest.raises(Stop):
        go(out=tmp_path / "run", callbacks=[stop], cadence=fq.Cadence(checkpoint_every=1))
    assert go(out=tmp_path / "run", resume=True) == expected
    assert go(fq.make_clients([images(9, seed) for seed in range(3)])) != expected


def test_reports_know_that_no_client_trained_and_all_data_were_seen(world, tmp_path):
    method, people, setup = fq.Centralised(STEPS), world.people, world.setup
    events = []
    run = fq.train(
        setup.model,
        setup.example,
        method,
        people,
        2,
        workers=0,
        out=tmp_path / "run",
        callbacks=[events.append],
    )
    assert [e.client for e in events if isinstance(e, ClientDone)] == [EVERYONE] * 2
    seen = ProgressState(2)
    for event in events:
        seen.update(event)
        describe_event(event, 2)
    assert (seen.num_done, seen.finished_rounds) == (1, 2)
    (records,) = zip(*run.read_clients(), strict=True)
    scores = compute_client_scores(setup, records)
    assert [(s.client, s.rounds, s.params_per_round) for s in scores] == [
        (client, 0, 0.0) for client in range(4)
    ]
    assert compute_trained_fractions(setup, records) == {"": 1.0}
    story = build_report("reference", run, people, workers=0)
    assert [score.client for score in story.clients] == [0, 1, 2, 3]
    assert all(score.value is not None for score in story.clients)
    assert not story.nets
    assert run.scores[0].value is not None


def test_a_divergence_is_refused_and_named(world):
    method = fq.Centralised(fq.LocalTraining(lr=1e30))
    named = r"no client gave a usable answer.*; all clients together sent .*not finite"
    with pytest.raises(TrainingError, match=named):
        fq.train(world.setup.model, world.setup.example, method, world.people, 1, workers=0)
