"""What is checked before the first round, so that a run does not fail in the middle of it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedquilt.data.population import Population
from fedquilt.errors import ConfigError, DataError, FedquiltError, describe_unknown
from fedquilt.formatting import format_count
from fedquilt.methods import METHODS
from fedquilt.methods.method import Method
from fedquilt.ranges import Count, check_value
from fedquilt.structure.computed import detach_computed
from fedquilt.structure.supported import require_supported
from fedquilt.structure.tensors import Example, to_arguments
from fedquilt.training.initialization import find_given_value
from fedquilt.training.optimizer_settings import StepwiseSettings
from fedquilt.training.optimizers import make_optimizer
from fedquilt.training.settings import LocalTraining


def find_method(method: Method | str) -> Method:
    """The method itself, or the one of a name, in any case, with its defaults.

    >>> type(find_method("fedavg")).__name__, type(find_method("HeteroFL")).__name__
    ('FedAvg', 'HeteroFL')
    """
    if isinstance(method, str):
        name = method.lower()
        if name not in METHODS:
            raise ConfigError(describe_unknown("method", name, METHODS))
        return METHODS[name]()
    if isinstance(method, type) or not hasattr(method, "plan"):
        raise ConfigError(
            f"a method is an object such as fq.HeteroFL(), or a name such as 'heterofl', got "
            f"{method!r}"
        )
    return method


def check_start(model: nn.Module, example: Example, population: Population, rounds: int) -> None:
    """Refuses what no round could train, by running the model once on two of the first examples.

    Where the data are on other machines the model is run on the example.
    """
    check_value("rounds", rounds, Count)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"a model is an nn.Module, got {type(model).__name__}")
    check_clients(population)
    require_supported(model)
    detach_computed(model)
    _check_trainable(model)
    inputs, labels = _draw_first_batch(population)
    if inputs is not None:
        _check_inputs(inputs, example)
    logits = _answer(model, to_arguments(example) if inputs is None else (inputs,))
    if labels is not None:
        _check_labels_fit(logits, labels)
    _check_classes(logits, population)


def check_local_training(method: Method, model: nn.Module, rounds: int) -> None:
    """Refuses an optimizer that cannot be made, and a schedule that has no factor for a round."""
    settings = getattr(method, "local_training", None)
    if not isinstance(settings, LocalTraining):
        return
    with _describe_failure("optimizer"):
        optimizer = settings.optimizer_at(settings.lr, num_examples=settings.batch_size)
        make_optimizer(model.parameters(), optimizer)
    with _describe_failure("schedule"):
        for round in range(rounds):
            settings.lr_at(round, rounds)
        if isinstance(optimizer, StepwiseSettings):
            optimizer.schedule.factor_at(0, settings.epochs)


@contextmanager
def _describe_failure(noun: str) -> Iterator[None]:
    """Raises a ConfigError for whatever a function of the user raises."""
    try:
        yield
    except FedquiltError:
        raise
    except Exception as problem:
        raise ConfigError(
            f"the function of the {noun} raised {type(problem).__name__}: {problem}"
        ) from problem


def check_clients(population: Population) -> None:
    """Refuses what is no population."""
    if not isinstance(population, Population):
        raise ConfigError(
            f"clients are made with fq.make_clients(data, ...), got {type(population).__name__}"
        )


def _check_trainable(model: nn.Module) -> None:
    parameters = list(model.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        what = f"all {len(parameters)} of them are frozen" if parameters else "it has none"
        raise ConfigError(
            f"training needs a model with parameters that require a gradient, and of "
            f"{type(model).__name__}'s {what}; unfreeze some with requires_grad_(True)"
        )


def _draw_first_batch(population: Population) -> tuple[Tensor | None, Tensor | None]:
    """Two examples of the first client that has any here; one of them twice, if it has one."""
    for data in population.train.values():
        if len(data):
            return data.batch(torch.arange(2) % len(data))
    return None, None


def _check_inputs(inputs: Tensor, example: Example) -> None:
    expected = to_arguments(example)[0]
    if not isinstance(expected, Tensor):
        raise ConfigError(f"the example is a tensor, or several, got {type(expected).__name__}")
    if inputs.shape[1:] != expected.shape[1:]:
        raise DataError(
            f"the example is like the clients' inputs, and its first axis is the batch: inputs "
            f"have the shape {tuple(inputs.shape[1:])}, and the example {tuple(expected.shape[1:])}"
            f" behind that axis; give example=torch.zeros(1, *inputs[0].shape)"
        )
    if inputs.dtype != expected.dtype:
        word = str(expected.dtype).removeprefix("torch.")
        raise DataError(
            f"the clients' inputs and the example are of one dtype, got {inputs.dtype} and "
            f"{expected.dtype}; convert the inputs with .to(torch.{word}), or the model and the "
            "example"
        )


def _answer(model: nn.Module, inputs: tuple[Any, ...]) -> Tensor:
    """The model's logits, refused if they are none or cannot be trained."""
    trial, name = copy.deepcopy(model).eval(), type(model).__name__
    shapes = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in inputs if isinstance(x, Tensor))
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            answer = trial(*inputs)
    except Exception as problem:  # of code that is not ours
        raise ConfigError(
            f"{name} cannot be run on two of the clients' examples, {shapes}: "
            f"{type(problem).__name__}: {problem}"
        ) from problem
    if not isinstance(answer, Tensor):
        what, pick = _describe_data(answer)
        raise ConfigError(
            f"a model returns its logits as one tensor, {name} returns {what}; wrap it in a "
            f"module whose forward returns {pick}"
        )
    if not answer.requires_grad:
        raise ConfigError(
            f"training needs logits that depend on the parameters, and those of {name} have no "
            "gradient; let its forward neither detach them nor run under no_grad"
        )
    return answer


