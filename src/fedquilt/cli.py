"""The command line: parses, calls the library, prints."""

from __future__ import annotations

import json
import math
import operator
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from fractions import Fraction
from functools import partial, reduce
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.live import Live
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedquilt import __version__
from fedquilt.config import (
    Config,
    checked,
    dotted,
    example_of,
    fitted,
    method_of,
    model_of,
    override,
    population_of,
    read,
    read_value,
    resolved,
    source_of,
    structure_of,
)
from fedquilt.customize.export import export
from fedquilt.customize.mixture import Mixture
from fedquilt.data.source import Source
from fedquilt.deploy.federation import Federation, NodeStatus
from fedquilt.deploy.launch import (
    ENGINES,
    node_configs,
    place_of,
    sample_app,
    spelled_out,
    trained,
)
from fedquilt.errors import CheckpointError, ConfigError, FedquiltError, unknown
from fedquilt.evaluation.accuracy import SizeScore
from fedquilt.evaluation.accuracy import cost_of as price_of
from fedquilt.evaluation.targets import checked_target
from fedquilt.federation.state import Setup
from fedquilt.models.pretrained import Matched
from fedquilt.report import nodes as node_report
from fedquilt.report import tables
from fedquilt.report.page import write as write_report
from fedquilt.report.progress import Watch
from fedquilt.report.records import final_scores
from fedquilt.report.stories import compared, told
from fedquilt.runs.configured import (
    as_trained,
    config_of,
    is_finished,
    opened,
    ready,
    rounds_done,
)
from fedquilt.runs.run import Run
from fedquilt.structure.budget import Budget, fit
from fedquilt.structure.cost import cost as cost_of
from fedquilt.structure.subnet import Subnet
from fedquilt.training.attack import PGD
from fedquilt.training.dualnorm import checked_robustness

IMAGES = {  # what the papers feed these nets
    "heterofl-cnn": (1, 28, 28),
    "mlp": (1, 28, 28),
    "digits-cnn": (3, 28, 28),
    "alexnet-bn": (3, 256, 256),
    "wideresnet101-2": (3, 224, 224),
    "vit-b16": (3, 224, 224),
}
COLOUR_IMAGES = (3, 32, 32)  # and all others
PAUSE, SETTLED_PAUSE = 0.5, 3.0  # seconds between two looks at nodes, and once all are online

