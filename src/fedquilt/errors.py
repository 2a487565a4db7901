"""Errors of the library: each message is one sentence for a person.

>>> import fedquilt as fq
>>> try:
...     fq.HeteroFL(fraction=2.0)
... except fq.FedquiltError as problem:
...     print(problem)
setting 'fraction' of HeteroFL: input should be less than or equal to 1, got 2.0
"""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable
from pathlib import Path


class FedquiltError(Exception):
    """Base of all errors: the message says the rule, what was given, and what to do."""


class StructureError(FedquiltError):
    """A model that cannot be followed, or a subnet that does not fit its structure."""


class StructureWarning(UserWarning):
    """A model of which a part stays whole at every width, and why."""


class BudgetError(FedquiltError):
    """A budget that no subnet can meet."""


class DataError(FedquiltError):
    """A dataset or partition that cannot be used."""


class ConfigError(FedquiltError):
    """A setting that makes no sense."""


class CheckpointError(FedquiltError):
    """A run directory or checkpoint that cannot be read or written."""


class CorruptFileError(CheckpointError):
    """A file of a run that is not what was written, or is not there."""


class UpdateError(FedquiltError):
    """What a client sent back is not what it was asked for.

    Raised by a decoder or a validator, it drops the update of one client, and the round goes on:

    >>> import fedquilt as fq
    >>> raise fq.UpdateError("client 3 has sent a weight above 1000")
    Traceback (most recent call last):
        ...
    fedquilt.errors.UpdateError: client 3 has sent a weight above 1000
    """


class ProtocolError(FedquiltError):
    """A message of secure aggregation that is out of turn, changed, or not what it should be."""


class TrainingError(FedquiltError):
    """A round in which nothing could be learned."""


class DeviceMemoryError(FedquiltError):
    """Work of a client that does not fit into the memory of its device."""


class FederationError(FedquiltError):
    """Processes of a federation that do not start, or do not answer."""


def describe_unknown(kind: str, given: str, known: Iterable[str]) -> str:
    """The sentence for a name that is not known, with the nearest one suggested.

    >>> describe_unknown("model", "resnet", ["heterofl-resnet18", "mlp"])
    "model 'resnet' is not known; choose one of: heterofl-resnet18, mlp"
    """
    names = sorted(known)
    hint = suggest_nearest(given, names)
    return f"{kind} '{given}' is not known{hint}; choose one of: {', '.join(names)}"


def suggest_nearest(given: str, known: Iterable[str]) -> str:
    """The words that suggest the nearest known name; empty if none is near.

    >>> suggest_nearest("classifer", ["features", "classifier"])
    " (did you mean 'classifier'?)"
    """
    close = difflib.get_close_matches(given, list(known), n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""


def describe_exception(problem: BaseException) -> str:
    """An exception in one line: its kind, its message, and where it was raised."""
    where = traceback.extract_tb(problem.__traceback__)[-1]
    return f"{type(problem).__name__}: {problem} ({Path(where.filename).name}:{where.lineno})"
