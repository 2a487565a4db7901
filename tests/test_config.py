from dataclasses import replace

import pytest
import torch
from torch import nn

from fedquilt.config import (
    as_toml,
    checked,
    fitted,
    method_of,
    model_of,
    override,
    population_of,
    read,
    read_value,
    resolved,
    source_of,
    structure_of,
)
from fedquilt.data import Examples, Normalise, Source, Windows
from fedquilt.errors import ConfigError, DataError
from fedquilt.federation.state import Phase
from fedquilt.methods import METHODS, FedAvg
from fedquilt.models.adds import TextLSTM
from fedquilt.structure.groups import Structure


def test_settings_survive_being_written_and_read(tmp_path):
    config = checked(
        {
            "rounds": 3,
            "data": {"budgets": [1.0, {"params": 1000.0}], "partition": "dirichlet:0.5"},
            "model": {"name": "heterofl-cnn", "norm": "group"},
            "method": {"name": "heterofl", "widths": [1.0, 0.5]},
            "optimiser": {"milestones": [1, 2], "clip": 0},
        }
    )
    (tmp_path / "config.toml").write_text(as_toml(config))
    assert checked(read(tmp_path / "config.toml")) == config


@pytest.mark.parametrize("name", METHODS)
def test_every_method_can_be_named_and_keeps_its_own_defaults(name):
    plain = method_of(checked({"method": {"name": name}, "optimiser": {"epochs": 3}}))
    assert plain.optimiser.epochs == 3
    assert plain.optimiser.clip == METHODS[name]().optimiser.clip


def test_clip_zero_means_no_clipping():
    assert method_of(checked({"optimiser": {"clip": 0}})).optimiser.clip is None
    assert method_of(checked({"optimiser": {"clip": 2.5}})).optimiser.clip == 2.5


def test_training_images_are_augmented_on_request_only():
    assert source_of(checked({})).train.augment == "none"
    chosen = source_of(checked({"data": {"augment": "crop-flip"}}))
    assert chosen.train.augment == "crop-flip"
    assert chosen.test.augment == "none"


def texts(length=5, num_tokens=7, num_classes=2):
    tokens = torch.arange(12 * length).view(12, length) % num_tokens
    labels = torch.arange(12) % num_classes
    part = Examples(tokens, labels)
    owners = torch.arange(12) // 3
    return Source("texts", part, part, num_classes, owners, owners, num_tokens=num_tokens)


def test_a_model_is_told_how_many_tokens_there_are():
    asked = checked({"model": {"name": "sentiment-lstm"}})
    full = resolved(asked, texts())
    assert full.model.model_extra == {"num_classes": 2, "vocabulary": 7}
    small = override(full.model_dump(), {"model.embedding": 3, "model.hidden": 2})
    net = model_of(checked(small))
    assert net.embedding.num_embeddings == 7
    assert net(texts().example).shape == (1, 2)
    own = checked({"model": {"name": "sentiment-lstm", "vocabulary": 9}})
    assert resolved(own, texts()).model.model_extra["vocabulary"] == 9
    told = fitted(checked({"model": {"name": "heterofl-transformer"}}), (5,), 7, 7)
    assert told.model.model_extra == {"num_classes": 7, "length": 5}
    images = fitted(checked({"model": {"name": "heterofl-cnn"}}), (3, 8, 8), 7)
    assert "vocabulary" not in images.model.model_extra


@pytest.mark.parametrize(
    ("data", "count"),
    [
        ({}, 10),
        ({"clients": 3}, 3),
        ({"partition": "natural"}, 4),
        ({"partition": "natural", "clients": 2}, 2),
        ({"partition": "natural", "unseen": 0.25}, 3),
    ],
)
def test_there_are_ten_clients_or_all_natural_ones_if_nobody_says(data, count):
    for config in (checked({"data": data}), resolved(checked({"data": data}), texts())):
        assert len(population_of(config, texts()).clients) == count


def test_text_is_neither_augmented_nor_normalised():
    windows = Windows(torch.arange(9), torch.arange(3), 2)
    for part in (texts().train, windows):
        source = replace(texts(), train=part, test=part)
        assert source.scale is None
        with pytest.raises(DataError, match=r"only images .*can be .*augmented"):
            source.augmented("crop-flip")
        with pytest.raises(DataError, match=r"only images .*can be .*normalised"):
            source.scaled(Normalise((0.5,), (0.5,)))


def test_a_recurrent_net_is_followed_on_a_short_text_if_it_reads_one():
    config = checked({"model": {"name": "char-lstm"}})
    example = torch.zeros(1, 12, dtype=torch.int64)

    class FixedLength(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.lstm = nn.Embedding(5, 3), nn.LSTM(3, 4, batch_first=True)
            self.out = nn.Linear(12 * 4, 2)

        def forward(self, tokens):
            return self.out(self.lstm(self.embedding(tokens))[0].flatten(1))

    for net in (TextLSTM(5, embedding=3, hidden=4, head=6), FixedLength()):
        expected = Structure.trace(net, example)
        assert structure_of(config, net, example).describe() == expected.describe()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rouds": 3}, "did you mean 'rounds'"),
        ({"data": {"sorce": "mnist"}}, "did you mean 'source'"),
        ({"rounds": 0}, "rounds"),
        ({"seed": -1}, "seed"),
        ({"optimiser": {"lr": 0}}, "optimiser.lr"),
        ({"data": {"unseen": 1}}, "data.unseen"),
        ({"data": {"test_share": -1}}, "data.test_share"),
        ({"data": {"least": 0}}, "data.least"),
    ],
)
def test_wrong_settings_are_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        checked(settings)


# what is left out


@pytest.mark.parametrize("name", METHODS)
def test_what_is_left_out_is_the_methods_own_default(name, tmp_path):
    """The same in Python, on the command line and in a file, also when it is read again."""
    own = METHODS[name]()
    config = checked({"method": {"name": name}})
    assert repr(method_of(config)) == repr(own)
    spelled = resolved(config, source_of(config))
    (tmp_path / "config.toml").write_text(as_toml(spelled))
    assert repr(method_of(checked(read(tmp_path / "config.toml")))) == repr(own)
    assert spelled.data.budgets == own.usual_budgets(model_of(spelled))


def test_ten_clients_all_take_part_by_default_and_ten_of_a_hundred():
    for count, expected in ((1, 1), (4, 4), (10, 10), (20, 10), (100, 10), (500, 50)):
        assert Phase("train", 1, FedAvg().fraction).cohort_size(count) == expected


def test_settings_that_are_nested_too_deeply_are_refused_in_a_sentence(tmp_path):
    (tmp_path / "deep.toml").write_text("rounds = " + "[" * 50_000)
    with pytest.raises(ConfigError, match=r"deep\.toml' cannot be read") as problem:
        read(tmp_path / "deep.toml")
    assert "\n" not in str(problem.value)
    assert read_value("[" * 50_000).startswith("[[")
