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
from fedquilt.structure.blocks import BY_MODULE, Block, by_stage, remove, residual_blocks
from fedquilt.structure.code import Unreadable, code_of, compiled, parts_of, unused
from fedquilt.structure.trace import Example, arguments, named_tensors, training_inputs
from fedquilt.training.losses import cross_entropy
from fedquilt.training.mixing import mixed

NUM_EXITS = 4  # where the net itself does not say how many stages it has

Shape = tuple[int, ...]


class MultiExit(nn.Module):
    """A net with an exit after each of the modules ``at``, and its own output as the last exit.

    In training it gives the logits of every exit, the first one first; in use their mean.
    ``leave_out`` takes the last exit away, with every layer that no other one needs.
    """

    def __init__(self, net: nn.Module, at: Sequence[str], example: Example) -> None:
        super().__init__()
        self.net = net
        self.exits = tuple(f"exit{number}" for number in range(1, len(at) + 2))
        self._graphs = {training: _read(net, at, training=training) for training in (True, False)}
        (*features, logits), last = _shapes(net, self._graphs[False], example)
        pairs = zip(self.exits[:-1], features, strict=True)
        self.heads = nn.ModuleDict({name: _head(shape, last, logits) for name, shape in pairs})
        self._programs: dict[bool, Callable[..., Any]] = {}

    def forward(self, *inputs: Any) -> Any:
        """The logits of all exits, or in use their mean."""
        found = self._program()(self.net, *inputs)
        every = [
            self.heads[name](value) if name in self.heads else value
            for name, value in zip(self.exits, found, strict=True)
        ]
        return tuple(every) if self.training else mixed(every)

    def leave_out(self, name: str) -> None:
        """The last exit is gone, in place."""
        if name != self.exits[-1] or len(self.exits) == 1:
            raise StructureError(
                f"exits are left out from the last one, and the first one stays; '{name}' is not "
                f"the last of {', '.join(self.exits)}"
            )
        self.exits, self._programs = self.exits[:-1], {}
        if name in self.heads:
            del self.heads[name]
        before = parts_of(self._graphs.values())
        for graph in self._graphs.values():
            _drop_last(graph)
        for part in unused(before, parts_of(self._graphs.values())):
            remove(self.net, part)

    def blocks(self) -> dict[str, Block]:
        """What may be skipped, in the order in which it can be: every exit but the first.

        The tensors of an exit are those that are gone with it and not with a later one.
        """
        rest, found = copy.deepcopy(self), {}
        names = list(named_tensors(rest))
        for exit in reversed(self.exits[1:]):
            rest.leave_out(exit)
            left = named_tensors(rest)
            if not left.keys() <= set(names):
                raise StructureError(
                    f"the layers of '{exit}' share a tensor with earlier ones, which know it by "
                    "another name; define the earlier layer first, or share none"
                )
            gone = tuple(name for name in names if name not in left)
            found[exit], names = Block(exit, "", BY_MODULE, gone), list(left)
        return found

    def _program(self) -> Callable[..., Any]:
        if self.training not in self._programs:
            self._programs[self.training] = compiled(self._graphs[self.training])
        return self._programs[self.training]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_programs": {}}  # functions that no file can hold