UsageError: Any = typer.BadParameter.__base__  # click's, or that of the copy which typer has

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command and exits: 0, 2 on bad input, 130 when stopped."""
    sys.exit(_status(arguments))


def _status(arguments: Sequence[str] | None) -> int:
    try:
        result = app(args=arguments, prog_name="fedquilt", standalone_mode=False)
    except FedquiltError as problem:
        return _refused(str(problem))
    except UsageError as problem:
        context = getattr(problem, "ctx", None)
        more = f" See '{context.command_path} --help'." if context else ""
        return _refused(problem.format_message() + more)
    return result if isinstance(result, int) else 0


def _refused(sentence: str) -> int:
    print("fedquilt:", " ".join(sentence.split()), file=sys.stderr)
    return 2


@app.callback(invoke_without_command=True, epilog="Start with: fedquilt train")
def about(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """One federated model, cut to fit every device."""
    if version:
        print(f"fedquilt {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


RunFolder = Annotated[Path, typer.Argument(metavar="DIR", help="The directory of a finished run.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Workers = Annotated[
    int | None, typer.Option(help="Worker processes; 0: this process; default one per core.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="Any setting, such as optimiser.epochs=5. Repeatable."
    ),
]
ParamsLimit = Annotated[int | None, typer.Option("--params", help="At most so many parameters.")]
MacsLimit = Annotated[int | None, typer.Option("--macs", help="At most so many MACs an example.")]
MemoryLimit = Annotated[
    int | None, typer.Option("--memory", help="At most so many bytes while training.")
]
UploadLimit = Annotated[int | None, typer.Option("--upload", help="At most so many bytes to send.")]


@app.command(
    epilog="Example: fedquilt train --data mnist --clients 100 --fraction 0.1 --budgets a1-e9"
)
def train(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG.toml", help="Settings; options override them.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="A known set, an .npz file or a folder; default digits.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="The method; default heterofl.")] = None,
    model: Annotated[
        str | None, typer.Option(help="A known model or file.py:function; default heterofl-cnn.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of training; default 20.")] = None,
    clients: Annotated[int | None, typer.Option(help="How many clients; default 10.")] = None,
    partition: Annotated[
        str | None,
        typer.Option(help="iid, classes:2, dirichlet:0.5, domain or natural; default iid."),
    ] = None,
    budgets: Annotated[
        str | None,
        typer.Option(
            help="Widths 1,0.5,0.25, levels a1-e9, divisors 8-4-2-1, log-normal ln0.5_0.4, "
            "high-capacity or low-capacity; default five sizes."
        ),
    ] = None,
    fraction: Annotated[
        float | None, typer.Option(help="The share of clients in a round; default 1.")
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="The learning rate; default the method's.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Repeats a run to the bit; default 0.")] = None,
    workers: Workers = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to keep the run; default runs/DATA-METHOD-NUMBER.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Go on with the run in this directory.")
    ] = None,
    evaluate_every: Annotated[
        int | None, typer.Option(help="Rounds between evaluations; 0: at the end; default 10.")
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Rounds between checkpoints; 0: at the end; default 10.")
    ] = None,
    test_locally: Annotated[
        bool | None,
        typer.Option(
            "--test-locally",
            help="Clients test their own models in every round, before these are merged.",
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="local; flower: over SuperNodes; flower-simulation: over simulated ones. "
            "Default local."
        ),
    ] = None,
    federation: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="A federation that runs: the directory of `fedquilt up`, or a SuperLink's name in "
            "your Flower configuration. Without it --engine flower starts one for this run.",
        ),
    ] = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Train a model over clients of many sizes.

    Without arguments: HeteroFL on the digits of scikit-learn, over ten clients of five sizes.
    """
    options = {
        "data.source": data,
        "method.name": method,
        "model.name": model,
        "rounds": rounds,
        "data.clients": clients,
        "data.partition": partition,
        "data.budgets": budgets,
        "method.fraction": fraction,
        "optimiser.lr": lr,
        "seed": seed,
        "run.workers": workers,
        "run.evaluate_every": evaluate_every,
        "run.checkpoint_every": checkpoint_every,
        "run.test_locally": test_locally,
    }
    changes = {
        **dotted({} if config is None else read(config)),
        **_given(options),
        **_assignments(settings),
    }
    console = _console(as_json=as_json)
    if resume is not None and out is not None:
        raise ConfigError(f"a resumed run stays in its directory; leave out --out {out}")
    engine = _engine(engine, federation)
    run: Run | None
    if engine != "local":
        run = _on_flower(changes, out, resume, engine, federation, console)
    else:
        run = _resumed(changes, resume, console) if resume else _started(changes, out, console)
    if run is not None:
        _finish(run, as_json=as_json)


@app.command(
    epilog="Example: fedquilt evaluate runs/digits-splitmix-1 --widths 1,0.5 --robustness 0,0.5,1 "
    "--attack"
)
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
    data: Annotated[
        str | None, typer.Option(help="Other data than the run's: a set, .npz or folder.")
    ] = None,
    workers: Workers = None,
    as_json: AsJson = False,
) -> None:
    """Measure the accuracy of a finished run at every size, and every robustness asked for."""
    sizes = None if widths is None else _widths([widths])
    dials = () if robustness is None else _dials(robustness)
    attacker = _attacker(_given({"epsilon": epsilon, "steps": steps}), wanted=attack)
    run = opened(folder)
    config = config_of(run.about)
    source = source_of(checked(override(config.model_dump(), _given({"data.source": data}))))
    population = population_of(config, as_trained(run, source))
    scores = run.evaluate(
        population, widths=sizes, robustness=dials, attack=attacker, workers=workers
    )
    if attacker is not None and data is None:
        _remember_evaluation(run, scores)
    _show_scores(run, scores, as_json=as_json)


