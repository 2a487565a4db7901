"""``fedquilt cost``: what a model costs before anyone trains it."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import asdict
from functools import reduce
from typing import Annotated, Any, NamedTuple

import torch
import typer

from fedquilt.cli.console import make_console, print_json, print_lines
from fedquilt.cli.options import (
    AsJson,
    MacsLimit,
    MemoryLimit,
    ParamsLimit,
    Settings,
    UploadLimit,
    drop_unset,
    parse_assignments,
    parse_widths,
)
from fedquilt.errors import ConfigError
from fedquilt.federation.state import Setup
from fedquilt.report import tables
from fedquilt.settings.load import load_config, override_settings
from fedquilt.settings.resolve import (
    build_method,
    build_model,
    build_structure,
    fit_model_to_data,
    load_source,
    make_example,
)
from fedquilt.settings.schema import Config
from fedquilt.structure.budget import Budget, fit_budget
from fedquilt.structure.cost import Cost
from fedquilt.structure.cost import compute_cost as cost_of
from fedquilt.structure.subnet import Subnet
from fedquilt.training.optimizers import count_state_tensors
from fedquilt.training.settings import LocalTraining


class Input(NamedTuple):
    """What goes into a net: images, or texts of so many tokens."""

    sizes: tuple[int, ...]
    classes: int = 10
    tokens: int | None = None


INPUTS = {  # what the papers feed these nets
    "heterofl-cnn": Input((1, 28, 28)),
    "mlp": Input((1, 28, 28)),
    "digits-cnn": Input((3, 28, 28)),
    "alexnet-bn": Input((3, 256, 256)),
    "wideresnet101-2": Input((3, 224, 224)),
    "vit-b16": Input((3, 224, 224)),
    "char-lstm": Input((80,), 80, 80),
    "sentiment-lstm": Input((25,), 2, 10_000),
    "heterofl-transformer": Input((64,), 33_278, 33_278),
}
COLOUR_IMAGES = Input((3, 32, 32))  # and all others


EXAMPLE = "fedquilt cost --model heterofl-cnn --width 1,0.5,0.25"


def cost(
    model: Annotated[str, typer.Option(help="A known model or file.py:function.")],
    width: Annotated[
        list[str] | None, typer.Option(help="Sizes, such as 0.5 or 1,0.5. Repeatable; default 1.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="The data that the model is for.")] = None,
    shape: Annotated[
        str | None, typer.Option("--input", help="Or the shape of one input: 1,28,28.")
    ] = None,
    classes: Annotated[
        int | None, typer.Option(min=1, help="And the number of classes; 10 for images.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="And how many tokens there are, if it is a text.")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="The sizes of this method, such as nefl; with --set method.…")
    ] = None,
    depth: Annotated[
        float, typer.Option(help="The share of the blocks of each stage that is kept.")
    ] = 1.0,
    settings: Settings = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples in a training step.")] = 10,
    params: ParamsLimit = None,
    macs: MacsLimit = None,
    memory: MemoryLimit = None,
    upload: UploadLimit = None,
    as_json: AsJson = False,
) -> None:
    """Say what a model costs at some sizes, or which size fits within limits."""
    sizes = parse_widths(width or ["1"])
    limits = drop_unset({"params": params, "macs": macs, "memory": memory, "upload": upload})
    if limits and len(sizes) > 1:
        raise ConfigError("limits find the width, so give at most one --width with them")
    named = {} if method is None else {"method.name": method}
    config = load_config(
        override_settings({}, {"model.name": model, **named, **parse_assignments(settings)})
    )
    config, example = _fit_to_input(config, data, shape, classes, tokens)
    net = build_model(config)
    steps = _describe_steps(config, batch_size)
    structure = build_structure(config, net, example)
    rows: list[dict[str, Any]] = []
    if method is not None:
        if width or limits or depth != 1:
            raise ConfigError("a method has its own sizes; leave out --width, --depth and limits")
        rows = _compute_method_sizes(
            config, Setup(net, structure, example, (), 1, config.seed), steps
        )
    else:
        if limits:
            budget = Budget(sizes[0], **limits)
            sizes = (fit_budget(net, structure, budget, example, **steps)[0],)
        for size in sizes:
            subnet = structure.subnet(size, depth=depth)
            price = cost_of(net, structure, subnet, example, **steps)
            rows.append({"width": size, **asdict(price)})
    if as_json:
        print_json(rows[0] if len(rows) == 1 else {"model": model, "sizes": rows})
    else:
        console = make_console()
        console.print(tables.make_size_table(rows))
        if data is None:
            print_lines(console, _describe_input(example, is_given=shape is not None))


def _describe_input(example: torch.Tensor, *, is_given: bool) -> str:
    """One line about the input that costs are for.

    >>> _describe_input(torch.zeros(1, 3, 32, 32), is_given=False)
    'for images of 3 x 32 x 32, which is assumed; say --input or --data for another'
    """
    sizes = " x ".join(map(str, example.shape[1:]))
    is_text = not example.is_floating_point()
    text = f"for texts of {sizes} tokens" if is_text else f"for images of {sizes}"
    text = text if is_text or example.ndim == 4 else f"for inputs of {sizes}"
    return text if is_given else f"{text}, which is assumed; say --input or --data for another"


def _fit_to_input(
    config: Config, data: str | None, shape: str | None, classes: int | None, tokens: int | None
) -> tuple[Config, torch.Tensor]:
    """Settings fitted to an input, and the input: of the data, of a shape, or the model's own."""
    if data is not None:
        if (shape, classes, tokens) != (None, None, None):
            raise ConfigError(
                "--data says what goes in and out; leave out --input, --classes and --tokens"
            )
        source = load_source(load_config({"data": {"source": data}}))
        example = make_example(source)
        return fit_model_to_data(
            config, source.shape, source.num_classes, source.num_tokens
        ), example
    if shape is None and ":" in config.model.name:
        raise ConfigError(
            "for a model of your own say what goes in: --input 3,32,32 for images, "
            "--input 80 --tokens 90 for texts, or --data"
        )
    usual = INPUTS.get(config.model.name, COLOUR_IMAGES)
    tokens = usual.tokens if tokens is None else tokens
    kind = torch.float32 if tokens is None else torch.int64
    try:
        sizes = tuple(int(n) for n in shape.split(",")) if shape else usual.sizes
        example = torch.zeros(1, *sizes, dtype=kind)
    except (ValueError, RuntimeError):
        raise ConfigError(f"--input takes sizes like 1,28,28, got '{shape}'") from None
    return fit_model_to_data(config, sizes, classes or usual.classes, tokens), example


