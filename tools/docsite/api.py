"""Pages of the API reference: every public name, grouped by the package that defines it."""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict

import fedquilt
from docsite.links import ROOT, Page

# packages in the order of the reference; a package that is not listed comes last, under its name
TITLES = {
    "runs": "Runs",
    "comparison": "Comparisons",
    "data": "Data",
    "models": "Models",
    "methods": "Methods",
    "training": "Local training",
    "learning": "Losses and metrics",
    "structure": "Structure, budgets and cost",
    "evaluation": "Evaluation",
    "customize": "Export",
    "report": "Reports",
    "federation": "Clients, tasks and state",
    "federation.aggregation": "Aggregation",
    "federation.privacy": "Privacy",
    "federation.secure": "Secure aggregation",
    "federation.hostile": "Attacks",
    "engines": "Engines",
    "errors": "Errors and version",
}


def find_modules() -> dict[str, str]:
    """The module that each public name is imported from, without ``fedquilt.`` before it."""
    tree = ast.parse((ROOT / "src" / "fedquilt" / "__init__.py").read_text())
    return {
        alias.asname or alias.name: (node.module or "").removeprefix("fedquilt.")
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def group_names() -> dict[str, list[str]]:
    """The public names by the title of their page, in the order of the reference."""
    modules = find_modules()
    groups = defaultdict(list)
    for name in fedquilt.__all__:
        groups[find_title(modules[name])].append(name)
    order = [*TITLES.values()]
    return {
        t: groups[t] for t in sorted(groups, key=lambda t: (t not in order, [*order, t].index(t)))
    }


def find_title(module: str) -> str:
    """The title of the page that describes a module's names.

    >>> find_title("federation.aggregation.mean"), find_title("version"), find_title("trackers.csv")
    ('Aggregation', 'Errors and version', 'Trackers')
    """
    if module == "version":
        module = "errors"
    parts = module.split(".")
    names = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next((TITLES[name] for name in names if name in TITLES), parts[0].capitalize())


def make_reference() -> list[Page]:
    """One page for each group, and one that lists all names."""
    groups = group_names()
    pages = [make_group_page(title, names) for title, names in groups.items()]
    lines = [
        "# API reference",
        "",
        "For everyone who writes Python. All names are in `fedquilt`, in the guides `fq`.",
        "Every name has an example that runs. What is not listed here may change without notice.",
        "",
        "| page | names |",
        "| --- | --- |",
    ]
    for title, names in groups.items():
        listed = ", ".join(f"{{py:obj}}`~fedquilt.{name}`" for name in names)
        lines.append(f"| [{title}]({find_slug(title)}.rst) | {listed} |")
    return [Page("api/index.md", "\n".join(lines) + "\n"), *pages]


def find_slug(title: str) -> str:
    """The name of a page's file."""
    return title.lower().replace(",", "").replace(" ", "-")


def make_group_page(title: str, names: list[str]) -> Page:
    """The page of one group, as reStructuredText, which docstrings are written in."""
    blocks = [title, "=" * len(title), "", ".. currentmodule:: fedquilt", ""]
    for name in names:
        blocks += [*describe_name(name), ""]
    return Page(f"api/{find_slug(title)}.rst", "\n".join(blocks))


def describe_name(name: str) -> list[str]:
    """The directive that makes Sphinx read a name's docstring."""
    value = getattr(fedquilt, name)
    if inspect.ismodule(value):
        return describe_module(name)
    if inspect.isclass(value):
        return [f".. autoclass:: {name}", "   :members:", "   :show-inheritance:"]
    if inspect.isfunction(value):
        return [f".. autofunction:: {name}"]
    if isinstance(value, dict):
        keys = ", ".join(f'``"{key}"``' for key in value)
        return [f".. py:data:: {name}", "", f"   A dict by name: {keys}."]
    if isinstance(value, str):
        return [f".. py:data:: {name}", "", "   The version of the library, as a string."]
    return [f".. py:data:: {name}", "", f"   A type: ``{value}``.".replace("fedquilt.", "")]


def describe_module(name: str) -> list[str]:
    """A module that is public as a whole, with what it defines."""
    module = getattr(fedquilt, name)
    lines = [f".. py:module:: fedquilt.{name}", "", f"``fedquilt.{name}``: {module.__doc__}", ""]
    for key, value in vars(module).items():
        if inspect.isclass(value) and value.__module__ == module.__name__ and key[0] != "_":
            lines += [f".. autoclass:: {module.__name__}.{key}", ""]
    return [*lines, ".. currentmodule:: fedquilt"]
