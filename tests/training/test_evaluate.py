"""Counting right answers on clients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedquilt.data import Examples, Normalize, to_examples
from fedquilt.federation.client import SERVER, Task
from fedquilt.structure.create import trace_structure
from fedquilt.structure.cut import build_module
from fedquilt.structure.derive import make_uncut_structure, restrict_structure
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.tensors import named_tensors
from fedquilt.training.attack import PGD
from fedquilt.training.context import ClientContext
from fedquilt.training.dualnorm import DualNorm, has_dial, make_dual
from fedquilt.training.evaluate import Evaluate
from fedquilt.training.tracking import without_running_stats


def logits_of(net, structure, params, width, examples):
    module = build_module(net, structure, structure.subnet(width), params).eval()
    with torch.no_grad():
        return module(examples.batch(torch.arange(len(examples)))[0])


@pytest.mark.parametrize("batch_size", [1, 4, 250])
def test_hits_and_loss_are_those_of_the_built_models(
    net, structure, context, data, params, batch_size
):
    widths = (1.0, 0.5, 0.1)
    recipe = Evaluate(batch_size=batch_size)
    task = Task(SERVER, tuple(structure.subnet(w) for w in widths), params, recipe, 0)
    update = recipe.run(task, context).update
    examples = data["test"][SERVER]
    for i, width in enumerate(widths):
        logits = logits_of(net, structure, params, width, examples)
        assert update.metrics[f"hits:{i}"] == (logits.argmax(1) == examples.labels).sum()
        loss = F.cross_entropy(logits, examples.labels, reduction="sum").item()
        assert update.metrics[f"loss:{i}"] == pytest.approx(loss, rel=1e-5)
    assert update.metrics["examples"] == 21
    assert (update.subnets, update.params, update.weight) == ((), (), 0.0)


def test_parts_add_up_to_the_whole(structure, context, params):
    subnets = (structure.subnet(0.5),)

    def metrics(recipe):
        return recipe.run(Task(SERVER, subnets, params, recipe, 0), context).update.metrics

    whole = metrics(Evaluate())
    for size, count in ((2, 8), (4, 5), (128, 1)):  # a part has a batch, if the data have one
        parts = [metrics(Evaluate(batch_size=size, part=p, parts=8)) for p in range(8)]
        for name, value in whole.items():
            assert sum(part.get(name, 0.0) for part in parts) == pytest.approx(value)
        assert sum(part["examples"] > 0 for part in parts) == count


def test_local_accuracy_never_answers_a_foreign_class(net, structure, context, data, params):
    biased = {**params, "classifier.bias": torch.tensor([50.0, -60.0, 50.0, -60.0])}
    recipe = Evaluate(labels=(1, 3))
    task = Task(1, (structure.subnet(1.0),), biased, recipe, 0)
    examples = data["test"][1]
    logits = logits_of(net, structure, biased, 1.0, examples)
    answers = torch.where(logits[:, 1] >= logits[:, 3], 1, 3)
    metrics = recipe.run(task, context).update.metrics
    assert metrics["local:0"] == (answers == examples.labels).sum() > 0
    assert metrics["hits:0"] == 0
    free = Evaluate().run(task, context).update.metrics
    assert {n: v for n, v in metrics.items() if n != "local:0"} == free


def test_a_client_can_be_asked_about_the_servers_data(structure, context, params):
    recipe = Evaluate(of=SERVER)
    update = recipe.run(Task(1, (structure.subnet(1.0),), params, recipe, 0), context).update
    assert update.metrics["examples"] == 21


# mixes


class Little(nn.Module):
    """Counts how often any copy of it is asked."""

    asked = 0

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 5, 3)
        self.norm = nn.BatchNorm2d(5)
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        Little.asked += 1
        return self.out(self.norm(self.conv(x)).relu().mean((2, 3)))


def pixels(count: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 1, 5, 5, generator=generator)
    return to_examples((x, torch.randint(3, (count,), generator=generator)))


class Bases:
    """Several nets of one shape as owners' own tensors, and what each says."""

    def __init__(self, make=lambda net: net, count: int = 3) -> None:
        self.nets = []
        for number in range(count):
            torch.manual_seed(number)
            net = make(Little()).eval()
            with torch.no_grad():
                for name, tensor in net.state_dict().items():
                    if "running_mean" in name:
                        tensor.normal_(std=0.2)
                    elif tensor.is_floating_point():
                        tensor.mul_(torch.rand(tensor.shape) * 3)
                net.out.bias -= net(pixels(31, 50).inputs).mean(0)  # so that no class always wins
            self.nets.append(net)
        whole = trace_structure(Little(), torch.zeros(2, 1, 5, 5))
        self.structure = make_uncut_structure(self.nets[0], whole)
        self.params = {
            f"{n}@{i}": t.detach()
            for i, b in enumerate(self.nets)
            for n, t in named_tensors(b).items()
        }
        self.subnets = tuple(Subnet().with_private(str(i), "*") for i in range(count))
        test = pixels(31, 50)
        with torch.no_grad():  # mostly right answers, so that an attack can spoil some
            right = self.says(range(count), test.inputs).argmax(1)
        labels = torch.where(torch.arange(31) % 4 == 0, test.labels, right)
        self.data = {"test": {0: replace(test, labels=labels)}, "validation": {0: pixels(8, 51)}}

    def metrics(self, recipe, seed: int = 4):
        context = ClientContext(self.nets[0], self.structure, self.data)
        return recipe.run(Task(0, self.subnets, self.params, recipe, seed), context).update.metrics

    def says(self, mix, x: Tensor) -> Tensor:
        return sum(self.nets[i](x) for i in mix) / len(mix)


