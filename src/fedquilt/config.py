"""Settings of a run: read from TOML and the command line, checked once, then passed down."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor, nn

from fedquilt.data.examples import Examples, Normalise
from fedquilt.data.load import load
from fedquilt.data.population import Population, clients
from fedquilt.data.source import Source
from fedquilt.errors import ConfigError, StructureError, unknown
from fedquilt.federation.mix import Mix
from fedquilt.methods import METHODS
from fedquilt.methods.method import Method
from fedquilt.models import find, make
from fedquilt.ranges import BelowOne, Count, Fraction, NotNegative, Positive
from fedquilt.structure.cost import SHORT, is_recurrent
from fedquilt.structure.groups import Structure
from fedquilt.training.descent import Optimiser

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CLIENTS = 10  # if nobody says how many


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DataSection(_Section):
    """Where examples come from, and how clients share them."""

    source: str = "digits"
    partition: str = "iid"
    clients: int | None = Field(None, ge=1)  # None: ten, or all natural ones
    augment: str | None = None  # of training images; None: as usual for the source
    normalise: bool | None = None  # None: as usual for the source; False: images stay in [0, 1]
    share: float = Field(1.0, gt=0, le=1)  # the first so many training examples of each domain
    validation: float = Field(0.0, ge=0, lt=1)  # the last so many of each client's examples
    test_share: float = Field(0.0, ge=0, lt=1)  # drawn, to test clients who have nothing else
    unseen: float = Field(0.0, ge=0, lt=1)  # so many of the clients never train
    least: int = Field(1, ge=1)  # training examples of a natural client
    budgets: str | tuple[float | dict[str, float], ...] | None = None  # None: the method's usual


class ModelSection(BaseModel):
    """The supernet: a known name or file.py:function, and its own options."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str = "heterofl-cnn"
    exclude: tuple[str, ...] = ()
    blocks: tuple[str, ...] | None = None  # that may be skipped; None: those that are found
    keep_numbers: tuple[str, ...] = ()  # of modules, that look like widths and are none
    weights: str | None = None  # a file to start from: .safetensors or a state dict
    weights_strict: bool = True  # all of it must fit, but for the number of classes


class MethodSection(BaseModel):
    """The method and its own options, among them the share of clients that work in a round.

    What is left out has the method's default, here as in Python.
    """

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str = "heterofl"
    fraction: Fraction | None = None


class OptimiserSection(_Section):
    """Local SGD; what is left out has the method's default."""

    lr: Positive | None = None
    momentum: BelowOne | None = None
    weight_decay: NotNegative | None = None
    epochs: Count | None = None
    batch_size: Count | None = None
    clip: NotNegative | None = None  # 0: no clipping
    milestones: tuple[int, ...] | None = None
    decay: Positive | None = None
    cosine: bool | None = None
    falling: Fraction | None = None


class RunSection(_Section):
    """How the run goes about it; nothing here changes a result, unless a client fails by it."""

    workers: int | None = Field(None, ge=0)
    heartbeat: float = Field(60.0, gt=0)  # seconds without one, and a worker is replaced
    deadline: float | None = Field(None, gt=0)  # seconds, for one client's work in a worker
    evaluate_every: int = Field(10, ge=0)
    checkpoint_every: int = Field(10, ge=0)
    test_locally: bool = False  # clients test their own models in every round, before they merge


class FlowerSection(_Section):
    """How a run on Flower goes about it; the local engine needs none of this but the quorum."""

    name: str | None = None  # under which clients keep what is theirs; made up for each run
    out: str | None = None  # the run's directory, on the machine where the server's app runs
    resume: bool = False
    nodes: int | None = Field(None, ge=1)  # to wait for; None: all of the run's clients
    keys: bool = True  # a client is bound to its node's key; False: where keys do not last
    wait: float = Field(300.0, gt=0)  # seconds, for the nodes
    deadline: float | None = Field(None, gt=0)  # seconds, for one client's work
    patience: float = Field(600.0, gt=0)  # seconds, for a round
    cpus: int = Field(1, ge=1)  # of each client, where clients are simulated; Flower counts whole
    gpus: float = Field(0.0, ge=0)  # likewise
    quorum: int | None = Field(None, ge=1)  # answers without which a round fails; None: half
    tries: int = Field(3, ge=1)  # of a round that did not count
    spare: float = Field(0.0, ge=0)  # clients asked beyond those needed, as a share of them


class Config(_Section):
    """All settings of a run; the defaults train on the embedded digits in about a minute."""

    seed: int = Field(0, ge=0)
    rounds: int = Field(20, ge=1)
    data: DataSection = DataSection()
    model: ModelSection = ModelSection()
    method: MethodSection = MethodSection()
    optimiser: OptimiserSection = OptimiserSection()
    run: RunSection = RunSection()
    flower: FlowerSection = FlowerSection()


