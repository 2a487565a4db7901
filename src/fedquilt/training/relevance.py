"""Relevance of channels to a net's answers: LRP by the z⁺ rule, through captum (ADDS, Sec. 3.3).

captum follows modules, each used once. What a ``forward`` writes as functions it passes by their
gradient, which doubles relevance at a sum and spreads that of a mean evenly; and it refuses layers
that it has no rule for, wherever they are. So a forward pass is recorded, and captum is given a net
in which each operation above the layers in question is a module of its own, by captum's rules:

    linear layers, convolutions     Alpha1_Beta0_Rule, without bias: Eq. 11
    sums, means, average pooling    EpsilonRule on positive parts: Eq. 11 where weights are equal
    max pooling                     EpsilonRule: to the largest
    products of two values          EpsilonRule on the root: half to each
    activations, normalization      IdentityRule; where a layer's outputs are scaled by negative
                                    numbers, its weights change sign
    reshaping, concatenation        each number keeps its own

With them the sum of relevance is the same above and below every operation (Eq. 10), but for outputs
without any positive part: those owe what they are to a bias, and what is theirs is lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fedquilt.errors import ConfigError
from fedquilt.structure.groups import Axis
from fedquilt.structure.structure import Structure
from fedquilt.structure.tensors import Example, make_training_inputs, to_arguments
from fedquilt.training.gating import find_consumers
from fedquilt.training.tape import RecordedCall, Tape, TensorRef, evaluation_mode, record_forward


def _expand_names(words: str) -> frozenset[str]:
    """PyTorch's names of functions; ``*d`` stands for one, two and three dimensions."""
    return frozenset(w.replace("*", n) for w in words.split() for n in ("1", "2", "3"))


PRODUCTS = _expand_names("linear conv*d conv_transpose*d")
MEANS = _expand_names("mean sum avg_pool*d adaptive_avg_pool*d")
LARGEST = _expand_names("amax max_pool*d adaptive_max_pool*d")
SUMS = _expand_names("add add_")
TIMES = _expand_names("mul mul_")
SCALES = {"batch_norm": 3, "instance_norm": 3, "group_norm": 2}  # the place of the scale
PASSED = _expand_names(
    "batch_norm instance_norm group_norm layer_norm rms_norm relu relu_ relu6 leaky_relu "
    "leaky_relu_ prelu rrelu elu elu_ selu celu gelu silu mish softplus hardswish hardsigmoid "
    "hardtanh sigmoid tanh softsign logsigmoid clamp clamp_min dropout dropout*d alpha_dropout "
    "feature_alpha_dropout detach div div_ sub sub_"
)
MOVED = _expand_names(
    "flatten view reshape unflatten permute transpose movedim squeeze unsqueeze expand repeat cat "
    "concat concatenate stack chunk split unbind narrow select index_select __getitem__ flip roll "
    "pad pixel_shuffle pixel_unshuffle channel_shuffle contiguous clone to float double"
)
NAMED = ("input", "weight", "bias")  # the first arguments of products
TINY = 1e-30  # so that a root has a gradient at zero


def compute_relevance(
    module: nn.Module, structure: Structure, groups: Sequence[str], inputs: Example, labels: Tensor
) -> dict[str, Tensor]:
    """How much each channel of the groups does for the logits of the true classes, in a batch.

    What goes in at the top is the size of those logits. A channel's relevance is that of the
    inputs of linear layers and convolutions which are this channel, over all layers, positions and
    examples. The net is taken as in use: without dropout. It stays as it is, and so do its
    gradients and the state of random numbers.
    """
    layers = {
        id(layer.weight): (axis, last)
        for layer, axis, last in find_consumers(module, structure)
        if any(span.group in groups for span in axis)
    }
    totals = {g: torch.zeros(structure.groups[g].size, device=labels.device) for g in groups}
    reached: set[str | None] = set()
    tape = record_forward(module, to_arguments(inputs))
    for step, relevance in _trace_relevance(tape, labels, layers.keys()):
        axis, last = layers[id(step.argument("weight", 1))]
        _add(totals, relevance, axis, relevance.ndim - 1 if last else 1)
        reached.update(span.group for span in axis)
    for group in groups:
        if group not in reached:
            raise ConfigError(
                f"relevance cannot be followed from the model's output to the channels of "
                f"'{group}'; use importance = 'slimming'"
            )
    return totals


def require_relevance(
    module: nn.Module, structure: Structure, groups: Sequence[str], example: Example
) -> None:
    """Refuses a net through which relevance cannot be followed, by trying on the example."""
    *_, inputs = make_training_inputs(to_arguments(example))
    with torch.no_grad(), evaluation_mode(module):
        labels = torch.zeros(module(*inputs).shape[:-1], dtype=torch.int64)
    compute_relevance(module, structure, groups, inputs, labels)


