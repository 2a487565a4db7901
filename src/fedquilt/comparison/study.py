"""Does a comparison: asks what fits, searches learning rates, finds rounds, does the runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fedquilt.comparison.comparison import Comparison
from fedquilt.comparison.fit import check_fit
from fedquilt.comparison.halving import halve
from fedquilt.comparison.limits import find_rounds
from fedquilt.comparison.metric import choose_metric, list_scores
from fedquilt.comparison.progress import ComparisonCallback, VariantLeftOut, ignore_events
from fedquilt.comparison.queue import FailedTrial, Outcome, run_trials
from fedquilt.comparison.results import TrialResult
from fedquilt.comparison.spending import Device
from fedquilt.comparison.store import TrialStore
from fedquilt.comparison.table import VariantResults, analyze, summarize_tiers
from fedquilt.comparison.trial import Trial
from fedquilt.comparison.validation import ValidationTrial
from fedquilt.errors import ConfigError, TrainingError, describe_unknown
from fedquilt.evaluation.targets import validate_target
from fedquilt.learning.metric import MetricInfo
from fedquilt.runs.environment import read_environment
from fedquilt.settings.compare import CompareSection


class MakeTrial(Protocol):
    """Makes the runs of one variant; what is not given is as the variant has it."""

    def __call__(
        self,
        seed: int,
        *,
        rounds: int | None = None,
        lr: float | None = None,
        fraction: float | None = None,
    ) -> Trial:
        """The run with a seed."""
        ...


@dataclass(frozen=True)
class Candidate:
    """A variant, and what makes its runs.

    ``is_named`` candidates are compared even if clients train more than their budgets allow.
    """

    variant: str
    make_trial: MakeTrial
    is_named: bool = True


@dataclass
class Study:
    """A comparison in progress.

    Args:
        candidates: What may be compared.
        options: How often, for how long, and by which score.
        store: Where runs are kept.
        workers: How many run at a time; None: one per core, 0: this process.
        on_event: Is called with what happens.
        about: What is stored with the table.
    """

    candidates: Sequence[Candidate]
    options: CompareSection
    store: TrialStore
    workers: int | None = None
    on_event: ComparisonCallback = ignore_events
    about: Mapping[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict, init=False)

    def run(self) -> Comparison:
        """Does all runs that are not done yet, and makes the table."""
        seeds = self.options.list_seeds()
        with self.store.hold():
            fitting = self._choose_fitting(seeds[0])
            rates = self._search_rates(fitting, seeds[0]) if self.options.search_lr else {}
            rounds = self._find_rounds(fitting, seeds[0], rates) if self.options.limits else {}
            fitting = self._require_some([c for c in fitting if c.variant not in self.left_out])
            trials = [
                one.make_trial(seed, rounds=rounds.get(one.variant), lr=rates.get(one.variant))
                for seed in seeds
                for one in fitting
            ]
            outcomes = self._run(trials, "runs")
        return self._conclude(trials, outcomes, rates)

    def _run(self, trials: Sequence[Trial], purpose: str) -> list[Outcome]:
        return run_trials(
            trials,
            self.store,
            workers=self.workers,
            device=Device(self.options.macs_per_second, self.options.bytes_per_second),
            purpose=purpose,
            on_event=self.on_event,
        )

    def _choose_fitting(self, seed: int) -> list[Candidate]:
        """The candidates whose methods can be run, and stay within budgets unless named."""
        fitting = []
        for one in self.candidates:
            fit = check_fit(one.make_trial(seed))
            if fit.metric is not None:
                self._validate_options(fit.metric)
            reason = fit.problem or (None if one.is_named else fit.exceeds_budgets)
            if reason is None:
                fitting.append(one)
            else:
                self._leave_out(one.variant, reason)
        return self._require_some(fitting)

    def _validate_options(self, main: MetricInfo) -> None:
        """Refuses a metric that no run will have, and a target out of reach, before any is done."""
        name, target = self.options.metric, self.options.target
        if name is not None and name not in (scores := list_scores(main)):
            raise ConfigError(describe_unknown("metric", name, scores))
        if target is not None and name in (None, main.name):
            validate_target(target, main)

    def _require_some(self, fitting: list[Candidate]) -> list[Candidate]:
        if not fitting:
            name, reason = next(iter(self.left_out.items()), ("no method", "none was given"))
            raise ConfigError(f"nothing can be compared; {name}: {reason}")
        return fitting

    def _leave_out(self, variant: str, reason: str) -> None:
        self.left_out[variant] = reason
        self.on_event(VariantLeftOut(variant, reason))

    def _search_rates(self, fitting: Sequence[Candidate], seed: int) -> dict[str, float]:
        """The learning rate of each variant that does best on validation data."""
        makers = {one.variant: one.make_trial for one in fitting}

        def evaluate(pairs: list[tuple[str, float]], rounds: int) -> list[float | None]:
            trials = [
                ValidationTrial(makers[variant](seed, rounds=rounds, lr=lr))
                for variant, lr in pairs
            ]
            outcomes = self._run(trials, f"learning rates, {rounds} rounds")
            done = [outcome for outcome in outcomes if isinstance(outcome, TrialResult)]
            metric = choose_metric(done, self.options.metric) if done else None
            return [
                None
                if metric is None or isinstance(outcome, FailedTrial)
                else _weigh(metric.sign, summarize_tiers(outcome.curve[-1], outcome, metric))
                for outcome in outcomes
            ]

        total = max(one.make_trial(seed).rounds for one in fitting)
        groups = {one.variant: self.options.learning_rates for one in fitting}
        return {name: ranked[0] for name, ranked in halve(groups, total, evaluate).items()}

    def _find_rounds(
        self, fitting: Sequence[Candidate], seed: int, rates: Mapping[str, float]
    ) -> dict[str, int]:
        """The rounds of each variant that the limits allow, from one round with all clients."""
        pilots = [
            one.make_trial(seed, rounds=1, lr=rates.get(one.variant), fraction=1.0)
            for one in fitting
        ]
        rounds = {}
        outcomes = self._run(pilots, "trial rounds")
        for one, outcome in zip(fitting, outcomes, strict=True):
            if isinstance(outcome, FailedTrial):
                self._leave_out(one.variant, outcome.problem)
                continue
            try:
                rounds[one.variant] = find_rounds(
                    one.make_trial(seed), outcome, self.options.limits
                )
            except ConfigError as problem:
                self._leave_out(one.variant, str(problem))
        return rounds

    def _conclude(
        self, trials: Sequence[Trial], outcomes: Sequence[Outcome], rates: Mapping[str, float]
    ) -> Comparison:
        """The table, from what came of the runs."""
        grouped: dict[str, list[Outcome]] = {}
        for trial, outcome in zip(trials, outcomes, strict=True):
            grouped.setdefault(trial.variant, []).append(outcome)
        variants = [
            VariantResults(
                name,
                tuple(one for one in group if isinstance(one, TrialResult)),
                next((one.problem for one in group if isinstance(one, FailedTrial)), None),
                rates.get(name),
            )
            for name, group in grouped.items()
        ]
        results = [result for one in variants for result in one.results]
        if not results:
            problems = [one.problem for one in variants if one.problem]
            raise TrainingError(f"every run has failed; the first: {problems[0]}")
        metric = choose_metric(results, self.options.metric)
        about = {
            **self.about,
            "seeds": list(self.options.list_seeds()),
            "made_by": {
                **read_environment(),
                "code": sorted({result.made_by["code"] for result in results}),
                "commit": sorted({result.made_by["commit"] for result in results}),
            },
            "runs": len({result.key for result in results}),
            "wall_seconds": round(sum({r.key: r.wall_seconds for r in results}.values()), 1),
        }
        return Comparison(
            metric,
            analyze(variants, metric, self.options.target),
            self.left_out,
            about,
            self.store.folder,
        )


def _weigh(sign: int, value: float | None) -> float | None:
    return None if value is None else sign * value
