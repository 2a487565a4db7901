"""Every optimizer, against PyTorch's own in a plain loop."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedquilt.errors import ConfigError
from fedquilt.federation.client import Task
from fedquilt.structure.create import trace_structure
from fedquilt.structure.cut import index_cells, view_cells
from fedquilt.structure.subnet import Subnet
from fedquilt.training.context import ClientContext
from fedquilt.training.local_sgd import LocalSGD
from fedquilt.training.loop import iterate_batches
from fedquilt.training.objectives import PlainLoss
from fedquilt.training.optimizer_state import OptimizerMemory
from fedquilt.training.optimizers import make_optimizer
from fedquilt.training.settings import LocalTraining, LoopSettings
from fedquilt.training.stack.program import find_program
from fedquilt.training.torch_optimizers import KNOWN, OPTIMIZERS, REFUSED, TorchOptimizer
from fedquilt.training.trainer import make_trainer

SEED = 11


def train_ours(
    context: ClientContext, settings: LocalTraining, params: Any, subnet: Subnet | None = None
) -> dict[str, Tensor]:
    recipe = LocalSGD(settings, lr=settings.lr)
    task = Task(0, (Subnet() if subnet is None else subnet,), params, recipe, SEED)
    (tensors,) = recipe.run(task, context).update.params
    return dict(tensors)


def train_plainly(
    context: ClientContext,
    settings: LocalTraining,
    params: Any,
    make: Callable[..., torch.optim.Optimizer],
    subnet: Subnet | None = None,
) -> dict[str, Tensor]:
    """A loop of PyTorch over the batches that the client sees."""
    net = copy.deepcopy(context.module(subnet or Subnet(), params)).train()
    optimizer = make(net.parameters())
    examples = context.examples("train", 0)
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(settings.epochs):
        for rows in iterate_batches(len(examples), settings.batch_size, generator):
            x, y = examples.batch(rows, generator)
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            if settings.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(net.parameters(), settings.max_grad_norm)
            optimizer.step()
    return {name: tensor.detach() for name, tensor in net.state_dict().items()}


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not one[name].equal(other[name])] == []


@pytest.mark.parametrize("max_grad_norm", [None, 0.05])
@pytest.mark.parametrize("width", [1.0, 0.5])
def test_adam_makes_the_steps_of_pytorch_bit_for_bit(context, params, width, max_grad_norm):
    settings = LocalTraining(
        optimizer="adam", lr=0.02, epochs=2, batch_size=5, max_grad_norm=max_grad_norm
    )
    subnet = context.structure.subnet(width)
    ours = train_ours(context, settings, params, subnet)
    adam = partial(torch.optim.Adam, lr=0.02)
    assert_same_bits(ours, train_plainly(context, settings, params, adam, subnet))


@pytest.mark.parametrize("name", KNOWN)
def test_every_optimizer_makes_the_steps_of_pytorch_bit_for_bit(name, context, params):
    if name == "sgd":  # by its name alone it is ours, which tests of SGDStep compare
        settings = LocalTraining(
            optimizer={"name": "sgd", "nesterov": True}, epochs=1, batch_size=5, max_grad_norm=None
        )
        make = partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=5e-4, nesterov=True)
    else:
        settings = LocalTraining(optimizer=name, epochs=1, batch_size=5, max_grad_norm=None)
        make = OPTIMIZERS[name]
    assert_same_bits(
        train_ours(context, settings, params), train_plainly(context, settings, params, make)
    )


def test_settings_of_an_optimizer_reach_it(context, params):
    settings = LocalTraining(
        optimizer={"name": "AdamW", "betas": [0.5, 0.6], "amsgrad": True},
        lr=0.03,
        weight_decay=0.3,
        epochs=1,
        max_grad_norm=None,
    )
    make = partial(torch.optim.AdamW, lr=0.03, betas=(0.5, 0.6), amsgrad=True, weight_decay=0.3)
    assert_same_bits(
        train_ours(context, settings, params), train_plainly(context, settings, params, make)
    )


def make_groups(weights: Any) -> torch.optim.Optimizer:
    """No weight decay on biases and norms, as many recipes have it."""
    weights = list(weights)
    return torch.optim.AdamW(
        [
            {"params": [w for w in weights if w.ndim > 1], "weight_decay": 0.1},
            {"params": [w for w in weights if w.ndim < 2], "weight_decay": 0.0, "lr": 0.001},
        ],
        lr=0.004,
    )


def test_a_factory_sets_everything_and_lr_is_a_factor_of_it(context, params, tmp_path):
    settings = LocalTraining(optimizer=make_groups, epochs=1, max_grad_norm=None)
    ours = train_ours(context, settings, params)
    assert_same_bits(ours, train_plainly(context, settings, params, make_groups))
    settings = LocalTraining(optimizer=torch.optim.Adam, lr=3.0, epochs=1, max_grad_norm=None)
    tripled = partial(torch.optim.Adam, lr=0.003)
    assert_same_bits(
        train_ours(context, settings, params), train_plainly(context, settings, params, tripled)
    )
    (tmp_path / "mine.py").write_text(
        "import torch\n\ndef make(weights):\n    return torch.optim.Adam(weights, lr=0.003)\n"
    )
    by_path = replace(settings, optimizer=f"{tmp_path}/mine.py:make", lr=1.0)
    assert_same_bits(train_ours(context, by_path, params), train_ours(context, settings, params))


def make_nothing(weights: Any) -> Any:
    return list(weights)


def test_a_factory_that_makes_no_optimizer_is_refused(context, params):
    settings = LocalTraining(optimizer=make_nothing)
    with pytest.raises(ConfigError, match=r"returns a torch.optim.Optimizer .*got list"):
        train_ours(context, settings, params)


def smooth_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(25, 8), nn.Tanh(), nn.Linear(8, 4))


@pytest.fixture(scope="module")
def smooth(data) -> ClientContext:
    net = smooth_net()
    return ClientContext(net, trace_structure(net, torch.zeros(2, 1, 5, 5)), data)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_batches_that_are_accumulated_are_one_large_batch(optimizer, smooth):
    """14 examples: twelve and then two; an epoch's last step has what is left."""
    params = smooth.model.state_dict()
    large = LocalTraining(optimizer=optimizer, lr=0.05, epochs=3, batch_size=12, max_grad_norm=0.5)
    small = replace(large, batch_size=2, accumulate=6)
    one, other = (train_ours(smooth, settings, params) for settings in (large, small))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    apart = train_ours(smooth, replace(small, accumulate=3), params)
    assert not apart["1.weight"].allclose(one["1.weight"], rtol=1e-4, atol=1e-6)


