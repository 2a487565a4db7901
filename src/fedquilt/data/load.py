"""Where data come from: named sets, files of arrays or JSON, folders of domains, images, text."""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from fedquilt.data import leaf
from fedquilt.data.examples import Examples, Normalise, refuse_not_finite
from fedquilt.data.hub import HUB, download
from fedquilt.data.limits import check_arrays, read_text
from fedquilt.data.source import MOST_CLASSES, Source
from fedquilt.data.text import passages
from fedquilt.errors import DataError, unknown

__all__ = ["Source", "load"]

Array: TypeAlias = npt.NDArray[np.generic]
Arrays: TypeAlias = Mapping[str, Array]

REQUIRED = ("x_train", "y_train", "x_test", "y_test")
GROUPINGS = ("id", "domain")
CLIENTS = ("client", "id")  # whose the training examples are, where there is no test set
AUGMENTED = ("cifar10", "cifar100")
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")
CHANNELS = (1, 3, 4)
FOLDERS = ("shakespeare", "sent140", "femnist", "wikitext-2")  # sets that are folders of that name
DIGITS5 = (  # one domain a line, the order of FedBN; a second name stands in for the first
    ("digits-mnist",),
    ("digits-svhn",),
    ("digits-usps",),
    ("digits-synth", "digits-synth-standin"),
    ("digits-mnistm",),
)


def load(name_or_path: str, *, folder: Path | None = None) -> Source:
    """The set of that name, or the one in that file or folder.

    ``digits`` comes with scikit-learn. ``mnist``, ``fashion-mnist``, ``cifar10`` and ``cifar100``
    are looked for as ``<name>.npz`` in ``folder``, in ``$FEDQUILT_DATA`` and in the cache, and
    are downloaded into the cache if they are in none of them. ``digits5`` are five domains of
    digits, looked for in the same places and never downloaded; so are ``shakespeare``,
    ``sent140``, ``femnist`` and ``wikitext-2``, which are folders.

    A path names an ``.npz`` file with x_train, y_train, x_test, y_test (and id_train, id_test or
    domain_train, domain_test), or with x_train, y_train and client; a folder of such files, one
    domain each; a folder of images, ``train/<class>/`` and ``test/<class>/``; LEAF's JSON files,
    their folder or one of them; or a folder with train.txt and test.txt.

    >>> load("digits").train.inputs.shape
    torch.Size([1442, 1, 8, 8])
    """
    if name_or_path == "digits":
        return _source("digits", _digits())
    if name_or_path == "digits5":
        return _digits5(folder)
    if name_or_path in HUB:
        return _source(name_or_path, _read_npz(_find(name_or_path, folder)))
    if name_or_path in FOLDERS:
        return _named_folder(name_or_path, _places(folder))
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return _from_folder(path)
    if path.is_file() and path.name.endswith(leaf.SUFFIXES):
        return leaf.read(path.name.partition(".")[0], [path])
    if path.is_file():
        return _source(path.stem, _read_npz(path))
    if path.suffix or len(path.parts) > 1:
        raise DataError(
            f"the data must be an .npz or JSON file or a folder, got '{path}' which does not "
            "exist; check the path"
        )
    names = unknown("dataset", name_or_path, ("digits", "digits5", *HUB, *FOLDERS))
    raise DataError(f"{names}, or give the path of an .npz or JSON file or a folder")


def _digits() -> Arrays:
    """Scikit-learn's 8 x 8 digits, every fifth of each class held out, the same in every run."""
    from sklearn.datasets import (  # type: ignore[import-untyped, unused-ignore]
        load_digits,
    )

    digits = load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)
    labels = digits.target.astype(np.int64)
    held_out = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        held_out[np.flatnonzero(labels == label)[4::5]] = True
    return {
        "x_train": images[~held_out],
        "y_train": labels[~held_out],
        "x_test": images[held_out],
        "y_test": labels[held_out],
    }


