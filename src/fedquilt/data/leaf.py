"""Sets by client in JSON: LEAF's format, and texts of roles or of users.

Caldas et al. "LEAF: A Benchmark for Federated Settings." 2018. A file of LEAF holds ``users``,
and ``user_data``: for each of them ``x`` and ``y``. What the numbers mean follows from ``x``:

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

from fedquilt.data.examples import Examples, Normalise
from fedquilt.data.limits import read_text
from fedquilt.data.source import MOST_CLASSES, Source, owners
from fedquilt.data.text import ALPHABET, characters, speeches, tweets, words
from fedquilt.data.windows import Windows
from fedquilt.errors import DataError

SUFFIXES = (".json", ".json.gz")
SIDE = 28  # of an image, in pixels
TWEET_FIELD = 4
MOODS = {0: 0, 1: 1, 4: 1}


def json_files(folder: Path) -> list[Path]:
    """The JSON files in a folder, compressed or not, by name."""
    files = folder.iterdir() if folder.is_dir() else ()
    return sorted(file for file in files if file.name.endswith(SUFFIXES))


def parts(folder: Path) -> tuple[list[Path], list[Path]] | None:
    """LEAF's files for training and for testing, wherever its scripts have put them; None: none.

    These are ``train/`` and ``test/``, or ``all_data/`` where nothing is held out, in the folder
    or in its ``data/``; or files in the folder itself.
    """
    for place in (folder, folder / "data"):
        train = json_files(place / "train")
        if train:
            return train, json_files(place / "test")
    places = [folder / "all_data", folder / "data" / "all_data"]
    if not (folder / "train").is_dir():  # of images, beside which a file may lie
        places.append(folder)
    for place in places:
        whole = json_files(place)
        if whole:
            return whole, []
    return None


def read(name: str, train: Sequence[Path], test: Sequence[Path] = ()) -> Source:
    """The set in these files: of LEAF, or one file of roles or of users."""
    first = _parsed(train[0])
    if "user_data" in first:
        return _from_leaf(name, train, test)
    if len(train) > 1 or test:
        raise DataError(
            "several files make one set only in LEAF's format, with users and user_data, "
            f"'{train[0]}' has neither; give one file"
        )
    where = {client: f"'{client}' in '{train[0]}'" for client in first}
    if all(isinstance(own, dict) for own in first.values()):
        return tweets(name, {user: _labelled(where[user], own) for user, own in first.items()}, {})
    return speeches(name, {role: _lines(where[role], own) for role, own in first.items()})


def _lines(where: str, speech: Any) -> list[str]:
    if not isinstance(speech, list):
        raise DataError(
            f"what a role says must be a list of texts, {where} has none; write "
            '{"role": ["speech", ...]}'
        )
    return [_text(where, line) for line in speech]


def _labelled(where: str, own: Mapping[str, Any]) -> tuple[list[list[str]], list[int]]:
    texts, labels = _lists(where, own, "text", "label")
    return [words(_text(where, text)) for text in texts], _moods(where, labels)


def _from_leaf(name: str, train: Sequence[Path], test: Sequence[Path]) -> Source:
    kind, shown = _users(train, None)
    _, held_out = _users(test, kind)
    if kind is None:
        raise DataError(f"a training set needs examples, '{name}' has none; check how it was made")
    if kind is TWEETS:
        return tweets(name, shown, held_out)
    groups_train, groups_test, names = owners(name, _sizes(shown), _sizes(held_out))
    x_train = _joined(name, [x for x, _ in shown.values()])
    x_test = _joined(name, [x_train[:0], *(x for x, _ in held_out.values())])
    y_train, y_test = (
        torch.tensor([label for _, labels in own.values() for label in labels]).long()
        for own in (shown, held_out)
    )
    if kind is CHARACTERS:
        num_tokens = len(ALPHABET)
        train_set, test_set = _windows_of(x_train, y_train), _windows_of(x_test, y_test)
        return Source(
            name, train_set, test_set, num_tokens, groups_train, groups_test, names, num_tokens
        )
    scale = Normalise.of(x_train)
    return Source(
        name,
        Examples(x_train, y_train, scale),
        Examples(x_test, y_test, scale),
        int(torch.cat([y_train, y_test]).max()) + 1,
        groups_train,
        groups_test,
        names,
    )


def _windows_of(texts: Tensor, following: Tensor) -> Windows:
    """Texts (N, length), each with the character that follows it."""
    tokens = torch.cat([texts, following[:, None].to(texts.dtype)], dim=1)  # (N, length + 1)
    starts = torch.arange(len(tokens), dtype=torch.int32) * tokens.shape[1]
    return Windows(tokens.flatten(), starts, texts.shape[1])


def _sizes(users: Mapping[str, tuple[Any, list[int]]]) -> dict[str, int]:
    return {user: len(labels) for user, (_, labels) in users.items()}


def _users(
    files: Sequence[Path], kind: _Kind | None
) -> tuple[_Kind | None, dict[str, tuple[Any, list[int]]]]:
    """The numbers of each user who has some, one file after another; and of what kind they are."""
    found: dict[str, tuple[Any, list[int]]] = {}
    for file in files:
        for user, where, x, y in _entries(file):
            own = _kind_of(where, x[0])
            kind = kind or own
            if own is not kind:
                raise DataError(
                    f"all examples of a set must be of one kind, {where} has {own.name} and others "
                    f"have {kind.name}; keep one set per folder"
                )
            if user in found:
                raise DataError(f"a user must be listed once, {where} is there again; join them")
            found[user] = kind.inputs(where, x), kind.labels(where, y)
    return kind, found


def _entries(file: Path) -> Iterator[tuple[str, str, list[Any], list[Any]]]:
    """Users with examples: their names, where they are, ``x`` and ``y``."""
    content = _parsed(file)
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
        x, y = _lists(where, own, "x", "y")
        if x:
            yield user, where, x, y


def _lists(where: str, own: Mapping[str, Any], *keys: str) -> tuple[list[Any], list[Any]]:
    x, y = (own.get(key) for key in keys)
    if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y):
        raise DataError(
            f"a user has two lists of one length, {' and '.join(keys)}, {where} has not; "
            "make the file again"
        )
    return x, y


def _parsed(file: Path) -> dict[str, Any]:
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


def _kind_of(where: str, x: Any) -> _Kind:
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


def _pixels(where: str, x: list[Any]) -> Tensor:
    """Images (N, 1, 28, 28) as bytes."""
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


def _classes(where: str, y: list[Any]) -> list[int]:
    if not all(isinstance(label, int) and 0 <= label < MOST_CLASSES for label in y):
        raise DataError(
            f"classes must be numbers from 0 to {MOST_CLASSES - 1}, {where} has others; number "
            "them from 0"
        )
    return y


def _passages(where: str, x: list[Any]) -> Tensor:
    """Texts of one length, as positions in the alphabet."""
    lengths = sorted({len(_text(where, text)) for text in x})
    if len(lengths) > 1 or 0 in lengths:
        raise DataError(
            f"all texts must have one length, {where} has {', '.join(map(str, lengths[:3]))} "
            "characters; make the file again with LEAF's scripts"
        )
    return characters("".join(x)).view(len(x), -1)


def _letters(where: str, y: list[Any]) -> list[int]:
    if not all(isinstance(letter, str) and len(letter) == 1 for letter in y):
        raise DataError(
            f"a text is followed by one character, {where} has something else; make the file again "
            "with LEAF's scripts"
        )
    found: list[int] = characters("".join(y)).tolist()
    return found


def _tweets(where: str, x: list[Any]) -> list[list[str]]:
    fields = [tweet if isinstance(tweet, list) else [] for tweet in x]
    return [words(_text(where, *tweet[TWEET_FIELD : TWEET_FIELD + 1])) for tweet in fields]


def _moods(where: str, y: list[Any]) -> list[int]:
    try:
        return [MOODS[int(label)] for label in y]
    except (KeyError, TypeError, ValueError):
        raise DataError(
            f"a tweet's label must be 0, 1 or 4, {where} has others; "
            "keep the happy (1 or 4) and the sad ones (0)"
        ) from None


def _text(where: str, text: Any = None) -> str:
    if not isinstance(text, str):
        raise DataError(
            f"every example must have its text, {where} has one without; make the file again"
        )
    return text


def _joined(name: str, inputs: Sequence[Tensor]) -> Tensor:
    shapes = sorted({tuple(x.shape[1:]) for x in inputs})
    if len(shapes) > 1:
        raise DataError(
            f"all texts must have one length, '{name}' has {shapes[0][0]} and {shapes[1][0]} "
            "characters; make the files again with LEAF's scripts"
        )
    return torch.cat([*inputs])


IMAGES = _Kind("images", _pixels, _classes)
CHARACTERS = _Kind("characters", _passages, _letters)
TWEETS = _Kind("tweets", _tweets, _moods)