MIXES = ((0, 1, 2), (0, 1), (0,), (2, 1))


def test_a_mix_answers_with_the_mean_of_its_subnets_logits():
    bases = Bases()
    recipe = Evaluate(ensembles=MIXES, batch_size=7, labels=(0, 2))
    metrics, examples = bases.metrics(recipe), bases.data["test"][0]
    for i, mix in enumerate(MIXES):
        with torch.no_grad():
            logits = bases.says(mix, examples.inputs)
        assert metrics[f"hits:{i}"] == (logits.argmax(1) == examples.labels).sum()
        loss = F.cross_entropy(logits, examples.labels, reduction="sum").item()
        assert metrics[f"loss:{i}"] == pytest.approx(loss, rel=1e-5)
        own = torch.where(logits[:, 0] >= logits[:, 2], 0, 2)
        assert metrics[f"local:{i}"] == (own == examples.labels).sum()
    alone, named = bases.metrics(Evaluate()), bases.metrics(Evaluate(ensembles=((0,), (1,), (2,))))
    assert alone == named  # by default every subnet stands alone


def test_every_subnet_is_asked_once_a_batch_whatever_the_number_of_mixes():
    bases = Bases()
    Little.asked = 0
    bases.metrics(Evaluate(ensembles=MIXES * 5, batch_size=16))
    assert Little.asked == 3 * 2


def test_other_splits_can_be_asked_about():
    bases = Bases()
    metrics, examples = bases.metrics(Evaluate(split="validation")), bases.data["validation"][0]
    assert metrics["examples"] == 8
    with torch.no_grad():
        right = bases.says((1,), examples.inputs).argmax(1) == examples.labels
    assert metrics["hits:1"] == right.sum()


# batches without statistics of their own


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.norm, self.out = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.hidden(x)).relu())


