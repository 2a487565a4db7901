"""Text as numbers: characters and words, vocabularies, and the sets that are made of them."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedquilt.data.examples import Examples
from fedquilt.data.source import Source, owners
from fedquilt.data.windows import Windows
from fedquilt.errors import DataError

Labelled: TypeAlias = tuple[Sequence[Sequence[str]], Sequence[int]]  # texts in words, and classes

# LEAF's 80 characters; the last of them stands for all others
ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
SPEECH = 80  # characters that are read before the next one is predicted
TWEET = 25  # words
MOST_WORDS = 10_000
PADDING, UNKNOWN = 0, 1  # tokens of words; the others follow
ROWS, PASSAGE = 100, 64  # HeteroFL's users of WikiText-2, and tokens of an example
END, UNKNOWN_WORD = "<eos>", "<unk>"

_WORD = re.compile(r"[\w']+|[.,!?;]")


def characters(text: str) -> Tensor:
    """Positions in LEAF's alphabet, as int8; what is not in it has the last position.

    >>> characters("Ah}é").tolist()
    [25, 60, 79, 79]
    """
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    return torch.from_numpy(_positions()[codes])


@lru_cache(maxsize=1)
def _positions() -> npt.NDArray[np.int8]:
    table = np.full(sys.maxunicode + 1, len(ALPHABET) - 1, dtype=np.int8)
    table[[ord(letter) for letter in ALPHABET]] = np.arange(len(ALPHABET))
    return table


def words(text: str) -> list[str]:
    """Words and marks in small letters.

    >>> words("I'm off @user... Bye!")
    ["i'm", 'off', 'user', '.', '.', '.', 'bye', '!']
    """
    return _WORD.findall(text.lower())


def vocabulary(texts: Iterable[Sequence[str]], most: int = MOST_WORDS) -> dict[str, int]:
    """Tokens of the most frequent words, of equally frequent ones the first in the alphabet.

    >>> vocabulary([["b", "a"], ["c", "c"]], most=2)
    {'c': 2, 'a': 3}
    """
    counts = Counter(word for text in texts for word in text)
    frequent = sorted(counts, key=lambda word: (-counts[word], word))[:most]
    return {word: token for token, word in enumerate(frequent, start=UNKNOWN + 1)}


def padded(
    texts: Sequence[Sequence[str]], tokens: Mapping[str, int], length: int = TWEET
) -> Tensor:
    """The first words of each text as tokens (texts, length), shorter texts padded at their end.

    >>> padded([["a", "b"], ["a", "c", "a", "c"]], {"a": 2, "c": 3}, length=3)
    tensor([[2, 1, 0],
            [2, 3, 2]], dtype=torch.int32)
    """
    found = np.full((len(texts), length), PADDING, dtype=np.int32)
    for row, text in zip(found, texts, strict=True):
        known = [tokens.get(word, UNKNOWN) for word in text[:length]]
        row[: len(known)] = known
    return torch.from_numpy(found)


def speeches(name: str, roles: Mapping[str, Sequence[str]]) -> Source:
    """What speaking roles say: the character that follows 80 others, at every position.

    As in LEAF, the speeches of a role are one text, a line each. Nothing is held out.
    """
    texts = {role: characters("\n".join(lines)) for role, lines in roles.items()}
    texts = {role: text for role, text in texts.items() if len(text) > SPEECH}
    if not texts:
        raise DataError(
            f"a role needs more than {SPEECH} characters to learn from, none of '{name}' has them; "
            "give longer texts"
        )
    starts, end = [], 0
    for text in texts.values():
        starts.append(torch.arange(end, end + len(text) - SPEECH, dtype=torch.int32))
        end += len(text)
    train = Windows(torch.cat([*texts.values()]), torch.cat(starts), SPEECH)
    sizes = {role: len(own) for role, own in zip(texts, starts, strict=True)}
    groups, _, names = owners(name, sizes, {})
    return Source(
        name,
        train,
        train.select(torch.arange(0)),
        len(ALPHABET),
        groups,
        group_names=names,
        num_tokens=len(ALPHABET),
    )


def tweets(name: str, train: Mapping[str, Labelled], test: Mapping[str, Labelled]) -> Source:
    """Short texts by user, of two classes, as 25 words each.

    The vocabulary is that of the training part.
    """
    train = {user: own for user, own in train.items() if own[0]}
    test = {user: own for user, own in test.items() if own[0]}
    if not train:
        raise DataError(f"a training set needs texts, '{name}' has none; check how it was made")
    tokens = vocabulary(text for texts, _ in train.values() for text in texts)
    shown, held_out = (
        Examples(
            padded([text for texts, _ in own.values() for text in texts], tokens),
            torch.tensor([label for _, labels in own.values() for label in labels]).long(),
        )
        for own in (train, test)
    )
    sizes = [{user: len(texts) for user, (texts, _) in own.items()} for own in (train, test)]
    groups_train, groups_test, names = owners(name, *sizes)
    num_tokens = UNKNOWN + 1 + len(tokens)
    return Source(name, shown, held_out, 2, groups_train, groups_test, names, num_tokens)


def passages(name: str, train: str, test: str) -> Source:
    """A long text in words, every token of it to be said again: 64 of them an example.

    As in HeteroFL (Diao et al., ICLR 2021), the text is cut into 100 rows, one for each user, and
    rows into passages; the model hides some tokens itself. Tokens are numbered as they appear,
    and the end of a line is one. What is left at the end of a row, and behind the last one, is
    left out. The test text is nobody's.
    """
    stream = _stream(train)
    tokens = {word: token for token, word in enumerate(dict.fromkeys(stream))}
    seen = torch.tensor([tokens[word] for word in stream], dtype=torch.int64)
    unknown = tokens.setdefault(UNKNOWN_WORD, len(tokens))
    later = [tokens.get(word, unknown) for word in _stream(test)]
    per_row = len(seen) // ROWS // PASSAGE
    if per_row == 0:
        raise DataError(
            f"{ROWS} users need {ROWS * PASSAGE} tokens of training text, '{name}' has "
            f"{len(seen)}; give a longer one"
        )
    rows = seen[: len(seen) // ROWS * ROWS].view(ROWS, -1)[:, : per_row * PASSAGE]
    shown = rows.reshape(-1, PASSAGE)
    held_out = torch.tensor(later[: len(later) // PASSAGE * PASSAGE]).long().view(-1, PASSAGE)
    return Source(
        name,
        Examples(shown, shown),
        Examples(held_out, held_out),
        len(tokens),
        torch.arange(ROWS).repeat_interleave(per_row),
        group_names=tuple(map(str, range(ROWS))),
        num_tokens=len(tokens),
    )


def _stream(text: str) -> list[str]:
    lines = text.removesuffix("\n").split("\n") if text else []
    return [word for line in lines for word in (*line.split(), END)]
