"""The Flower engine: sends tasks to nodes as messages, and collects their replies.

It has the interface of the local engine: tasks in, updates out in the order of the tasks. Replies
wait on disk until it is their turn. A client that does not reply in time fails alone.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flwr.app import Message
from flwr.serverapp import Grid
from torch import nn

from fedquilt.data import ClientData
from fedquilt.engines.engine import OnProgress, ignore_progress
from fedquilt.engines.flower import codec
from fedquilt.engines.flower.codec import NO_STATE, MessageHeader
from fedquilt.engines.local import LocalEngine
from fedquilt.engines.scratch import ScratchDirectory
from fedquilt.errors import UpdateError
from fedquilt.federation import flat_tensors
from fedquilt.federation.client import NOT_NEEDED, SERVER, Failure, Task, Update
from fedquilt.structure.serialization import to_json
from fedquilt.structure.structure import Structure
from fedquilt.training.evaluate import Evaluate

MAX_PULLED = 8  # replies that are pulled together, and so may be in memory together
MIN_WAIT, MAX_WAIT = 0.05, 1.0  # seconds between two pulls

FindNodes = Callable[[], Mapping[int, int]]  # the node of every client that is online


@dataclass(frozen=True)
class Timeouts:
    """Time limits in seconds: of one client's work, and of a whole round. None means no limit.

    A round's limit must leave time for messages, and for Flower to notice that a node has died,
    which takes about a minute.
    """

    client: float | None = None
    round: float | None = 600.0


@dataclass
class Traffic:
    """Messages and replies of a run so far: their number, their bytes, and bytes of tensors."""

    bytes_down: int = 0
    bytes_up: int = 0
    tensors_down: int = 0
    tensors_up: int = 0
    num_messages: int = 0
    num_replies: int = 0

    def __str__(self) -> str:
        """The counts in one line."""
        down, up = self.bytes_down / 1e6, self.bytes_up / 1e6
        return (
            f"{self.num_messages} messages, {down:.2f} MB; {self.num_replies} replies, {up:.2f} MB"
        )


class FlowerEngine:
    """Runs tasks on the nodes of a Flower grid; the server's own tasks run in this process.

    Args:
        grid: Flower's grid.
        find_nodes: Returns the clients that are online, and their nodes. It is called for every
            batch of tasks, since nodes come and go.
        model: The full model.
        structure: The structure of the model.
        held_out: Data that the server evaluates on.
        run_name: The name under which clients store their state. It outlives this process.
        timeouts: Time limits of clients and rounds.
        traffic: Counts every message and reply.
        window: How many tasks behind the first that is not merged are sent; None: all at once, as
            nodes that each have a machine should work at the same time. A simulation holds all
            messages in memory, and has few processes.
    """

    def __init__(
        self,
        grid: Grid,
        find_nodes: FindNodes,
        model: nn.Module,
        structure: Structure,
        held_out: ClientData | None = None,
        *,
        run_name: str,
        timeouts: Timeouts | None = None,
        traffic: Traffic | None = None,
        window: int | None = None,
    ) -> None:
        server_data = {} if held_out is None else {SERVER: held_out}
        self._server_engine = LocalEngine(model, structure, {"test": server_data}, workers=0)
        self._scratch = ScratchDirectory()
        self._find_nodes, self._timeouts = find_nodes, timeouts or Timeouts()
        self._window = math.inf if window is None else window
        timeout, folder = self._timeouts.round, self._scratch.folder
        self._channel = _MessageChannel(grid, structure, timeout, folder, traffic or Traffic())
        self._run_name, self._structure_hash = run_name, hash_structure(structure)
        self._token_prefix, self._token_numbers = secrets.token_hex(4), itertools.count()
        self._versions: dict[int, int] = {}
        self._after: dict[int, int] = {}  # versions that new ones come after
        self._used_versions: tuple[Mapping[int, int], ...] = ()
        self.on_progress: OnProgress = ignore_progress

    def run(
        self, tasks: Sequence[Task], *, enough: int | None = None
    ) -> Iterator[Update | Failure]:
        """Runs the tasks, and yields their results in order.

        As soon as ``enough`` clients have replied, the engine does not wait for the others.
        """
        batch = _TaskBatch(self._channel, enough)
        nodes = self._find_nodes() if any(task.client != SERVER for task in tasks) else {}
        unsent = 0
        try:
            for number, task in enumerate(tasks):
                while unsent < min(number + self._window, len(tasks)):
                    if tasks[unsent].client != SERVER:
                        other = tasks[unsent]
                        header = self._make_header(other.client)
                        batch.send(unsent, other, nodes.get(other.client), header)
                    unsent += 1
                if task.client == SERVER:
                    yield from self._server_engine.run([task])
                else:
                    yield self._load_result(batch.wait_for(number))
        finally:
            batch.close()

    def client_versions(self) -> Mapping[int, int]:
        """The version of each client's state; the state itself is on the client's disk."""
        return dict(self._versions)

    def restore(self, versions: Mapping[int, int], *, after: Mapping[int, int] = {}) -> None:
        """Goes back to these versions of clients' states; the next messages ask for them."""
        self._versions, self._after = dict(versions), dict(after)

    def remove_unused(self, *used: Mapping[int, int]) -> None:
        """Lets clients remove all other versions, with the next message to each."""
        self._used_versions = used

    def close(self) -> None:
        """Removes temporary files. Nodes keep running."""
        self._server_engine.close()
        self._scratch.close()

    def _next_version(self, client: int) -> int:
        return max(self._versions.get(client, NO_STATE), self._after.get(client, NO_STATE)) + 1

    def _make_header(self, client: int) -> MessageHeader:
        current = self._versions.get(client, NO_STATE)
        used = {versions[client] for versions in self._used_versions if client in versions}
        return MessageHeader(
            run=self._run_name,
            token=f"{self._token_prefix}-{next(self._token_numbers)}",
            state=current,
            next=self._next_version(client),
            keep=tuple(sorted({*used, current} - {NO_STATE})),
            deadline=self._timeouts.client or 0.0,
            structure=self._structure_hash,
        )

    def _load_result(self, result: _StoredReply | Failure) -> Update | Failure:
        if isinstance(result, Failure):
            return result
        update = result.update
        if result.saved_state:
            self._versions[update.client] = self._next_version(update.client)
        tensors = flat_tensors.read_flat(result.path, result.slots)
        result.path.unlink(missing_ok=True)
        return replace(update, params=flat_tensors.split_parts(tensors, len(update.subnets)))