def _digits5(folder: Path | None) -> Source:
    """Five domains of digits as in FedBN (Li et al., ICLR 2021), all cut to the smallest's size.

    Images stay in [0, 1], as Split-Mix uses them. The domains are called as their files, so that
    a stand-in for SynthDigits can be seen.
    """
    files = [_domain_file(names, _places(folder)) for names in DIGITS5]
    return _from_domains("digits5", files, equally=True).scaled(None)


def _domain_file(names: Sequence[str], places: Sequence[Path]) -> Path:
    """The first of the files that is anywhere; a stand-in only if the real one is nowhere."""
    for name in names:
        found = _found(name, places)
        if found is not None:
            return found
    raise DataError(
        f"dataset 'digits5' needs {' or '.join(f'{name}.npz' for name in names)}, which is not in "
        f"{', '.join(map(str, places))} and is not downloaded; put it there, or name its folder in "
        "$FEDQUILT_DATA"
    )


def _named_folder(name: str, places: Sequence[Path]) -> Source:
    """The folder of that name, or an .npz file, in the first place that has one."""
    for place in places:
        if (place / name).is_dir():
            return _from_folder(place / name)
        if (place / f"{name}.npz").is_file():
            return _source(name, _read_npz(place / f"{name}.npz"))
    raise DataError(
        f"dataset '{name}' is a folder '{name}', which is not in {', '.join(map(str, places))} and "
        "is not downloaded; put it there, or name the folder it is in in $FEDQUILT_DATA"
    )


def _find(name: str, folder: Path | None) -> Path:
    """The named set's file, downloaded into the cache if it is nowhere on this machine."""
    places = _places(folder)
    found = _found(name, places)
    if found is not None:
        return found
    cached = places[-1] / f"{name}.npz"
    _write_npz(cached, download(name))
    return cached


def _places(folder: Path | None) -> list[Path]:
    """Where named sets are looked for, the cache last."""
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    own = os.environ.get("FEDQUILT_DATA")
    return [*(Path(place) for place in (folder, own) if place), cache_home / "fedquilt"]


def _found(name: str, places: Sequence[Path]) -> Path | None:
    paths = (place / f"{name}.npz" for place in places)
    return next((path for path in paths if path.is_file()), None)


def _write_npz(path: Path, arrays: Arrays) -> None:
    """Writes the file whole or not at all, also when two processes do it at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    unfinished = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            x_train, y_train, x_test, y_test = (arrays[name] for name in REQUIRED)
            np.savez(file, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _read_npz(path: Path) -> Arrays:
    """The arrays of the file that we know by name."""
    pairs = (f"{kind}_{part}" for kind in GROUPINGS for part in ("train", "test"))
    known = (*REQUIRED, *pairs, *CLIENTS)
    try:
        with zipfile.ZipFile(path) as archive:
            members = [name for name in archive.namelist() if name.endswith(".npy")]
            present = {name.removesuffix(".npy") for name in members}
            check_arrays(path, archive, [name for name in known if name in present])
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in known if name in present}
    except DataError:
        raise
    except Exception as error:  # a foreign file can fail anywhere in a reader
        raise DataError(_why_unreadable(path, error)) from error
    arrays = _without_test(arrays)
    missing = [name for name in REQUIRED if name not in arrays]
    if missing:
        raise DataError(
            f"an .npz file must hold {', '.join(REQUIRED)}; '{path}' lacks {', '.join(missing)} "
            f"(it has: {', '.join(sorted(present)) or 'nothing'}): save it again with those names"
        )
    return arrays


def _without_test(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Arrays of clients that hold nothing out, with an empty test set."""
    arrays = dict(arrays)
    own = [arrays.pop(name) for name in CLIENTS if name in arrays]
    if len(own) == 1 and arrays.keys() == {"x_train", "y_train"}:
        empty = {f"{key}_test": arrays[f"{key}_train"][:0] for key in "xy"}
        arrays |= {**empty, "id_train": own[0], "id_test": own[0][:0]}
    return arrays


def _why_unreadable(path: Path, error: Exception) -> str:
    if "allow_pickle" in str(error):
        return (
            f"'{path}' holds Python objects, which are never unpickled; "
            "save plain arrays of numbers instead"
        )
    return (
        f"'{path}' is not a readable .npz file ({type(error).__name__}); "
        "write it again with numpy.savez"
    )


