"""The data of a client: examples in memory that batches are drawn from."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedquilt.data.preprocessing import convert_for_models
from fedquilt.data.transforms import Normalize
from fedquilt.errors import DataError
from fedquilt.learning.batch import Batch, as_batch, concatenate, count_rows
from fedquilt.learning.losses import IGNORED
from fedquilt.structure.tensors import find_tensors, map_tensors

Rows: TypeAlias = Tensor | npt.NDArray[np.int64]

CACHED_CELLS = 2**20  # at most 4 MB of ready floats for one client


class ClientData(Protocol):
    """The interface of a client's data to training and evaluation."""

    @property
    def labels(self) -> Tensor | None:
        """The label of every example (N,), or one at every position of it; None: no classes."""

    @property
    def label_set(self) -> tuple[int, ...]:
        """The labels present, in order; empty if there are no classes."""

    def __len__(self) -> int:
        """The number of examples."""

    def batch(self, rows: Tensor, generator: torch.Generator | None = None) -> tuple[Any, Any]:
        """Returns inputs and targets of some rows; a generator means training, None evaluation."""

    def select(self, rows: Rows) -> ClientData:
        """Selects some rows."""


def count_targets(data: ClientData) -> int:
    """Counts the labels to predict: one per example, or one at every position of each."""
    if not len(data):
        return 0
    if data.labels is None:
        return len(data)
    _, y = data.batch(torch.zeros(1, dtype=torch.int64))
    return len(data) * int(y.numel())


@dataclass(frozen=True, eq=False, repr=False)
class Examples:
    """Examples in memory: uint8 images (N, C, H, W), or any other tensor with N rows.

    Images become float32 in [0, 1] when they are batched, and are then normalized by ``scale``.
    Tokens in smaller integers become int64. Labels are (N,), or (N, L) with one at every position.
    """

    inputs: Tensor
    labels: Tensor
    scale: Normalize | None = None

    has_fixed_batches: ClassVar[bool] = True  # the same rows of all examples: nothing is drawn

    def __repr__(self) -> str:
        shape, dtype = tuple(self.inputs.shape[1:]), self.inputs.dtype
        return f"Examples({len(self.labels)} of shape {shape}, {dtype})"

    def __post_init__(self) -> None:
        """Checks that inputs, labels and normalization fit together."""
        _check_labels(self.labels, len(self.inputs) if self.inputs.ndim else 0)
        if self.scale is None:
            return
        if self.inputs.ndim != 4:
            raise DataError(
                "only images (N, C, H, W) can be normalized, got shape "
                f"{tuple(self.inputs.shape)}; use scale=None"
            )
        self.scale.check_channels(self.inputs.shape[1])

    def __len__(self) -> int:
        """The number of examples."""
        return len(self.labels)

    def __getstate__(self) -> dict[str, object]:
        """The fields without cached values, which are cheaper to compute again than to send."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def batch(
        self, rows: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns inputs for the model, and labels, the same in training and in evaluation."""
        labels = self.labels.index_select(0, rows)
        if self.inputs.numel() <= CACHED_CELLS:
            return self._prepared_inputs.index_select(0, rows), labels
        return self._prepare(self.inputs.index_select(0, rows)), labels

    def select(self, rows: Rows) -> Examples:
        """Copies some rows."""
        rows = torch.as_tensor(rows)
        return replace(self, inputs=self.inputs[rows], labels=self.labels[rows])

    @cached_property
    def label_set(self) -> tuple[int, ...]:
        """The labels present, in order."""
        return tuple(torch.unique(self.labels).tolist())

    @cached_property
    def _prepared_inputs(self) -> Tensor:
        return self._prepare(self.inputs)

    def _prepare(self, raw: Tensor) -> Tensor:
        inputs = convert_for_models(raw)
        return inputs if self.scale is None else self.scale.apply(inputs)


def _check_labels(labels: Tensor, num_inputs: int) -> None:
    is_sequence = labels.ndim == 2 and labels.shape[1] > 1  # (N, 1) is a column by mistake
    if not (labels.ndim == 1 or is_sequence) or labels.dtype != torch.int64:
        raise DataError(
            "labels must be 1-D, or (N, L) with one at every position, of int64 class numbers, got "
            f"{labels.dtype} with shape {tuple(labels.shape)}; convert them with .long().flatten()"
        )
    if len(labels) != num_inputs:
        raise DataError(
            f"every input needs one label, got {num_inputs} inputs and {len(labels)} labels; "
            "give tensors of the same length"
        )


