"""What a node of a federation has: a client, its data, its budget, and a folder for its state.

Flower starts a new process for every message to a deployed client. So what takes long (tracing a
model, measuring a device) is done once per run, and its result stored on disk.
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

from fedquilt.data import ClientData, Dataset, count_targets, load_dataset, to_examples
from fedquilt.data.client_sets import split_last
from fedquilt.data.population import Population
from fedquilt.data.transformed import transform_examples
from fedquilt.deploy.device_profile import find_affordable_width
from fedquilt.deploy.node_config import NodeConfig, Value, parse_budget
from fedquilt.devices import CPU
from fedquilt.errors import ConfigError
from fedquilt.federation.client import SERVER, Client
from fedquilt.federation.state import Setup
from fedquilt.files import write_text
from fedquilt.settings.load import load_config, override_settings
from fedquilt.settings.resolve import (
    build_method,
    build_model,
    build_population,
    build_structure,
    build_task,
    fit_model_to_data,
    load_source,
    make_example,
    parse_pipeline,
)
from fedquilt.settings.schema import Config
from fedquilt.settings.toml import parse_value
from fedquilt.structure.budget import Budget
from fedquilt.structure.serialization import from_json, to_json
from fedquilt.structure.tensors import find_tensors

ModelFactory = Callable[[], nn.Module]
DataFactory = Callable[[NodeConfig], Any]  # from a node config to the data of the node


def parse_run_config(run_config: Mapping[str, Value]) -> Config:
    """Parses Flower's run config: settings by dotted name, lists and tables as text.

    >>> parse_run_config({"method.name": "nefl", "data.budgets": "[1, 0.5]"}).data.budgets
    (1.0, 0.5)
    """
    changes = {
        name: parse_value(value) if isinstance(value, str) else value
        for name, value in run_config.items()
    }
    return load_config(override_settings({}, changes))


@dataclass(frozen=True, eq=False)
class NodeContext:
    """A node's client, its data by split, and an example of its inputs."""

    client: Client
    data: Mapping[str, Mapping[int, ClientData]]
    example: Tensor
    num_classes: int
    num_tokens: int | None = None  # of texts
    has_own_data: bool = False  # its data are not from the dataset that the settings name

    @property
    def num_tests(self) -> int:
        """The number of targets in its own test data."""
        own = self.data["test"].get(self.client.id)
        return 0 if own is None else count_targets(own)


def make_node_context(
    config: Config, node: NodeConfig, load_data: DataFactory | None = None
) -> NodeContext:
    """Makes the context of a node from the settings of a run and the node's own config.

    The client's number is ``partition-id``. Its data are what ``load_data`` returns, or the file or
    folder ``data``, or its part of the dataset that the settings name.
    """
    number = node.get("partition-id")
    if not isinstance(number, int) or number < 0:
        raise ConfigError(
            "a node needs the number of its client: start it with --node-config 'partition-id=0', "
            f"with another number for each node; got {number!r}"
        )
    if load_data is None and "data" not in node:
        return _make_partition_context(config, number)
    return _make_own_data_context(config, number, node, load_data)


def _make_partition_context(config: Config, number: int) -> NodeContext:
    """The context of a node whose data are a part of the dataset that the settings name."""
    source, population = _load_population(config.model_dump_json())
    if number >= len(population.clients):
        raise ConfigError(
            f"partition-id must be less than the {len(population.clients)} clients of the "
            f"settings, got {number}"
        )
    data = {
        split: {c: by_client[c] for c in (number, SERVER) if c in by_client}
        for split, by_client in population.data.items()
    }
    client, example = population.clients[number], make_example(source)
    return NodeContext(client, data, example, source.num_classes, source.num_tokens)


@lru_cache(maxsize=2)
def _load_population(settings: str) -> tuple[Dataset, Population]:
    config = Config.model_validate_json(settings)
    source = load_source(config)
    return source, build_population(config, source)