def _from_folder(path: Path) -> Source:
    files = sorted(path.glob("*.npz"))
    if files:
        return _from_domains(path.name, files)
    by_client = leaf.parts(path)
    if by_client is not None:
        return leaf.read(path.name, *by_client)
    texts = [_text_file(path, part) for part in ("train", "test")]
    if texts[0] is not None:
        return passages(
            path.name, *("" if file is None else read_text(file, "readable text") for file in texts)
        )
    if (path / "train").is_dir() and (path / "test").is_dir():
        return _source(path.name, _read_images(path))
    raise DataError(
        "a data folder must hold .npz files, LEAF's train/*.json, train.txt, or images in "
        f"train/<class>/ and test/<class>/; '{path}' holds neither: check the path"
    )


def _text_file(folder: Path, part: str) -> Path | None:
    files = (folder / f"{part}{suffix}" for suffix in (".txt", ".txt.gz"))
    return next((file for file in files if file.is_file()), None)


def _from_domains(name: str, files: Sequence[Path], *, equally: bool = False) -> Source:
    """One domain per file, in their order; equally: with the first examples only, as many each."""
    domains = [_read_npz(file) for file in files]
    for file, arrays in zip(files, domains, strict=True):
        _check(str(file), arrays)
        given, first = (_kind(a["x_train"]) for a in (arrays, domains[0]))
        if given != first:
            raise DataError(
                f"all domains must have inputs of one shape and type, '{file.name}' has {given} "
                f"and '{files[0].name}' has {first}; convert them, or keep one set per folder"
            )
    if equally:
        domains = _cut_alike(domains)
    joined = {key: np.concatenate([arrays[key] for arrays in domains]) for key in REQUIRED}
    for part in ("train", "test"):
        sizes = [len(arrays[f"y_{part}"]) for arrays in domains]
        joined[f"domain_{part}"] = np.repeat(np.arange(len(files)), sizes)
    return replace(_source(name, joined), group_names=tuple(file.stem for file in files))


def _cut_alike(domains: Sequence[Arrays]) -> list[Arrays]:
    """The first examples of every domain, as many as the smallest has."""
    sizes = {key: min(len(arrays[key]) for arrays in domains) for key in REQUIRED}
    return [{key: arrays[key][:size] for key, size in sizes.items()} for arrays in domains]


def _kind(inputs: Array) -> str:
    return f"{inputs.dtype} {inputs.shape[1:]}"


def _read_images(path: Path) -> Arrays:
    """Images of ``train/<class>/`` and ``test/<class>/``; the classes of train are numbered."""
    classes = sorted(entry.name for entry in (path / "train").iterdir() if entry.is_dir())
    strangers = {entry.name for entry in (path / "test").iterdir() if entry.is_dir()} - {*classes}
    if strangers:
        raise DataError(
            f"every class of test/ must be in train/, '{path}' has {', '.join(sorted(strangers))} "
            "in test/ only; move or rename those folders"
        )
    parts = {
        part: [(file, i) for i, name in enumerate(classes) for file in _images(path / part / name)]
        for part in ("train", "test")
    }
    images = {file: _open(file) for items in parts.values() for file, _ in items}
    _refuse_mixed_sizes(images)
    mode = "L" if all(image.mode in ("1", "L") for image in images.values()) else "RGB"
    return {
        key: array
        for part, items in parts.items()
        for key, array in (
            (f"x_{part}", _pixels([images[file].convert(mode) for file, _ in items])),
            (f"y_{part}", np.array([label for _, label in items], dtype=np.int64)),
        )
    }


def _images(folder: Path) -> list[Path]:
    files = folder.iterdir() if folder.is_dir() else ()
    return sorted(file for file in files if file.suffix.lower() in IMAGE_SUFFIXES)


def _open(file: Path) -> Image.Image:
    try:
        with Image.open(file) as image:
            image.load()
            return image.copy()
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(
            f"'{file}' is not a readable image ({type(error).__name__}); replace or remove it"
        ) from error


