"""What a finished model and the modules made of it know about themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

import torch
from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
)
from torch import Tensor, nn

from fedquilt.data import Normalize
from fedquilt.federation.chosen import ChosenSubnets, encode_chosen
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.tensors import Example, to_arguments

MAX_NUMBERS = 2**28  # of an example
ATTRIBUTE = "fedquilt_info"


def _check_dtype(name: str) -> str:
    if not isinstance(getattr(torch, name, None), torch.dtype):
        raise ValueError(f"{name!r} is no type of tensors")
    return name


def _check_shape(sizes: tuple[int, ...]) -> tuple[int, ...]:
    if math.prod(sizes) > MAX_NUMBERS:
        raise ValueError(f"an example has at most {MAX_NUMBERS} numbers")
    return sizes


def _check_chosen(document: dict[str, Any]) -> dict[str, Any]:
    try:
        ChosenSubnets.decode(document)
    except (AttributeError, KeyError, TypeError) as problem:
        raise ValueError("no subnets of clients") from problem
    return document


@dataclass(frozen=True)
class InputSpec:
    """The shape and the dtype of one input of a model; the first axis is the batch."""

    shape: Annotated[tuple[NonNegativeInt, ...], AfterValidator(_check_shape)]
    dtype: Annotated[str, AfterValidator(_check_dtype)]


@dataclass(frozen=True)
class ModelCall:
    """The name and the options that a known model was made with."""

    name: str
    options: dict[str, Any]


@dataclass(frozen=True)
class TaskNames:
    """What was learned: the names of the loss and of the metrics."""

    loss: str
    metrics: tuple[str, ...]


@dataclass(frozen=True)
class RunInfo:
    """The run that a finished model comes from, as plain values; stored with the model.

    ``method`` are the settings of the method that differ from their defaults, with its class.
    ``sizes`` are those that were trained. ``environments`` are where it was trained, one after
    another. ``client_versions`` and ``chosen_subnets`` are what clients keep and what they chose.
    ``model_round`` is the round whose model it is, of ``trained_rounds``, if it was selected; None:
    it is that of the last round.

    What the model can be made of again: ``config`` is the settings of the command line;
    ``model_call`` and ``method_settings`` are those of a run from Python, None if only Python
    knows them. ``transforms`` are those that inputs go through before ``normalization``, which is
    that of the inputs. ``privacy`` is what a private run spent, and ``attack`` what hostile clients
    did, None for runs without.
    """

    __pydantic_config__ = ConfigDict(extra="ignore")

    seed: int
    rounds: PositiveInt
    method: dict[str, Any]
    sizes: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)]
    inputs: Annotated[tuple[InputSpec, ...], Field(min_length=1)]
    exceeds_budgets: str | None = None
    client_versions: dict[int, NonNegativeInt] = field(default_factory=dict)
    chosen_subnets: Annotated[dict[str, Any], AfterValidator(_check_chosen)] = field(
        default_factory=dict
    )
    environments: tuple[dict[str, str], ...] = ()
    config: dict[str, Any] | None = None
    model_call: ModelCall | None = None
    method_settings: dict[str, Any] | None = None
    transforms: tuple[str, ...] = ()
    task: TaskNames | None = None  # None: classification
    normalization: Normalize | None = None
    model_round: NonNegativeInt | None = None
    trained_rounds: NonNegativeInt | None = None
    privacy: dict[str, Any] | None = None
    attack: dict[str, Any] | None = None

    @property
    def example(self) -> Example:
        """Zeros of the shapes of the inputs."""
        tensors = tuple(torch.zeros(x.shape, dtype=getattr(torch, x.dtype)) for x in self.inputs)
        return tensors if len(tensors) > 1 else tensors[0]

    @property
    def selected(self) -> str:
        """Which round's model it is, for people; empty if it is that of the last round planned."""
        if self.model_round is None or self.model_round == self.rounds:
            return ""
        return f"model of round {self.model_round}; {self.trained_rounds} of {self.rounds} trained"

    def with_results(
        self,
        client_versions: Mapping[int, int],
        chosen_subnets: Mapping[int, Subnet],
        environments: tuple[Mapping[str, str], ...],
    ) -> RunInfo:
        """The same, with what is known only when the run has ended."""
        return replace(
            self,
            client_versions=dict(client_versions),
            chosen_subnets=encode_chosen(chosen_subnets),
            environments=tuple(dict(environment) for environment in environments),
        )

    def decode_subnets(self) -> Mapping[int, Subnet]:
        """The subnets that clients chose for themselves."""
        return ChosenSubnets.decode(self.chosen_subnets)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> RunInfo:
        """The info in a JSON object; raises pydantic's ValidationError if there is none."""
        return TypeAdapter(RunInfo).validate_python(dict(document))


def describe_inputs(example: Example) -> tuple[InputSpec, ...]:
    """The shapes and dtypes of an example.

    >>> describe_inputs(torch.zeros(1, 3))
    (InputSpec(shape=(1, 3), dtype='float32'),)
    """
    return tuple(
        InputSpec(tuple(x.shape), str(x.dtype).removeprefix("torch."))
        for x in to_arguments(example)
        if isinstance(x, Tensor)
    )


@dataclass(frozen=True, eq=False)
class SubnetInfo:
    """What a customized module knows of itself: an example input, its width, its robustness."""

    example: Example
    width: float
    robustness: float | None = None  # None: it has no such dial


def attach_info(module: nn.Module, info: SubnetInfo) -> None:
    """Gives a module its info, as the attribute ``fedquilt_info``."""
    setattr(module, ATTRIBUTE, info)


def find_info(module: nn.Module) -> SubnetInfo | None:
    """The info of a customized module; None for any other."""
    info = getattr(module, ATTRIBUTE, None)
    return info if isinstance(info, SubnetInfo) else None
