"""Which parts of aggregation go together, and that each works in its place."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.errors import ConfigError, UpdateError
from fedquilt.federation.aggregation import (
    Aggregate,
    AggregationPipeline,
    Aggregator,
    Decoder,
    Mean,
    PlainDecoder,
    ServerUpdate,
    UpdateTransform,
    Validator,
    average,
    chain,
)
from fedquilt.federation.client import Client, Failure, Task
from fedquilt.federation.state import Setup, State
from fedquilt.training.local_sgd import LocalSGD


@dataclass(frozen=True)
class Negate(Decoder):
    def decode(self, setup, state, update):
        return replace(update, params=tuple({n: -t for n, t in p.items()} for p in update.params))


@dataclass(frozen=True)
class RefuseLarge(Validator):
    limit: float

    def validate(self, setup, state, update):
        if max(float(t.abs().max()) for part in update.params for t in part.values()) > self.limit:
            raise UpdateError(f"client {update.client} sent more than {self.limit}")


@dataclass(frozen=True)
class Clip(UpdateTransform):
    """Clips the change of an update to a norm: it needs the server's values, and each update."""

    norm: float
    is_linear = False

    def transform(self, setup, state, update):
        clipped = []
        for subnet, part in zip(update.subnets, update.params, strict=True):
            old = fq.copy_subnet_tensors(state.params, setup.structure, subnet)
            size = torch.sqrt(sum((part[n] - old[n]).square().sum() for n in part))
            scale = min(1.0, self.norm / float(size))
            clipped.append({n: old[n] + scale * (t - old[n]) for n, t in part.items()})
        return replace(update, params=tuple(clipped))


@dataclass(frozen=True)
class Median(Aggregator):
    """The median of whole models: it needs all of them at once."""

    is_linear = False
    needs_all_updates = True

    def aggregate(self, setup, state, updates):
        sent = [update.params[0] for update in updates]
        params = {n: torch.stack([part[n] for part in sent]).median(0).values for n in sent[0]}
        return Aggregate(params, lambda name: torch.ones(params[name].shape, dtype=torch.bool))


@dataclass(frozen=True)
class SecureSum(Mean):
    needs_linear_parts = True


@dataclass(frozen=True)
class PublicMean(Mean):
    has_public_denominator = True


@dataclass(frozen=True)
class AddNoise(ServerUpdate):
    moves_params = False
    needs_public_denominator = True

    def apply(self, setup, state, aggregate):
        return state


@dataclass(frozen=True)
class ClientsChoose(ServerUpdate):
    moves_params = False
    reveals_data = True

    def apply(self, setup, state, aggregate):
        return replace(state, method_state={"seen": [r.client for r in aggregate.replies]})


@dataclass(frozen=True)
class Changes(PlainDecoder):
    gives_changes = True


@pytest.fixture(scope="module")
def setup() -> Setup:
    torch.manual_seed(0)
    model, example = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), torch.zeros(1, 2)
    clients = tuple(Client(number, 9) for number in range(3))
    return Setup(model, fq.trace_structure(model, example), example, clients, rounds=1, seed=0)


@pytest.fixture(scope="module")
def state(setup: Setup) -> State:
    return State(0, "train", {n: t.clone() for n, t in setup.model.state_dict().items()})


