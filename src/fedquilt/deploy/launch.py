"""Trains on Flower from start to end: writes an app, runs it in a federation, opens the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedquilt.customize.bundle import has_bundle
from fedquilt.data.load import DATASETS
from fedquilt.deploy.app_folder import write_app
from fedquilt.deploy.federation import (
    CONNECTION_NAME,
    Federation,
    read_federation_info,
    require_flower,
)
from fedquilt.deploy.flower_cli import SuperLinkConnection
from fedquilt.deploy.node_config import NodeConfig
from fedquilt.engines.scratch import ScratchDirectory
from fedquilt.errors import ConfigError, FederationError, TrainingError
from fedquilt.runs.checkpoint import count_saved_rounds
from fedquilt.runs.directory import RunDirectory
from fedquilt.runs.from_config import open_configured_run
from fedquilt.runs.run import Run
from fedquilt.settings.load import load_config, override_settings
from fedquilt.settings.resolve import build_population, load_source, resolve_config
from fedquilt.settings.schema import DEFAULT_CLIENTS, Config
from fedquilt.user_code import is_call, is_function_path

ENGINES = ("local", "flower", "flower-simulation")
DATASET_NAMES = frozenset(DATASETS)  # which are not paths

OnOutput = Callable[[str], None]


@dataclass(frozen=True)
class RunningFederation:
    """A federation that is already running.

    Args:
        connection: Its SuperLink.
        nodes: The configuration of its nodes; None if it is not known.
        is_insecure: Nodes have no lasting keys.
    """

    connection: SuperLinkConnection
    nodes: tuple[NodeConfig, ...] | None = None
    is_insecure: bool = False

    @property
    def has_own_data(self) -> bool | None:
        """Whether its nodes have their own data; None if it is not known."""
        return None if self.nodes is None else any("data" in node for node in self.nodes)


def find_federation(text: str) -> RunningFederation:
    """Finds a federation by the folder of ``fedquilt up``, or by its name in Flower's config."""
    require_flower()
    folder = Path(text)
    if not folder.is_dir():
        if len(folder.parts) > 1:
            raise ConfigError(f"there is no federation in '{text}'; start one: fedquilt up")
        return RunningFederation(SuperLinkConnection(text))
    info = read_federation_info(folder)
    if info is None:
        raise ConfigError(f"no federation is running in {text}; start it: fedquilt up --out {text}")
    connection = SuperLinkConnection(CONNECTION_NAME, folder.resolve() / "flower")
    return RunningFederation(connection, tuple(info["nodes"]), bool(info["is_insecure"]))


def resolve_for_nodes(config: Config, federation: RunningFederation | None) -> Config:
    """Completes settings before they are sent: absolute paths, and the number of clients.

    Where nodes have their own data, or may have, server and clients fit the model to those; the
    server then tests on a dataset only if the settings name one.
    """
    changes = _resolve_paths(config)
    if config.data.clients is None and federation is not None:
        changes["data.clients"] = (
            DEFAULT_CLIENTS if federation.nodes is None else len(federation.nodes)
        )
    config = load_config(override_settings(config.model_dump(), changes))
    if federation is not None and federation.has_own_data is not False:
        return config
    source = load_source(config)
    config = resolve_config(config, source)
    count = len(build_population(config, source).clients)
    return load_config(override_settings(config.model_dump(), {"data.clients": count}))


def _resolve_paths(config: Config) -> dict[str, Any]:
    """The settings that are paths, made absolute for processes with another working directory."""
    changes: dict[str, Any] = {}
    source, model, weights = config.data.source, config.model.name, config.model.weights
    if source not in DATASET_NAMES and Path(source).expanduser().exists():
        changes["data.source"] = str(Path(source).expanduser().resolve())
    if ":" in model:
        changes["model.name"] = _resolve_function(model)
    if weights is not None:
        changes["model.weights"] = str(Path(weights).resolve())
    if config.run.trackers:
        changes["run.trackers"] = [
            _resolve_function(text) if is_function_path(text) and not is_call(text) else text
            for text in config.run.trackers
        ]
    return changes


def _resolve_function(text: str) -> str:
    """A path of a function, absolute if it is in a file."""
    path, _, function = text.rpartition(":")
    return f"{Path(path).resolve()}:{function}"


def train_on_flower(
    config: Config,
    folder: Path,
    on_output: OnOutput,
    *,
    federation: RunningFederation | None = None,
    simulation: bool = False,
    resume: bool = False,
) -> Run | None:
    """Trains on Flower to the end.

    Args:
        config: The settings, from ``resolve_for_nodes``.
        folder: The run's directory, on the machine of the server.
        on_output: Called with every line for users.
        federation: The federation to train in. None starts one with a node for every client, in a
            folder beside the run's.
        simulation: Lets Flower simulate the nodes.
        resume: Goes on from the run's last checkpoint.

    Returns:
        The run; None if its directory is on another machine.
    """
    require_flower()
    directory = RunDirectory(folder)
    if federation is None or federation.nodes is not None:  # else it is on another machine
        directory.check(resume=resume)
    changes = {"flower.out": str(folder.resolve()), "flower.resume": resume}
    if simulation or (federation is not None and federation.is_insecure):
        changes["flower.keys"] = False  # such nodes have another key after every start
    config = load_config(override_settings(config.model_dump(), changes))
    own_folder = folder.resolve().with_name(f"{folder.resolve().name}.federation")
    resources = _make_simulation_config(config) if simulation else None
    with (
        ScratchDirectory() as scratch,
        _connect(federation, own_folder, config, simulation, on_output) as connection,
    ):
        app = write_app(scratch / "quilt", config)
        try:
            connection.run(app, on_output, resources)
        except (FederationError, TrainingError) as problem:
            raise type(problem)(f"{problem}{_suggest_resume(directory)}") from problem
    if not has_bundle(directory.model):
        return None
    return open_configured_run(folder, model=config.model.name)


def _make_simulation_config(config: Config) -> dict[str, int | float]:
    """Flower's settings of a simulation."""
    return {
        "num-supernodes": config.data.clients or DEFAULT_CLIENTS,
        "client-resources-num-cpus": config.flower.cpus,
        "client-resources-num-gpus": config.flower.gpus,
    }


@contextmanager
def _connect(
    federation: RunningFederation | None,
    own_folder: Path,
    config: Config,
    simulation: bool,
    on_output: OnOutput,
) -> Iterator[SuperLinkConnection]:
    """Connects to a running federation, or to one that is started for this run."""
    if federation is not None:
        yield federation.connection
        return
    count = 0 if simulation else config.data.clients or DEFAULT_CLIENTS
    nodes = [{"partition-id": number} for number in range(count)]
    on_output(f"starting a SuperLink and {count} nodes" if nodes else "starting a SuperLink")
    with Federation(own_folder, nodes, simulation=simulation) as own:
        own.wait(config.flower.wait)
        yield own.connection


def _suggest_resume(directory: RunDirectory) -> str:
    if not count_saved_rounds(directory.checkpoints):
        return ""
    return f"; resume it from its last checkpoint: fedquilt train --resume {directory}"


def write_sample_app(federation: Federation) -> Path:
    """Writes an app for Flower's own command, with default settings for a federation's nodes."""
    running = RunningFederation(federation.connection, federation.nodes)
    config = load_config(override_settings({}, {"flower.out": str(federation.folder / "run")}))
    return write_app(federation.folder / "app", resolve_for_nodes(config, running))