def _add(totals: dict[str, Tensor], relevance: Tensor, axis: Axis, place: int) -> None:
    """Adds the relevance of an input to that of the channels along one of its axes."""
    sums, first = relevance.movedim(place, 0).flatten(1).sum(1).float(), 0
    for span in axis:
        part = sums[first : first + len(span.channels)]
        first += len(span.channels)
        if span.group in totals:
            channels = torch.tensor(span.channels, device=part.device)
            totals[span.group].index_add_(0, channels, part)


def _trace_relevance(
    tape: Tape, labels: Tensor, weights: Collection[int]
) -> list[tuple[RecordedCall, Tensor]]:
    """The relevance of what goes into those products that have one of the weights."""
    captum, _ = _import_captum()
    net = _RelevanceNet(tape, labels, weights)
    if not net.asked:
        return []
    lrp = captum.LayerLRP(net, [net.operations[str(number)] for number in net.asked])
    entries = tuple(x.clone().requires_grad_() for x in net.entries.values())
    relevances = lrp.attribute(entries, attribute_to_layer_input=True)
    return [(tape.steps[n], relevance) for n, relevance in zip(net.asked, relevances, strict=True)]


def _import_captum() -> tuple[Any, Any]:
    """captum, and its rules."""
    try:
        import captum.attr
        from captum.attr._utils import lrp_rules
    except ImportError:
        raise ConfigError("relevance needs the extra: pip install 'fedquilt[lrp]'") from None
    return captum.attr, lrp_rules


class _RelevanceNet(nn.Module):
    """The steps from some layers up to the output, and then the size of the classes' logits.

    ``asked`` are the steps of those layers, ``entries`` the inputs of the lowest of them.
    """

    def __init__(self, tape: Tape, labels: Tensor, weights: Collection[int]) -> None:
        super().__init__()
        layers = {
            number
            for number, step in enumerate(tape.steps)
            if step.name in PRODUCTS and id(step.argument("weight", 1)) in weights
        }
        self._tape, self._steps = tape, _collect_steps(tape, layers)
        self.asked = [number for number in self._steps if number in layers]
        self.entries = {
            number: _get_value(tape, tape.steps[number].argument("input", 0))
            for number, sources in self._steps.items()
            if not sources
        }
        signs = _find_signs(tape, self._steps)
        self.operations = nn.ModuleDict()
        for number, sources in self._steps.items():
            operation = _make_operation(tape, tape.steps[number], sources, signs.get(number))
            if operation is not None:
                self.operations[str(number)] = operation
        if tape.output is not None and self._steps:
            size = partial(_sum_magnitudes, labels.unsqueeze(-1))
            rule = _import_captum()[1].EpsilonRule()
            self.operations["size"] = _Operation(rule, size(tape.value(tape.output)), size)

    def forward(self, *entries: Tensor) -> Tensor:
        """One number."""
        given = dict(zip(self.entries, entries, strict=True))
        values: dict[TensorRef, Tensor] = {}
        for number, sources in self._steps.items():
            if str(number) in self.operations:
                inputs = [values[made] for made in sources] or [given[number]]
                outputs = [self._done(str(number), inputs)]
            else:
                outputs = tree_leaves(self._tape.replay(self._tape.steps[number], values))
            values |= {TensorRef(number, place): value for place, value in enumerate(outputs)}
        assert self._tape.output is not None
        return self._done("size", [values[self._tape.output]])

    def _done(self, name: str, inputs: Sequence[Tensor]) -> Tensor:
        operation = self.operations[name]
        assert isinstance(operation, _Operation)
        output: Tensor = operation(*map(operation.own, inputs))
        return output


def _sum_magnitudes(labels: Tensor, logits: Tensor) -> Tensor:
    """The sizes of the logits of classes, summed."""
    return logits.gather(-1, labels).abs().sum().view(1)


class _Operation(nn.Module):
    """A step as captum sees it, twice: what it has made, and then how it spreads relevance."""

    def __init__(
        self,
        rule: Any,
        known: Tensor,
        spread: Callable[..., Tensor],
        weight: Tensor | None = None,
        *,
        shape: torch.Size | None = None,
    ) -> None:
        super().__init__()
        self.rule, self.weight = rule, weight  # no parameter: captum's rules change it
        self._known, self._spread, self._shape = [known], spread, shape

    def own(self, x: Tensor) -> Tensor:
        """An input as an object of its own, because captum marks and replaces what it sees."""
        return x.expand(x.shape if self._shape is None else self._shape)

    def forward(self, *inputs: Tensor) -> Tensor:
        """First the known output, then what the rule is about."""
        if self._known:
            return self._known.pop()
        return self._spread(*inputs) if self.weight is None else self._spread(self.weight, *inputs)


def _collect_steps(tape: Tape, layers: Collection[int]) -> dict[int, tuple[TensorRef, ...]]:
    """The steps from the layers up to the output, and what each has from others of them."""
    above: dict[int, tuple[TensorRef, ...]] = {}
    for number, step in enumerate(tape.steps):
        sources = tuple(made for made in step.sources if made.step in above)
        if number in layers or (sources and step.outputs[0].is_floating_point()):
            above[number] = sources
    ahead = [] if tape.output is None else [tape.output.step]
    needed: set[int] = set()
    while ahead:
        number = ahead.pop()
        if number in above and number not in needed:
            needed.add(number)
            ahead += [made.step for made in above[number]]
    return {number: sources for number, sources in above.items() if number in needed}


