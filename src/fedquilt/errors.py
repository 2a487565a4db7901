"""What callers may want to catch: every refusal of ours is one sentence for a person."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FedquiltError(Exception):
    """Base of all refusals: the message says the rule, what was given, and what to do."""


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


class DamageError(CheckpointError):
    """A file of a run that is not what was written, or is not there."""


class UpdateError(FedquiltError):
    """What a client sent back is not what it was asked for."""


class TrainingError(FedquiltError):
    """A round in which nothing could be learned."""


class FederationError(FedquiltError):
    """Processes of a federation that do not start, or do not answer."""


def unknown(kind: str, given: str, known: Iterable[str]) -> str:
    """The sentence for a name that is not known, with the nearest one suggested.

    >>> unknown("model", "resnet", ["heterofl-resnet18", "mlp"])
    "model 'resnet' is not known; choose one of: heterofl-resnet18, mlp"
    """
    names = sorted(known)
    close = difflib.get_close_matches(given, names, n=1)
    hint = f" (did you mean '{close[0]}'?)" if close else ""
    return f"{kind} '{given}' is not known{hint}; choose one of: {', '.join(names)}"
