"""Sparse ternary compression: changes of weights as codes, with error feedback.

Sattler, Wiedemann, Müller, Samek. "Robust and Communication-Efficient Federated Learning from
Non-IID Data." IEEE TNNLS 2020, Algorithm 1, and lines 6-14 of Algorithm 2.

Symbols of the paper -> names here: W_i -> start, R_i -> residual, ΔW_i -> change, p_up, p_down ->
sparsity_up, sparsity_down, μ -> magnitude.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from fedquilt.devices import CPU
from fedquilt.errors import TrainingError
from fedquilt.federation.client import Client, ClientResult, Task, Update
from fedquilt.federation.constants import is_constant
from fedquilt.federation.golomb import Ternary, decode, encode, max_entries
from fedquilt.federation.validation import ReplySpec
from fedquilt.structure.cut import Params
from fedquilt.structure.subnet import Subnet
from fedquilt.training.context import ClientContext
from fedquilt.training.local_sgd import LocalSGD

CODE = "code"  # under this name a change travels to the server
ROUND, RESIDUAL, WEIGHTS = "round", "residual", "weights/"  # what a client keeps


@dataclass(frozen=True)
class TernarySGD:
    """The recipe: ``sgd`` on the whole net; what it changed goes back as a code.

    A task with a subnet brings the server's weights at the start of ``round``. One without brings
    the codes by which they changed, each named by its round, at least from the round of which the
    client has a copy. A client that has no copy, or an older one, returns an empty update.

    Args:
        sgd: How the net is trained.
        round: The number of this round.
        sparsity_up: The fraction of changes that the client sends.
        sparsity_down: The fraction of changes that the server sends.
        whole: The net as it is trained.
    """

    sgd: LocalSGD
    round: int
    sparsity_up: float
    sparsity_down: float
    whole: Subnet = field(default_factory=Subnet)  # the net, as it is trained

    def run(self, task: Task, context: ClientContext) -> ClientResult:
        """Catches up with the server, trains, and keeps what the code does not say."""
        kept = context.client_state
        start: Params | None
        if task.subnets:
            start = {name: task.params[name] for name in context.structure.tensor_names(self.whole)}
        else:
            start = self.apply_missed_codes(task.params, kept)
        if start is None:
            return ClientResult(Update(task.client, (), (), 0.0, {}))
        whole = (self.whole,)
        result = self.sgd.run(replace(task, subnets=whole, params=start), context)
        update = result.update
        old, new = flatten_weights(start), flatten_weights(update.params[0])
        change = (new - old).masked_fill_(is_constant(new, old), 0)
        if RESIDUAL in kept:
            change += kept[RESIDUAL]
        if not bool(torch.isfinite(change).all()):
            raise TrainingError("its weights are not finite any more; its training diverged")
        code, residual = compress(change, self.sparsity_up)
        state = {
            **(result.state or {}),
            ROUND: torch.tensor(self.round),
            RESIDUAL: residual,
            **{WEIGHTS + name: tensor for name, tensor in start.items()},
        }
        sent = replace(update, params=({CODE: code},))
        return ClientResult(sent, state, local_model=(whole, update.params))

    def reply_spec(self, task: Task, client: Client) -> ReplySpec:
        """What the reply may be: a code of the whole net, or nothing."""
        return replace(self.sgd.reply_spec(task, client), subnets=(self.whole,), may_be_empty=True)

    def apply_missed_codes(self, codes: Params, kept: Mapping[str, Tensor]) -> Params | None:
        """The server's weights, from the client's copy and codes; None if it cannot know them."""
        own_round = int(kept[ROUND]) if ROUND in kept else self.round + 1
        missed = [str(number) for number in range(own_round, self.round)]
        if own_round > self.round or not codes.keys() >= set(missed):
            return None
        copy = {n.removeprefix(WEIGHTS): t for n, t in kept.items() if n.startswith(WEIGHTS)}
        return apply_codes(copy, (codes[name] for name in missed), self.sparsity_down)


def ternarize(change: Tensor, sparsity: float) -> Ternary:
    """Algorithm 1: the k largest entries, each as its sign times the mean of their magnitudes.

    Of equal ones the first are taken, so that there are k, and zeros never.

    >>> sparse = ternarize(torch.tensor([0.0, -3.0, 1.0, 5.0]), 0.5)
    >>> sparse.positions.tolist(), sparse.values.tolist()
    ([1, 3], [-4.0, 4.0])
    """
    values = change.numpy()
    sizes = np.abs(values)
    count = min(max_entries(len(sizes), sparsity), int(np.count_nonzero(sizes)))
    if not count:
        return Ternary(np.zeros(0, np.int64), np.zeros(0, np.bool_), np.float32(0))
    least = np.partition(sizes, len(sizes) - count)[len(sizes) - count]
    above, equal = np.flatnonzero(sizes > least), np.flatnonzero(sizes == least)
    positions = np.sort(np.concatenate([above, equal[: count - len(above)]]))
    # not by torch, whose sums depend on the number of threads
    magnitude = np.float32(sizes[positions].mean(dtype=np.float64))
    return Ternary(positions, values[positions] < 0, magnitude)


def compress(change: Tensor, sparsity: float) -> tuple[Tensor, Tensor]:
    """The code of a change, and what is left of it: R <- ΔW - STC(ΔW)."""
    change = change.cpu()  # where codes are written
    sparse = ternarize(change, sparsity)
    left = change.clone()
    left[torch.from_numpy(sparse.positions)] -= torch.from_numpy(sparse.values)
    return torch.from_numpy(encode(sparse, len(change), sparsity)), left


def add_code(vector: Tensor, code: Tensor, sparsity: float) -> None:
    """Adds the change that a code means, in place; a ValueError says why it means none."""
    if code.dtype != torch.uint8 or code.ndim != 1:
        raise ValueError(f"has the shape {tuple(code.shape)} of {code.dtype}; it is a row of bytes")
    sparse = decode(code.cpu().numpy(), len(vector), sparsity)
    positions, values = torch.from_numpy(sparse.positions), torch.from_numpy(sparse.values)
    vector[positions.to(vector.device)] += values.to(vector.device)


def apply_codes(params: Params, codes: Iterable[Tensor], sparsity: float) -> dict[str, Tensor]:
    """The tensors after changes, one after the other: the same bits wherever it is done."""
    vector = flatten_weights(params)
    for code in codes:
        add_code(vector, code, sparsity)
    return unflatten_weights(vector, params)


def flatten_weights(params: Params) -> Tensor:
    """All weights as one new vector, in the order of their names."""
    weights = [params[n].reshape(-1) for n in sorted(params) if params[n].is_floating_point()]
    device = weights[0].device if weights else CPU
    return torch.cat([torch.zeros(0, device=device), *weights])


def zero_change(params: Params) -> Tensor:
    """The vector of a change that changes nothing."""
    return torch.zeros(sum(t.numel() for t in params.values() if t.is_floating_point()))


def unflatten_weights(vector: Tensor, like: Params) -> dict[str, Tensor]:
    """The tensors of a vector of ``flatten_weights``; those of integers are taken from ``like``."""
    tensors, first = dict(like), 0
    for name in sorted(like):
        if like[name].is_floating_point():
            last = first + like[name].numel()
            tensors[name] = vector[first:last].view(like[name].shape).clone()
            first = last
    return tensors
