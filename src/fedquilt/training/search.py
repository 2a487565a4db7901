"""Search for the channels of every layer, on one client's data, without back-propagation (FedCS).

Luo, Chen, Li, Feng. "Architecture Personalization in Resource-constrained Federated Learning."
Algorithm 1, lines 13-22.

Symbols of the paper -> names here: θ_k -> a subnet of leading channels, B_k -> budget,
C(θ) -> price, R -> ratio, A^j -> the hits that are lost by shrinking group j.

What makes it quick, and what that costs, is measured in benchmarks/search.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fedquilt.errors import BudgetError
from fedquilt.federation.boundary import Metric, Terms
from fedquilt.federation.client import Client, Task, Update
from fedquilt.structure.adjust import Adjustable
from fedquilt.structure.budget import Budget
from fedquilt.structure.cost import Prices
from fedquilt.structure.cut import Params
from fedquilt.structure.groups import Structure, following, leading
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.trace import named_tensors
from fedquilt.training.recipe import Workbench
from fedquilt.training.tracking import untracked

Batches = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Search:
    """The recipe: shrink the layer that loses least until the budget is met; only θ goes back.

    A step takes the part ``ratio`` of the channels of one width group: layers that must agree
    shrink together. No group gets narrower than ``smallest`` of it, the narrowest that the warm-up
    trains; groups in ``whole`` are not cut. Accuracy is that on ``examples`` of the client's
    training data, each batch normalised by itself, since a narrower net has other statistics than
    the net it is cut from.
    """

    budget: Budget
    ratio: float = 0.1
    smallest: float = 0.25
    whole: tuple[str, ...] = ()
    home: tuple[str, ...] = ()
    examples: int | None = 256  # at most; None: all
    batch_size: int = 128
    lazy: bool = True
    again: int = 2  # groups that are asked again at every step, those of longest ago

    def run(self, task: Task, bench: Workbench) -> Update:
        """Searches; the task's params are the trained supernet's."""
        batches = self._batches(task, bench)
        example = batches[0][0][:1]
        prices = Prices(bench.model, bench.structure, example, home=self.home)
        found = slimmed(
            bench.model,
            bench.structure,
            task.params,
            batches,
            Limits.of(self, prices, bench.structure),
            self,
            bench.tell,
        )
        metrics = {
            "accuracy": found.hits / found.num_examples,
            "steps": float(found.num_steps),
            "evaluations": found.num_evaluations,
        }
        return Update(task.client, (found.subnet.leaving("*"),), ({},), 0.0, metrics)

    def terms(self, task: Task, client: Client) -> Terms:
        """What its answer may be: any part of the net; the method knows the client's budget."""
        metrics = {
            "accuracy": Metric(high=1.0),
            "steps": Metric(is_count=True),
            "evaluations": Metric(),
        }
        return Terms(task.subnets, 0.0, metrics, is_chosen=True)

    def _batches(self, task: Task, bench: Workbench) -> Batches:
        """Some of the client's training data, drawn once, without augmentation."""
        data = bench.examples("train", task.client)
        generator = torch.Generator().manual_seed(task.seed)
        rows = torch.randperm(len(data), generator=generator)[: self.examples]
        parts = max(1, math.ceil(len(rows) / self.batch_size))
        return [data.batch(some) for some in rows.sort().values.tensor_split(parts)]

    def floor(self, structure: Structure) -> Subnet:
        """The narrowest net that a search can end with."""
        return structure.subnet(dict.fromkeys(self.free(structure), self.smallest))

    def free(self, structure: Structure) -> list[str]:
        """The groups that may shrink."""
        return structure.cut_groups(self.whole)


