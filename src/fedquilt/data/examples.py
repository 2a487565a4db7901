"""What a client holds: examples that turn into batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from fedquilt.errors import DataError, unknown

Rows: TypeAlias = Tensor | npt.NDArray[np.int64]

AUGMENTS = ("none", "crop-flip")
PADDING = 4
CACHED_CELLS = 2**20  # at most 4 MB of ready floats for one client
COMPACT = (torch.int8, torch.int16, torch.int32)  # how tokens may be kept


class ClientData(Protocol):
    """What training and evaluation ask of a client's data."""

    @property
    def labels(self) -> Tensor:
        """The label of every example (N,), or one at every position of it (N, L)."""

    @property
    def label_set(self) -> tuple[int, ...]:
        """The labels present, in order."""

    def __len__(self) -> int:
        """The number of examples."""

    def batch(
        self, rows: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Inputs and labels of some rows; a generator means training, None evaluation."""

    def select(self, rows: Rows) -> ClientData:
        """The same kind of data with some rows only."""


def num_targets(data: ClientData) -> int:
    """How many answers there are to give: one an example, or one at every position of each."""
    if not len(data):
        return 0
    _, y = data.batch(torch.zeros(1, dtype=torch.int64))
    return len(data) * y.numel()


@dataclass(frozen=True)
class Normalise:
    """Shift and scale per channel: (x - mean) / std for x in [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @staticmethod
    def of(inputs: Tensor) -> Normalise:
        """Mean and standard deviation of uint8 images / 255, rounded to four digits.

        >>> Normalise.of(torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 1, 2))
        Normalise(mean=(0.5,), std=(0.5,))
        """
        if inputs.dtype != torch.uint8 or inputs.ndim != 4 or inputs.numel() == 0:
            raise DataError(
                "a normalisation is measured on uint8 images (N, C, H, W), got "
                f"{inputs.dtype} with shape {tuple(inputs.shape)}; give mean and std yourself"
            )
        moments = [_moments(inputs[:, channel]) for channel in range(inputs.shape[1])]
        return Normalise(tuple(m for m, _ in moments), tuple(s for _, s in moments))

    def __call__(self, images: Tensor) -> Tensor:
        """The images, shifted and scaled."""
        mean, std = self._columns
        return (images - mean) / std

    @cached_property
    def _columns(self) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.mean).view(-1, 1, 1), torch.tensor(self.std).view(-1, 1, 1)


def _moments(channel: Tensor) -> tuple[float, float]:
    # counting the 256 values is exact, and needs no float copy of the whole set
    count = torch.bincount(channel.flatten(), minlength=256).double()
    values = torch.arange(256, dtype=torch.float64) / 255
    mean = (count * values).sum() / count.sum()
    std = ((count * (values - mean).square()).sum() / count.sum()).sqrt()
    return round(mean.item(), 4), round(std.item(), 4) or 1.0


@dataclass(frozen=True, eq=False)
class Examples:
    """Examples in memory: uint8 images (N, C, H, W), or any other tensor with N rows.

    Images become float32 in [0, 1] when they are batched, and are then normalised by ``scale``;
    tokens in smaller integers become int64. Labels are (N,), or (N, L) with one at every position.
    ``augment="crop-flip"`` shifts each training image by up to four pixels, the border filled
    with zeros, and mirrors every second one; evaluation sees the images as they are.
    """

    inputs: Tensor
    labels: Tensor
    scale: Normalise | None = None
    augment: str = "none"

    def __post_init__(self) -> None:
        """Refuses tensors that do not belong together."""
        _check_labels(self.labels, len(self.inputs) if self.inputs.ndim else 0)
        if self.augment not in AUGMENTS:
            raise DataError(unknown("augmentation", self.augment, AUGMENTS))
        is_image = self.inputs.ndim == 4
        if not is_image and (self.scale is not None or self.augment != "none"):
            raise DataError(
                "only images (N, C, H, W) can be normalised or augmented, got shape "
                f"{tuple(self.inputs.shape)}; use scale=None and augment='none'"
            )
        if self.scale is not None and len(self.scale.mean) != self.inputs.shape[1]:
            raise DataError(
                f"the normalisation has {len(self.scale.mean)} channels but the images have "
                f"{self.inputs.shape[1]}; measure it with Normalise.of(inputs)"
            )

    def __len__(self) -> int:
        """The number of examples."""
        return len(self.labels)

    def __getstate__(self) -> dict[str, object]:
        """The fields alone: what was computed on the way is not worth sending."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def batch(
        self, rows: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Inputs ready for the model, and labels; a generator means training, None evaluation."""
        labels = self.labels.index_select(0, rows)
        if self.augment == "none" and self.inputs.numel() <= CACHED_CELLS:
            return self._ready.index_select(0, rows), labels
        raw = self.inputs.index_select(0, rows)
        if self.augment == "crop-flip" and generator is not None:
            raw = _crop_flip(raw, generator)
        return self._prepare(raw), labels

    def select(self, rows: Rows) -> Examples:
        """A copy of some rows."""
        rows = torch.as_tensor(rows)
        return replace(self, inputs=self.inputs[rows], labels=self.labels[rows])

    @cached_property
    def label_set(self) -> tuple[int, ...]:
        """The labels present, in order."""
        return tuple(torch.unique(self.labels).tolist())

    @cached_property
    def _ready(self) -> Tensor:
        return self._prepare(self.inputs)

    def _prepare(self, raw: Tensor) -> Tensor:
        inputs = _for_models(raw)
        return inputs if self.scale is None else self.scale(inputs)


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


def _for_models(raw: Tensor) -> Tensor:
    """Pixels as floats in [0, 1], tokens as int64."""
    if raw.dtype in COMPACT:
        return raw.long()
    return raw.float().div_(255) if raw.dtype == torch.uint8 else raw


def _crop_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image shifted by up to four pixels, and mirrored with probability 1/2."""
    count, channels, height, width = images.shape
    top = torch.randint(2 * PADDING + 1, (count, 1), generator=generator)
    left = torch.randint(2 * PADDING + 1, (count, 1), generator=generator)
    mirrored = torch.randint(2, (count, 1), generator=generator).bool()
    columns = torch.arange(width).expand(count, -1)
    columns = left + torch.where(mirrored, columns.flip(1), columns)
    rows = top + torch.arange(height)
    padded = functional.pad(images, (PADDING,) * 4)
    pixels = rows[:, :, None] * (width + 2 * PADDING) + columns[:, None, :]  # (N, H, W)
    flat = pixels.view(count, 1, -1).expand(-1, channels, -1)
    return padded.flatten(2).gather(2, flat).view_as(images)


class DatasetExamples:
    """Examples of a map-style dataset whose items are (input, label), read when needed.

    Random transforms that draw from torch's CPU generator follow the batch's generator, so a
    run does not depend on which worker reads the items.
    """

    def __init__(
        self,
        dataset: Dataset[tuple[Tensor, int]],
        rows: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> None:
        """Wraps the dataset, or some rows of it; labels that are known need not be read."""
        self.dataset = dataset
        self.rows = torch.arange(_length(dataset)) if rows is None else rows
        self._labels = labels

    def __len__(self) -> int:
        """The number of examples."""
        return len(self.rows)

    @property
    def labels(self) -> Tensor:
        """The label of every example, read from the dataset once."""
        if self._labels is None:
            known = _known_labels(self.dataset)
            self._labels = self._read_labels() if known is None else known[self.rows]
        return self._labels

    @property
    def label_set(self) -> tuple[int, ...]:
        """The labels present, in order."""
        return tuple(torch.unique(self.labels).tolist())

    def batch(
        self, rows: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Inputs and labels of some rows; uint8 images become floats in [0, 1]."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(_draw_seed(generator))
            items = [self._item(row) for row in self.rows[rows].tolist()]
        inputs = _stack([_as_tensor(item[0]) for item in items])
        return _for_models(inputs), torch.tensor([_as_label(item[1]) for item in items])

    def select(self, rows: Rows) -> DatasetExamples:
        """Some rows of the same dataset."""
        rows = torch.as_tensor(rows)
        labels = None if self._labels is None else self._labels[rows]
        return DatasetExamples(self.dataset, self.rows[rows], labels)

    def _read_labels(self) -> Tensor:
        labels = [_as_label(self._item(row)[1]) for row in self.rows.tolist()]
        return torch.tensor(labels, dtype=torch.int64)

    def _item(self, row: int) -> Sequence[object]:
        item = self.dataset[row]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DataError(
                f"a dataset's items must be (input, label) pairs, item {row} is a "
                f"{type(item).__name__}; wrap the dataset so that it returns pairs"
            )
        return item


@dataclass(frozen=True, eq=False)
class Joined:
    """The data of several clients as one: the examples of the first, then those of the next.

    Nothing is copied; ``rows`` are those of all examples that it has, by default all of them.
    """

    parts: tuple[ClientData, ...]
    rows: Tensor | None = None

    def __len__(self) -> int:
        """The number of examples."""
        return sum(map(len, self.parts)) if self.rows is None else len(self.rows)

    @cached_property
    def labels(self) -> Tensor:
        """The label of every example."""
        labels = torch.cat([part.labels for part in self.parts])
        return labels if self.rows is None else labels[self.rows]

    @cached_property
    def label_set(self) -> tuple[int, ...]:
        """The labels present, in order."""
        return tuple(torch.unique(self.labels).tolist())

    def batch(
        self, rows: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Inputs and labels of some rows, in their order; each part prepares its own."""
        rows = rows if self.rows is None else self.rows[rows]
        owners = torch.searchsorted(self._ends, rows, right=True)
        places, found = [], []
        for number in owners.unique().tolist():
            part, end = self.parts[number], int(self._ends[number])
            places.append((owners == number).nonzero().flatten())
            found.append(part.batch(rows[places[-1]] - (end - len(part)), generator))
        back = torch.cat(places).argsort()
        inputs, labels = (torch.cat(tensors)[back] for tensors in zip(*found, strict=True))
        return inputs, labels

    def select(self, rows: Rows) -> Joined:
        """Some rows of the same parts."""
        rows = torch.as_tensor(rows)
        return replace(self, rows=rows if self.rows is None else self.rows[rows])

    @cached_property
    def _ends(self) -> Tensor:
        """The row after each part's last."""
        return torch.tensor([len(part) for part in self.parts]).cumsum(0)


def _draw_seed(generator: torch.Generator | None) -> int:
    return 0 if generator is None else int(torch.randint(2**62, (), generator=generator).item())


def _length(dataset: Dataset[tuple[Tensor, int]]) -> int:
    try:
        return len(dataset)  # type: ignore[arg-type]  # torch leaves __len__ undeclared
    except (TypeError, NotImplementedError) as error:
        raise DataError(
            f"a dataset must know its length, {type(dataset).__name__} has none; "
            "give it __len__, or pass tensors"
        ) from error


def _known_labels(dataset: object) -> Tensor | None:
    """Labels the dataset keeps beside its items, or None when only the items tell."""
    if isinstance(dataset, Subset):
        whole = _known_labels(dataset.dataset)
        return None if whole is None else whole[torch.as_tensor(dataset.indices)]
    # a target_transform changes what the items say
    if getattr(dataset, "target_transform", None) is not None:
        return None
    for name in ("targets", "labels"):
        labels = _integers(getattr(dataset, name, None))
        if labels is not None and labels.shape == (len(dataset),):  # type: ignore[arg-type]
            return labels
    return None


def _integers(values: object) -> Tensor | None:
    if not isinstance(values, Tensor | np.ndarray | list | tuple) or len(values) == 0:
        return None
    try:
        array = np.asarray(values)
    except ValueError:
        return None
    return torch.from_numpy(array.astype(np.int64)) if array.dtype.kind in "iu" else None


def _as_tensor(value: object) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray | np.generic | int | float):
        return _from_numpy(np.asarray(value))
    raise DataError(
        f"an example's input must be a tensor or an array, got {type(value).__name__}; "
        "give the dataset a transform that returns tensors"
    )


