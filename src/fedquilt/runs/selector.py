"""Selects the model of a run while it trains: scores models on validation data, compares them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from fedquilt.engines.engine import Engine
from fedquilt.evaluation.accuracy import evaluate
from fedquilt.federation.client import Failure
from fedquilt.federation.state import Setup, State
from fedquilt.methods.method import Method
from fedquilt.runs.checkpoint import Checkpoint
from fedquilt.runs.phases import find_phase
from fedquilt.runs.selection import Selection, SelectionProgress, compute_score
from fedquilt.training.dualnorm import has_dial


class ModelSelector:
    """What a run knows of its models, in ``progress``, and how it comes to know it.

    Args:
        selection: What is wanted.
        setup: What stays the same during the run.
        method: The method.
    """

    def __init__(self, selection: Selection, setup: Setup, method: Method) -> None:
        self._selection, self._setup, self._method = selection, setup, method
        self.progress = SelectionProgress()

    @property
    def is_stopped(self) -> bool:
        """Whether the run has waited long enough for a better model."""
        return self.progress.is_stopped(self._selection)

    def compares(self, state: State) -> bool:
        """Whether the model after a round is one that can be selected: of the last phase."""
        if not self._selection.is_on or not state.round:
            return False
        *_, last = (p for p in self._method.phases(self._setup) if not p.is_closing)
        return find_phase(state.round - 1, self._method, self._setup).name == last.name

    def score(
        self,
        finished: State,
        engine: Engine,
        validators: Collection[int],
        on_failure: Callable[[Failure], None],
    ) -> float | None:
        """The score of a finished state on these clients' validation data; None: not known."""
        attack = self._selection.find_attack(self._method)
        is_dialed = attack is not None and has_dial(self._setup.model)
        sizes = self._method.sizes(self._setup)
        scores = evaluate(
            self._setup,
            self._method,
            finished,
            engine,
            has_server_test=False,
            testers=validators,
            on_failure=on_failure,
            widths=(max(sizes),) if self._selection.over == "largest" else None,
            robustness=(0.0, 1.0) if is_dialed else (),
            attack=attack,
            split="validation",
        )
        return compute_score(scores, self._selection)

    def compare(
        self,
        progress: SelectionProgress,
        state: State,
        client_versions: Mapping[int, int],
        score: float | None,
    ) -> SelectionProgress:
        """What is known after another model."""
        metric = self._setup.task.metric
        return progress.compare(self._selection, state, client_versions, score, metric)

    def compare_recorded(self, done: Checkpoint, record: Mapping[str, Any]) -> Checkpoint:
        """A checkpoint that knows of the evaluation which was recorded after its round.

        A run may be stopped between the record and the comparison.
        """
        is_known = done.selection.round == done.state.round
        if is_known or "validation" not in record or not self.compares(done.state):
            return done
        score = record["validation"]
        progress = self.compare(done.selection, done.state, done.client_versions, score)
        return replace(done, selection=progress)

    def select(self, done: Checkpoint) -> Checkpoint:
        """The state that is kept after the last round, with the versions of clients' states."""
        best = self.progress.best
        if self._selection.keep == "last" or best is None or best.state.round == done.state.round:
            return done
        return replace(done, state=best.state, client_versions=best.client_versions)
