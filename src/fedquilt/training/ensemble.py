"""How nets answer together."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def mean_logits(answers: Iterable[Tensor]) -> Tensor:
    """The mean of the answers; one sum is held, however many there are.

    Split-Mix (Hong et al., ICLR 2022), Algorithm 1, line 11.
    """
    total: Tensor | None = None
    count = 0
    for answer in answers:
        total = answer if total is None else total + answer
        count += 1
    assert total is not None
    return total / count