@pytest.fixture(scope="module")
def updates(setup: Setup, state: State) -> list[fq.Update]:
    draw = torch.Generator().manual_seed(0)

    def sent() -> dict[str, Tensor]:
        return {n: t + torch.randn(t.shape, generator=draw) for n, t in state.params.items()}

    metrics = {"loss": 1.0, "examples": 9}
    return [fq.Update(number, (fq.Subnet(),), (sent(),), 1.0, metrics) for number in range(3)]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((Mean(), Clip(1.0)), "work in the order .*, got Aggregator, UpdateTransform"),
        ((Mean(), Median()), "one part of a kind, got Mean.*Median"),
        ((Negate(), PlainDecoder()), "one part of a kind"),
        ((fq.FedAdam(), fq.FedAvgM()), "one server update moves .* got FedAdam.*FedAvgM"),
        (("mean",), "one of Decoder, .*, got 'mean'"),
        ((Changes(),), "gives changes, and Mean.* merges values"),
        ((Clip(1.0), SecureSum()), "sees nothing but sums of updates, and Clip"),
        ((RefuseLarge(1.0), SecureSum()), "sees nothing but sums of updates, and RefuseLarge"),
        ((Mean(), AddNoise()), "AddNoise.* divided by public numbers, and Mean"),
        ((PublicMean(), AddNoise(), ClientsChoose()), "with ClientsChoose.* the cells .* tell of"),
    ],
)
def test_parts_that_do_not_go_together_are_refused_when_they_are_chained(parts, said):
    with pytest.raises(ConfigError, match=said):
        chain(*parts)


def test_parts_that_go_together_do(updates, setup, state):
    pipeline = chain(SecureSum(), fq.FedAdam(), ClientsChoose())
    assert pipeline.is_linear
    assert pipeline.merge(setup, state, updates).method_state == {"seen": [0, 1, 2]}
    assert not chain(Clip(1.0)).is_linear
    assert not chain(Median()).is_linear
    assert chain(PublicMean(), AddNoise()).server_updates == (fq.ServerSGD(), AddNoise())
    assert chain() == AggregationPipeline()


def test_clipping_bounds_how_far_one_client_moves_the_mean(setup, state, updates):
    far = [replace(u, params=({n: 1e6 * t for n, t in u.params[0].items()},)) for u in updates]
    after = chain(Clip(0.5)).merge(setup, state, far).params
    moved = torch.sqrt(sum((after[n] - t).square().sum() for n, t in state.params.items()))
    assert 0 < moved <= 0.5 + 1e-3
    loose = chain(Clip(1e9)).merge(setup, state, updates).params
    for name, tensor in average(state.params, setup.structure, updates).items():
        torch.testing.assert_close(loose[name], tensor)


def test_a_median_forgets_one_liar_and_feeds_any_server_optimizer(setup, state, updates):
    liar = replace(updates[0], params=({n: t + 1e9 for n, t in updates[0].params[0].items()},))
    for optimizer in (fq.ServerSGD(), fq.FedAvgM(momentum=0.0)):
        after = chain(Median(), optimizer).merge(setup, state, [liar, *updates[1:]]).params
        assert max(float(t.abs().max()) for t in after.values()) < 10


def test_replies_are_decoded_then_validated(setup, state, updates):
    task = Task(0, (fq.Subnet(),), state.params, LocalSGD(fq.LocalTraining(), lr=0.1), 0)
    negated = chain(Negate(), RefuseLarge(100.0)).accept(setup, state, task, updates[0])
    assert isinstance(negated, fq.Update)
    assert all(negated.params[0][n].equal(-t) for n, t in updates[0].params[0].items())
    refused = chain(RefuseLarge(1e-3)).accept(setup, state, task, updates[0])
    assert refused == Failure(0, "client 0 sent more than 0.001")
    other = chain().accept(setup, state, replace(task, client=1), updates[0])
    assert isinstance(other, Failure)
    lost = Failure(0, "lost")
    assert chain().accept(setup, state, task, lost) == lost


def test_server_updates_see_replies_without_their_tensors(setup, state, updates):
    seen = []

    class Look(ServerUpdate):
        moves_params = False

        def apply(self, setup, state, aggregate):
            seen.extend(aggregate.replies)
            return state

    chain(Look()).merge(setup, state, iter(updates))
    assert [(r.client, r.subnets, r.metrics) for r in seen] == [
        (u.client, u.subnets, u.metrics) for u in updates
    ]
    assert all(reply.params == () for reply in seen)