def hash_structure(structure: Structure) -> str:
    """A digest of a structure, by which server and clients check that they have the same."""
    values = json.dumps(to_json(structure), sort_keys=True)
    return hashlib.sha256(values.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class _SentMessage:
    """A task message without a reply yet."""

    number: int  # of the task
    client: int
    node: int
    header: MessageHeader
    max_bytes: int  # of its reply


@dataclass(frozen=True)
class _StoredReply:
    """A reply whose tensors are on disk."""

    update: Update
    saved_state: bool  # the client has stored a new state
    path: Path
    slots: tuple[flat_tensors.Slot, ...]


class _TaskBatch:
    """The messages of one batch of tasks; replies are pulled as they come."""

    def __init__(self, channel: _MessageChannel, enough: int | None) -> None:
        self._channel, self._enough = channel, math.inf if enough is None else enough
        timeout = channel.timeout
        self._end = math.inf if timeout is None else time.monotonic() + timeout
        self._results: dict[int, _StoredReply | Failure] = {}
        self._sent: dict[str, _SentMessage] = {}
        self._num_updates = 0
        self._over = ""  # why no more replies are waited for
        self._wait = MIN_WAIT

    def send(self, number: int, task: Task, node: int | None, header: MessageHeader) -> None:
        """Sends the message of one task."""
        if node is None:
            self._results[number] = Failure(task.client, "its node is not online")
        elif self._over:
            self._results[number] = Failure(task.client, self._over)
        else:
            message_id, max_bytes = self._channel.send(task, node, header)
            self._sent[message_id] = _SentMessage(number, task.client, node, header, max_bytes)

    def wait_for(self, number: int) -> _StoredReply | Failure:
        """Waits for the result of a task, within the time limit."""
        while number not in self._results:
            self._pull()
        return self._results.pop(number)

    def close(self) -> None:
        """Removes the files of replies that were not used, and what was encoded."""
        self._channel.forget_tasks()
        for result in self._results.values():
            if isinstance(result, _StoredReply):
                result.path.unlink(missing_ok=True)

    def _pull(self) -> None:
        """Pulls replies, a few at once; waits longer each time that there are none."""
        ids, has_replies = list(self._sent), False
        for first in range(0, len(ids), MAX_PULLED):
            for reply in self._channel.pull(ids[first : first + MAX_PULLED]):
                sent = self._sent.pop(reply.metadata.reply_to_message_id, None)
                if sent is not None:  # else this is its second reply
                    self._results[sent.number] = result = self._channel.store(reply, sent)
                    self._num_updates += isinstance(result, _StoredReply)
                    has_replies = True
        if self._num_updates >= self._enough:
            self._fail_others(NOT_NEEDED)
        elif time.monotonic() >= self._end:
            self._fail_others(f"it did not reply within {self._channel.timeout:g} seconds")
        elif has_replies:
            self._wait = MIN_WAIT
        else:
            time.sleep(self._wait)
            self._wait = min(2 * self._wait, MAX_WAIT)

    def _fail_others(self, reason: str) -> None:
        self._over = reason
        for sent in self._sent.values():
            self._results[sent.number] = Failure(sent.client, reason)
        self._sent.clear()


class _MessageChannel:
    """Sends task messages and stores replies, and counts both."""

    def __init__(
        self,
        grid: Grid,
        structure: Structure,
        timeout: float | None,
        folder: Path,
        traffic: Traffic,
    ) -> None:
        self._grid, self._structure, self.timeout = grid, structure, timeout
        self._folder, self._traffic = folder, traffic
        self._file_numbers = itertools.count()
        self._encoder = codec.TaskEncoder(structure)

    def send(self, task: Task, node: int, header: MessageHeader) -> tuple[str, int]:
        """Sends a task; returns the id of its message, and how large the reply may be."""
        content = self._encoder.encode(task, header)
        size = codec.count_message_bytes(content)
        self._traffic.bytes_down += size
        self._traffic.tensors_down += codec.count_tensor_bytes(content)
        self._traffic.num_messages += 1
        message = Message(
            content,
            dst_node_id=node,
            message_type="evaluate" if isinstance(task.recipe, Evaluate) else "train",
            group_id=header.token,
            ttl=self.timeout,
        )
        (message_id,) = self._grid.push_messages([message])
        return message_id, codec.get_max_bytes(task, self._structure, size)

    def forget_tasks(self) -> None:
        """Drops what was encoded for clients of a round that is over."""
        self._encoder.forget()

    def pull(self, message_ids: Sequence[str]) -> list[Message]:
        """Pulls the replies to these messages that have arrived."""
        return list(self._grid.pull_messages(message_ids))

    def store(self, reply: Message, sent: _SentMessage) -> _StoredReply | Failure:
        """Checks a reply, and writes its tensors to disk; a Failure if it is not valid."""
        if reply.has_error():
            return Failure(sent.client, f"{reply.error.reason} (Flower's code {reply.error.code})")
        self._traffic.bytes_up += codec.count_message_bytes(reply.content)
        self._traffic.num_replies += 1
        try:
            if reply.metadata.src_node_id != sent.node:
                raise UpdateError(f"another node replied for client {sent.client}")
            update, saved_state = codec.decode_update(
                reply.content, self._structure, sent.header, sent.client, sent.max_bytes
            )
        except UpdateError as problem:
            return Failure(sent.client, str(problem))
        self._traffic.tensors_up += sum(t.nbytes for part in update.params for t in part.values())
        path = self._folder / f"reply-{next(self._file_numbers)}"
        slots = flat_tensors.write_flat(path, flat_tensors.join_parts(update.params))
        return _StoredReply(replace(update, params=()), saved_state, path, slots)
