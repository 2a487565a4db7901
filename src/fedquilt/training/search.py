"""Search for the channels of every layer, on one client's data, without back-propagation (FedCS).

Luo, Chen, Li, Feng. "Architecture Personalization in Resource-constrained Federated Learning."
Algorithm 1, lines 13-22.

Symbols of the paper -> names here: θ_k -> a subnet of leading channels, B_k -> budget,
C(θ) -> price, R -> ratio, A^j -> what the metric loses by shrinking group j.

What makes it quick, and what that costs, is measured in benchmarks/search.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fedquilt.errors import BudgetError
from fedquilt.federation.client import Client, ClientResult, Task, Update
from fedquilt.federation.validation import MetricSpec, ReplySpec
from fedquilt.learning.batch import Batch, as_batch
from fedquilt.learning.known_metrics import count_hits
from fedquilt.learning.losses import count_labels
from fedquilt.learning.task import CLASSIFICATION, LearningTask
from fedquilt.structure.budget import Budget
from fedquilt.structure.cost import CostTable
from fedquilt.structure.cut import Params
from fedquilt.structure.derive import restrict_structure
from fedquilt.structure.groups import count_leading
from fedquilt.structure.resizable import ResizableModule
from fedquilt.structure.structure import Structure, map_followers
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.tensors import map_tensors, to_arguments
from fedquilt.training.context import ClientContext
from fedquilt.training.loop import split_evenly
from fedquilt.training.output_cache import CachedOutput, OutputCache, changes_inputs
from fedquilt.training.tracking import without_running_stats

Batches = Sequence[Batch]


@dataclass(frozen=True)
class Search:
    """The recipe: shrink the layer that loses least until the budget is met; only θ goes back.

    A step takes a part of the channels of one width group: layers that must agree shrink together.
    Each batch is normalized by itself, since a narrower net has other statistics than the net that
    it is cut from.

    Args:
        budget: What the client can afford.
        ratio: R, the part of a group's channels that a step takes.
        smallest: The least part of a group that is kept: the narrowest that the warm-up trains.
        whole: Width groups that are not cut.
        local_params: Patterns of tensors that stay on the client.
        examples: At most this number of training examples measures the metric; None: all.
        batch_size: Examples in a batch.
        lazy: Whether groups that lost much are not measured again at every step.
        again: With ``lazy``, how many groups are measured again at every step, the oldest first.
        metric: The name of the metric, under which it is reported.
    """

    budget: Budget
    ratio: float = 0.1
    smallest: float = 0.25
    whole: tuple[str, ...] = ()
    local_params: tuple[str, ...] = ()
    examples: int | None = 256  # at most; None: all
    batch_size: int = 128
    lazy: bool = True
    again: int = 2  # groups that are asked again at every step, those of longest ago
    metric: str = "accuracy"

    def run(self, task: Task, context: ClientContext) -> ClientResult:
        """Searches; the task's params are the trained supernet's."""
        batches = self._batches(task, context)
        example = map_tensors(lambda x: x[:1], batches[0][0])
        prices = CostTable(
            context.model, context.structure, example, local_params=self.local_params
        )
        result = search_subnet(
            context.model,
            context.structure,
            task.params,
            batches,
            Limits.of(self, prices, context.structure),
            self,
            context.report_progress,
            context.task,
        )
        metrics = {
            self.metric: result.value,
            "steps": float(result.num_steps),
            "evaluations": result.num_evaluations,
        }
        sent = result.subnet.excluding("*")
        return ClientResult(Update(task.client, (sent,), ({},), 0.0, metrics))

    def reply_spec(self, task: Task, client: Client) -> ReplySpec:
        """What the reply may be: any part of the net; the method knows the client's budget."""
        metrics = {
            self.metric: MetricSpec(high=1.0)
            if self.metric == "accuracy"
            else MetricSpec(-math.inf, may_diverge=True),
            "steps": MetricSpec(is_count=True),
            "evaluations": MetricSpec(),
        }
        return ReplySpec(task.subnets, 0.0, metrics, is_chosen=True)

    def _batches(self, task: Task, context: ClientContext) -> Batches:
        """Some of the client's training data, drawn once, without augmentation."""
        data = context.examples("train", task.client)
        generator = torch.Generator().manual_seed(task.seed)
        rows = torch.randperm(len(data), generator=generator)[: self.examples]
        return [
            as_batch(data.batch(part)) for part in split_evenly(rows.sort().values, self.batch_size)
        ]

    def smallest_subnet(self, structure: Structure) -> Subnet:
        """The narrowest net that a search can end with."""
        return structure.subnet(dict.fromkeys(self.shrinkable_groups(structure), self.smallest))

    def shrinkable_groups(self, structure: Structure) -> list[str]:
        """The groups that may shrink."""
        return structure.cut_groups(self.whole)


