"""Examples whose inputs have names, as a model's positional arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedquilt.data.examples import ClientData, ConcatExamples, Examples, Rows
from fedquilt.data.transformed import TransformedExamples
from fedquilt.data.windows import Windows
from fedquilt.learning.batch import Batch, as_batch, bind_batch


@dataclass(frozen=True, eq=False)
class BoundExamples:
    """Examples with their inputs in the order of the arguments of a model's ``forward``."""

    examples: ClientData
    model: nn.Module

    def __getattr__(self, name: str) -> Any:
        if name in ("examples", "model"):  # of an object that is being made, such as by copying
            raise AttributeError(name)
        return getattr(self.examples, name)  # such as the scale of images, which attacks need

    def __len__(self) -> int:
        """The number of examples."""
        return len(self.examples)

    @property
    def labels(self) -> Tensor | None:
        """The label of every example; None: no classes."""
        return self.examples.labels

    @property
    def label_set(self) -> tuple[int, ...]:
        """The labels present, in order."""
        return self.examples.label_set

    def batch(self, rows: Tensor, generator: torch.Generator | None = None) -> Batch:
        """Returns inputs and targets of some rows."""
        return bind_batch(self.model, as_batch(self.examples.batch(rows, generator)))

    def select(self, rows: Rows) -> BoundExamples:
        """Selects some rows."""
        return BoundExamples(self.examples.select(rows), self.model)


def bind_examples_to(model: nn.Module, examples: ClientData) -> ClientData:
    """Examples for a model: those whose inputs are no single tensor are bound to its arguments."""
    return examples if _has_tensors_only(examples) else BoundExamples(examples, model)


def _has_tensors_only(examples: ClientData) -> bool:
    """Whether inputs are one tensor, as the type of the examples tells."""
    if isinstance(examples, ConcatExamples):
        return all(map(_has_tensors_only, examples.parts))
    if isinstance(examples, TransformedExamples):
        return _has_tensors_only(examples.data)
    return isinstance(examples, Examples | Windows)
