"""Losses: what clients minimize on a batch, by name or as any callable.

A loss is the mean over the examples of a batch, so that batches can be weighed by their size.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedquilt.devices import CPU
from fedquilt.errors import ConfigError, DataError, describe_unknown
from fedquilt.learning.batch import as_batch, count_rows
from fedquilt.structure.tensors import find_tensors, to_arguments

IGNORED = -100  # a target that counts for nothing, as in PyTorch
MODEL_ARGUMENTS = ("model", "module", "net", "network")  # a loss whose first argument is so called


@lru_cache(maxsize=1024)
def label_mask(labels: tuple[int, ...], num_classes: int, device: torch.device = CPU) -> Tensor:
    """True for the classes that a client does not have.

    >>> label_mask((0, 2), 3)
    tensor([False,  True, False])
    """
    with torch.inference_mode(False):  # it is kept, and may be asked for in evaluation first
        foreign = torch.ones(num_classes, dtype=torch.bool)
        foreign[list(labels)] = False
        return foreign.to(device)


def mask_logits(logits: Tensor, foreign: Tensor) -> Tensor:
    """The logits with those of foreign classes replaced by zero (HeteroFL, Sec. 4).

    Zero, not minus infinity: the paper found that this gives stable results.
    """
    return logits.masked_fill(foreign, 0.0)


def classes_last(logits: Tensor, labels: Tensor) -> Tensor:
    """Logits with the classes on the last axis; PyTorch has them on the second, too.

    >>> images, masks = torch.zeros(2, 5, 8, 8), torch.zeros(2, 8, 8, dtype=torch.int64)
    >>> classes_last(images, masks).shape, classes_last(torch.zeros(2, 5), masks[:, 0, 0]).shape
    (torch.Size([2, 8, 8, 5]), torch.Size([2, 5]))
    """
    if logits.shape[:-1] == labels.shape or logits.ndim != labels.ndim + 1:
        return logits
    is_second = logits.shape[:1] + logits.shape[2:] == labels.shape
    return logits.movedim(1, -1) if is_second else logits


def cross_entropy(logits: Tensor, labels: Tensor, own: tuple[int, ...] | None = None) -> Tensor:
    """Cross entropy, over the client's own classes if they are given.

    Classes are on the last axis, or on the second where every position has a label.
    """
    logits = classes_last(logits, labels)
    if own is not None:
        logits = mask_logits(logits, label_mask(own, logits.shape[-1], logits.device))
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


@dataclass(frozen=True)
class Loss:
    """What clients minimize: the mean over the examples of a batch.

    Subclasses say what it is of outputs and targets (``of_output``), or of the model and the whole
    batch (``of_batch``). Those that have a name are in ``LOSSES``:

    >>> import fedquilt as fq
    >>> loss: fq.Loss = fq.LOSSES["mae"]
    >>> loss.of_output(torch.tensor([1.0, 3.0]), torch.zeros(2))
    tensor(2.)
    """

    name = "loss"
    has_classes = False  # whether targets are class numbers, and outputs their logits
    least = -math.inf  # that it can be
    needs_batch = False  # whether it is of the model and the whole batch

    def of_output(self, output: Any, targets: Any, labels: tuple[int, ...] | None = None) -> Tensor:
        """The loss of an output.

        Args:
            output: What the model answers.
            targets: What it should answer.
            labels: The classes that the loss is over; None: all. Losses without classes ignore it.
        """
        raise NotImplementedError

    def of_batch(
        self, module: nn.Module, batch: Any, labels: tuple[int, ...] | None = None
    ) -> Tensor:
        """The loss of a module on a batch.

        Args:
            module: The net.
            batch: Inputs and targets.
            labels: As in ``of_output``.
        """
        inputs, targets = batch
        return self.of_output(module(*to_arguments(inputs)), targets, labels)

    def count(self, targets: Any) -> int:
        """What the loss is the mean over: the number of examples."""
        return count_rows(targets)

    def distil(self, output: Any, teacher: Any, targets: Any = None) -> Tensor:
        """How far an output is from a teacher's, which learns nothing: the mean squared difference.

        Args:
            output: What learns.
            teacher: What it learns from.
            targets: Those of the batch, which say on which axis classes are.
        """
        pairs = zip(find_tensors(output), find_tensors(teacher), strict=True)
        parts = [F.mse_loss(one, other.detach()) for one, other in pairs]
        return torch.stack(parts).sum()


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """Cross entropy of class numbers: one for each example, or one at every position."""

    name = "cross-entropy"
    has_classes = True
    least = 0.0

    def of_output(self, output: Any, targets: Any, labels: tuple[int, ...] | None = None) -> Tensor:
        """The mean over all targets, over some classes."""
        return cross_entropy(output, targets, labels)

    def count(self, targets: Any) -> int:
        """The number of targets, without those that count for nothing."""
        return count_labels(targets)

    def distil(self, output: Any, teacher: Any, targets: Any = None) -> Tensor:
        """Cross entropy against a teacher's answers, from which the teacher learns nothing.

        Up to a constant, the divergence KL(softmax(teacher) ‖ softmax(output)). Logits may have any
        number of axes; classes are on the last, unless the targets say otherwise.

        >>> CrossEntropy().distil(torch.zeros(1, 2), torch.tensor([[50.0, -50.0]]))  # ln 2
        tensor(0.6931)
        """
        if targets is not None:
            output, teacher = classes_last(output, targets), classes_last(teacher, targets)
        answers = teacher.detach().softmax(-1)
        return F.cross_entropy(output.flatten(0, -2), answers.flatten(0, -2))


def count_labels(labels: Tensor) -> int:
    """The number of class numbers that count.

    >>> count_labels(torch.tensor([3, 1, -100]))
    2
    """
    return labels.numel() - int((labels == IGNORED).sum())


OutputFunction = Callable[[Any, Any], Tensor]
BatchFunction = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class OutputLoss(Loss):
    """A function, or a module such as ``nn.MSELoss()``, of outputs and targets."""

    function: OutputFunction
    label: str = ""

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name of the function."""
        return self.label or name_of(self.function)

    def of_output(self, output: Any, targets: Any, labels: tuple[int, ...] | None = None) -> Tensor:
        """Calls the function."""
        return self.function(output, targets)


