"""One run of a comparison: what it is made of, and its address, which has a hash of that."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from fedquilt.comparison.code_version import compute_code_hash
from fedquilt.comparison.scoring import Scoring
from fedquilt.data import ClientData, Dataset
from fedquilt.files import hash_file, hash_tensor
from fedquilt.runs.from_config import plan_run
from fedquilt.runs.identity import describe_settings
from fedquilt.runs.plan import RunPlan
from fedquilt.settings.load import flatten_settings
from fedquilt.settings.schema import Config
from fedquilt.structure.tensors import find_tensors
from fedquilt.user_code import is_function_path

# how a run is carried out, which does not change its result; data are known by their contents
WITHOUT_INFLUENCE = (
    "run.workers",
    "run.heartbeat",
    "run.deadline",
    "run.checkpoint_every",
    "run.trackers",
    "flower.",
    "data.source",
)

NAMED_FILES = ("model.weights", "run.clients_per_pass")

NUM_SAMPLES = 16  # of data that are read when needed, to know them by


class Trial(Protocol):
    """One run of a comparison.

    ``variant`` names what is compared, ``seed`` repeats it, ``name`` is what directories are called
    by. Trials with the same address are the same run.
    """

    @property
    def variant(self) -> str:
        """What is compared, such as a method."""
        ...

    @property
    def seed(self) -> int:
        """The seed of the run."""
        ...

    @property
    def rounds(self) -> int:
        """The rounds of training."""
        ...

    @property
    def name(self) -> str:
        """The method and the seed, for the name of a directory."""
        ...

    @property
    def device(self) -> str:
        """The device that clients train on."""
        ...

    @property
    def clients_per_pass(self) -> int | str:
        """How many clients train in one pass."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """Everything that training depends on but the code, as JSON."""
        ...

    @property
    def scoring(self) -> Scoring | None:
        """How the finished run is scored; None: as it was at its end."""
        ...

    def plan(self, folder: Path) -> RunPlan:
        """The run in this directory; its engine is not used."""
        ...


@dataclass(frozen=True)
class Address:
    """The address of a result, and of the run that it is read from.

    Results that differ in their scoring alone are those of one run.

    Args:
        name: The method and the seed.
        training: A hash of what the run is made of.
        content: A hash of what the result is made of: the run, and how it is scored.
        code: A hash of the code.

    >>> address = Address("heterofl-0", training="6f1c", content="8be0", code="99ab")
    >>> str(address), address.run
    ('heterofl-0-8be0-99ab', 'heterofl-0-6f1c-99ab')
    """

    name: str
    training: str
    content: str
    code: str

    @property
    def run(self) -> str:
        """The address of the run."""
        return f"{self.name}-{self.training}-{self.code}"

    def __str__(self) -> str:
        return f"{self.name}-{self.content}-{self.code}"


def compute_address(trial: Trial) -> Address:
    """The address of a trial, with the code as it is now."""
    training, result = _hash(trial.describe()), _hash(describe_result(trial))
    return Address(trial.name, training, result, compute_code_hash())


def describe_result(trial: Trial) -> dict[str, Any]:
    """Everything that the result depends on but the code, as JSON."""
    scored = {} if trial.scoring is None else {"scoring": trial.scoring.model_dump(mode="json")}
    return {**trial.describe(), **scored}


def _hash(document: Mapping[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class ConfiguredTrial:
    """A run that settings describe.

    Args:
        variant: What is compared.
        config: All settings, resolved.
        data: The data that they name, with what identifies their contents.
        scoring: How the finished run is scored; None: as it was at its end.
    """

    variant: str
    config: Config
    data: LoadedData
    scoring: Scoring | None = None

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self.config.seed

    @property
    def rounds(self) -> int:
        """The rounds of training."""
        return self.config.rounds

    @property
    def name(self) -> str:
        """The method and the seed."""
        return f"{self.config.method.name}-{self.seed}"

    @property
    def device(self) -> str:
        """The device that clients train on."""
        return self.config.run.device

    @property
    def clients_per_pass(self) -> int | str:
        """How many clients train in one pass."""
        return self.config.run.clients_per_pass

    def describe(self) -> dict[str, Any]:
        """The settings that are not defaults, and the contents of files that they name."""
        given = flatten_settings(self.config.model_dump(mode="json", exclude_defaults=True))
        settings = {n: v for n, v in given.items() if not n.startswith(WITHOUT_INFLUENCE)}
        # without it the default would be meant, which may become another method
        settings["method.name"] = self.config.method.name
        return {"settings": settings, "data": self.data.contents, **_hash_files(given)}

    def plan(self, folder: Path) -> RunPlan:
        """The run in this directory."""
        return plan_run(self.config, self.data.load(), folder)


class LoadedData:
    """Data that are loaded once, and known by their contents."""

    def __init__(self, load: Callable[[], Dataset]) -> None:
        self._load = load
        self._dataset: Dataset | None = None

    def load(self) -> Dataset:
        """The data set."""
        if self._dataset is None:
            self._dataset = self._load()
        return self._dataset

    @cached_property
    def contents(self) -> Any:
        """A description of the contents, as JSON, with hashes of all tensors."""
        source = self.load()
        parts = [describe_data(source.train), describe_data(source.test)]
        groups = describe_settings([source.groups_train, source.groups_test, source.group_names])
        return hashlib.sha256(json.dumps([parts, groups]).encode()).hexdigest()


def describe_data(data: ClientData) -> Any:
    """What data are, as JSON: hashes of their tensors; of data that are read when needed, samples.

    >>> from fedquilt.data import load_dataset
    >>> one, two = load_dataset("digits").train, load_dataset("digits").test
    >>> describe_data(one) == describe_data(one) != describe_data(two)
    True
    """
    if is_dataclass(data):
        return describe_settings(data)
    rows = torch.linspace(0, len(data) - 1, min(len(data), NUM_SAMPLES)).long()
    tensors = find_tensors(data.batch(rows))
    return [type(data).__name__, len(data), *map(hash_tensor, tensors)]


def _hash_files(settings: Mapping[str, Any]) -> dict[str, str]:
    """The hashes of files that settings name: code of functions, weights, and sizes of passes."""
    files = {}
    for name, value in settings.items():
        if isinstance(value, str) and (is_function_path(value) or name in NAMED_FILES):
            path = Path(value.rpartition(":")[0] if is_function_path(value) else value)
            if path.is_file():
                files[f"file of {name}"] = hash_file(path)
    return files
