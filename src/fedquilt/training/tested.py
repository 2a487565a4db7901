"""Clients test their own models before these are merged; only the counts leave the client.

ADDS (Gong et al.), Sec. 4.1.2: "local models of all approaches are evaluated before the parameter
aggregation in each communication round".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor, nn

from fedquilt.federation.boundary import Terms, count, terms_of
from fedquilt.federation.client import Client, Task, Update
from fedquilt.structure.cut import Params, Parts, cells_within, put, source_name, take
from fedquilt.structure.subnet import Subnet
from fedquilt.training.evaluate import Evaluate
from fedquilt.training.recipe import Recipe, Workbench

RIGHT, TESTED = "right", "tested"  # the metrics: how many answers were right, and of how many


@dataclass(frozen=True)
class Tested:
    """The recipe: another one, and then the client's own model on its own test data.

    That is the model which the other recipe says it is, or else what the client is about to send,
    with what it keeps at home. Several nets answer with the mean of their logits; of nets that
    share weights, which are sizes of one, the first and widest counts. Statistics that it neither
    sends nor keeps are taken from its training data. Classes and tokens of which it sends no rows
    are as it received them. A net that lacks other weights is not tested.

    Nothing else changes. Who has a single example, which cannot be normalised by itself, is not
    tested, and has trained all the same.
    """

    recipe: Recipe
    scale: bool = False  # HeteroFL's Scaler, if the other recipe trains with it

    def run(self, task: Task, bench: Workbench) -> Update:
        """Does the work, and adds to its metrics how well the client's model answers."""
        update = self.recipe.run(task, bench)
        own = bench.own or (update.subnets, update.params)
        before = bench.kept
        try:
            found = _counts(task, bench, *own, scale=self.scale)
        except ValueError:  # PyTorch's, of a single example
            found = {}
        finally:
            bench.kept = before
        return replace(update, metrics={**update.metrics, **found})

    def terms(self, task: Task, client: Client) -> Terms:
        """What its answer may be: that of the other recipe, and the counts."""
        terms = terms_of(replace(task, recipe=self.recipe), client)
        if terms.metrics is None:
            return terms
        counts = {RIGHT: count(of=TESTED), TESTED: count(client.num_tests)}
        optional = {name: replace(metric, is_required=False) for name, metric in counts.items()}
        return replace(terms, metrics={**terms.metrics, **optional})


def _counts(
    task: Task,
    bench: Workbench,
    subnets: Sequence[Subnet],
    params: Sequence[Params],
    *,
    scale: bool,
) -> dict[str, float]:
    """Right answers on the client's test data; nothing if it has no model of its own."""
    kept = (bench.kept if bench.to_keep is None else bench.to_keep) or {}
    nets = [_complete(*net, task, bench) for net in _whole_nets(subnets, params, kept, bench)]
    if not nets:
        return {}
    tested = tuple(subnet for subnet, _ in nets)
    home = frozenset[str]().union(*(bench.structure.matching(s.without) for s in tested))
    bench.kept = {name: t for name, t in kept.items() if name.partition("@")[0] in home}
    recipe = Evaluate((tuple(range(len(nets))),), home=tuple(sorted(home)), scale=scale)
    task = replace(task, subnets=tested, params=Parts(*zip(*nets, strict=True)), recipe=recipe)
    with _as_before(bench.modules(task.subnets, task.params, recipe.home)):
        found = recipe.run(task, bench).metrics
    return {RIGHT: found["hits:0"], TESTED: found["examples"]}


def _whole_nets(
    subnets: Sequence[Subnet],
    params: Sequence[Params],
    kept: Mapping[str, Tensor],
    bench: Workbench,
) -> Iterator[tuple[Subnet, Params]]:
    """Nets all of whose weights are sent or stay at home, and that share none with an earlier."""
    seen: set[str] = set()
    for subnet, tensors in zip(subnets, params, strict=True):
        weights, home = _weights(subnet, bench), bench.structure.matching(subnet.without)
        is_whole = all(
            source in kept if name in home else name in tensors for source, name in weights.items()
        )
        if is_whole and seen.isdisjoint(weights):
            yield subnet, tensors
        seen.update(weights)


def _weights(subnet: Subnet, bench: Workbench) -> Mapping[str, str]:
    """A net's weights: their global names, and those in it."""
    gone = bench.structure.gone(subnet)
    names = (name for name, _ in bench.model.named_parameters() if name not in gone)
    return {source_name(name, bench.structure, subnet): name for name in names}


def _complete(
    subnet: Subnet, tensors: Params, task: Task, bench: Workbench
) -> tuple[Subnet, Params]:
    """A net with the rows of all classes and tokens."""
    structure = bench.structure
    every = replace(subnet, kept=tuple(p for p in subnet.kept if structure.groups[p[0]].is_cut))
    if every == subnet:
        return subnet, tensors
    found, where = take(task.params, structure, every), cells_within(structure, every, subnet)
    for name, tensor in tensors.items():
        put(found[name], where[name], tensor)
    return every, found


@contextmanager
def _as_before(nets: Sequence[nn.Module]) -> Iterator[None]:
    """Puts modules back into the mode that they were in."""
    modes = {module: module.training for net in nets for module in net.modules()}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
