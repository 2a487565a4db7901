"""All points of a model in one graph, for programs that choose between them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedquilt.customize.ensemble import Ensemble
from fedquilt.errors import ConfigError
from fedquilt.training.dualnorm import at_robustness

TRIED = (0.0, 0.3, 1.0)  # values of λ at which a file is compared with the model


class Family(nn.Module):
    """A model whose last input is λ, a tensor with no axes, and whose output has every width.

    The output has the shape (nets, batch, classes); row k − 1 is the answer of the first k nets.
    A model that is not a ``Ensemble`` has one row, one without a robustness dial has no λ. In
    onnxruntime λ is ``numpy.array(0.3, numpy.float32)``.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.mixture = model if isinstance(model, Ensemble) else Ensemble([model], base=1.0)
        if not self.has_dial and self.mixture.width == self.mixture.base:
            raise ConfigError(
                "a family has several widths or a robustness dial, this model has neither; "
                "export it as it is"
            )

    @property
    def has_dial(self) -> bool:
        """Whether λ is an input."""
        return self.mixture.robustness is not None

    def forward(self, *inputs: Tensor) -> Tensor:
        """The answers of all widths at the given λ."""
        if not self.has_dial:
            return self.mixture.predict_all_widths(*inputs)
        *others, robustness = inputs
        with at_robustness(self.mixture, robustness):
            return self.mixture.predict_all_widths(*others)

    def make_trials(self, inputs: tuple[Tensor, ...]) -> list[tuple[tuple[Tensor, ...], Tensor]]:
        """Inputs with several λ, and what the model answers when its own dial is turned there."""
        if not self.has_dial:
            return [(inputs, self.mixture.predict_all_widths(*inputs))]
        found = []
        for value in TRIED:
            with self.mixture.at_setting(robustness=value):
                answer = self.mixture.predict_all_widths(*inputs)
            found.append(((*inputs, torch.tensor(value)), answer))
        return found
