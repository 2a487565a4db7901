"""Scores of every size, against direct computation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.data import to_examples
from fedquilt.engines.local import LocalEngine
from fedquilt.errors import ConfigError, TrainingError
from fedquilt.evaluation.accuracy import compute_ensemble_cost, evaluate, evaluate_by_client
from fedquilt.federation.client import SERVER, Client, Failure, derive_seed
from fedquilt.federation.state import Setup, State
from fedquilt.structure.cut import build_module
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.tensors import named_tensors
from fedquilt.training.attack import PGD
from fedquilt.training.scaler import scale_outputs

LABELS = ((0, 1), (2,), (0, 1, 2))


def drawn(labels, count, seed):
    generator = torch.Generator().manual_seed(seed)
    y = torch.tensor([labels[i % len(labels)] for i in range(count)])
    return to_examples((torch.randn(count, 4, generator=generator), y))


@pytest.fixture(scope="module")
def setup() -> Setup:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    structure = fq.trace_structure(net, torch.zeros(2, 4))
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
    small = build_module(setup.model, setup.structure, setup.structure.subnet(width)).eval()
    with torch.no_grad(), scale_outputs(small, setup.structure):  # as HeteroFL trains it
        return small(examples.inputs)


def test_global_and_local_accuracy_are_the_papers(setup, data, engine):
    scores = evaluate(
        setup, fq.HeteroFL(), state_of(setup), engine,
        has_server_test=True, testers=(0, 1, 2), widths=(1.0, 0.5),
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


def test_user_accuracy_counts_every_client_once_and_allows_every_class(setup, data, engine):
    scores = evaluate(
        setup, fq.HeteroFL(), state_of(setup), engine,
        has_server_test=True, testers=(0, 1, 2), widths=(1.0, 0.5),
    )  # fmt: skip
    for score in scores:
        shares = []
        for client in range(3):
            own = data["test"][client]
            right = logits(setup, score.width, own).argmax(1) == own.labels
            shares.append(right.double().mean().item())
        assert score.user_accuracy == pytest.approx(sum(shares) / 3)
        weighted = sum(s * len(data["test"][c]) for c, s in enumerate(shares)) / 21
        assert score.user_accuracy != pytest.approx(weighted)  # clients have 3, 7 and 11 examples
        assert (score.robustness, score.robust_accuracy) == (None, None)


def test_user_accuracy_in_each_domain_is_the_mean_over_its_clients(setup, data, engine):
    def found(*groups):
        clients = tuple(replace(c, group=g) for c, g in zip(setup.clients, groups, strict=True))
        return evaluate(
            replace(setup, clients=clients), fq.HeteroFL(), state_of(setup), engine,
            has_server_test=True, testers=(0, 1, 2), widths=(1.0, 0.5),
        )  # fmt: skip

    for score in found("sea", "land", "sea"):
        shares = []
        for client in range(3):
            own = data["test"][client]
            right = logits(setup, score.width, own).argmax(1) == own.labels
            shares.append(right.double().mean().item())
        expected = {"sea": (shares[0] + shares[2]) / 2, "land": shares[1]}
        assert score.group_accuracy == pytest.approx(expected)
    for groups in (("sea", "sea", "sea"), ("a", "b", "c")):  # nothing to compare, or clients
        assert all(score.group_accuracy is None for score in found(*groups))


def test_each_clients_accuracy_is_that_of_the_largest_net(setup, data, engine):
    found = evaluate_by_client(
        setup, fq.HeteroFL(widths=(0.5, 1.0)), state_of(setup), engine, (0, 2)
    )
    assert set(found) == {0, 2}
    for client, share in found.items():
        own = data["test"][client]
        right = logits(setup, 1.0, own).argmax(1) == own.labels
        assert share == pytest.approx(right.double().mean().item())


def test_what_nobody_has_data_for_has_no_score(setup, engine):
    state, method = state_of(setup), fq.HeteroFL()
    (nothing,) = evaluate(
        setup, method, state, engine, has_server_test=False, testers=(), widths=(1.0,)
    )
    assert (nothing.accuracy, nothing.local_accuracy, nothing.loss) == (None, None, None)
    (local,) = evaluate(
        setup, method, state, engine, has_server_test=False, testers=(1,), widths=(1.0,)
    )
    assert local.accuracy is None
    assert local.local_accuracy is not None
    assert local.num_examples == 7


def test_personal_models_are_scored_one_by_one(setup, data, engine):
    method = fq.standalone(fq.LocalTraining(lr=0.5, epochs=2, batch_size=4))
    state = replace(method.start(setup), phase="train")
    updates = list(engine.run(method.plan(setup, state, setup.clients)))
    assert not any(isinstance(u, Failure) for u in updates)
    (score,) = evaluate(setup, method, state, engine, has_server_test=True, testers=(0, 1, 2))
    from safetensors.torch import load_file

    hits = 0
    server = data["test"][SERVER]
    for client in setup.clients:
        small = build_module(setup.model, setup.structure, setup.structure.subnet(1.0))
        small.load_state_dict(load_file(engine._states.current_path(client.id)))
        with torch.no_grad():
            hits += (small(server.inputs).argmax(1) == server.labels).sum().item()
    assert score.accuracy == pytest.approx(hits / (3 * 29))


def test_evaluation_changes_nothing(setup, engine):
    state = state_of(setup)
    method = fq.lg_fedavg(shared=("2.*",))
    before = {n: t.clone() for n, t in state.params.items()}
    evaluate(setup, method, state, engine, has_server_test=True, testers=(0, 1, 2))
    assert all(t.equal(before[n]) for n, t in state.params.items())
    assert engine.client_versions() == {}


def test_a_model_that_diverged_has_no_loss_but_an_accuracy(setup, engine):
    state = state_of(setup)
    broken = {**state.params, "2.bias": torch.tensor([float("inf"), 0.0, 0.0])}
    (score,) = evaluate(
        setup, fq.HeteroFL(), replace(state, params=broken), engine,
        has_server_test=True, testers=(), widths=(1.0,),
    )  # fmt: skip
    assert score.loss is None
    assert 0 <= score.accuracy <= 1


def test_held_out_data_that_cannot_be_evaluated_are_an_error(setup, engine):
    broken = replace(state_of(setup), params={})
    with pytest.raises(TrainingError, match="held-out data could not be evaluated"):
        evaluate(setup, fq.HeteroFL(), broken, engine, has_server_test=True, testers=())


def test_a_client_that_fails_is_left_out(setup, engine):
    stranger = replace(setup, clients=(*setup.clients, Client(99, 1, (0,))))
    known = tuple(c.id for c in setup.clients)

    def scores(where, testers):
        return evaluate(
            where, fq.HeteroFL(), state_of(setup), engine, has_server_test=False, testers=testers
        )

    assert scores(stranger, (*known, 99)) == scores(setup, known)


# mixes of several nets, and robustness


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.conv(x)).relu().mean((2, 3)))


class Robust:
    """A robust Split-Mix of four bases whose halves differ, and its clients."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        net, example = Tiny(), torch.zeros(2, 1, 5, 5)
        clients = tuple(Client(i, 8, labels) for i, labels in enumerate(LABELS))
        whole = Setup(net, fq.trace_structure(net, example), example, clients, 1, 0)
        self.method = fq.SplitMix(base=0.25, robust=True)
        self.setup = self.method.prepare_model(whole)
        params = self.method.start(self.setup).params
        self.params = {
            n: t + 0.5 * torch.rand(t.shape) if t.is_floating_point() else t
            for n, t in params.items()
        }
        self.data = {"train": {}, "test": {i: self.images(4 + 3 * i, i) for i in range(3)}}
        self.data["test"][SERVER] = self.images(20, 9)
        x = self.data["test"][SERVER].inputs
        for i in range(4):  # so that no class always wins
            with torch.no_grad():
                self.params[f"out.bias@{i}"] -= self.logits((i,), x, 0.5).mean(0)
        for client in range(3):  # mostly right answers, so that an attack can spoil some
            test = self.data["test"][client]
            with torch.no_grad():
                right = self.logits(range(4), test.inputs, 0.5).argmax(1)
            labels = torch.where(torch.arange(len(test)) % 3 == 0, test.labels, right)
            self.data["test"][client] = replace(test, labels=labels)

    @staticmethod
    def images(count: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        x = torch.rand(count, 1, 5, 5, generator=generator)
        return to_examples((x, torch.randint(3, (count,), generator=generator)))

    def logits(self, mix, x: Tensor, dial: float) -> Tensor:
        """Eq. 2 inside every base, then the mean of the first bases' logits."""
        found = []
        for i in mix:
            net = build_module(
                self.setup.model,
                self.setup.structure,
                Subnet().with_private(str(i), "*"),
                self.params,
            ).eval()
            y = net.conv(x)
            y = (1 - dial) * net.norm.clean(y) + dial * net.norm.noise(y)
            found.append(net.out(y.relu().mean((2, 3))))
        return torch.stack(found).mean(0)

    def scores(self, **asked):
        state = State(1, "", self.params)
        with LocalEngine(self.setup.model, self.setup.structure, self.data, workers=0) as engine:
            return evaluate(
                self.setup, self.method, state, engine,
                has_server_test=True, testers=(0, 1, 2), **asked,
            )  # fmt: skip


@pytest.fixture(scope="module")
def robust() -> Robust:
    return Robust()


def share(logits: Tensor, labels: Tensor) -> float:
    return (logits.argmax(1) == labels).double().mean().item()


def test_every_size_is_scored_at_every_point_of_the_dial(robust):
    scores = robust.scores(widths=(1.0, 0.5, 0.25), robustness=(0.0, 0.4, 1.0))
    points = [(dial, width) for dial in (0.0, 0.4, 1.0) for width in (1.0, 0.5, 0.25)]
    assert [(s.robustness, s.width) for s in scores] == points
    one = compute_ensemble_cost(robust.setup, [Subnet()])
    for score in scores:
        bases = range(int(score.width / 0.25))
        with torch.no_grad():
            server = robust.data["test"][SERVER]
            logits = robust.logits(bases, server.inputs, score.robustness)
            shares = [
                share(robust.logits(bases, d.inputs, score.robustness), d.labels)
                for d in (robust.data["test"][c] for c in range(3))
            ]
        assert score.accuracy == pytest.approx(share(logits, server.labels))
        assert score.loss == pytest.approx(F.cross_entropy(logits, server.labels).item(), rel=1e-4)
        assert score.user_accuracy == pytest.approx(sum(shares) / 3)
        assert (score.params, score.macs) == (len(bases) * one.params, len(bases) * one.macs)
        assert score.robust_accuracy is None
    silent = robust.scores(widths=(1.0, 0.5, 0.25))  # no word about it: as for clean inputs
    assert silent == [replace(s, robustness=None) for s in scores[:3]]


def attacked(model, x, y, epsilon, steps, generator) -> Tensor:
    """PGD by hand on pixels."""
    step = min(1.25 * epsilon, epsilon + 4 / 255) / steps
    worse = (x + epsilon * (2 * torch.rand(x.shape, generator=generator) - 1)).clamp(0, 1)
    for _ in range(steps):
        worse = worse.detach().requires_grad_()
        loss = F.cross_entropy(model(worse), y, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, worse)
        worse = worse.detach() + step * gradient.sign()
        worse = torch.minimum(torch.maximum(worse, x - epsilon), x + epsilon).clamp(0, 1)
    return worse


def test_robust_accuracy_is_each_clients_under_attack_averaged_over_clients(robust):
    asked = {"widths": (1.0, 0.25), "robustness": (0.5,)}
    scores = robust.scores(**asked, attack=PGD(epsilon=0.08, steps=2))
    shares: dict[float, list[float]] = {1.0: [], 0.25: []}
    for client in range(3):
        test = robust.data["test"][client]
        generator = torch.Generator().manual_seed(derive_seed(0, client))
        for width, found in shares.items():

            def model(x, width=width):
                return robust.logits(range(int(width / 0.25)), x, 0.5)

            worse = attacked(model, test.inputs, test.labels, 0.08, 2, generator)
            found.append(share(model(worse), test.labels))
    for score in scores:
        assert score.robust_accuracy == pytest.approx(sum(shares[score.width]) / 3)
    assert scores[0].robust_accuracy < scores[0].user_accuracy
    clean = robust.scores(**asked)
    assert [replace(s, robust_value=None) for s in scores] == clean


def test_a_dial_that_is_not_there_cannot_be_turned(setup, engine):
    with pytest.raises(ConfigError, match=r"no robustness to choose.*method\.robust"):
        evaluate(
            setup, fq.HeteroFL(), state_of(setup), engine,
            has_server_test=True, testers=(), robustness=(0.5,),
        )  # fmt: skip


def tagged(setup, held_out, scale=1.0):
    """The score of a net that answers at every position."""
    net = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 3))
    structure = fq.trace_structure(net, torch.zeros(2, 5, dtype=torch.int64))
    texts = Setup(net, structure, torch.zeros(2, 5, dtype=torch.int64), (), 1, 0)
    params = {n: scale * t.detach() for n, t in named_tensors(net).items()}
    with LocalEngine(net, structure, {"test": {SERVER: held_out}}, workers=0) as engine:
        method = fq.FedAvg()
        (score,) = evaluate(
            texts, method, State(1, "", params), engine, has_server_test=True, testers=()
        )
    return score, params


def test_perplexity_is_told_where_examples_have_several_targets(setup, engine):
    tokens = torch.arange(35).view(7, 5) % 3
    score, params = tagged(setup, to_examples((tokens, tokens.flip(1))))
    logits = F.linear(params["0.weight"][tokens], params["1.weight"], params["1.bias"])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens.flip(1).flatten())
    assert score.num_examples == 35
    assert score.loss == pytest.approx(loss.item())
    assert score.perplexity == pytest.approx(loss.exp().item())
    assert score.accuracy == pytest.approx(share(logits.flatten(0, 1), tokens.flip(1).flatten()))
    lost, _ = tagged(setup, to_examples((tokens, tokens.flip(1))), scale=1e4)
    assert lost.loss > 1000
    assert lost.perplexity is None  # not a number that a file could hold
    asked = {"has_server_test": True, "testers": (0, 1, 2)}
    scores = evaluate(setup, fq.FedAvg(), state_of(setup), engine, **asked)
    assert [s.perplexity for s in scores] == [None]
