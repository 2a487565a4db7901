"""Runs on Flower from start to end: an app, a federation to run it, and the finished run."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from fedquilt.config import CLIENTS, Config, checked, override, population_of, resolved, source_of
from fedquilt.data.hub import HUB
from fedquilt.data.load import FOLDERS
from fedquilt.deploy.app import write_app
from fedquilt.deploy.connection import Connection
from fedquilt.deploy.federation import NAME, Federation, NodeConfig, Value, about, require_flower
from fedquilt.errors import ConfigError, FederationError, TrainingError
from fedquilt.runs.configured import opened
from fedquilt.runs.run import Run, last_checkpoint, missing, prepared
from fedquilt.structure.budget import Budget

ENGINES = ("local", "flower", "flower-simulation")
SETS = {"digits", "digits5", *HUB, *FOLDERS}  # whose names are no paths
INSTALLED = "Successfully installed"  # what Flower says before the server's app begins
LOGGED = re.compile(r"(?:INFO|WARNING) :\s+(.*\S)")

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Place:
    """A federation that runs already; its nodes, if it is known what they were started with."""

    connection: Connection
    nodes: tuple[NodeConfig, ...] | None = None
    is_insecure: bool = False

    @property
    def has_data(self) -> bool | None:
        """Whether its nodes have data of their own; None: nobody knows."""
        return None if self.nodes is None else any("data" in node for node in self.nodes)


def place_of(text: str) -> Place:
    """The folder of ``fedquilt up``, or a name in the user's own Flower configuration."""
    require_flower()
    folder = Path(text)
    if not folder.is_dir():
        if len(folder.parts) > 1:
            raise ConfigError(f"there is no federation in '{text}'; start one: fedquilt up")
        return Place(Connection(text))
    words = about(folder)
    if words is None:
        raise ConfigError(f"no federation runs in {text}; start it: fedquilt up --out {text}")
    where = Connection(NAME, folder.resolve() / "flower")
    return Place(where, tuple(words["nodes"]), bool(words["is_insecure"]))


def spelled_out(config: Config, place: Place | None) -> Config:
    """The settings as they are sent: with paths that hold anywhere, and a number of clients.

    Where nodes have data of their own, or may have, server and clients fit the model to those;
    the server then tests on a set only if the settings name one.
    """
    changes = _absolute(config)
    is_theirs = place is not None and place.has_data is not False
    if config.data.clients is None and place is not None:
        changes["data.clients"] = CLIENTS if place.nodes is None else len(place.nodes)
    config = checked(override(config.model_dump(), changes))
    if is_theirs:
        return config
    source = source_of(config)
    config = resolved(config, source)
    count = len(population_of(config, source).clients)
    return checked(override(config.model_dump(), {"data.clients": count}))


def _absolute(config: Config) -> dict[str, Any]:
    """Settings that are paths, as every process finds them."""
    changes: dict[str, Any] = {}
    source, model, weights = config.data.source, config.model.name, config.model.weights
    if source not in SETS and Path(source).expanduser().exists():
        changes["data.source"] = str(Path(source).expanduser().resolve())
    if ":" in model:
        path, _, function = model.rpartition(":")
        changes["model.name"] = f"{Path(path).resolve()}:{function}"
    if weights is not None:
        changes["model.weights"] = str(Path(weights).resolve())
    return changes


