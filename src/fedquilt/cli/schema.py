"""``fedquilt schema``: the JSON schema of settings, for editors."""

from __future__ import annotations

from fedquilt.cli.console import print_json
from fedquilt.settings.json_schema import make_json_schema

EXAMPLE = "fedquilt schema > fedquilt.schema.json"


def schema() -> None:
    """Print the JSON schema of settings.

    Editors complete and check TOML files with it: for a file of settings whose first line is
    ``#:schema ./fedquilt.schema.json``, for example.
    """
    print_json(make_json_schema())
