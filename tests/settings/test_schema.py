"""One schema: TOML, options, Python and editors agree on every setting."""

import inspect
from pathlib import Path

import jsonschema
import pytest
import typer.main

from fedquilt.cli import app
from fedquilt.cli.setting_options import TRAIN_OPTIONS, describe_setting
from fedquilt.errors import ConfigError
from fedquilt.federation.aggregation import AGGREGATORS, SERVER_OPTIMIZERS
from fedquilt.methods import METHODS
from fedquilt.settings.json_schema import make_json_schema
from fedquilt.settings.load import load_config, override_settings
from fedquilt.settings.resolve import (
    build_method,
    build_server_optimizer,
    load_source,
    resolve_config,
)
from fedquilt.settings.schema import CHOICES, Config, list_settings
from fedquilt.settings.toml import dump_toml, format_value, parse_dump, parse_value, read_toml
from fedquilt.training.settings import LocalTraining

EXPERIMENTS = sorted((Path(__file__).parents[2] / "experiments").glob("*.toml"))
OPTIONS = {option.name: option for option in typer.main.get_command(app).commands["train"].params}
# for each option that is a setting: what is typed, and what it must mean
TYPED = {
    "data": ("mnist", "mnist"),
    "method": ("fedavg", "fedavg"),
    "aggregation": ("median", "median"),
    "model": ("mlp", "mlp"),
    "loss": ("mse", "mse"),
    "metrics": ("mae,r2", "mae,r2"),
    "rounds": ("3", 3),
    "clients": ("7", 7),
    "partition": ("classes:2", "classes:2"),
    "budgets": ("a1-e9", "a1-e9"),
    "fraction": ("0.5", 0.5),
    "lr": ("0.25", 0.25),
    "server_optimizer": ("fedadam", "fedadam"),
    "optimizer": ("adam", "adam"),
    "seed": ("4", 4),
    "device": ("cuda:1", "cuda:1"),
    "workers": ("0", 0),
    "evaluate_every": ("2", 2),
    "checkpoint_every": ("3", 3),
    "keep": ("best", "best"),
    "patience": ("4", 4),
    "track": ("csv", ["csv"]),
}


@pytest.fixture(scope="module")
def validator():
    schema = make_json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_editors_accept_the_experiments(path, validator):
    validator.validate(read_toml(path))


@pytest.mark.parametrize("name", METHODS)
def test_editors_accept_the_resolved_settings_of_every_method(name, validator):
    config = load_config({"method": {"name": name}})
    resolved = resolve_config(config, load_source(config))
    validator.validate(parse_dump(dump_toml(resolved)))


@pytest.mark.parametrize(
    "settings",
    [
        {"rouds": 3},
        {"rounds": 0},
        {"data": {"sorce": "mnist"}},
        {"local_training": {"lr": 0}},
        {"method": {"fraction": 2}},
        {"method": {"keep_lr": 0.1}},  # of adds, and not of the default method
        {"method": {"name": "nefl", "scaling": "X"}},
        {"method": {"name": "none"}},
        {"server_optimizer": {"beta_1": 0.5}},
        {"server_optimizer": {"name": "fedadam", "lr": 0}},
        {"flower": {"node": 3}},
        {"run": {"worker": 3}},
    ],
)
def test_editors_refuse_what_is_refused(settings, validator):
    assert not validator.is_valid(settings)
    with pytest.raises(ConfigError):
        load_config(settings)


@pytest.mark.parametrize("section", [s for s in list_settings() if "." in s])
def test_an_unknown_key_gets_the_nearest_name_in_every_section(section):
    wrong = section + "x"
    if section.startswith("model."):  # whose own options are known when it is made
        return
    with pytest.raises(ConfigError, match=rf"'{wrong}' is not known \(did you mean '{section}'"):
        load_config(override_settings({}, {wrong: 1}))


def test_a_key_without_its_section_is_found():
    with pytest.raises(ConfigError, match=r"did you mean .*local_training\.lr"):
        load_config({"lr": 1})


@pytest.mark.parametrize("name", METHODS)
def test_a_methods_settings_are_its_arguments_and_have_their_defaults(name):
    parameters = inspect.signature(METHODS[name]).parameters
    fields = CHOICES["method"][name].model_fields
    assert set(fields) - {"name"} <= set(parameters)
    for key in set(fields) - {"name"}:
        assert fields[key].default == parameters[key].default
    assert build_method(load_config({"method": {"name": name}})) == METHODS[name]()


@pytest.mark.parametrize("name", SERVER_OPTIMIZERS)
def test_a_server_optimizer_by_name_has_its_own_defaults(name):
    config = load_config({"server_optimizer": {"name": name}})
    assert build_server_optimizer(config) == SERVER_OPTIMIZERS[name]()


def test_local_training_is_described_once():
    fields = inspect.signature(LocalTraining).parameters
    known = {n.split(".")[1] for n in list_settings() if n.startswith("local_training.")}
    assert known == set(fields)


def test_every_setting_is_described():
    for name in METHODS:
        for server_optimizer in SERVER_OPTIMIZERS:
            settings = list_settings(method=name, server_optimizer=server_optimizer)
            assert [n for n, field in settings.items() if not field.description] == []
    for aggregation in AGGREGATORS:
        settings = list_settings(aggregation=aggregation)
        assert [n for n, field in settings.items() if not field.description] == []


@pytest.mark.parametrize(("option", "setting"), TRAIN_OPTIONS.items())
def test_an_option_means_the_same_as_its_setting(option, setting):
    parameter = OPTIONS[option]
    assert parameter.help == describe_setting(setting)
    assert parameter.default is None  # so that a file's setting holds if the option is left out
    if option not in TYPED:
        assert parameter.is_flag
        return
    text, value = TYPED[option]
    typed = parameter.type.convert(text, parameter, None)
    typed = [typed] if parameter.multiple else typed
    assert typed == value
    assert type(typed) is type(value)
    by_option = load_config(override_settings({}, {setting: typed}))
    by_set = load_config(override_settings({}, {setting: parse_value(text)}))
    assert by_option == by_set != Config()
    assert parse_value(format_value(value)) == value
