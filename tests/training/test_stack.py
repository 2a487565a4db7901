"""Clients in one pass, against each client alone in double precision."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.data import to_examples
from fedquilt.learning.batch import Batch
from fedquilt.models import make_model
from fedquilt.structure.create import trace_structure
from fedquilt.structure.structure import NORMS
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.tensors import named_tensors
from fedquilt.training.client_loss import ClientLoss
from fedquilt.training.context import ClientContext
from fedquilt.training.dualnorm import make_dual
from fedquilt.training.local_sgd import LocalSGD
from fedquilt.training.objectives import Adversarial, OnceForAll, PlainLoss
from fedquilt.training.slimmable import Slimmable
from fedquilt.training.stack.layers import UnstackableError
from fedquilt.training.stack.program import find_program
from fedquilt.training.stack.trial import try_counts
from fedquilt.training.trainer import make_trainer

pytestmark = pytest.mark.filterwarnings("ignore::fedquilt.errors.StructureWarning")
EXAMPLES = (8, 5, 9, 4)  # with batches of 4: also a batch of one, and one that is left out


class Mixed(nn.Module):
    """Layers that the zoo does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(2, 6, 3, padding=1, padding_mode="circular")
        self.act, self.slopes = nn.PReLU(), nn.PReLU(6)
        self.norm = nn.InstanceNorm1d(6, affine=True, track_running_stats=True)
        self.second = nn.Conv1d(6, 6, 3, groups=3, dilation=2)
        self.up = nn.ConvTranspose1d(6, 4, 2, stride=2, bias=False)
        self.layer = nn.LayerNorm([4, 8])
        self.out = nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.slopes(self.norm(self.act(self.first(x))))
        return self.out(self.layer(self.up(self.second(x))).amax(2))


class Attention(nn.Module):
    """A transformer's block over tokens, with a head whose weight is that of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 8)
        self.qkv, self.mix = nn.Linear(8, 24), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 3, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = self.qkv(x).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        heard = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.out(self.norm(x + self.mix(heard)).mean(1))


class Dropping(nn.Module):
    """Drops of images, between layers that have them channels last, and of features."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 3)
        self.drop, self.out = nn.Dropout(0.3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.drop(self.first(x)).relu())
        return self.out(self.drop(self.drop(x).mean((2, 3))))


def cnn(norm: str) -> nn.Module:
    return make_model("heterofl-cnn", {"width": 1 / 16, "norm": norm, "num_classes": 3})


def images(count: int, generator: torch.Generator) -> Tensor:
    return torch.randn(count, 1, 8, 8, generator=generator)


def signals(count: int, generator: torch.Generator) -> Tensor:
    return torch.randn(count, 2, 8, generator=generator)


def tokens(count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(3, (count, 5), generator=generator)


NETS = {
    **{f"cnn {norm}": (lambda norm=norm: cnn(norm), images) for norm in ("batch", "group", "none")},
    "resnet": (
        lambda: make_model(
            "heterofl-resnet18", {"width": 1 / 64, "in_channels": 1, "num_classes": 3}
        ),
        images,
    ),
    "mlp": (
        lambda: make_model("mlp", {"image_size": 8, "hidden": [6], "num_classes": 3}),
        images,
    ),
    "mixed": (Mixed, signals),
    "attention": (Attention, tokens),
    "dropout": (Dropping, images),
    "dropout in rows": (
        lambda: nn.Sequential(
            nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 6), nn.Dropout(0.5), nn.Linear(6, 3)
        ),
        images,
    ),
    "dual": (lambda: make_dual(cnn("batch")), images),
}
TRAINING = fq.LocalTraining(lr=0.05, epochs=2, batch_size=4)


def make_work(
    net: str, recipe: LocalSGD, width: float = 1.0, examples: tuple[int, ...] = EXAMPLES
) -> tuple[list[fq.Task], ClientContext]:
    """Tasks of clients with different data, in double precision."""
    make, draw = NETS[net]
    torch.manual_seed(0)
    model = make().double()
    generator = torch.Generator().manual_seed(1)
    data = {}
    for client, count in enumerate(examples):
        x = draw(count, generator)
        x = x.double() if x.is_floating_point() else x
        data[client] = to_examples((x, torch.randint(3, (count,), generator=generator)))
    structure = trace_structure(model, data[0].batch(torch.arange(2))[0])
    subnet = structure.subnet(width)
    tasks = [
        fq.Task(c, (subnet,), model.state_dict(), replace(recipe, labels=(0, c % 3)), seed=c)
        for c in data
    ]
    return tasks, ClientContext(model, structure, {"train": data})


def run_alone(tasks, context, states=None):
    states = states or [None] * len(tasks)
    pairs = zip(tasks, states, strict=True)
    return [task.recipe.run(task, context.for_client(state)) for task, state in pairs]


