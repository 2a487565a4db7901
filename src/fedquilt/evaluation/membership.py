"""Membership inference: can one tell from a model who was in its training data?

The attacks see the model's answers only. ``measure_membership`` says how well a score separates
members from others. Scores are an example's negative loss (Yeom et al., 2018), or the likelihood
ratio of LiRA (Carlini et al., "Membership Inference Attacks From First Principles", IEEE S&P 2022),
which compares the model with shadow models that were trained with and without the example.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedquilt.data import ClientData
from fedquilt.errors import ConfigError

Numbers = npt.NDArray[np.float64]
Interval = tuple[float, float]
FALSE_POSITIVES = 0.01  # the rate at which true positives are told
RESAMPLES = 500  # of the bootstrap
CONFIDENCE = 0.95
BATCH_SIZE = 512


@dataclass(frozen=True)
class MembershipScore:
    """How well an attack tells members of the training data from others.

    Intervals are of 95 % confidence, by bootstrap over members and others. Guessing has an AUC of
    0.5, a true-positive rate of 0.01 and an advantage of 0.

    Args:
        attack: loss or lira.
        unit: What is attacked: an example, or a client with all of its examples.
        auc: The area under the ROC curve.
        auc_interval: Its confidence interval.
        tpr: The true-positive rate where 1 % of the others are taken for members.
        tpr_interval: Its confidence interval.
        advantage: The largest difference of true-positive and false-positive rate.
        advantage_interval: Its confidence interval.
        num_members: The number of members.
        num_others: The number of others.
    """

    attack: Literal["loss", "lira"]
    unit: Literal["example", "client"]
    auc: float
    auc_interval: Interval
    tpr: float
    tpr_interval: Interval
    advantage: float
    advantage_interval: Interval
    num_members: int
    num_others: int


def measure_membership(
    members: Numbers,
    others: Numbers,
    *,
    attack: Literal["loss", "lira"] = "loss",
    unit: Literal["example", "client"] = "example",
    seed: int = 0,
) -> MembershipScore:
    """Measures how well a score separates members from others.

    Args:
        members: The score of each member; a large one speaks for membership.
        others: The score of each of the others.
        attack: What the score is.
        unit: What was scored.
        seed: Of the bootstrap.

    >>> measure_membership(np.array([2.0, 3.0]), np.array([0.0, 1.0])).auc
    1.0
    """
    if not (len(members) and len(others)):
        raise ConfigError("an attack on membership needs members and others, got none of one kind")
    draw = np.random.default_rng(seed)
    samples = np.array(
        [
            _rates(draw.choice(members, len(members)), draw.choice(others, len(others)))
            for _ in range(RESAMPLES)
        ]
    )
    tails = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)
    low, high = np.quantile(samples, tails, axis=0)
    auc, tpr, advantage = _rates(members, others)
    intervals = [(float(a), float(b)) for a, b in zip(low, high, strict=True)]
    return MembershipScore(
        attack,
        unit,
        auc,
        intervals[0],
        tpr,
        intervals[1],
        advantage,
        intervals[2],
        len(members),
        len(others),
    )


def describe_membership(score: MembershipScore) -> list[str]:
    """What a score means, in two sentences for people who do not know the measures.

    >>> scores = np.arange(200.0)
    >>> describe_membership(measure_membership(scores + 1000, scores))[1]
    'When it accuses 1 of 100 others wrongly, it finds 100 of 100 members (guessing: 1).'
    """
    low, high = score.auc_interval
    if low > 0.5:
        verdict = "The attack works"
    elif high < 0.5:
        verdict = "The attack does worse than guessing"
    else:
        verdict = "The attack cannot be told from guessing"
    what = "client" if score.unit == "client" else "member"
    picked, found = f"{100 * score.auc:.3g} of 100", f"{100 * score.tpr:.3g} of 100 {what}s"
    rate = f"{100 * FALSE_POSITIVES:g} of 100 others"
    lines = [
        f"{verdict}: shown a {what} and another, it picks the {what} in {picked} cases "
        "(guessing: 50)."
    ]
    if score.num_others * FALSE_POSITIVES >= 1:
        guess = f"{100 * FALSE_POSITIVES:g}"
        lines.append(f"When it accuses {rate} wrongly, it finds {found} (guessing: {guess}).")
    else:
        lines.append(
            f"There are too few others ({score.num_others}) to say how many it finds when it "
            f"accuses {rate} wrongly."
        )
    return lines


def bound_true_positives(epsilon: float, delta: float, false_positives: float) -> float:
    """The largest true-positive rate of any attack on what (ε, δ)-differential privacy protects.

    Kairouz, Oh, Viswanath. "The Composition Theorem for Differential Privacy." ICML 2015, Eq. 2.

    Args:
        epsilon: ε.
        delta: δ.
        false_positives: The rate at which others are taken for members.

    >>> round(bound_true_positives(1.0, 1e-5, 0.01), 4)
    0.0272
    """
    grown = math.exp(min(epsilon, 700.0))
    return min(grown * false_positives + delta, 1 - (1 - delta - false_positives) / grown, 1.0)


def _rates(members: Numbers, others: Numbers) -> tuple[float, float, float]:
    """AUC, true-positive rate at 1 % false positives, and advantage."""
    from scipy import stats  # slow to import

    scores = np.concatenate([members, others])
    ranks = stats.rankdata(scores)
    count = len(members)
    above = ranks[:count].sum() - count * (count + 1) / 2
    auc = above / (count * len(others))
    thresholds = np.unique(scores)[::-1]
    ordered_members, ordered_others = np.sort(members), np.sort(others)
    true = (count - np.searchsorted(ordered_members, thresholds)) / count
    false = (len(others) - np.searchsorted(ordered_others, thresholds)) / len(others)
    few = true[false <= FALSE_POSITIVES]
    advantage = max(float((true - false).max()), 0.0)
    return float(auc), float(few.max()) if len(few) else 0.0, advantage


@torch.no_grad()
def compute_confidences(module: nn.Module, examples: ClientData, rows: Tensor) -> Numbers:
    """log(p / (1 − p)) of the right answer's probability p, for each of some examples.

    Where an example has several targets, their mean. The more confident the model, the larger.
    """
    module.eval()
    found = []
    for part in rows.split(BATCH_SIZE):
        x, y = examples.batch(part)
        logits = module(x).double()
        if y.is_floating_point() or logits.shape[:-1] != y.shape:
            raise ConfigError(
                "an attack on membership needs a class for every output; this model learns "
                "something else"
            )
        right = F.log_softmax(logits, -1).gather(-1, y.unsqueeze(-1)).squeeze(-1)
        wrong = torch.log(-torch.expm1(right.clamp(max=-1e-12)))
        found.append((right - wrong).flatten(1).mean(1) if y.ndim > 1 else right - wrong)
    return torch.cat(found).numpy()


def compute_losses(confidences: Numbers) -> Numbers:
    """−log p of confidences log(p / (1 − p))."""
    losses: Numbers = np.logaddexp(0.0, -confidences)
    return losses


def compute_likelihood_ratios(
    target: Numbers, shadows: Numbers, is_member: npt.NDArray[np.bool_]
) -> Numbers:
    """LiRA's scores: how much likelier an answer is for a model that was trained on the example.

    Few shadow models do not tell a variance for each example, so there is one for all (Sec. VI).
    An example that all shadow models, or none, were trained on has the mean shift of the others.

    Args:
        target: The confidence of the attacked model in each example.
        shadows: That of each shadow model, (shadows, examples).
        is_member: Whether each shadow model was trained on each example.
    """
    from scipy import stats  # slow to import

    with_it = np.ma.masked_array(shadows, ~is_member)
    without = np.ma.masked_array(shadows, is_member)
    shift = (with_it.mean(0) - without.mean(0)).mean()
    shift = 0.0 if np.ma.is_masked(shift) else float(shift)
    mean_out = np.ma.filled(without.mean(0), np.nan)
    mean_in = np.ma.filled(with_it.mean(0), np.nan)
    mean_out = np.where(np.isnan(mean_out), mean_in - shift, mean_out)
    mean_in = np.where(np.isnan(mean_in), mean_out + shift, mean_in)
    residuals = np.where(is_member, shadows - mean_in, shadows - mean_out)
    spread = max(float(residuals.std()), 1e-6)
    ratios: Numbers = stats.norm.logpdf(target, mean_in, spread) - stats.norm.logpdf(
        target, mean_out, spread
    )
    return ratios
