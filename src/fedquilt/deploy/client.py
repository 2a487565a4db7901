"""The client's app: says what it has when asked, and does what it is ordered.

What must stay with the client stays on its disk, by run and client: a deployed client is a new
process for every message.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod

from fedquilt.config import Config, method_of
from fedquilt.deploy.deadline import within
from fedquilt.deploy.hello import Hello
from fedquilt.deploy.site import (
    GiveData,
    MakeModel,
    NodeConfig,
    Site,
    settings_of,
    site_of,
    state_folder,
    whole_setup,
    with_budget,
)
from fedquilt.engines.flower import letters
from fedquilt.engines.flower.engine import digest
from fedquilt.engines.flower.letters import NO_STATE, Envelope
from fedquilt.engines.kept import KeptStates, read, write
from fedquilt.engines.worker import do_task, sentence
from fedquilt.errors import ConfigError
from fedquilt.federation.state import Setup
from fedquilt.training.descent import one_thread
from fedquilt.training.recipe import Workbench


def client_app(
    *,
    model: MakeModel | None = None,
    data: GiveData | None = None,
    recipes: Sequence[type] = (),
    mods: Sequence[Mod] = (),
) -> ClientApp:
    """A Flower ClientApp that trains whatever subnets it is sent.

    ``model`` makes the whole model, the same as the server's; by default the settings name it.
    ``data`` gives a node's data, from what the node was started with: a training set, or a training
    and a test set, as ``fedquilt.clients`` takes them. ``recipes`` are classes of your own that the
    server may ask for. ``mods`` are Flower's.
    """
    office = _Office(model, data, tuple(recipes))
    app = ClientApp(mods=list(mods))

    @app.query()
    def hello(message: Message, context: Context) -> Message:
        return _replied(message, lambda: office.hello(message, context))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return _replied(message, lambda: office.work(message, context))

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return _replied(message, lambda: office.work(message, context))

    return app


def _replied(message: Message, work: Callable[[], RecordDict]) -> Message:
    """The reply; what goes wrong is told in a sentence, so that the server can tell it too."""
    try:
        content = work()
    except Exception as problem:
        content = letters.apology(sentence(problem))
    return Message(content, reply_to=message)


class _Office:
    """Does what messages ask for.

    A simulation sends a copy of it to its workers with every message. Copies have the same name.
    """

    def __init__(
        self, make: MakeModel | None, give: GiveData | None, recipes: tuple[type, ...]
    ) -> None:
        self._make, self._give, self._recipes = make, give, recipes
        self._places: dict[tuple[str, str], _Place] = {}
        self._name = secrets.token_hex(8)

    def hello(self, message: Message, context: Context) -> RecordDict:
        """What the server may know about this client."""
        config = settings_of(context.run_config)
        run_name = letters.read_name(message.content)
        node: NodeConfig = context.node_config
        folder = state_folder(node, run_name)
        site = site_of(config, node, self._give)
        site = with_budget(site, node.get("budget"), config, self._make, folder)
        return Hello.of(site).content()

    def work(self, message: Message, context: Context) -> RecordDict:
        """Does an order within its deadline; what is to be kept is kept."""
        envelope = letters.read_envelope(message.content)
        return within(envelope.deadline, lambda: self._work(message, context, envelope))

    def _work(self, message: Message, context: Context, envelope: Envelope) -> RecordDict:
        place = self._place(context, envelope)
        task = letters.read_order(message.content, place.bench.structure, self._recipes)
        if task.client != place.client:
            raise ConfigError(f"an order for client {task.client} came to client {place.client}")
        with one_thread():
            update, state = do_task(task, place.bench, place.state(envelope.state))
        if state is not None:
            write(place.states.path(place.client, envelope.next), state)
            place.states.sync({place.client: envelope.next})  # the server will count on it
        written = {envelope.next} if state is not None else set()
        place.keep_only({*envelope.keep, *written})
        return letters.answer(update, place.bench.structure, envelope, kept=state is not None)

    def _place(self, context: Context, envelope: Envelope) -> _Place:
        """Where a client works, made once in a process for each run and client."""
        node: NodeConfig = context.node_config
        key = envelope.run, json.dumps(dict(node), sort_keys=True)
        if key not in self._places:
            if len(self._places) >= MOST_PLACES:
                self._places.pop(next(iter(self._places)))
            self._places[key] = self._made(settings_of(context.run_config), node, envelope.run)
        place = self._places[key]
        if place.digest != envelope.structure:
            raise ConfigError(
                "the server's model is cut in another way than this client's; do both have the "
                "same model, method and version of fedquilt? If clients have different labels, "
                "set model.num_classes"
            )
        return place

    def _made(self, config: Config, node: NodeConfig, run_name: str) -> _Place:
        folder = state_folder(node, run_name)
        site = site_of(config, node, self._give)
        setup = self._prepared(config, site, run_name, folder)
        return _Place(site, Workbench(setup.model, setup.structure, site.data), folder)

    def _prepared(self, config: Config, site: Site, run_name: str, folder: Path) -> Setup:
        """The net of a run as its method wants it: one for all clients that a process works for."""
        key = run_name, site.example.shape, site.num_classes, site.num_tokens
        nets = _nets(self._name)
        net = nets.get(key)
        if net is None:
            net = method_of(config).prepared(whole_setup(config, site, self._make, folder))
            nets.clear()
            nets[key] = net
        return net


@lru_cache(maxsize=2)
def _nets(office: str) -> dict[tuple[object, ...], Setup]:
    """What this process has made for an office and all of its copies.

    Caches hold on to structures: one for each message would fill the memory.
    """
    return {}


MOST_PLACES = 4  # of a process that works for several clients in turn


class _Place:
    """A client's workbench, and what it keeps on disk."""

    def __init__(self, site: Site, bench: Workbench, folder: Path) -> None:
        self.client, self.bench = site.client.id, bench
        self.states = KeptStates(folder / "kept")
        self.digest = digest(bench.structure)

    def state(self, version: int) -> Any:
        """What the client kept, of the version that the server goes on from."""
        if version == NO_STATE:
            return None
        path = self.states.path(self.client, version)
        if not path.exists():
            raise ConfigError(
                f"client {self.client} has lost what it kept (version {version} is not in "
                f"{path.parent}); restore it, or start the run anew"
            )
        return read(path)

    def keep_only(self, versions: set[int]) -> None:
        """Removes what will not be asked for again."""
        self.states.forget_others(*({self.client: version} for version in versions))


client = client_app()
