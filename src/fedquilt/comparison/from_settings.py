"""Comparisons that settings describe: a TOML file, or options of the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedquilt.comparison.comparison import Comparison
from fedquilt.comparison.progress import ComparisonCallback, ignore_events
from fedquilt.comparison.shared_settings import limit_physically, share_settings
from fedquilt.comparison.sources import LoadedSources
from fedquilt.comparison.store import TrialStore
from fedquilt.comparison.study import Candidate, MakeTrial, Study
from fedquilt.comparison.trial import ConfiguredTrial
from fedquilt.comparison.variants import Variant, list_variants
from fedquilt.errors import FedquiltError
from fedquilt.settings.compare import CompareSection, load_options
from fedquilt.settings.load import flatten_settings, load_config, override_settings
from fedquilt.settings.resolve import resolve_config

SEED = "seed"
EVALUATIONS = 10  # of a run, unless the settings say how often


def compare_settings(
    settings: Mapping[str, Any],
    out: str | Path,
    *,
    workers: int | None = None,
    any_code: bool = False,
    on_event: ComparisonCallback = ignore_events,
) -> Comparison:
    """Compares what settings describe.

    Args:
        settings: Settings of a run, by section, where lists are lists of values; the section
            ``compare`` says what is compared.
        out: The folder of the runs, and of the table.
        workers: How many runs are done at a time; None: one per core, 0: one in this process.
        any_code: Whether results that other code made count.
        on_event: Is called with what happens.
    """
    options, flat = split_settings(settings)
    variants = list_variants(flat, options.methods, _flatten_variants(options))
    maker = TrialMaker(options)
    candidates = [Candidate(v.name, maker.bind(v), v.is_named) for v in variants]
    study = Study(
        candidates,
        options,
        TrialStore(out, any_code=any_code),
        workers,
        on_event,
        {"settings": json.loads(json.dumps(flat)), "compare": options.model_dump(mode="json")},
    )
    comparison = study.run()
    comparison.save(out)
    return comparison


def split_settings(settings: Mapping[str, Any]) -> tuple[CompareSection, dict[str, Any]]:
    """The section ``compare``, and the other settings by dotted name; a list of seeds is its.

    >>> options, flat = split_settings({"seed": [0, 1], "rounds": 5})
    >>> options.seeds, flat
    ((0, 1), {'rounds': 5})
    """
    given = dict(settings)
    section = dict(given.pop("compare", {}))
    flat = flatten_settings(given)
    if isinstance(flat.get(SEED), (list, tuple)):
        section.setdefault("seeds", tuple(flat.pop(SEED)))
    elif SEED in flat:
        section.setdefault("seeds", (flat.pop(SEED),))
    return load_options(section), flat


def _flatten_variants(options: CompareSection) -> dict[str, dict[str, Any]]:
    return {name: flatten_settings(changes) for name, changes in options.variants.items()}


class TrialMaker:
    """Makes the runs of variants; data are loaded once."""

    def __init__(self, options: CompareSection) -> None:
        self._options = options
        self._sources = LoadedSources()

    def bind(self, variant: Variant) -> MakeTrial:
        """What makes the runs of a variant."""

        def make_trial(
            seed: int,
            *,
            rounds: int | None = None,
            lr: float | None = None,
            fraction: float | None = None,
        ) -> ConfiguredTrial:
            changes = {
                SEED: seed,
                "rounds": rounds,
                "local_training.lr": lr,
                "method.fraction": fraction,
            }
            return self.make(variant, {n: v for n, v in changes.items() if v is not None})

        return make_trial

    def make(self, variant: Variant, changes: Mapping[str, Any]) -> ConfiguredTrial:
        """The run of a variant with some settings changed."""
        flat = {**share_settings(variant.settings), **changes}
        try:
            config = load_config(override_settings({}, flat))
        except FedquiltError as problem:
            raise type(problem)(f"variant '{variant.name}': {problem}") from None
        data = self._sources.load(config)
        if self._options.budgets_as != "sizes":
            flat["data.budgets"] = limit_physically(flat, self._options.budgets_as, data)
        flat.setdefault("run.evaluate_every", max(1, config.rounds // EVALUATIONS))
        config = resolve_config(load_config(override_settings({}, flat)), data.load())
        return ConfiguredTrial(variant.name, config, data)