def _find_signs(tape: Tape, steps: Mapping[int, tuple[TensorRef, ...]]) -> dict[int, Tensor]:
    """The signs of what a product's outputs are scaled by, where they go nowhere else."""
    uses = Counter(made for sources in steps.values() for made in sources)
    signs = {}
    for number, sources in steps.items():
        step = tape.steps[number]
        if step.name in SCALES and uses[sources[0]] == 1:
            scale = step.argument("weight", SCALES[step.name])
            if scale is not None and tape.steps[sources[0].step].name in PRODUCTS:
                signs[sources[0].step] = torch.where(_get_value(tape, scale) < 0, -1.0, 1.0)
    return signs


def _get_value(tape: Tape, given: Tensor | TensorRef) -> Tensor:
    return (tape.value(given) if isinstance(given, TensorRef) else given).detach()


def _make_operation(
    tape: Tape, step: RecordedCall, sources: Sequence[TensorRef], sign: Tensor | None
) -> _Operation | None:
    """How relevance goes through a step to its sources; None: as a gradient does."""
    rules, known, name = _import_captum()[1], step.outputs[0], step.name
    is_one = all(made is step.argument("input", 0) for made in sources)
    if any(made.step >= 0 and tape.steps[made.step].is_changed for made in step.sources):
        raise _make_error(step, "what it is given is written over later")
    if name in MOVED:
        return None
    if name in PRODUCTS and is_one:
        return _Operation(rules.Alpha1_Beta0_Rule(), known, *_make_product(tape, step, sign))
    if name in SUMS | TIMES and "alpha" not in step.named:
        others = _find_other_data(tape, step, sources)
        if len(sources) + len(others) > 1:
            spread = partial(_sum if name in SUMS else _find_root, others)
            return _Operation(rules.EpsilonRule(), known, spread)
        return _Operation(rules.IdentityRule(), known, torch.clone, shape=known.shape)
    if name in LARGEST and is_one:
        return _Operation(rules.EpsilonRule(), known, lambda x: tape.replay(step, {sources[0]: x}))
    if name in MEANS and is_one:
        return _Operation(
            rules.EpsilonRule(), known, lambda x: tape.replay(step, {sources[0]: x.clamp(min=0)})
        )
    if name in PASSED and is_one:
        return _Operation(rules.IdentityRule(), known, torch.clone, shape=known.shape)
    raise _make_error(step, "there is no rule for it")


def _make_product(
    tape: Tape, step: RecordedCall, sign: Tensor | None
) -> tuple[Callable[[Tensor, Tensor], Tensor], Tensor]:
    """Eq. 11: (a w)⁺ is a⁺ w⁺ and, where there are negative inputs, (-a)⁺ (-w)⁺.

    The two kinds of weights are stacked; captum's rule takes the positive part of both.
    """
    inputs, weight = (
        _get_value(tape, step.argument(n, i)) for i, n in enumerate(("input", "weight"))
    )
    if sign is not None:
        axis = int(step.name.startswith("conv_transpose"))
        weight = weight * sign.view([-1 if a == axis else 1 for a in range(weight.ndim)])
    rest, named = step.args[3:], {n: v for n, v in step.named.items() if n not in NAMED}

    def spread(weights: Tensor, x: Tensor) -> Tensor:
        parts = [x] if len(weights) == 1 else [x.clamp(min=0), (-x).clamp(min=0)]
        terms: list[Tensor] = [
            step.call(part, w, None, *rest, **named) for part, w in zip(parts, weights, strict=True)
        ]
        return terms[0] if len(terms) == 1 else terms[0] + terms[1]

    is_signed = bool((inputs < 0).any())
    return spread, torch.stack([weight, -weight]) if is_signed else weight.unsqueeze(0)


def _find_other_data(tape: Tape, step: RecordedCall, sources: Sequence[TensorRef]) -> list[Tensor]:
    """What else a sum or a product is of, but for parameters: biases and scales."""
    return [
        tape.value(made)
        for made in step.sources
        if made not in sources and (made.step < 0 or tape.steps[made.step].from_data)
    ]


def _sum(others: Sequence[Tensor], *inputs: Tensor) -> Tensor:
    first, *rest = (x.clamp(min=0) for x in (*inputs, *others))
    return sum(rest, start=first)


def _find_root(others: Sequence[Tensor], *inputs: Tensor) -> Tensor:
    one, other = (*inputs, *others)
    return ((one * other).abs() + TINY).sqrt()


def _make_error(step: RecordedCall, reason: str) -> ConfigError:
    where = f" of module '{step.module}'" if step.module else ""
    return ConfigError(
        f"relevance cannot be followed through '{step.name}'{where}: {reason}; use other layers "
        "there, or importance = 'slimming'"
    )