def test_an_unused_weight_takes_part_in_the_steps_of_its_batches_alone():
    weights = [torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)]
    settings = LocalTraining(
        lr=1.0, momentum=0, weight_decay=0, max_grad_norm=None, accumulate=2, batch_size=1, epochs=1
    )
    optimizer = make_optimizer(weights, settings.optimizer_at(1.0, num_examples=2))
    optimizer.apply_gradients([torch.ones(1), None])
    assert weights[0].item() == 0
    optimizer.apply_gradients([torch.ones(1), torch.ones(1)])
    assert [weight.item() for weight in weights] == [-1.0, -0.5]


def test_a_schedule_by_step_sets_the_rate_of_every_step():
    weight = torch.zeros(1, requires_grad=True)
    settings = LocalTraining(
        momentum=0,
        weight_decay=0,
        max_grad_norm=None,
        epochs=2,
        batch_size=2,
        accumulate=2,
        step_schedule=("warmup:1", "cosine"),
    )  # 7 examples are 3 batches and one that is left out: 2 steps an epoch, 4 in all
    optimizer = make_optimizer([weight], settings.optimizer_at(2.0, num_examples=7))
    places = [0.0]
    for _ in range(6):
        optimizer.apply_gradients([torch.ones(1)])
        if weight.item() != places[-1]:
            places.append(weight.item())
    rates = [before - after for before, after in pairwise(places)]
    cosine = [(1 + math.cos(math.pi * i / 3)) / 2 for i in range(3)]
    assert rates == pytest.approx([2 * 0.5, *(2 * factor for factor in cosine)])


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_batches_are_counted_as_they_are_drawn(size):
    for count in range(1, 12):
        drawn = list(iterate_batches(count, size, torch.Generator()))
        assert LoopSettings(1, size).count_batches(count) == len(drawn), count


