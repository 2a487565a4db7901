from dataclasses import replace

import pytest
import torch
from torch import nn

from fedquilt.data import Dataset, Examples, Normalize, Windows
from fedquilt.errors import ConfigError, DataError
from fedquilt.federation.state import Phase
from fedquilt.methods import METHODS, FedAvg
from fedquilt.models.adds import TextLSTM
from fedquilt.settings.load import load_config, override_settings
from fedquilt.settings.resolve import (
    build_method,
    build_model,
    build_population,
    build_structure,
    fit_model_to_data,
    load_source,
    resolve_config,
)
from fedquilt.settings.toml import dump_toml, parse_value, read_toml
from fedquilt.structure.create import trace_structure


def test_settings_survive_being_written_and_read(tmp_path):
    config = load_config(
        {
            "rounds": 3,
            "data": {"budgets": [1.0, {"params": 1000.0}], "partition": "dirichlet:0.5"},
            "model": {"name": "heterofl-cnn", "norm": "group"},
            "method": {"name": "heterofl", "widths": [1.0, 0.5]},
            "local_training": {"milestones": [1, 2], "max_grad_norm": 0},
        }
    )
    (tmp_path / "config.toml").write_text(dump_toml(config))
    assert load_config(read_toml(tmp_path / "config.toml")) == config


@pytest.mark.parametrize("name", METHODS)
def test_every_method_can_be_named_and_keeps_its_own_defaults(name):
    plain = build_method(load_config({"method": {"name": name}, "local_training": {"epochs": 3}}))
    assert plain.local_training.epochs == 3
    assert plain.local_training.max_grad_norm == METHODS[name]().local_training.max_grad_norm


def test_clip_zero_means_no_clipping():
    assert (
        build_method(
            load_config({"local_training": {"max_grad_norm": 0}})
        ).local_training.max_grad_norm
        is None
    )
    assert (
        build_method(
            load_config({"local_training": {"max_grad_norm": 2.5}})
        ).local_training.max_grad_norm
        == 2.5
    )


def test_training_images_are_augmented_on_request_only():
    rows = torch.arange(5)

    def draw(part):
        return part.batch(rows, torch.Generator().manual_seed(1))[0]

    plain = load_source(load_config({}))
    assert draw(plain.train).equal(plain.train.batch(rows)[0])
    chosen = load_source(load_config({"data": {"augment": "crop-flip"}}))
    assert not draw(chosen.train).equal(chosen.train.batch(rows)[0])
    assert chosen.train.batch(rows)[0].equal(plain.train.batch(rows)[0])
    assert chosen.test.batch(rows)[0].equal(plain.test.batch(rows)[0])


def texts(length=5, num_tokens=7, num_classes=2):
    tokens = torch.arange(12 * length).view(12, length) % num_tokens
    labels = torch.arange(12) % num_classes
    part = Examples(tokens, labels)
    owners = torch.arange(12) // 3
    return Dataset("texts", part, part, num_classes, owners, owners, num_tokens=num_tokens)


def test_a_model_is_told_how_many_tokens_there_are():
    asked = load_config({"model": {"name": "sentiment-lstm"}})
    full = resolve_config(asked, texts())
    assert full.model.model_extra == {"num_classes": 2, "vocabulary": 7}
    small = override_settings(full.model_dump(), {"model.embedding": 3, "model.hidden": 2})
    net = build_model(load_config(small))
    assert net.embedding.num_embeddings == 7
    assert net(texts().example).shape == (1, 2)
    own = load_config({"model": {"name": "sentiment-lstm", "vocabulary": 9}})
    assert resolve_config(own, texts()).model.model_extra["vocabulary"] == 9
    told = fit_model_to_data(load_config({"model": {"name": "heterofl-transformer"}}), (5,), 7, 7)
    assert told.model.model_extra == {"num_classes": 7, "length": 5}
    images = fit_model_to_data(load_config({"model": {"name": "heterofl-cnn"}}), (3, 8, 8), 7)
    assert "vocabulary" not in images.model.model_extra


