"""Clients test their own models before these are merged; only the counts leave the client.

ADDS (Gong et al.), Sec. 4.1.2: "local models of all approaches are evaluated before the parameter
aggregation in each communication round".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor, nn

from fedquilt.federation.client import Client, ClientResult, Recipe, Task
from fedquilt.federation.validation import (
    ReplySpec,
    count_spec,
    get_reply_spec,
    list_sent_subnets,
)
from fedquilt.structure.cut import (
    Params,
    SubnetTensors,
    copy_subnet_tensors,
    global_name,
    index_cells_within,
    write_cells,
)
from fedquilt.structure.subnet import Subnet
from fedquilt.training.context import ClientContext
from fedquilt.training.evaluate import Evaluate

RIGHT, TESTED = "right", "tested"  # the metrics: how many answers were right, and of how many


@dataclass(frozen=True)
class WithLocalTest:
    """The recipe: another one, and then the client's own model on its own test data.

    The client's model is the result's ``local_model``, or else what the client sends, with what
    stays on it. Several nets answer with the mean of their logits; of nets that share weights the
    first and widest counts. Statistics that are neither sent nor kept are taken from the training
    data. Rows of classes and tokens that are not sent are as they were received. A net that lacks
    other weights is not tested. A client with a single example, which cannot be normalized by
    itself, is not tested either.

    Args:
        recipe: The other recipe, whose result stays as it is but for the added metrics.
        scale: Whether the other recipe trains with HeteroFL's Scaler.
    """

    recipe: Recipe
    scale: bool = False  # HeteroFL's Scaler, if the other recipe trains with it

    def run(self, task: Task, context: ClientContext) -> ClientResult:
        """Does the work, and adds to its metrics how well the client's model answers."""
        result = self.recipe.run(task, context)
        try:
            counts = _count_right(task, context, result, scale=self.scale)
        except ValueError:  # PyTorch's, of a single example
            counts = {}
        metrics = {**result.update.metrics, **counts}
        return replace(result, update=replace(result.update, metrics=metrics))

    def sent_subnets(self, task: Task) -> tuple[Subnet, ...]:
        """Those of the other recipe."""
        return list_sent_subnets(replace(task, recipe=self.recipe))

    def reply_spec(self, task: Task, client: Client) -> ReplySpec:
        """What the reply may be: that of the other recipe, and the counts."""
        terms = get_reply_spec(replace(task, recipe=self.recipe), client)
        if terms.metrics is None:
            return terms
        counts = {RIGHT: count_spec(of=TESTED), TESTED: count_spec(client.num_tests)}
        optional = {name: replace(metric, is_required=False) for name, metric in counts.items()}
        return replace(terms, metrics={**terms.metrics, **optional})


def _count_right(
    task: Task, context: ClientContext, result: ClientResult, *, scale: bool
) -> dict[str, float]:
    """Right answers on the client's test data; nothing if it has no model of its own."""
    subnets, params = result.local_model or (result.update.subnets, result.update.params)
    state = context.client_state if result.state is None else result.state
    nets = [
        _add_missing_rows(*net, task, context)
        for net in _iterate_whole_nets(subnets, params, state, context)
    ]
    if not nets:
        return {}
    tested = tuple(subnet for subnet, _ in nets)
    local = frozenset[str]().union(*(context.structure.match_names(s.excluded) for s in tested))
    context = context.for_client({n: t for n, t in state.items() if n.partition("@")[0] in local})
    recipe = Evaluate(
        (tuple(range(len(nets))),),
        local_params=tuple(sorted(local)),
        scale=scale,
        metrics=context.task.numbers,
    )
    task = replace(
        task, subnets=tested, params=SubnetTensors(*zip(*nets, strict=True)), recipe=recipe
    )
    with _restore_modes(context.modules(task.subnets, task.params, recipe.local_params)):
        metrics = recipe.run(task, context).update.metrics
    return {RIGHT: metrics["hits:0"], TESTED: metrics["examples"]}


def _iterate_whole_nets(
    subnets: Sequence[Subnet],
    params: Sequence[Params],
    state: Mapping[str, Tensor],
    context: ClientContext,
) -> Iterator[tuple[Subnet, Params]]:
    """Nets whose weights are all sent or kept, and that share none with an earlier net."""
    seen: set[str] = set()
    for subnet, tensors in zip(subnets, params, strict=True):
        weights, local = (
            _map_weights(subnet, context),
            context.structure.match_names(subnet.excluded),
        )
        is_whole = all(
            source in state if name in local else name in tensors
            for source, name in weights.items()
        )
        if is_whole and seen.isdisjoint(weights):
            yield subnet, tensors
        seen.update(weights)


def _map_weights(subnet: Subnet, context: ClientContext) -> Mapping[str, str]:
    """A net's weights: their global names, and those in it."""
    dropped = context.structure.dropped_tensors(subnet)
    names = (name for name, _ in context.model.named_parameters() if name not in dropped)
    return {global_name(name, context.structure, subnet): name for name in names}


def _add_missing_rows(
    subnet: Subnet, tensors: Params, task: Task, context: ClientContext
) -> tuple[Subnet, Params]:
    """A net with the rows of all classes and tokens."""
    structure = context.structure
    every = replace(subnet, kept=tuple(p for p in subnet.kept if structure.groups[p[0]].is_cut))
    if every == subnet:
        return subnet, tensors
    completed = copy_subnet_tensors(task.params, structure, every)
    where = index_cells_within(structure, every, subnet)
    for name, tensor in tensors.items():
        write_cells(completed[name], where[name], tensor)
    return every, completed


@contextmanager
def _restore_modes(nets: Sequence[nn.Module]) -> Iterator[None]:
    """Puts modules back into the mode that they were in."""
    modes = {module: module.training for net in nets for module in net.modules()}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
