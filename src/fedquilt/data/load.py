"""Loading a data set by name, from a file, or from a folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedquilt.data import leaf
from fedquilt.data.array_files import read_domains, read_npz, write_npz
from fedquilt.data.arrays import Arrays, make_dataset
from fedquilt.data.dataset import Dataset
from fedquilt.data.hub import HUB, download_dataset
from fedquilt.data.image_folders import find_domains, load_domains, load_images
from fedquilt.data.limits import read_text
from fedquilt.data.text import make_passages
from fedquilt.errors import DataError, describe_unknown

FOLDERS = (
    "domainnet",
    "shakespeare",
    "sent140",
    "femnist",
    "wikitext-2",
)  # data sets that are folders
DATASETS = {  # what a name stands for
    "digits": "8×8 digits in 10 classes, which come with scikit-learn",
    "digits5": "digits of five domains, as in FedBN and Split-Mix",
    "domainnet": "images of ten classes in six domains, as in FedBN and Split-Mix",
    "mnist": "28×28 digits in 10 classes",
    "fashion-mnist": "28×28 pieces of clothing in 10 classes",
    "cifar10": "32×32 color images in 10 classes",
    "cifar100": "32×32 color images in 100 classes",
    "svhn": "32×32 house numbers in 10 classes",
    "shakespeare": "LEAF: the next character, a client for each role",
    "sent140": "LEAF: the sentiment of short messages, a client for each writer",
    "femnist": "LEAF: handwritten characters, a client for each writer",
    "wikitext-2": "articles of an encyclopedia, for masked or next words",
}
DIGITS5 = (  # one domain a line, in FedBN's order; a second name is a stand-in
    ("digits-mnist",),
    ("digits-svhn",),
    ("digits-usps",),
    ("digits-synth", "digits-synth-standin"),
    ("digits-mnistm",),
)

DOMAINNET = ("real", "clipart", "infograph", "painting", "quickdraw", "sketch")
DOMAINNET_CLASSES = (  # those of FedBN, in its order
    "bird",
    "feather",
    "headphones",
    "ice_cream",
    "teapot",
    "tiger",
    "whale",
    "windmill",
    "wine_glass",
    "zebra",
)


def load_dataset(name_or_path: str, *, folder: Path | None = None) -> Dataset:
    """Loads a dataset by name, or from a file or folder.

    ``digits`` comes with scikit-learn. ``mnist``, ``fashion-mnist``, ``cifar10``, ``cifar100`` and
    ``svhn`` are files ``<name>.npz`` in ``folder``, in ``$FEDQUILT_DATA`` or in the cache. If they
    are in none of them, they are downloaded into the cache. ``digits5`` is five domains of digits.
    ``domainnet``, ``shakespeare``, ``sent140``, ``femnist`` and ``wikitext-2`` are folders. These
    six are looked for in the same places and are not downloaded.

    Args:
        name_or_path: A name from above, or a path. The name of an ``.npz`` file without a folder is
            looked for in the same places, too. A path names an ``.npz`` file with x_train,
            y_train, x_test, y_test (and id_train, id_test or domain_train, domain_test), or with
            x_train, y_train and client; a folder of such files, one domain each; a folder of
            images, ``train/<class>/`` and ``test/<class>/``, or ``<domain>/<class>/``; LEAF's JSON
            files, their folder or one of them; or a folder with train.txt and test.txt.
        folder: Where to look for named sets first.

    >>> load_dataset("digits").train.inputs.shape
    torch.Size([1442, 1, 8, 8])
    """
    if name_or_path == "digits":
        return make_dataset("digits", _load_digits())
    if name_or_path == "digits5":
        return _load_digits5(folder)
    if name_or_path in HUB:
        return make_dataset(name_or_path, read_npz(_find_or_download(name_or_path, folder)))
    if name_or_path == "domainnet":
        return _load_domainnet(_list_places(folder))
    if name_or_path in FOLDERS:
        return _load_named_folder(name_or_path, _list_places(folder))
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return _load_folder(path)
    if path.is_file() and path.name.endswith(leaf.SUFFIXES):
        return leaf.read_leaf(path.name.partition(".")[0], [path])
    file = path if path.is_file() else _find_npz(path, _list_places(folder))
    if file is not None:
        return make_dataset(file.stem, read_npz(file))
    if path.suffix or len(path.parts) > 1:
        raise DataError(
            f"the data must be an .npz or JSON file or a folder, got '{path}' which does not "
            "exist; check the path"
        )
    names = describe_unknown("dataset", name_or_path, DATASETS)
    raise DataError(f"{names}, or give the path of an .npz or JSON file or a folder")


def find_dataset(name: str) -> str | None:
    """Where a named dataset is on this machine; None if it is not here.

    >>> find_dataset("digits")
    'scikit-learn'
    """
    if name == "digits":
        return "scikit-learn"
    places = _list_places(None)
    if name == "digits5":
        files = [[_find_file(n, places) for n in names] for names in DIGITS5]
        first = files[0][0]
        return str(first.parent) if first is not None and all(map(any, files)) else None
    folders = (place / name for place in places) if name in FOLDERS else ()
    folder = next((path for path in folders if path.is_dir()), None)
    found = folder or _find_file(name, places)
    return None if found is None else str(found)


def _load_digits() -> Arrays:
    """Loads scikit-learn's 8 x 8 digits; every fifth example of each class is for testing."""
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


