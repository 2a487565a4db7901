"""Data sets in folders of images: ``train/<class>/`` and ``test/<class>/``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from fedquilt.data.arrays import Array, Arrays
from fedquilt.errors import DataError

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")


def read_images(path: Path) -> Arrays:
    """Reads ``train/<class>/`` and ``test/<class>/``; classes are numbered by name."""
    classes = sorted(entry.name for entry in (path / "train").iterdir() if entry.is_dir())
    strangers = {entry.name for entry in (path / "test").iterdir() if entry.is_dir()} - {*classes}
    if strangers:
        raise DataError(
            f"every class of test/ must be in train/, '{path}' has {', '.join(sorted(strangers))} "
            "in test/ only; move or rename those folders"
        )
    parts = {
        part: [
            (file, i) for i, name in enumerate(classes) for file in _list_images(path / part / name)
        ]
        for part in ("train", "test")
    }
    images = {file: _open_image(file) for items in parts.values() for file, _ in items}
    _check_sizes(images)
    mode = "L" if all(image.mode in ("1", "L") for image in images.values()) else "RGB"
    return {
        key: array
        for part, items in parts.items()
        for key, array in (
            (f"x_{part}", _stack_pixels([images[file].convert(mode) for file, _ in items])),
            (f"y_{part}", np.array([label for _, label in items], dtype=np.int64)),
        )
    }


def _list_images(folder: Path) -> list[Path]:
    files = folder.iterdir() if folder.is_dir() else ()
    return sorted(file for file in files if file.suffix.lower() in IMAGE_SUFFIXES)


def _open_image(file: Path) -> Image.Image:
    try:
        with Image.open(file) as image:
            image.load()
            return image.copy()
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(
            f"'{file}' is not a readable image ({type(error).__name__}); replace or remove it"
        ) from error


def _check_sizes(images: Mapping[Path, Image.Image]) -> None:
    first: dict[tuple[int, int], Path] = {}
    for file, image in images.items():
        first.setdefault(image.size, file)
    if len(first) > 1:
        (size, file), (other_size, other) = list(first.items())[:2]
        raise DataError(
            f"all images must have one size, '{file}' is {size[0]}x{size[1]} and '{other}' is "
            f"{other_size[0]}x{other_size[1]}; resize them first"
        )


def _stack_pixels(images: Sequence[Image.Image]) -> Array:
    if not images:
        return np.zeros((0, 1, 1), dtype=np.uint8)
    return np.stack([np.asarray(image, dtype=np.uint8) for image in images])