@dataclass(frozen=True)
class BatchLoss(Loss):
    """A function of the model and the whole batch, which has full control.

    The batch is as the data set gives it: a pair (inputs, targets), or one dict.

    Args:
        function: Takes the model and the batch, and returns the mean loss.

    >>> def loss(model, batch):
    ...     inputs, targets = batch
    ...     return (model(inputs) - targets).square().mean()
    >>> BatchLoss(loss).of_batch(nn.Identity(), (torch.ones(2), torch.zeros(2)))
    tensor(1.)
    """

    function: BatchFunction
    needs_batch = True

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name of the function."""
        return name_of(self.function)

    def of_output(self, output: Any, targets: Any, labels: tuple[int, ...] | None = None) -> Tensor:
        """Refuses: the function wants the model."""
        raise ConfigError(
            f"the loss '{self.name}' is of the model and the batch, and this method needs one of "
            "(output, target): give such a loss"
        )

    def of_batch(
        self, module: nn.Module, batch: Any, labels: tuple[int, ...] | None = None
    ) -> Tensor:
        """Calls the function."""
        return self.function(module, as_batch(batch).as_given())


@dataclass(frozen=True)
class MissingLoss(Loss):
    """The loss of a run that only its user's code knows: the model can be used, not evaluated."""

    label: str

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name of the user's loss."""
        return self.label

    def of_output(self, output: Any, targets: Any, labels: tuple[int, ...] | None = None) -> Tensor:
        """Refuses."""
        raise ConfigError(
            f"the run was trained with a loss or metrics of its own code ('{self.label}'); to "
            "evaluate it, add --trust, or open it with fq.open_run(..., loss=..., metrics=...)"
        )


def name_of(function: Any) -> str:
    """How messages call a callable.

    >>> name_of(nn.MSELoss()), name_of(torch.dist)
    ('MSELoss', 'dist')
    """
    return getattr(function, "__name__", type(function).__name__)


