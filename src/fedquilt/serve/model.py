"""A finished run as a server holds it: every offered size, its cost and its speed."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedquilt.customize.ensemble import Ensemble
from fedquilt.customize.info import InputSpec, find_info
from fedquilt.errors import ConfigError
from fedquilt.evaluation.accuracy import compute_ensemble_cost
from fedquilt.evaluation.scores import SizeScore
from fedquilt.evaluation.summary import get_main_value
from fedquilt.methods.method import SIZE_NAMES
from fedquilt.runs.run import Run
from fedquilt.serve.errors import RequestError
from fedquilt.serve.preprocess import InputReader, make_reader
from fedquilt.serve.tasks import TaskInfo, find_task
from fedquilt.serve.wish import Wish
from fedquilt.structure.budget import Budget
from fedquilt.structure.tensors import find_tensors
from fedquilt.training.dualnorm import at_robustness
from fedquilt.training.tracking import needs_batches

MAX_SIZES = 32
TIMED_CALLS, TIMED_SECONDS = 30, 0.5  # at most, of each size


@dataclass(frozen=True, eq=False)
class SizedModel:
    """One size of the model: what it costs, how fast it is here, and how it is called."""

    size: float
    params: int
    macs: int
    milliseconds: float  # the median of single examples on this machine
    score: float | None  # the main metric of the run's last evaluation
    is_trained: bool
    module: nn.Module

    def __call__(self, robustness: float | None, inputs: tuple[Tensor, ...]) -> Tensor:
        """The output for a batch; one caller at a time."""
        return _call(self.module, self.size, robustness, inputs)

    def describe(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "size": self.size,
            "params": self.params,
            "macs": self.macs,
            "ms": round(self.milliseconds, 4),
            "score": self.score,
            "is_trained": self.is_trained,
        }


@dataclass(frozen=True, eq=False)
class ServedModel:
    """All sizes that a server offers, the largest first, and what it says about them."""

    name: str
    method: str
    size_name: str
    sizes: tuple[SizedModel, ...]
    has_robustness: bool
    needs_batches: bool  # normalizes every batch by itself, so that requests are not put together
    inputs: tuple[InputSpec, ...]
    reader: InputReader
    task: TaskInfo
    warnings: tuple[str, ...] = ()

    @staticmethod
    def from_run(
        run: Run, sizes: Sequence[float] | None = None, labels: Sequence[str] = ()
    ) -> ServedModel:
        """Builds the sizes of a run, those that were trained by default, and measures them."""
        widths = sorted(set(sizes or run.method.sizes(run.setup)), reverse=True)
        if len(widths) > MAX_SIZES:
            raise ConfigError(
                f"a server offers at most {MAX_SIZES} sizes, got {len(widths)}; give fewer"
            )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            modules = _build_modules(run, widths)
        offered = tuple(_measure_size(run, width, module) for width, module in modules.items())
        largest = offered[0]
        reader = make_reader(run, tuple(labels))
        with torch.inference_mode():
            output = largest(None, reader.example)
        return ServedModel(
            name=type(run.method).__name__ if run.folder is None else run.folder.resolve().name,
            method=type(run.method).__name__,
            size_name=SIZE_NAMES[run.method.size_kind],
            sizes=offered,
            has_robustness=_has_robustness(largest.module),
            needs_batches=any(needs_batches(s.module) for s in offered),
            inputs=run.info.inputs,
            reader=reader,
            task=find_task(run, output, reader.class_names),
            warnings=tuple(dict.fromkeys(str(w.message) for w in caught)),
        )

    def choose(self, wish: Wish) -> SizedModel:
        """The largest size within all limits of a wish."""
        if wish.robustness is not None and not self.has_robustness:
            raise RequestError(422, "this model has no robustness to choose; leave out robustness=")
        for sized in self.sizes:
            if _meets(sized, wish):
                return sized
        small = self.sizes[-1]
        raise RequestError(
            422,
            f"no size meets these limits; the smallest is {small.size:g}, with {small.params} "
            f"parameters, {small.macs} MACs and {small.milliseconds:.3g} ms",
        )

    def describe(self) -> dict[str, Any]:
        """What users may know about the model, as JSON; no path is part of it."""
        return {
            "name": self.name,
            "method": self.method,
            "size_name": self.size_name,
            "task": self.task.describe(),
            "input": self.reader.describe(),
            "shapes": [list(spec.shape[1:]) for spec in self.inputs],
            "dtypes": [spec.dtype for spec in self.inputs],
            "has_robustness": self.has_robustness,
            "needs_batches": self.needs_batches,
            "sizes": [sized.describe() for sized in self.sizes],
            "warnings": list(self.warnings),
        }


def _meets(sized: SizedModel, wish: Wish) -> bool:
    pairs = (
        (wish.size, sized.size - 1e-9),
        (wish.params, sized.params),
        (wish.macs, sized.macs),
        (wish.latency, sized.milliseconds),
    )
    return all(limit is None or value <= limit for limit, value in pairs)


def _build_modules(run: Run, widths: Sequence[float]) -> Mapping[float, nn.Module]:
    """A module for each width; an ensemble holds all of its widths at once."""
    largest = run.customize(Budget(widths[0]).width)
    if isinstance(largest, Ensemble):
        return dict.fromkeys(_round_to_bases(largest, widths), largest)
    return {widths[0]: largest, **{w: run.customize(Budget(w).width) for w in widths[1:]}}


def _round_to_bases(ensemble: Ensemble, widths: Sequence[float]) -> list[float]:
    rounded = []
    for width in widths:
        with ensemble.at_setting(width=width):
            rounded.append(ensemble.width)
    return list(dict.fromkeys(rounded))


def _call(
    module: nn.Module, size: float, robustness: float | None, inputs: tuple[Tensor, ...]
) -> Tensor:
    width = module.at_setting(width=size) if isinstance(module, Ensemble) else nullcontext()
    dial = at_robustness(module, robustness) if robustness is not None else nullcontext()
    with width, dial:
        outputs = find_tensors(module(*inputs))
    return outputs[0]


def _has_robustness(module: nn.Module) -> bool:
    info = find_info(module)
    return info is not None and info.robustness is not None


def _measure_size(run: Run, width: float, module: nn.Module) -> SizedModel:
    subnets = run.method.ensemble(run.setup, run.state, width)
    cost = compute_ensemble_cost(run.setup, subnets, memory=False)
    inputs = tuple(torch.zeros(x.shape, dtype=getattr(torch, x.dtype)) for x in run.info.inputs)
    inputs = tuple(x[:1] for x in inputs)
    return SizedModel(
        width,
        cost.params,
        cost.macs,
        _measure_milliseconds(lambda: _call(module, width, None, inputs)),
        _find_score(run.scores, width),
        any(abs(width - size) < 1e-9 for size in run.info.sizes),
        module,
    )


def _measure_milliseconds(call: Callable[[], object]) -> float:
    """The median over calls, after a few that are not counted."""
    times: list[float] = []
    with torch.inference_mode():
        for _ in range(3):
            call()
        end = time.perf_counter() + TIMED_SECONDS
        while len(times) < TIMED_CALLS and (len(times) < 3 or time.perf_counter() < end):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def _find_score(scores: Sequence[SizeScore], width: float) -> float | None:
    for score in scores:
        if abs(score.width - width) < 1e-9:
            return get_main_value(score)
    return None