@dataclass(frozen=True, eq=False)
class Limits:
    """A budget, and what subnets cost; a width stands for what the uniform net of it costs."""

    budget: Budget
    prices: Prices

    @staticmethod
    def of(search: Search, prices: Prices, structure: Structure) -> Limits:
        """The limits of a search; refuses those that nothing can meet."""
        budget = search.budget
        if budget.width < 1:
            uniform = dict.fromkeys(search.free(structure), budget.width)
            price = prices(structure.subnet(uniform))
            budget = replace(
                budget,
                width=1.0,
                params=min(price.params, budget.params or price.params),
                macs=min(price.macs, budget.macs or price.macs),
            )
        limits = Limits(budget, prices)
        if not limits.are_met(search.floor(structure)):
            raise BudgetError(
                f"no architecture meets {search.budget}; the smallest possible, with "
                f"{search.smallest:g} of every layer, costs "
                f"{prices(search.floor(structure), memory=True)}"
            )
        return limits

    def are_met(self, subnet: Subnet) -> bool:
        """Whether a subnet is within the budget; memory comes last, since it takes long to know."""
        has_memory = self.budget.memory is not None
        return self.budget.allows(self.prices(subnet)) and (
            not has_memory or self.budget.allows(self.prices(subnet, memory=True))
        )

    def pressure(self, subnet: Subnet) -> float:
        """How much a subnet presses on the limits: the sum of costs, as parts of their limits.

        What is within its limit presses no more. Memory takes long to know: multiply-accumulates,
        with which it falls, stand for it.
        """
        return sum(max(ratio, 1.0) for ratio in self._ratios(subnet))

    def progress(self, subnet: Subnet) -> float:
        """How far a search has come from the whole net; steps take equal parts of what is left.

        It is 1 within the budget, and only there: what stands for memory may be off.
        """
        if self.are_met(subnet):
            return 1.0
        start, here = max(self._ratios(Subnet())), max(self._ratios(subnet))
        return min(1 - math.log(here) / math.log(start), 0.99)

    def _ratios(self, subnet: Subnet) -> list[float]:
        price, budget = self.prices(subnet), self.budget
        pairs = [
            (budget.params, price.params),
            (budget.macs, price.macs),
            (budget.upload, price.bytes),
            (budget.memory, price.macs * self._memory_of_a_mac),
        ]
        return [spent / limit for limit, spent in pairs if limit is not None]

    @cached_property
    def _memory_of_a_mac(self) -> float:
        if self.budget.memory is None:
            return 0.0
        whole = self.prices(Subnet(), memory=True)
        return whole.memory / max(whole.macs, 1)


@dataclass(frozen=True)
class Found:
    """What a search has found, and what it took."""

    subnet: Subnet
    hits: int
    num_examples: int
    num_steps: int
    num_evaluations: float  # of whole nets on all examples


def slimmed(
    model: nn.Module,
    structure: Structure,
    params: Params,
    batches: Batches,
    limits: Limits,
    search: Search,
    tell: Callable[[float], None] = lambda done: None,
) -> Found:
    """Algorithm 1, lines 14-21: the layer that loses least is shrunk, until the budget is met.

    Of several that lose the same, it is the one after which the net presses least on the limits,
    and then the first by name.

    With ``lazy`` a group is asked again if what it lost when it was last asked is less than what
    the best one loses now: as a net gets narrower, each of its layers costs more to shrink. That is
    the rule and not a law, so those that were asked longest ago are asked again at every step too.
    Without it every group is asked at every step, as in the paper.
    """
    net = _Probe(model, structure, params, batches)
    floors = {g: structure.kept(search.floor(structure), g) for g in search.free(structure)}
    now, steps = Subnet(), 0
    hits = net.hits(now)
    net.note()
    net.settle()
    losses: dict[str, int] = {}  # A^j, when it was last asked
    while not limits.are_met(now):
        narrower = {
            group: shrunk(structure, now, group, search.ratio, floors[group])
            for group in floors
            if structure.kept(now, group) > floors[group]
        }
        costs = {group: limits.pressure(subnet) for group, subnet in narrower.items()}
        longest_ago = [group for group in losses if group in narrower][: search.again]
        best: tuple[float, float, str] = (math.inf, math.inf, "")
        for group in sorted(narrower, key=lambda g: (losses.get(g, -math.inf), costs[g])):
            may_be_best = group not in losses or (losses[group], costs[group]) < best[:2]
            if search.lazy and not may_be_best and group not in longest_ago:
                continue
            there = net.hits(narrower[group], no_worse_than=hits - best[0])
            losses.pop(group, None)  # so that they are in the order in which they were asked
            losses[group] = hits - there
            if (losses[group], costs[group], group) < best:
                best = (losses[group], costs[group], group)
                net.note()
        net.settle()
        now, hits, steps = narrower[best[2]], hits - int(best[0]), steps + 1
        tell(limits.progress(now))
    return Found(now, hits, net.num_examples, steps, net.num_evaluations)


def shrunk(structure: Structure, subnet: Subnet, group: str, ratio: float, least: int) -> Subnet:
    """θ^j <- ⌈θ^j (1 - R)⌉, and at least one channel less: ⌈0.9 · 9⌉ is 9."""
    count = structure.kept(subnet, group)
    fewer = min(leading(count, 1 - ratio), count - 1)
    return subnet.keeping(group, range(max(fewer, least)))