def _describe_data(answer: object) -> tuple[str, str]:
    """What a model returned instead of a tensor, and how to pick the logits out of it."""
    if isinstance(answer, Mapping):
        key = "logits" if "logits" in answer else next(iter(answer), "logits")
        return f"a {type(answer).__name__} with {', '.join(map(str, answer))}", f"output[{key!r}]"
    if isinstance(answer, (tuple, list)):
        return f"a {type(answer).__name__} of {len(answer)}", "output[0]"
    return f"a {type(answer).__name__}", "the logits"


def _check_labels_fit(logits: Tensor, labels: Tensor) -> None:
    if logits.shape[:-1] == labels.shape:
        return
    is_one_hot = logits.shape == labels.shape
    raise DataError(
        "logits are (batch, classes), or (batch, positions, classes) where every position has a "
        f"label; the model returns {tuple(logits.shape)} for labels of shape {tuple(labels.shape)}"
        + ("; turn one-hot labels into class numbers with labels.argmax(1)" * is_one_hot)
    )


def _check_classes(logits: Tensor, population: Population) -> None:
    labels = {label for client in population.clients for label in client.labels}
    labels.update(*(data.label_set for data in population.test.values()))
    lowest, highest = min(labels, default=0), max(labels, default=0)
    if lowest < 0:
        raise DataError(f"labels are class numbers from 0, got {lowest}; count them from 0")
    if logits.shape[-1] <= highest:
        raise DataError(
            f"a model has an output for every class: labels go up to {highest}, so there are "
            f"{highest + 1} classes, and the model has {format_count(logits.shape[-1], 'output')}; "
            "give it more"
        )


def warn_of_lost_values(model: nn.Module, method: Method) -> None:
    """Says that the model's values are not used, if they are not what would be drawn anyway."""
    name = find_given_value(model) if method.reinitializes else None
    if name is not None:
        warnings.warn(
            f"{type(method).__name__} draws the initial values of its nets by the layers' "
            f"reset_parameters, so the model's own are not used ('{name}' has others); to start "
            "from them choose another method, such as HeteroFL; to draw others give the model a "
            "reset_parameters",
            stacklevel=3,
        )
