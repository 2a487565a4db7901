"""Data sets from numpy arrays: checks of shapes and types, and conversion to tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedquilt.data.conversion import require_finite
from fedquilt.data.dataset import MAX_CLASSES, Dataset
from fedquilt.data.examples import Examples, NestedExamples
from fedquilt.data.transforms import Normalize
from fedquilt.errors import DataError

Array: TypeAlias = npt.NDArray[np.generic]
Arrays: TypeAlias = Mapping[str, Array]

REQUIRED = ("x_train", "y_train", "x_test", "y_test")
GROUPINGS = ("id", "domain")
AUGMENTATION_OF = {"cifar10": "crop-flip", "cifar100": "crop-flip", "svhn": "crop-jitter"}
CHANNELS = (1, 3, 4)


def make_dataset(name: str, arrays: Arrays) -> Dataset:
    """Makes a data set of arrays, after checking them."""
    check_arrays(name, arrays)
    x_train, x_test = (_to_tensor(arrays[key], key) for key in ("x_train", "x_test"))
    if len(x_test) == 0:
        x_test = x_train[:0]
    if not _has_classes(arrays["y_train"]):
        return _make_target_dataset(name, arrays, x_train, x_test)
    y_train, y_test = (torch.from_numpy(arrays[k].astype(np.int64)) for k in ("y_train", "y_test"))
    _check_test_labels(name, y_train, y_test)
    scale = Normalize.from_images(x_train) if x_train.dtype == torch.uint8 else None
    augment = AUGMENTATION_OF.get(name) if tuple(x_train.shape[1:]) == (3, 32, 32) else None
    groups_train, groups_test, group_names = _number_groups(name, arrays)
    dataset = Dataset(
        name=name,
        train=Examples(x_train, y_train, scale),
        test=Examples(x_test, y_test, scale),
        num_classes=int(y_train.max()) + 1,
        groups_train=groups_train,
        groups_test=groups_test,
        group_names=group_names,
    )
    return dataset if augment is None else dataset.with_augmentation(augment)


def _has_classes(targets: Array) -> bool:
    """Whether targets are class numbers: one integer for each example."""
    return targets.ndim == 1 and targets.dtype.kind in "iu"


def _make_target_dataset(name: str, arrays: Arrays, x_train: Tensor, x_test: Tensor) -> Dataset:
    """A data set whose targets are numbers or masks, not classes; inputs are not normalized."""
    kind = np.int64 if arrays["y_train"].dtype.kind in "iub" else np.float32
    y_train, y_test = (torch.from_numpy(arrays[k].astype(kind)) for k in ("y_train", "y_test"))
    for key, targets in (("y_train", y_train), ("y_test", y_test)):
        require_finite(targets, key)
    groups_train, groups_test, group_names = _number_groups(name, arrays)
    return Dataset(
        name=name,
        train=NestedExamples(x_train, y_train),
        test=NestedExamples(x_test, y_test),
        num_classes=max(1, int(np.prod(y_train.shape[1:]))),
        groups_train=groups_train,
        groups_test=groups_test,
        group_names=group_names,
    )


def check_arrays(name: str, arrays: Arrays) -> None:
    """Checks types, shapes and lengths of the arrays."""
    for part in ("train", "test"):
        _check_labels(name, f"y_{part}", arrays[f"y_{part}"])
        _check_inputs(name, f"x_{part}", arrays[f"x_{part}"])
        num_inputs, num_labels = len(arrays[f"x_{part}"]), len(arrays[f"y_{part}"])
        if num_inputs != num_labels:
            raise DataError(
                f"x_{part} and y_{part} must have one length, '{name}' has {num_inputs} inputs "
                f"and {num_labels} labels; save them again together"
            )
    if len(arrays["x_train"]) == 0:
        raise DataError(
            f"a training set needs examples, x_train of '{name}' is empty; check how it was made"
        )
    given, expected = describe_kind(arrays["x_test"]), describe_kind(arrays["x_train"])
    if len(arrays["x_test"]) and given != expected:
        raise DataError(
            f"training and test inputs must have one shape and type, '{name}' has {expected} in "
            f"x_train and {given} in x_test; convert one of them"
        )


def _check_labels(name: str, key: str, labels: Array) -> None:
    if labels.ndim < 1 or labels.dtype.kind not in "iufb":
        raise DataError(
            f"{key} must hold a class number or other numbers for each example, '{name}' has "
            f"{labels.dtype} of shape {labels.shape}; number the classes from 0 and save them as "
            "int64"
        )
    if _has_classes(labels) and len(labels) and (labels.min() < 0 or labels.max() >= MAX_CLASSES):
        raise DataError(
            f"{key} must hold class numbers from 0 to {MAX_CLASSES - 1}, '{name}' has "
            f"{labels.min()} to {labels.max()}; number the classes from 0"
        )


def _check_inputs(name: str, key: str, inputs: Array) -> None:
    is_float = inputs.dtype.kind == "f"
    if not is_float and inputs.dtype != np.uint8:
        raise DataError(
            f"{key} must hold uint8 images or floats, '{name}' has {inputs.dtype}; "
            "convert it with .astype('uint8') or .astype('float32')"
        )
    if inputs.ndim not in ((2, 3, 4) if is_float else (3, 4)):
        raise DataError(
            f"{key} must be images (N, H, W) or (N, H, W, C), or float rows (N, D), '{name}' has "
            f"{inputs.dtype} of shape {inputs.shape}; reshape it"
        )
    if inputs.ndim == 4 and inputs.shape[3] not in CHANNELS and inputs.shape[1] in CHANNELS:
        raise DataError(
            f"{key} must have its channels last (N, H, W, C), '{name}' has shape {inputs.shape}; "
            "turn it with .transpose(0, 2, 3, 1)"
        )


def describe_kind(inputs: Array) -> str:
    """Describes the type and the shape of one input."""
    return f"{inputs.dtype} {inputs.shape[1:]}"


def _to_tensor(array: Array, key: str) -> Tensor:
    """Converts an array to a tensor, images to (N, C, H, W)."""
    # a copy where the file's byte order is not this machine's
    dtype = np.uint8 if array.dtype == np.uint8 else np.float32
    inputs = torch.from_numpy(np.ascontiguousarray(array, dtype=dtype))
    require_finite(inputs, key)
    if inputs.ndim == 3:
        return inputs.unsqueeze(1)
    return inputs.permute(0, 3, 1, 2).contiguous() if inputs.ndim == 4 else inputs


def _check_test_labels(name: str, y_train: Tensor, y_test: Tensor) -> None:
    strange = sorted(set(y_test.tolist()) - set(y_train.tolist()))
    if strange:
        listed = ", ".join(map(str, strange[:5]))
        raise DataError(
            f"every label of y_test must occur in y_train, '{name}' has {listed} in y_test only; "
            "drop those examples, or move some of them to the training set"
        )


def _number_groups(
    name: str, arrays: Arrays
) -> tuple[Tensor | None, Tensor | None, tuple[str, ...]]:
    """Numbers the natural ids or domains of both parts in the same way; returns their names too."""
    given = [
        key for kind in GROUPINGS for key in (f"{kind}_train", f"{kind}_test") if key in arrays
    ]
    if not given:
        return None, None, ()
    if given not in (["id_train", "id_test"], ["domain_train", "domain_test"]):
        raise DataError(
            "groups come as id_train and id_test, or as domain_train and domain_test, "
            f"'{name}' has {', '.join(given)}; save one complete pair"
        )
    train, test = (arrays[key] for key in given)
    for key, groups, label_key in zip(given, (train, test), ("y_train", "y_test"), strict=True):
        _check_groups(name, key, groups, len(arrays[label_key]))
    names, numbers = np.unique(train, return_inverse=True)
    strange = np.setdiff1d(test, names)
    if len(strange):
        raise DataError(
            f"every group of {given[1]} must occur in {given[0]}, '{name}' has "
            f"{', '.join(map(str, strange[:5]))} in {given[1]} only; drop those examples"
        )
    positions = np.searchsorted(names, test)
    return torch.from_numpy(numbers), torch.from_numpy(positions), tuple(map(str, names))


def _check_groups(name: str, key: str, groups: Array, num_examples: int) -> None:
    if groups.dtype.kind not in "iuU" or groups.shape != (num_examples,):
        raise DataError(
            f"{key} must hold one integer (or name) for each of the {num_examples} examples, "
            f"'{name}' has {groups.dtype} of shape {groups.shape}; save it again beside the labels"
        )