@dataclass(frozen=True, eq=False, repr=False)
class NestedExamples:
    """Examples in memory with inputs or targets of any form: tensors in tuples and dicts.

    Inputs become floats and integers as in ``Examples``; targets stay as they are. Targets that are
    one tensor of integers, (N,) or more, count as labels.
    """

    inputs: Any
    targets: Any
    target_name: str | None = None  # where an example is one dict with its targets in it

    def __repr__(self) -> str:
        shapes = ", ".join(str(tuple(x.shape[1:])) for x in find_tensors(self.inputs))
        return f"NestedExamples({len(self)} of shapes {shapes})"

    def __post_init__(self) -> None:
        """Checks that all tensors have one length."""
        lengths = {len(x) if x.ndim else 0 for x in find_tensors((self.inputs, self.targets))}
        if len(lengths) != 1:
            raise DataError(
                "inputs and targets have one row for each example, got tensors of length "
                f"{', '.join(map(str, sorted(lengths))) or 'none'}; give all of one length"
            )

    def __len__(self) -> int:
        """The number of examples."""
        return count_rows(self.inputs)

    has_fixed_batches: ClassVar[bool] = True  # nothing is drawn

    @property
    def labels(self) -> Tensor | None:
        """The targets, if they are integers."""
        is_class = isinstance(self.targets, Tensor) and self.targets.dtype == torch.int64
        return self.targets if is_class else None

    @cached_property
    def label_set(self) -> tuple[int, ...]:
        """The labels present, in order."""
        return list_labels(self.labels)

    def batch(self, rows: Tensor, generator: torch.Generator | None = None) -> Batch:
        """Returns inputs for the model, and targets."""

        def take(tensor: Tensor) -> Tensor:
            return tensor.index_select(0, rows)

        inputs = map_tensors(lambda tensor: convert_for_models(take(tensor)), self.inputs)
        return Batch(inputs, map_tensors(take, self.targets), target_name=self.target_name)

    def select(self, rows: Rows) -> NestedExamples:
        """Copies some rows."""
        rows = torch.as_tensor(rows)
        return replace(
            self,
            inputs=map_tensors(lambda tensor: tensor[rows], self.inputs),
            targets=map_tensors(lambda tensor: tensor[rows], self.targets),
        )


def list_labels(labels: Tensor | None) -> tuple[int, ...]:
    """The class numbers that are present, in order, without those that count for nothing.

    >>> list_labels(torch.tensor([2, 0, 2, -100])), list_labels(None)
    ((0, 2), ())
    """
    if labels is None:
        return ()
    return tuple(label for label in torch.unique(labels).tolist() if label != IGNORED)


@dataclass(frozen=True, eq=False)
class ConcatExamples:
    """The data of several clients as one: the examples of the first, then those of the next.

    Nothing is copied. ``rows`` selects among all examples; None takes all of them.
    """

    parts: tuple[ClientData, ...]
    rows: Tensor | None = None

    def __len__(self) -> int:
        """The number of examples."""
        return sum(map(len, self.parts)) if self.rows is None else len(self.rows)

    @cached_property
    def labels(self) -> Tensor | None:
        """The label of every example; None if some have none."""
        known = [part.labels for part in self.parts]
        if any(labels is None for labels in known):
            return None
        labels = torch.cat([labels for labels in known if labels is not None])
        return labels if self.rows is None else labels[self.rows]

    @cached_property
    def label_set(self) -> tuple[int, ...]:
        """The labels present, in order."""
        return list_labels(self.labels)

    @property
    def has_fixed_batches(self) -> bool:
        """Whether a batch is always the same rows of all examples: nothing is drawn."""
        return all(getattr(part, "has_fixed_batches", False) for part in self.parts)

    def batch(self, rows: Tensor, generator: torch.Generator | None = None) -> Batch:
        """Returns inputs and targets of some rows, in their order, each prepared by its part."""
        rows = rows if self.rows is None else self.rows[rows]
        owners = torch.searchsorted(self._ends, rows, right=True)
        places, batches = [], []
        for number in owners.unique().tolist():
            part, end = self.parts[number], int(self._ends[number])
            places.append((owners == number).nonzero().flatten())
            batches.append(as_batch(part.batch(rows[places[-1]] - (end - len(part)), generator)))
        back = torch.cat(places).argsort()
        joined = (concatenate(parts) for parts in zip(*batches, strict=True))
        inputs, targets = (map_tensors(lambda tensor: tensor[back], value) for value in joined)
        return batches[0].with_parts(inputs, targets)

    def select(self, rows: Rows) -> ConcatExamples:
        """Selects some rows of the same parts."""
        rows = torch.as_tensor(rows)
        return replace(self, rows=rows if self.rows is None else self.rows[rows])

    @cached_property
    def _ends(self) -> Tensor:
        """The number of the row after the last one of each part."""
        return torch.tensor([len(part) for part in self.parts]).cumsum(0)
