"""Exits: classifiers along the depth of a net, so that its first layers are a model by themselves.

Kim, Yu, Kim, Moon. "DepthFL: Depthwise Federated Learning for Heterogeneous Clients." ICLR 2023,
with the heads of the authors' code, which are those of Zhang et al., "SCAN", NeurIPS 2019.

The code of the net is read symbolically (torch.fx, each child opaque), so no class or layer name
matters. An exit that is left out is gone: what only it needs is neither computed nor stored.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fedquilt.errors import StructureError
from fedquilt.learning.batch import Batch, mean_outputs
from fedquilt.learning.losses import CROSS_ENTROPY, Loss
from fedquilt.structure.blocks.block import BY_MODULE, Block, group_by_stage
from fedquilt.structure.blocks.code import (
    Unreadable,
    compile_graph,
    list_unused_parts,
    list_used_parts,
    trace_code,
)
from fedquilt.structure.blocks.find import find_residual_blocks
from fedquilt.structure.blocks.rewire import remove_child
from fedquilt.structure.tensors import Example, make_training_inputs, named_tensors, to_arguments
from fedquilt.training.client_loss import ClientLoss
from fedquilt.training.exit_heads import Shape, make_head

NUM_EXITS = 4  # where the net itself does not say how many stages it has


class MultiExit(nn.Module):
    """A net with an exit after each of the modules ``at``, and its own output as the last exit.

    In training it gives the logits of every exit, the first one first; in use their mean.
    ``drop_exit`` takes the last exit away, with every layer that no other one needs.
    """

    def __init__(self, net: nn.Module, at: Sequence[str], example: Example) -> None:
        super().__init__()
        self.net = net
        self.exits = tuple(f"exit{number}" for number in range(1, len(at) + 2))
        self._graphs = {
            training: _trace_with_exits(net, at, training=training) for training in (True, False)
        }
        (*features, logits), last = _infer_shapes(net, self._graphs[False], example)
        pairs = zip(self.exits[:-1], features, strict=True)
        self.heads = nn.ModuleDict({name: make_head(shape, last, logits) for name, shape in pairs})
        self._programs: dict[bool, Callable[..., Any]] = {}

    def forward(self, *inputs: Any) -> Any:
        """The logits of all exits, or in use their mean."""
        outputs = self._program()(self.net, *inputs)
        every = [
            self.heads[name](value) if name in self.heads else value
            for name, value in zip(self.exits, outputs, strict=True)
        ]
        return tuple(every) if self.training else mean_outputs(every)

    @property
    def called_module(self) -> nn.Module:
        """The net, which gets the arguments."""
        return self.net

    def drop_exit(self, name: str) -> None:
        """The last exit is gone, in place."""
        if name != self.exits[-1] or len(self.exits) == 1:
            raise StructureError(
                f"exits are left out from the last one, and the first one stays; '{name}' is not "
                f"the last of {', '.join(self.exits)}"
            )
        self.exits, self._programs = self.exits[:-1], {}
        if name in self.heads:
            del self.heads[name]
        before = list_used_parts(self._graphs.values())
        for graph in self._graphs.values():
            _drop_last_output(graph)
        for part in list_unused_parts(before, list_used_parts(self._graphs.values())):
            remove_child(self.net, part)

    def blocks(self) -> dict[str, Block]:
        """What may be skipped, in the order in which it can be: every exit but the first.

        The tensors of an exit are those that are gone with it and not with a later one.
        """
        rest, blocks = copy.deepcopy(self), {}
        names = list(named_tensors(rest))
        for exit in reversed(self.exits[1:]):
            rest.drop_exit(exit)
            left = named_tensors(rest)
            if not left.keys() <= set(names):
                raise StructureError(
                    f"the layers of '{exit}' share a tensor with earlier ones, which know it by "
                    "another name; define the earlier layer first, or share none"
                )
            gone = tuple(name for name in names if name not in left)
            blocks[exit], names = Block(exit, "", BY_MODULE, gone), list(left)
        return blocks

    def _program(self) -> Callable[..., Any]:
        if self.training not in self._programs:
            self._programs[self.training] = compile_graph(self._graphs[self.training])
        return self._programs[self.training]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_programs": {}}  # functions that no file can hold


def find_natural_exits(net: nn.Module) -> tuple[str, ...]:
    """Where exits go by default: behind the stages of a net, all but the last.

    Stages are the containers of residual blocks; where there are not several, the blocks are split
    evenly, and in a net without blocks its chain of layers.

    >>> layers = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten()]
    >>> find_natural_exits(nn.Sequential(*layers, nn.Linear(64, 2)))
    ('1',)
    """
    stages = group_by_stage(b for b in find_residual_blocks(net).values() if b.module)
    modules = [module for stage in stages.values() for module in stage]
    containers = [name for name in stages if name]
    if len(containers) > 1:
        return tuple(containers[:-1])
    ends = modules if len(modules) > 1 else _find_step_ends(net)
    count = min(NUM_EXITS, len(ends))
    if count < 2:
        raise StructureError(
            f"{type(net).__name__} has no place for an exit before its own; name modules that its "
            "forward calls with method.at"
        )
    return tuple(ends[number * len(ends) // count - 1] for number in range(1, count))


def _find_step_ends(net: nn.Module) -> list[str]:
    """The last module of each step of a chain; the classifier belongs to the last step.

    A step begins with a layer that has a weight matrix or kernel. Modules that are called more than
    once, such as an activation for all steps, are no place for an exit.
    """
    chains = [n for n, m in net.named_modules() if n and type(m).forward is nn.Sequential.forward]
    calls = [n for n in _trace(net, chains, training=False).nodes if n.op == "call_module"]
    begins = [i for i, node in enumerate(calls) if _has_matrix(net.get_submodule(str(node.target)))]
    often = Counter(node.target for node in calls)
    steps = [calls[start:end] for start, end in itertools.pairwise(begins[:-1])]
    own = ([node for node in step if often[node.target] == 1] for step in steps)
    return [str(node.target) for nodes in (*own, calls) for node in nodes[-1:]]


def _has_matrix(module: nn.Module) -> bool:
    return any(weight.ndim > 1 for weight in module.parameters())


def _trace(net: nn.Module, opened: Collection[str], *, training: bool) -> fx.Graph:
    try:
        return trace_code(net, training=training, opened=opened)
    except Unreadable as problem:
        raise StructureError(
            f"the code of {type(net).__name__} cannot be read, so no exit can be put into it "
            f"({problem}); its forward must call its modules one after another, without choices "
            "that depend on the input"
        ) from problem


def _trace_with_exits(net: nn.Module, at: Sequence[str], *, training: bool) -> fx.Graph:
    """The code of a net that gives the features behind modules, too, and the logits last."""
    known = dict(net.named_modules())
    graph = _trace(net, sorted(_list_ancestors(at) & known.keys()), training=training)
    ends = [_find_end(graph, name, known) for name in at]
    order = {node: number for number, node in enumerate(graph.nodes)}
    output = graph.output_node()
    (logits,) = output.args
    if not isinstance(logits, fx.Node):
        raise StructureError(
            f"a net with exits gives one tensor of logits, {type(net).__name__} gives {logits}"
        )
    for name, end, following in zip(at, ends, [*ends, logits][1:], strict=True):
        if order[end] >= order[following]:
            raise StructureError(
                f"exits are behind modules in the order in which the net calls them, before its "
                f"output; '{name}' in at = {', '.join(at)} comes too late"
            )
    copies = []
    for end in ends:
        with graph.inserting_after(end):  # the net may go on to change its features in place
            copies.append(graph.call_function(torch.clone, (end,)))
    output.args = ((*copies, logits),)
    return graph


def _list_ancestors(names: Sequence[str]) -> set[str]:
    """The modules that have the named ones somewhere inside."""
    parts = (name.split(".") for name in names)
    return {".".join(words[:i]) for words in parts for i in range(1, len(words))}


def _find_end(graph: fx.Graph, name: str, known: Mapping[str, nn.Module]) -> fx.Node:
    """Where a module has done its work: its one call, or the last call in a list of modules."""
    calls: list[fx.Node] = [node for node in graph.nodes if node.op == "call_module"]
    if isinstance(known.get(name), nn.ModuleList):
        ends = [node for node in calls if str(node.target).startswith(f"{name}.")][-1:]
    else:
        ends = [node for node in calls if node.target == name]
    if len(ends) != 1:
        what = f"the net calls {len(ends)} times" if name in known else "is no module of the net"
        raise StructureError(
            f"an exit is behind a module that is called once, and at names '{name}', which {what}; "
            f"its forward calls: {', '.join(dict.fromkeys(str(node.target) for node in calls))}"
        )
    return ends[0]


class _ShapeRecorder(fx.Interpreter):
    """Runs the code of a net and notes the shape of every tensor."""

    def __init__(self, net: nn.Module, graph: fx.Graph) -> None:
        super().__init__(net, graph=graph)
        self.shapes: dict[fx.Node, Shape] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor):
            self.shapes[n] = tuple(value.shape)
        return value


def _infer_shapes(net: nn.Module, graph: fx.Graph, example: Example) -> tuple[list[Shape], Shape]:
    """Shapes of what the code gives and of the last images in it, once it has proved right."""
    probe = copy.deepcopy(net).eval()
    *_, doubled = make_training_inputs(to_arguments(example))
    generator = torch.Generator().manual_seed(0)
    inputs = tuple(
        x + torch.rand(x.shape, generator=generator).to(x.dtype)
        if isinstance(x, Tensor) and x.is_floating_point()
        else x
        for x in doubled
    )
    watched = _ShapeRecorder(probe, graph)
    with torch.no_grad():
        *_, logits = values = watched.run(*inputs)
        expected = probe(*inputs)
    if not isinstance(expected, Tensor) or not torch.allclose(logits, expected, equal_nan=True):
        raise StructureError(
            f"the code of {type(net).__name__} does something else when it is read than when it is "
            "run, so no exit can be put into it"
        )
    images = [
        shape
        for node, shape in watched.shapes.items()
        if len(shape) == 4 and node.op == "call_module" and _has_weights(probe, node)
    ]
    return [tuple(value.shape) for value in values], images[-1] if images else ()


def _has_weights(net: nn.Module, node: fx.Node) -> bool:
    return any(True for _ in net.get_submodule(str(node.target)).parameters())


def _drop_last_output(graph: fx.Graph) -> None:
    """The code without its last result and what is computed for it alone."""
    output, nodes = graph.output_node(), list(graph.nodes)
    statements = {node for node in nodes if not node.users}  # for what they do, such as x.add_(1)
    *kept, _ = output.all_input_nodes
    output.args = (tuple(kept),)
    end = nodes.index(kept[-1])
    for place, node in reversed(list(enumerate(nodes))):
        is_done = node in statements and place < end
        if not node.users and not is_done and node.op not in ("placeholder", "output"):
            graph.erase_node(node)


@dataclass(frozen=True)
class ExitLosses:
    """The objective: every exit learns from the labels, and from what the others say.

    ``distil`` weighs the divergences. With ``only_last`` the last exit alone learns, from the
    labels (InclusiveFL, Liu et al., KDD 2022).
    """

    distil: float = 0.0
    only_last: bool = False
    least = 0.0  # that it can be

    def loss(
        self,
        module: nn.Module,
        batch: Batch,
        loss: ClientLoss,
        generator: torch.Generator,
    ) -> Tensor:
        """Σ_i L(f_i(x), y) + distil · divergence."""
        x, y = batch
        exits = module(*to_arguments(x))
        if self.only_last:
            return loss(exits[-1], y)
        total = torch.stack([loss(output, y) for output in exits]).sum()
        if not self.distil:
            return total
        return total + self.distil * mutual_divergence(exits, loss.loss)


def mutual_divergence(exits: Sequence[Tensor], loss: Loss = CROSS_ENTROPY) -> Tensor:
    """How far exits are from each other: Σ_i mean_{j≠i} KL(p_j ‖ p_i), 0 if there is one.

    p_i is what exit i says, with p_j as a teacher that learns nothing. Logits may have any number
    of axes; classes are on the last. Where there are no classes, the divergence is the mean squared
    difference.

    >>> mutual_divergence([torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 1.0]])])
    tensor(0.2311)
    """
    if not loss.has_classes:
        parts = [loss.distil(*pair) for pair in itertools.permutations(exits, 2)]
        return torch.stack(parts).sum() / (len(exits) - 1) if parts else exits[0].new_zeros(())
    said = [logits.flatten(0, -2).log_softmax(-1) for logits in exits]
    pairs = [
        F.kl_div(student, teacher.detach(), reduction="batchmean", log_target=True)
        for student, teacher in itertools.permutations(said, 2)
    ]
    return torch.stack(pairs).sum() / (len(said) - 1) if pairs else said[0].new_zeros(())
