"""Scores of every size, against direct computation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import fedquilt as fq
from fedquilt.data.examples import as_examples
from fedquilt.engines.local import LocalEngine
from fedquilt.errors import TrainingError
from fedquilt.evaluation.accuracy import evaluate
from fedquilt.federation.client import SERVER, Client, Failure
from fedquilt.federation.state import Setup, State
from fedquilt.structure.cut import build
from fedquilt.structure.trace import named_tensors

LABELS = ((0, 1), (2,), (0, 1, 2))


def drawn(labels, count, seed):
    generator = torch.Generator().manual_seed(seed)
    y = torch.tensor([labels[i % len(labels)] for i in range(count)])
    return as_examples((torch.randn(count, 4, generator=generator), y))


@pytest.fixture(scope="module")
def setup() -> Setup:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    structure = fq.Structure.trace(net, torch.zeros(2, 4))
    clients = tuple(Client(i, 8, labels) for i, labels in enumerate(LABELS))
    return Setup(net, structure, torch.zeros(2, 4), clients, 1, 0)


@pytest.fixture(scope="module")
def data() -> dict:
    test = {i: drawn(labels, 3 + 4 * i, i) for i, labels in enumerate(LABELS)}
    train = {i: drawn(labels, 8, 20 + i) for i, labels in enumerate(LABELS)}
    return {"train": train, "test": {**test, SERVER: drawn((0, 1, 2), 29, 9)}}


@pytest.fixture
def engine(setup, data):
    with LocalEngine(setup.model, setup.structure, data, workers=0) as found:
        yield found


def state_of(setup: Setup) -> State:
    return State(1, "", {n: t.detach().clone() for n, t in named_tensors(setup.model).items()})


def logits(setup, width, examples):
    small = build(setup.model, setup.structure, setup.structure.subnet(width)).eval()
    with torch.no_grad():
        return small(examples.inputs)


def test_global_and_local_accuracy_are_the_papers(setup, data, engine):
    scores = evaluate(
        setup, fq.HeteroFL(), state_of(setup), engine,
        held_out=True, testers=(0, 1, 2), widths=(1.0, 0.5),
    )  # fmt: skip
    for score in scores:
        server = data["test"][SERVER]
        found = logits(setup, score.width, server)
        hits = (found.argmax(1) == server.labels).sum().item()
        assert score.accuracy == pytest.approx(hits / 29)
        loss = nn.functional.cross_entropy(found, server.labels).item()
        assert score.loss == pytest.approx(loss, rel=1e-5)
        local = examples = 0
        for client, labels in enumerate(LABELS):
            own = data["test"][client]
            best = logits(setup, score.width, own)[:, list(labels)].argmax(1)
            local += sum(labels[i] == y for i, y in zip(best.tolist(), own.labels, strict=True))
            examples += len(own)
        assert score.local_accuracy == pytest.approx(int(local) / examples)
        assert score.num_examples == 29
    assert [(s.width, s.params, s.macs) for s in scores] == [(1.0, 51, 42), (0.5, 27, 21)]


def test_what_nobody_has_data_for_has_no_score(setup, engine):
    state, method = state_of(setup), fq.HeteroFL()
    (nothing,) = evaluate(setup, method, state, engine, held_out=False, testers=(), widths=(1.0,))
    assert (nothing.accuracy, nothing.local_accuracy, nothing.loss) == (None, None, None)
    (local,) = evaluate(setup, method, state, engine, held_out=False, testers=(1,), widths=(1.0,))
    assert local.accuracy is None
    assert local.local_accuracy is not None
    assert local.num_examples == 7


def test_personal_models_are_scored_one_by_one(setup, data, engine):
    method = fq.standalone(fq.Optimiser(lr=0.5, epochs=2, batch_size=4))
    state = replace(method.start(setup), phase="train")
    updates = [u for c in setup.clients for u in engine.run(method.plan(setup, state, c))]
    assert not any(isinstance(u, Failure) for u in updates)
    (score,) = evaluate(setup, method, state, engine, held_out=True, testers=(0, 1, 2))
    from safetensors.torch import load_file

    hits = 0
    server = data["test"][SERVER]
    for client in setup.clients:
        small = build(setup.model, setup.structure, setup.structure.subnet(1.0))
        small.load_state_dict(load_file(engine._states.current(client.id)))
        with torch.no_grad():
            hits += (small(server.inputs).argmax(1) == server.labels).sum().item()
    assert score.accuracy == pytest.approx(hits / (3 * 29))


def test_evaluation_changes_nothing(setup, engine):
    state = state_of(setup)
    method = fq.lg_fedavg(shared=("2.*",))
    before = {n: t.clone() for n, t in state.params.items()}
    evaluate(setup, method, state, engine, held_out=True, testers=(0, 1, 2))
    assert all(t.equal(before[n]) for n, t in state.params.items())
    assert engine.kept() == {}


def test_a_model_that_diverged_has_no_loss_but_an_accuracy(setup, engine):
    state = state_of(setup)
    broken = {**state.params, "2.bias": torch.tensor([float("inf"), 0.0, 0.0])}
    (score,) = evaluate(
        setup, fq.HeteroFL(), replace(state, params=broken), engine,
        held_out=True, testers=(), widths=(1.0,),
    )  # fmt: skip
    assert score.loss is None
    assert 0 <= score.accuracy <= 1


def test_held_out_data_that_cannot_be_evaluated_are_an_error(setup, engine):
    broken = replace(state_of(setup), params={})
    with pytest.raises(TrainingError, match="held-out data could not be evaluated"):
        evaluate(setup, fq.HeteroFL(), broken, engine, held_out=True, testers=())


def test_a_client_that_fails_is_left_out(setup, engine):
    stranger = replace(setup, clients=(*setup.clients, Client(99, 1, (0,))))
    known = tuple(c.id for c in setup.clients)

    def scores(where, testers):
        return evaluate(
            where, fq.HeteroFL(), state_of(setup), engine, held_out=False, testers=testers
        )

    assert scores(stranger, (*known, 99)) == scores(setup, known)
