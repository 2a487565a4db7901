"""LEAF's format: what its files mean, what is wrong with others, and a run on some."""

import gzip
import io
import json
import re
from contextlib import redirect_stderr, redirect_stdout

import numpy as np
import pytest
import torch

from fedquilt.cli import main
from fedquilt.data import load_dataset
from fedquilt.data.text import encode_characters
from fedquilt.errors import DataError

VERSE = "Now is the winter of our discontent made glorious summer by this sun of York; "


def leaf(users):
    """A file's content, from (x, y) for each user."""
    return {
        "users": [*users],
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
    }


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def verses(seed, count=6, length=8):
    """Texts of some characters, and what follows."""
    starts = np.random.default_rng(seed).integers(len(VERSE) - length, size=count)
    return [VERSE[s : s + length] for s in starts], [VERSE[s + length] for s in starts]


def pictures(seed, count=3):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, 784)), rng.integers(0, 62, count)


def tweet(text):
    return ["1", "Mon Apr 06", "NO_QUERY", "somebody", text, "training"]


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDQUILT_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


# what files mean


@pytest.mark.parametrize(
    ("train", "test"), [("train", "test"), ("data/train", "data/test"), ("all_data", None)]
)
def test_texts_are_read_wherever_leaf_puts_them(place, train, test):
    users = {name: verses(seed) for seed, name in enumerate(["B_KING", "A_FOOL", "C_NOBODY"])}
    users["C_NOBODY"] = ([], [])
    folder = place / "shakespeare"
    for number, user in enumerate(users):
        write(folder / train / f"{number}.json", leaf({user: users[user]}))
    if test:
        write(folder / test / "a.json", leaf({"A_FOOL": verses(9, 2)}))
    source = load_dataset("shakespeare")
    assert source.group_names == ("B_KING", "A_FOOL")
    assert source.groups_train.tolist() == [0] * 6 + [1] * 6
    x, y = source.train.batch(torch.arange(12))
    texts, letters = (users["B_KING"][part] + users["A_FOOL"][part] for part in (0, 1))
    assert torch.equal(x, torch.stack([encode_characters(text) for text in texts]).long())
    assert torch.equal(y, torch.cat([encode_characters(letter) for letter in letters]).long())
    assert (source.num_classes, source.num_tokens, len(source.test)) == (80, 80, 2 if test else 0)
    if test:
        assert source.groups_test.tolist() == [1, 1]
        assert source.test.labels.tolist() == encode_characters("".join(verses(9, 2)[1])).tolist()


def test_images_are_bytes_and_their_background_stays_white(place):
    users = {f"f{seed:04}": pictures(seed) for seed in range(3)}
    files = {user: ((x / 255).tolist(), y.tolist()) for user, (x, y) in users.items()}
    files["f0000"][0][0][:5] = [1.0] * 5
    write(place / "femnist" / "train" / "a.json", leaf(files))
    write(place / "femnist" / "test" / "a.json", leaf({"f0001": files["f0001"]}))
    source = load_dataset("femnist")
    expected = np.concatenate([x for x, _ in users.values()])
    expected[0, :5] = 255
    assert torch.equal(source.train.inputs.flatten(1), torch.from_numpy(expected).byte())
    assert source.train.inputs.shape == (9, 1, 28, 28)
    assert source.train.labels.tolist() == [int(n) for _, y in users.values() for n in y]
    assert source.num_classes == int(source.train.labels.max()) + 1
    assert source.num_tokens is None
    assert source.test.scale == source.train.scale is not None
    assert source.groups_test.tolist() == [1] * 3


def test_tweets_are_their_fifth_field(place):
    users = {
        "eve": ([tweet("Good day"), tweet("bad")], [4, 0]),
        "bob": ([tweet("good, good")], ["1"]),
    }
    write(place / "sent140" / "train" / "a.json", leaf(users))
    source = load_dataset("sent140")
    assert source.train.labels.tolist() == [1, 0, 1]
    assert source.train.inputs[2, :4].tolist() == [2, 3, 2, 0]  # good: most frequent; then ','
    assert source.groups_train.tolist() == [0, 0, 1]
    assert source.num_classes == 2


@pytest.mark.parametrize("name", ["by-user.json", "by-user.json.gz"])
def test_texts_with_labels_by_user_are_the_same(place, name):
    users = {
        "eve": {"text": ["Good day", "bad"], "label": [1, 0]},
        "bob": {"text": [], "label": []},
    }
    path = write(place / "sent140" / name, users)
    for source in (
        load_dataset("sent140"),
        load_dataset(str(path)),
        load_dataset(str(path.parent)),
    ):
        assert source.train.labels.tolist() == [1, 0]
        assert source.group_names == ("eve",)


def test_speeches_by_role_are_the_same(place):
    path = write(place / "shakespeare" / "by-role.json.gz", {"A_X": [VERSE, VERSE], "A_Y": [VERSE]})
    source = load_dataset("shakespeare")
    assert source.group_names == ("A_X",)
    assert len(source.train) == 2 * len(VERSE) + 1 - 80
    assert load_dataset(str(path)).name == "by-role"


def test_users_of_the_test_part_alone_are_unseen(place):
    write(place / "shakespeare" / "train" / "a.json", leaf({"A": verses(0)}))
    write(place / "shakespeare" / "test" / "a.json", leaf({"B": verses(1)}))
    source = load_dataset("shakespeare")
    assert source.groups_test is None
    assert (len(source.test), source.group_names) == (6, ("A",))
    write(place / "shakespeare" / "test" / "b.json", leaf({"A": verses(2)}))
    with pytest.raises(DataError, match="1 do not train, such as 'B', and 1 do"):
        load_dataset("shakespeare")