def _as_label(value: object) -> int:
    number = np.asarray(value)
    if number.size != 1 or number.dtype.kind not in "iu":
        raise DataError(
            f"a label must be one class number, got {value!r}; "
            "give the dataset a target_transform that returns an int, such as argmax of a one-hot "
            "one"
        )
    return int(number.item())


def _stack(inputs: Sequence[Tensor]) -> Tensor:
    shapes = {tuple(x.shape) for x in inputs}
    if len(shapes) > 1:
        raise DataError(
            f"all inputs must have one shape, got {sorted(shapes)[0]} and {sorted(shapes)[1]}; "
            "resize or pad them in the dataset"
        )
    return torch.stack(list(inputs))


def as_examples(data: object) -> ClientData:
    """The data as batches can be drawn from it, whatever ordinary form it comes in.

    Takes Examples and whatever else is ``ClientData``, a pair (inputs, labels) of tensors or numpy
    arrays, a TensorDataset of two tensors, or any map-style torch Dataset with (input, label)
    items. Nothing is normalised: uint8 images become floats in [0, 1], the rest stays as it is
    (numpy float64: float32; smaller integers: int64).

    >>> as_examples((torch.zeros(3, 2), torch.tensor([0, 1, 1]))).label_set
    (0, 1)
    """
    if hasattr(type(data), "label_set"):  # of the class, as a dataset may have to be read for it
        return cast(ClientData, data)
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, tuple | list) and len(data) == 2 and all(map(_is_array, data)):
        return _from_pair(*data)
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        return DatasetExamples(data)
    raise DataError(_refusal(data))