def run_stacked(tasks, context, states=None):
    contexts = [context.for_client(state) for state in states or [None] * len(tasks)]
    return tasks[0].recipe.run_stacked(tasks, contexts)


def assert_same(ours, theirs, tolerance=1e-8):
    for one, other in zip(ours, theirs, strict=True):
        assert one.update.subnets == other.update.subnets
        assert one.update.metrics == pytest.approx(other.update.metrics, rel=1e-6)
        torch.testing.assert_close(
            one.update.params, other.update.params, rtol=tolerance, atol=tolerance
        )
        assert (one.state is None) == (other.state is None)
        if one.state is not None:
            torch.testing.assert_close(one.state, other.state, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("net", NETS)
def test_clients_in_one_pass_learn_what_each_would_alone(net):
    tasks, context = make_work(net, LocalSGD(TRAINING, lr=0.05))
    assert_same(run_stacked(tasks, context), run_alone(tasks, context))


@pytest.mark.parametrize("net", NETS)
def test_gradients_lie_in_memory_as_weights_do(net):
    """Else an optimizer takes twice as long."""
    make, draw = NETS[net]
    module, inputs = make(), (draw(4, torch.Generator()),)
    program = find_program(module, lambda: inputs)
    stack = program.make_stack(named_tensors(module), 2)
    for tensor in stack.values():
        tensor.zero_()
    names = [name for name, _ in module.named_parameters() if name != "embed.weight"]  # tied
    weights = [stack[name].requires_grad_() for name in names]
    draws = [torch.Generator(), torch.Generator()]
    output = program.use(stack, draws)(*program.stack([inputs, inputs]))
    gradients = torch.autograd.grad(output.sum(), weights, allow_unused=True)
    pairs = zip(gradients, weights, strict=True)
    assert all(g.stride() == w.stride() for g, w in pairs if g is not None)


@pytest.mark.parametrize(
    "training",
    [
        fq.LocalTraining(momentum=0, weight_decay=0, batch_size=4, max_grad_norm=None),
        fq.LocalTraining(max_grad_norm=0.01, epochs=3, batch_size=3),
        fq.LocalTraining(optimizer="adam", lr=0.01, epochs=2, batch_size=4, accumulate=2),
        fq.LocalTraining(optimizer="adamw", lr=0.01, batch_size=4, schedule="cosine"),
    ],
    ids=["plain", "clipped", "adam accumulated", "adamw scheduled"],
)
def test_each_client_has_its_own_optimizer(training):
    tasks, context = make_work("cnn batch", LocalSGD(training, lr=training.lr))
    assert_same(run_stacked(tasks, context), run_alone(tasks, context))


def test_the_state_of_each_optimizer_is_kept():
    training = fq.LocalTraining(optimizer="adam", lr=0.01, batch_size=4, keep_optimizer=True)
    tasks, context = make_work("mlp", LocalSGD(training, lr=0.01))
    before = [result.state for result in run_alone(tasks, context)]
    again = [replace(task, seed=task.seed + 10) for task in tasks]
    ours = run_stacked(again, context, before)
    assert_same(ours, run_alone(again, context, before))
    assert all(result.state for result in ours)


def test_scaled_layers_masked_losses_own_rows_and_local_tensors_are_those_of_one_client():
    recipe = LocalSGD(
        TRAINING, lr=0.05, masked=True, own_rows=True, scale=True, local_params=("features.0.bias",)
    )
    tasks, context = make_work("cnn none", recipe, width=0.5)
    theirs = run_alone(tasks, context)
    assert_same(run_stacked(tasks, context), theirs)
    assert len({len(result.update.params[0]["classifier.bias"]) for result in theirs}) > 1


ATTACK = fq.PGD(epsilon=0.3, steps=2, low=-9, high=9)


@pytest.mark.parametrize("net", ["cnn batch", "dual", "mlp"])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_attacks_on_nets_in_one_pass_are_those_on_each(net, share):
    recipe = LocalSGD(TRAINING, lr=0.05, masked=True, objective=Adversarial(ATTACK, share))
    tasks, context = make_work(net, recipe)
    theirs = run_alone(tasks, context)
    assert_same(run_stacked(tasks, context), theirs)
    plain = run_alone(
        [replace(t, recipe=replace(recipe, objective=PlainLoss())) for t in tasks], context
    )
    moved = [
        one.update.metrics["loss"] - other.update.metrics["loss"]
        for one, other in zip(theirs, plain, strict=True)
    ]
    assert min(map(abs, moved)) > 1e-3


@pytest.mark.parametrize("net", ["dual", "mlp"])
def test_bases_of_one_client_are_attacked_in_one_pass(net):
    """Each draws its own noise, in their order."""
    make, draw = NETS[net]
    draws = torch.Generator().manual_seed(0)
    batch = draw(6, draws).double(), torch.arange(6) % 3
    found = []
    for stacked in (False, True):
        torch.manual_seed(1)
        nets = [make().double().train() for _ in range(3)]
        program = find_program(nets[0], lambda: batch[:1], in_evaluation=True) if stacked else None
        settings = TRAINING.optimizer_at(0.05, 6)
        trainer = make_trainer(nets, settings, Adversarial(ATTACK), program=program)
        generator = torch.Generator().manual_seed(2)
        losses = [trainer.step(batch, generator) for _ in range(3)]
        trainer.finish()
        found.append([torch.stack(losses).double(), *(named_tensors(one) for one in nets)])
    (losses, *alone), (stacked_losses, *in_one_pass) = found
    torch.testing.assert_close(stacked_losses, losses, rtol=1e-6, atol=0)
    torch.testing.assert_close(in_one_pass, alone, rtol=1e-8, atol=1e-8)


def test_nets_that_are_attacked_are_tried_in_evaluation_mode_too():
    class Net(nn.Module):
        """Mixes the nets of a stack where it does not train."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            return x if self.training else x - x.mean()

    net = Net()
    assert find_program(net, lambda: (torch.rand(6, 4),))
    with pytest.raises(UnstackableError, match="mixes values"):
        find_program(net, lambda: (torch.rand(6, 4),), in_evaluation=True)
    assert net.training


@pytest.mark.parametrize(
    "training",
    [
        fq.LocalTraining(lr=0.05, epochs=2, batch_size=4, max_grad_norm=0.1),
        fq.LocalTraining(optimizer="adam", lr=0.01, batch_size=4, keep_optimizer=True),
    ],
    ids=["sgd clipped", "adam kept"],
)
@pytest.mark.parametrize("kept", [range(4), (0, 3)], ids=["leading", "scattered"])
def test_all_widths_of_clients_in_one_pass_learn_what_they_would_alone(training, kept):
    """Narrow nets with normalization of their own, and statistics; one is sent as a whole."""
    recipe = Slimmable(training, lr=training.lr, masked=True, scale=True)
    tasks, context = make_work("cnn batch", recipe)
    structure = context.structure
    first, *others = structure.cut_groups()
    narrow = Subnet.from_channels({first: kept[:2], **{g: range(3) for g in others}})
    own = [s.with_private(f"{i}", NORMS) for i, s in enumerate((narrow, structure.subnet(0.5)))]
    subnets = (structure.subnet(1.0), own[0].excluding("*", f"!{NORMS}"), own[1])
    tasks = [replace(task, subnets=subnets) for task in tasks]
    theirs = run_alone(tasks, context)
    assert_same(run_stacked(tasks, context), theirs)
    if training.keep_optimizer:
        again, before = [replace(t, seed=t.seed + 9) for t in tasks], [r.state for r in theirs]
        assert_same(run_stacked(again, context, before), run_alone(again, context, before))


def test_clients_whose_widths_are_nested_in_other_ways_train_apart():
    task = make_work("mlp", LocalSGD(TRAINING, lr=0.1))[0][0]
    group = "g"
    pairs = [
        tuple(Subnet.from_channels({group: kept}) for kept in both)
        for both in [((0, 1, 2), (0, 1)), ((0, 1, 2), (1, 2)), ((0, 1, 2), (0, 1))]
    ]
    one, other, same = (
        Slimmable(TRAINING, lr=0.1).stack_key(replace(task, subnets=s)) for s in pairs
    )
    assert one == same != other


class Changed:
    """A client's data, whose batches a function changes."""

    def __init__(self, data, change, *, is_fixed=False):
        self._data, self._change, self.has_fixed_batches = data, change, is_fixed

    def __getattr__(self, name):
        return getattr(self._data, name)

    def __len__(self):
        return len(self._data)

    def batch(self, rows, generator=None):
        x, y = self._data.batch(rows)
        return self._change(x, generator), y


@pytest.mark.parametrize("net", ["mlp", "dropout"])  # which draws in turn with its data
def test_data_that_draw_at_random_draw_the_same(net):
    def add_noise(x, generator):  # of the generator of batches, and of PyTorch's default one
        return x + torch.rand(x.shape, generator=generator) + torch.rand(x.shape)

    tasks, context = make_work(net, LocalSGD(TRAINING, lr=0.05))
    noisy = context.with_data(lambda data, split: Changed(data, add_noise))
    torch.manual_seed(5)
    ours = run_stacked(tasks, noisy)
    assert_same(ours, run_alone(tasks, noisy))
    (found,), (plain,) = ours[0].update.params, run_alone(tasks[:1], context)[0].update.params
    assert not any(torch.allclose(found[name], plain[name]) for name in plain)


def test_nets_of_one_client_that_draw_train_in_turn():
    """In one pass they would draw in another order."""
    (task,), context = make_work("dropout", LocalSGD(TRAINING, lr=0.05), examples=(8,))
    bases = tuple(task.subnets[0].with_private(str(i), "*") for i in range(2))
    found = [
        replace(task.recipe, stacked=stacked).run(replace(task, subnets=bases), context)
        for stacked in (True, False)
    ]
    assert_same(found[:1], found[1:], tolerance=0)


def test_what_a_clients_data_raise_is_its_own_failure():
    calls = []

    def fail(x, generator):
        calls.append(len(x))
        if len(calls) == 4:  # one for the check of the net, then in mid-training
            raise OSError("the disk is gone")
        return x

    tasks, context = make_work("cnn batch", LocalSGD(TRAINING, lr=0.05))
    broken = context.with_data(lambda d, split: Changed(d, fail) if len(d) == EXAMPLES[0] else d)
    first, *others = run_stacked(tasks, broken)
    assert isinstance(first, OSError)
    assert_same(others, run_alone(tasks[1:], context))


@pytest.mark.parametrize("net", ["cnn batch", "mlp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_client_that_diverges_changes_no_bit_of_the_others(net, dtype):
    tasks, context = make_work(net, LocalSGD(TRAINING, lr=0.05))
    model = context.model.to(dtype)
    tasks = [replace(task, params=model.state_dict()) for task in tasks]
    context = ClientContext(model, context.structure, context._data)

    def run(factor):
        return run_stacked(
            tasks,
            context.with_data(
                lambda data, split: Changed(
                    data,
                    lambda x, _: x.to(dtype) * (factor if len(data) == EXAMPLES[1] else 1.0),
                    is_fixed=True,
                )
            ),
        )

    sound, spoiled = run(1.0), run(float("nan"))
    assert spoiled[1].update.params[0]["classifier.weight"].isnan().all()
    for client in (0, 2, 3):
        ours, theirs = spoiled[client].update.params[0], sound[client].update.params[0]
        assert all(tensor.equal(theirs[name]) for name, tensor in ours.items())


def test_a_trial_counts_work_and_not_waiting():
    """Other processes make each wait in turn."""

    def work(*_):
        started = time.thread_time()
        while time.thread_time() < started + 0.002:
            pass

    stack = SimpleNamespace(step=work)
    batch = Batch(torch.zeros(2), torch.zeros(2))
    found = try_counts(
        lambda *_: time.sleep(0.01), lambda _: stack, batch, ClientLoss(), counts=(4,)
    )
    assert found.count == 1


class Asking(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x) if x.sum() > 0 else x


class OwnTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Centered(nn.Module):
    """Subtracts a mean that is over all nets of a stack."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x - x.mean()


class Deciding(Centered):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x if x.sum() > 1e9 else 2 * x


@pytest.mark.parametrize(
    ("net", "reason"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.RReLU()), "it draws random numbers"),
        (nn.Sequential(nn.Linear(4, 4), OwnTensor()), "OwnTensor has tensors and no rule"),
        (nn.Sequential(Asking(4, 4)), "Asking has tensors and no rule"),
        (Centered(), "mixes values of different nets"),
        (Deciding(), "looks at values"),
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)), "no momentum"),
        (nn.Flatten(), "it has no tensors"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_nets_that_cannot_be_stacked_say_why(net, reason):
    for _ in range(2):  # the answer is kept
        with pytest.raises(UnstackableError, match=reason):
            find_program(net.train(), lambda: (torch.rand(6, 4),))


def test_recipes_whose_nets_differ_from_batch_to_batch_train_alone():
    objective = OnceForAll(fq.PGD(steps=1))
    task = make_work("mlp", LocalSGD(TRAINING, lr=0.1))[0][0]
    assert LocalSGD(TRAINING, lr=0.1, objective=objective).stack_key(task) is None
    key = LocalSGD(TRAINING, lr=0.1, labels=(1,), weight=3.0).stack_key(task)
    assert key == LocalSGD(TRAINING, lr=0.1).stack_key(task) != None  # noqa: E711
    assert key != LocalSGD(TRAINING, lr=0.2).stack_key(task)
    assert key != LocalSGD(TRAINING, lr=0.1, masked=True).stack_key(task)
    assert key != LocalSGD(TRAINING, lr=0.1, objective=Adversarial()).stack_key(task)
    assert LocalSGD(TRAINING, lr=0.1).stack_key(replace(task, subnets=task.subnets * 2)) is None
