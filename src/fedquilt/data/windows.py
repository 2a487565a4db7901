"""Windows over a long text, each labeled with the token that follows it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from fedquilt.data.examples import Rows
from fedquilt.errors import DataError


@dataclass(frozen=True, eq=False)
class Windows:
    """Examples of ``length`` tokens each, labeled with the token that follows.

    ``tokens`` are all texts one after another, and ``starts`` the positions at which windows
    begin. Windows may overlap. They are cut out of ``tokens`` when they are batched, so a window
    at every position costs four bytes and not a copy. A selection shares the tokens.

    >>> Windows(torch.tensor([3, 1, 4, 1]), torch.tensor([0, 1]), 2).batch(torch.tensor([1]))
    (tensor([[1, 4]]), tensor([1]))
    """

    tokens: Tensor
    starts: Tensor
    length: int
    has_fixed_batches: ClassVar[bool] = True  # nothing is drawn

    def __post_init__(self) -> None:
        """Checks that all windows lie in the text."""
        if self.tokens.ndim != 1 or self.starts.ndim != 1 or self.length < 1:
            raise DataError(
                "windows are cut at 1-D starts out of 1-D tokens, each of 1 token or more, got "
                f"starts {tuple(self.starts.shape)}, tokens {tuple(self.tokens.shape)} and length "
                f"{self.length}; flatten the tensors"
            )
        last = len(self.tokens) - self.length - 1
        if len(self.starts) and not 0 <= int(self.starts.min()) <= int(self.starts.max()) <= last:
            raise DataError(
                f"a window of {self.length} tokens and the one behind it must lie in the text of "
                f"{len(self.tokens)}, got starts from {int(self.starts.min())} to "
                f"{int(self.starts.max())}; start from 0 to {last}"
            )

    def __len__(self) -> int:
        """The number of examples."""
        return len(self.starts)

    def __getstate__(self) -> dict[str, object]:
        """The fields without cached values, which are cheaper to compute again than to send."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def labels(self) -> Tensor:
        """The token that follows each window."""
        return self.tokens[self.starts.long() + self.length].long()

    @cached_property
    def label_set(self) -> tuple[int, ...]:
        """The labels present, in order."""
        return tuple(torch.unique(self.labels).tolist())

    def batch(
        self, rows: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Cuts out windows and the tokens that follow, the same in training and in evaluation."""
        positions = self.starts[rows].long()[:, None] + torch.arange(self.length + 1)
        tokens = self.tokens[positions].long()  # (rows, length + 1)
        return tokens[:, :-1], tokens[:, -1]

    def select(self, rows: Rows) -> Windows:
        """Selects windows over the same text."""
        return replace(self, starts=self.starts[torch.as_tensor(rows)])