def _is_array(value: object) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def _from_pair(inputs: Tensor | npt.NDArray[np.generic], labels: object) -> Examples:
    tensor = inputs if isinstance(inputs, Tensor) else _from_numpy(inputs)
    classes = _integers(labels)
    if classes is None:
        dtype = getattr(labels, "dtype", None)
        raise DataError(
            f"labels must be one integer per input, got {dtype} with shape "
            f"{tuple(getattr(labels, 'shape', ()))}; convert them to int64 class numbers, one-hot "
            "ones with labels.argmax(1)"
        )
    refuse_not_finite(tensor, "inputs")
    return Examples(tensor, classes)


def _from_numpy(array: npt.NDArray[np.generic]) -> Tensor:
    if array.dtype.kind not in "iufb":
        raise DataError(
            f"inputs must be numbers, got an array of {array.dtype}; convert them to uint8 or float"
        )
    # numpy makes float64 unasked; models are float32
    return torch.as_tensor(array.astype(np.float32) if array.dtype == np.float64 else array)


def refuse_not_finite(inputs: Tensor, name: str) -> None:
    """Refuses floats among which is a NaN or an infinity."""
    if inputs.is_floating_point() and not inputs.isfinite().all():
        bad = int((~inputs.isfinite()).sum())
        raise DataError(
            f"{name} must be finite numbers, got {bad} NaN or infinite of {inputs.numel()}; "
            "replace or drop those examples"
        )


def _refusal(data: object) -> str:
    given = f"data of type {type(data).__name__} cannot be used"
    if isinstance(data, DataLoader):
        return f"{given}; pass its .dataset, batches are drawn by the recipe"
    if isinstance(data, IterableDataset):
        return f"{given}: rows are drawn by number; pass a map-style Dataset with __getitem__"
    return f"{given}; pass (inputs, labels) as tensors or arrays, or a map-style torch Dataset"
