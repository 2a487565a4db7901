"""How a finished run is scored, where that is not as every run is scored at its end."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from fedquilt.errors import ConfigError
from fedquilt.evaluation.scores import SizeScore
from fedquilt.methods.method import PersonalChoice, check_personal_choice
from fedquilt.runs.run import Run
from fedquilt.settings.schema import Section
from fedquilt.training.attack import PGD


def _check_choice(choice: object) -> object:
    try:
        check_personal_choice(choice)
    except ConfigError as problem:
        raise PydanticCustomError("choice", "{reason}", {"reason": str(problem)}) from None
    return choice


class Scoring(Section):
    """Scores of a finished run: at several robustnesses, under attack, or as papers score."""

    widths: tuple[float, ...] | None = None
    """The sizes. Left out: those that were trained."""
    robustness: tuple[float, ...] = ()
    """Points of the robustness dial."""
    attack: bool = False
    """Whether clients' test data are also attacked, with everything known about the model."""
    epsilon: float = Field(8 / 255, gt=0)
    """The most that the attack changes a pixel."""
    steps: int = Field(7, ge=1)
    """Steps of the attack."""
    step_size: float | None = Field(None, gt=0)
    """The size of a step. Left out: as ``PGD`` chooses it."""
    batch_statistics: bool = False
    """Whether each batch of test data is normalized by itself."""
    personal_statistics: Annotated[PersonalChoice, BeforeValidator(_check_choice)] = False
    """Whether there is also personal_accuracy, with statistics of each client's own data: "batch",
    of each batch of test data; "refreshed", of 20 passes over training data; true, as the paper of
    the method scores."""

    def evaluate(self, run: Run) -> tuple[SizeScore, ...]:
        """The scores of a run whose data are known."""
        attack = PGD(epsilon=self.epsilon, steps=self.steps, step_size=self.step_size)
        return tuple(
            run.evaluate(
                widths=self.widths,
                robustness=self.robustness,
                attack=attack if self.attack else None,
                batch_statistics=self.batch_statistics,
                personal_statistics=self.personal_statistics,
                workers=0,
            )
        )