@pytest.mark.parametrize(
    ("count", "parts"), [(8, [4, 4]), (9, [4, 5]), (10, [4, 4, 2]), (3, [3]), (5, [5])]
)
def test_a_last_example_alone_is_normalised_with_those_before_it(count, parts):
    """One example is no batch: its normalised features would all be zero, and PyTorch refuses."""
    torch.manual_seed(0)
    net = without_running_stats(Flat()).eval()
    structure = restrict_structure(trace_structure(Flat(), torch.zeros(2, 4)), net)
    x, y = torch.randn(count, 4), torch.arange(count) % 3
    context = ClientContext(net, structure, {"test": {0: to_examples((x, y))}})
    recipe = Evaluate(batch_size=4)
    params = {n: t.detach() for n, t in named_tensors(net).items()}
    metrics = recipe.run(Task(0, (Subnet(),), params, recipe, 0), context).update.metrics
    with torch.no_grad():
        logits = torch.cat([net(some) for some in x.split(parts)])
    assert metrics["loss:0"] == pytest.approx(F.cross_entropy(logits, y, reduction="sum").item())


# robustness


def attacked_by_hand(model, x, y, epsilon, steps, generator, low=0.0, high=1.0, unit=1.0):
    """PGD as Madry et al. write it, on the inputs themselves; all numbers in their units."""
    step = min(1.25 * epsilon, epsilon + 4 / 255) / steps * unit
    epsilon = epsilon * unit
    noise = 2 * torch.rand(x.shape, generator=generator) - 1
    worse = (x + epsilon * noise).clamp(low, high)
    for _ in range(steps):
        worse = worse.detach().requires_grad_()
        loss = F.cross_entropy(model(worse), y, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, worse)
        worse = worse.detach() + step * gradient.sign()
        worse = torch.minimum(torch.maximum(worse, x - epsilon), x + epsilon).clamp(low, high)
    return worse


def test_robust_hits_are_those_on_inputs_that_were_attacked_through_the_whole_mix():
    bases, mixes = Bases(), ((0, 1, 2), (1,))
    recipe = Evaluate(ensembles=mixes, batch_size=12, attack=PGD(epsilon=0.1, steps=3))
    metrics, examples = bases.metrics(recipe, seed=8), bases.data["test"][0]
    generator = torch.Generator().manual_seed(8)
    hits = [0, 0]
    for rows in torch.arange(31).split(12):
        x, y = examples.inputs[rows], examples.labels[rows]
        for i, mix in enumerate(mixes):

            def model(x, mix=mix):
                return bases.says(mix, x)

            worse = attacked_by_hand(model, x, y, 0.1, 3, generator)
            hits[i] += (model(worse).argmax(1) == y).sum().item()
    assert [metrics["robust:0"], metrics["robust:1"]] == hits
    assert metrics["robust:0"] < metrics["hits:0"] - 10  # the attack does something
    clean = bases.metrics(replace(recipe, attack=None))
    assert {n: v for n, v in metrics.items() if not n.startswith("robust")} == clean


def test_an_attack_is_on_pixels_however_inputs_are_scaled():
    bases = Bases()
    plain, scale = bases.data["test"][0], Normalize((0.4,), (0.5,))
    bases.data["test"] = {0: replace(plain, scale=scale)}
    recipe = Evaluate(ensembles=((0, 1),), attack=PGD(epsilon=0.05, steps=2))
    metrics = bases.metrics(recipe, seed=2)
    x, y = (plain.inputs - 0.4) / 0.5, plain.labels
    generator = torch.Generator().manual_seed(2)

    def model(x):
        return bases.says((0, 1), x)

    low, high = (0 - 0.4) / 0.5, (1 - 0.4) / 0.5
    worse = attacked_by_hand(model, x, y, 0.05, 2, generator, low, high, unit=1 / 0.5)
    assert metrics["hits:0"] == (model(x).argmax(1) == y).sum()
    assert metrics["robust:0"] == (model(worse).argmax(1) == y).sum()


def blended(net: nn.Module, x: Tensor, share: float) -> Tensor:
    """Eq. 2 of Split-Mix inside the net, written out."""
    y = net.conv(x)
    y = (1 - share) * net.norm.clean(y) + share * net.norm.noise(y)
    return net.out(y.relu().mean((2, 3)))