@app.command(
    epilog="Example: fedquilt report runs/fedavg runs/adds --target 0.4 --target 0.5 --out report"
)
def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Directories of finished runs.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to write.")] = Path("report"),
    clients: Annotated[
        bool, typer.Option(help="Also client by client, which needs the runs' data.")
    ] = True,
    target: Annotated[
        list[float] | None,
        typer.Option(help="An accuracy, such as 0.4: the rounds to reach it. Repeatable."),
    ] = None,
    workers: Workers = None,
    as_json: AsJson = False,
) -> None:
    """Write one page about runs: tables, pictures, and the data behind them.

    Accuracy against width, parameters, MACs, time, bytes and rounds; robust against standard
    accuracy, if `evaluate --attack` has measured it; clients' work and accuracy; what each domain
    trained; what clients' nets cost, in the mean and by budget; steps and weights of blocks.

    Where clients choose their nets: what these keep of every layer, client by client and in the
    mean; parameters and MACs by layer; compression against the divergence of labels.

    If the runs were trained with --test-locally: accuracy of clients' own models by round, and how
    it is distributed. With --target: rounds to an accuracy, and how many times as fast as the first
    run.
    """
    targets = [checked_target(accuracy) for accuracy in target or ()]
    stories = []
    for folder in folders:
        run = opened(folder)
        people = None
        if clients:
            config = config_of(run.about)
            people = population_of(config, as_trained(run, source_of(config)))
        stories.append(told(folder.name, run, people, workers=workers))
    page = write_report(out, compared(stories, targets))
    if as_json:
        _print_json({"page": str(page), "data": str(page.parent / "report.json")})
    else:
        _say(_console(), f"wrote {page}")


@app.command(epilog="Example: fedquilt cost --model heterofl-cnn --width 1,0.5,0.25")
def cost(
    model: Annotated[str, typer.Option(help="A known model or file.py:function.")],
    width: Annotated[
        list[str] | None, typer.Option(help="Sizes, such as 0.5 or 1,0.5. Repeatable; default 1.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="The data that the model is for.")] = None,
    shape: Annotated[
        str | None, typer.Option("--input", help="Or the shape of one input: 1,28,28.")
    ] = None,
    classes: Annotated[int, typer.Option(min=1, help="And the number of classes.")] = 10,
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
    sizes = _widths(width or ["1"])
    limits = _given({"params": params, "macs": macs, "memory": memory, "upload": upload})
    if limits and len(sizes) > 1:
        raise ConfigError("limits find the width, so give at most one --width with them")
    named = {} if method is None else {"method.name": method}
    config = checked(override({}, {"model.name": model, **named, **_assignments(settings)}))
    config, example = _inputs(config, data, shape, classes)
    net = model_of(config)
    structure = structure_of(config, net, example)
    rows: list[dict[str, float]] = []
    if method is not None:
        if width or limits or depth != 1:
            raise ConfigError("a method has its own sizes; leave out --width, --depth and limits")
        rows = _sizes_of(config, Setup(net, structure, example, (), 1, config.seed), batch_size)
    else:
        if limits:
            budget = Budget(sizes[0], **limits)
            sizes = (fit(net, structure, budget, example, batch_size=batch_size)[0],)
        for size in sizes:
            subnet = structure.subnet(size, depth=depth)
            price = cost_of(net, structure, subnet, example, batch_size=batch_size)
            rows.append({"width": size, **asdict(price)})
    if as_json:
        _print_json(rows[0] if len(rows) == 1 else {"model": model, "sizes": rows})
    else:
        _console().print(tables.sizes(rows))


def _sizes_of(config: Config, setup: Setup, batch_size: int) -> list[dict[str, float]]:
    """What each size of a method costs, and its share of the whole model's parameters."""
    method = method_of(config)
    setup = method.prepared(setup)
    price = partial(cost_of, setup.model, setup.structure, batch_size=batch_size)
    whole = price(Subnet(), setup.example).params
    rows: list[dict[str, float]] = []
    state = method.start(setup)
    for size in method.sizes(setup):
        parts = [price(subnet, setup.example) for subnet in method.mix(setup, state, size)]
        total = reduce(operator.add, parts)
        rows.append({"width": size, "share": total.params / whole, **asdict(total)})
    if not rows:
        raise ConfigError(
            f"the sizes of {config.method.name} follow the budgets of clients, and there are none "
            "here; name them with --set method.widths=[1.0,0.5]"
        )
    return rows


@app.command(
    epilog="Example: fedquilt customize runs/digits-splitmix-1 --width 0.5 --robustness 0.3 "
    "--out small.onnx"
)
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
    as_json: AsJson = False,
) -> None:
    """Take a model of the size you need out of a finished run.

    The file is read again and compared with the model before success is reported.
    """
    limits = _given({"params": params, "macs": macs, "memory": memory, "upload": upload})
    Budget(width, **limits)  # refused before the run is read
    if robustness is not None:
        checked_robustness(robustness)
        if family:
            raise ConfigError("a family takes the robustness as an input; leave out --robustness")
    if client is not None and (width < 1 or limits or family or robustness is not None):
        raise ConfigError("the net of a client has the size that it chose; give --client alone")
    run = opened(folder)
    small = run.customize(width, robustness, client=client, **limits)
    facts = _facts(run, small, client=client, is_family=family)
    kept = {**facts, "config": run.about["config"]}
    written = export(small, out, about=kept, family=family)
    facts = {"path": str(written), "bytes": written.stat().st_size, "checked": True, **facts}
    if as_json:
        _print_json(facts)
    else:
        _describe(run, facts)


@app.command(
    epilog="Example: fedquilt up --nodes 3 --budgets 1,0.5,auto, and then in another terminal: "
    "fedquilt train --federation federation"
)
def up(
    nodes: Annotated[int, typer.Option(min=1, help="How many SuperNodes.")] = 3,
    budgets: Annotated[
        str | None,
        typer.Option(
            help="What each node affords, in turn: widths, 'auto' (measured on this device), or "
            "limits such as 'params=100000'. Default: as each run deals them."
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help="A node's own data, an .npz file or a folder; once for each node. "
            "Default: its part of the set that a run names.",
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="For keys, logs and what clients keep.")
    ] = Path("federation"),
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="The SuperLink's; default a free one.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Without TLS, and with nodes that nobody checks.")
    ] = False,
) -> None:
    """Start a Flower deployment on this machine, until Ctrl-C.

    A SuperLink and SuperNodes as processes of their own, over loopback, with TLS; only nodes whose
    keys are registered are let in. Certificates and keys are made where there are none yet.
    """
    console = _console()
    federation = Federation(
        out, node_configs(nodes, budgets, data or ()), insecure=insecure, port=port
    )
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _say(console, f"starting a SuperLink and {nodes} nodes in {out}")
        with suppress(KeyboardInterrupt), federation:
            _describe_federation(federation, console)
            try:
                _watch_nodes(federation, console)
            except KeyboardInterrupt:
                _say(console, "stopping")
        _say(console, "stopped")
    finally:
        signal.signal(signal.SIGTERM, before)


