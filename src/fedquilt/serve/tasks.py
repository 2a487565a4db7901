"""How a model's output becomes an answer: by its task, one function each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedquilt.runs.run import Run

TOP = 10  # classes whose probability is told where there are many
MAX_CLASSES = 100  # whose probabilities are all told


@dataclass(frozen=True)
class TaskInfo:
    """What a model predicts, and what its classes are called."""

    kind: str
    shape: tuple[int, ...]  # of the output for one example
    class_names: tuple[str, ...] = ()

    def answer(self, outputs: Tensor) -> list[dict[str, Any]]:
        """One answer for each example of a batch."""
        return ANSWERS.get(self.kind, _answer_raw)(self, outputs)

    def describe(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "kind": self.kind,
            "output_shape": list(self.shape),
            "classes": list(self.class_names),
        }


def find_task(run: Run, output: Tensor, class_names: Sequence[str] = ()) -> TaskInfo:
    """The task of a run, by its loss; ``output`` is what its model says to one example."""
    shape, task = tuple(output.shape[1:]), run.setup.task
    if len(shape) == 1 and len(class_names) not in (0, shape[0]):
        class_names = ()
    kind = "classification" if task.has_classes else task.loss.name
    return TaskInfo(kind, shape, tuple(class_names))


def _answer_classes(task: TaskInfo, outputs: Tensor) -> list[dict[str, Any]]:
    """The most likely class and its probability; of sequences and images, one of each position."""
    if outputs.ndim == 1:
        return _answer_raw(task, outputs)
    axis = 1 if outputs.ndim > 3 else -1  # masks have their classes where images have channels
    probabilities = outputs.softmax(axis)
    if outputs.ndim > 2:
        confidence, labels = probabilities.max(axis)
        pairs = zip(labels.tolist(), confidence.tolist(), strict=True)
        return [{"label": label, "confidence": sure} for label, sure in pairs]
    confidence, labels = probabilities.max(-1)
    answers = [
        {"label": label, "confidence": sure}
        for label, sure in zip(labels.tolist(), confidence.tolist(), strict=True)
    ]
    for answer, row in zip(answers, probabilities, strict=True):
        if task.class_names:
            answer["name"] = task.class_names[answer["label"]]
        if len(row) <= MAX_CLASSES:
            answer["probabilities"] = row.tolist()
        else:
            values, classes = row.topk(TOP)
            pairs = zip(classes.tolist(), values.tolist(), strict=True)
            answer["top"] = [list(pair) for pair in pairs]
    return answers


def _answer_yes_or_no(task: TaskInfo, outputs: Tensor) -> list[dict[str, Any]]:
    """The probability of every yes."""
    return [{"probability": row} for row in outputs.sigmoid().tolist()]


def _answer_raw(task: TaskInfo, outputs: Tensor) -> list[dict[str, Any]]:
    return [{"output": row} for row in outputs.tolist()]


ANSWERS: dict[str, Callable[[TaskInfo, Tensor], list[dict[str, Any]]]] = {
    "classification": _answer_classes,
    "bce": _answer_yes_or_no,
    "dice": _answer_yes_or_no,
}


def is_finite(outputs: Tensor) -> bool:
    """Whether an answer can be told."""
    return bool(torch.isfinite(outputs).all())