def test_the_dial_blends_the_two_normalisations_of_every_net_of_a_mix():
    bases, mixes, dials = Bases(make_dual), ((0, 1, 2), (1,)), (0.0, 0.3, 1.0)
    metrics = bases.metrics(Evaluate(ensembles=mixes, robustness=dials))
    examples, found = bases.data["test"][0], []
    points = [(share, mix) for share in dials for mix in mixes]  # mixes at the first, then the next
    for i, (share, mix) in enumerate(points):
        with torch.no_grad():
            logits = sum(blended(bases.nets[k], examples.inputs, share) for k in mix) / len(mix)
        found.append(F.cross_entropy(logits, examples.labels, reduction="sum").item())
        assert metrics[f"loss:{i}"] == pytest.approx(found[-1], rel=1e-4)
        assert metrics[f"hits:{i}"] == (logits.argmax(1) == examples.labels).sum()
    assert len({round(loss, 3) for loss in found}) == len(found)
    alone = bases.metrics(Evaluate(ensembles=mixes))  # without a word about it: for clean inputs
    assert alone == {n: v for n, v in metrics.items() if n[-1] in "01" or n == "examples"}


def test_an_attack_knows_where_the_dial_is():
    bases = Bases(make_dual)
    recipe = Evaluate(ensembles=((0, 1),), robustness=(0.2,), attack=PGD(epsilon=0.1, steps=2))
    metrics, examples = bases.metrics(recipe, seed=5), bases.data["test"][0]

    def model(x):
        return sum(blended(bases.nets[k], x, 0.2) for k in (0, 1)) / 2

    x, y = examples.inputs, examples.labels
    worse = attacked_by_hand(model, x, y, 0.1, 2, torch.Generator().manual_seed(5))
    assert metrics["robust:0"] == (model(worse).argmax(1) == y).sum()
    assert metrics["robust:0"] < metrics["hits:0"]


def test_a_bench_is_left_with_its_dials_at_zero_and_no_gradients():
    bases = Bases(make_dual)
    context = ClientContext(bases.nets[0], bases.structure, bases.data)
    recipe = Evaluate(robustness=(0.2, 0.9), attack=PGD(steps=1))
    recipe.run(Task(0, bases.subnets, bases.params, recipe, 0), context)
    for module in context.modules(bases.subnets, bases.params):
        assert {m.robustness for m in module.modules() if isinstance(m, DualNorm)} == {0.0}
        assert all(p.requires_grad and p.grad is None for p in module.parameters())
    assert has_dial(bases.nets[0])
    assert not has_dial(Little())


def test_a_client_that_held_nothing_back_chooses_by_its_training_data():
    a, b, t, v = (Examples(torch.zeros(1, 1), torch.tensor([i])) for i in range(4))
    data = {"train": {0: a, 1: b}, "test": {0: t}, "validation": {1: v}}
    context = ClientContext(None, None, data)
    assert [context.examples("validation", c) for c in (0, 1)] == [a, v]
    assert context.examples("train", 1) is b
    with pytest.raises(KeyError):
        context.examples("test", 1)


# a target at every position