@pytest.mark.parametrize(
    ("data", "count"),
    [
        ({}, 10),
        ({"clients": 3}, 3),
        ({"partition": "natural"}, 4),
        ({"partition": "natural", "clients": 2}, 2),
        ({"partition": "natural", "holdout_clients": 0.25}, 3),
    ],
)
def test_there_are_ten_clients_or_all_natural_ones_if_nobody_says(data, count):
    for config in (
        load_config({"data": data}),
        resolve_config(load_config({"data": data}), texts()),
    ):
        assert len(build_population(config, texts()).clients) == count


def test_a_model_gets_the_size_and_the_channels_of_transformed_images():
    data = {"transforms": ["Resize(16)", "ToRGB()", "RandomCrop(12)"]}
    config = load_config({"data": data, "model": {"name": "vit-small"}})
    full = resolve_config(config, load_source(config))
    options = full.model.model_extra
    assert (options["image_size"], options["in_channels"]) == (12, 3)
    assert full.data.transforms == tuple(data["transforms"])


def test_text_is_neither_augmented_nor_normalized():
    windows = Windows(torch.arange(9), torch.arange(3), 2)
    for part in (texts().train, windows):
        source = replace(texts(), train=part, test=part)
        assert source.normalization is None
        with pytest.raises(DataError, match=r"only images .*can be .*augmented"):
            source.with_augmentation("crop-flip")
        with pytest.raises(DataError, match=r"only images .*can be .*normalized"):
            source.with_normalization(Normalize((0.5,), (0.5,)))


def test_a_recurrent_net_is_followed_on_a_short_text_if_it_reads_one():
    config = load_config({"model": {"name": "char-lstm"}})
    example = torch.zeros(1, 12, dtype=torch.int64)

    class FixedLength(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.lstm = nn.Embedding(5, 3), nn.LSTM(3, 4, batch_first=True)
            self.out = nn.Linear(12 * 4, 2)

        def forward(self, tokens):
            return self.out(self.lstm(self.embedding(tokens))[0].flatten(1))

    for net in (TextLSTM(5, embedding=3, hidden=4, head=6), FixedLength()):
        expected = trace_structure(net, example)
        assert build_structure(config, net, example).describe() == expected.describe()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rouds": 3}, "did you mean 'rounds'"),
        ({"data": {"sorce": "mnist"}}, "did you mean 'data.source'"),
        ({"rounds": 0}, "rounds"),
        ({"seed": -1}, "seed"),
        ({"local_training": {"lr": 0}}, "local_training.lr"),
        ({"data": {"holdout_clients": 1}}, "data.holdout_clients"),
        ({"data": {"test_fraction": -1}}, "data.test_fraction"),
        ({"data": {"min_examples": 0}}, "data.min_examples"),
    ],
)
def test_wrong_settings_are_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        load_config(settings)


# what is left out


@pytest.mark.parametrize("name", METHODS)
def test_what_is_left_out_is_the_methods_own_default(name, tmp_path):
    """The same in Python, on the command line and in a file, also when it is read again."""
    own = METHODS[name]()
    config = load_config({"method": {"name": name}})
    assert repr(build_method(config)) == repr(own)
    spelled = resolve_config(config, load_source(config))
    (tmp_path / "config.toml").write_text(dump_toml(spelled))
    assert repr(build_method(load_config(read_toml(tmp_path / "config.toml")))) == repr(own)
    assert spelled.data.budgets == own.default_budgets(build_model(spelled))


def test_ten_clients_all_take_part_by_default_and_ten_of_a_hundred():
    for count, expected in ((1, 1), (4, 4), (10, 10), (20, 10), (100, 10), (500, 50)):
        assert Phase("train", 1, FedAvg().fraction).cohort_size(count) == expected


def test_settings_that_are_nested_too_deeply_are_refused_in_a_sentence(tmp_path):
    (tmp_path / "deep.toml").write_text("rounds = " + "[" * 50_000)
    with pytest.raises(ConfigError, match=r"deep\.toml' cannot be read") as problem:
        read_toml(tmp_path / "deep.toml")
    assert "\n" not in str(problem.value)
    assert parse_value("[" * 50_000).startswith("[[")