def trained(
    config: Config,
    folder: Path,
    tell: Tell,
    *,
    place: Place | None = None,
    simulation: bool = False,
    resume: bool = False,
) -> Run | None:
    """Trains on Flower to the end; None if the run's directory is on another machine.

    In the federation at that place; without one, in one that is started for it, with a node for
    every client, or with simulated ones. Its keys, logs and what clients keep are then in a folder
    beside the run's.
    """
    require_flower()
    new = missing(folder)
    if place is None or place.nodes is not None:  # else the directory is on another machine
        prepared(folder, resume=resume)
    out = {"flower.out": str(folder.resolve()), "flower.resume": resume}
    if simulation or (place is not None and place.is_insecure):
        out["flower.keys"] = False  # a node has another at every start
    config = checked(override(config.model_dump(), out))
    count = config.data.clients or CLIENTS
    resources = {
        "num-supernodes": count,
        "client-resources-num-cpus": config.flower.cpus,
        "client-resources-num-gpus": config.flower.gpus,
    }
    beside = folder.resolve().with_name(f"{folder.resolve().name}.federation")
    with tempfile.TemporaryDirectory() as aside, _at(place, beside, config, simulation, tell) as to:
        app = write_app(Path(aside) / "quilt", config)
        try:
            to.run(app, _only_ours(tell), resources if simulation else None)
        except (FederationError, TrainingError) as problem:
            for empty in new:  # the server has refused the run before it wrote anything
                with suppress(OSError):
                    empty.rmdir()
            raise type(problem)(f"{problem}{_remedy(folder)}") from problem
    if not (folder / "model").is_dir():
        return None
    return opened(folder, model=config.model.name)


@contextmanager
def _at(
    place: Place | None, folder: Path, config: Config, simulation: bool, tell: Tell
) -> Iterator[Connection]:
    """A federation that is there, or one of our own for as long as it takes."""
    if place is not None:
        yield place.connection
        return
    count = 0 if simulation else config.data.clients or CLIENTS
    nodes = [{"partition-id": number} for number in range(count)]
    tell(f"starting a SuperLink and {count} nodes" if nodes else "starting a SuperLink")
    with Federation(folder, nodes, simulation=simulation) as federation:
        federation.wait(config.flower.wait)
        yield federation.connection


def _only_ours(tell: Tell) -> Tell:
    """Hands on what the server's app logs, without what Flower says around it."""
    is_begun = False

    def listen(line: str) -> None:
        nonlocal is_begun
        is_begun = is_begun or line.startswith(INSTALLED)
        found = LOGGED.match(line)
        if is_begun and found:
            tell(found[1])

    return listen


def _remedy(folder: Path) -> str:
    if last_checkpoint(folder) is None:
        return ""
    return f"; go on from its last checkpoint with --resume {folder}"


def node_configs(
    count: int, budgets: str | None = None, data: Sequence[str] = ()
) -> list[dict[str, Value]]:
    """What nodes are started with: budgets are dealt in turn, data are one path for each.

    >>> node_configs(3, "1,auto")[2]
    {'partition-id': 2, 'budget': 1.0}
    """
    nodes: list[dict[str, Value]] = [{"partition-id": number} for number in range(count)]
    if data and len(data) != count:
        raise ConfigError(f"there are {count} nodes and data for {len(data)}; give --data for each")
    for node, path in zip(nodes, data, strict=False):
        if not Path(path).expanduser().exists():
            raise ConfigError(f"there is no data in '{path}'")
        node["data"] = str(Path(path).expanduser().resolve())
    if budgets is not None:
        words = [_budget(word.strip()) for word in budgets.split(",")]
        for node, budget in zip(nodes, cycle(words), strict=False):
            node["budget"] = budget
    return nodes


def _budget(word: str) -> Value:
    """A width, or the words that a node understands."""
    try:
        if word == "auto":
            return word
        if "=" not in word:
            return Budget(float(word)).width
        limits = {name: int(value) for name, value in (part.split("=") for part in word.split())}
        Budget(**limits)
        return word
    except (TypeError, ValueError):
        raise ConfigError(
            "--budgets takes for each node a width, 'auto', or limits such as 'params=100000 "
            f"macs=2000000', got '{word}'"
        ) from None


def sample_app(federation: Federation) -> Path:
    """An app for Flower's own command, with default settings for a federation's nodes."""
    place = Place(federation.connection, federation.nodes)
    config = checked(override({}, {"flower.out": str(federation.folder / "run")}))
    return write_app(federation.folder / "app", spelled_out(config, place))