def test_accumulation_without_the_number_of_examples_is_refused():
    with pytest.raises(ConfigError, match="pass num_examples"):
        LocalTraining(accumulate=2).optimizer_at(0.1)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_mixed_precision_trains_float32_weights_through_bfloat16(optimizer, context, params):
    seen = set()
    settings = LocalTraining(optimizer=optimizer, epochs=2, batch_size=7, precision="bf16")
    module = context.module(Subnet(), params)
    handle = module.second.register_forward_hook(lambda *call: seen.add(call[-1].dtype))
    mixed = train_ours(context, settings, params)
    handle.remove()
    full = train_ours(context, replace(settings, precision="float32"), params)
    assert seen == {torch.bfloat16}
    assert {t.dtype for t in mixed.values() if t.is_floating_point()} == {torch.float32}
    assert not mixed["second.weight"].equal(full["second.weight"])
    moved = (full["second.weight"] - params["second.weight"]).flatten()
    moved_mixed = (mixed["second.weight"] - params["second.weight"]).flatten()
    assert F.cosine_similarity(moved, moved_mixed, dim=0) > 0.9


@pytest.mark.parametrize("name", KNOWN)
def test_nets_in_one_pass_learn_with_every_optimizer_what_each_would_alone(name):
    settings = LocalTraining(optimizer=name, max_grad_norm=0.5, accumulate=2, batch_size=3)
    nets = [smooth_net().train() for _ in range(3)]
    for number, net in enumerate(nets):
        for weight in net.parameters():
            weight.data.mul_(2.0**number)
    both = []
    for program in (find_program(nets[0], lambda: (torch.rand(3, 1, 5, 5),)), None):
        copies = copy.deepcopy(nets)
        optimizer = settings.optimizer_at(settings.lr, num_examples=6)
        trainer = make_trainer(copies, optimizer, PlainLoss(), program=program)
        generator = torch.Generator().manual_seed(1)
        for _ in range(4):
            x = torch.randn(3, 1, 5, 5, generator=generator)
            trainer.step((x, torch.tensor([0, 3, 1])), generator)
        trainer.finish()
        both.append([net.state_dict() for net in copies])
    torch.testing.assert_close(both[0], both[1], rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("adamm", "optimizer 'adamm' is not known .*did you mean 'adam'"),
        *((name, f"optimizer '{name}' ") for name in REFUSED),
        ({"betas": [0.9, 0.9]}, "an optimizer has a name"),
        ({"name": "adam", "beta": 0.9}, "setting of adam 'beta' is not known .*'betas'"),
        ({"name": "adam", "betas": [0.9, 2.0]}, "does not take betas = .*Invalid beta"),
        ({"name": "adam", "lr": 0.1}, "give local_training.lr instead"),
        ({"name": "mine.py:make", "eps": 0.1}, "has its settings in it"),
        (7, "an optimizer is a name such as 'adamw'.* got 7"),
        (lambda weights: None, "top of a module"),
    ],
)
def test_an_optimizer_that_cannot_be_made_is_refused_in_one_sentence(given, reason):
    with pytest.raises(ConfigError, match=reason) as refusal:
        LocalTraining(optimizer=given)
    assert "\n" not in str(refusal.value)


def test_what_an_optimizer_does_not_have_is_refused():
    with pytest.raises(ConfigError, match="setting of adamw 'momentum' is not known"):
        LocalTraining(optimizer="adamw", momentum=0.9)
    with pytest.raises(ConfigError, match="sets weight_decay itself"):
        LocalTraining(optimizer=make_groups, weight_decay=0.1)
    assert LocalTraining(optimizer="rmsprop", momentum=0.5).momentum == 0.5


def test_what_is_left_out_is_the_default_of_the_optimizer():
    assert LocalTraining(optimizer="adadelta").lr == 1.0
    assert LocalTraining(optimizer="adamw").weight_decay is None  # PyTorch's
    again = replace(LocalTraining(optimizer="adamw", epochs=2), optimizer="sgd")
    assert again == LocalTraining(epochs=2)
    assert replace(LocalTraining(epochs=2), optimizer="adamw").lr == 0.001
    given = LocalTraining(lr=0.01, optimizer="adamw")
    assert given.lr == 0.01  # as was said, though it is the default of SGD
    assert LocalTraining(optimizer=TorchOptimizer("adam")) == LocalTraining(optimizer="Adam")


