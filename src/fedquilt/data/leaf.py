"""Data sets by client in JSON: LEAF's format, and texts of roles or of users.

Caldas et al. "LEAF: A Benchmark for Federated Settings." 2018. A file of LEAF holds ``users``,
and ``user_data``, with ``x`` and ``y`` for each user. The form of ``x`` tells what they hold:

    784 numbers in [0, 1]         an image of 28×28 (FEMNIST); y is its class
    80 characters                 a text (Shakespeare); y is the character that follows
    a list, its fifth the text    a tweet (Sentiment140); y is 0, or 1 or 4 for happy ones

Other files hold ``{role: [speech, …]}``, or ``{user: {"text": [...], "label": [...]}}``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedquilt.data.dataset import MAX_CLASSES, Dataset, label_groups
from fedquilt.data.examples import Examples
from fedquilt.data.limits import read_text
from fedquilt.data.text import (
    ALPHABET,
    CharacterEncoder,
    encode_characters,
    make_speeches,
    make_tweets,
    split_words,
)
from fedquilt.data.transforms import Normalize
from fedquilt.data.windows import Windows
from fedquilt.errors import DataError

SUFFIXES = (".json", ".json.gz")
SIDE = 28  # of an image, in pixels
TWEET_FIELD = 4
MOODS = {0: 0, 1: 1, 4: 1}


def list_json_files(folder: Path) -> list[Path]:
    """Lists the JSON files in a folder, compressed or not, sorted by name."""
    files = folder.iterdir() if folder.is_dir() else ()
    return sorted(file for file in files if file.name.endswith(SUFFIXES))


def find_leaf_files(folder: Path) -> tuple[list[Path], list[Path]] | None:
    """Finds LEAF's files for training and for testing; returns None if there are none.

    LEAF's scripts write ``train/`` and ``test/``, or ``all_data/`` where nothing is held out, into
    the folder or into its ``data/``. JSON files in the folder itself are taken too.
    """
    for place in (folder, folder / "data"):
        train = list_json_files(place / "train")
        if train:
            return train, list_json_files(place / "test")
    places = [folder / "all_data", folder / "data" / "all_data"]
    if not (folder / "train").is_dir():  # of images, beside which a file may lie
        places.append(folder)
    for place in places:
        whole = list_json_files(place)
        if whole:
            return whole, []
    return None


def read_leaf(name: str, train: Sequence[Path], test: Sequence[Path] = ()) -> Dataset:
    """Reads a data set from files in LEAF's format, or from one file of roles or of users."""
    first = _parse_file(train[0])
    if "user_data" in first:
        return _make_leaf_dataset(name, train, test)
    if len(train) > 1 or test:
        raise DataError(
            "several files make one set only in LEAF's format, with users and user_data, "
            f"'{train[0]}' has neither; give one file"
        )
    where = {client: f"'{client}' in '{train[0]}'" for client in first}
    if all(isinstance(own, dict) for own in first.values()):
        return make_tweets(
            name, {user: _read_labeled(where[user], own) for user, own in first.items()}, {}
        )
    return make_speeches(name, {role: _read_lines(where[role], own) for role, own in first.items()})


def _read_lines(where: str, speech: Any) -> list[str]:
    if not isinstance(speech, list):
        raise DataError(
            f"what a role says must be a list of texts, {where} has none; write "
            '{"role": ["speech", ...]}'
        )
    return [_read_text(where, line) for line in speech]


def _read_labeled(where: str, own: Mapping[str, Any]) -> tuple[list[list[str]], list[int]]:
    texts, labels = _read_lists(where, own, "text", "label")
    return [split_words(_read_text(where, text)) for text in texts], _read_moods(where, labels)


