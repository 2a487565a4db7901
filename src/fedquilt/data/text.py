"""Text as numbers: characters, words, vocabularies, and the data sets made of them."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedquilt.data.dataset import Dataset, label_groups
from fedquilt.data.examples import Examples
from fedquilt.data.windows import Windows
from fedquilt.errors import DataError

# texts in words, and the class of each
LabeledTexts: TypeAlias = tuple[Sequence[Sequence[str]], Sequence[int]]

# LEAF's 80 characters; the last of them stands for all others
ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
SPEECH = 80  # characters that are read before the next one is predicted
TWEET = 25  # words
MAX_WORDS = 10_000
PADDING, UNKNOWN = 0, 1  # tokens of words; the others follow
ROWS, PASSAGE = 100, 64  # HeteroFL's users of WikiText-2, and tokens of an example
END, UNKNOWN_WORD = "<eos>", "<unk>"

_WORD = re.compile(r"[\w']+|[.,!?;]")


def encode_characters(text: str) -> Tensor:
    """Encodes characters as positions in LEAF's alphabet, int8; unknown ones get the last position.

    >>> encode_characters("Ah}é").tolist()
    [25, 60, 79, 79]
    """
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    return torch.from_numpy(_map_positions()[codes])


@lru_cache(maxsize=1)
def _map_positions() -> npt.NDArray[np.int8]:
    table = np.full(sys.maxunicode + 1, len(ALPHABET) - 1, dtype=np.int8)
    table[[ord(letter) for letter in ALPHABET]] = np.arange(len(ALPHABET))
    return table


def split_words(text: str) -> list[str]:
    """Splits a text into words and punctuation marks, in lower case.

    >>> split_words("I'm off @user... Bye!")
    ["i'm", 'off', 'user', '.', '.', '.', 'bye', '!']
    """
    return _WORD.findall(text.lower())


def build_vocabulary(texts: Iterable[Sequence[str]], max_words: int = MAX_WORDS) -> dict[str, int]:
    """Numbers the most frequent words; ties are broken in alphabetical order.

    >>> build_vocabulary([["b", "a"], ["c", "c"]], max_words=2)
    {'c': 2, 'a': 3}
    """
    counts = Counter(word for text in texts for word in text)
    frequent = sorted(counts, key=lambda word: (-counts[word], word))[:max_words]
    return {word: token for token, word in enumerate(frequent, start=UNKNOWN + 1)}


def pad_texts(
    texts: Sequence[Sequence[str]], tokens: Mapping[str, int], length: int = TWEET
) -> Tensor:
    """Converts the first words of each text to tokens (texts, length), padded at the end.

    >>> pad_texts([["a", "b"], ["a", "c", "a", "c"]], {"a": 2, "c": 3}, length=3)
    tensor([[2, 1, 0],
            [2, 3, 2]], dtype=torch.int32)
    """
    padded = np.full((len(texts), length), PADDING, dtype=np.int32)
    for row, text in zip(padded, texts, strict=True):
        known = [tokens.get(word, UNKNOWN) for word in text[:length]]
        row[: len(known)] = known
    return torch.from_numpy(padded)


@dataclass(frozen=True, eq=False)
class CharacterEncoder:
    """The last characters of a text; a short one has line breaks before it.

    >>> CharacterEncoder(length=3)("Ah").tolist()
    [0, 25, 60]
    """

    length: int
    unit: str = "characters"

    def __call__(self, text: str) -> Tensor:
        """The tokens of one example."""
        return encode_characters(text[-self.length :].rjust(self.length, "\n")).long()


@dataclass(frozen=True, eq=False)
class WordEncoder:
    """The first words of a text, padded at its end.

    >>> WordEncoder({"a": 2}, length=3)("A b").tolist()
    [2, 1, 0]
    """

    tokens: Mapping[str, int]
    length: int
    unit: str = "words"

    def __call__(self, text: str) -> Tensor:
        """The tokens of one example."""
        return pad_texts([split_words(text)], self.tokens, self.length)[0].long()


@dataclass(frozen=True, eq=False)
class PassageEncoder:
    """The first words of a text, split at spaces; a short one has ends of lines behind it.

    >>> PassageEncoder({"a": 0, "<eos>": 1, "<unk>": 2}, length=4)("a b").tolist()
    [0, 2, 1, 1]
    """

    tokens: Mapping[str, int]
    length: int
    unit: str = "words"

    def __call__(self, text: str) -> Tensor:
        """The tokens of one example."""
        words = _split_tokens(text)[: self.length]
        words += [END] * (self.length - len(words))
        unknown = self.tokens[UNKNOWN_WORD]
        return torch.tensor([self.tokens.get(word, unknown) for word in words])


def make_speeches(name: str, roles: Mapping[str, Sequence[str]]) -> Dataset:
    """Makes a data set of speaking roles: predict the character after each 80 characters.

    As in LEAF, the speeches of a role are joined to one text, a line each. There is no test set.
    """
    texts = {role: encode_characters("\n".join(lines)) for role, lines in roles.items()}
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
    groups, _, names = label_groups(name, sizes, {})
    return Dataset(
        name,
        train,
        train.select(torch.arange(0)),
        len(ALPHABET),
        groups,
        group_names=names,
        num_tokens=len(ALPHABET),
        text_encoder=CharacterEncoder(SPEECH),
        class_names=tuple(ALPHABET),
    )


def make_tweets(
    name: str, train: Mapping[str, LabeledTexts], test: Mapping[str, LabeledTexts]
) -> Dataset:
    """Makes a data set of short texts by user, 25 words each, in two classes.

    The vocabulary is built from the training part.
    """
    train = {user: own for user, own in train.items() if own[0]}
    test = {user: own for user, own in test.items() if own[0]}
    if not train:
        raise DataError(f"a training set needs texts, '{name}' has none; check how it was made")
    tokens = build_vocabulary(text for texts, _ in train.values() for text in texts)
    shown, held_out = (
        Examples(
            pad_texts([text for texts, _ in own.values() for text in texts], tokens),
            torch.tensor([label for _, labels in own.values() for label in labels]).long(),
        )
        for own in (train, test)
    )
    sizes = [{user: len(texts) for user, (texts, _) in own.items()} for own in (train, test)]
    groups_train, groups_test, names = label_groups(name, *sizes)
    num_tokens = UNKNOWN + 1 + len(tokens)
    return Dataset(
        name,
        shown,
        held_out,
        2,
        groups_train,
        groups_test,
        names,
        num_tokens,
        WordEncoder(tokens, TWEET),
    )


def make_passages(name: str, train: str, test: str) -> Dataset:
    """Makes a data set of one long text: examples of 64 tokens, which are also their labels.

    As in HeteroFL (Diao et al., ICLR 2021), the text is cut into 100 rows, one for each user, and
    rows into passages; the model masks some tokens itself. Tokens are numbered in order of
    appearance, and the end of a line is a token. Incomplete passages and rows are dropped. The
    test text belongs to no client.
    """
    stream = _split_tokens(train)
    tokens = {word: token for token, word in enumerate(dict.fromkeys(stream))}
    seen = torch.tensor([tokens[word] for word in stream], dtype=torch.int64)
    unknown = tokens.setdefault(UNKNOWN_WORD, len(tokens))
    later = [tokens.get(word, unknown) for word in _split_tokens(test)]
    per_row = len(seen) // ROWS // PASSAGE
    if per_row == 0:
        raise DataError(
            f"{ROWS} users need {ROWS * PASSAGE} tokens of training text, '{name}' has "
            f"{len(seen)}; give a longer one"
        )
    rows = seen[: len(seen) // ROWS * ROWS].view(ROWS, -1)[:, : per_row * PASSAGE]
    shown = rows.reshape(-1, PASSAGE)
    held_out = torch.tensor(later[: len(later) // PASSAGE * PASSAGE]).long().view(-1, PASSAGE)
    return Dataset(
        name,
        Examples(shown, shown),
        Examples(held_out, held_out),
        len(tokens),
        torch.arange(ROWS).repeat_interleave(per_row),
        group_names=tuple(map(str, range(ROWS))),
        num_tokens=len(tokens),
        text_encoder=PassageEncoder(tokens, PASSAGE),
    )


def _split_tokens(text: str) -> list[str]:
    lines = text.removesuffix("\n").split("\n") if text else []
    return [word for line in lines for word in (*line.split(), END)]
