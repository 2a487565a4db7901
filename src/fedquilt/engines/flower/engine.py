"""The Flower engine: orders go to nodes as messages, answers come back, and wait on disk.

The same interface as the local engine: tasks in, updates out in the order of the tasks. Who has not
answered in time is a failure of that client alone.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flwr.app import Message
from flwr.serverapp import Grid
from torch import nn

from fedquilt.data import ClientData
from fedquilt.engines import flat
from fedquilt.engines.engine import Tell, nobody
from fedquilt.engines.flower import letters
from fedquilt.engines.flower.letters import NO_STATE, Envelope
from fedquilt.engines.local import LocalEngine
from fedquilt.engines.spool import Spool
from fedquilt.errors import UpdateError
from fedquilt.federation.client import NOT_WAITED_FOR, SERVER, Failure, Task, Update
from fedquilt.structure.groups import Structure
from fedquilt.structure.values import as_values
from fedquilt.training.evaluate import Evaluate

AT_ONCE = 8  # answers that are asked for together, and so may be in memory together
FIRST_WAIT, LONGEST_WAIT = 0.05, 1.0  # seconds between two questions for answers

Find = Callable[[], Mapping[int, int]]  # clients that can be reached, and their nodes


@dataclass(frozen=True)
class Patience:
    """How long clients may take: each for its work, and all of them for a round, in seconds.

    None means any time. A round's limit must leave time for messages, and for Flower to notice that
    a node is gone, which takes it a minute.
    """

    client: float | None = None
    round: float | None = 600.0


@dataclass
class Traffic:
    """Bytes in messages so far, those of tensors among them, and how many messages there were."""

    bytes_down: int = 0
    bytes_up: int = 0
    tensors_down: int = 0
    tensors_up: int = 0
    num_orders: int = 0
    num_answers: int = 0

    def __str__(self) -> str:
        """For people."""
        down, up = self.bytes_down / 1e6, self.bytes_up / 1e6
        return (
            f"{self.num_orders} orders of {down:.2f} MB ({self.tensors_down / 1e6:.2f} MB of "
            f"tensors), {self.num_answers} answers of {up:.2f} MB ({self.tensors_up / 1e6:.2f} MB)"
        )


class FlowerEngine:
    """Runs tasks on the nodes of a grid; the server's own work is done here.

    ``find`` says which clients can be reached, and is asked anew for every batch of tasks: nodes
    come and go. ``run_name`` is under what clients keep their state; it outlives this process.
    ``traffic`` grows with every message.
    """

    def __init__(
        self,
        grid: Grid,
        find: Find,
        model: nn.Module,
        structure: Structure,
        held_out: ClientData | None = None,
        *,
        run_name: str,
        patience: Patience | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        own = {} if held_out is None else {SERVER: held_out}
        self._here = LocalEngine(model, structure, {"test": own}, workers=0)
        self._spool = Spool(Path(tempfile.gettempdir()))
        self._find, self._patience = find, patience or Patience()
        limit, folder = self._patience.round, self._spool.folder
        self._post = _Post(grid, structure, limit, folder, traffic or Traffic())
        self._run_name, self._digest = run_name, digest(structure)
        self._session, self._numbers = secrets.token_hex(4), itertools.count()
        self._versions: dict[int, int] = {}
        self._in_use: tuple[Mapping[int, int], ...] = ()
        self.tell: Tell = nobody

    def run(
        self, tasks: Sequence[Task], *, enough: int | None = None
    ) -> Iterator[Update | Failure]:
        """Does the tasks; yields in their order.

        As soon as ``enough`` clients have answered, the others are not waited for.
        """
        is_remote = any(task.client != SERVER for task in tasks)
        exchange = _Exchange(self._post, enough)
        nodes = self._find() if is_remote else {}
        for number, task in enumerate(tasks):
            if task.client != SERVER:
                exchange.send(number, task, nodes.get(task.client), self._envelope(task.client))
        try:
            for number, task in enumerate(tasks):
                if task.client == SERVER:
                    yield from self._here.run([task])
                else:
                    yield self._delivered(exchange.result(number))
        finally:
            exchange.close()

    def kept(self) -> Mapping[int, int]:
        """The version of what each client keeps; the files are on the clients."""
        return dict(self._versions)

    def restore(self, kept: Mapping[int, int]) -> None:
        """Goes back to these versions: the next orders say so."""
        self._versions = dict(kept)

    def forget_others(self, *used: Mapping[int, int]) -> None:
        """Clients may remove other versions; they hear of it with their next orders."""
        self._in_use = used

    def close(self) -> None:
        """Removes what waited here; nodes are not ours to stop."""
        self._here.close()
        self._spool.close()

    def _envelope(self, client: int) -> Envelope:
        current = self._versions.get(client, NO_STATE)
        used = {versions[client] for versions in self._in_use if client in versions}
        return Envelope(
            run=self._run_name,
            token=f"{self._session}-{next(self._numbers)}",
            state=current,
            next=current + 1,
            keep=tuple(sorted({*used, current} - {NO_STATE})),
            deadline=self._patience.client or 0.0,
            structure=self._digest,
        )

    def _delivered(self, result: _Early | Failure) -> Update | Failure:
        if isinstance(result, Failure):
            return result
        update = result.update
        if result.kept:
            self._versions[update.client] = self._versions.get(update.client, NO_STATE) + 1
        tensors = flat.read(result.path, result.slots)
        result.path.unlink(missing_ok=True)
        return replace(update, params=flat.unpacked(tensors, len(update.subnets)))


def digest(structure: Structure) -> str:
    """What server and clients must agree on: names, shapes and what follows what."""
    values = json.dumps(as_values(structure), sort_keys=True)
    return hashlib.sha256(values.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class _Sent:
    """An order on its way."""

    number: int
    client: int
    node: int
    envelope: Envelope
    most_bytes: int


@dataclass(frozen=True)
class _Early:
    """An answer whose tensors wait on disk."""

    update: Update
    kept: bool
    path: Path
    slots: tuple[flat.Slot, ...]


class _Exchange:
    """The messages of one batch of tasks: sent at once, answers collected as they come."""

    def __init__(self, post: _Post, enough: int | None) -> None:
        self._post, self._enough = post, math.inf if enough is None else enough
        self._until = math.inf if post.limit is None else time.monotonic() + post.limit
        self._done: dict[int, _Early | Failure] = {}
        self._sent: dict[str, _Sent] = {}
        self._num_answers = 0
        self._wait = FIRST_WAIT

    def send(self, number: int, task: Task, node: int | None, envelope: Envelope) -> None:
        """Sends one task on its way."""
        if node is None:
            reason = "it cannot be reached: its node is not there"
            self._done[number] = Failure(task.client, reason)
        else:
            message_id, most_bytes = self._post.send(task, node, envelope)
            self._sent[message_id] = _Sent(number, task.client, node, envelope, most_bytes)

    def result(self, number: int) -> _Early | Failure:
        """What came of a task; waits for it, within limits."""
        while number not in self._done:
            self._collect()
        return self._done.pop(number)

    def close(self) -> None:
        """Forgets what nobody asks for any more."""
        for result in self._done.values():
            if isinstance(result, _Early):
                result.path.unlink(missing_ok=True)

    def _collect(self) -> None:
        """Asks for answers, a few at once; if there are none, the next question is later."""
        ids, is_silent = list(self._sent), True
        for first in range(0, len(ids), AT_ONCE):
            for reply in self._post.replies(ids[first : first + AT_ONCE]):
                sent = self._sent.pop(reply.metadata.reply_to_message_id, None)
                if sent is not None:  # else it has answered before
                    self._done[sent.number] = result = self._post.read(reply, sent)
                    self._num_answers += isinstance(result, _Early)
                    is_silent = False
        if self._num_answers >= self._enough:
            self._give_up(NOT_WAITED_FOR)
        elif time.monotonic() >= self._until:
            self._give_up(f"it gave no answer within {self._post.limit:g} seconds")
        elif is_silent:
            time.sleep(self._wait)
            self._wait = min(2 * self._wait, LONGEST_WAIT)
        else:
            self._wait = FIRST_WAIT

    def _give_up(self, why: str) -> None:
        for sent in self._sent.values():
            self._done[sent.number] = Failure(sent.client, why)
        self._sent.clear()


class _Post:
    """Sends orders and reads answers, and counts both."""

    def __init__(
        self, grid: Grid, structure: Structure, limit: float | None, folder: Path, traffic: Traffic
    ) -> None:
        self._grid, self._structure, self.limit = grid, structure, limit
        self._folder, self._traffic = folder, traffic
        self._files = itertools.count()

    def send(self, task: Task, node: int, envelope: Envelope) -> tuple[str, int]:
        """The number of the message that was sent, and how long its answer may be."""
        content = letters.order(task, self._structure, envelope)
        size = letters.num_bytes(content)
        self._traffic.bytes_down += size
        self._traffic.tensors_down += letters.tensor_bytes(content)
        self._traffic.num_orders += 1
        message = Message(
            content,
            dst_node_id=node,
            message_type="evaluate" if isinstance(task.recipe, Evaluate) else "train",
            group_id=envelope.token,
            ttl=self.limit,
        )
        (message_id,) = self._grid.push_messages([message])
        return message_id, letters.most_bytes(task, self._structure, size)

    def replies(self, message_ids: Sequence[str]) -> list[Message]:
        """Those of these messages' replies that are there."""
        return list(self._grid.pull_messages(message_ids))

    def read(self, reply: Message, sent: _Sent) -> _Early | Failure:
        """The answer, its tensors put aside; or what is wrong with it."""
        if reply.has_error():
            return Failure(sent.client, f"{reply.error.reason} (Flower's code {reply.error.code})")
        self._traffic.bytes_up += letters.num_bytes(reply.content)
        self._traffic.num_answers += 1
        try:
            if reply.metadata.src_node_id != sent.node:
                raise UpdateError(f"client {sent.client} was answered for by another node")
            update, kept = letters.read_answer(
                reply.content, self._structure, sent.envelope, sent.client, sent.most_bytes
            )
        except UpdateError as problem:
            return Failure(sent.client, str(problem))
        self._traffic.tensors_up += sum(t.nbytes for part in update.params for t in part.values())
        path = self._folder / f"answer-{next(self._files)}"
        slots = flat.write(path, flat.packed(update.params))
        return _Early(replace(update, params=()), kept, path, slots)
