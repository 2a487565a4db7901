"""The page of the command line: every command with its arguments and options."""

from __future__ import annotations

import re

import click
import typer

from docsite.links import Page
from fedquilt.cli import app


def make_command_page() -> Page:
    """One section for each command."""
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group) or hasattr(group, "commands")
    commands = group.commands  # type: ignore[union-attr]
    parts = [
        "# Command line",
        "For everyone who uses `fedquilt` in a shell. This is what `fedquilt COMMAND --help` says.",
    ]
    for name, command in commands.items():
        parts += describe_command(f"fedquilt {name}", command)
    return Page("commands.md", "\n\n".join(parts) + "\n")


def describe_command(name: str, command: click.Command) -> list[str]:
    """A section: the help text, and a table of arguments and options."""
    if hasattr(command, "commands"):
        inner = [
            part
            for key, value in command.commands.items()
            for part in describe_command(f"{name} {key}", value)
        ]
        return [f"## {name}", format_help(command.help), *inner]
    rows = ["| option | what it does |", "| --- | --- |"]
    for parameter in command.params:
        if getattr(parameter, "hidden", False) or parameter.name == "help":
            continue
        names = ", ".join(f"`{option}`" for option in (*parameter.opts, *parameter.secondary_opts))
        if parameter.param_type_name == "argument":
            names = f"`{parameter.name.upper()}`"  # type: ignore[union-attr]
        described = " ".join((getattr(parameter, "help", None) or "").split())
        rows.append(f"| {names} | {escape(described)} |")
    return [f"## {name}", format_help(command.help), "\n".join(rows) if len(rows) > 2 else ""]


def format_help(text: str | None) -> str:
    """The help text, with examples as code."""
    cleaned = (text or "").replace("\b", "").replace("\f", "")
    paragraphs = [p.strip("\n") for p in re.split(r"\n\s*\n", cleaned) if p.strip()]
    shown = []
    for paragraph in paragraphs:
        lines = paragraph.splitlines()
        is_code = all(re.match(r"\s+\S|\s*(fedquilt|\$)", line) for line in lines)
        joined = "\n".join(line.strip() for line in lines)
        shown.append(f"```sh\n{joined}\n```" if is_code else escape(joined))
    return "\n\n".join(shown)


def escape(text: str) -> str:
    """Text with characters that Markdown would read as markup made plain."""
    return re.sub(r"([\\|<>*_\[\]])", r"\\\1", text)
