"""Options of commands that are settings: their types, defaults and help come from the schema."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import NoneType
from typing import Annotated, Any, get_args

import typer

from fedquilt.data.load import DATASETS
from fedquilt.federation.aggregation import AGGREGATORS, SERVER_OPTIMIZERS
from fedquilt.learning.known_metrics import METRICS
from fedquilt.learning.losses import LOSSES
from fedquilt.methods import METHODS
from fedquilt.models import MODELS
from fedquilt.runs.trackers.catalog import TRACKERS
from fedquilt.settings.schema import list_settings

Command = Callable[..., None]

TRAIN_OPTIONS = {  # parameter of the command -> setting
    "data": "data.source",
    "method": "method.name",
    "model": "model.name",
    "loss": "task.loss",
    "metrics": "task.metrics",
    "rounds": "rounds",
    "clients": "data.clients",
    "partition": "data.partition",
    "budgets": "data.budgets",
    "fraction": "method.fraction",
    "optimizer": "local_training.optimizer",
    "lr": "local_training.lr",
    "server_optimizer": "server_optimizer.name",
    "aggregation": "aggregation.name",
    "seed": "seed",
    "device": "run.device",
    "workers": "run.workers",
    "evaluate_every": "run.evaluate_every",
    "checkpoint_every": "run.checkpoint_every",
    "test_locally": "run.test_locally",
    "track": "run.trackers",
    "keep": "selection.keep",
    "patience": "selection.patience",
}

COMPARE_OPTIONS = {  # what all methods of a comparison share
    name: TRAIN_OPTIONS[name]
    for name in (
        *("data", "model", "loss", "metrics", "rounds", "clients", "partition", "budgets"),
        *("fraction", "lr", "evaluate_every"),
    )
}


NAMES: Mapping[str, Iterable[str]] = {  # what shells complete; other values are possible too
    "aggregation.name": AGGREGATORS,
    "data.source": DATASETS,
    "local_training.optimizer": ("sgd", "adam", "adamw"),
    "method.name": METHODS,
    "model.name": MODELS,
    "run.device": ("auto", "cpu", "cuda", "mps", "xpu"),
    "run.trackers": TRACKERS,
    "selection.keep": ("last", "best"),
    "server_optimizer.name": SERVER_OPTIMIZERS,
    "task.loss": LOSSES,
    "task.metrics": METRICS,
}


def complete_names(names: Iterable[str]) -> Callable[[str], list[str]]:
    """What completes a word to one of some names, for shells."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


def describe_setting(name: str) -> str:
    """Describes a setting and its default, for ``--help``.

    >>> describe_setting("rounds")
    'Rounds of training. Default: 20.'
    """
    field = list_settings()[name]
    has_default = field.default is not None and field.default is not False and field.default != ()
    return f"{field.description}{f' Default: {field.default}.' if has_default else ''}"


def get_option_type(name: str) -> Any:
    """The type of a setting's option: text if the setting can be text, else its own.

    The option of a setting that is a list of texts can be given several times.

    >>> get_option_type("data.clients"), get_option_type("data.budgets")
    (<class 'int'>, <class 'str'>)
    >>> get_option_type("run.trackers")
    list[str]
    """
    annotation = list_settings()[name].annotation
    if annotation == tuple[str, ...]:
        return list[str]
    kinds = [kind for kind in get_args(annotation) or (annotation,) if kind is not NoneType]
    for kind in (str, bool, int, float):
        if kind in kinds:
            return kind
    is_number = any(get_args(kind) and get_args(kind)[0] is float for kind in kinds)
    return float if is_number else str


def takes_settings(options: Mapping[str, str]) -> Callable[[Command], Command]:
    """Gives a command an option for each setting.

    The command gets those that were given as its argument ``options``, by the settings' names.

    Args:
        options: The settings by the names of the command's parameters, such as ``clients``.
    """

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            given = {setting: values.pop(name) for name, setting in options.items()}
            # typer's value of a list that was not given is an empty one
            command(options={k: v for k, v in given.items() if v not in (None, [])}, **values)

        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.name != "options"]
        added = [_make_parameter(name, setting) for name, setting in options.items()]
        # typer reads the signature and the annotations of the function itself
        del run.__wrapped__
        run.__signature__ = signature.replace(parameters=own[:1] + added + own[1:])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in own + added}
        return run

    return decorate


def _make_parameter(name: str, setting: str) -> inspect.Parameter:
    kind = get_option_type(setting)
    flag = f"--{name.replace('_', '-')}"  # without this typer makes a --no- form of a flag
    option = typer.Option(
        flag, help=describe_setting(setting), autocompletion=complete_names(NAMES.get(setting, ()))
    )
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=None, annotation=Annotated[kind | None, option])