@dataclass(frozen=True, eq=False)
class Limits:
    """A budget, and what subnets cost; a width stands for what the uniform net of it costs."""

    budget: Budget
    prices: CostTable

    @staticmethod
    def of(search: Search, prices: CostTable, structure: Structure) -> Limits:
        """The limits of a search; refuses those that nothing can meet."""
        budget = search.budget
        if budget.width < 1:
            uniform = dict.fromkeys(search.shrinkable_groups(structure), budget.width)
            price = prices(structure.subnet(uniform))
            budget = replace(
                budget,
                width=1.0,
                params=min(price.params, budget.params or price.params),
                macs=min(price.macs, budget.macs or price.macs),
            )
        limits = Limits(budget, prices)
        if not limits.are_met(search.smallest_subnet(structure)):
            raise BudgetError(
                f"no architecture meets {search.budget}; the smallest possible, with "
                f"{search.smallest:g} of every layer, costs "
                f"{prices(search.smallest_subnet(structure), memory=True)}"
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
class SearchResult:
    """What a search has found, and what it took."""

    subnet: Subnet
    score: float  # right answers, or another metric so that higher is better
    value: float  # of the metric
    num_examples: int
    num_steps: int
    num_evaluations: float  # of whole nets on all examples


def search_subnet(
    model: nn.Module,
    structure: Structure,
    params: Params,
    batches: Batches,
    limits: Limits,
    search: Search,
    on_progress: Callable[[float], None] = lambda done: None,
    learned: LearningTask = CLASSIFICATION,
) -> SearchResult:
    """Algorithm 1, lines 14-21: the layer that loses least is shrunk, until the budget is met.

    Of several that lose the same, it is the one after which the net presses least on the limits,
    and then the first by name.

    With ``lazy`` a group is asked again if what it lost when it was last asked is less than what
    the best one loses now: as a net gets narrower, each of its layers costs more to shrink. That is
    the rule and not a law, so those that were asked longest ago are asked again at every step too.
    Without it every group is asked at every step, as in the paper.
    """
    net = _Probe(model, structure, params, batches, learned)
    floors = {
        g: structure.kept_count(search.smallest_subnet(structure), g)
        for g in search.shrinkable_groups(structure)
    }
    now, steps = Subnet(), 0
    score = net.measure(now)
    net.mark_best()
    net.accept_best()
    losses: dict[str, float] = {}  # A^j, when it was last asked
    while not limits.are_met(now):
        narrower = {
            group: shrink_group(structure, now, group, search.ratio, floors[group])
            for group in floors
            if structure.kept_count(now, group) > floors[group]
        }
        costs = {group: limits.pressure(subnet) for group, subnet in narrower.items()}
        longest_ago = [group for group in losses if group in narrower][: search.again]
        best: tuple[float, float, str] = (math.inf, math.inf, "")
        for group in sorted(narrower, key=lambda g: (losses.get(g, -math.inf), costs[g])):
            may_be_best = group not in losses or (losses[group], costs[group]) < best[:2]
            if search.lazy and not may_be_best and group not in longest_ago:
                continue
            score_there = net.measure(narrower[group], no_worse_than=score - best[0])
            losses.pop(group, None)  # so that they are in the order in which they were asked
            losses[group] = score - score_there
            if (losses[group], costs[group], group) < best:
                best = (losses[group], costs[group], group)
                net.mark_best()
        net.accept_best()
        now, score, steps = narrower[best[2]], score - best[0], steps + 1
        on_progress(limits.progress(now))
    value = net.compute_value(score)
    return SearchResult(now, score, value, net.num_examples, steps, net.num_evaluations)


def shrink_group(
    structure: Structure, subnet: Subnet, group: str, ratio: float, least: int
) -> Subnet:
    """θ^j <- ⌈θ^j (1 - R)⌉, and at least one channel less: ⌈0.9 · 9⌉ is 9."""
    count = structure.kept_count(subnet, group)
    fewer = min(count_leading(count, 1 - ratio), count - 1)
    return subnet.restricted_to(group, range(max(fewer, least)))


class _Probe:
    """Measures subnets, and computes again only what another shape changes.

    Outputs of units, such as blocks, of the accepted subnet are cached for every batch. A net that
    differs in one group is computed from the first unit on that has tensors of the group.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        params: Params,
        batches: Batches,
        learned: LearningTask,
    ) -> None:
        self._learned = learned
        model = without_running_stats(model)
        self._structure = restrict_structure(structure, model)
        self._net = ResizableModule(model, self._structure, params)
        self._net.module.eval()
        self._batches = [(self._net.arrange_inputs(*to_arguments(x)), y) for x, y in batches]
        self._needs_copies = changes_inputs(self._net.module, self._batches[0][0])
        self._cache = OutputCache(self._net.module)
        self._following = map_followers(self._structure)
        self._accepted = Subnet()
        self._best = Subnet(), dict[tuple[str, int], CachedOutput]()
        self.num_examples = sum(learned.loss.count(y) for _, y in batches)
        self.num_evaluations = 0.0

    @torch.no_grad()
    def measure(self, subnet: Subnet, *, no_worse_than: float = -math.inf) -> float:
        """How good a subnet is: higher is better.

        Where the metric is accuracy, right answers, or an upper bound of them that is below
        ``no_worse_than``.
        """
        groups = self._accepted.differing_groups(subnet)
        self._cache.stale = {name for g in groups for name in self._following[g]}
        self._cache.learned = {}
        self._net.resize_to(subnet)
        return self._count_hits(no_worse_than) if self._learned.counts_hits else self._score()

    def compute_value(self, score: float) -> float:
        """The metric of a score that ``measure`` returned."""
        if self._learned.counts_hits:
            return score / self.num_examples
        return score if self._learned.metric.higher_is_better else -score

    def _score(self) -> float:
        """The metric on all batches, with its sign changed where lower is better."""
        numbers: Counter[str] = Counter()
        for number, (_, y) in enumerate(self._batches):
            output = self._answer(number)
            count = self._learned.loss.count(y)
            numbers.update(self._learned.measure(output, y))
            loss = float(self._learned.loss.of_output(output, y))
            numbers.update({"examples": count, "loss": loss * count})
        self.num_evaluations += 1
        value = self._learned.compute(numbers)[self._learned.metric.name]
        if value is None:
            return -math.inf
        return value if self._learned.metric.higher_is_better else -value

    def _answer(self, number: int) -> Any:
        """What the net answers on a batch."""
        self._cache.batch = number
        inputs, _ = self._batches[number]
        return self._net.module(
            *map_tensors(Tensor.clone, inputs) if self._needs_copies else inputs
        )

    def _count_hits(self, no_worse_than: float) -> int:
        bound = self.num_examples  # hits, if the batches still to come are all right
        for number, (_, y) in enumerate(self._batches):
            count = count_labels(y)
            bound -= count - int(count_hits(self._answer(number), y))
            self.num_evaluations += count / self.num_examples
            if bound < no_worse_than:
                break
        return bound

    def mark_best(self) -> None:
        """Marks the subnet that was counted last as the best so far, and keeps its outputs."""
        self._best = self._net.subnet, self._cache.learned

    def accept_best(self) -> None:
        """Accepts the best subnet: others are computed from its outputs from now on."""
        self._accepted, learned = self._best
        self._cache.known.update(learned)
