"""The server's app: the training loop of one machine, with clients that are Flower nodes.

The run's directory and its checkpoints are on the machine where this app runs. An interrupted run
can be resumed from there.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, replace
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp

from fedquilt.data import ClientData, to_examples
from fedquilt.data.population import Population
from fedquilt.deploy.eligibility import find_inconsistent_clients, find_unsupported_clients
from fedquilt.deploy.flower_cli import LOG_MARKER
from fedquilt.deploy.flower_internals import is_simulated
from fedquilt.deploy.node_context import (
    ModelFactory,
    NodeContext,
    make_full_setup,
    parse_run_config,
)
from fedquilt.deploy.node_info import NodeInfo
from fedquilt.deploy.node_manager import NodeManager
from fedquilt.deploy.registry import read_registry, write_registry
from fedquilt.engines.dispatch import TASKS_PER_WORKER
from fedquilt.engines.flower.engine import FlowerEngine, Timeouts, Traffic
from fedquilt.errors import ConfigError, DataError
from fedquilt.federation.client import SERVER
from fedquilt.federation.state import Setup
from fedquilt.files import write_text
from fedquilt.runs.directory import RunDirectory
from fedquilt.runs.engines import count_cores
from fedquilt.runs.event_lines import EventLines
from fedquilt.runs.from_config import plan_run_over, read_started_config, require_trust
from fedquilt.runs.plan import resume_run, start_run
from fedquilt.runs.run import Run
from fedquilt.settings.load import load_config, override_settings
from fedquilt.settings.resolve import fit_model_to_data, list_code, load_source
from fedquilt.settings.schema import DEFAULT_CLIENTS, Config


def make_server_app(*, model: ModelFactory | None = None, test: Any = None) -> ServerApp:
    """Makes a Flower ServerApp that trains one supernet over all nodes.

    Args:
        model: Builds the full model, the same as on the clients. By default the settings name it.
        test: Held-out data that the server evaluates on. By default those of the dataset which the
            settings name, if it is on this machine and clients train on parts of it.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        run = train_over_grid(grid, parse_run_config(context.run_config), model=model, test=test)
        _log(f"the model is in {run.folder}")

    return app


def train_over_grid(
    grid: Grid, config: Config, *, model: ModelFactory | None = None, test: Any = None
) -> Run:
    """Trains over the nodes of a grid, with these settings; see ``make_server_app``."""
    if config.flower.out is None:
        raise ConfigError("a run on Flower needs a directory for its results; set flower.out")
    if config.run.clients_per_pass != 1:
        raise ConfigError(
            "on Flower each client trains at its own node, got run.clients_per_pass = "
            f"{config.run.clients_per_pass!r}; leave it out"
        )
    folder = Path(config.flower.out)
    is_resumed = config.flower.resume
    config = _restore_config(config, folder) if is_resumed else _ensure_run_name(config)
    nodes = _gather_nodes(grid, config, folder, has_own_model=model is not None)
    held_out = _load_held_out(config, test, nodes.infos)
    config, setup = _make_setup(config, nodes, model)
    population = _make_population(config, nodes.infos, held_out)
    traffic = Traffic()

    def make_engine(setup: Setup, _: Population, __: Path | None) -> FlowerEngine:
        write_registry(folder, nodes.registered)
        return FlowerEngine(
            grid,
            nodes.find_online_nodes,
            setup.model,
            setup.structure,
            held_out,
            run_name=str(config.flower.name),
            timeouts=Timeouts(config.flower.deadline, config.flower.timeout),
            traffic=traffic,
            window=TASKS_PER_WORKER * count_cores() if is_simulated(grid) else None,
        )

    plan = plan_run_over(
        config,
        replace(setup, clients=population.clients),
        population,
        folder,
        engine=make_engine,
        is_named=model is None,
        available=lambda: nodes.seen_clients,
    )
    prepared = resume_run(plan) if is_resumed else start_run(plan)
    run = prepared.train([EventLines(_log, config.rounds)])
    _log(str(traffic))
    write_text(RunDirectory(folder).traffic_file, json.dumps(asdict(traffic)))
    return run


