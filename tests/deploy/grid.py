"""A grid in this process: the same apps and messages as on Flower, without its processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

RUN, SERVER_NODE = 7, 1


class OneProcessGrid(Grid):
    """Nodes are contexts; a message is answered when its reply is asked for.

    ``meddle`` may change what happens: it gets the message and the function that answers, and
    returns a reply, several, or none (the message is then lost).
    """

    def __init__(
        self,
        app: ClientApp,
        run_config: Mapping[str, Any],
        nodes: Mapping[int, Mapping[str, Any]],
        meddle: Callable[[Message, Callable[[Message], Message]], Iterable[Message]] | None = None,
    ) -> None:
        self._app, self._meddle = app, meddle
        self.contexts = {
            node: Context(RUN, node, dict(about), RecordDict(), dict(run_config))
            for node, about in nodes.items()
        }
        self.keys = {node: f"key of {node}".encode() for node in nodes}  # public ones
        self._waiting: dict[str, Message] = {}
        self._ids = itertools.count()
        self.sent: list[Message] = []
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = RUN, 1, SERVER_NODE

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=n, public_key=self.keys.get(n, b"")) for n in self.contexts]

    def move(self, old: int, new: int, *, key: bytes | None = None) -> None:
        """A node comes back under another number, with its own key or another."""
        self.contexts[new] = self.contexts.pop(old)
        self.contexts[new].__dict__["node_id"] = new
        self.keys[new] = self.keys.pop(old) if key is None else key

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            message_id = f"message-{next(self._ids)}"
            message.metadata.__dict__["_message_id"] = message_id
            self._waiting[message_id] = message
            self.sent.append(message)
            ids.append(message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies: list[Message] = []
        for message_id in message_ids:
            message = self._waiting.pop(message_id, None)
            if message is not None:
                meddle = self._meddle
                replies += (
                    [self.answer(message)] if meddle is None else meddle(message, self.answer)
                )
        return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))

    def answer(self, message: Message) -> Message:
        """The reply of the message's node, as Flower would have it."""
        node = message.metadata.dst_node_id
        TaskIdentity.node_id = node
        try:
            return self._app(message, self.contexts[node])
        except Exception as problem:
            return Message(Error(code=2, reason=str(problem)), reply_to=message)
        finally:
            TaskIdentity.node_id = SERVER_NODE
