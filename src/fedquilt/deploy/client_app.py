"""The client's app: tells the server about its node, and runs the tasks that it is sent.

Flower starts a new process for every message to a deployed client. So a client's state is on its
disk, by run and client.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from torch import Tensor

from fedquilt.deploy.deadline import run_with_deadline
from fedquilt.deploy.node_config import NodeConfig, find_node_device, find_secure_threshold
from fedquilt.deploy.node_context import (
    DataFactory,
    ModelFactory,
    NodeContext,
    assign_budget,
    get_state_folder,
    make_full_setup,
    make_node_context,
    parse_run_config,
)
from fedquilt.deploy.node_info import NodeInfo
from fedquilt.engines.client_state import ClientStateStore, read_client_state, write_client_state
from fedquilt.engines.client_work import run_task
from fedquilt.engines.flower import codec
from fedquilt.engines.flower.codec import NO_STATE, MessageHeader
from fedquilt.engines.flower.engine import hash_structure
from fedquilt.errors import ConfigError, describe_exception
from fedquilt.federation.privacy import make_secret
from fedquilt.federation.privacy.noise import read_secret, write_secret
from fedquilt.federation.state import Setup
from fedquilt.federation.threads import single_thread
from fedquilt.settings.resolve import build_method, build_privacy
from fedquilt.settings.schema import Config
from fedquilt.training.context import ClientContext
from fedquilt.training.serialization import list_functions

MAX_SESSIONS = 4  # of a process that works for several clients in turn


def make_client_app(
    *,
    model: ModelFactory | None = None,
    data: DataFactory | None = None,
    recipes: Sequence[type] = (),
    mods: Sequence[Mod] = (),
) -> ClientApp:
    """Makes a Flower ClientApp that trains the subnets which the server sends.

    Args:
        model: Builds the full model, the same as on the server. By default the settings name it.
        data: Loads a node's data, given its node config: a training set, or a training and a test
            set, as ``fedquilt.make_clients`` takes them. By default the settings name the data.
        recipes: Your own classes of recipes that the server may send.
        mods: Flower's mods.
    """
    handler = _MessageHandler(model, data, tuple(recipes))
    app = ClientApp(mods=list(mods))

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return _reply(message, lambda: handler.handle_query(message, context))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return _reply(message, lambda: handler.handle_task(message, context))

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return _reply(message, lambda: handler.handle_task(message, context))

    return app


def _reply(message: Message, handle: Callable[[], RecordDict]) -> Message:
    """Replies to a message; an exception becomes an error reply with its description."""
    try:
        content = handle()
    except Exception as problem:
        content = codec.encode_error(describe_exception(problem))
    return Message(content, reply_to=message)


class _MessageHandler:
    """Handles the messages of the server.

    A simulation pickles a copy of it for every message. All copies have the same name, by which
    they share models.
    """

    def __init__(
        self,
        make_model: ModelFactory | None,
        load_data: DataFactory | None,
        recipes: tuple[type, ...],
    ) -> None:
        self._make_model, self._load_data, self._recipes = make_model, load_data, recipes
        self._sessions: dict[tuple[str, str], _ClientSession] = {}
        self._name = secrets.token_hex(8)

    def handle_query(self, message: Message, context: Context) -> RecordDict:
        """Tells the server what it may know about this node."""
        config = parse_run_config(context.run_config)
        node_config: NodeConfig = context.node_config
        folder = get_state_folder(node_config, codec.decode_query(message.content))
        device = find_node_device(node_config, config.run.device)
        node = make_node_context(config, node_config, self._load_data)
        node = assign_budget(
            node, node_config.get("budget"), config, self._make_model, folder, device
        )
        info = NodeInfo.from_context(node)
        is_private = build_privacy(config) is not None
        return (info.hide_data(config) if is_private else info).to_message()

    def handle_task(self, message: Message, context: Context) -> RecordDict:
        """Runs a task within its deadline, and stores the client's new state."""
        header = codec.decode_header(message.content)
        return run_with_deadline(header.deadline, lambda: self._run_task(message, context, header))

    def _run_task(self, message: Message, context: Context, header: MessageHeader) -> RecordDict:
        session = self._get_session(context, header)
        task = codec.decode_task(
            message.content, session.context.structure, self._recipes, session.functions
        )
        if task.client != session.client:
            raise ConfigError(f"client {session.client} got a task for client {task.client}")
        if session.context.min_threshold is not None:
            from fedquilt.training.secure import refuse_plain_work  # which needs an extra

            refuse_plain_work(task.recipe, session.context.min_threshold)
        with single_thread():
            result = run_task(task, session.context, session.read_state(header.state))
        session.update_states(header, result.state)
        return codec.encode_update(
            result.update,
            session.context.structure,
            header,
            saved_state=result.state is not None,
        )

    def _get_session(self, context: Context, header: MessageHeader) -> _ClientSession:
        """The session of a client in a run, which a process creates once."""
        node_config: NodeConfig = context.node_config
        key = header.run, json.dumps(dict(node_config), sort_keys=True)
        if key not in self._sessions:
            if len(self._sessions) >= MAX_SESSIONS:
                self._sessions.pop(next(iter(self._sessions)))
            config = parse_run_config(context.run_config)
            self._sessions[key] = self._open_session(config, node_config, header.run)
        session = self._sessions[key]
        if session.structure_hash != header.structure:
            raise ConfigError(
                "the server's model has another structure than this client's; use the same model, "
                "method and version of fedquilt on both. If clients have different labels, set "
                "model.num_classes"
            )
        return session

    def _open_session(self, config: Config, node: NodeConfig, run_name: str) -> _ClientSession:
        folder = get_state_folder(node, run_name)
        node_context = make_node_context(config, node, self._load_data)
        setup = self._prepare_setup(config, node_context, run_name, folder)
        context = ClientContext(
            setup.model,
            setup.structure,
            node_context.data,
            find_node_device(node, config.run.device),
            task=setup.task,
            secrets=folder / "secrets",
        )
        context.min_threshold = find_secure_threshold(node)
        if build_privacy(config) is not None:
            context.noise_secret = read_or_make_secret(folder / "secret.key")
        functions = frozenset(one.path for one in list_functions(build_method(config)))
        return _ClientSession(node_context.client.id, context, folder, functions)

    def _prepare_setup(
        self, config: Config, node: NodeContext, run_name: str, folder: Path
    ) -> Setup:
        """The model as the method needs it, one for all clients of this process."""
        key = run_name, node.example.shape, node.num_classes, node.num_tokens
        setups = _get_setups(self._name)
        setup = setups.get(key)
        if setup is None:
            full = make_full_setup(config, node, self._make_model, folder)
            setup = build_method(config).prepare_model(full)
            setups.clear()
            setups[key] = setup
        return setup


