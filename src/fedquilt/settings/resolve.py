"""From settings to objects: data, clients, model, structure and method.

``resolve_config`` spells out all that follows from the settings and the data.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedquilt.data import Dataset, Normalize, Pipeline, load_dataset, make_pipeline
from fedquilt.data.pipeline import get_augmentation
from fedquilt.data.population import Population, make_clients
from fedquilt.errors import ConfigError, StructureError, describe_unknown
from fedquilt.federation.aggregation import (
    AGGREGATORS,
    SERVER_OPTIMIZERS,
    TAKE_MEAN,
    Aggregator,
    CapWeight,
    ClipNorm,
    ClipQuantile,
    EqualWeights,
    ServerOptimizer,
    UpdateTransform,
)
from fedquilt.federation.budgets import BudgetDistribution
from fedquilt.federation.hostile import Attack
from fedquilt.federation.privacy import Privacy
from fedquilt.federation.privacy.settings import choose_sampling
from fedquilt.federation.secure import SecureAggregation
from fedquilt.federation.state import Sampling
from fedquilt.learning.task import CLASSIFICATION, LearningTask, make_task
from fedquilt.methods import METHODS
from fedquilt.methods.method import Method
from fedquilt.models import find_factory, make_model
from fedquilt.settings.load import load_config, override_settings
from fedquilt.settings.schema import (
    DEFAULT_AGGREGATOR,
    DEFAULT_ATTACK,
    DEFAULT_CLIENTS,
    AggregationSection,
    Config,
    DataSection,
    ModelSection,
    TaskSection,
)
from fedquilt.settings.toml import dump_toml, parse_dump
from fedquilt.structure.create import trace_structure
from fedquilt.structure.measure import SHORT_LENGTHS, is_recurrent
from fedquilt.structure.structure import Structure
from fedquilt.training.function_path import FunctionPath
from fedquilt.training.poisoning import ATTACKS
from fedquilt.training.serialization import list_functions
from fedquilt.training.settings import LocalTraining
from fedquilt.training.torch_optimizers import TorchOptimizer
from fedquilt.user_code import is_call, is_function_path, load_function

OF_OPTIMIZER = ("optimizer", "lr", "momentum", "weight_decay")
OF_SCHEDULE = ("schedule", "milestones", "milestone_decay", "cosine", "round_decay")


def build_method(config: Config) -> Method:
    """Makes the method that the settings name.

    Settings of local training that are left out are the method's own.
    """
    factory = METHODS[config.method.name]
    local_training = build_local_training(
        factory().local_training,  # type: ignore[attr-defined]
        config.local_training.model_dump(exclude_none=True),
    )
    options = config.method.model_dump(exclude={"name"})
    optimizer = build_server_optimizer(config)
    if "server_optimizer" in inspect.signature(factory).parameters:
        options["server_optimizer"] = optimizer
    elif optimizer != TAKE_MEAN:
        raise ConfigError(
            f"method {config.method.name} has no mean for a server optimizer, got {optimizer}; "
            "leave out server_optimizer"
        )
    method = factory(local_training=local_training, **options)
    if build_privacy(config) is not None:
        method = method.make_private()
    aggregator, transforms = build_aggregator(config), build_transforms(config)
    if aggregator is None and not transforms:
        return method
    return replace(method, aggregator=aggregator, transforms=transforms)  # type: ignore[type-var]


def build_local_training(default: LocalTraining, given: Mapping[str, Any]) -> LocalTraining:
    """Makes settings of local training from those that are given and the method's defaults.

    A method's learning rate, momentum and weight decay are meant for its optimizer, so another
    optimizer has PyTorch's instead. A schedule replaces all of the method's.
    """
    values = {field.name: getattr(default, field.name) for field in fields(default)}
    replaced: tuple[str, ...] = OF_SCHEDULE if "schedule" in given else ()
    if (
        LocalTraining(optimizer=given.get("optimizer", default.optimizer)).optimizer
        != default.optimizer
    ):
        replaced += OF_OPTIMIZER
    values = {**{key: value for key, value in values.items() if key not in replaced}, **given}
    values["max_grad_norm"] = values["max_grad_norm"] or None  # TOML has no null: 0 stands for it
    return LocalTraining(**values)


def list_code(config: Config) -> dict[str, str]:
    """Lists the code that training runs: the paths of functions, by the settings that name them.

    >>> list_code(load_config({"local_training": {"schedule": ["warmup:5", "mine.py:factor"]}}))
    {'local_training.schedule': 'mine.py:factor'}
    """
    named = {"model.name": config.model.name, "task.loss": config.task.loss}
    named["task.metrics"] = next(filter(is_function_path, config.task.metrics), "")
    trackers = (text for text in config.run.trackers if not is_call(text))
    named["run.trackers"] = next(filter(is_function_path, trackers), "")
    code = {name: path for name, path in named.items() if is_function_path(path)}
    local_training = build_method(config).local_training  # type: ignore[attr-defined]
    for name in ("optimizer", "schedule", "step_schedule"):
        for function in list_functions(getattr(local_training, name)):
            code[f"local_training.{name}"] = function.path
    return code


def list_local_training(local_training: LocalTraining) -> dict[str, Any]:
    """Lists settings of local training as a TOML file has them."""
    values = {field.name: getattr(local_training, field.name) for field in fields(local_training)}
    values["max_grad_norm"] = values["max_grad_norm"] or 0.0
    optimizer = values["optimizer"]
    if isinstance(optimizer, TorchOptimizer):
        settings = dict(optimizer.settings)
        values["optimizer"] = {"name": optimizer.name, **settings} if settings else optimizer.name
    elif isinstance(optimizer, FunctionPath):
        values["optimizer"] = optimizer.path
    for name in ("schedule", "step_schedule"):
        parts = values[name]
        values[name] = tuple(p.path if isinstance(p, FunctionPath) else p for p in parts)
    return values


def build_privacy(config: Config) -> Privacy | None:
    """Makes what the settings say about privacy; None: there is none."""
    privacy = Privacy(**config.privacy.model_dump())
    return privacy if privacy.is_on else None


def choose_config_sampling(config: Config) -> Sampling:
    """Finds how cohorts are drawn."""
    return choose_sampling(config.sampling, build_privacy(config))


def build_aggregator(config: Config) -> Aggregator | None:
    """Makes the rule that the settings name; None: the mean of the method."""
    section = config.aggregation
    if section.name == DEFAULT_AGGREGATOR:
        return None
    own = section.model_dump(exclude={"name", *AggregationSection.model_fields})
    return AGGREGATORS[section.name](**own)


def build_attack(config: Config) -> Attack | None:
    """Makes the attack that the settings name; None: all clients are honest."""
    section = config.attacks
    if section.name == DEFAULT_ATTACK:
        return None
    return ATTACKS[section.name](**section.model_dump(exclude={"name"}))


def build_transforms(config: Config) -> tuple[UpdateTransform, ...]:
    """Makes the transforms of updates that the settings name."""
    section = config.aggregation
    transforms: list[UpdateTransform] = []
    if section.clip_norm is not None:
        transforms.append(ClipNorm(section.clip_norm))
    if section.clip_quantile is not None:
        transforms.append(ClipQuantile(section.clip_quantile, section.clip_per_ring))
    if section.max_weight is not None:
        transforms.append(CapWeight(section.max_weight))
    if section.equal_weights:
        transforms.append(EqualWeights())
    return tuple(transforms)


def build_server_optimizer(config: Config) -> ServerOptimizer:
    """Makes the server optimizer that the settings name."""
    section = config.server_optimizer
    return SERVER_OPTIMIZERS[section.name](**section.model_dump(exclude={"name"}))


def build_secure_aggregation(config: Config) -> SecureAggregation | None:
    """Makes what the settings say about secure aggregation; None: the server sees every update."""
    section = config.secure_aggregation
    if section.threshold is None:
        if section != type(section)():
            raise ConfigError(
                "secure aggregation needs a threshold, the number of clients without whom nothing "
                "is opened; set secure_aggregation.threshold"
            )
        return None
    return SecureAggregation(**section.model_dump())


def build_task(config: Config) -> LearningTask:
    """Makes the learning task that the settings name."""
    section = config.task
    if section == TaskSection():
        return CLASSIFICATION
    loss = _load_if_path(section.loss, "loss")
    metrics = [_load_if_path(name, "metric") for name in section.metrics]
    return make_task(loss, metrics or None)


def _load_if_path(name: str, noun: str) -> Any:
    return load_function(name, noun) if is_function_path(name) else name


def load_source(config: Config) -> Dataset:
    """Loads the data that the settings name."""
    data = config.data
    pipeline = parse_pipeline(data)
    source = _normalize(load_dataset(data.source), data.normalize)
    if data.fraction < 1:
        source = source.take_first(data.fraction)
    return source if pipeline is None else source.with_transforms(pipeline)


def parse_pipeline(data: DataSection) -> Pipeline | None:
    """Makes the pipeline that images go through; None: as usual for the set."""
    chains = (data.transforms, data.test_transforms)
    if chains == (None, None) and not data.transform_targets:
        return None if data.augment is None else get_augmentation(data.augment)
    if data.augment is not None:
        raise ConfigError(
            f"data.augment is the name of a chain of transforms, got '{data.augment}' and "
            "data.transforms; leave out one of them"
        )
    return make_pipeline(
        data.transforms or (), data.test_transforms, transform_targets=data.transform_targets
    )


def _normalize(source: Dataset, wanted: bool | None) -> Dataset:
    """Normalizes images or not, by the moments of all training images and not of a fraction."""
    if wanted is None or wanted == (source.normalization is not None):
        return source
    if not wanted:
        return source.with_normalization(None)
    inputs = source.stored_inputs
    if inputs is None or inputs.dtype != torch.uint8:
        kind = "inputs that are not in memory" if inputs is None else inputs.dtype
        raise ConfigError(
            f"setting 'data.normalize' is for uint8 images, '{source.name}' holds {kind}; "
            "leave it out, and normalize the file itself, or put Normalize(mean, std) at the end "
            "of data.transforms"
        )
    return source.with_normalization(Normalize.from_images(inputs))


def build_population(config: Config, source: Dataset) -> Population:
    """Divides the data among the clients that the settings describe."""
    data = config.data
    return make_clients(
        source.train,
        test=source.test,
        partition=data.partition,
        count=_count_clients(data),
        budgets=resolve_budgets(config, source),
        seed=config.seed,
        validation=data.validation,
        test_fraction=data.test_fraction,
        holdout_clients=data.holdout_clients,
        min_examples=data.min_examples,
        groups=(source.groups_train, source.groups_test),
        group_names=source.group_names,
    )


def resolve_budgets(config: Config, source: Dataset) -> BudgetDistribution:
    """Finds what clients can afford: as the settings say, or as usual for the method and model."""
    if config.data.budgets is not None:
        return config.data.budgets
    full = fit_model_to_data(config, source.shape, source.num_classes, source.num_tokens)
    return build_method(full).default_budgets(build_model(full))


def _count_clients(data: DataSection) -> int | None:
    """The number of clients; None: one for each natural client."""
    return DEFAULT_CLIENTS if data.clients is None and data.partition != "natural" else data.clients


def make_example(source: Dataset) -> Tensor:
    """Makes a batch of one input like the data's."""
    return source.example


