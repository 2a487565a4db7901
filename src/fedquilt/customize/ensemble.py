"""Several nets that answer as one, with dials for how many of them and how robust.

Split-Mix (Hong et al., ICLR 2022), Algorithm 1, line 11, and Sec. 4.3: the width R is the number
of bases ⌊R/r⌋ that are mixed, the robustness is λ of their dual normalization.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedquilt.errors import ConfigError
from fedquilt.learning.batch import mean_outputs
from fedquilt.structure.budget import Budget, count_multiples
from fedquilt.training.dualnorm import NO_DIAL, find_dials, set_dials, validate_robustness


class Ensemble(nn.Module):
    """The mean of the logits of its first nets; ``base`` is the width of one.

    Turning a dial changes a few numbers and no tensor, so it takes microseconds:

    >>> model = Ensemble([nn.Linear(2, 3) for _ in range(4)], base=0.25)
    >>> model.width = 0.5
    >>> with model.at_setting(width=0.25):
    ...     answer = model(torch.zeros(1, 2))
    >>> model.width
    0.5

    Nets without running statistics normalize every batch by itself: give them batches of the kind
    that they will see, never a single example.
    """

    def __init__(self, nets: Sequence[nn.Module], base: float) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nets)
        self.base = base
        self._active = len(self.nets)
        self._dials = find_dials(self.nets)

    @property
    def width(self) -> float:
        """The width that it answers with: a whole number of nets."""
        return self._active * self.base

    @width.setter
    def width(self, width: float) -> None:
        self._active = self._count(width)

    @property
    def widths(self) -> tuple[float, ...]:
        """The widths up to the present one, as ``by_width`` has them."""
        return tuple(count * self.base for count in range(1, self._active + 1))

    @property
    def robustness(self) -> float | None:
        """From 0 (accurate) to 1 (robust); None if its nets have no dial."""
        return vars(self._dials[0])["robustness"] if self._dials else None

    @robustness.setter
    def robustness(self, robustness: float) -> None:
        if not self._dials:
            raise ConfigError(NO_DIAL)
        set_dials(self._dials, validate_robustness(robustness))

    @contextmanager
    def at_setting(
        self, width: float | None = None, robustness: float | None = None
    ) -> Iterator[Ensemble]:
        """The same model at another point; afterwards it is where it was."""
        active, before = self._active, [vars(layer)["robustness"] for layer in self._dials]
        try:
            if width is not None:
                self.width = width
            if robustness is not None:
                self.robustness = robustness
            yield self
        finally:
            self._active = active
            for layer, value in zip(self._dials, before, strict=True):
                vars(layer)["robustness"] = value

    def forward(self, *inputs: Tensor) -> Tensor:
        """The mean of what the nets of the present width say."""
        answer: Tensor = mean_outputs(net(*inputs) for net in self._mean_logits())
        return answer

    def predict_all_widths(self, *inputs: Tensor) -> Tensor:
        """The answers at all widths up to the present one: row k − 1 mixes the first k nets."""
        sums = itertools.accumulate(net(*inputs) for net in self._mean_logits())
        return torch.stack([total / count for count, total in enumerate(sums, start=1)])

    def _mean_logits(self) -> Iterator[nn.Module]:
        return itertools.islice(self.nets, self._active)

    def _count(self, width: float) -> int:
        count, held = count_multiples(Budget(width).width, self.base), len(self.nets)
        if count < 1:
            raise ConfigError(f"the narrowest width is one net of {self.base:g}, got {width:g}")
        if count > held:
            raise ConfigError(
                f"this model holds {held} nets, up to width {held * self.base:g}, got {width:g}; "
                "take a wider one from the run: run.customize(width=...)"
            )
        return count
