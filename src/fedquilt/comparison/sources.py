"""Data of several runs: each source is loaded once."""

from __future__ import annotations

import json

from fedquilt.comparison.trial import LoadedData
from fedquilt.settings.resolve import load_source
from fedquilt.settings.schema import Config

# the settings of data that change the examples, and not only who has them
OF_SOURCE = {
    *("source", "normalize", "fraction", "augment"),
    *("transforms", "test_transforms", "transform_targets"),
}


class LoadedSources:
    """Sources of data that were loaded, by the settings that they depend on."""

    def __init__(self) -> None:
        self._data: dict[str, LoadedData] = {}

    def load(self, config: Config) -> LoadedData:
        """The data that settings name; they are read when they are asked for."""
        key = json.dumps(config.data.model_dump(mode="json", include=OF_SOURCE), sort_keys=True)
        if key not in self._data:
            self._data[key] = LoadedData(lambda: load_source(config))
        return self._data[key]
