"""Training whose reply tells no more than a change of bounded norm.

Whatever else a recipe would report stays on the client: losses, numbers of examples and of batches,
which classes and tokens it has, which of its subnets it trained. The change has every cell of the
task's subnets, zero where the recipe sent none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedquilt.federation.client import Client, ClientResult, Recipe, Task, Update
from fedquilt.federation.privacy.mechanism import WITHIN, compute_scale
from fedquilt.federation.privacy.noise import derive_secret, digest_tensors, draw_noise
from fedquilt.federation.validation import ReplySpec, count_spec
from fedquilt.structure.cut import Params, copy_subnet_tensors, index_cells_within, write_cells
from fedquilt.structure.structure import Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.training.context import ClientContext


@dataclass(frozen=True)
class PrivateReply:
    """The recipe: another one, whose result is reduced to a change of bounded norm.

    Args:
        recipe: What the client does.
        clip: C, the largest norm of the change; None: it is not bounded.
        max_examples: A client with fewer training examples scales its change down in proportion;
            None: it does not.
        counts_clipping: Whether the client reports whether its change was within the norm.
        noise: The standard deviation of the noise that the client adds to each cell.
        secret: What the noise is computed from, as hexadecimal digits; on a machine of its own a
            client also has a secret that the server does not know.
        round: The number of the round.
    """

    recipe: Recipe
    clip: float | None = None
    max_examples: int | None = None
    counts_clipping: bool = False
    noise: float = 0.0
    secret: str = ""
    round: int = 0

    def run(self, task: Task, context: ClientContext) -> ClientResult:
        """Does the work, and sends the bounded change."""
        examples = context.examples("train", task.client)
        own = replace(task, recipe=_give_labels(self.recipe, examples, context))
        result = own.recipe.run(own, context).to_host()  # where noise is drawn, in float64
        before = [
            {name: tensor.cpu() for name, tensor in tensors.items()}
            for tensors in (
                copy_subnet_tensors(task.params, context.structure, s) for s in task.subnets
            )
        ]
        after = fill_reply(context.structure, task.subnets, before, result.update)
        changes = _subtract(after, before)
        norm = math.sqrt(sum(float(c.square().sum()) for part in changes for c in part.values()))
        scale = 1.0 if self.clip is None else compute_scale(norm, self.clip)
        if self.max_examples is not None:
            scale *= min(len(examples), self.max_examples) / self.max_examples
        for part in changes:
            for change in part.values():
                change.mul_(scale)
        if self.noise:
            self._add_noise(task.client, changes, mix_secret(self.secret, context))
        sent = tuple(
            {n: (t.double() + part[n]).to(t.dtype) if n in part else t for n, t in old.items()}
            for old, part in zip(before, changes, strict=True)
        )
        within = self.clip is not None and norm <= self.clip
        metrics = {WITHIN: float(within)} if self.counts_clipping else {}
        update = Update(task.client, task.subnets, sent, 1.0, metrics)
        return replace(result, update=update)

    def reply_spec(self, task: Task, client: Client) -> ReplySpec:
        """The task's subnets, and nothing that was not accounted for."""
        metrics = {WITHIN: count_spec(1)} if self.counts_clipping else {}
        return ReplySpec(task.subnets, 1.0, metrics)

    def _add_noise(self, client: int, changes: Sequence[dict[str, Tensor]], secret: bytes) -> None:
        """Adds the client's noise to every cell, in place."""
        digest = digest_tensors(change for part in changes for change in part.values())
        for number, part in enumerate(changes):
            shapes = {f"{digest}/{number}/{name}": tuple(c.shape) for name, c in part.items()}
            drawn = draw_noise(secret, client, self.round, shapes, self.noise)
            for change, noise in zip(part.values(), drawn.values(), strict=True):
                change.add_(noise)


def mix_secret(given: str, context: ClientContext) -> bytes:
    """What a client's noise comes from: what its task says, and what only its machine knows."""
    return derive_secret(bytes.fromhex(given) + context.noise_secret, "client")


def fill_reply(
    structure: Structure, asked: Sequence[Subnet], before: Sequence[Params], update: Update
) -> list[dict[str, Tensor]]:
    """The tensors of all asked subnets: as the update has them, and as they were received else."""
    left = list(zip(update.subnets, update.params, strict=True))
    filled = []
    for subnet, received in zip(asked, before, strict=True):
        tensors = dict(received)
        if left and _is_same_part(left[0][0], subnet):
            sent, values = left.pop(0)
            where = index_cells_within(structure, subnet, sent) if sent != subnet else None
            for name in values.keys() & tensors.keys():
                if where is None or tensors[name].shape == values[name].shape:
                    tensors[name] = values[name]
                else:
                    tensors[name] = tensors[name].clone()
                    write_cells(tensors[name], where[name], values[name])
        filled.append(tensors)
    assert not left, "an update has the subnets of its task, in their order"
    return filled


def _is_same_part(sent: Subnet, asked: Subnet) -> bool:
    """Whether what was sent is the asked subnet, or rows of it."""
    if (sent.private, sent.owner) != (asked.private, asked.owner):
        return False
    masks = dict(sent.kept)
    return sent.skipped == asked.skipped and all(
        group in masks and not masks[group] & ~mask for group, mask in asked.kept
    )


def _subtract(after: Sequence[Params], before: Sequence[Params]) -> list[dict[str, Tensor]]:
    """The changes in float64, of tensors of floating-point numbers; constants do not change."""
    return [
        {
            name: torch.where(old.isfinite(), new[name].double() - old.double(), 0.0)
            for name, old in received.items()
            if old.is_floating_point()
        }
        for new, received in zip(after, before, strict=True)
    ]


def _give_labels(recipe: Any, examples: Any, context: ClientContext) -> Any:
    """A recipe whose loss is over the client's classes, with these: the server is not told them."""
    if getattr(recipe, "masked", False) and context.task.has_classes:
        return replace(recipe, labels=tuple(sorted(examples.label_set)))
    return recipe
