"""The five domains of digits: their files, order and sizes, and the settings around them."""

import re

import numpy as np
import pytest
import torch

from fedquilt.data import load_dataset
from fedquilt.data.pipeline import get_augmentation
from fedquilt.errors import ConfigError, DataError
from fedquilt.federation.client import SERVER
from fedquilt.settings.load import load_config
from fedquilt.settings.resolve import build_population, load_source

NAMES = ("digits-mnist", "digits-svhn", "digits-usps", "digits-synth", "digits-mnistm")
STAND_IN = "digits-synth-standin"


@pytest.fixture(autouse=True)
def _no_data_but_ours(monkeypatch, tmp_path):
    monkeypatch.delenv("FEDQUILT_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def save(folder, name, value=0, train=20, test=10):
    """A domain whose pixels say which it is (red) and, in order, which example (green)."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for part, count in (("train", train), ("test", test)):
        images = np.zeros((count, 2, 2, 3), dtype=np.uint8)
        images[..., 0] = value
        images[..., 1] = (np.arange(count) % 256)[:, None, None]
        arrays |= {f"x_{part}": images, f"y_{part}": np.arange(count) % 10}
    np.savez(folder / f"{name}.npz", **arrays)


def save_all(folder, names=NAMES, **sizes):
    for value, name in enumerate(names):
        save(folder, name, value, **sizes)


def marks(examples, channel):
    return examples.inputs[:, channel, 0, 0].tolist()


# files


def test_domains_have_the_papers_order_and_the_names_of_their_files(tmp_path):
    save_all(tmp_path)
    source = load_dataset("digits5", folder=tmp_path)
    assert (source.name, source.num_classes, source.group_names) == ("digits5", 10, NAMES)
    for examples, groups in (
        (source.train, source.groups_train),
        (source.test, source.groups_test),
    ):
        assert groups.tolist() == marks(examples, 0)
        assert groups.unique_consecutive().tolist() == [0, 1, 2, 3, 4]


def test_files_are_found_one_by_one_in_the_folder_the_environment_and_the_cache(
    tmp_path, monkeypatch
):
    places = [tmp_path / "given", tmp_path / "own", tmp_path / "cache" / "fedquilt"]
    monkeypatch.setenv("FEDQUILT_DATA", str(places[1]))
    save_all(places[2])
    save(places[1], NAMES[1], value=101)
    save(places[1], NAMES[2], value=102)
    save(places[0], NAMES[2], value=202)
    source = load_dataset("digits5", folder=places[0])
    assert sorted(set(marks(source.train, 0))) == [0, 3, 4, 101, 202]


def test_a_stand_in_is_used_only_where_the_real_domain_is_nowhere_and_shows(tmp_path, monkeypatch):
    given, own = tmp_path / "given", tmp_path / "own"
    monkeypatch.setenv("FEDQUILT_DATA", str(own))
    save_all(own, [name for name in NAMES if name != "digits-synth"])
    save(given, STAND_IN, value=99)
    source = load_dataset("digits5", folder=given)
    assert source.group_names == (*NAMES[:3], STAND_IN, NAMES[4])
    assert set(source.train.inputs[source.groups_train == 3, 0].flatten().tolist()) == {99}
    save(own, "digits-synth", value=7)
    assert load_dataset("digits5", folder=given).group_names == NAMES


@pytest.mark.parametrize("missing", NAMES)
def test_a_missing_file_and_the_places_are_named(tmp_path, monkeypatch, missing):
    given, own = tmp_path / "given", tmp_path / "own"
    monkeypatch.setenv("FEDQUILT_DATA", str(own))
    save_all(given, [name for name in NAMES if name != missing])
    said = "digits-synth.npz or digits-synth-standin.npz" if "synth" in missing else missing
    with pytest.raises(DataError, match=f"needs {re.escape(said)}") as refusal:
        load_dataset("digits5", folder=given)
    for words in (given, own, tmp_path / "cache" / "fedquilt", "not downloaded", "$FEDQUILT_DATA"):
        assert str(words) in str(refusal.value)


def test_every_domain_is_cut_to_the_first_examples_as_many_as_the_smallest_has(tmp_path):
    for value, name in enumerate(NAMES):
        save(tmp_path, name, value, train=20 + value, test=14 - value)
    source = load_dataset("digits5", folder=tmp_path)
    assert source.groups_train.bincount().tolist() == [20] * 5
    assert source.groups_test.bincount().tolist() == [10] * 5
    assert marks(source.train, 1) == [*range(20)] * 5
    assert marks(source.test, 1) == [*range(10)] * 5


def test_images_stay_between_0_and_1(tmp_path):
    save_all(tmp_path, train=256)
    source = load_dataset("digits5", folder=tmp_path)
    x, _ = source.train.batch(torch.arange(256))
    assert torch.equal(x[:, 1, 0, 0], torch.arange(256) / 255)
    assert source.test.scale is None


# settings


def settings(**data):
    return load_config({"data": {"source": "digits5", "partition": "domain:blocks", **data}})


def people_of(config):
    return build_population(config, load_source(config))


def test_the_papers_numbers(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDQUILT_DATA", str(tmp_path))
    save_all(tmp_path, train=7438, test=1860)
    config = settings(fraction=0.3, validation=0.5, clients=50, budgets="8-4-2-1")
    source = load_source(config)
    assert source.groups_train.bincount().tolist() == [2231] * 5
    people = build_population(config, source)
    assert [c.budget.width for c in people.clients[11:15]] == [0.125, 0.125, 0.25, 0.25]
    for client in people.clients:
        assert client.num_examples == len(people.train[client.id]) == 112
        assert len(people.validation[client.id]) in (111, 112)
        assert len(people.test[client.id]) == 186
        for examples in (people.train, people.validation, people.test):
            assert set(marks(examples[client.id], 0)) == {client.id // 10}
    for domain in range(5):
        own = range(10 * domain, 10 * domain + 10)
        in_order = [
            m for i in own for p in ("train", "validation") for m in marks(people.data[p][i], 1)
        ]
        assert in_order == [i % 256 for i in range(2231)]
        assert [m for i in own for m in marks(people.test[i], 1)] == [i % 256 for i in range(1860)]
    assert len(people.test[SERVER]) == 5 * 1860


def test_normalising_is_as_usual_for_the_source_unless_it_is_set(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDQUILT_DATA", str(tmp_path))
    save_all(tmp_path)
    save(tmp_path, "mnist")
    assert load_source(settings()).train.scale is None
    assert load_source(settings(source="mnist")).train.scale is not None
    for name in ("digits5", "mnist"):
        plain = load_source(settings(source=name, normalize=False))
        assert plain.train.scale is plain.test.scale is None
        scaled = load_source(settings(source=name, normalize=True))
        x, _ = scaled.train.batch(torch.arange(len(scaled.train)))
        torch.testing.assert_close(x[:, 1].mean(), torch.tensor(0.0), atol=1e-2, rtol=0)
        assert scaled.test.scale == scaled.train.scale


def test_a_share_is_normalised_like_the_whole(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDQUILT_DATA", str(tmp_path))
    save_all(tmp_path)
    save(tmp_path, "mnist")
    options = {"source": "digits5", "normalize": True}
    whole, part = (load_source(settings(fraction=share, **options)) for share in (1.0, 0.5))
    assert whole.train.scale == part.train.scale == part.test.scale is not None
    whole, part = (load_source(settings(source="mnist", fraction=share)) for share in (1.0, 0.5))
    assert whole.train.scale == part.train.scale
    assert marks(part.train, 1) == [*range(10)]
    assert len(part.test) == len(whole.test)


def test_floats_cannot_be_normalised(tmp_path):
    rows = np.zeros((4, 2), dtype=np.float32)
    np.savez(tmp_path / "rows.npz", x_train=rows, y_train=[0] * 4, x_test=rows, y_test=[0] * 4)
    path = str(tmp_path / "rows.npz")
    assert load_source(settings(source=path, normalize=False)).train.scale is None
    with pytest.raises(ConfigError, match=r"uint8 images, 'rows' holds torch.float32; leave it"):
        load_source(settings(source=path, normalize=True))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fraction", 0),
        ("fraction", 1.1),
        ("fraction", float("nan")),
        ("validation", 1),
        ("validation", -0.1),
        ("normalize", "perhaps"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"data.{name}"):
        settings(**{name: value})


def test_a_share_that_leaves_a_domain_empty_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDQUILT_DATA", str(tmp_path))
    save_all(tmp_path)
    with pytest.raises(DataError, match=r"fraction of 0.04 leaves none of 20; take a larger"):
        load_source(settings(fraction=0.04))


def test_augmentation_can_be_set_beside_a_share(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDQUILT_DATA", str(tmp_path))
    save_all(tmp_path)
    source = load_source(settings(fraction=0.5, augment="crop-flip"))
    assert (len(source.train), source.train.pipeline) == (50, get_augmentation("crop-flip"))
