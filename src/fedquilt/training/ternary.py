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

from fedquilt.errors import TrainingError
from fedquilt.federation.boundary import Terms
from fedquilt.federation.client import Client, Task, Update
from fedquilt.federation.constants import is_constant
from fedquilt.federation.golomb import Ternary, decoded, encoded, most_entries
from fedquilt.structure.cut import Params
from fedquilt.structure.subnet import Subnet
from fedquilt.training.recipe import Workbench
from fedquilt.training.sgd import SGD

CODE = "code"  # under this name a change travels to the server
ROUND, RESIDUAL, WEIGHTS = "round", "residual", "weights/"  # what a client keeps


@dataclass(frozen=True)
class TernarySGD:
    """The recipe: ``sgd`` on the whole net; what it changed goes back as a code.

    A task with a subnet brings the server's weights at the start of ``round``. One without brings
    the codes by which they changed, each named by its round, at least from the round of which the
    client has a copy. A client that has none, or an older one, says so with an update of nothing.
    """

    sgd: SGD
    round: int
    sparsity_up: float
    sparsity_down: float
    whole: Subnet = field(default_factory=Subnet)  # the net, as it is trained

    def run(self, task: Task, bench: Workbench) -> Update:
        """Catches up with the server, trains, and keeps what the code does not say."""
        kept = bench.kept or {}
        start: Params | None
        if task.subnets:
            start = {name: task.params[name] for name in bench.structure.names(self.whole)}
        else:
            start = self.caught_up(task.params, kept)
        if start is None:
            return Update(task.client, (), (), 0.0, {})
        whole = (self.whole,)
        update = self.sgd.run(replace(task, subnets=whole, params=start), bench)
        bench.own = (whole, update.params)
        old, new = flattened(start), flattened(update.params[0])
        change = (new - old).masked_fill_(is_constant(new, old), 0)
        if RESIDUAL in kept:
            change += kept[RESIDUAL]
        if not bool(torch.isfinite(change).all()):
            raise TrainingError("its weights are not finite any more; its training diverged")
        code, residual = compressed(change, self.sparsity_up)
        bench.to_keep = {
            ROUND: torch.tensor(self.round),
            RESIDUAL: residual,
            **{WEIGHTS + name: tensor for name, tensor in start.items()},
        }
        return replace(update, params=({CODE: code},))

    def terms(self, task: Task, client: Client) -> Terms:
        """What its answer may be: a code of the whole net, or nothing."""
        return replace(self.sgd.terms(task, client), subnets=(self.whole,), may_be_empty=True)

    def caught_up(self, codes: Params, kept: Mapping[str, Tensor]) -> Params | None:
        """The server's weights, from the client's copy and codes; None if it cannot know them."""
        there = int(kept[ROUND]) if ROUND in kept else self.round + 1
        missed = [str(number) for number in range(there, self.round)]
        if there > self.round or not codes.keys() >= set(missed):
            return None
        copy = {n.removeprefix(WEIGHTS): t for n, t in kept.items() if n.startswith(WEIGHTS)}
        return moved(copy, (codes[name] for name in missed), self.sparsity_down)


def ternarised(change: Tensor, sparsity: float) -> Ternary:
    """Algorithm 1: the k largest entries, each as its sign times the mean of their magnitudes.

    Of equal ones the first are taken, so that there are k, and zeros never.

    >>> found = ternarised(torch.tensor([0.0, -3.0, 1.0, 5.0]), 0.5)
    >>> found.positions.tolist(), found.values.tolist()
    ([1, 3], [-4.0, 4.0])
    """
    values = change.numpy()
    sizes = np.abs(values)
    count = min(most_entries(len(sizes), sparsity), int(np.count_nonzero(sizes)))
    if not count:
        return Ternary(np.zeros(0, np.int64), np.zeros(0, np.bool_), np.float32(0))
    least = np.partition(sizes, len(sizes) - count)[len(sizes) - count]
    above, equal = np.flatnonzero(sizes > least), np.flatnonzero(sizes == least)
    positions = np.sort(np.concatenate([above, equal[: count - len(above)]]))
    # not by torch, whose sums depend on the number of threads
    magnitude = np.float32(sizes[positions].mean(dtype=np.float64))
    return Ternary(positions, values[positions] < 0, magnitude)


def compressed(change: Tensor, sparsity: float) -> tuple[Tensor, Tensor]:
    """The code of a change, and what is left of it: R <- ΔW - STC(ΔW)."""
    found = ternarised(change, sparsity)
    left = change.clone()
    left[torch.from_numpy(found.positions)] -= torch.from_numpy(found.values)
    return torch.from_numpy(encoded(found, len(change), sparsity)), left


def added(vector: Tensor, code: Tensor, sparsity: float) -> None:
    """Adds the change that a code means, in place; a ValueError says why it means none."""
    if code.dtype != torch.uint8 or code.ndim != 1:
        raise ValueError(f"has the shape {tuple(code.shape)} of {code.dtype}; it is a row of bytes")
    found = decoded(code.numpy(), len(vector), sparsity)
    vector[torch.from_numpy(found.positions)] += torch.from_numpy(found.values)


def moved(params: Params, codes: Iterable[Tensor], sparsity: float) -> dict[str, Tensor]:
    """The tensors after changes, one after the other: the same bits wherever it is done."""
    vector = flattened(params)
    for code in codes:
        added(vector, code, sparsity)
    return shaped(vector, params)


def flattened(params: Params) -> Tensor:
    """All weights as one new vector, in the order of their names."""
    weights = [params[n].reshape(-1) for n in sorted(params) if params[n].is_floating_point()]
    return torch.cat([torch.zeros(0), *weights])


def unmoved(params: Params) -> Tensor:
    """The vector of a change that changes nothing."""
    return torch.zeros(sum(t.numel() for t in params.values() if t.is_floating_point()))


def shaped(vector: Tensor, like: Params) -> dict[str, Tensor]:
    """The tensors that ``flattened`` made one of; those of integers are as before."""
    found, first = dict(like), 0
    for name in sorted(like):
        if like[name].is_floating_point():
            last = first + like[name].numel()
            found[name] = vector[first:last].view(like[name].shape).clone()
            first = last
    return found