def _describe_steps(config: Config, batch_size: int) -> dict[str, Any]:
    """What the memory of a training step depends on, as ``compute_cost`` takes it."""
    local_training = getattr(build_method(config), "local_training", LocalTraining())
    kept = count_state_tensors(local_training.optimizer_at(local_training.lr, num_examples=1))
    return {"batch_size": batch_size, "optimizer_tensors": kept}


def _compute_method_sizes(
    config: Config, setup: Setup, steps: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """What each size of a method costs, and its share of the whole model's parameters."""
    method = build_method(config)
    setup = method.prepare_model(setup)

    def price(subnet: Subnet) -> Cost:
        return cost_of(setup.model, setup.structure, subnet, setup.example, **steps)

    whole = price(Subnet()).params
    rows: list[dict[str, Any]] = []
    state = method.start(setup)
    for size in method.sizes(setup):
        parts = [price(subnet) for subnet in method.ensemble(setup, state, size)]
        total = reduce(operator.add, parts)
        rows.append(
            {
                "width": size,
                "kind": method.size_kind,
                "share": total.params / whole,
                **asdict(total),
            }
        )
    if not rows:
        raise ConfigError(
            f"the sizes of {config.method.name} follow the budgets of clients, and there are none "
            "here; name them with --set method.widths=[1.0,0.5]"
        )
    return rows
