"""Secure aggregation on a client: the four steps of the protocol, as recipes.

Each step is a task of its own, so every engine runs them. Between steps a client's secrets are in a
file of its own. Messages are tensors of bytes and integers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedquilt.errors import ConfigError, UpdateError
from fedquilt.federation.client import Client, ClientResult, Recipe, Task, Update
from fedquilt.federation.rings import Holding, Rings, find_rings
from fedquilt.federation.secure.client import (
    SecureClient,
    join_messages,
    measure_received,
    split_messages,
)
from fedquilt.federation.secure.encoding import encode_change, encode_report
from fedquilt.federation.secure.integers import Integers
from fedquilt.federation.secure.keys import KEY_BYTES
from fedquilt.federation.secure.quantization import Quantizer
from fedquilt.federation.secure.session import PublicKeys, Session, check_floor
from fedquilt.federation.validation import LOSS, Code, ReplySpec
from fedquilt.structure.cut import Params, view_subnet_tensors
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.tensors import named_tensors
from fedquilt.training.context import ClientContext

CLIENTS, KEYS, SHARES, SURVIVORS = "clients", "keys", "shares", "survivors"
SHARES_CODE: Code = {SHARES: (torch.uint8, None)}
INTEGERS = {32: torch.int32, 64: torch.int64}  # which hold unsigned ones, as PyTorch prefers


@dataclass(frozen=True)
class StartSession:
    """The recipe of the first step: make new keys, and send the public ones.

    Args:
        session: What the round is about.
    """

    session: Session

    def run(self, task: Task, context: ClientContext) -> ClientResult:
        """Starts the session."""
        check_floor(self.session, context.min_threshold or 2)
        client = SecureClient(task.client, self.session)
        context.secrets.start(client)
        return _send(task, {KEYS: pack_keys([client.public_keys])})

    def reply_spec(self, task: Task, client: Client) -> ReplySpec:
        """What the reply may be: two keys."""
        return ReplySpec((), 0.0, {}, code={KEYS: (torch.uint8, (1, 2 * KEY_BYTES))})


@dataclass(frozen=True)
class ShareSecrets:
    """The recipe of the second step: send shares of its secrets, encrypted for other clients.

    The task's tensors are the public keys of all clients.

    Args:
        session: The session's id.
    """

    session: str

    def run(self, task: Task, context: ClientContext) -> ClientResult:
        """Shares its secrets."""
        client = context.secrets.read(task.client, self.session)
        message = to_host(task.params)
        keys = zip(message[CLIENTS].tolist(), unpack_keys(message[KEYS]), strict=True)
        after, shares = client.share(dict(keys))
        context.secrets.write(after)
        return _send(task, {SHARES: pack_bytes(join_messages(shares))})

    def reply_spec(self, task: Task, client: Client) -> ReplySpec:
        """What the reply may be: shares."""
        return ReplySpec((), 0.0, {}, code=SHARES_CODE)


@dataclass(frozen=True)
class MaskedReply:
    """The recipe of the third step: another one, whose update is hidden by masks.

    Nothing else leaves the client: no metrics, and no weight but as a part of the sum.

    Args:
        recipe: What the client does.
        session: The session's id.
        sharers: The clients that have shared their secrets.
        holdings: What clients send in this round, each once, in the order that rings depend on.
        number: Which of them this client sends.
        sizes: For each of its rings the number of the ring, and of its integers.
        quantizer: What makes integers of changes.
        seed: Of stochastic rounding.
        report_ring: The ring behind which the training loss is sent; one that all clients hold.
    """

    recipe: Recipe
    session: str
    sharers: tuple[int, ...]
    holdings: tuple[Holding, ...]
    number: int
    sizes: tuple[tuple[int, int], ...]
    quantizer: Quantizer
    seed: int
    report_ring: int

    def run(self, task: Task, context: ClientContext) -> ClientResult:
        """Does the work, and hides its update."""
        context.secrets.read(task.client, self.session)  # before the work, which may take long
        result = self.recipe.run(replace(task, recipe=self.recipe), context)
        update, subnets = result.update, self.holdings[self.number]
        before = [to_host(view_subnet_tensors(task.params, context.structure, s)) for s in subnets]
        vectors = encode_change(
            find_averaged_rings(context, self.holdings),
            subnets,
            before,
            _fill(update, subnets, before),
            self.quantizer,
            client=task.client,
            weight=update.weight,
            seed=self.seed,
        )
        report = encode_report(update.metrics.get(LOSS), self.quantizer)
        own = vectors.get(self.report_ring)
        vectors[self.report_ring] = report if own is None else np.concatenate([own, report])
        client = context.secrets.read(task.client, self.session)
        after, hidden = client.mask(self.sharers, vectors)
        context.secrets.write(after)
        code = pack_vectors(hidden)
        params = (code, *({} for _ in subnets[1:]))
        return replace(result, update=Update(task.client, subnets, params, 1.0, {}))

    def reply_spec(self, task: Task, client: Client) -> ReplySpec:
        """What the reply may be: integers for each ring."""
        dtype = INTEGERS[self.quantizer.bits]
        code = {str(ring): (dtype, (size,)) for ring, size in self.sizes}
        return ReplySpec(self.holdings[self.number], 1.0, {}, code=code)


@dataclass(frozen=True)
class RevealSecrets:
    """The recipe of the last step: reveal what the server needs to open the sums.

    The task's tensors are the clients whose vectors have come, and encrypted shares of others.

    Args:
        session: The session's id.
    """

    session: str

    def run(self, task: Task, context: ClientContext) -> ClientResult:
        """Reveals shares, and forgets all secrets."""
        client = context.secrets.read(task.client, self.session)
        message = to_host(task.params)
        survivors = message[SURVIVORS].tolist()
        sizes = measure_received(client.roster, client.number, client.sharers, survivors)
        encrypted = split_messages(unpack_bytes(message[SHARES]), sizes)
        after, revealed = client.reveal(survivors, encrypted)
        context.secrets.write(after)
        return _send(task, {SHARES: pack_bytes(join_messages(revealed))})

    def reply_spec(self, task: Task, client: Client) -> ReplySpec:
        """What the reply may be: shares."""
        return ReplySpec((), 0.0, {}, code=SHARES_CODE)


SECURE_STEPS = (StartSession, ShareSecrets, MaskedReply, RevealSecrets)


def refuse_plain_work(recipe: Recipe, floor: int | None) -> None:
    """Refuses work whose reply the server could read, if a client sends masked updates only.

    Args:
        recipe: What the server asks for.
        floor: The lowest threshold that the client accepts; None: it also sends plain replies.
    """
    if floor is not None and not isinstance(recipe, SECURE_STEPS):
        raise ConfigError(
            f"this client sends masked updates only (secure-threshold={floor}), and was asked for "
            f"{type(recipe).__name__}; train with secure_aggregation.threshold = {floor} or more"
        )


def _fill(
    update: Update, subnets: Sequence[Subnet], before: Sequence[Params]
) -> list[Mapping[str, Tensor]]:
    """The tensors of all subnets that were asked for; those that were not sent have not changed."""
    asked = [replace(subnet, excluded=()) for subnet in subnets]
    if [replace(subnet, excluded=()) for subnet in update.subnets] != asked:
        raise UpdateError(
            "in a secure sum the server chooses what clients send, and this work sends another "
            "part of the model; choose another method, or other settings of it"
        )
    return [{**old, **to_host(sent)} for old, sent in zip(before, update.params, strict=True)]


def to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors in the memory of the host, where integers are made of them."""
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def find_averaged_rings(context: ClientContext, holdings: Sequence[Holding]) -> Rings:
    """The rings of a round, as the server finds them: of all tensors that are averaged."""
    tensors = named_tensors(context.model).items()
    names = [name for name, tensor in tensors if tensor.is_floating_point()]
    return find_rings(context.structure, holdings, names)


