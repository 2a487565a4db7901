"""What a trace records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedquilt.structure.trace.channels import Channels, Labels
from fedquilt.structure.trace.rules.registry import Dims


@dataclass(frozen=True)
class Choices:
    """One way to settle what a forward pass leaves open."""

    split_first: frozenset[tuple[str, int]] = frozenset()
    """Reshapes (module, number of its reshapes before) that split an axis into (channels, rest).
    All others split it into (rest, channels), as attention heads do."""
    one_number: bool = False
    """Axes of equal size that a module reshapes get their size from one attribute of it."""
    from_input: bool = False
    """That attribute is the size of the module's input."""


@dataclass(frozen=True)
class Split:
    """A reshape that had to choose which part of an axis carries its channels."""

    module: str
    number: int  # how many reshapes the module made before
    sizes: tuple[int, ...]  # of the parts
    labels: Labels  # of the axis


@dataclass(frozen=True)
class Cause:
    """An operation through which channels could not be followed, and the module that runs it."""

    operation: str
    module: str


@dataclass(frozen=True)
class TracedCall:
    """One operation of a forward pass, as it was called."""

    name: str
    arguments: Mapping[str, Any]  # tensors by their shape
    given: tuple[Dims, ...]  # labels of its tensors
    made: tuple[Dims, ...]  # labels of its outputs
    across: tuple[Labels, ...]  # channels that it, or what it was given, was computed across


@dataclass(frozen=True)
class TracedPass:
    """One run of the model, in evaluation or in training mode."""

    inputs: tuple[Any, ...]
    training: bool
    calls: list[TracedCall]


@dataclass
class Trace:
    """What following the forward passes has shown."""

    channels: Channels
    tensors: dict[str, Dims]  # labels of every parameter and buffer
    statistics: frozenset[str]  # running statistics of batch normalisation
    outputs: Labels | None  # labels of the last axis of the first output
    sizes: dict[str, list[tuple[int, Labels]]]  # labelled axes that each module met
    across: dict[str, list[Labels]]  # channels that each module computes across
    splits: list[Split] = field(default_factory=list)
    passes: list[TracedPass] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)  # of the reasons for being frozen, from 1
    unused: list[str] = field(default_factory=list)  # tensors that the passes do not meet
    keeps_weights: bool = False  # whether a large model is known not to write to its weights
