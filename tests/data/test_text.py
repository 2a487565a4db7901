"""Text as numbers, against plain loops; and a language model trained from two text files."""

import gzip
import io
import json
import pickle
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from fedquilt.cli import main
from fedquilt.data import Windows, load_dataset
from fedquilt.data.text import (
    ALPHABET,
    PADDING,
    UNKNOWN,
    build_vocabulary,
    encode_characters,
    make_passages,
    make_speeches,
    make_tweets,
    pad_texts,
    split_words,
)
from fedquilt.errors import DataError

FEW = settings(max_examples=40, deadline=None)
texts = st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=9), max_size=9)


# characters and words


def test_the_alphabet_is_leafs():
    assert len(ALPHABET) == len(set(ALPHABET)) == 80
    assert list(ALPHABET) == sorted(ALPHABET)


@given(st.text(max_size=60))
@FEW
def test_characters_are_their_places_and_all_others_the_last(text):
    expected = [ALPHABET.index(c) if c in ALPHABET else 79 for c in text]
    assert encode_characters(text).tolist() == expected


def test_a_lone_surrogate_is_an_unknown_character():
    assert encode_characters(json.loads('"a\\ud800b"')).tolist() == [53, 79, 54]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("Don't STOP", ["don't", "stop"]),
        ("so,so... ;-)", ["so", ",", "so", ".", ".", ".", ";"]),
        ("@user <url> 4u", ["user", "url", "4u"]),
    ],
)
def test_words_are_small_and_marks_stand_alone(text, expected):
    assert split_words(text) == expected


@given(texts, st.integers(0, 9), st.randoms())
@FEW
def test_a_vocabulary_keeps_the_most_frequent_words_whatever_their_order(found, most, random):
    counts = Counter(word for text in found for word in text)
    tokens = build_vocabulary(found, most)
    assert sorted(tokens.values()) == [*range(2, 2 + min(most, len(counts)))]
    ranks = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    assert [*tokens] == [word for word, _ in ranks[:most]]
    random.shuffle(found)
    assert build_vocabulary(found, most) == tokens


@given(texts, st.integers(1, 5))
@FEW
def test_padding_matches_a_loop(found, length):
    tokens = {"a": 2, "c": 3, "e": 4}
    result = pad_texts(found, tokens, length)
    assert result.shape == (len(found), length)
    for text, row in zip(found, result.tolist(), strict=True):
        for place in range(length):
            word = text[place] if place < len(text) else None
            expected = PADDING if word is None else tokens.get(word, UNKNOWN)
            assert row[place] == expected


# windows


@given(st.data(), st.integers(1, 4), st.integers(5, 30))
@FEW
def test_windows_are_slices_of_the_text(data, length, size):
    tokens = torch.arange(size, dtype=torch.int8) * 3 % 7
    places = st.integers(0, size - length - 1)
    starts = data.draw(st.lists(places, min_size=1, max_size=6))
    windows = Windows(tokens, torch.tensor(starts, dtype=torch.int32), length)
    rows = data.draw(st.lists(st.integers(0, len(starts) - 1), max_size=5))
    x, y = windows.batch(torch.tensor(rows, dtype=torch.int64))
    whole = tokens.tolist()
    assert x.tolist() == [whole[starts[r] : starts[r] + length] for r in rows]
    assert y.tolist() == [whole[starts[r] + length] for r in rows]
    assert (x.dtype, y.dtype, x.shape) == (torch.int64, torch.int64, (len(rows), length))
    assert windows.labels.tolist() == [whole[s + length] for s in starts]
    assert windows.label_set == tuple(sorted({whole[s + length] for s in starts}))
    some = windows.select(np.array(rows, dtype=np.int64))
    assert torch.equal(some.batch(torch.arange(len(rows)))[0], x)


def test_selections_share_one_text():
    windows = Windows(torch.arange(9), torch.arange(5), 3)
    assert windows.select(torch.tensor([4])).tokens.data_ptr() == windows.tokens.data_ptr()
    _ = windows.label_set
    assert vars(pickle.loads(pickle.dumps(windows))).keys() == {"tokens", "starts", "length"}


@pytest.mark.parametrize(
    ("tokens", "starts", "length", "words"),
    [
        (torch.arange(9), torch.tensor([6]), 3, "from 6 to 6; start from 0 to 5"),
        (torch.arange(9), torch.tensor([-1]), 3, "from -1"),
        (torch.arange(9), torch.tensor([0]), 0, "length 0"),
        (torch.zeros(3, 3), torch.tensor([0]), 1, r"tokens \(3, 3\)"),
    ],
)
def test_windows_that_the_text_does_not_hold_are_refused(tokens, starts, length, words):
    with pytest.raises(DataError, match=words):
        Windows(tokens, starts, length)


# sets


def test_roles_learn_the_next_character_at_every_position():
    roles = {"A_X": ["ab " * 30, "Enter é."], "A_Y": ["short"], "B_X": ["z" * 81]}
    source = make_speeches("plays", roles)
    expected = []
    for number, name in enumerate(["A_X", "B_X"]):
        text = "\n".join(roles[name])
        expected += [(number, text[i : i + 80], text[i + 80]) for i in range(len(text) - 80)]
    assert source.group_names == ("A_X", "B_X")
    assert source.groups_train.tolist() == [number for number, _, _ in expected]
    x, y = source.train.batch(torch.arange(len(source.train)))
    assert torch.equal(x, torch.stack([encode_characters(text) for _, text, _ in expected]).long())
    assert y.tolist() == [encode_characters(letter).item() for *_, letter in expected]
    assert (source.num_classes, source.num_tokens, source.shape) == (80, 80, (80,))
    assert len(source.test) == 0


