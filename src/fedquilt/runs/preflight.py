"""What is checked before the first round, so that a run does not fail in the middle of it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedquilt.data.client_sets import list_owners, list_samples
from fedquilt.data.population import Population
from fedquilt.errors import ConfigError, DataError, FedquiltError, describe_unknown
from fedquilt.formatting import format_count
from fedquilt.learning.batch import Batch, as_batch, bind_batch
from fedquilt.learning.losses import IGNORED, check_loss, classes_last
from fedquilt.learning.task import CLASSIFICATION, LearningTask
from fedquilt.methods import METHODS
from fedquilt.methods.method import Method
from fedquilt.ranges import Count, check_value
from fedquilt.structure.computed import detach_computed
from fedquilt.structure.supported import require_supported
from fedquilt.structure.tensors import Example, find_tensors, map_tensors, to_arguments
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


def check_start(
    model: nn.Module,
    example: Example,
    population: Population,
    rounds: int,
    task: LearningTask = CLASSIFICATION,
) -> None:
    """Refuses what no round could train, by running the model once on two of the first examples.

    Where the data are on other machines the model is run on the example.
    """
    check_value("rounds", rounds, Count)
    check_model(model)
    check_clients(population)
    require_supported(model)
    detach_computed(model)
    _check_trainable(model)
    batch = _draw_first_batch(model, population)
    if batch is not None:
        _check_inputs(to_arguments(batch[0]), to_arguments(example))
    trial = _copy(model).eval()
    output = _answer(trial, to_arguments(example if batch is None else batch[0]))
    if task.has_classes:
        _check_logits(output, model)
    if task.has_classes and batch is not None:
        _check_labels_fit(output, batch[1])
    if task.has_classes:
        _check_classes(output, batch, population)
    if batch is not None:
        _check_task(task, trial, output, batch)


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except FedquiltError:
        raise
    except Exception as problem:  # of what the model holds
        raise ConfigError(
            f"clients train copies of a model, and {type(model).__name__} cannot be copied "
            f"({type(problem).__name__}: {problem}); let it open files, locks and connections "
            "when it needs them, not keep them as attributes"
        ) from problem


def _check_task(task: LearningTask, trial: nn.Module, output: Any, batch: Batch) -> None:
    """Refuses a loss or a metric that cannot be computed on a batch."""
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), warnings.catch_warnings():
            # PyTorch would broadcast, and the loss would mean nothing
            warnings.filterwarnings("error", message="Using a target size")
            if task.loss.needs_batch:
                value = task.loss.of_batch(trial, batch)
            else:
                value = task.loss.of_output(output, batch[1])
    except FedquiltError:
        raise
    except Exception as problem:  # of code that is not ours
        raise ConfigError(
            f"the loss '{task.loss.name}' cannot be computed on two of the clients' examples: "
            f"outputs are {_describe_tensors(output)}, targets {_describe_tensors(batch[1])}: "
            f"{type(problem).__name__}: {problem}"
        ) from problem
    check_loss(value, task.loss)
    with torch.no_grad():
        task.measure(map_tensors(Tensor.detach, output), batch[1])


def _describe_tensors(value: Any) -> str:
    words = (f"{tuple(x.shape)} {x.dtype}".replace("torch.", "") for x in find_tensors(value))
    return ", ".join(words) or f"a {type(value).__name__}"


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


def check_model(model: nn.Module) -> None:
    """Refuses what is no model."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"a model is an nn.Module, got {type(model).__name__}")


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


def _draw_first_batch(model: nn.Module, population: Population) -> Batch | None:
    """Two examples of the first client that has any here; one of them twice, if it has one."""
    for client in list_owners(population.train)[:1]:
        data = population.train[client]
        return bind_batch(model, as_batch(data.batch(torch.arange(2) % len(data))))
    return None


def _check_inputs(inputs: tuple[Any, ...], example: tuple[Any, ...]) -> None:
    if not all(isinstance(x, Tensor) or x is None for x in example[:1]):
        raise ConfigError(f"the example is a tensor, or several, got {type(example[0]).__name__}")
    if len(inputs) != len(example):
        raise DataError(
            f"the example is like the clients' inputs: a model is called with {len(inputs)} of "
            f"them, and the example has {len(example)}; give as many"
        )
    for own, expected in zip(inputs, example, strict=True):
        if isinstance(own, Tensor) and isinstance(expected, Tensor):
            _check_input(own, expected)


def _check_input(inputs: Tensor, expected: Tensor) -> None:
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


def _answer(trial: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """The model's output."""
    name = type(trial).__name__
    shapes = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in inputs if isinstance(x, Tensor))
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            return trial(*inputs)
    except Exception as problem:  # of code that is not ours
        raise ConfigError(
            f"{name} cannot be run on two of the clients' examples, {shapes}: "
            f"{type(problem).__name__}: {problem}"
        ) from problem


def _check_logits(answer: Any, model: nn.Module) -> None:
    """Refuses an output that is no logits of classes, or that cannot be trained."""
    name = type(model).__name__
    if not isinstance(answer, Tensor):
        what, pick = _describe_data(answer)
        raise ConfigError(
            f"a model returns its logits as one tensor, {name} returns {what}; wrap it in a "
            f"module whose forward returns {pick}, or give a loss of your own"
        )
    if not answer.requires_grad:
        raise ConfigError(
            f"training needs logits that depend on the parameters, and those of {name} have no "
            "gradient; let its forward neither detach them nor run under no_grad"
        )


def _describe_data(answer: object) -> tuple[str, str]:
    """What a model returned instead of a tensor, and how to pick the logits out of it."""
    if isinstance(answer, Mapping):
        key = "logits" if "logits" in answer else next(iter(answer), "logits")
        return f"a {type(answer).__name__} with {', '.join(map(str, answer))}", f"output[{key!r}]"
    if isinstance(answer, (tuple, list)):
        return f"a {type(answer).__name__} of {len(answer)}", "output[0]"
    return f"a {type(answer).__name__}", "the logits"


def _check_labels_fit(logits: Tensor, labels: Any) -> None:
    is_class = isinstance(labels, Tensor) and labels.dtype == torch.int64
    if not is_class:
        given = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise DataError(
            f"cross entropy is of int64 class numbers, and the targets are {given}; turn one-hot "
            "ones into class numbers with labels.argmax(1), or name another loss, such as "
            "loss='mse'"
        )
    if classes_last(logits, labels).shape[:-1] == labels.shape:
        return
    is_one_hot = logits.shape == labels.shape
    raise DataError(
        "logits are (batch, classes), or (batch, positions, classes) where every position has a "
        f"label; the model returns {tuple(logits.shape)} for labels of shape {tuple(labels.shape)}"
        + ("; turn one-hot labels into class numbers with labels.argmax(1)" * is_one_hot)
    )


def _check_classes(logits: Tensor, batch: Batch | None, population: Population) -> None:
    outputs = logits if batch is None else classes_last(logits, batch[1])
    check_labels(outputs.shape[-1], population)


def check_labels(num_classes: int, population: Population) -> None:
    """Raises a DataError if there are labels that a model with so many outputs cannot give."""
    labels = set(population.registry.known_labels)
    labels.update(*(data.label_set for data in list_samples(population.test)))
    labels.discard(IGNORED)
    lowest, highest = min(labels, default=0), max(labels, default=0)
    if lowest < 0:
        raise DataError(f"labels are class numbers from 0, got {lowest}; count them from 0")
    if num_classes <= highest:
        raise DataError(
            f"a model has an output for every class: labels go up to {highest}, so there are "
            f"{highest + 1} classes, and the model has {format_count(num_classes, 'output')}; "
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