def _refuse_mixed_sizes(images: Mapping[Path, Image.Image]) -> None:
    first: dict[tuple[int, int], Path] = {}
    for file, image in images.items():
        first.setdefault(image.size, file)
    if len(first) > 1:
        (size, file), (other_size, other) = list(first.items())[:2]
        raise DataError(
            f"all images must have one size, '{file}' is {size[0]}x{size[1]} and '{other}' is "
            f"{other_size[0]}x{other_size[1]}; resize them first"
        )


def _pixels(images: Sequence[Image.Image]) -> Array:
    if not images:
        return np.zeros((0, 1, 1), dtype=np.uint8)
    return np.stack([np.asarray(image, dtype=np.uint8) for image in images])


def _source(name: str, arrays: Arrays) -> Source:
    """The set, once its arrays are found to be fit for use."""
    _check(name, arrays)
    x_train, x_test = (_inputs(arrays[key], key) for key in ("x_train", "x_test"))
    if len(x_test) == 0:
        x_test = x_train[:0]
    y_train, y_test = (torch.from_numpy(arrays[k].astype(np.int64)) for k in ("y_train", "y_test"))
    _refuse_strange_labels(name, y_train, y_test)
    scale = Normalise.of(x_train) if x_train.dtype == torch.uint8 else None
    crops = name in AUGMENTED and tuple(x_train.shape[1:]) == (3, 32, 32)
    groups_train, groups_test, group_names = _groups(name, arrays)
    return Source(
        name=name,
        train=Examples(x_train, y_train, scale, "crop-flip" if crops else "none"),
        test=Examples(x_test, y_test, scale),
        num_classes=int(y_train.max()) + 1,
        groups_train=groups_train,
        groups_test=groups_test,
        group_names=group_names,
    )


def _check(name: str, arrays: Arrays) -> None:
    """Refuses arrays of the wrong kind or length, each with its own sentence."""
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
    given, expected = _kind(arrays["x_test"]), _kind(arrays["x_train"])
    if len(arrays["x_test"]) and given != expected:
        raise DataError(
            f"training and test inputs must have one shape and type, '{name}' has {expected} in "
            f"x_train and {given} in x_test; convert one of them"
        )


def _check_labels(name: str, key: str, labels: Array) -> None:
    if labels.ndim != 1:
        raise DataError(
            f"{key} must be 1-D, one class number per example, '{name}' has shape {labels.shape}; "
            "flatten it with .reshape(-1)"
        )
    if labels.dtype.kind not in "iu":
        raise DataError(
            f"{key} must hold integers, '{name}' has {labels.dtype}; "
            "number the classes from 0 and save them as int64"
        )
    if len(labels) and (labels.min() < 0 or labels.max() >= MOST_CLASSES):
        raise DataError(
            f"{key} must hold class numbers from 0 to {MOST_CLASSES - 1}, '{name}' has "
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


def _inputs(array: Array, key: str) -> Tensor:
    """The array as a tensor, images (N, C, H, W)."""
    # a copy where the file's byte order is not this machine's
    dtype = np.uint8 if array.dtype == np.uint8 else np.float32
    inputs = torch.from_numpy(np.ascontiguousarray(array, dtype=dtype))
    refuse_not_finite(inputs, key)
    if inputs.ndim == 3:
        return inputs.unsqueeze(1)
    return inputs.permute(0, 3, 1, 2).contiguous() if inputs.ndim == 4 else inputs


def _refuse_strange_labels(name: str, y_train: Tensor, y_test: Tensor) -> None:
    strange = sorted(set(y_test.tolist()) - set(y_train.tolist()))
    if strange:
        listed = ", ".join(map(str, strange[:5]))
        raise DataError(
            f"every label of y_test must occur in y_train, '{name}' has {listed} in y_test only; "
            "drop those examples, or move some of them to the training set"
        )


def _groups(name: str, arrays: Arrays) -> tuple[Tensor | None, Tensor | None, tuple[str, ...]]:
    """Natural ids or domains of train and test, numbered alike, and their names."""
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
