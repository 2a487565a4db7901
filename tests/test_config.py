import pytest

from fedquilt.config import as_toml, checked, method_of, read, source_of
from fedquilt.errors import ConfigError
from fedquilt.methods import METHODS


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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rouds": 3}, "did you mean 'rounds'"),
        ({"data": {"sorce": "mnist"}}, "did you mean 'source'"),
        ({"rounds": 0}, "rounds"),
        ({"seed": -1}, "seed"),
        ({"optimiser": {"lr": 0}}, "optimiser.lr"),
    ],
)
def test_wrong_settings_are_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        checked(settings)