def read(path: Path) -> dict[str, Any]:
    """The settings in a TOML file, not yet checked."""
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"the config file '{path}' does not exist") from None
    except (OSError, ValueError, RecursionError) as problem:
        raise ConfigError(f"the config file '{path}' cannot be read: {problem}") from problem


def read_value(text: str) -> Any:
    """A TOML value; a bare word is text.

    >>> read_value("[1, 0.5]"), read_value("group")
    ([1, 0.5], 'group')
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text


def override(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with dotted names replaced.

    >>> override({"data": {"source": "mnist"}}, {"data.clients": 5, "rounds": 2})
    {'data': {'source': 'mnist', 'clients': 5}, 'rounds': 2}
    """
    result: dict[str, Any] = {k: dict(v) if isinstance(v, dict) else v for k, v in settings.items()}
    for name, value in changes.items():
        *sections, key = name.split(".")
        place = result
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise ConfigError(f"'{section}' is no section, so '{name}' cannot be set")
        place[key] = value
    return result


def dotted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted name, as ``override`` takes them.

    >>> dotted({"data": {"source": "mnist"}, "rounds": 2})
    {'data.source': 'mnist', 'rounds': 2}
    """
    result: dict[str, Any] = {}
    for name, value in settings.items():
        is_section = isinstance(value, Mapping)
        result |= {f"{name}.{k}": v for k, v in value.items()} if is_section else {name: value}
    return result


def checked(settings: Mapping[str, Any]) -> Config:
    """The settings, or one sentence about the first that is wrong."""
    try:
        return Config.model_validate(dict(settings))
    except ValidationError as problem:
        first = problem.errors()[0]
        place = ".".join(str(p) for p in first["loc"])
        if first["type"] == "extra_forbidden":
            raise ConfigError(_unknown_setting(first["loc"])) from None
        raise ConfigError(
            f"setting '{place}': {first['msg'].lower()}, got {first['input']!r}"
        ) from None


def _unknown_setting(place: tuple[int | str, ...]) -> str:
    section: Any = Config
    for part in place[:-1]:
        section = section.model_fields[str(part)].annotation
    return unknown("setting", str(place[-1]), section.model_fields)


def as_toml(config: Config) -> str:
    """The settings as TOML, everything spelled out."""
    values = config.model_dump(exclude_none=True)
    lines = [f"{k} = {as_value(v)}" for k, v in values.items() if not isinstance(v, dict)]
    for name, section in values.items():
        if isinstance(section, dict):
            lines += ["", f"[{name}]", *(f"{k} = {as_value(v)}" for k, v in section.items())]
    return "\n".join(lines) + "\n"


def as_value(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k} = {as_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(as_value(v) for v in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def method_of(config: Config) -> Method:
    """The method that the settings name."""
    section = config.method
    factory = METHODS.get(section.name)
    if factory is None:
        raise ConfigError(unknown("method", section.name, METHODS))
    given = config.optimiser.model_dump(exclude_none=True)
    options = section.model_dump(exclude={"name"}, exclude_none=True)
    accepted = _options(factory)
    _refuse_unknown(f"setting of method {section.name}", options, accepted)
    options = _typed(options, factory)
    default = _default_optimiser(factory)
    values = {f.name: getattr(default, f.name) for f in fields(default)} | given
    values["clip"] = values["clip"] or None
    return factory(optimiser=Optimiser(**values), **options)


def _options(factory: Callable[..., Method]) -> dict[str, Any]:
    """What settings may say about a method, and its defaults: plain values only."""
    plain = (bool, int, float, str, tuple, type(None))
    parameters = inspect.signature(factory).parameters.items()
    return {
        name: p.default
        for name, p in parameters
        if name != "optimiser" and isinstance(p.default, plain)
    }


def _typed(options: Mapping[str, Any], factory: Callable[..., Method]) -> dict[str, Any]:
    """The options as the types that a method states."""
    stated = get_type_hints(factory, include_extras=True)  # of a class: its fields
    found = {}
    for name, value in options.items():
        value = tuple(value) if isinstance(value, list) else value
        try:
            found[name] = TypeAdapter(stated[name]).validate_python(value)
        except ValidationError as problem:
            raise ConfigError(
                f"setting 'method.{name}': {problem.errors()[0]['msg']}, got {value!r}"
            ) from problem
    return found


def _refuse_unknown(kind: str, given: Iterable[str], accepted: Iterable[str]) -> None:
    for name in given:
        if name not in accepted:
            raise ConfigError(unknown(kind, name, accepted))


def _default_optimiser(factory: Callable[..., Method]) -> Optimiser:
    found: Optimiser = factory().optimiser  # type: ignore[attr-defined]
    return found


def source_of(config: Config) -> Source:
    """The data that the settings name."""
    data = config.data
    source = _normalised(load(data.source), data.normalise)
    if data.share < 1:
        source = source.first(data.share)
    return source if data.augment is None else source.augmented(data.augment)


def _normalised(source: Source, wanted: bool | None) -> Source:
    """The set normalised or not; the moments are those of all training images, not of a share."""
    if wanted is None or wanted == (source.scale is not None):
        return source
    if not wanted:
        return source.scaled(None)
    inputs = source.train.inputs if isinstance(source.train, Examples) else source.example
    if inputs.dtype != torch.uint8:
        raise ConfigError(
            f"setting 'data.normalise' is for uint8 images, '{source.name}' holds {inputs.dtype}; "
            "leave it out, and normalise the file itself"
        )
    return source.scaled(Normalise.of(inputs))


def population_of(config: Config, source: Source) -> Population:
    """The clients that the settings describe."""
    data = config.data
    return clients(
        source.train,
        test=source.test,
        partition=data.partition,
        count=_count(data),
        budgets=budgets_of(config, source),
        seed=config.seed,
        validation=data.validation,
        test_share=data.test_share,
        unseen=data.unseen,
        least=data.least,
        groups=(source.groups_train, source.groups_test),
        group_names=source.group_names,
    )


def budgets_of(config: Config, source: Source) -> Mix:
    """What clients can afford: as the settings say, or as is usual for the method and its model."""
    if config.data.budgets is not None:
        return config.data.budgets
    full = fitted(config, source.shape, source.num_classes, source.num_tokens)
    return method_of(full).usual_budgets(model_of(full))


def _count(data: DataSection) -> int | None:
    """How many clients there are; None: one for each natural one."""
    return CLIENTS if data.clients is None and data.partition != "natural" else data.clients


def example_of(source: Source) -> Tensor:
    """An input like the data's."""
    return source.example