def _make_leaf_dataset(name: str, train: Sequence[Path], test: Sequence[Path]) -> Dataset:
    kind, shown = _read_users(train, None)
    _, held_out = _read_users(test, kind)
    if kind is None:
        raise DataError(f"a training set needs examples, '{name}' has none; check how it was made")
    if kind is TWEETS:
        return make_tweets(name, shown, held_out)
    groups_train, groups_test, names = label_groups(
        name, _count_examples(shown), _count_examples(held_out)
    )
    x_train = _join(name, [x for x, _ in shown.values()])
    x_test = _join(name, [x_train[:0], *(x for x, _ in held_out.values())])
    y_train, y_test = (
        torch.tensor([label for _, labels in own.values() for label in labels]).long()
        for own in (shown, held_out)
    )
    if kind is CHARACTERS:
        num_tokens = len(ALPHABET)
        train_set, test_set = _make_windows(x_train, y_train), _make_windows(x_test, y_test)
        return Dataset(
            name,
            train_set,
            test_set,
            num_tokens,
            groups_train,
            groups_test,
            names,
            num_tokens,
            CharacterEncoder(x_train.shape[1]),
            tuple(ALPHABET),
        )
    scale = Normalize.from_images(x_train)
    return Dataset(
        name,
        Examples(x_train, y_train, scale),
        Examples(x_test, y_test, scale),
        int(torch.cat([y_train, y_test]).max()) + 1,
        groups_train,
        groups_test,
        names,
    )


def _make_windows(texts: Tensor, following: Tensor) -> Windows:
    """Makes windows of texts (N, length) and the character that follows each."""
    tokens = torch.cat([texts, following[:, None].to(texts.dtype)], dim=1)  # (N, length + 1)
    starts = torch.arange(len(tokens), dtype=torch.int32) * tokens.shape[1]
    return Windows(tokens.flatten(), starts, texts.shape[1])


def _count_examples(users: Mapping[str, tuple[Any, list[int]]]) -> dict[str, int]:
    return {user: len(labels) for user, (_, labels) in users.items()}


def _read_users(
    files: Sequence[Path], kind: _Kind | None
) -> tuple[_Kind | None, dict[str, tuple[Any, list[int]]]]:
    """Reads the kind of the examples, and inputs and labels of each user who has any."""
    users: dict[str, tuple[Any, list[int]]] = {}
    for file in files:
        for user, where, x, y in _read_entries(file):
            own = _find_kind(where, x[0])
            kind = kind or own
            if own is not kind:
                raise DataError(
                    f"all examples of a set must be of one kind, {where} has {own.name} and others "
                    f"have {kind.name}; keep one set per folder"
                )
            if user in users:
                raise DataError(f"a user must be listed once, {where} is there twice; join them")
            users[user] = kind.inputs(where, x), kind.labels(where, y)
    return kind, users


def _read_entries(file: Path) -> Iterator[tuple[str, str, list[Any], list[Any]]]:
    """Yields users with examples: name, place for error texts, ``x`` and ``y``."""
    content = _parse_file(file)
    users, data = content.get("users"), content.get("user_data")
    if not isinstance(users, list) or not isinstance(data, dict):
        raise DataError(
            f"a file of LEAF must hold users and user_data, '{file}' has: "
            f"{', '.join(sorted(content)[:5])}; make it again with LEAF's scripts"
        )
    for user in users:
        where = f"'{user}' in '{file}'"
        own = data.get(user) if isinstance(user, str) else None
        if not isinstance(own, dict):
            raise DataError(
                f"every user must be in user_data, {where} is not; make the file again with LEAF's "
                "scripts"
            )
        x, y = _read_lists(where, own, "x", "y")
        if x:
            yield user, where, x, y


def _read_lists(where: str, own: Mapping[str, Any], *keys: str) -> tuple[list[Any], list[Any]]:
    x, y = (own.get(key) for key in keys)
    if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y):
        raise DataError(
            f"a user has two lists of one length, {' and '.join(keys)}, {where} has not; "
            "make the file again"
        )
    return x, y


def _parse_file(file: Path) -> dict[str, Any]:
    text = read_text(file, "a readable JSON file")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"'{file}' is not a readable JSON file ({type(error).__name__}); fetch it again"
        ) from error
    if not isinstance(content, dict) or not content:
        raise DataError(
            f"a JSON file of clients must hold an object with their names, '{file}' does not; "
            "write it in LEAF's format"
        )
    return content


