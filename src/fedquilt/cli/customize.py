"""``fedquilt customize``: a model of the size that is needed, as a file."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from fedquilt.cli.console import make_console, print_json, print_lines
from fedquilt.cli.options import (
    AsJson,
    MacsLimit,
    MemoryLimit,
    ParamsLimit,
    RunFolder,
    RunModel,
    Trust,
    UploadLimit,
    drop_unset,
)
from fedquilt.customize.ensemble import Ensemble
from fedquilt.customize.export import export
from fedquilt.customize.info import SubnetInfo, find_info
from fedquilt.errors import ConfigError
from fedquilt.evaluation.accuracy import compute_ensemble_cost as price_of
from fedquilt.formatting import format_si
from fedquilt.methods.method import SIZE_NAMES
from fedquilt.runs.from_config import open_configured_run
from fedquilt.runs.run import Run
from fedquilt.structure.budget import Budget
from fedquilt.training.dualnorm import validate_robustness
from fedquilt.training.tracking import needs_batches

EXAMPLE = "fedquilt customize runs/digits-splitmix-1 --width 0.5 --robustness 0.3 --out small.onnx"


def customize(
    folder: RunFolder,
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The file: .onnx, .pt2 or .safetensors.")
    ],
    width: Annotated[float, typer.Option(help="The fraction of all channels.")] = 1.0,
    robustness: Annotated[
        float | None, typer.Option(help="From 0 (accurate, the default) to 1 (robust).")
    ] = None,
    family: Annotated[
        bool,
        typer.Option(
            "--family",
            help="All points up to the width in one .onnx or .pt2: the robustness is an input, "
            "and the output has a row for each width.",
        ),
    ] = False,
    client: Annotated[
        int | None,
        typer.Option(help="The net that this client chose for itself, with what it keeps (apfl)."),
    ] = None,
    params: ParamsLimit = None,
    macs: MacsLimit = None,
    memory: MemoryLimit = None,
    upload: UploadLimit = None,
    model: RunModel = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Take a model of the size you need out of a finished run.

    --width takes any width. Limits take the largest size that was trained and fits.

    The file is read again and compared with the model before success is reported.
    """
    limits = drop_unset({"params": params, "macs": macs, "memory": memory, "upload": upload})
    Budget(width, **limits)  # refused before the run is read
    if robustness is not None:
        validate_robustness(robustness)
        if family:
            raise ConfigError("a family takes the robustness as an input; leave out --robustness")
    if client is not None and (width < 1 or limits or family or robustness is not None):
        raise ConfigError("the net of a client has the size that it chose; give --client alone")
    run = open_configured_run(folder, model=model, trust=trust)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they say is among the facts
        small = run.customize(width, robustness, client=client, **limits)
    facts = _collect_facts(run, small, client=client, is_family=family)
    kept = {**facts, "config": run.info.config}
    written = export(small, out, about=kept, family=family)
    facts = {"path": str(written), "bytes": written.stat().st_size, "checked": True, **facts}
    if as_json:
        print_json(facts)
    else:
        _describe(run, facts)


def _collect_facts(
    run: Run, small: nn.Module, *, client: int | None, is_family: bool
) -> dict[str, Any]:
    """What a user of a small model must know."""
    setup, info, module = run.setup, run.info, _get_info(small)
    width = module.width
    is_own = client is not None
    ensemble = run.method.ensemble(setup, run.state, width)
    if client is not None:
        ensemble = (run.state.chosen_subnets[client],)
    price = price_of(setup, ensemble, memory=False)
    is_mixed = isinstance(small, Ensemble)
    return {
        "width": width,
        "kind": run.method.size_kind,
        "client": client,
        "robustness": None if is_family else module.robustness,
        "family": _collect_family_facts(small, width) if is_family else None,
        "params": price.params,
        "macs": price.macs,
        "seed": run.seed,
        "input": {
            "shapes": [list(x.shape) for x in info.inputs],
            "transforms": list(info.transforms),
            "scale": info.normalization and asdict(info.normalization),
        },
        "needs_batches": needs_batches(small),
        "is_trained_size": is_own or width in info.sizes,
        "statistics_of": ensemble[0].owner
        if ensemble[0].private and not is_mixed and not is_own
        else None,
    }


def _get_info(module: nn.Module) -> SubnetInfo:
    info = find_info(module)
    assert info is not None
    return info


def _collect_family_facts(small: nn.Module, width: float) -> dict[str, Any]:
    """What the inputs and the rows of the output of a family mean."""
    return {
        "has_robustness": _get_info(small).robustness is not None,
        "widths": list(small.widths) if isinstance(small, Ensemble) else [width],
    }


def _describe(run: Run, facts: Mapping[str, Any]) -> None:
    size = f"{facts['params']:,} parameters, {format_si(facts['bytes'], 'B')}"
    is_own = facts["client"] is not None
    point = f"the net of client {facts['client']}" if is_own else _size(facts, facts["width"])
    if facts["robustness"] is not None:
        point += f", robustness {facts['robustness']:g}"
    if facts["family"] is not None:
        point = _describe_rows(facts["family"])
    lines = [
        f"wrote {facts['path']}: {point}, {size}",
        "read back and compared: it gives the model's outputs",
    ]
    if not facts["is_trained_size"]:
        lines.append(_describe_warning(facts, run.info.sizes))
    if steps := _describe_preprocessing(**facts["input"]):
        lines.append(f"feed it {steps}")
    if facts["needs_batches"]:
        lines.append("feed it batches: it normalises each by itself, so not single examples")
    print_lines(make_console(), *lines)


def _describe_preprocessing(
    shapes: object, transforms: Sequence[str], scale: Mapping[str, Any] | None
) -> str:
    """What images go through before they are the model's inputs; empty if it is nothing.

    >>> _describe_preprocessing([], ["Resize(size=8)"], {"mean": [0.5], "std": [0.2]})
    'images / 255, after Resize(size=8), less [0.5], over [0.2] per channel'
    """
    steps = [f"after {', '.join(transforms)}"] if transforms else []
    if scale is not None:
        steps += [f"less {scale['mean']}", f"over {scale['std']} per channel"]
    return ", ".join(["images / 255", *steps]) if steps else ""


def _size(facts: Mapping[str, Any], size: float) -> str:
    """A size as its method calls it.

    >>> _size({"kind": "parameters"}, 0.2)
    'γ 0.2'
    """
    return f"{SIZE_NAMES[facts['kind']]} {size:g}"


def _describe_rows(family: Mapping[str, Any]) -> str:
    widths = ", ".join(f"{width:g}" for width in family["widths"])
    dial = "; its input 'robustness' is from 0 to 1" if family["has_robustness"] else ""
    return f"widths {widths} as rows of the output{dial}"


def _describe_warning(facts: Mapping[str, Any], trained: Sequence[float]) -> str:
    """What a size that no client trained is made of, and the trained one to take instead."""
    whose = facts["statistics_of"]
    borrowed = f" and it has the normalisation statistics of width {whose}" if whose else ""
    narrower = max((size for size in trained if size < facts["width"]), default=min(trained))
    return (
        f"beware: no client trained {_size(facts, facts['width'])}{borrowed}; "
        f"the nearest size that was trained and fits is --width {narrower:g}"
    )