def run_twice(context: ClientContext, settings: LocalTraining, params: Any) -> Any:
    """Two rounds of one client, the second on what the first has trained, and what it keeps."""
    state: Any = None
    for seed in (SEED, SEED + 1):
        recipe = LocalSGD(settings, lr=settings.lr)
        task = Task(0, (Subnet(),), params, recipe, seed)
        result = recipe.run(task, context.for_client(state))
        (params,), state = result.update.params, result.state
    return dict(params), state


@pytest.mark.parametrize("name", KNOWN)
def test_a_state_that_is_kept_is_as_if_the_optimizer_had_not_stopped(name, context, params):
    settings = LocalTraining(optimizer=name, epochs=1, batch_size=5, max_grad_norm=None)
    kept, _ = run_twice(context, replace(settings, keep_optimizer=True), params)
    fresh, state = run_twice(context, settings, params)
    assert state is None
    net = copy.deepcopy(context.module(Subnet(), params)).train()
    optimizer = make_optimizer(net.parameters(), settings.optimizer_at(settings.lr))
    for seed in (SEED, SEED + 1):
        generator = torch.Generator().manual_seed(seed)
        examples = context.examples("train", 0)
        for rows in iterate_batches(len(examples), settings.batch_size, generator):
            x, y = examples.batch(rows, generator)
            optimizer.step(F.cross_entropy(net(x), y))
    assert_same_bits(kept, {name: t.detach() for name, t in net.state_dict().items()})
    assert not fresh["second.weight"].equal(kept["second.weight"])


class Recorder:
    """Stands for an optimizer: remembers what it is given."""

    def __init__(self, tensors: list[dict[str, Tensor]] | None = None) -> None:
        self.tensors = tensors or []

    def state(self) -> list[dict[str, Tensor]]:
        return self.tensors

    def load_state(self, state: Any) -> None:
        self.tensors = list(state)


def keep_between(
    context: ClientContext, last: Subnet, now: Subnet, name: str, **more: Tensor
) -> Any:
    """What an optimizer of one weight gets now, if it had the weight's own positions before."""
    shape = context.structure.shapes[name]
    cells = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    where = index_cells(context.structure, last)[name]
    before = {"mean": view_cells(cells, where).clone(), "step": torch.tensor(7.0), **more}
    memory = OptimizerMemory(context.for_client({}), is_kept=True)
    memory.attach(Recorder([before]), [(name, last)])  # loading empties it
    memory._optimizers[0][0].tensors = [before]
    state = memory.add_to(None)
    again, optimizer = OptimizerMemory(context.for_client(state), is_kept=True), Recorder()
    again.attach(optimizer, [(name, now)])
    return optimizer.tensors[0], view_cells(cells, index_cells(context.structure, now)[name])


def test_a_narrower_subnet_takes_its_cells_of_the_state(context):
    wide, narrow = context.structure.subnet(0.8), context.structure.subnet(0.4)
    for name in ("first.weight", "second.weight", "norm.bias", "classifier.bias"):
        found, expected = keep_between(context, wide, narrow, name)
        assert found["mean"].equal(expected), name
        assert found["step"] == 7


def test_a_tensor_with_cells_that_were_not_trained_last_starts_fresh(context):
    narrow, wide = context.structure.subnet(0.4), context.structure.subnet(0.8)
    others = Subnet.from_channels({"first": [4, 5], "second": range(4, 8)})
    for now in (wide, others, Subnet()):
        assert keep_between(context, narrow, now, "second.weight")[0] == {}
        kept, _ = keep_between(context, narrow, now, "classifier.bias")  # all of its cells
        assert kept["step"] == 7


def test_a_state_that_is_not_cell_by_cell_is_kept_for_the_same_subnet_alone(context):
    wide, narrow = context.structure.subnet(0.8), context.structure.subnet(0.4)
    rows = {"rows": torch.ones(3)}
    assert keep_between(context, wide, wide, "second.weight", **rows)[0]["rows"].equal(
        torch.ones(3)
    )
    assert keep_between(context, wide, narrow, "second.weight", **rows)[0] == {}