def match_shapes(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """An output and targets of one shape; a column of one number each is a row of numbers.

    Other shapes are refused: PyTorch would broadcast them, and the loss would mean nothing.
    """
    if output.shape == (*targets.shape, 1):
        output = output.squeeze(-1)
    elif targets.shape == (*output.shape, 1):
        targets = targets.squeeze(-1)
    if output.shape != targets.shape:
        raise DataError(
            "this loss or metric wants outputs and targets of one shape, got "
            f"{tuple(output.shape)} and {tuple(targets.shape)}; reshape the targets, or the "
            "model's output"
        )
    return output, targets.to(output.dtype)


def mse(output: Tensor, targets: Tensor) -> Tensor:
    """The mean squared error."""
    return F.mse_loss(*match_shapes(output, targets))


def mae(output: Tensor, targets: Tensor) -> Tensor:
    """The mean absolute error."""
    return F.l1_loss(*match_shapes(output, targets))


def huber(output: Tensor, targets: Tensor) -> Tensor:
    """Huber's loss: squared below 1, linear above."""
    return F.huber_loss(*match_shapes(output, targets))


def bce(output: Tensor, targets: Tensor) -> Tensor:
    """Binary cross entropy of logits; each number of the output is a yes or no of its own."""
    return F.binary_cross_entropy_with_logits(*match_shapes(output, targets))


def poisson(output: Tensor, targets: Tensor) -> Tensor:
    """The negative log likelihood of counts, where the output is the logarithm of their rate."""
    return F.poisson_nll_loss(*match_shapes(output, targets))


def dice(output: Tensor, targets: Tensor) -> Tensor:
    """One minus the soft Dice coefficient of each example's mask, where outputs are logits."""
    logits, masks = match_shapes(output, targets)
    said, masks = logits.sigmoid().flatten(1), masks.flatten(1)
    overlap = 2 * (said * masks).sum(1) + 1
    return (1 - overlap / (said.sum(1) + masks.sum(1) + 1)).mean()


def next_token(output: Any, tokens: Tensor) -> Tensor:
    """Cross entropy of each token given those before it, for a model of (batch, length, tokens).

    Targets are the tokens of the input themselves. The output may have the logits in ``.logits``,
    as models of Hugging Face do.
    """
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits[:, :-1].flatten(0, -2), tokens[:, 1:].flatten())


LOSSES: Mapping[str, Loss] = {
    "cross-entropy": CrossEntropy(),
    **{
        name: OutputLoss(function, name)
        for name, function in {
            "mse": mse,
            "mae": mae,
            "huber": huber,
            "bce": bce,
            "dice": dice,
            "poisson": poisson,
            "next-token": next_token,
        }.items()
    },
}
CROSS_ENTROPY = LOSSES["cross-entropy"]


def make_loss(loss: Any) -> Loss:
    """A loss from its name, a callable, or a loss itself.

    A callable is of (output, target), unless its first argument is called ``model``: then it is of
    (model, batch). ``BatchLoss(function)`` says so, too.

    >>> make_loss("mse").name, make_loss(nn.HuberLoss()).name
    ('mse', 'HuberLoss')
    >>> make_loss(lambda model, batch: model(batch[0]).mean()).needs_batch
    True
    """
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, str):
        if loss not in LOSSES:
            raise ConfigError(describe_unknown("loss", loss, LOSSES) + ", or file.py:function")
        return LOSSES[loss]
    if isinstance(loss, nn.CrossEntropyLoss) and _is_plain(loss):
        return CROSS_ENTROPY
    if isinstance(loss, type):
        raise ConfigError(f"a loss is an object, got the class {loss.__name__}; write it with ()")
    if not callable(loss):
        raise ConfigError(
            f"a loss is a name, or a callable (output, target) -> Tensor, got "
            f"{type(loss).__name__}; known names: {', '.join(LOSSES)}"
        )
    return BatchLoss(loss) if _wants_model(loss) else OutputLoss(loss)


def _is_plain(loss: nn.CrossEntropyLoss) -> bool:
    """Whether PyTorch's loss has no other settings than its defaults."""
    is_mean = loss.reduction == "mean" and loss.ignore_index == IGNORED
    return is_mean and loss.weight is None and not loss.label_smoothing


def _wants_model(function: Callable[..., Any]) -> bool:
    if isinstance(function, nn.Module):
        return False
    try:
        first = next(iter(inspect.signature(function).parameters), "")
    except (TypeError, ValueError):  # of a function that is not written in Python
        return False
    return first in MODEL_ARGUMENTS


def check_loss(value: Any, loss: Loss) -> Tensor:
    """The value of a loss, refused if it is no scalar that can be differentiated.

    Args:
        value: What the loss returned.
        loss: The loss, for its name.
    """
    if not isinstance(value, Tensor):
        what = f"a {type(value).__name__}"
    elif value.ndim:
        what = f"a tensor of shape {tuple(value.shape)}"
    elif not value.requires_grad:
        what = "a number that does not depend on the model's parameters"
    else:
        return value
    raise ConfigError(
        f"a loss returns one number, the mean over the batch, as a tensor with a gradient; "
        f"'{loss.name}' returns {what}; take its .mean(), and do not detach it"
    )