def _describe_federation(federation: Federation, console: Console) -> None:
    """What there is, and what to type in another terminal."""
    folder, connection = federation.folder, federation.connection
    home = shlex.quote(f"FLWR_HOME={connection.home}")
    app_folder = shlex.quote(str(sample_app(federation)))
    _say(
        console,
        f"the SuperLink is at {federation.address}, {federation.security}",
        "",
        "In another terminal:",
        f"  fedquilt train --federation {shlex.quote(str(folder))}",
        "or with Flower's own command:",
        f"  env {home} flwr run {app_folder} {connection.name} --stream",
        "Ctrl-C stops everything.",
        "",
    )


def _watch_nodes(federation: Federation, console: Console) -> None:
    """Shows how nodes are until it is interrupted, or the SuperLink dies."""
    is_live = console.is_interactive and console.file.isatty()
    seen: list[NodeStatus] = []
    with Live(console=console, auto_refresh=False) if is_live else nullcontext() as live:
        while True:
            now = federation.status()
            if live is not None:
                live.update(node_report.picture(now), refresh=True)
            else:
                _say(console, *node_report.changes(seen, now))
            is_settled = all(node.is_online for node in now)
            seen = now
            time.sleep(SETTLED_PAUSE if is_settled else PAUSE)


def _remember_evaluation(run: Run, scores: Sequence[SizeScore]) -> None:
    """For a report later; a run that cannot be written to is evaluated all the same."""
    assert run.folder is not None
    with suppress(OSError):
        text = json.dumps(_document(run, _rows(run, scores)), indent=1)
        (run.folder / "evaluation.json").write_text(text)


