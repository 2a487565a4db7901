"""``fedquilt audit``: can an attacker tell from a finished model whose data it was trained on?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from fedquilt.cli.console import make_console, print_json, print_lines
from fedquilt.cli.options import AsJson, RunFolder, RunModel, Trust, Workers
from fedquilt.errors import ConfigError
from fedquilt.evaluation.membership import (
    FALSE_POSITIVES,
    MembershipScore,
    bound_true_positives,
    describe_membership,
)
from fedquilt.runs.audit import MAX_EXAMPLES, audit_run, audit_with_shadows
from fedquilt.runs.event_lines import describe_privacy
from fedquilt.runs.from_config import load_clients, open_configured_run
from fedquilt.runs.run import Run

EXAMPLE = "fedquilt audit runs/digits-heterofl-1 --shadows 4"


def audit(
    folder: RunFolder,
    unit: Annotated[
        str, typer.Option("--by", help="What is attacked: example, or client.")
    ] = "example",
    shadows: Annotated[
        int,
        typer.Option(
            min=0, help="Also LiRA with so many shadow runs; each takes as long as the run."
        ),
    ] = 0,
    width: Annotated[
        float | None, typer.Option(help="The size that is attacked; default the largest.")
    ] = None,
    examples: Annotated[
        int, typer.Option(min=1, help="Members, and others, at most.")
    ] = MAX_EXAMPLES,
    seed: Annotated[int, typer.Option(min=0, help="Of all draws.")] = 0,
    model: RunModel = None,
    trust: Trust = False,
    workers: Workers = None,
    as_json: AsJson = False,
) -> None:
    """Attack a finished run: tell examples that it was trained on from others."""
    run = open_configured_run(folder, model=model, trust=trust)
    population = load_clients(run)
    if population is None:
        raise ConfigError(
            f"{folder} was trained from Python, with data that only Python has; audit it there "
            "with fedquilt.audit_run"
        )
    score = audit_run(
        run,
        population,
        width=width,
        unit=_parse_unit(unit),
        max_examples=examples,
        seed=seed,
    )
    scores = [score]
    if shadows:
        scores.append(
            audit_with_shadows(
                run, shadows, width=width, max_examples=examples, seed=seed, workers=workers
            )
        )
    _show(run, scores, as_json=as_json)


def _parse_unit(text: str) -> Literal["example", "client"]:
    if text == "example":
        return "example"
    if text == "client":
        return "client"
    raise ConfigError(f"--by is example or client, got '{text}'")


def _show(run: Run, scores: list[MembershipScore], *, as_json: bool) -> None:
    if as_json:
        document: dict[str, Any] = {
            "run": str(run.folder),
            "privacy": run.info.privacy,
            "attacks": [asdict(score) for score in scores],
        }
        print_json(document)
        return
    console = make_console()
    table = Table(box=None)
    for column in ("", *(f"{score.attack} on {score.unit}s" for score in scores), "guessing"):
        table.add_column(column, justify="right")
    rows = {
        "AUC": [(score.auc, score.auc_interval) for score in scores],
        f"TPR at {FALSE_POSITIVES:.0%} FPR": [(score.tpr, score.tpr_interval) for score in scores],
        "advantage": [(score.advantage, score.advantage_interval) for score in scores],
    }
    for (name, values), guess in zip(rows.items(), (0.5, FALSE_POSITIVES, 0.0), strict=True):
        table.add_row(name, *(_format(*pair) for pair in values), f"{guess:g}")
    console.print(table)
    first = scores[0]
    for score in scores:
        print_lines(console, *describe_membership(score))
    print_lines(
        console,
        f"{first.num_members} members, {first.num_others} others; in brackets 95 % confidence",
    )
    if run.info.privacy is not None:
        print_lines(
            console, describe_privacy(run.info.privacy), _describe_promise(run.info.privacy)
        )


def _describe_promise(spent: Mapping[str, Any]) -> str:
    """What ε says about every attack, in the measure of the table."""
    protected = "examples" if spent["mechanism"] == "dp-sgd" else "clients"
    if spent["epsilon"] is None:
        return f"Without noise nothing is promised: another attack may find all {protected}."
    most = bound_true_positives(spent["epsilon"], spent["delta"], FALSE_POSITIVES)
    return (
        f"ε promises that no attack finds more than {100 * most:.3g} of 100 {protected} "
        f"when it accuses {100 * FALSE_POSITIVES:g} of 100 others wrongly."
    )


def _format(value: float, interval: tuple[float, float]) -> str:
    return f"{value:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"
