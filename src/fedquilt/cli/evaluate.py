"""``fedquilt evaluate``: the accuracy of a finished run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction
from typing import Annotated, Any

import typer

from fedquilt.cli.options import (
    AsJson,
    Device,
    RunFolder,
    RunModel,
    Trust,
    Workers,
    drop_unset,
    parse_widths,
)
from fedquilt.cli.scores import make_score_document, show_scores
from fedquilt.errors import ConfigError
from fedquilt.evaluation.scores import SizeScore
from fedquilt.runs.from_config import load_clients, open_configured_run
from fedquilt.runs.run import Run
from fedquilt.training.attack import PGD
from fedquilt.training.dualnorm import validate_robustness

EXAMPLE = "fedquilt evaluate runs/digits-splitmix-1 --widths 1,0.5 --robustness 0,0.5,1 --attack"


def evaluate(
    folder: RunFolder,
    widths: Annotated[
        str | None, typer.Option(help="Sizes, such as 1,0.5; default those that were trained.")
    ] = None,
    robustness: Annotated[
        str | None,
        typer.Option(help="Points of the dial from 0 (accurate) to 1 (robust), such as 0,0.5,1."),
    ] = None,
    attack: Annotated[
        bool, typer.Option("--attack", help="Also on attacked inputs (PGD that knows the model).")
    ] = False,
    epsilon: Annotated[
        str | None, typer.Option(help="The most that an attack changes a pixel; default 8/255.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of the attack; default 7.")] = None,
    batch_statistics: Annotated[
        bool,
        typer.Option(
            "--batch-statistics",
            help="Normalise every batch of test data by itself, as some papers score; the order of "
            "the data then matters.",
        ),
    ] = False,
    personal_statistics: Annotated[
        bool,
        typer.Option(
            "--personal-statistics",
            help="Also with statistics of each client's own data, as the method's paper scores.",
        ),
    ] = False,
    data: Annotated[
        str | None, typer.Option(help="Other data than the run's: a set, .npz or folder.")
    ] = None,
    model: RunModel = None,
    trust: Trust = False,
    workers: Workers = None,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Measure the accuracy of a finished run at every size, and every robustness asked for."""
    sizes = None if widths is None else parse_widths([widths])
    dials = () if robustness is None else _list_robustness(robustness)
    attacker = _make_attack(drop_unset({"epsilon": epsilon, "steps": steps}), wanted=attack)
    run = open_configured_run(folder, model=model, trust=trust)
    population = load_clients(run, data)
    if population is None:
        raise ConfigError(
            f"{folder} was trained from Python, with data that only Python has; give --data to "
            "measure it on, or open it there with fedquilt.open_run"
        )
    scores = run.evaluate(
        population,
        widths=sizes,
        robustness=dials,
        attack=attacker,
        batch_statistics=batch_statistics,
        personal_statistics=personal_statistics,
        workers=workers,
        device=device,
    )
    if attacker is not None and data is None and not batch_statistics:
        _remember_evaluation(run, scores)
    show_scores(run, scores, as_json=as_json)


def _list_robustness(text: str) -> tuple[float, ...]:
    """Robustnesses from a text such as ``0,0.5,1``."""
    try:
        return tuple(validate_robustness(float(word)) for word in text.split(","))
    except ValueError:
        raise ConfigError(f"--robustness takes numbers like 0,0.5,1, got '{text}'") from None


def _make_attack(settings: dict[str, Any], *, wanted: bool) -> PGD | None:
    """The attack that was asked for; its epsilon may be written 8/255."""
    if settings and not wanted:
        raise ConfigError(f"--{next(iter(settings))} is of an attack; add --attack")
    if "epsilon" in settings:
        try:
            settings["epsilon"] = float(Fraction(settings["epsilon"]))
        except (ValueError, ZeroDivisionError):
            raise ConfigError(
                f"--epsilon takes a number like 8/255 or 0.03, got '{settings['epsilon']}'"
            ) from None
    return PGD(**settings) if wanted else None


def _remember_evaluation(run: Run, scores: Sequence[SizeScore]) -> None:
    """For a report later; a run that cannot be written to is evaluated all the same."""
    assert run.directory is not None
    with suppress(OSError):
        run.directory.write_evaluation(make_score_document(run, scores))
