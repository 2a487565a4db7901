"""Conversion of arrays, tensors and torch datasets to examples of any form."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils import data as torch_data
from torch.utils._pytree import tree_flatten, tree_unflatten

from fedquilt.data.examples import ClientData, Examples, NestedExamples, Rows, list_labels
from fedquilt.data.preprocessing import convert_for_models
from fedquilt.data.tables import TableDataset, is_table
from fedquilt.errors import DataError
from fedquilt.learning.batch import Batch, split_item
from fedquilt.structure.tensors import find_tensors, map_tensors

CHECKED_CELLS = 2**24  # that are looked at in one go
CollateFn: TypeAlias = Callable[[list[Any]], Any]


def to_examples(
    data: object, *, collate_fn: CollateFn | None = None, target: str | None = None
) -> ClientData:
    """Converts data to examples that batches can be drawn from.

    Takes ``ClientData``, a pair (inputs, targets) of tensors or numpy arrays, each of which may be
    a tuple or dict of several, a dict with its targets in it, a TensorDataset, any map-style
    torch Dataset, or a ``datasets.Dataset`` of Hugging Face. Files that numpy has mapped into
    memory are not copied, unless they are float64. uint8 images become floats in [0, 1], numpy
    float64 becomes float32, and smaller integers become int64. Nothing is normalized.

    Args:
        data: The data.
        collate_fn: Makes a batch of a list of a dataset's items, as for a ``DataLoader``.
        target: The entry of a dict that is the target; None: the first of ``labels``, ``label``,
            ``targets``, ``target`` and ``y``.

    >>> to_examples((torch.zeros(3, 2), torch.tensor([0, 1, 1]))).label_set
    (0, 1)
    >>> to_examples({"image": torch.zeros(3, 2), "label": torch.rand(3)})
    NestedExamples(3 of shapes (2,))
    """
    # asked of the class, since the property may read the whole dataset
    if hasattr(type(data), "label_set"):
        return cast(ClientData, data)
    if isinstance(data, torch_data.TensorDataset) and collate_fn is None:
        *inputs, last = data.tensors
        data = (inputs[0] if len(inputs) == 1 else tuple(inputs), last)
    is_nested = isinstance(data, tuple | list) and len(data) == 2 and _holds_arrays(data)
    if is_nested or (isinstance(data, Mapping) and _holds_arrays(data)):
        if collate_fn is not None:
            raise DataError(
                "a collate_fn makes batches of the items of a dataset, and these data are arrays; "
                "pass a torch Dataset, or leave it out"
            )
        batch = split_item(data, target)
        return _convert_pair(*batch, target_name=batch.target_name)
    if is_table(data):
        data = TableDataset(data, target)
    if isinstance(data, torch_data.Dataset) and not isinstance(data, torch_data.IterableDataset):
        return DatasetExamples(data, collate_fn=collate_fn, target=target)
    raise DataError(_describe_refusal(data))


class DatasetExamples:
    """Examples of a map-style dataset whose items are (input, target) or dicts, read when needed.

    Random transforms that draw from torch's CPU generator follow the batch's generator, so a
    run does not depend on which worker reads the items.
    """

    def __init__(
        self,
        dataset: torch_data.Dataset[Any],
        rows: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        collate_fn: CollateFn | None = None,
        target: str | None = None,
    ) -> None:
        """Wraps the dataset, or some rows of it; labels that are given are not read."""
        self.dataset = dataset
        self.rows = torch.arange(_get_length(dataset)) if rows is None else rows
        self._labels = labels
        self._collate_fn, self._target = collate_fn, target

    def __len__(self) -> int:
        """The number of examples."""
        return len(self.rows)

    @property
    def labels(self) -> Tensor | None:
        """The class of every example, read from the dataset once; None if it has none."""
        if self._labels is None:
            known = _find_known_labels(self.dataset)
            if known is not None:
                self._labels = known[self.rows]
            else:
                self._labels = self._read_labels()
        return self._labels

    @property
    def label_set(self) -> tuple[int, ...]:
        """The labels present, in order."""
        return list_labels(self.labels)

    def batch(self, rows: Tensor, generator: torch.Generator | None = None) -> Batch:
        """Reads inputs and targets of some rows; uint8 images become floats in [0, 1]."""
        numbers = self.rows[rows].tolist()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(_draw_seed(generator))
            if self._collate_fn is not None:
                return split_item(
                    self._collate_fn([self.dataset[i] for i in numbers]), self._target
                )
            items = [self._read_item(row) for row in numbers]
        first, kinds = items[0], {_to_label(item[1]) is not None for item in items}
        inputs = _stack([to_tensors(item[0]) for item in items], "inputs")
        if kinds == {True}:
            targets: Any = torch.tensor([_to_label(item[1]) for item in items])
        else:
            targets = _stack([to_tensors(item[1]) for item in items], "targets")
        return Batch(
            map_tensors(convert_for_models, inputs), targets, target_name=first.target_name
        )

    def select(self, rows: Rows) -> DatasetExamples:
        """Selects some rows of the same dataset."""
        rows = torch.as_tensor(rows)
        labels = None if self._labels is None else self._labels[rows]
        form = {"collate_fn": self._collate_fn, "target": self._target}
        return DatasetExamples(self.dataset, self.rows[rows], labels, **form)  # type: ignore[arg-type]

    @property
    def may_mix_sizes(self) -> bool:
        """Whether items may have different sizes, until the Resize that transforms begin with."""
        return self._collate_fn is None

    def check_sizes(self) -> None:
        """Refuses items of different sizes, if the dataset can tell without reading them."""
        check = getattr(self.dataset, "check_sizes", None)
        if check is not None:
            check()

    def _read_labels(self) -> Tensor | None:
        """The classes of all items; None, after the first item, if its target is no class."""
        labels: list[int] = []
        for row in self.rows.tolist():
            label = _to_label(self._read_item(row)[1])
            if label is None and not labels:
                return None
            if label is None:
                raise DataError(
                    f"targets are all class numbers or none is, and item {row} has none while the "
                    "first has one; give the dataset a target_transform"
                )
            labels.append(label)
        return torch.tensor(labels, dtype=torch.int64)

    def _read_item(self, row: int) -> Batch:
        return split_item(self.dataset[row], self._target)


def _draw_seed(generator: torch.Generator | None) -> int:
    return 0 if generator is None else int(torch.randint(2**62, (), generator=generator).item())


def _get_length(dataset: torch_data.Dataset[Any]) -> int:
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


def to_tensors(value: Any) -> Any:
    """A value with the numbers and arrays in its tuples, lists and dicts as tensors."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray | np.generic | int | float):
        return _convert_array(np.asarray(value))
    if isinstance(value, Mapping):
        return {name: to_tensors(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(to_tensors(item) for item in value)
    raise DataError(
        f"inputs and targets must be tensors, arrays or numbers, got {type(value).__name__}; "
        "give the dataset a transform that returns tensors"
    )


def _to_label(value: object) -> int | None:
    """A class number; None if the target is something else."""
    if isinstance(value, Tensor | np.ndarray | np.generic | int) and not isinstance(value, bool):
        number = np.asarray(value)
        if number.size == 1 and number.dtype.kind in "iu":
            return int(number.item())
    return None


def _stack(items: Sequence[Any], what: str) -> Any:
    """Items of one form as a batch."""
    leaves, forms = zip(*(tree_flatten(item) for item in items), strict=True)
    if any(form != forms[0] for form in forms):
        raise DataError(
            f"all {what} must have one form, and they differ; let the dataset return the same "
            "entries for every item, or give a collate_fn"
        )
    stacked = []
    for tensors in zip(*leaves, strict=True):
        shapes = sorted({tuple(x.shape) for x in tensors})
        if len(shapes) > 1:
            raise DataError(
                f"all {what} must have one shape, got {shapes[0]} and {shapes[1]}; "
                "resize or pad them in the dataset, begin transforms with Resize, or give a "
                "collate_fn"
            )
        stacked.append(torch.stack(list(tensors)))
    return tree_unflatten(stacked, forms[0])


def _holds_arrays(value: object) -> bool:
    """Whether a value is an array, or a tuple, list or dict of such."""
    if isinstance(value, Mapping):
        return bool(value) and all(map(_holds_arrays, value.values()))
    if isinstance(value, tuple | list):
        return bool(value) and all(map(_holds_arrays, value))
    return isinstance(value, Tensor | np.ndarray)


def _convert_pair(
    inputs: Any, targets: Any, target_name: str | None = None
) -> Examples | NestedExamples:
    inputs = to_tensors(inputs)
    for number, tensor in enumerate(find_tensors(inputs)):
        require_finite(tensor, "inputs" if isinstance(inputs, Tensor) else f"inputs {number}")
    classes = _to_integers(targets)
    is_class = classes is not None and (
        classes.ndim == 1 or classes.ndim == 2 < 1 + classes.shape[1]
    )
    if isinstance(inputs, Tensor) and classes is not None and is_class and target_name is None:
        return Examples(inputs, classes)
    targets = to_tensors(targets) if classes is None else classes
    for tensor in find_tensors(targets):
        require_finite(tensor, "targets")
    return NestedExamples(inputs, targets, target_name)


def _convert_array(array: npt.NDArray[np.generic]) -> Tensor:
    if array.dtype.kind not in "iufb":
        raise DataError(
            f"inputs and targets must be numbers, got an array of {array.dtype}; convert them to "
            "uint8, int64 or float"
        )
    # numpy makes float64 unasked; models are float32
    array = array.astype(np.float32) if array.dtype == np.float64 else array
    with warnings.catch_warnings():  # a file that is mapped for reading: nothing writes to it
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.as_tensor(array)


def require_finite(inputs: Tensor, name: str) -> None:
    """Checks that floats have no NaN and no infinity."""
    if not inputs.is_floating_point():
        return
    # in parts: a file that is mapped may be larger than memory
    rows = max(1, CHECKED_CELLS // max(1, inputs[:1].numel())) if inputs.ndim else 1
    parts = inputs.split(rows) if inputs.ndim else (inputs,)
    bad = sum(int((~part.isfinite()).sum()) for part in parts)
    if bad:
        raise DataError(
            f"{name} must be finite numbers, got {bad} NaN or infinite of {inputs.numel()}; "
            "replace or drop those examples"
        )


def _describe_refusal(data: object) -> str:
    given = f"data of type {type(data).__name__} cannot be used"
    if isinstance(data, torch_data.DataLoader):
        return f"{given}; pass its .dataset, and its collate_fn if it has one"
    if isinstance(data, torch_data.IterableDataset):
        return f"{given}: rows are drawn by number; pass a map-style Dataset with __getitem__"
    return f"{given}; pass (inputs, targets) as tensors or arrays, or a map-style torch Dataset"