def _send(task: Task, tensors: Mapping[str, Tensor]) -> ClientResult:
    return ClientResult(Update(task.client, (), (dict(tensors),), 0.0, {}))


def pack_keys(keys: Sequence[PublicKeys]) -> Tensor:
    """Public keys as a tensor of bytes."""
    data = b"".join(pair.channel + pair.mask for pair in keys)
    return pack_bytes(data).view(-1, 2 * KEY_BYTES)


def unpack_keys(tensor: Tensor) -> list[PublicKeys]:
    """The public keys that ``pack_keys`` was given."""
    rows = [bytes(row) for row in tensor.to(torch.uint8).reshape(-1, 2 * KEY_BYTES).numpy()]
    return [PublicKeys(row[:KEY_BYTES], row[KEY_BYTES:]) for row in rows]


def pack_bytes(data: bytes) -> Tensor:
    """Bytes as a tensor."""
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def unpack_bytes(tensor: Tensor) -> bytes:
    """The bytes that ``pack_bytes`` was given."""
    return tensor.numpy().tobytes()


def pack_vectors(vectors: Mapping[int, Integers]) -> dict[str, Tensor]:
    """Vectors by ring as tensors; the same bits, as signed integers."""
    return {
        str(ring): torch.from_numpy(vector.view(vector.dtype.str.replace("u", "i")))
        for ring, vector in vectors.items()
    }


def unpack_vectors(tensors: Mapping[str, Tensor]) -> dict[int, Integers]:
    """The vectors that ``pack_vectors`` was given."""
    arrays = {int(ring): tensor.numpy() for ring, tensor in tensors.items()}
    return {ring: array.view(array.dtype.str.replace("i", "u")) for ring, array in arrays.items()}
