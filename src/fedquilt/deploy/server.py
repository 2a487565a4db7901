"""The server's app: the same loop as on one machine, with clients that are nodes.

The run's directory is on the machine where this runs, and so are its checkpoints: a run that was
interrupted, by whatever, goes on from there.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp

from fedquilt.config import (
    CLIENTS,
    Config,
    checked,
    fitted,
    method_of,
    override,
    read,
    source_of,
)
from fedquilt.data.examples import ClientData, Normalise, as_examples
from fedquilt.data.load import Source
from fedquilt.data.population import Population
from fedquilt.deploy.hello import Hello
from fedquilt.deploy.nodes import Nodes
from fedquilt.deploy.registry import read_registry, write_registry
from fedquilt.deploy.site import MakeModel, Site, settings_of, whole_setup
from fedquilt.engines.flower.engine import FlowerEngine, Patience, Traffic
from fedquilt.errors import BudgetError, ConfigError, DataError
from fedquilt.federation.boundary import MOST_CLASSES
from fedquilt.federation.client import SERVER, Client
from fedquilt.federation.state import Setup
from fedquilt.files import write_text
from fedquilt.report.progress import Lines
from fedquilt.runs.configured import begun, refuse_code
from fedquilt.runs.run import Run


def server_app(*, model: MakeModel | None = None, test: Any = None) -> ServerApp:
    """A Flower ServerApp that trains one supernet over all nodes.

    ``model`` makes the whole model, the same as the clients'; by default the settings name it.
    ``test`` is data that the server itself holds, to evaluate on; by default that of the set which
    the settings name, if it is on this machine and clients have their parts of it.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        run = trained(grid, settings_of(context.run_config), model=model, test=test)
        log(INFO, "the model is in %s", run.folder)

    return app


def trained(grid: Grid, config: Config, *, model: MakeModel | None = None, test: Any = None) -> Run:
    """Trains over the nodes of a grid, as the settings say."""
    if config.flower.out is None:
        raise ConfigError("a run on Flower needs a directory for its results: set flower.out")
    folder = Path(config.flower.out)
    config = _resumed(config, folder) if config.flower.resume else _named(config)
    name = config.flower.name
    assert name is not None
    known = read_registry(folder) if config.flower.resume else {}
    nodes = Nodes(
        grid,
        name,
        lambda line: log(WARNING, line),
        registered=known,
        by_key=config.flower.keys,
    )
    expected = config.flower.nodes or len(known) or config.data.clients or CLIENTS
    there = nodes.gathered(expected, config.flower.wait)
    log(INFO, "run %s: %s clients are there", name, len(there))
    if not known:
        _leave_out_others(nodes, there, config, makes_model=model is not None)
    hellos = {client: one.hello for client, one in nodes.registered.items()}
    held_out, scale = _held_out(config, test, hellos)
    site = _as_seen(hellos)
    if model is None:
        shape = tuple(site.example.shape[1:])
        config = fitted(config, shape, site.num_classes, site.num_tokens)
    whole = whole_setup(config, site, model)
    if not known:
        for client, why in _unable(config, whole, hellos).items():
            nodes.leave_out(client, why)
            del hellos[client]
    nodes.close()
    people = _population(hellos, held_out)
    whole = replace(whole, clients=people.clients)
    traffic = Traffic()

    def engine(setup: Setup, _: Population, __: Path | None) -> FlowerEngine:
        write_registry(folder, nodes.registered)
        return FlowerEngine(
            grid,
            nodes.find,
            setup.model,
            setup.structure,
            held_out,
            run_name=name,
            patience=Patience(config.flower.deadline, config.flower.patience),
            traffic=traffic,
        )

    resume, named = config.flower.resume, model is None
    train = begun(
        config,
        whole,
        people,
        folder,
        resume=resume,
        scale=scale,
        engine=engine,
        named=named,
        present=lambda: nodes.seen,
    )
    run = train(Lines(lambda line: log(INFO, line), config.rounds))
    log(INFO, "%s", traffic)
    write_text(folder / "traffic.json", json.dumps(asdict(traffic)))
    return run


def _named(config: Config) -> Config:
    """The settings with a name for the run."""
    if config.flower.name is not None:
        return config
    return checked(override(config.model_dump(), {"flower.name": secrets.token_hex(8)}))