class _Probe:
    """Counts the hits of subnets, and computes again only what another shape changes.

    The outputs of units (blocks, say) of the net as it has settled are remembered for every batch:
    a subnet that differs in one group is computed from the first unit on that has tensors of it.
    """

    def __init__(
        self, model: nn.Module, structure: Structure, params: Params, batches: Batches
    ) -> None:
        model = untracked(model)
        self._structure = structure.among(model)
        self._net = Adjustable(model, self._structure, params)
        self._net.module.eval()
        self._batches = [(*self._net.laid_out(x), y) for x, y in batches]
        self._needs_copies = _changes(self._net.module, self._batches[0][0])
        self._memory = _Memory(self._net.module)
        self._following = following(self._structure)
        self._settled = Subnet()
        self._noted = Subnet(), dict[tuple[str, int], _Answer]()
        self.num_examples = sum(y.numel() for _, y in batches)
        self.num_evaluations = 0.0

    @torch.no_grad()
    def hits(self, subnet: Subnet, *, no_worse_than: float = -math.inf) -> int:
        """Right answers of a subnet; at most so many, if that is already too few."""
        groups = self._settled.differing(subnet)
        self._memory.stale = {name for g in groups for name in self._following[g]}
        self._memory.learned = {}
        self._net.take_shape(subnet)
        most = self.num_examples  # hits, if it is right on all that it was not asked yet
        for number, (x, y) in enumerate(self._batches):
            self._memory.batch = number
            answers = self._net.module(x.clone() if self._needs_copies else x)
            right = int((answers.argmax(-1) == y).sum())
            most -= y.numel() - right
            self.num_evaluations += y.numel() / self.num_examples
            if most < no_worse_than:
                break
        return most

    def note(self) -> None:
        """The subnet that was asked last is the best so far: what it computed is kept."""
        self._noted = self._net.subnet, self._memory.learned

    def settle(self) -> None:
        """From now on subnets are compared with the one noted last."""
        self._settled, learned = self._noted
        self._memory.known.update(learned)


@torch.no_grad()
def _changes(module: nn.Module, inputs: Tensor) -> bool:
    """Whether a module changes its inputs in place."""
    trial = inputs.clone()
    before = _version(trial)
    module(trial)
    return _version(trial) > before


class _Memory:
    """What units of a module answered: for the same inputs and weights they answer the same."""

    def __init__(self, module: nn.Module) -> None:
        self.batch = 0
        self.stale: set[str] = set()  # tensors that are not as they were
        self.known: dict[tuple[str, int], _Answer] = {}  # by unit and batch
        self.learned: dict[tuple[str, int], _Answer] = {}  # computed lately, not yet known
        name_of = {id(tensor): name for name, tensor in named_tensors(module).items()}
        for name, unit in units(module).items():
            self._wrap(name, unit, {name_of[id(t)] for t in named_tensors(unit).values()})

    def _wrap(self, name: str, unit: nn.Module, own: set[str]) -> None:
        compute = unit.forward

        def forward(*inputs: Any, **named: Any) -> Any:
            known = self.known.get((name, self.batch))
            is_plain = not named and all(isinstance(x, _PLAIN) for x in inputs)
            if known is not None and is_plain and known.is_for(inputs) and not own & self.stale:
                return known.output
            seen = [(x, _version(x)) for x in inputs]
            output = compute(*inputs, **named)
            if is_plain and isinstance(output, Tensor):
                self.learned[name, self.batch] = _Answer(seen, output, _version(output))
            return output

        unit.forward = forward


_PLAIN = (Tensor, int, float, type(None))  # what is in a list may change while the list stays


@dataclass(frozen=True, eq=False)
class _Answer:
    """Inputs, and the output they had; void once any of them has been changed in place."""

    inputs: Sequence[tuple[Any, int]]
    output: Tensor
    version: int

    def is_for(self, inputs: Sequence[Any]) -> bool:
        return (
            len(inputs) == len(self.inputs)
            and all(
                x is old and _version(x) == version
                for x, (old, version) in zip(inputs, self.inputs, strict=True)
            )
            and _version(self.output) == self.version
        )


def _version(value: Any) -> int:
    return int(value._version) if isinstance(value, Tensor) else 0


def units(module: nn.Module) -> Mapping[str, nn.Module]:
    """Parts of a module whose outputs are worth remembering: blocks, as far as one can tell.

    Containers are opened, and so is what holds more than an eighth of the weights; the insides of
    anything smaller are computed again together.
    """
    total = sum(w.numel() for w in module.parameters())
    found: dict[str, nn.Module] = {}

    def visit(name: str, part: nn.Module) -> None:
        children = list(part.named_children())
        is_large = sum(w.numel() for w in part.parameters()) > total / 8
        is_container = isinstance(part, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
        if children and (not name or is_large or is_container):
            for child, inner in children:
                visit(f"{name}.{child}" if name else child, inner)
        elif name:
            found[name] = part

    visit("", module)
    return found