def test_roles_that_say_nearly_nothing_are_no_set():
    with pytest.raises(DataError, match="more than 80 characters"):
        make_speeches("plays", {"A_X": ["z" * 80]})


def test_tweets_know_the_words_of_the_training_part_only():
    train = {"eve": ([["good", "day"], ["day"]], [1, 0]), "none": ([], [])}
    test = {"eve": ([["day", "bad"]], [0])}
    source = make_tweets("t", train, test)
    assert source.train.inputs[:, :3].tolist() == [[3, 2, 0], [2, 0, 0]]
    assert source.test.inputs[:, :3].tolist() == [[2, UNKNOWN, 0]]
    assert (source.num_tokens, source.num_classes, source.shape) == (4, 2, (25,))
    assert source.group_names == ("eve",)
    x, y = source.train.batch(torch.tensor([1]))
    assert (x.dtype, y.tolist()) == (torch.int64, [0])


def a_text(tokens, seed=0, kinds=20):
    rng = np.random.default_rng(seed)
    return "\n".join(
        " ".join(f"w{n}" for n in rng.integers(kinds, size=9)) for _ in range(tokens // 10)
    )


def test_a_long_text_is_cut_into_rows_and_rows_into_passages():
    train, test = a_text(13_070) + "\n\n = Last = \n", "w1 w2\nnobody said this\n" + a_text(150)
    stream = [w for line in train.removesuffix("\n").split("\n") for w in [*line.split(), "<eos>"]]
    source = make_passages("wiki", train, test)
    per_row = len(stream) // 100
    assert per_row == 130
    tokens = {word: i for i, word in enumerate(dict.fromkeys(stream))}
    for user in (0, 57, 99):
        rows = source.train.inputs[source.groups_train == user]
        row = stream[user * per_row : (user + 1) * per_row]
        assert rows.flatten().tolist() == [tokens[word] for word in row[:128]]
    assert torch.equal(source.train.labels, source.train.inputs)
    assert source.num_classes == source.num_tokens == len(tokens) + 1  # and the unknown
    assert source.test.inputs.shape == (2, 64)
    unknown = len(tokens)
    expected = [tokens["w1"], tokens["w2"], tokens["<eos>"], *[unknown] * 3, tokens["<eos>"]]
    assert source.test.inputs[0, :7].tolist() == expected
    assert source.groups_test is None


def test_a_text_too_short_for_a_hundred_users_is_refused():
    with pytest.raises(DataError, match=r"need 6400 tokens.*has 6390"):
        make_passages("wiki", a_text(6390), "")


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
def test_text_files_are_a_set_by_name_or_path(tmp_path, monkeypatch, suffix):
    folder = tmp_path / "wikitext-2"
    folder.mkdir()
    opened = gzip.open if suffix.endswith("gz") else open
    for part, size in (("train", 6400), ("test", 70)):
        with opened(folder / f"{part}{suffix}", "wt") as file:
            file.write(a_text(size))
    monkeypatch.setenv("FEDQUILT_DATA", str(tmp_path))
    for source in (load_dataset("wikitext-2"), load_dataset(str(folder))):
        assert (source.name, len(source.train), len(source.test)) == ("wikitext-2", 100, 1)
    (folder / f"train{suffix}").write_bytes(b"\x1f\x8b\xff")
    with pytest.raises(DataError, match=r"train\.txt.*is not readable text"):
        load_dataset("wikitext-2")


# from files to a finished model


def fedquilt(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ending:
        main([str(a) for a in arguments])
    assert not ending.value.code, err.getvalue()
    return out.getvalue()


def test_heterofl_trains_a_language_model_of_five_sizes(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "train.txt").write_text(a_text(6400))
    (folder / "test.txt").write_text(a_text(200, seed=1))
    net = ["--model", "heterofl-transformer", "--set", "model.dim=16", "--set", "model.layers=1"]
    net += ["--set", "model.hidden=16", "--set", "model.heads=2"]
    levels = ["--set", "method.assignment=dynamic", "--budgets", "a1-b1-c1-d1-e1"]
    levels += ["--set", "method.widths=[1.0,0.5,0.25,0.125,0.0625]"]
    run = ["--rounds", "1", "--fraction", "0.05", "--set", "local_training.batch_size=1", "--json"]
    run += ["--workers", "0", "--partition", "natural", "--data", folder, "--out", tmp_path / "a"]
    trained = json.loads(fedquilt("train", *net, *levels, *run))
    assert [size["width"] for size in trained["sizes"]] == [1.0, 0.5, 0.25, 0.125, 0.0625]
    for size in trained["sizes"]:
        assert size["num_examples"] == 3 * 64  # targets
        assert size["perplexity"] == pytest.approx(np.exp(size["loss"]))
    before = load_file(tmp_path / "a" / "initial.safetensors")
    after = load_file(tmp_path / "a" / "model" / "params.safetensors")
    same = (before["decoder.3.weight"] == after["decoder.3.weight"]).all(1).tolist()
    assert same == [False] * 21 + [True]  # nobody has the word for unknown ones
    again = json.loads(fedquilt("evaluate", tmp_path / "a", "--json", "--workers", "0"))
    assert again["sizes"] == trained["sizes"]  # the same tokens were hidden
    alone = ["--widths", "0.25", "--json", "--workers", "1"]
    assert json.loads(fedquilt("evaluate", tmp_path / "a", *alone))["sizes"] == [
        trained["sizes"][2]
    ]
    assert "perplexity" in fedquilt("evaluate", tmp_path / "a", "--workers", "0")
    small = tmp_path / "small.safetensors"
    fedquilt("customize", tmp_path / "a", "--width", "0.5", "--out", small)
    assert small.is_file()
