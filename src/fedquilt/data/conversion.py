"""Conversion of arrays, tensors and torch datasets to examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils import data as torch_data

from fedquilt.data.examples import ClientData, Examples, Rows
from fedquilt.data.preprocessing import convert_for_models
from fedquilt.errors import DataError


def to_examples(data: object) -> ClientData:
    """Converts data to examples that batches can be drawn from.

    Takes ``ClientData``, a pair (inputs, labels) of tensors or numpy arrays, a TensorDataset of two
    tensors, or any map-style torch Dataset with (input, label) items. uint8 images become floats in
    [0, 1], numpy float64 becomes float32, and smaller integers become int64. Nothing is normalized.

    >>> to_examples((torch.zeros(3, 2), torch.tensor([0, 1, 1]))).label_set
    (0, 1)
    """
    # asked of the class, since the property may read the whole dataset
    if hasattr(type(data), "label_set"):
        return cast(ClientData, data)
    if isinstance(data, torch_data.TensorDataset):
        data = data.tensors
    if isinstance(data, tuple | list) and len(data) == 2 and all(map(_is_array, data)):
        return _convert_pair(*data)
    if isinstance(data, torch_data.Dataset) and not isinstance(data, torch_data.IterableDataset):
        return DatasetExamples(data)
    raise DataError(_describe_refusal(data))


class DatasetExamples:
    """Examples of a map-style dataset whose items are (input, label), read when needed.

    Random transforms that draw from torch's CPU generator follow the batch's generator, so a
    run does not depend on which worker reads the items.
    """

    may_mix_sizes = True  # until a Resize, if transforms begin with one

    def __init__(
        self,
        dataset: torch_data.Dataset[tuple[Tensor, int]],
        rows: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> None:
        """Wraps the dataset, or some rows of it; labels that are given are not read."""
        self.dataset = dataset
        self.rows = torch.arange(_get_length(dataset)) if rows is None else rows
        self._labels = labels

    def __len__(self) -> int:
        """The number of examples."""
        return len(self.rows)

    @property
    def labels(self) -> Tensor:
        """The label of every example, read from the dataset once."""
        if self._labels is None:
            known = _find_known_labels(self.dataset)
            self._labels = self._read_labels() if known is None else known[self.rows]
        return self._labels

    @property
    def label_set(self) -> tuple[int, ...]:
        """The labels present, in order."""
        return tuple(torch.unique(self.labels).tolist())

    def batch(
        self, rows: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Reads inputs and labels of some rows; uint8 images become floats in [0, 1]."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(_draw_seed(generator))
            items = [self._read_item(row) for row in self.rows[rows].tolist()]
        inputs = _stack_inputs([_to_tensor(item[0]) for item in items])
        return convert_for_models(inputs), torch.tensor([_to_label(item[1]) for item in items])

    def select(self, rows: Rows) -> DatasetExamples:
        """Selects some rows of the same dataset."""
        rows = torch.as_tensor(rows)
        labels = None if self._labels is None else self._labels[rows]
        return DatasetExamples(self.dataset, self.rows[rows], labels)

    def _read_labels(self) -> Tensor:
        labels = [_to_label(self._read_item(row)[1]) for row in self.rows.tolist()]
        return torch.tensor(labels, dtype=torch.int64)

    def _read_item(self, row: int) -> Sequence[object]:
        item = self.dataset[row]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DataError(
                f"a dataset's items must be (input, label) pairs, item {row} is a "
                f"{type(item).__name__}; wrap the dataset so that it returns pairs"
            )
        return item


def _draw_seed(generator: torch.Generator | None) -> int:
    return 0 if generator is None else int(torch.randint(2**62, (), generator=generator).item())


def _get_length(dataset: torch_data.Dataset[tuple[Tensor, int]]) -> int:
    try:
        return len(dataset)  # type: ignore[arg-type]  # torch leaves __len__ undeclared
    except (TypeError, NotImplementedError) as error:
        raise DataError(
            f"a dataset must know its length, {type(dataset).__name__} has none; "
            "give it __len__, or pass tensors"
        ) from error


def _find_known_labels(dataset: object) -> Tensor | None:
    """Finds labels that the dataset keeps beside its items; None if there are none."""
    if isinstance(dataset, torch_data.Subset):
        whole = _find_known_labels(dataset.dataset)
        return None if whole is None else whole[torch.as_tensor(dataset.indices)]
    # a target_transform changes what the items say
    if getattr(dataset, "target_transform", None) is not None:
        return None
    for name in ("targets", "labels"):
        labels = _to_integers(getattr(dataset, name, None))
        if labels is not None and labels.shape == (len(dataset),):  # type: ignore[arg-type]
            return labels
    return None


def _to_integers(values: object) -> Tensor | None:
    if not isinstance(values, Tensor | np.ndarray | list | tuple) or len(values) == 0:
        return None
    try:
        array = np.asarray(values)
    except ValueError:
        return None
    return torch.from_numpy(array.astype(np.int64)) if array.dtype.kind in "iu" else None


def _to_tensor(value: object) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray | np.generic | int | float):
        return _convert_array(np.asarray(value))
    raise DataError(
        f"an example's input must be a tensor or an array, got {type(value).__name__}; "
        "give the dataset a transform that returns tensors"
    )


def _to_label(value: object) -> int:
    number = np.asarray(value)
    if number.size != 1 or number.dtype.kind not in "iu":
        raise DataError(
            f"a label must be one class number, got {value!r}; "
            "give the dataset a target_transform that returns an int, such as argmax of a one-hot "
            "one"
        )
    return int(number.item())


def _stack_inputs(inputs: Sequence[Tensor]) -> Tensor:
    shapes = {tuple(x.shape) for x in inputs}
    if len(shapes) > 1:
        raise DataError(
            f"all inputs must have one shape, got {sorted(shapes)[0]} and {sorted(shapes)[1]}; "
            "resize or pad them in the dataset, or begin transforms with Resize"
        )
    return torch.stack(list(inputs))


def _is_array(value: object) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def _convert_pair(inputs: Tensor | npt.NDArray[np.generic], labels: object) -> Examples:
    tensor = inputs if isinstance(inputs, Tensor) else _convert_array(inputs)
    classes = _to_integers(labels)
    if classes is None:
        dtype = getattr(labels, "dtype", None)
        raise DataError(
            f"labels must be one integer per input, got {dtype} with shape "
            f"{tuple(getattr(labels, 'shape', ()))}; convert them to int64 class numbers, one-hot "
            "ones with labels.argmax(1)"
        )
    require_finite(tensor, "inputs")
    return Examples(tensor, classes)


def _convert_array(array: npt.NDArray[np.generic]) -> Tensor:
    if array.dtype.kind not in "iufb":
        raise DataError(
            f"inputs must be numbers, got an array of {array.dtype}; convert them to uint8 or float"
        )
    # numpy makes float64 unasked; models are float32
    return torch.as_tensor(array.astype(np.float32) if array.dtype == np.float64 else array)


def require_finite(inputs: Tensor, name: str) -> None:
    """Checks that floats have no NaN and no infinity."""
    if inputs.is_floating_point() and not inputs.isfinite().all():
        bad = int((~inputs.isfinite()).sum())
        raise DataError(
            f"{name} must be finite numbers, got {bad} NaN or infinite of {inputs.numel()}; "
            "replace or drop those examples"
        )


def _describe_refusal(data: object) -> str:
    given = f"data of type {type(data).__name__} cannot be used"
    if isinstance(data, torch_data.DataLoader):
        return f"{given}; pass its .dataset, batches are drawn by the recipe"
    if isinstance(data, torch_data.IterableDataset):
        return f"{given}: rows are drawn by number; pass a map-style Dataset with __getitem__"
    return f"{given}; pass (inputs, labels) as tensors or arrays, or a map-style torch Dataset"