def _make_own_data_context(
    config: Config, number: int, node: NodeConfig, load_data: DataFactory | None
) -> NodeContext:
    """The context of a node with its own data."""
    train: ClientData
    test: ClientData | None
    num_tokens = None
    if load_data is None:
        source = load_dataset(str(node["data"]))
        train, test, num_tokens = source.train, source.test, source.num_tokens
    else:
        loaded = load_data(node)
        first, second = loaded if _is_pair_of_datasets(loaded) else (loaded, None)
        train, test = to_examples(first), None if second is None else to_examples(second)
    pipeline = parse_pipeline(config.data)
    if pipeline is not None:
        train = transform_examples(train, pipeline)
        test = None if test is None else transform_examples(test, pipeline)
    if not len(train):
        raise ConfigError(f"client {number} has no training data; start its node with some")
    train, held_back = split_last(train, config.data.validation)
    x, _ = train.batch(torch.zeros(1, dtype=torch.int64))
    tests = {number: test} if test is not None and len(test) else {}
    return NodeContext(
        Client(number, len(train), train.label_set),
        {
            "train": {number: train},
            "test": tests,
            **({"validation": {number: held_back}} if len(held_back) else {}),
        },
        torch.zeros_like(x),
        max(train.label_set, default=_count_outputs(train) - 1) + 1,
        num_tokens,
        has_own_data=True,
    )


def _count_outputs(train: ClientData) -> int:
    """How many numbers a target has, where targets are no class numbers."""
    _, y = train.batch(torch.zeros(1, dtype=torch.int64))
    return max(1, sum(tensor[0].numel() for tensor in find_tensors(y)))


def _is_pair_of_datasets(loaded: Any) -> bool:
    """Whether these are a training set and a test set, and not the inputs and labels of one."""
    is_pair = isinstance(loaded, (tuple, list)) and len(loaded) == 2
    return is_pair and not all(hasattr(part, "dtype") for part in loaded)


def make_full_setup(
    config: Config,
    node: NodeContext,
    make_model: ModelFactory | None = None,
    folder: Path | None = None,
) -> Setup:
    """Makes the setup with the full model, before the method prepares it.

    The structure is read from the folder, or else traced and written there.
    """
    if make_model is None:
        shape = tuple(node.example.shape[1:])
        full = fit_model_to_data(config, shape, node.num_classes, node.num_tokens)
        model = build_model(full)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(config.seed)
            model = make_model()
    path = None if folder is None else folder / "structure.json"
    if path is not None and path.exists():
        structure = from_json(json.loads(path.read_text()))
    else:
        structure = build_structure(config, model, node.example)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(to_json(structure)))
    task, client = build_task(config), node.client
    client = client if task.has_classes else replace(client, labels=())
    return Setup(model, structure, node.example, (client,), config.rounds, config.seed, task=task)


def assign_budget(
    node: NodeContext,
    value: Value | None,
    config: Config,
    make_model: ModelFactory | None = None,
    folder: Path | None = None,
    device: torch.device = CPU,
) -> NodeContext:
    """Sets the budget that a node was started with; without one, the settings' budget stays.

    Args:
        node: The node.
        value: A width, limits (``params=100000 macs=2000000``), or ``auto``: the largest width
            that meets the settings' deadline, measured on this device.
        config: The settings of the run.
        make_model: Builds the full model; by default the settings name it.
        folder: Where the result of a measurement is stored.
        device: What a measurement trains on.
    """
    if value is None:
        return node
    budget = parse_budget(value) or _measure_budget(node, config, make_model, folder, device)
    return replace(node, client=replace(node.client, budget=budget))


def _measure_budget(
    node: NodeContext,
    config: Config,
    make_model: ModelFactory | None,
    folder: Path | None,
    device: torch.device,
) -> Budget:
    """Measures what the device affords, once; later calls read the result from the folder."""
    path = None if folder is None else folder / "device_profile.json"
    if path is not None and path.exists():
        return Budget(json.loads(path.read_text())["width"])
    setup = make_full_setup(config, node, make_model, folder)
    local_training = build_method(config).local_training  # type: ignore[attr-defined]
    data = node.data["train"][node.client.id]
    deadline = config.flower.deadline
    budget, measurements = find_affordable_width(
        setup, data, local_training, deadline, device=device
    )
    if path is not None:
        values = [vars(measurement) for measurement in measurements]
        write_text(path, json.dumps({"width": budget.width, "measurements": values}))
    return budget


def get_state_folder(node: NodeConfig, run_name: str) -> Path:
    """The folder of a client's state in a run; it is created, readable by its owner only."""
    if not run_name.isalnum():
        raise ConfigError(f"the name of a run must be letters and digits, got '{run_name}'")
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    base = Path(str(node.get("state") or os.environ.get("FEDQUILT_STATE") or home))
    folder = base / "fedquilt" / run_name / str(node.get("partition-id"))
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder
