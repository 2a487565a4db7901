"""Whether a difference is more than noise: paired tests over seeds and over test examples.

Two methods are compared on the same seeds, so on the same clients, batches and first weights, and
on the same test examples. Let d[s, e] be the difference of the two on example e with seed s.

- With several seeds and single examples known, both are random: the variance of the mean of d is
  estimated by the two-way analysis of variance without replication, with seeds and examples as
  crossed random effects, (MS_seeds + MS_examples - MS_rest) / (S E), and its degrees of freedom by
  Satterthwaite's formula.
- With several seeds alone it is the paired t-test over seeds.
- With one seed it is the paired t-test over examples, which knows nothing of training noise.

P-values are two-sided. Those of several methods against one best are corrected by Holm's method.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LEVEL = 0.05
FEW_SEEDS = 5  # below which a test over seeds is weak

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class PairedTest:
    """A paired comparison of two methods.

    Args:
        difference: The mean difference; None: there is nothing to compare.
        p_value: The two-sided p-value; None: there is nothing to test with.
        interval: Half of the 95 % confidence interval of the difference.
        test: Over what it is paired: seeds, examples, or both.
    """

    difference: float | None
    p_value: float | None = None
    interval: float | None = None
    test: str = "none"


def compare_paired(by_seed: Sequence[float], by_example: Floats | None = None) -> PairedTest:
    """Tests whether the mean of paired differences is 0.

    Args:
        by_seed: The difference with each seed.
        by_example: The difference with each seed (rows) on each example (columns), if known.

    >>> compare_paired([0.02, 0.03, 0.025]).test
    'seeds'
    """
    if by_example is not None and by_example.shape[1] > 1:
        if len(by_seed) > 1:
            return _test_crossed(by_example)
        return _test_one_sample(by_example[0], "examples")
    if len(by_seed) > 1:
        return _test_one_sample(np.asarray(by_seed, dtype=np.float64), "seeds")
    return PairedTest(float(np.mean(by_seed)))


def _test_one_sample(differences: Floats, over: str) -> PairedTest:
    """The paired t-test."""
    count = len(differences)
    variance = float(differences.var(ddof=1)) / count
    return _conclude(float(differences.mean()), variance, count - 1, over)


def _test_crossed(differences: Floats) -> PairedTest:
    """The test with seeds and examples as crossed random effects."""
    num_seeds, num_examples = differences.shape
    mean = float(differences.mean())
    seeds, examples = differences.mean(axis=1), differences.mean(axis=0)
    rest = differences - seeds[:, None] - examples[None, :] + mean
    ms_seeds = num_examples * float(((seeds - mean) ** 2).sum()) / (num_seeds - 1)
    ms_examples = num_seeds * float(((examples - mean) ** 2).sum()) / (num_examples - 1)
    ms_rest = float((rest**2).sum()) / ((num_seeds - 1) * (num_examples - 1))
    # an estimate below that of one effect alone is the other one's noise
    total = max(ms_seeds + ms_examples - ms_rest, ms_seeds, ms_examples)
    parts = (
        ms_seeds**2 / (num_seeds - 1)
        + ms_examples**2 / (num_examples - 1)
        + ms_rest**2 / ((num_seeds - 1) * (num_examples - 1))
    )
    freedom = total**2 / parts if parts else 1.0
    variance = total / (num_seeds * num_examples)
    return _conclude(mean, variance, max(freedom, 1.0), "seeds and examples")


def _conclude(mean: float, variance: float, freedom: float, over: str) -> PairedTest:
    if variance <= 0:  # all differences are the same
        return PairedTest(mean, 1.0 if mean == 0 else 0.0, 0.0, over)
    from scipy import stats  # slow to import

    error = variance**0.5
    p_value = 2 * float(stats.t.sf(abs(mean) / error, freedom))
    interval = float(stats.t.ppf(1 - LEVEL / 2, freedom)) * error
    return PairedTest(mean, p_value, interval, over)


def correct_by_holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's correction for several tests; those that are None stay so.

    >>> correct_by_holm([0.01, 0.04, None])
    [0.02, 0.04, None]
    """
    known = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p_value, position) in enumerate(known):
        largest = max(largest, min(1.0, p_value * (len(known) - rank)))
        corrected[position] = largest
    return corrected


def pack_outcomes(outcomes: npt.NDArray[np.bool_]) -> str:
    """Which examples were answered rightly, as text.

    >>> unpack_outcomes(pack_outcomes(np.array([True, False, True]))).tolist()
    [1.0, 0.0, 1.0]
    """
    packed = base64.b64encode(np.packbits(outcomes).tobytes()).decode()
    return f"{len(outcomes)}:{packed}"


def unpack_outcomes(text: str) -> Floats:
    """The outcomes that were packed, as 0 and 1."""
    count, _, packed = text.partition(":")
    bits = np.unpackbits(np.frombuffer(base64.b64decode(packed), np.uint8), count=int(count))
    return bits.astype(np.float64)