def _console(*, as_json: bool = False) -> Console:
    """Where people read; a program has standard output to itself."""
    return Console(stderr=as_json, markup=False, highlight=False, emoji=False)


def _say(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, soft_wrap=True)


def _print_json(document: Mapping[str, Any]) -> None:
    print(json.dumps(document, indent=2, allow_nan=False))


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _assignments(texts: Sequence[str] | None) -> dict[str, Any]:
    """What ``--set`` was given: dotted names and TOML values."""
    changes = {}
    for text in texts or ():
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise ConfigError(f"--set takes NAME=VALUE, such as optimiser.epochs=5, got '{text}'")
        changes[name.strip()] = read_value(value.strip())
    return changes


def _widths(texts: Sequence[str]) -> tuple[float, ...]:
    """Widths from texts such as ``1,0.5``."""
    words = [word for text in texts for word in text.split(",")]
    try:
        return tuple(Budget(float(word)).width for word in words)
    except ValueError:
        raise ConfigError(f"widths are numbers like 1,0.5,0.25, got '{','.join(words)}'") from None


def _dials(text: str) -> tuple[float, ...]:
    """Robustnesses from a text such as ``0,0.5,1``."""
    try:
        return tuple(checked_robustness(float(word)) for word in text.split(","))
    except ValueError:
        raise ConfigError(f"--robustness takes numbers like 0,0.5,1, got '{text}'") from None


def _attacker(settings: dict[str, Any], *, wanted: bool) -> PGD | None:
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


def _inputs(
    config: Config, data: str | None, shape: str | None, classes: int
) -> tuple[Config, torch.Tensor]:
    """Settings fitted to an input, and the input: of the data, of a shape, or the model's own."""
    if data is not None and shape is not None:
        raise ConfigError("the input comes from --data or from --input, give one of them")
    if data is not None:
        source = source_of(checked({"data": {"source": data}}))
        example = example_of(source)
        return fitted(config, source.shape, source.num_classes, source.num_tokens), example
    try:
        sizes = tuple(int(n) for n in shape.split(",")) if shape else _natural(config.model.name)
        example = torch.zeros(1, *sizes)
    except (ValueError, RuntimeError):
        raise ConfigError(f"--input takes sizes like 1,28,28, got '{shape}'") from None
    return fitted(config, sizes, classes), example


def _natural(model: str) -> tuple[int, ...]:
    if ":" in model:
        raise ConfigError("for a model of your own say what goes in: --input 3,32,32 or --data")
    return IMAGES.get(model, COLOUR_IMAGES)


def _started(changes: Mapping[str, Any], out: Path | None, console: Console) -> Run:
    """A new run, trained to its end."""
    config = checked(override({}, changes))
    source = source_of(config)
    config = resolved(config, source)
    return _watched(config, source, out or _next_free(config), console, resume=False)


def _next_free(config: Config) -> Path:
    name = f"{Path(config.data.source).stem}-{config.method.name}"
    number = 1
    while (folder := Path("runs") / f"{name}-{number}").exists():
        number += 1
    return folder


def _engine(engine: str | None, federation: str | None) -> str:
    """The engine that was asked for: a federation is Flower's."""
    engine = engine or ("local" if federation is None else "flower")
    if engine not in ENGINES:
        raise ConfigError(unknown("engine", engine, ENGINES))
    if federation is not None and engine != "flower":
        raise ConfigError(f"--federation is for --engine flower, got --engine {engine}")
    return engine


def _on_flower(
    changes: Mapping[str, Any],
    out: Path | None,
    resume: Path | None,
    engine: str,
    federation: str | None,
    console: Console,
) -> Run | None:
    """A run on Flower, trained to its end; None if its directory is on another machine."""
    place = None if federation is None else place_of(federation)
    if resume is not None:
        folder, config = resume, _resumable(changes, resume, on_flower=True)
        if is_finished(folder, config.rounds):
            return _as_it_is(folder, config, console)
    else:
        config = spelled_out(checked(override({}, changes)), place)
        folder = out or _next_free(config)
    again = ["--engine", engine, *([] if federation is None else ["--federation", federation])]
    with _stoppable(folder, lambda: config.rounds, again):
        _say(console, f"{config.method.name} on Flower, seed {config.seed}, in {folder}")
        run = trained(
            config,
            folder,
            partial(_say, console),
            place=place,
            simulation=engine == "flower-simulation",
            resume=resume is not None,
        )
    if run is None:
        _say(console, f"the run is in {folder.resolve()}, where its SuperLink is")
    return run


