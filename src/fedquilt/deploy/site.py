"""What a node of a federation has: its number, its data, what it can afford, and a place on disk.

A deployed client starts anew for every message, so nothing here takes longer than it must, and what
takes long (following a model, measuring a device) is done once a run and kept on disk.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedquilt.config import (
    Config,
    checked,
    example_of,
    fitted,
    method_of,
    model_of,
    override,
    population_of,
    read_value,
    source_of,
    structure_of,
)
from fedquilt.data.examples import ClientData, as_examples, num_targets
from fedquilt.data.load import Source, load
from fedquilt.data.population import Population
from fedquilt.deploy.measure import affordable
from fedquilt.errors import ConfigError
from fedquilt.federation.client import SERVER, Client
from fedquilt.federation.state import Setup
from fedquilt.files import write_text
from fedquilt.structure.budget import Budget
from fedquilt.structure.values import as_values, from_values

Value = bool | int | float | str
NodeConfig = Mapping[str, Value]
MakeModel = Callable[[], nn.Module]
GiveData = Callable[[NodeConfig], Any]  # from what a node was started with to its data


def settings_of(run_config: Mapping[str, Value]) -> Config:
    """The settings of a run, as Flower hands them on: by dotted name, lists as text.

    >>> settings_of({"rounds": 3, "method.name": "nefl", "data.budgets": "[1, 0.5]"}).data.budgets
    (1.0, 0.5)
    """
    changes = {
        name: read_value(value) if isinstance(value, str) else value
        for name, value in run_config.items()
    }
    return checked(override({}, changes))


@dataclass(frozen=True, eq=False)
class Site:
    """One node's client, its data by split, and an input like its data."""

    client: Client
    data: Mapping[str, Mapping[int, ClientData]]
    example: Tensor
    num_classes: int
    num_tokens: int | None = None  # of texts
    is_own: bool = False  # its data are no part of the set that the settings name

    @property
    def num_tests(self) -> int:
        """Answers to give on test data of its own."""
        own = self.data["test"].get(self.client.id)
        return 0 if own is None else num_targets(own)


def site_of(config: Config, node: NodeConfig, give: GiveData | None = None) -> Site:
    """What a node has, by the settings of the run and what the node was started with.

    The client's number is ``partition-id``. Its data are what ``give`` returns, or the file or
    folder ``data``, or its part of the set that the settings name.
    """
    number = node.get("partition-id")
    if not isinstance(number, int) or number < 0:
        raise ConfigError(
            "a node must know which client it is: start it with --node-config 'partition-id=0', "
            "another number for each"
        )
    if give is None and "data" not in node:
        return _part(config, number)
    return _own(number, node, give)


def _part(config: Config, number: int) -> Site:
    """A client's part of a set that every node can read."""
    source, people = _everyone(config.model_dump_json())
    if number >= len(people.clients):
        raise ConfigError(
            f"the settings have {len(people.clients)} clients, so that partition-id is less than "
            f"that, got {number}"
        )
    data = {
        split: {c: examples for c, examples in by_client.items() if c in (number, SERVER)}
        for split, by_client in people.data.items()
    }
    client, example = people.clients[number], example_of(source)
    return Site(client, data, example, source.num_classes, source.num_tokens)


@lru_cache(maxsize=2)
def _everyone(settings: str) -> tuple[Source, Population]:
    config = Config.model_validate_json(settings)
    source = source_of(config)
    return source, population_of(config, source)


def _own(number: int, node: NodeConfig, give: GiveData | None) -> Site:
    """A client with data of its own."""
    train: ClientData
    test: ClientData | None
    num_tokens = None
    if give is None:
        source = load(str(node["data"]))
        train, test, num_tokens = source.train, source.test, source.num_tokens
    else:
        given = give(node)
        first, second = given if _is_pair_of_sets(given) else (given, None)
        train, test = as_examples(first), None if second is None else as_examples(second)
    if not len(train):
        raise ConfigError(f"client {number} has no training data; give its node some")
    x, _ = train.batch(torch.zeros(1, dtype=torch.int64))
    tests = {number: test} if test is not None and len(test) else {}
    return Site(
        Client(number, len(train), train.label_set),
        {"train": {number: train}, "test": tests},
        torch.zeros_like(x),
        max(train.label_set) + 1,
        num_tokens,
        is_own=True,
    )


def _is_pair_of_sets(given: Any) -> bool:
    """Whether there is a training set and a test set, and not one set of inputs and labels."""
    is_two = isinstance(given, (tuple, list)) and len(given) == 2
    return is_two and not all(hasattr(part, "dtype") for part in given)


def whole_setup(
    config: Config, site: Site, make: MakeModel | None = None, folder: Path | None = None
) -> Setup:
    """The model that the run is about, as a node makes it, before the method has prepared it.

    What can be cut is looked up in the folder, or else found and written there.
    """
    if make is None:
        shape = tuple(site.example.shape[1:])
        full = fitted(config, shape, site.num_classes, site.num_tokens)
        model = model_of(full)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(config.seed)
            model = make()
    path = None if folder is None else folder / "structure.json"
    if path is not None and path.exists():
        structure = from_values(json.loads(path.read_text()))
    else:
        structure = structure_of(config, model, site.example)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(as_values(structure)))
    return Setup(model, structure, site.example, (site.client,), config.rounds, config.seed)


def with_budget(
    site: Site,
    word: Value | None,
    config: Config,
    make: MakeModel | None = None,
    folder: Path | None = None,
) -> Site:
    """The site with the budget that its node was started with; None: as the settings deal them.

    A budget is a width, or limits (``params=100000 macs=2000000``), or ``auto``: measured on this
    device, the largest width that meets the settings' deadline.
    """
    if word is None:
        return site
    if isinstance(word, (int, float)) and not isinstance(word, bool):
        budget = Budget(float(word))
    elif word == "auto":
        budget = _measured(site, config, make, folder)
    else:
        budget = _limits(str(word))
    return replace(site, client=replace(site.client, budget=budget))


def _limits(text: str) -> Budget:
    try:
        limits = {name: int(value) for name, value in (p.split("=") for p in text.split())}
        return Budget(**limits)
    except (TypeError, ValueError) as problem:
        raise ConfigError(
            "a node's budget is a width, limits such as 'params=100000 macs=2000000', or 'auto', "
            f"got '{text}'"
        ) from problem


def _measured(site: Site, config: Config, make: MakeModel | None, folder: Path | None) -> Budget:
    """What the device affords; measured once, and then read from the folder."""
    path = None if folder is None else folder / "measured.json"
    if path is not None and path.exists():
        return Budget(json.loads(path.read_text())["width"])
    setup = whole_setup(config, site, make, folder)
    optimiser = method_of(config).optimiser  # type: ignore[attr-defined]
    data = site.data["train"][site.client.id]
    budget, found = affordable(setup, data, optimiser, config.flower.deadline)
    if path is not None:
        tried = [vars(candidate) for candidate in found]
        write_text(path, json.dumps({"width": budget.width, "tried": tried}))
    return budget


def state_folder(node: NodeConfig, run_name: str) -> Path:
    """Where a node keeps what stays with its client, by run; only its owner may look."""
    if not run_name.isalnum():
        raise ConfigError(f"a run's name is letters and digits, got '{run_name}'")
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    base = Path(str(node.get("state") or os.environ.get("FEDQUILT_STATE") or home))
    folder = base / "fedquilt" / run_name / str(node.get("partition-id"))
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder
