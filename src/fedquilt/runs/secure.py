"""A round of secure aggregation: four exchanges with clients, and sums that are opened in the end.

The steps are those of ``fedquilt.federation.secure``. Each is a batch of tasks for the engine:
keys, shares, the method's own work with a masked reply, and secrets. A client that fails in one of
them is not asked any more in this round.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fedquilt.engines.engine import Engine
from fedquilt.errors import ProtocolError
from fedquilt.federation.aggregation.parts import RingSums
from fedquilt.federation.aggregation.secure_sum import (
    derive_rounding_seed,
    join_sums,
)
from fedquilt.federation.client import Failure, Task, Update
from fedquilt.federation.rings import Rings, find_rings, list_averaged
from fedquilt.federation.secure.client import (
    join_messages,
    measure_revealed,
    measure_shares,
    split_messages,
)
from fedquilt.federation.secure.encoding import (
    REPORT_SIZE,
    decode_sums,
    make_report_quantizer,
    split_report,
)
from fedquilt.federation.secure.integers import Integers
from fedquilt.federation.secure.quantization import NUM_EXTRA, Quantizer
from fedquilt.federation.secure.server import OpenedSums, SecureServer
from fedquilt.federation.secure.session import ID_BYTES, Session
from fedquilt.federation.secure.settings import SecureAggregation
from fedquilt.federation.state import Setup, State
from fedquilt.federation.validation import get_reply_spec, list_sent_subnets, validate_reply
from fedquilt.runs.accounting import RoundAccounting
from fedquilt.runs.events import SecureRound
from fedquilt.runs.exchange import RoundPlan
from fedquilt.training.secure import (
    CLIENTS,
    KEYS,
    SHARES,
    SURVIVORS,
    MaskedReply,
    RevealSecrets,
    ShareSecrets,
    StartSession,
    pack_bytes,
    pack_keys,
    unpack_bytes,
    unpack_keys,
    unpack_vectors,
)

STATISTICS_CLIP = 2.0**20  # a closing phase asks for statistics, which are no small changes


@dataclass(frozen=True, eq=False)
class SecureExchange:
    """Runs rounds with secure sums.

    Args:
        setup: What stays the same during the run.
        settings: How updates are summed.
    """

    setup: Setup
    settings: SecureAggregation

    def run(self, engine: Engine, plan: RoundPlan, accounting: RoundAccounting) -> State:
        """Lets clients work, and merges what they send without seeing it.

        The arguments are those of ``Exchange``. Statistics, which a closing phase asks for, have a
        wider range. If nothing could be opened, ``accounting`` knows of it.
        """
        state, tasks = plan.state, plan.tasks
        if len(tasks) < self.settings.threshold:  # of a cohort that was drawn by chance
            self._skip(tasks, state, accounting)
            return state
        planned = self._plan(state, tasks, is_closing=plan.is_closing)
        server = SecureServer(planned.session)
        steps = _Steps(self.setup, engine, accounting)
        steps.ask_keys(server)
        steps.ask_shares(server)
        replies = steps.ask_updates(server, planned, plan.enough)
        steps.ask_secrets(server)
        sums = self._decode(planned, server.open_sums(), accounting)
        if not sums.changes:
            return state
        aggregate = plan.pipeline.aggregator.aggregate_sums(self.setup, state, sums)
        return plan.pipeline.finish(self.setup, state, replace(aggregate, replies=replies))

    def _skip(self, tasks: Sequence[Task], state: State, accounting: RoundAccounting) -> None:
        """Records a round in which nobody is asked, because nothing could be opened."""
        threshold = self.settings.threshold
        reason = f"{len(tasks)} clients were drawn, and {threshold} are needed"
        names = list_averaged(self.setup) & state.params.keys()
        cells = sum(state.params[name].numel() for name in names)
        accounting.secure = SecureRound(threshold, 0, ((cells, reason),))
        accounting.quorum = 0

    def _plan(self, state: State, tasks: Sequence[Task], *, is_closing: bool) -> _PlannedRound:
        holdings = {task.client: list_sent_subnets(task) for task in tasks}
        rings = find_rings(self.setup.structure, holdings.values(), list_averaged(self.setup))
        held = [ring for ring in rings if ring.holders]  # the first ones
        numbers = {client: rings.find_holding(own) for client, own in holdings.items()}
        everyone = tuple(sorted(numbers))
        clients = [tuple(c for c in everyone if numbers[c] in ring.holders) for ring in held]
        sizes = [ring.num_cells + NUM_EXTRA for ring in held]
        if everyone in clients:  # the losses go with a ring that all hold, and share its masks
            report_ring = clients.index(everyone)
            sizes[report_ring] += REPORT_SIZE
        else:
            report_ring = len(held)
            clients, sizes = [*clients, everyone], [*sizes, REPORT_SIZE]
        session = Session(
            secrets.token_hex(ID_BYTES),
            self.settings.threshold,
            self.settings.neighbors,
            tuple(clients),
            tuple(sizes),
            64 if is_closing else self.settings.bits,
        )
        by_id = self.setup.clients_by_id
        largest = max(get_reply_spec(task, by_id[task.client]).weight for task in tasks)
        settings = self.settings
        if is_closing:
            settings = replace(settings, clip=STATISTICS_CLIP, bits=session.bits)
        quantizer = settings.make_quantizer(largest or 1.0, len(tasks))
        seeds = {c: derive_rounding_seed(self.setup, state, c) for c in everyone}
        return _PlannedRound(tuple(tasks), rings, numbers, session, quantizer, seeds, report_ring)

    def _decode(
        self, planned: _PlannedRound, opened: OpenedSums, accounting: RoundAccounting
    ) -> RingSums:
        """What the opened sums say; ``accounting`` gets what is recorded about them."""
        counts = {ring: len(clients) for ring, clients in opened.clients.items()}
        totals = dict(opened.sums)
        if planned.report_ring in totals:
            own, report = split_report(totals.pop(planned.report_ring))
            self._report_loss(planned, report, accounting)
            totals |= {planned.report_ring: own} if len(own) else {}
        sums, unusable = decode_sums(planned.quantizer, totals, counts)
        closed = {**opened.closed, **unusable}
        sizes = [ring.num_cells for ring in planned.rings if ring.holders]
        accounting.secure = SecureRound(
            self.settings.threshold,
            sum(sizes[ring] for ring in sums),
            tuple((sizes[r], reason) for r, reason in sorted(closed.items()) if r < len(sizes)),
            sum(part.num_clipped for part in sums.values()),
        )
        if not sums:
            accounting.mark_lost(f"nothing could be opened: {next(iter(closed.values()), '')}")
        return join_sums(planned.rings, sums)

    def _report_loss(
        self, planned: _PlannedRound, total: Integers, accounting: RoundAccounting
    ) -> None:
        """Takes the mean of the clients' training losses, if their sum can be."""
        try:
            losses = make_report_quantizer(planned.quantizer).decode(total, len(planned.tasks))
        except ProtocolError:
            return
        if losses.weight > 0:
            accounting.set_mean_loss(float(losses.change[0]) / losses.weight)


@dataclass(frozen=True, eq=False)
class _PlannedRound:
    """What a round is about: the method's tasks, and what each client is to send.

    ``numbers`` are those of the clients' holdings in ``rings``, ``seeds`` of their rounding. Losses
    are summed behind ``report_ring``.
    """

    tasks: tuple[Task, ...]
    rings: Rings
    numbers: Mapping[int, int]
    session: Session
    quantizer: Quantizer
    seeds: Mapping[int, int]
    report_ring: int

    def mask(self, task: Task, sharers: tuple[int, ...]) -> Task:
        """A task with a masked reply."""
        session = self.session
        recipe = MaskedReply(
            task.recipe,
            session.id,
            sharers,
            self.rings.holdings,
            self.numbers[task.client],
            tuple((ring, session.sizes[ring]) for ring in session.list_rings(task.client)),
            self.quantizer,
            self.seeds[task.client],
            self.report_ring,
        )
        return replace(task, recipe=recipe)


class _Steps:
    """The exchanges of one session; who fails in one of them is not asked again."""

    def __init__(self, setup: Setup, engine: Engine, accounting: RoundAccounting) -> None:
        self._setup, self._engine, self._accounting = setup, engine, accounting
        self._failures: dict[int, str] = {}
        self._bytes: Counter[int] = Counter()

    def ask_keys(self, server: SecureServer) -> None:
        recipe = StartSession(server.session)
        self._ask(
            {client: {} for client in server.session.clients},
            recipe,
            lambda client, reply: server.add_keys(client, unpack_keys(reply[KEYS])[0]),
        )

    def ask_shares(self, server: SecureServer) -> None:
        keys = server.roster.keys
        message = {
            CLIENTS: torch.tensor(list(keys), dtype=torch.int64),
            KEYS: pack_keys(list(keys.values())),
        }
        self._ask(
            dict.fromkeys(keys, message),
            ShareSecrets(server.session.id),
            lambda client, reply: server.add_shares(
                client,
                split_messages(unpack_bytes(reply[SHARES]), measure_shares(server.roster, client)),
            ),
        )

    def ask_updates(
        self, server: SecureServer, planned: _PlannedRound, enough: int | None
    ) -> tuple[Update, ...]:
        """The method's work; returns the replies without what they hide."""
        sharers = server.sharers
        if len(sharers) < server.session.threshold:
            reason = f"{len(sharers)} clients are left, and {server.session.threshold} are needed"
            self._failures |= {client: reason for client in sharers}
        tasks = [planned.mask(task, sharers) for task in planned.tasks]
        able = [task for task in tasks if task.client not in self._failures]
        came = self._engine.run(able, **({} if enough is None else {"enough": enough}))
        replies = []
        for update in self._accounting.filter_valid(tasks, self._fill_in(tasks, came)):
            server.add_vectors(update.client, unpack_vectors(update.params[0]))
            replies.append(replace(update, params=()))
        return tuple(replies)

    def ask_secrets(self, server: SecureServer) -> None:
        alive = server.survivors
        if server.roster.list_open(alive):
            survivors = torch.tensor(alive, dtype=torch.int64)
            self._ask(
                {
                    client: {
                        SURVIVORS: survivors,
                        SHARES: pack_bytes(join_messages(server.list_encrypted(client))),
                    }
                    for client in alive
                },
                RevealSecrets(server.session.id),
                lambda client, reply: server.add_secrets(
                    client,
                    split_messages(
                        unpack_bytes(reply[SHARES]),
                        measure_revealed(server.roster, client, server.sharers, alive),
                    ),
                ),
            )
        for client in alive:
            self._accounting.add_bytes(client, self._bytes[client])

    def _fill_in(
        self, tasks: Sequence[Task], came: Iterator[Update | Failure]
    ) -> Iterator[Update | Failure]:
        """The result of every task: a failure for those that were not asked."""
        for task in tasks:
            reason = self._failures.get(task.client)
            yield next(came) if reason is None else Failure(task.client, reason)

    def _ask(
        self,
        messages: Mapping[int, Mapping[str, torch.Tensor]],
        recipe: StartSession | ShareSecrets | RevealSecrets,
        take: Callable[[int, Mapping[str, torch.Tensor]], None],
    ) -> None:
        """Sends each client a message, and takes the valid replies."""
        tasks = [Task(client, (), tensors, recipe, 0) for client, tensors in messages.items()]
        self._accounting.bytes_down += sum(_count_bytes(task.params) for task in tasks)
        for task, result in zip(tasks, self._engine.run(tasks), strict=True):
            reply = validate_reply(self._setup, task, result, {})
            try:
                if isinstance(reply, Failure):
                    raise ProtocolError(reply.reason)
                take(task.client, reply.params[0])
                self._bytes[task.client] += _count_bytes(reply.params[0])
            except (ProtocolError, ValueError) as problem:
                self._failures[task.client] = str(problem)


def _count_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
