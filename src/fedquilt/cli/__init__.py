"""The command line: parses, calls the library, prints."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from fedquilt import __version__
from fedquilt.cli import (
    audit,
    compare,
    cost,
    customize,
    doctor,
    evaluate,
    init,
    list_names,
    report,
    reproduce,
    schema,
    serve,
    train,
    up,
    watch,
)
from fedquilt.cli.log_level import takes_log_level
from fedquilt.cli.output import detachable_output
from fedquilt.cli.wording import speak_options
from fedquilt.errors import FedquiltError

UsageError: Any = typer.BadParameter.__base__  # click's, or that of the copy which typer has
app = typer.Typer(pretty_exceptions_enable=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command and exits: 0, 2 on bad input, 130 when stopped."""
    with detachable_output():
        status = _status(arguments)
    sys.exit(status)


def _status(arguments: Sequence[str] | None) -> int:
    try:
        result = app(args=arguments, prog_name="fedquilt", standalone_mode=False)
    except FedquiltError as problem:
        return _print_refusal(speak_options(str(problem), _list_options()))
    except UsageError as problem:
        context = getattr(problem, "ctx", None)
        more = f" See '{context.command_path} --help'." if context else ""
        return _print_refusal(problem.format_message() + more)
    return result if isinstance(result, int) else 0


def _list_options() -> dict[str, str]:
    """The options of all commands by their parameters' names."""
    commands: Any = typer.main.get_command(app)
    parameters = [p for command in commands.commands.values() for p in command.params]
    return {p.name: p.opts[0] for p in parameters if p.opts[0].startswith("--")}


def _print_refusal(sentence: str) -> int:
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


for module, command in (
    (init, init.init),
    (train, train.train),
    (compare, compare.compare),
    (reproduce, reproduce.reproduce),
    (evaluate, evaluate.evaluate),
    (audit, audit.audit),
    (report, report.report),
    (cost, cost.cost),
    (customize, customize.customize),
    (serve, serve.serve),
    (watch, watch.watch),
    (up, up.up),
    (list_names, list_names.list_names),
    (doctor, doctor.doctor),
    (schema, schema.schema),
):
    name = module.EXAMPLE.split()[1]
    app.command(name, epilog=f"Example: {module.EXAMPLE}")(takes_log_level(command))
