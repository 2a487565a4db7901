"""The JSON schema of a TOML file, for editors that complete and check settings."""

from __future__ import annotations

from typing import Any

from fedquilt.settings.compare import CompareSection
from fedquilt.settings.schema import Config

JSON_SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"


class TomlFile(Config):
    """All settings of a run, and what is compared with it."""

    compare: CompareSection = CompareSection()


def make_json_schema() -> dict[str, Any]:
    """Makes the JSON schema of a TOML file."""
    return {"$schema": JSON_SCHEMA_DIALECT, **TomlFile.model_json_schema()}