def model_of(config: Config) -> nn.Module:
    """The model that the settings name, initialised by the seed."""
    options = config.model.model_extra or {}
    accepted = _parameters(find(config.model.name))
    if not any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
        _refuse_unknown(f"setting of model {config.model.name}", options, accepted)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return make(config.model.name, options)


def structure_of(config: Config, model: nn.Module, example: Tensor) -> Structure:
    """What can be cut in the model; a recurrent one is followed on a short text, if it reads one.

    It does the same at every position, and to follow all of them takes long.
    """
    chosen = config.model
    trace = partial(
        Structure.trace,
        exclude=chosen.exclude,
        blocks=chosen.blocks,
        keep_numbers=chosen.keep_numbers,
    )
    if is_recurrent(model) and example.ndim == 2 and example.shape[1] > SHORT[-1]:
        with suppress(RuntimeError, StructureError):  # a net of one length
            return trace(model, example[:, : SHORT[-1]])
    return trace(model, example)


def _parameters(factory: Callable[..., nn.Module]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(factory).parameters


def fitted(
    config: Config, shape: Sequence[int], num_classes: int, num_tokens: int | None = None
) -> Config:
    """The settings with a model that fits inputs of a shape, as far as the model asks."""
    facts = {"num_classes": num_classes}
    if len(shape) == 3:
        facts |= {"in_channels": shape[0], "image_size": shape[-1]}
    if num_tokens is not None:
        facts |= {"vocabulary": num_tokens, "length": shape[0]}
    asked = _parameters(find(config.model.name))
    given = config.model.model_extra or {}
    changes = {f"model.{k}": v for k, v in facts.items() if k in asked and k not in given}
    return checked(override(config.model_dump(), changes))


def resolved(config: Config, source: Source) -> Config:
    """The settings with all that follows from them and the data spelled out.

    They mean the same when the data is not at hand, or when a default has changed.
    """
    method = method_of(config)
    optimiser = asdict(method.optimiser)  # type: ignore[attr-defined]
    optimiser["clip"] = optimiser["clip"] or 0.0
    options = {n: v for n, v in _options(METHODS[config.method.name]).items() if v is not None}
    settings = config.model_dump()
    options |= config.method.model_dump(exclude_none=True)
    settings |= {"optimiser": optimiser, "method": options}
    settings["data"] |= {"clients": _count(config.data), "budgets": budgets_of(config, source)}
    full = fitted(checked(settings), source.shape, source.num_classes, source.num_tokens)
    return checked(tomllib.loads(as_toml(full)))  # as it will be read again, to the last bit