def _resumable(changes: Mapping[str, Any], folder: Path, *, on_flower: bool) -> Config:
    """The settings of a run that was stopped, with what may change."""
    if not (folder / "config.toml").is_file():
        raise CheckpointError(f"{folder} holds no run to resume; start one with --out {folder}")
    before = checked(read(folder / "config.toml"))
    config = checked(override(before.model_dump(), changes))
    _refuse_other_settings(before, config, folder)
    if on_flower != (before.flower.name is not None):
        other = "leave out --engine" if on_flower else "add --engine flower"
        raise ConfigError(f"a resumed run keeps its engine, and so its clients; {other}")
    return config


def _resumed(changes: Mapping[str, Any], folder: Path, console: Console) -> Run:
    """A run that was stopped, trained to its end; or a finished one, as it is."""
    config = _resumable(changes, folder, on_flower=False)
    if is_finished(folder, config.rounds):
        return _as_it_is(folder, config, console)
    return _watched(config, source_of(config), folder, console, resume=True)


def _as_it_is(folder: Path, config: Config, console: Console) -> Run:
    _say(console, f"{folder} is finished: all of its {config.rounds} rounds are done")
    return replace(opened(folder), scores=final_scores(folder))


def _refuse_other_settings(before: Config, config: Config, folder: Path) -> None:
    old = dotted(before.model_dump())
    for name, value in dotted(config.model_dump()).items():
        if old.get(name) != value and name != "rounds" and not name.startswith(("run.", "flower.")):
            raise ConfigError(
                "a resumed run keeps its settings, only rounds, run.* and flower.* may change; "
                f"{folder} has {name} = {old.get(name)}, got {value}"
            )


def _watched(
    config: Config, source: Source, folder: Path, console: Console, *, resume: bool
) -> Run:
    """A run trained to its end, with its progress on the console."""
    watch = Watch(console, config.rounds)
    with _stoppable(folder, lambda: watch.num_rounds):
        matched: list[Matched] = []
        train_it = ready(config, source, folder, resume=resume, tell=matched.append)
        _say(console, f"{config.method.name} on {source.name}, seed {config.seed}, in {folder}")
        _say(console, *map(str, matched))
        with watch:
            return train_it(watch)


@contextmanager
def _stoppable(
    folder: Path, num_rounds: Callable[[], int], more: Sequence[str] = ()
) -> Iterator[None]:
    """Lets Ctrl-C and SIGTERM stop a run, which saves itself, and says how to go on."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        again = shlex.join(["fedquilt", "train", "--resume", str(folder), *more])
        where = f"stopped after round {rounds_done(folder)} of {num_rounds()}"
        print(f"fedquilt: {where}; go on with: {again}", file=sys.stderr)
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _rows(run: Run, scores: Sequence[SizeScore]) -> list[dict[str, Any]]:
    """Scores with the bytes that a client of that size sends; a loss that is no number is None."""
    setup = run.setup
    rows = []
    for score in scores:
        mix = [s.leaving(*run.method.home) for s in run.method.mix(setup, run.state, score.width)]
        price = price_of(setup, mix, memory=False)
        loss = score.loss if score.loss is not None and math.isfinite(score.loss) else None
        rows.append({**asdict(score), "loss": loss, "bytes": price.bytes})
    return rows


def _document(run: Run, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Scores for programs; worst and mean are of local accuracy where there is no other."""
    is_local = all(row["accuracy"] is None for row in rows)
    found = [row["local_accuracy" if is_local else "accuracy"] for row in rows]
    known = [accuracy for accuracy in found if accuracy is not None]
    return {
        "run": str(run.folder),
        "seed": run.seed,
        "rounds": run.setup.rounds,
        "sizes": list(rows),
        "worst": min(known, default=None),
        "mean": sum(known) / len(known) if known else None,
    }