def _resumed(config: Config, folder: Path) -> Config:
    """The settings that the run was started with; how it goes about it may be another."""
    started = checked(read(folder / "config.toml"))
    refuse_code(started, folder, trust=started.model.name == config.model.name)
    flower = {**config.flower.model_dump(), "name": started.flower.name}
    changes = {"rounds": max(config.rounds, started.rounds), "flower": flower}
    return checked(override(started.model_dump(), changes))


def _held_out(
    config: Config, test: Any, hellos: Mapping[int, Hello]
) -> tuple[ClientData | None, Normalise | None]:
    """What the server itself evaluates on, and how its inputs were scaled if a set says so."""
    if test is not None:
        return as_examples(test), None
    has_own = 2 * sum(hello.is_own for hello in hellos.values()) > len(hellos)
    source = None if has_own else _at_hand(config)
    return (None, None) if source is None else (source.test, source.scale)


def _at_hand(config: Config) -> Source | None:
    """The set that the settings name, if it is on this machine."""
    try:
        return source_of(config)
    except DataError as problem:
        log(INFO, "the server evaluates on its clients alone: %s", problem)
        return None


def _population(hellos: Mapping[int, Hello], held_out: ClientData | None) -> Population:
    """Clients whose data are elsewhere."""
    people = tuple(hello.client for hello in hellos.values())
    tests = {} if held_out is None else {SERVER: held_out}
    away = frozenset(hello.client.id for hello in hellos.values() if hello.has_tests)
    return Population(people, {}, tests, away=away)


def _leave_out_others(
    nodes: Nodes, hellos: Mapping[int, Hello], config: Config, *, makes_model: bool
) -> None:
    """Goes on with the clients that agree about inputs and classes, if most do.

    The classes that the settings name are all that there are; a model that is made elsewhere has
    those that it has. Otherwise clients must agree, since each makes the model by its own.
    """
    given = (config.model.model_extra or {}).get("num_classes")
    needs_same = given is None and not makes_model

    def told(hello: Hello) -> str:
        return f"{hello.look}, {hello.num_classes} classes" if needs_same else hello.look

    ((most, count),) = Counter(map(told, hellos.values())).most_common(1)
    for client, hello in hellos.items():
        if told(hello) != most:
            why = f"client {client} has inputs of {told(hello)}, most have {most}"
            if 2 * count <= len(hellos):
                raise DataError(f"{why}; all must be alike, or model.num_classes be set")
            nodes.leave_out(client, f"{why}; all must be alike, or model.num_classes be set")
        elif isinstance(given, int) and hello.num_classes > given:
            nodes.leave_out(client, f"client {client} has {hello.num_classes} classes of {given}")


def _unable(config: Config, whole: Setup, hellos: Mapping[int, Hello]) -> dict[int, str]:
    """Clients for whose labels or budgets there is no net, and why; refused, if that is all."""
    classes = whole.structure.classes
    outputs = MOST_CLASSES if classes is None else whole.structure.groups[classes].size
    found: dict[int, str] = {}
    for number, hello in hellos.items():
        highest = max(hello.client.labels, default=0)
        if highest >= outputs:
            found[number] = f"client {number} has the label {highest}, of {outputs} classes"
    if len(found) == len(hellos):
        raise DataError(f"{next(iter(found.values()))}, and others are no better")
    able = tuple(hello.client for number, hello in hellos.items() if number not in found)
    try:
        _plan(config, replace(whole, clients=able))
    except BudgetError:
        beyond = {client.id: why for client in able if (why := _refusal(config, whole, client))}
        if not beyond or len(beyond) == len(able):
            raise
        found |= beyond
    return found


def _refusal(config: Config, whole: Setup, client: Client) -> str | None:
    """Why a method has no net for a client; None if it has."""
    try:
        _plan(config, replace(whole, clients=(client,)))
    except BudgetError as problem:
        return str(problem)
    return None


def _plan(config: Config, whole: Setup) -> None:
    """Tries what a method asks of clients at first."""
    method = method_of(config)
    setup = method.prepared(whole)
    state = replace(method.start(setup), phase=method.phases(setup)[0].name)
    method.plan(setup, state, setup.clients)


def _as_seen(hellos: Mapping[int, Hello]) -> Site:
    """What all clients have in common: the look of an input, and the classes of any of them."""
    first = next(iter(hellos.values()))
    classes = max(hello.num_classes for hello in hellos.values())
    return Site(first.client, {}, first.example, classes, first.num_tokens)


server = server_app()
