"""Named data sets from the Hugging Face hub; they need the extra ``fedquilt[hub]``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedquilt.errors import DataError


@dataclass(frozen=True)
class HubSet:
    """The path of a data set on the hub, the columns that hold images and labels, and its part."""

    path: str
    image_column: str
    label_column: str
    part: str | None = None  # None: it has one only


HUB = {
    "mnist": HubSet("ylecun/mnist", "image", "label"),
    "fashion-mnist": HubSet("zalando-datasets/fashion_mnist", "image", "label"),
    "cifar10": HubSet("uoft-cs/cifar10", "img", "label"),
    "cifar100": HubSet("uoft-cs/cifar100", "img", "fine_label"),
    "svhn": HubSet("ufldl-stanford/svhn", "image", "label", "cropped_digits"),
}


def download_dataset(name: str) -> dict[str, npt.NDArray[np.generic]]:
    """Downloads x_train, y_train, x_test and y_test of a data set from the hub."""
    where = HUB[name]
    remedy = f"or give a file: --data path/to/{name}.npz"
    try:
        import datasets  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise DataError(
            f"dataset '{name}' is not on this machine and downloading it needs the extra: "
            f"pip install 'fedquilt[hub]', {remedy}"
        ) from error
    try:
        part = () if where.part is None else (where.part,)
        splits = datasets.load_dataset(where.path, *part)
    except Exception as error:  # the hub's clients raise many unrelated kinds
        raise DataError(
            f"dataset '{name}' could not be downloaded from the Hugging Face hub "
            f"({type(error).__name__}); connect to the network and try again, {remedy}"
        ) from error
    x_train, y_train = to_arrays(splits["train"], where.image_column, where.label_column)
    x_test, y_test = to_arrays(splits["test"], where.image_column, where.label_column)
    return {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}


def to_arrays(
    hf_split: Iterable[Mapping[str, object]], image_column: str, label_column: str
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Converts one split to images (N, H, W) or (N, H, W, C) and labels."""
    images: list[npt.NDArray[np.uint8]] = []
    labels: list[int] = []
    for row in hf_split:
        for column in (image_column, label_column):
            if column not in row:
                raise DataError(
                    f"the hub's set has no column '{column}', it has: {', '.join(sorted(row))}; "
                    "the set may have changed: give a file with --data instead"
                )
        images.append(np.asarray(row[image_column], dtype=np.uint8))
        labels.append(int(row[label_column]))  # type: ignore[call-overload]
    return np.stack(images), np.array(labels, dtype=np.int64)
