"""What a comparison needs of a finished run, as plain values: small enough to keep for ever."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fedquilt.comparison.outcomes import record_outcomes
from fedquilt.comparison.spending import Spending, SpendingMeter
from fedquilt.errors import CorruptFileError
from fedquilt.evaluation.accuracy import compute_ensemble_cost
from fedquilt.evaluation.scores import SizeScore
from fedquilt.federation.client import Client
from fedquilt.runs.record_format import decode_clients
from fedquilt.runs.records import read_records
from fedquilt.runs.run import Run
from fedquilt.structure.budget import Budget
from fedquilt.structure.cost import Cost

Scores = Mapping[str, Any]  # the scores of one size by name


@dataclass(frozen=True)
class SizeResult:
    """A size of the finished model, at one robustness: its cost and its scores."""

    size: float
    params: int
    macs: int
    memory: int
    bytes: int
    scores: Scores
    robustness: float | None = None  # the dial; None where there is none


@dataclass(frozen=True)
class Tier:
    """Clients of one budget.

    ``size`` is the largest size of the finished model that they can afford; None: there is none.
    """

    label: str
    num_clients: int
    size: float | None


@dataclass(frozen=True)
class Evaluation:
    """An evaluation on the way: what was spent by then, and the scores of each size."""

    round: int
    spent: Spending
    scores: Mapping[str, Scores]  # by size, as text


@dataclass(frozen=True)
class PhaseSpending:
    """What the rounds of a phase spent together."""

    rounds: int
    spent: Spending


@dataclass(frozen=True)
class TrialResult:
    """A finished run.

    ``spent`` are sums over all clients and rounds, ``memory`` is the largest that a client needs
    for the size of its tier.
    """

    key: str
    method: str
    seed: int
    rounds: int
    sizes: tuple[SizeResult, ...]
    tiers: tuple[Tier, ...]
    curve: tuple[Evaluation, ...]
    size_kind: str = "width"
    exceeds_budgets: str | None = None
    findings: tuple[str, ...] = ()
    phases: Mapping[str, PhaseSpending] = field(default_factory=dict)
    outcomes: Mapping[str, str] = field(default_factory=dict)  # by size, see significance
    wall_seconds: float = 0.0
    made_by: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def spent(self) -> Spending:
        """What the whole run spent."""
        return self.curve[-1].spent

    def get_scores(self, size: float) -> Scores:
        """The scores of a size of the finished model."""
        return next(result.scores for result in self.sizes if result.size == size)

    def get_size(self, tier: Tier) -> SizeResult | None:
        """The model that clients of a tier get."""
        return next((result for result in self.sizes if result.size == tier.size), None)

    def to_document(self) -> dict[str, Any]:
        """The result as JSON."""
        return asdict(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> TrialResult:
        """The result that ``to_document`` wrote."""
        try:
            values = dict(document)
            values["sizes"] = tuple(SizeResult(**size) for size in values["sizes"])
            values["tiers"] = tuple(Tier(**tier) for tier in values["tiers"])
            values["curve"] = tuple(
                Evaluation(**{**point, "spent": Spending(**point["spent"])})
                for point in values["curve"]
            )
            values["findings"] = tuple(values["findings"])
            values["phases"] = {
                name: PhaseSpending(phase["rounds"], Spending(**phase["spent"]))
                for name, phase in values["phases"].items()
            }
            return cls(**values)
        except (KeyError, TypeError, ValueError) as problem:
            raise CorruptFileError(
                f"a result is not of the shape that this fedquilt writes ({problem}); remove it, "
                "and compare again"
            ) from problem


def summarize_run(
    run: Run, key: str, meter: SpendingMeter, *, scores: Sequence[SizeScore], **more: Any
) -> TrialResult:
    """The result of a finished run that was kept in a directory, with these scores."""
    assert run.directory is not None
    prices = _price_sizes(run, scores)
    tiers = list_tiers(run.user_setup.clients, prices)
    curve, phases = _read_curve(run, meter)
    return TrialResult(
        key,
        type(run.method).__name__,
        run.seed,
        run.setup.rounds,
        tuple(
            SizeResult(
                score.width,
                score.params,
                score.macs,
                prices[score.width].memory,
                prices[score.width].bytes,
                extract_scores(score),
                score.robustness,
            )
            for score in scores
        ),
        tiers,
        curve,
        phases=phases,
        size_kind=run.method.size_kind,
        exceeds_budgets=run.info.exceeds_budgets,
        findings=tuple(finding.sentence for finding in run.findings),
        outcomes=record_outcomes(run, {tier.size for tier in tiers if tier.size is not None}),
        **more,
    )


def extract_scores(score: SizeScore | Mapping[str, Any]) -> dict[str, Any]:
    """The scores of a size without its costs; those that are not known are left out."""
    values = score if isinstance(score, Mapping) else score.to_json()
    costs = ("width", "params", "macs", "robustness", "batch_statistics")
    return {name: v for name, v in values.items() if name not in costs and v is not None}


def list_tiers(clients: Sequence[Client], prices: Mapping[float, Cost]) -> tuple[Tier, ...]:
    """The distinct budgets of clients, largest first, and the size that each can afford."""
    budgets = sorted({c.budget for c in clients}, key=lambda b: b.limits, reverse=True)
    return tuple(
        Tier(
            label_budget(budget),
            sum(client.budget == budget for client in clients),
            _find_size(budget, prices),
        )
        for budget in budgets
    )


def label_budget(budget: Budget) -> str:
    """A budget in a few words.

    >>> label_budget(Budget(0.5)), label_budget(Budget(params=1000))
    ('0.5', 'params 1000')
    """
    if budget.is_width_alone:
        return f"{budget.width:g}"
    limits = {name: v for name, v in asdict(budget).items() if v is not None and name != "width"}
    words = [f"{name} {value}" for name, value in limits.items()]
    return ", ".join([f"{budget.width:g}", *words] if budget.width < 1 else words)


def _find_size(budget: Budget, prices: Mapping[float, Cost]) -> float | None:
    """The largest size within a budget; a width limits the size itself."""
    able = [
        size
        for size, price in prices.items()
        if size <= budget.width + 1e-9 and budget.allows(price)
    ]
    return max(able, default=None)


def _price_sizes(run: Run, scores: Sequence[SizeScore]) -> dict[float, Cost]:
    """What each size of the finished model costs, with the memory of a training step."""
    return {
        score.width: compute_ensemble_cost(
            run.setup, run.method.ensemble(run.setup, run.state, score.width)
        )
        for score in (*run.scores, *scores)
    }


def _read_curve(
    run: Run, meter: SpendingMeter
) -> tuple[tuple[Evaluation, ...], dict[str, PhaseSpending]]:
    """All evaluations of a run, in order, with what was spent by then; and the sums of phases.

    The bytes of closing phases, which finish a copy of the model, count in their evaluation only.
    """
    assert run.directory is not None
    spent, curve = Spending(), []
    phases: dict[str, PhaseSpending] = {}
    for record in read_records(run.directory):
        if "scores" not in record:
            phase, clients = record["phase"], decode_clients(record, run.setup.structure)
            now = meter.measure_round(phase, clients, record["bytes_down"])
            spent += now
            before = phases.get(phase, PhaseSpending(0, Spending()))
            phases[phase] = PhaseSpending(before.rounds + 1, before.spent + now)
        elif record["scores"]:
            closing = Spending(record["bytes_down"], record["bytes_up"])
            scores = {f"{score['width']:g}": extract_scores(score) for score in record["scores"]}
            curve.append(Evaluation(record["round"], spent + closing, scores))
    return tuple(curve), phases
