"""The trackers by name, and how TOML and options write them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from fedquilt.errors import ConfigError, describe_unknown
from fedquilt.runs.events import Callback
from fedquilt.runs.trackers.csv_file import CSVTracker
from fedquilt.runs.trackers.mlflow import MLflowTracker
from fedquilt.runs.trackers.tensorboard import TensorBoardTracker
from fedquilt.runs.trackers.tracker import Tracker
from fedquilt.runs.trackers.wandb import WandbTracker
from fedquilt.user_code import is_call, is_function_path, load_function, parse_call

TRACKERS: Mapping[str, Callable[..., Tracker]] = {
    "csv": CSVTracker,
    "mlflow": MLflowTracker,
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
}


def make_tracker(text: str) -> Callback:
    """Makes a tracker of its text: a name, a call, or ``file.py:function`` that makes a callback.

    >>> make_tracker("csv(path='numbers.csv')").path
    'numbers.csv'
    """
    if is_function_path(text) and not is_call(text):
        callback = load_function(text, "tracker")()
        if not callable(callback):
            raise ConfigError(
                f"'{text}' makes a callback, a callable that takes an event, got "
                f"{type(callback).__name__}"
            )
        return callback  # type: ignore[no-any-return]
    try:
        name, values, named = parse_call(text)
    except ValueError as problem:
        raise ConfigError(
            "a tracker is a name such as csv, a call such as wandb(mode='offline'), or "
            f"file.py:function, got '{text}'"
        ) from problem
    if name not in TRACKERS:
        raise ConfigError(describe_unknown("tracker", name, TRACKERS))
    try:
        return TRACKERS[name](*values, **named)
    except TypeError as problem:
        rule = str(problem).partition("__init__() ")[2] or str(problem)
        raise ConfigError(f"'{text}' does not fit the settings of {name}: it {rule}") from problem


def make_trackers(texts: Iterable[str]) -> tuple[Callback, ...]:
    """Makes the trackers that settings name."""
    return tuple(map(make_tracker, texts))