@dataclass(frozen=True)
class _Kind:
    """How the inputs and the labels of one user become numbers."""

    name: str
    inputs: Callable[[str, list[Any]], Any]
    labels: Callable[[str, list[Any]], list[int]]


def _find_kind(where: str, x: Any) -> _Kind:
    if isinstance(x, str):
        return CHARACTERS
    if isinstance(x, list) and len(x) > TWEET_FIELD and isinstance(x[TWEET_FIELD], str):
        return TWEETS
    if isinstance(x, list) and len(x) == SIDE**2:
        return IMAGES
    raise DataError(
        f"an example must be {SIDE**2} numbers, a text, or a tweet whose fifth field is the text, "
        f"{where} has {str(x)[:40]!r}; read the file yourself and pass tensors"
    )


def _read_pixels(where: str, x: list[Any]) -> Tensor:
    """Reads images as uint8 (N, 1, 28, 28)."""
    try:
        values = np.array(x, dtype=np.float32)
    except (TypeError, ValueError):
        values = np.zeros(0, dtype=np.float32)
    if values.shape != (len(x), SIDE**2) or not ((values >= 0) & (values <= 1)).all():
        raise DataError(
            f"an image must be {SIDE**2} numbers in [0, 1], {where} has another; "
            "make the file again with LEAF's scripts"
        )
    return torch.from_numpy(np.round(values * 255).astype(np.uint8)).view(-1, 1, SIDE, SIDE)


def _read_classes(where: str, y: list[Any]) -> list[int]:
    if not all(isinstance(label, int) and 0 <= label < MAX_CLASSES for label in y):
        raise DataError(
            f"classes must be numbers from 0 to {MAX_CLASSES - 1}, {where} has others; number "
            "them from 0"
        )
    return y


def _read_passages(where: str, x: list[Any]) -> Tensor:
    """Reads texts of one length as positions in the alphabet."""
    lengths = sorted({len(_read_text(where, text)) for text in x})
    if len(lengths) > 1 or 0 in lengths:
        raise DataError(
            f"all texts must have one length, {where} has {', '.join(map(str, lengths[:3]))} "
            "characters; make the file again with LEAF's scripts"
        )
    return encode_characters("".join(x)).view(len(x), -1)


def _read_letters(where: str, y: list[Any]) -> list[int]:
    if not all(isinstance(letter, str) and len(letter) == 1 for letter in y):
        raise DataError(
            f"a text is followed by one character, {where} has something else; make the file again "
            "with LEAF's scripts"
        )
    positions: list[int] = encode_characters("".join(y)).tolist()
    return positions


def _read_tweets(where: str, x: list[Any]) -> list[list[str]]:
    fields = [tweet if isinstance(tweet, list) else [] for tweet in x]
    return [
        split_words(_read_text(where, *tweet[TWEET_FIELD : TWEET_FIELD + 1])) for tweet in fields
    ]


def _read_moods(where: str, y: list[Any]) -> list[int]:
    try:
        return [MOODS[int(label)] for label in y]
    except (KeyError, TypeError, ValueError):
        raise DataError(
            f"a tweet's label must be 0, 1 or 4, {where} has others; "
            "keep the happy (1 or 4) and the sad ones (0)"
        ) from None


def _read_text(where: str, text: Any = None) -> str:
    if not isinstance(text, str):
        raise DataError(
            f"every example must have its text, {where} has one without; make the file again"
        )
    return text


def _join(name: str, inputs: Sequence[Tensor]) -> Tensor:
    shapes = sorted({tuple(x.shape[1:]) for x in inputs})
    if len(shapes) > 1:
        raise DataError(
            f"all texts must have one length, '{name}' has {shapes[0][0]} and {shapes[1][0]} "
            "characters; make the files again with LEAF's scripts"
        )
    return torch.cat([*inputs])


IMAGES = _Kind("images", _read_pixels, _read_classes)
CHARACTERS = _Kind("characters", _read_passages, _read_letters)
TWEETS = _Kind("tweets", _read_tweets, _read_moods)