def test_a_folder_of_images_may_have_a_json_file_in_it(place):
    (place / "mine" / "train" / "cat").mkdir(parents=True)
    (place / "mine" / "test").mkdir()
    write(place / "mine" / "notes.json", {"by": "me"})
    with pytest.raises(DataError, match="x_train of 'mine' is empty"):
        load_dataset(str(place / "mine"))


# what is wrong


TEXTS = verses(0)
FINE = leaf({"A": TEXTS})
BLACK = [0.0] * 784


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "a.json' is not a readable JSON file (JSONDecodeError); fetch it again"),
        ("", "is not a readable JSON file"),
        ("[1, 2]", "must hold an object with their names"),
        ("{}", "must hold an object with their names"),
        ({"user_data": {}}, "must hold users and user_data"),
        ({"users": ["A"], "user_data": {}}, "every user must be in user_data, 'A' in"),
        ({"users": ["A"], "user_data": {"A": {"x": []}}}, "two lists of one length, x and y, 'A'"),
        (leaf({"A": (TEXTS[0], TEXTS[1][:-1])}), "two lists of one length, x and y, 'A' in"),
        ({**FINE, "users": ["A", "A"]}, "must be listed once, 'A' in"),
        (leaf({"A": ([], [])}), "needs examples, 'set' has none"),
        (leaf({"A": (["abc", "ab"], ["x", "y"])}), "must have one length, 'A' in"),
        (leaf({"A": (["abc"], ["x"]), "B": (["ab"], ["x"])}), "one length, 'set' has 2 and 3"),
        (leaf({"A": (["abc"], ["xy"])}), "followed by one character, 'A' in"),
        (leaf({"A": (["abc"], [7])}), "followed by one character, 'A' in"),
        (leaf({"A": ([[1, 2]], [0])}), "must be 784 numbers, a text, or a tweet"),
        (leaf({"A": ([BLACK, BLACK[1:]], [0, 1])}), "must be 784 numbers in [0, 1], 'A' in"),
        (leaf({"A": ([[255.0] * 784], [0])}), "must be 784 numbers in [0, 1]"),
        (leaf({"A": ([[*BLACK[1:], "x"]], [0])}), "must be 784 numbers in [0, 1]"),
        (leaf({"A": ([BLACK], [-1])}), "classes must be numbers from 0 to 99999, 'A' in"),
        (leaf({"A": ([BLACK], [0]), "B": TEXTS}), "'B' in"),
        (leaf({"A": ([tweet("x")], [2])}), "label must be 0, 1 or 4, 'A' in"),
        (leaf({"A": ([tweet("x"), ["y"]], [0, 0])}), "must have its text, 'A' in"),
        ({"A": ["one", 2]}, "must have its text, 'A' in"),
        ({"A": "one"}, "must be a list of texts, 'A' in"),
        ({"A": {"text": ["x"], "label": []}}, "of one length, text and label, 'A' in"),
    ],
)
def test_damaged_files_are_refused_in_one_sentence(place, content, words):
    write(place / "set" / "all_data" / "a.json", content)
    with pytest.raises(DataError, match=re.escape(words)) as refused:
        load_dataset(str(place / "set"))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("keep", [0, 20, -9])
def test_a_truncated_archive_is_refused(place, keep):
    path = write(place / "a.json.gz", FINE)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match="is not a readable JSON file"):
        load_dataset(str(path))


def test_several_files_of_roles_are_refused(place):
    for name in ("a", "b"):
        write(place / "shakespeare" / f"{name}.json", {"A_X": [VERSE]})
    with pytest.raises(DataError, match=r"only in LEAF's format.*give one file"):
        load_dataset("shakespeare")


@pytest.mark.parametrize("name", ["shakespeare", "sent140", "femnist", "wikitext-2"])
def test_a_set_that_is_nowhere_is_said_where_to_put(place, name):
    with pytest.raises(
        DataError, match=rf"folder '{name}', which is not in {place}.*FEDQUILT_DATA"
    ):
        load_dataset(name)


# from files to a finished model


def fedquilt(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ending:
        main([str(a) for a in arguments])
    assert not ending.value.code, err.getvalue()
    return json.loads(out.getvalue())


def test_roles_train_resume_and_leave_a_model(place):
    users = {f"PLAY_{n}": verses(n, 12) for n in range(5)}
    write(place / "shakespeare" / "train" / "a.json", leaf(users))
    write(
        place / "shakespeare" / "test" / "a.json", leaf({u: verses(9, 4) for u in [*users][::-1]})
    )
    net = ["--model", "char-lstm", "--set", "model.embedding=3", "--set", "model.hidden=4"]
    net += ["--set", "model.head=6", "--method", "fedavg", "--partition", "natural"]
    net += ["--set", "data.source=shakespeare", "--set", "data.holdout_clients=0.4"]
    run = [*net, "--set", "local_training.epochs=1", "--workers", "0", "--json"]
    whole = fedquilt("train", *run, "--rounds", "2", "--out", place / "a")
    fedquilt("train", *run, "--rounds", "1", "--out", place / "b")
    resumed = fedquilt("train", "--resume", place / "b", "--rounds", "2", "--json")
    (size,) = whole["sizes"]
    assert resumed["sizes"] == whole["sizes"]
    assert size["num_examples"] == 2 * (12 + 4)  # all of two clients that never trained
    assert size["perplexity"] is None  # one target each
    evaluated = fedquilt("evaluate", place / "a", "--json", "--workers", "0")
    assert evaluated["sizes"] == whole["sizes"]
    out = ["--out", place / "small.pt2", "--json"]
    assert fedquilt("customize", place / "a", *out)["input"]["shapes"] == [[1, 8]]