def build_model(config: Config) -> nn.Module:
    """Makes the model that the settings name, initialized by the seed."""
    options = config.model.model_extra or {}
    accepted = _list_parameters(find_factory(config.model.name))
    if not any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
        _refuse_unknown_options(config.model.name, options, accepted)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return make_model(config.model.name, options)


def _refuse_unknown_options(
    model: str, given: Mapping[str, object], accepted: Mapping[str, inspect.Parameter]
) -> None:
    known = [f"model.{name}" for name in (*accepted, *ModelSection.model_fields)]
    for name in given:
        if name not in accepted:
            raise ConfigError(describe_unknown(f"setting of {model}", f"model.{name}", known))


def _list_parameters(factory: Callable[..., nn.Module]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(factory).parameters


def build_structure(config: Config, model: nn.Module, example: Tensor) -> Structure:
    """Traces what can be cut in the model.

    A recurrent model is traced on a short text if it accepts one: it does the same at every
    position, and to trace all of them takes long.
    """
    section = config.model
    trace = partial(
        trace_structure,
        exclude=section.exclude,
        blocks=section.blocks,
        keep_numbers=section.keep_numbers,
    )
    if is_recurrent(model) and example.ndim == 2 and example.shape[1] > SHORT_LENGTHS[-1]:
        with suppress(RuntimeError, StructureError):  # a net of one length
            return trace(model, example[:, : SHORT_LENGTHS[-1]])
    return trace(model, example)


def fit_model_to_data(
    config: Config, shape: Sequence[int], num_classes: int, num_tokens: int | None = None
) -> Config:
    """Sets the model's options that follow from the data and are left out, such as num_classes."""
    facts = {"num_classes": num_classes}
    if len(shape) == 3:
        facts |= {"in_channels": shape[0], "image_size": shape[-1]}
    if num_tokens is not None:
        facts |= {"vocabulary": num_tokens, "length": shape[0]}
    asked = _list_parameters(find_factory(config.model.name))
    given = config.model.model_extra or {}
    changes = {f"model.{k}": v for k, v in facts.items() if k in asked and k not in given}
    return load_config(override_settings(config.model_dump(), changes))


def resolve_config(config: Config, source: Dataset) -> Config:
    """Spells out all that follows from the settings and the data.

    The result means the same where the data is not at hand, and when a default changes.
    """
    local_training = build_method(config).local_training  # type: ignore[attr-defined]
    settings = {**config.model_dump(), "local_training": list_local_training(local_training)}
    settings["data"] |= {
        "clients": _count_clients(config.data),
        "budgets": resolve_budgets(config, source),
    }
    full = fit_model_to_data(
        load_config(settings), source.shape, source.num_classes, source.num_tokens
    )
    return load_config(parse_dump(dump_toml(full)))  # as it will be read again, to the last bit
