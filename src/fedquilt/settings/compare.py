"""The settings of a comparison: the section ``compare`` of a TOML file, and options."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from fedquilt.errors import ConfigError, describe_unknown
from fedquilt.settings.schema import Section

DEFAULT_SEEDS = 3
LEARNING_RATES = (0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
RESOURCES = ("bytes", "macs", "seconds")
MACS_PER_SECOND, BYTES_PER_SECOND = 1e9, 1e6  # of a simulated device without limits


class CompareSection(Section):
    """What is compared, how often, and for how long."""

    methods: tuple[str, ...] = ()
    """Methods by name; all: every method that fits. Left out: the method of the settings,
    or all."""
    seeds: int | tuple[int, ...] = DEFAULT_SEEDS
    """Number of seeds, counted from 0, or the seeds themselves."""
    variants: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Further rows: names, and the settings that differ."""
    bytes: float | None = Field(None, gt=0)
    """Bytes that a run may send both ways, instead of a number of rounds."""
    macs: float | None = Field(None, gt=0)
    """MACs that all clients of a run may compute, instead of a number of rounds."""
    seconds: float | None = Field(None, gt=0)
    """Simulated seconds that a run may take, instead of a number of rounds."""
    metric: str | None = None
    """The score that decides. Left out: the first that all runs have."""
    target: float | None = None
    """The score to reach. Left out: 95 percent of the best one."""
    budgets_as: Literal["sizes", "params", "macs", "memory", "upload"] = "sizes"
    """What a budget such as 0.5 means: a size, as each method defines it, or the same physical
    limit for all: what the model cut to that width needs."""
    search_lr: bool = False
    """Whether each method's learning rate is searched first, on validation data."""
    learning_rates: tuple[float, ...] = LEARNING_RATES
    """The learning rates that are searched, the same for all methods."""
    macs_per_second: float = Field(MACS_PER_SECOND, gt=0)
    """MACs per second of a simulated device without limits."""
    bytes_per_second: float = Field(BYTES_PER_SECOND, gt=0)
    """Bytes per second that a simulated device sends or receives."""

    @field_validator("methods", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return tuple(value.split(",")) if isinstance(value, str) else value

    @property
    def limits(self) -> dict[str, float]:
        """What a run may spend, if that is limited."""
        given = {name: getattr(self, name) for name in RESOURCES}
        return {name: limit for name, limit in given.items() if limit is not None}

    def list_seeds(self) -> tuple[int, ...]:
        """The seeds, each once."""
        seeds = tuple(range(self.seeds)) if isinstance(self.seeds, int) else self.seeds
        if not seeds or min(seeds) < 0:
            raise ConfigError(f"a comparison needs seeds from 0 on, got {self.seeds}; write 3")
        return tuple(dict.fromkeys(seeds))


def load_options(settings: dict[str, Any]) -> CompareSection:
    """Validates the settings of a comparison.

    >>> load_options({"methods": "heterofl,fedavg"}).methods
    ('heterofl', 'fedavg')
    >>> load_options({"metods": "all"})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    fedquilt.errors.ConfigError: setting 'compare.metods' is not known (did you mean ...
    """
    try:
        return CompareSection.model_validate(settings)
    except ValidationError as problem:
        error = problem.errors()[0]
    name = ".".join(["compare", *map(str, error["loc"][:1])])
    if error["type"] == "extra_forbidden":
        known = [f"compare.{field}" for field in CompareSection.model_fields]
        raise ConfigError(describe_unknown("setting", name, known))
    rule = error["msg"]
    raise ConfigError(f"setting '{name}': {rule[0].lower()}{rule[1:]}, got {error['input']!r}")