def _load_digits5(folder: Path | None) -> Dataset:
    """Loads the five domains of FedBN (Li et al., ICLR 2021), all cut to the size of the smallest.

    Images stay in [0, 1], as Split-Mix uses them. Domains have the names of their files, which
    show whether a stand-in replaces SynthDigits.
    """
    files = [_find_domain_file(names, _list_places(folder)) for names in DIGITS5]
    return read_domains("digits5", files, equally=True).with_normalization(None)


def _find_domain_file(names: Sequence[str], places: Sequence[Path]) -> Path:
    """Finds the first of the files that exists; stand-ins come last."""
    for name in names:
        file = _find_file(name, places)
        if file is not None:
            return file
    raise DataError(
        f"dataset 'digits5' needs {' or '.join(f'{name}.npz' for name in names)}, which is not in "
        f"{', '.join(map(str, places))} and is not downloaded; put it there, or "
        "set $FEDQUILT_DATA to its folder"
    )


def _load_domainnet(places: Sequence[Path]) -> Dataset:
    """Loads the six domains of DomainNet as FedBN (Li et al., ICLR 2021) uses them.

    Ten of the 345 classes, and all domains cut to the size of the smallest.
    """
    for place in places:
        if (place / "domainnet").is_dir():
            path = place / "domainnet"
            return load_domains(path, DOMAINNET, only=DOMAINNET_CLASSES, equally=True)
    raise _make_missing_folder_error("domainnet", places)


def _load_named_folder(name: str, places: Sequence[Path]) -> Dataset:
    """Loads the folder of that name, or an .npz file, from the first place that has one."""
    for place in places:
        if (place / name).is_dir():
            return _load_folder(place / name)
        if (place / f"{name}.npz").is_file():
            return make_dataset(name, read_npz(place / f"{name}.npz"))
    raise _make_missing_folder_error(name, places)


def _make_missing_folder_error(name: str, places: Sequence[Path]) -> DataError:
    return DataError(
        f"dataset '{name}' is a folder '{name}', which is not in {', '.join(map(str, places))} and "
        "is not downloaded; put it there, or set $FEDQUILT_DATA to the folder that holds it"
    )


def _find_or_download(name: str, folder: Path | None) -> Path:
    """Finds the file of a named data set, or downloads it into the cache."""
    places = _list_places(folder)
    file = _find_file(name, places)
    if file is not None:
        return file
    cached = places[-1] / f"{name}.npz"
    write_npz(cached, download_dataset(name))
    return cached


def _list_places(folder: Path | None) -> list[Path]:
    """Lists the folders in which named data sets are looked for, the cache last."""
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    own = os.environ.get("FEDQUILT_DATA")
    return [*(Path(place) for place in (folder, own) if place), cache_home / "fedquilt"]


def _find_file(name: str, places: Sequence[Path]) -> Path | None:
    paths = (place / f"{name}.npz" for place in places)
    return next((path for path in paths if path.is_file()), None)


def _find_npz(path: Path, places: Sequence[Path]) -> Path | None:
    """Finds an .npz file that is named without its folder."""
    is_bare = path.suffix == ".npz" and len(path.parts) == 1
    return _find_file(path.stem, places) if is_bare else None


def _load_folder(path: Path) -> Dataset:
    files = sorted(path.glob("*.npz"))
    if files:
        return read_domains(path.name, files)
    by_client = leaf.find_leaf_files(path)
    if by_client is not None:
        return leaf.read_leaf(path.name, *by_client)
    texts = [_find_text_file(path, part) for part in ("train", "test")]
    if texts[0] is not None:
        return make_passages(
            path.name, *("" if file is None else read_text(file, "readable text") for file in texts)
        )
    if (path / "train").is_dir() and (path / "test").is_dir():
        return load_images(path)
    domains = find_domains(path)
    if domains:
        return load_domains(path, domains)
    raise DataError(
        "a data folder must hold .npz files, LEAF's train/*.json, train.txt, or images in "
        "train/<class>/ and test/<class>/ or in <domain>/<class>/; "
        f"'{path}' holds none of them; check the path"
    )


def _find_text_file(folder: Path, part: str) -> Path | None:
    files = (folder / f"{part}{suffix}" for suffix in (".txt", ".txt.gz"))
    return next((file for file in files if file.is_file()), None)
