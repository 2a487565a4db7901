"""``fedquilt doctor``: what is here, what is missing, and how to get it."""

from __future__ import annotations

from dataclasses import asdict

import typer

from fedquilt.cli.console import make_console, print_json, print_lines
from fedquilt.cli.options import AsJson
from fedquilt.formatting import format_si
from fedquilt.report.tables import make_table
from fedquilt.runs.installation import Installation, examine_installation

EXAMPLE = "fedquilt doctor"


def doctor(as_json: AsJson = False) -> None:
    """Show versions, cores, memory, devices and extras, what is missing and how to get it.

    Exits with 1 if something is missing that every run needs.
    """
    found = examine_installation()
    if as_json:
        extras = [{**asdict(e), "is_here": e.is_here, "remedy": e.remedy} for e in found.extras]
        print_json({**asdict(found), "extras": extras})
    else:
        _print_installation(found)
    if found.problems:
        raise typer.Exit(1)


def _print_installation(found: Installation) -> None:
    console, machine = make_console(), found.machine
    memory = machine["free_memory"]
    versions = [f"{name} {version}" for name, version in found.versions.items()]
    print_lines(
        console,
        ", ".join(versions[:3]),
        f"machine: {machine['system']}, {machine['cores']} cores, "
        f"{'memory not known' if memory is None else format_si(memory, 'B') + ' of memory free'}, "
        f"{format_si(machine['free_disk'], 'B')} of disk free in {machine['scratch']}",
        f"devices: {', '.join(found.devices)}",
    )
    rows = [
        [extra.name, "yes" if extra.is_here else "no", extra.purpose, extra.remedy]
        for extra in found.extras
    ]
    table = make_table(["extra", "here", "for", "install it"], rows)
    for column in table.columns:
        column.justify = "left"
    console.print(table)
    wrong = [f"{e.name}: {', '.join(e.missing)}" for e in found.extras if e.versions and e.missing]
    print_lines(console, *(f"partly missing, {line}" for line in wrong))
    print_lines(console, *(f"problem: {problem}" for problem in found.problems))
    if not found.problems:
        print_lines(console, "Everything that a run needs is here. Try: fedquilt train")