def _show_scores(run: Run, scores: Sequence[SizeScore], *, as_json: bool) -> None:
    rows = _rows(run, scores)
    document = _document(run, rows)
    if as_json:
        _print_json(document)
    elif rows:
        console = _console()
        console.print(tables.sizes(rows))
        worst, mean = tables.percent(document["worst"]), tables.percent(document["mean"])
        _say(console, f"worst {worst}, mean {mean}, seed {run.seed}")


def _finish(run: Run, *, as_json: bool) -> None:
    """The end of a training: its table, and what to type next."""
    _show_scores(run, run.scores, as_json=as_json)
    if not as_json:
        folder = shlex.quote(str(run.folder))
        small = min((score.width for score in run.scores), default=1.0)
        _say(
            _console(),
            "",
            "Next:",
            f"  fedquilt evaluate {folder}",
            f"  fedquilt customize {folder} --width {small:g} --out small.onnx",
        )


def _facts(run: Run, small: nn.Module, *, client: int | None, is_family: bool) -> dict[str, Any]:
    """What a user of a small model must know."""
    setup, about = run.setup, run.about
    width = float(small.fedquilt_width)  # type: ignore[arg-type]
    is_own = client is not None
    mix = run.method.mix(setup, run.state, width)
    if client is not None:
        mix = (run.state.chosen[client],)
    price = price_of(setup, mix, memory=False)
    is_mixed = isinstance(small, Mixture)
    return {
        "width": width,
        "client": client,
        "robustness": None if is_family else small.fedquilt_robustness,
        "family": _family_facts(small, width) if is_family else None,
        "params": price.params,
        "macs": price.macs,
        "seed": run.seed,
        "input": {"shapes": [x["shape"] for x in about["example"]], "scale": about.get("scale")},
        "needs_batches": _needs_batches(small),
        "is_trained_size": is_own or width in about["sizes"],
        "statistics_of": mix[0].owner if mix[0].own and not is_mixed and not is_own else None,
    }


def _family_facts(small: nn.Module, width: float) -> dict[str, Any]:
    """What the inputs and the rows of the output of a family mean."""
    return {
        "has_robustness": small.fedquilt_robustness is not None,
        "widths": list(small.widths) if isinstance(small, Mixture) else [width],
    }


def _needs_batches(model: nn.Module) -> bool:
    """Whether normalisation takes the statistics of each batch, since it has no others."""
    return any(isinstance(m, _BatchNorm) and m.running_mean is None for m in model.modules())


def _rows_of(family: Mapping[str, Any]) -> str:
    widths = ", ".join(f"{width:g}" for width in family["widths"])
    dial = "; its input 'robustness' is from 0 to 1" if family["has_robustness"] else ""
    return f"widths {widths} as rows of the output{dial}"


def _describe(run: Run, facts: Mapping[str, Any]) -> None:
    size = f"{facts['params']:,} parameters, {tables.prefixed(facts['bytes'], 'B')}"
    is_own = facts["client"] is not None
    point = f"the net of client {facts['client']}" if is_own else f"width {facts['width']:g}"
    if facts["robustness"] is not None:
        point += f", robustness {facts['robustness']:g}"
    if facts["family"] is not None:
        point = _rows_of(facts["family"])
    lines = [
        f"wrote {facts['path']}: {point}, {size}",
        "read back and compared: it gives the model's outputs",
    ]
    if not facts["is_trained_size"]:
        lines.append(_warning(facts, run.about["sizes"]))
    if scale := facts["input"]["scale"]:
        lines.append(f"feed it images / 255, less {scale['mean']}, over {scale['std']} per channel")
    if facts["needs_batches"]:
        lines.append("feed it batches: it normalises each by itself, so not single examples")
    _say(_console(), *lines)


def _warning(facts: Mapping[str, Any], trained: Sequence[float]) -> str:
    """What a size that no client trained is made of, and the trained one to take instead."""
    whose = facts["statistics_of"]
    borrowed = f" and it has the normalisation statistics of width {whose}" if whose else ""
    narrower = max((size for size in trained if size < facts["width"]), default=min(trained))
    return (
        f"beware: no client trained width {facts['width']:g}{borrowed}; "
        f"the nearest size that was trained and fits is --width {narrower:g}"
    )


if __name__ == "__main__":
    main()