def _log(line: str, level: int = INFO) -> None:
    """Logs a line for users; ``fedquilt train`` shows these lines, and no others of the log."""
    log(level, "%s%s", LOG_MARKER, line)


def _ensure_run_name(config: Config) -> Config:
    """The settings with a name for the run, under which clients store their state."""
    if config.flower.name is not None:
        return config
    name = secrets.token_hex(8)
    return load_config(override_settings(config.model_dump(), {"flower.name": name}))


def _restore_config(config: Config, folder: Path) -> Config:
    """The settings that a run was started with; rounds may be more, and ``flower`` may change."""
    stored = read_started_config(RunDirectory(folder))
    named = list_code(config)
    require_trust(
        {n: path for n, path in list_code(stored).items() if named.get(n) != path}, folder
    )
    flower = {**config.flower.model_dump(), "name": stored.flower.name}
    changes = {"rounds": max(config.rounds, stored.rounds), "flower": flower}
    return load_config(override_settings(stored.model_dump(), changes))


def _gather_nodes(grid: Grid, config: Config, folder: Path, *, has_own_model: bool) -> NodeManager:
    """Waits for the nodes of a run; excludes clients that do not fit the others of a new run."""
    registered = read_registry(folder) if config.flower.resume else {}
    nodes = NodeManager(
        grid,
        str(config.flower.name),
        lambda line: _log(line, WARNING),
        registered=registered,
        by_key=config.flower.keys,
    )
    count = config.flower.nodes or len(registered) or config.data.clients or DEFAULT_CLIENTS
    online = nodes.wait_for_nodes(count, config.flower.wait)
    _log(f"run {config.flower.name}: {len(online)} clients are online")
    if not registered:
        reasons = find_inconsistent_clients(online, config, has_own_model=has_own_model)
        for client, reason in reasons.items():
            nodes.exclude(client, reason)
    return nodes


def _make_setup(
    config: Config, nodes: NodeManager, model: ModelFactory | None
) -> tuple[Config, Setup]:
    """Fits the model to the clients' data; excludes clients that it does not support."""
    common = _make_common_context(nodes.infos)
    if model is None:
        shape = tuple(common.example.shape[1:])
        config = fit_model_to_data(config, shape, common.num_classes, common.num_tokens)
    setup = make_full_setup(config, common, model)
    if not nodes.is_closed:
        for client, reason in find_unsupported_clients(nodes.infos, config, setup).items():
            nodes.exclude(client, reason)
    nodes.close_registration()
    return config, setup


def _make_common_context(infos: Mapping[int, NodeInfo]) -> NodeContext:
    """What all clients have in common: the shape of an input, and the classes of any of them."""
    first = next(iter(infos.values()))
    num_classes = max(info.num_classes for info in infos.values())
    return NodeContext(first.client, {}, first.example, num_classes, first.num_tokens)


def _load_held_out(config: Config, test: Any, infos: Mapping[int, NodeInfo]) -> ClientData | None:
    """The data that the server evaluates on; None if it has none."""
    if test is not None:
        return to_examples(test)
    if 2 * sum(info.has_own_data for info in infos.values()) > len(infos):
        return None
    try:
        return load_source(config).test
    except DataError as problem:
        _log(f"only clients evaluate, the server has no data: {problem}")
        return None


def _make_population(
    config: Config, infos: Mapping[int, NodeInfo], held_out: ClientData | None
) -> Population:
    """The clients, whose data stay on their nodes, and the server's held-out data."""
    clients = tuple(info.client for info in infos.values())
    tests = {} if held_out is None else {SERVER: held_out}
    remote = frozenset(info.client.id for info in infos.values() if info.has_tests)
    validators = frozenset(infos) if config.data.validation else frozenset()
    return Population(clients, {}, tests, remote_testers=remote, remote_validators=validators)


app = make_server_app()