def natural_exits(net: nn.Module) -> tuple[str, ...]:
    """Where exits go if nobody says: behind the stages of a net, all but the last.

    Stages are the containers of residual blocks; where there are not several, the blocks are split
    evenly, and in a net without blocks its chain of layers.

    >>> layers = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten()]
    >>> natural_exits(nn.Sequential(*layers, nn.Linear(64, 2)))
    ('1',)
    """
    found = by_stage(b for b in residual_blocks(net).values() if b.module)
    modules = [module for stage in found.values() for module in stage]
    containers = [name for name in found if name]
    if len(containers) > 1:
        return tuple(containers[:-1])
    ends = modules if len(modules) > 1 else _ends_of_steps(net)
    count = min(NUM_EXITS, len(ends))
    if count < 2:
        raise StructureError(
            f"{type(net).__name__} has no place for an exit before its own; name modules that its "
            "forward calls with method.at"
        )
    return tuple(ends[number * len(ends) // count - 1] for number in range(1, count))


def _ends_of_steps(net: nn.Module) -> list[str]:
    """The last module of each step of a chain; the classifier belongs to the last step.

    A step begins with a layer that has a weight matrix or kernel. Modules that are called more than
    once, such as an activation for all steps, are no place for an exit.
    """
    chains = [n for n, m in net.named_modules() if n and type(m).forward is nn.Sequential.forward]
    calls = [n for n in _code(net, chains, training=False).nodes if n.op == "call_module"]
    begins = [i for i, node in enumerate(calls) if _has_matrix(net.get_submodule(str(node.target)))]
    often = Counter(node.target for node in calls)
    steps = [calls[start:end] for start, end in itertools.pairwise(begins[:-1])]
    own = ([node for node in step if often[node.target] == 1] for step in steps)
    return [str(node.target) for nodes in (*own, calls) for node in nodes[-1:]]


def _has_matrix(module: nn.Module) -> bool:
    return any(weight.ndim > 1 for weight in module.parameters())


def _code(net: nn.Module, opened: Collection[str], *, training: bool) -> fx.Graph:
    try:
        return code_of(net, training=training, opened=opened)
    except Unreadable as problem:
        raise StructureError(
            f"the code of {type(net).__name__} cannot be read, so no exit can be put into it "
            f"({problem}); its forward must call its modules one after another, without choices "
            "that depend on the input"
        ) from problem


def _read(net: nn.Module, at: Sequence[str], *, training: bool) -> fx.Graph:
    """The code of a net that gives the features behind modules, too, and the logits last."""
    known = dict(net.named_modules())
    graph = _code(net, sorted(_around(at) & known.keys()), training=training)
    ends = [_end(graph, name, known) for name in at]
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


def _around(names: Sequence[str]) -> set[str]:
    """The modules that have the named ones somewhere inside."""
    parts = (name.split(".") for name in names)
    return {".".join(words[:i]) for words in parts for i in range(1, len(words))}


def _end(graph: fx.Graph, name: str, known: Mapping[str, nn.Module]) -> fx.Node:
    """Where a module has done its work: its one call, or the last call in a list of modules."""
    calls: list[fx.Node] = [node for node in graph.nodes if node.op == "call_module"]
    if isinstance(known.get(name), nn.ModuleList):
        found = [node for node in calls if str(node.target).startswith(f"{name}.")][-1:]
    else:
        found = [node for node in calls if node.target == name]
    if len(found) != 1:
        what = f"the net calls {len(found)} times" if name in known else "is no module of the net"
        raise StructureError(
            f"an exit is behind a module that is called once, and at names '{name}', which {what}; "
            f"its forward calls: {', '.join(dict.fromkeys(str(node.target) for node in calls))}"
        )
    return found[0]


class _Watched(fx.Interpreter):
    """Runs the code of a net and notes the shape of every tensor."""

    def __init__(self, net: nn.Module, graph: fx.Graph) -> None:
        super().__init__(net, graph=graph)
        self.shapes: dict[fx.Node, Shape] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor):
            self.shapes[n] = tuple(value.shape)
        return value


def _shapes(net: nn.Module, graph: fx.Graph, example: Example) -> tuple[list[Shape], Shape]:
    """Shapes of what the code gives and of the last images in it, once it has proved right."""
    probe = copy.deepcopy(net).eval()
    *_, doubled = training_inputs(arguments(example))
    generator = torch.Generator().manual_seed(0)
    inputs = tuple(
        x + torch.rand(x.shape, generator=generator).to(x.dtype)
        if isinstance(x, Tensor) and x.is_floating_point()
        else x
        for x in doubled
    )
    watched = _Watched(probe, graph)
    with torch.no_grad():
        *_, logits = found = watched.run(*inputs)
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
    return [tuple(value.shape) for value in found], images[-1] if images else ()


def _has_weights(net: nn.Module, node: fx.Node) -> bool:
    return any(True for _ in net.get_submodule(str(node.target)).parameters())


def _head(features: Shape, last: Shape, logits: Shape) -> nn.Module:
    """What makes logits of the features at an exit."""
    if len(features) == 4 and len(logits) == 2:
        return ImageHead(features[1:], (last or features)[1:], logits[-1])
    if len(features) in (2, 3) and 2 <= len(logits) <= len(features):
        return TokenHead(features[-1], logits[-1], pooled=len(logits) < len(features))
    raise StructureError(
        "an exit makes logits of images (batch, channels, height, width) or of tokens (batch, "
        f"tokens, channels); here it would make {logits} of {features}; name other modules"
    )


class SeparableConv(nn.Sequential):
    """Two separable convolutions, the first with a stride, the second to so many channels."""

    def __init__(self, channels: int, size: int, stride: int) -> None:
        layers: list[nn.Module] = []
        for step, out in ((stride, channels), (1, size)):
            layers += [
                nn.Conv2d(channels, channels, 3, step, 1, groups=channels, bias=False),
                nn.Conv2d(channels, out, 1, bias=False),
                nn.BatchNorm2d(out),
                nn.ReLU(),
            ]
        super().__init__(*layers)


class ImageHead(nn.Module):
    """Attention, a bottleneck that makes images as small and deep as the net's last, a classifier.

    ``features`` and ``last`` are (channels, height, width). Each step of the bottleneck halves the
    images; channels grow evenly. Where images are as small as the last already, it is one
    step that does not halve them.
    """

    def __init__(self, features: Shape, last: Shape, num_classes: int) -> None:
        super().__init__()
        channels, *size = features
        halvings = max(map(_halvings, size, last[1:]))
        steps = max(halvings, 1)
        growth = last[0] / channels
        sizes = [round(channels * growth ** (step / steps)) for step in range(steps + 1)]
        self.attention = nn.Sequential(
            SeparableConv(channels, channels, 2), nn.BatchNorm2d(channels), nn.ReLU()
        )
        self.bottleneck = nn.Sequential(
            *(SeparableConv(a, b, 2 if halvings else 1) for a, b in itertools.pairwise(sizes))
        )
        self.classifier = nn.Linear(sizes[-1], num_classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        seen = F.interpolate(self.attention(x), x.shape[-2:], mode="bilinear")
        return self.classifier(self.bottleneck(x * seen.sigmoid()).mean((2, 3)))  # type: ignore[no-any-return]


def _halvings(size: int, last: int) -> int:
    """How often a size is halved, rounded up, until it is the last one.

    >>> _halvings(32, 4), _halvings(7, 4), _halvings(4, 4)
    (3, 1, 0)
    """
    return 0 if size <= last else 1 + _halvings((size + 1) // 2, last)


class TokenHead(nn.Module):
    """Normalised tokens, their mean, a classifier; or a classifier for each of them."""

    def __init__(self, channels: int, num_classes: int, *, pooled: bool) -> None:
        super().__init__()
        self.norm, self.pooled = nn.LayerNorm(channels), pooled
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.norm(x)
        return self.classifier(x.mean(1) if self.pooled else x)  # type: ignore[no-any-return]


def _drop_last(graph: fx.Graph) -> None:
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
        x: Tensor,
        y: Tensor,
        own: tuple[int, ...] | None,
        generator: torch.Generator,
    ) -> Tensor:
        """Σ_i CE(f_i(x), y) + distil · divergence."""
        exits = module(x)
        if self.only_last:
            return cross_entropy(exits[-1], y, own)
        total = torch.stack([cross_entropy(logits, y, own) for logits in exits]).sum()
        return total + self.distil * mutual_divergence(exits) if self.distil else total


def mutual_divergence(exits: Sequence[Tensor]) -> Tensor:
    """How far exits are from each other: Σ_i mean_{j≠i} KL(p_j ‖ p_i), 0 if there is one.

    p_i is what exit i says, with p_j as a teacher that learns nothing. Logits may have any number
    of axes; classes are on the last.

    >>> mutual_divergence([torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 1.0]])])
    tensor(0.2311)
    """
    said = [logits.flatten(0, -2).log_softmax(-1) for logits in exits]
    pairs = [
        F.kl_div(student, teacher.detach(), reduction="batchmean", log_target=True)
        for student, teacher in itertools.permutations(said, 2)
    ]
    return torch.stack(pairs).sum() / (len(said) - 1) if pairs else said[0].new_zeros(())
