"""Data sets in folders of images, with or without domains.

``train/<class>/`` and ``test/<class>/`` are one set. A folder for each domain, as in DomainNet, has
``<domain>/<class>/`` and lists ``<domain>_train.txt`` and ``<domain>_test.txt``, or
``<domain>/train/<class>/`` and ``<domain>/test/<class>/``, or ``<domain>/<class>/`` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils import data as torch_data

from fedquilt.data.arrays import Array, make_dataset
from fedquilt.data.conversion import DatasetExamples
from fedquilt.data.dataset import Dataset
from fedquilt.errors import DataError

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")
PARTS = ("train", "test")
Items: TypeAlias = list[tuple[Path, int]]  # files and their classes


class ImageFiles(torch_data.Dataset[tuple[Tensor, int]]):
    """Images in files and their classes: uint8 (3, H, W), read when they are asked for."""

    def __init__(self, items: Items) -> None:
        self.files = [str(file) for file, _ in items]
        self.targets = torch.tensor([label for _, label in items], dtype=torch.int64)

    def __len__(self) -> int:
        """The number of images."""
        return len(self.files)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        """Reads one image."""
        pixels = np.asarray(_open_image(Path(self.files[row])).convert("RGB"), dtype=np.uint8)
        return torch.from_numpy(pixels.transpose(2, 0, 1).copy()), int(self.targets[row])

    def check_sizes(self) -> None:
        """Refuses images of different sizes; reads headers only."""
        first: dict[tuple[int, int], str] = {}
        for file in self.files:
            first.setdefault(_read_size(Path(file)), file)
            if len(first) > 1:
                (size, one), (other_size, other) = first.items()
                raise DataError(
                    f"all images must have one size, '{one}' is {size[0]}x{size[1]} and '{other}' "
                    f"is {other_size[0]}x{other_size[1]}; begin transforms with "
                    "Resize, such as Resize(224)"
                )


def load_images(path: Path) -> Dataset:
    """Loads ``train/<class>/`` and ``test/<class>/``; classes are numbered by name.

    Images of one size are read now. Images of several sizes are read when they are asked for.
    """
    classes = _list_folders(path / "train")
    strangers = {*_list_folders(path / "test")} - {*classes}
    if strangers:
        raise DataError(
            f"every class of test/ must be in train/, '{path}' has {', '.join(sorted(strangers))} "
            "in test/ only; move or rename those folders"
        )
    train, test = (_list_classes(path / part, classes) for part in PARTS)
    if len({_read_size(file) for file, _ in (*train, *test)}) > 1:
        return _make_lazy_dataset(path.name, train, test, len(classes))
    images = {file: _open_image(file) for file, _ in (*train, *test)}
    mode = "L" if all(image.mode in ("1", "L") for image in images.values()) else "RGB"
    arrays = {
        key: array
        for part, items in zip(PARTS, (train, test), strict=True)
        for key, array in (
            (f"x_{part}", _stack_pixels([images[file].convert(mode) for file, _ in items])),
            (f"y_{part}", np.array([label for _, label in items], dtype=np.int64)),
        )
    }
    return make_dataset(path.name, arrays)


def find_domains(path: Path) -> list[str]:
    """Finds the folders in a folder that have folders themselves: domains of images."""
    return [name for name in _list_folders(path) if _list_folders(path / name)]


def load_domains(
    path: Path, domains: Sequence[str], *, only: Sequence[str] = (), equally: bool = False
) -> Dataset:
    """Loads images of several domains, which are read when they are asked for.

    Classes are those of the lists, or are numbered by the names of their folders.

    Args:
        path: The folder of the domains.
        domains: Their names, in order.
        only: The classes that are used, numbered in this order; empty: all classes.
        equally: Whether all domains are cut to the size of the smallest. What is kept is drawn, in
            the same way each time, so that any stretch of a domain has all classes.
    """
    folders = [path / domain for domain in domains]
    parts: tuple[list[Items], list[Items]]
    if any((path / f"{domain}_train.txt").is_file() for domain in domains):
        lists = [[_read_list(path, f"{d}_{part}.txt") for d in domains] for part in PARTS]
        numbers = {name: number for number, name in enumerate(only)}
        parts = lists[0], lists[1]
        if only:  # a list numbers all classes, and images are in a folder for each
            parts = tuple(  # type: ignore[assignment]
                [
                    [(f, numbers[f.parent.name]) for f, _ in items if f.parent.name in numbers]
                    for items in part
                ]
                for part in lists
            )
    elif all((folder / "train").is_dir() for folder in folders):
        found = {name for folder in folders for name in _list_folders(folder / "train")}
        classes = only or sorted(found)
        split = [[_list_classes(folder / part, classes) for folder in folders] for part in PARTS]
        parts = split[0], split[1]
    else:
        found = {name for folder in folders for name in _list_folders(folder)}
        classes = only or sorted(found)
        parts = [_list_classes(folder, classes) for folder in folders], [[] for _ in folders]
    if equally:
        parts = _draw_equally(parts[0]), _draw_equally(parts[1])
    train, test = ([item for items in part for item in items] for part in parts)
    if not train:
        raise DataError(
            f"'{path}' has folders but no images in <domain>/<class>/; put {', '.join(PARTS)} or "
            "the classes into the folder of each domain"
        )
    num_classes = 1 + max(label for _, label in (*train, *test))
    groups = [
        torch.repeat_interleave(torch.tensor([len(items) for items in part])) for part in parts
    ]
    return _make_lazy_dataset(path.name, train, test, num_classes, groups, domains)


def _draw_equally(domains: Sequence[Items]) -> list[Items]:
    """Draws as many images of each domain as the smallest has."""
    count, rng = min(len(items) for items in domains), np.random.default_rng(0)
    return [[items[row] for row in rng.permutation(len(items))[:count]] for items in domains]


def _make_lazy_dataset(
    name: str,
    train: Items,
    test: Items,
    num_classes: int,
    groups: Sequence[Tensor | None] = (None, None),
    group_names: Sequence[str] = (),
) -> Dataset:
    images = ImageFiles([*train, *test])
    parts = [
        DatasetExamples(images, rows, images.targets[rows])
        for rows in torch.arange(len(images)).split([len(train), len(test)])
    ]
    return Dataset(
        name, parts[0], parts[1], num_classes, groups[0], groups[1], group_names=tuple(group_names)
    )


def _list_folders(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir()) if path.is_dir() else []


def _list_classes(folder: Path, classes: Sequence[str]) -> Items:
    """Lists the images in the folders of the classes, and the numbers of these."""
    return [(f, i) for i, name in enumerate(classes) for f in _list_images(folder / name)]


def _list_images(folder: Path) -> list[Path]:
    files = folder.iterdir() if folder.is_dir() else ()
    return sorted(file for file in files if file.suffix.lower() in IMAGE_SUFFIXES)


def _read_list(path: Path, name: str) -> Items:
    """Reads lines of a path and a class, such as ``clipart/axe/clipart_011_000001.jpg 11``."""
    items = []
    try:
        lines = (path / name).read_text().splitlines()
    except (OSError, ValueError) as error:
        raise DataError(
            f"every domain needs a list of its images, '{path / name}' cannot be read "
            f"({type(error).__name__}); add it, or remove the lists of all domains"
        ) from error
    for line in filter(str.strip, lines):
        file, _, label = line.strip().rpartition(" ")
        if not label.isdecimal() or not (path / file).is_file():
            raise DataError(
                f"a line of '{path / name}' must be the path of an image and its class, got "
                f"'{line}'; paths are below '{path}'"
            )
        items.append((path / file, int(label)))
    return items


def _read_size(file: Path) -> tuple[int, int]:
    """Reads width and height, and not the pixels."""
    try:
        with Image.open(file) as image:
            return image.size
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise _make_unreadable_error(file, error) from error


def _open_image(file: Path) -> Image.Image:
    try:
        with Image.open(file) as image:
            image.load()
            return image.copy()
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise _make_unreadable_error(file, error) from error


def _make_unreadable_error(file: Path, error: Exception) -> DataError:
    return DataError(
        f"'{file}' is not a readable image ({type(error).__name__}); replace or remove it"
    )


def _stack_pixels(images: Sequence[Image.Image]) -> Array:
    if not images:
        return np.zeros((0, 1, 1), dtype=np.uint8)
    return np.stack([np.asarray(image, dtype=np.uint8) for image in images])