class Tagger(nn.Module):
    """Says something at every position, and hides tokens as it likes."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.rate = rate
        self.embedding = nn.Embedding(6, 4)
        self.out = nn.Linear(4, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.rand(tokens.shape) < self.rate
        return self.out(self.embedding(tokens.masked_fill(hidden, 5)).relu())


class Tagging:
    """A net that tags nine texts of seven tokens."""

    def __init__(self, rate: float = 0.0) -> None:
        torch.manual_seed(3)
        self.net = Tagger(rate).eval()
        self.structure = trace_structure(self.net, torch.zeros(1, 7, dtype=torch.int64))
        self.params = {n: t.detach() for n, t in named_tensors(self.net).items()}
        generator = torch.Generator().manual_seed(4)
        self.x, self.y = (torch.randint(5, (9, 7), generator=generator) for _ in range(2))
        self.data = {"test": {0: to_examples((self.x, self.y))}}

    def metrics(self, recipe, *widths, seed=0):
        context = ClientContext(self.net, self.structure, self.data)
        subnets = tuple(self.structure.subnet(width) for width in widths)
        return recipe.run(Task(0, subnets, self.params, recipe, seed), context).update.metrics


@pytest.mark.parametrize("batch_size", [1, 20, 128])
def test_every_target_of_a_sequence_counts(batch_size):
    tagging = Tagging()
    found = tagging.metrics(Evaluate(batch_size=batch_size, labels=(0, 1, 4)), 1.0, 0.5)
    for point, width in enumerate((1.0, 0.5)):
        module = build_module(tagging.net, tagging.structure, tagging.structure.subnet(width))
        hits = local = loss = 0
        for tokens, tags in zip(tagging.x, tagging.y, strict=True):
            for place in range(7):
                logits = module(tokens[None])[0, place].detach()
                hits += int(logits.argmax() == tags[place])
                own = max((0, 1, 4), key=lambda label: logits[label])
                local += int(own == tags[place])
                loss -= float(logits.log_softmax(0)[tags[place]])
        assert found[f"hits:{point}"] == hits
        assert found[f"local:{point}"] == local
        assert found[f"loss:{point}"] == pytest.approx(loss, rel=1e-5)
    assert (found["examples"], found["sequences"]) == (63, 9)


def test_parts_of_sequences_add_up_to_the_whole():
    tagging = Tagging()
    whole = tagging.metrics(Evaluate(), 1.0)
    parts = [tagging.metrics(Evaluate(batch_size=2, part=p, parts=3), 1.0) for p in range(3)]
    for name, value in whole.items():
        assert sum(part[name] for part in parts) == pytest.approx(value)


def test_a_batch_of_sequences_has_no_more_targets_than_asked():
    tagging, sizes = Tagging(), []
    examples = tagging.data["test"][0]

    class Counting:
        labels, label_set = examples.labels, examples.label_set

        def __len__(self):
            return 9

        def batch(self, rows, generator=None):
            sizes.append(len(rows))
            return examples.batch(rows, generator)

    tagging.data = {"test": {0: Counting()}}
    tagging.metrics(Evaluate(batch_size=22), 1.0)
    assert sizes == [1, 3, 3, 3]  # one to see how long a sequence is


def test_what_a_net_draws_is_the_same_for_every_size_and_in_every_evaluation():
    tagging = Tagging(rate=0.5)
    several = tagging.metrics(Evaluate(batch_size=14), 1.0, 0.5, 1.0)
    alone = tagging.metrics(Evaluate(batch_size=14), 0.5)
    assert several == tagging.metrics(Evaluate(batch_size=14), 1.0, 0.5, 1.0)
    for name in ("hits", "loss"):
        assert several[f"{name}:0"] == several[f"{name}:2"]
        assert several[f"{name}:1"] == alone[f"{name}:0"]
    others = {tagging.metrics(Evaluate(batch_size=14), 1.0, seed=s)["loss:0"] for s in range(4)}
    assert len(others) == 4
    assert Tagging().metrics(Evaluate(batch_size=14), 1.0)["loss:0"] not in others


def test_batches_do_not_hide_the_same_places():
    tagging = Tagging(rate=0.5)
    row = tagging.data["test"][0].select(torch.zeros(6, dtype=torch.int64))
    losses = []
    for count in (1, 2, 3):
        tagging.data = {"test": {0: row.select(torch.arange(count))}}
        losses.append(tagging.metrics(Evaluate(batch_size=7), 1.0)["loss:0"])
    assert losses[1] - losses[0] != pytest.approx(losses[0])


def test_evaluation_leaves_the_global_generator_alone():
    tagging = Tagging(rate=0.5)
    state = torch.get_rng_state()
    tagging.metrics(Evaluate(), 1.0)
    assert torch.equal(torch.get_rng_state(), state)