def read_or_make_secret(path: Path) -> bytes:
    """The secret that a node's noise comes from; no message tells it."""
    if not path.exists():
        write_secret(path, make_secret())
    return read_secret(path)


@lru_cache(maxsize=2)
def _get_setups(handler: str) -> dict[tuple[object, ...], Setup]:
    """The setups of this process for a handler and all its copies.

    Without them every message of a simulation would build a model, and fill the memory.
    """
    return {}


class _ClientSession:
    """A client's context in one run, its stored states, and the functions that it may run."""

    def __init__(
        self, client: int, context: ClientContext, folder: Path, functions: frozenset[str]
    ) -> None:
        self.client, self.context, self.functions = client, context, functions
        self._states = ClientStateStore(folder / "state")
        self.structure_hash = hash_structure(context.structure)

    def read_state(self, version: int) -> Any:
        """Reads the state of this version; None if the client has none yet."""
        if version == NO_STATE:
            return None
        path = self._states.path(self.client, version)
        if not path.exists():
            raise ConfigError(
                f"client {self.client} has lost its state (version {version} is not in "
                f"{path.parent}); restore it, or start a new run"
            )
        return read_client_state(path)

    def update_states(self, header: MessageHeader, state: Mapping[str, Tensor] | None) -> None:
        """Stores a new state, if there is one, and removes versions that are not used any more."""
        versions = set(header.keep)
        if state is not None:
            write_client_state(self._states.path(self.client, header.next), state)
            self._states.sync({self.client: header.next})  # the server relies on it
            versions.add(header.next)
        self._states.remove_unused(*({self.client: version} for version in versions))


app = make_client_app()
