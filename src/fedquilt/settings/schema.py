"""The schema of all settings: TOML files, command-line options and the JSON schema come from it.

A setting has a dotted name such as ``data.clients``. The settings of methods, of local training
and of the server optimizer are derived from their classes, so that what a user leaves out is the
default of Python.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic.fields import FieldInfo

from fedquilt.federation.aggregation import AGGREGATORS, SERVER_OPTIMIZERS
from fedquilt.federation.privacy import Privacy
from fedquilt.federation.secure import SecureAggregation
from fedquilt.federation.state import Sampling
from fedquilt.methods import METHODS
from fedquilt.ranges import Fraction, NotNegative, Positive, Share
from fedquilt.settings.derive import derive_section, list_arguments
from fedquilt.training.poisoning import ATTACKS
from fedquilt.training.settings import LocalTraining

DEFAULT_CLIENTS = 10
DEFAULT_METHOD = "heterofl"
DEFAULT_SERVER_OPTIMIZER = "sgd"
DEFAULT_AGGREGATOR = "mean"
DEFAULT_ATTACK = "none"
DEFAULTS = {
    "method": DEFAULT_METHOD,
    "server_optimizer": DEFAULT_SERVER_OPTIMIZER,
    "aggregation": DEFAULT_AGGREGATOR,
    "attacks": DEFAULT_ATTACK,
}
SECTIONS_OF_THEIR_OWN = ("local_training", "aggregator", "transforms")  # no settings of a method


class Section(BaseModel):
    """A group of settings; a key that it does not have is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class DataSection(Section):
    """Where examples come from, and how they are divided among clients."""

    source: str = "digits"
    """The dataset: a known name, an .npz file, or a folder."""
    partition: str = "iid"
    """How examples are divided: iid, classes:2, dirichlet:0.5, domain or natural."""
    clients: int | None = Field(None, ge=1)
    """Number of clients. Left out: 10, or all clients of a natural partition."""
    augment: str | None = None
    """Augmentation of training images by name: none, flip, crop, crop-flip or crop-jitter. Left
    out: as usual for the set."""
    transforms: tuple[str, ...] | None = None
    """Transforms of images, in their order, such as ["Resize(32)", "HorizontalFlip()"]. Left out:
    those of ``augment``."""
    test_transforms: tuple[str, ...] | None = None
    """Transforms in evaluation. Left out: those of ``transforms`` that are not random."""
    transform_targets: bool = False
    """Whether targets are images that are moved with the inputs."""
    normalize: bool | None = None
    """Whether images are normalized per channel. Left out: as usual for the set."""
    fraction: float = Field(1.0, gt=0, le=1)
    """Fraction of the training examples that is used: the first ones of each domain."""
    validation: float = Field(0.0, ge=0, lt=1)
    """Fraction of each client's examples, its last ones, that is held out for validation."""
    test_fraction: float = Field(0.0, ge=0, lt=1)
    """Fraction of examples, drawn, held out for testing at each client without test data."""
    holdout_clients: float = Field(0.0, ge=0, lt=1)
    """Fraction of the clients that never train; the server tests on their data."""
    min_examples: int = Field(1, ge=1)
    """Training examples that a natural client needs to take part."""
    budgets: str | tuple[float | dict[str, float], ...] | None = None
    """Widths such as 1,0.5,0.25, levels a1-e9, divisors 8-4-2-1, log-normal ln0.5_0.4,
    high-capacity or low-capacity. Left out: the usual sizes of the method."""


class ModelSection(BaseModel):
    """The model: a known name or file.py:function. Further keys are the model's own options."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    name: str = "heterofl-cnn"
    """A known model, or file.py:function."""
    exclude: tuple[str, ...] = ()
    """Patterns of module names that keep their full width."""
    blocks: tuple[str, ...] | None = None
    """Names of the blocks that may be skipped. Left out: residual blocks that are found."""
    keep_numbers: tuple[str, ...] = ()
    """Attributes of modules, such as encoder.max_len, that equal a width by chance: never cut."""
    weights: str | None = None
    """A file with initial weights: .safetensors, or a state dict of PyTorch."""
    weights_strict: bool = True
    """Whether all weights must fit, except for the number of classes."""


class TaskSection(Section):
    """What is learned: the loss that clients minimize, and the metrics of a model."""

    loss: str = "cross-entropy"
    """A known loss such as mse, bce or dice, or file.py:function."""
    metrics: str | tuple[str, ...] = ()
    """Known metrics such as mae or r2, or file.py:function; the first one decides. Left out: those
    usual for the loss."""

    @field_validator("metrics", mode="after")
    @classmethod
    def _split_names(cls, value: str | tuple[str, ...]) -> tuple[str, ...]:
        names = value.split(",") if isinstance(value, str) else value
        return tuple(name.strip() for name in names if name.strip())


class Choice(Section):
    """A section whose ``name`` says what it is about, and so which further settings it has."""

    name: str


class MethodSection(Choice):
    """The method and its own settings."""

    fraction: float | None = None
    """Fraction of the clients that take part in a round. Left out: a tenth, but ten at least."""


class ServerOptimizerSection(Choice):
    """What the server makes of the mean of the updates."""


class NoAttack:
    """All clients are honest."""


class AttackSection(Choice):
    """Hostile clients, simulated: who they are, and what they do."""


class AggregationSection(Choice):
    """How the updates of a round become one: a rule, and what is done to each update before."""

    clip_norm: Positive | None = None
    """Largest norm of a client's change. Left out: no limit."""
    clip_quantile: Fraction | None = None
    """Changes are shortened to this quantile of the round's norms; 0.5: their median."""
    clip_per_ring: bool = False
    """Whether the quantile is of each ring by itself: of cells with the same holders."""
    equal_weights: bool = False
    """Whether every update counts the same. Robust rules always count so."""
    max_weight: Positive | None = None
    """Largest weight of an update. Left out: no limit."""


class RunSection(Section):
    """How a run is carried out. Here only the device and clients_per_pass change results, and only
    by rounding."""

    device: str = "cpu"
    """Where clients train: auto, cpu, cuda for all GPUs, cuda:1 for one, mps or xpu."""
    workers: int | None = Field(None, ge=0)
    """Worker processes, on accelerators of each; 0: this process. Left out: one per core; on one
    accelerator this process, on several one each."""
    clients_per_pass: int | str = 1
    """Clients with subnets of one shape that a worker trains in one pass: a number, auto for a
    short trial, or the passes.json of another run."""
    heartbeat: float = Field(60.0, gt=0)
    """Seconds without a sign of life after which a worker is replaced."""
    deadline: float | None = Field(None, gt=0)
    """Seconds that a client's work may take in a worker. Left out: no limit."""
    evaluate_every: int = Field(10, ge=0)
    """Rounds between evaluations; 0: only at the end."""
    checkpoint_every: int = Field(10, ge=0)
    """Rounds between checkpoints; 0: only at the end."""
    test_locally: bool = False
    """Whether clients test their own models in every round, before these are merged."""
    trackers: tuple[str, ...] = ()
    """Where numbers are logged: csv, tensorboard, mlflow or wandb, calls such as
    wandb(mode='offline'), or file.py:function."""

    @field_validator("trackers", mode="before")
    @classmethod
    def _list_one_tracker(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


class SelectionSection(Section):
    """Which round's model is kept, and when a run stops early. It needs data.validation."""

    keep: Literal["last", "best"] = "last"
    """The model that is kept: that of the last round, or the best one on validation data."""
    patience: int | None = Field(None, ge=1)
    """Evaluations without a better model after which the run stops. Left out: it goes on."""
    min_delta: float = Field(0.0, ge=0, allow_inf_nan=False)
    """By how much a model must be better to count as better."""
    over: Literal["mean", "worst", "largest"] = "mean"
    """What is compared over sizes: their mean, the worst value, or that of the largest size."""
    robust: Share = 0.0
    """Weight of values under the method's attack, in what is compared."""


class FlowerSection(Section):
    """How a run on Flower is carried out. The local engine uses only the quorum."""

    name: str | None = None
    """Under which clients keep their state. Left out: a new name for each run."""
    out: str | None = None
    """The run's directory, on the machine of the server app."""
    resume: bool = False
    """Whether the run in ``out`` is resumed."""
    nodes: int | None = Field(None, ge=1)
    """Nodes to wait for. Left out: as many as clients."""
    keys: bool = True
    """Whether a client is bound to its node's key; false where keys do not last."""
    wait: float = Field(300.0, gt=0)
    """Seconds to wait for nodes."""
    deadline: float | None = Field(None, gt=0)
    """Seconds that one client's work may take. Left out: no limit."""
    timeout: float = Field(600.0, gt=0)
    """Seconds that a round may take."""
    cpus: int = Field(1, ge=1)
    """CPUs of each simulated client."""
    gpus: float = Field(0.0, ge=0)
    """GPUs that Flower's simulation reserves for each client; run.device uses them."""
    quorum: int | None = Field(None, ge=1)
    """Replies without which a round fails, also in local runs. Left out: half of those needed."""
    attempts: int = Field(3, ge=1)
    """Attempts at a round that failed."""
    oversample: float = Field(0.0, ge=0)
    """Fraction of clients that are asked beyond those that are needed."""


def _derive_choices(
    noun: str, factories: Mapping[str, Callable[..., Any]], default: str, base: type[Choice]
) -> dict[str, type[Choice]]:
    """Derives a section for each factory; ``name`` in it says which one is meant."""
    sections: dict[str, Any] = {}
    for name, factory in factories.items():
        arguments = list_arguments(factory)
        for section in SECTIONS_OF_THEIR_OWN:
            arguments.pop(section, None)
        # a section without a name is the default's, so that one section at most fits
        sections[name] = derive_section(
            f"{name}-{base.__name__}",
            arguments,
            base,
            doc=(factory.__doc__ or "").partition("\n")[0],
            name=(Literal[name], Field(name if name == default else ..., description=noun)),
        )
    return sections


def _derive_privacy() -> type[Section]:
    section: Any = derive_section(
        "PrivacySection",
        list_arguments(Privacy),
        Section,
        doc="Differential privacy; on if epsilon or noise_multiplier is given.",
    )
    return section  # type: ignore[no-any-return]


def _derive_local_training() -> type[Section]:
    arguments = list_arguments(LocalTraining)
    clipping = arguments["max_grad_norm"]
    text = clipping.description.replace("None: no clipping", "0: no clipping")  # TOML has no null
    arguments["max_grad_norm"] = clipping._replace(annotation=NotNegative, description=text)
    for name, kind in (("optimizer", str | dict[str, Any]), ("schedule", str | tuple[str, ...])):
        arguments[name] = arguments[name]._replace(annotation=kind)
    arguments["step_schedule"] = arguments["step_schedule"]._replace(
        annotation=str | tuple[str, ...]
    )
    section: Any = derive_section(
        "LocalTrainingSection",
        arguments,
        Section,
        doc="Local training of clients. What is left out is the method's own default.",
        optional=True,
    )
    return section  # type: ignore[no-any-return]


class SecureAggregationSection(Section):
    """How the server sums updates without seeing a single one."""

    threshold: int | None = Field(None, ge=2)
    """Clients without whom nothing is opened. Left out: the server sees every update."""


def _derive_secure_aggregation() -> type[SecureAggregationSection]:
    section: Any = derive_section(
        "SecureAggregationSection",
        list_arguments(SecureAggregation),
        SecureAggregationSection,
        doc=(SecureAggregationSection.__doc__ or ""),
    )
    return section  # type: ignore[no-any-return]


METHOD_SECTIONS = _derive_choices("The method.", METHODS, DEFAULT_METHOD, MethodSection)
SERVER_OPTIMIZER_SECTIONS = _derive_choices(
    "What the server makes of the mean of the updates.",
    SERVER_OPTIMIZERS,
    DEFAULT_SERVER_OPTIMIZER,
    ServerOptimizerSection,
)
ATTACK_SECTIONS = _derive_choices(
    "What hostile clients do, who are simulated to measure a defence.",
    {DEFAULT_ATTACK: NoAttack, **ATTACKS},
    DEFAULT_ATTACK,
    AttackSection,
)
AGGREGATION_SECTIONS = _derive_choices(
    "How the updates of a round become one.", AGGREGATORS, DEFAULT_AGGREGATOR, AggregationSection
)
CHOICES: Mapping[str, Mapping[str, type[Choice]]] = {
    "method": METHOD_SECTIONS,
    "server_optimizer": SERVER_OPTIMIZER_SECTIONS,
    "aggregation": AGGREGATION_SECTIONS,
    "attacks": ATTACK_SECTIONS,
}
if TYPE_CHECKING:
    AnyMethodSection = MethodSection
    AnyServerOptimizerSection = ServerOptimizerSection
    AnyAggregationSection = AggregationSection
    AnyAttackSection = AttackSection
    LocalTrainingSection = Section
    PrivacySection = Section
    AnySecureAggregationSection = SecureAggregationSection
else:
    AnyMethodSection, AnyServerOptimizerSection, AnyAggregationSection, AnyAttackSection = (
        Annotated[reduce(operator.or_, sections.values()), Field(discriminator="name")]
        for sections in CHOICES.values()
    )
    LocalTrainingSection = _derive_local_training()
    PrivacySection = _derive_privacy()
    AnySecureAggregationSection = _derive_secure_aggregation()


class Config(Section):
    """All settings of a run. The defaults train on the embedded digits in about a minute."""

    seed: int = Field(0, ge=0)
    """Seed of everything random; the same seed repeats a run to the bit."""
    rounds: int = Field(20, ge=1)
    """Rounds of training."""
    sampling: Sampling | None = None
    """How the clients of a round are drawn: fixed, a cohort of one size; or poisson, each client
    with the same probability. Left out: fixed, and poisson with privacy."""
    data: DataSection = DataSection()
    model: ModelSection = ModelSection()
    task: TaskSection = TaskSection()
    method: AnyMethodSection = METHOD_SECTIONS[DEFAULT_METHOD](name=DEFAULT_METHOD)  # type: ignore[assignment]
    local_training: LocalTrainingSection = LocalTrainingSection()
    server_optimizer: AnyServerOptimizerSection = SERVER_OPTIMIZER_SECTIONS[  # type: ignore[assignment]
        DEFAULT_SERVER_OPTIMIZER
    ](name=DEFAULT_SERVER_OPTIMIZER)
    privacy: PrivacySection = PrivacySection()
    secure_aggregation: AnySecureAggregationSection = AnySecureAggregationSection()
    aggregation: AnyAggregationSection = AGGREGATION_SECTIONS[DEFAULT_AGGREGATOR](  # type: ignore[assignment]
        name=DEFAULT_AGGREGATOR
    )
    attacks: AnyAttackSection = ATTACK_SECTIONS[DEFAULT_ATTACK](name=DEFAULT_ATTACK)  # type: ignore[assignment]
    run: RunSection = RunSection()
    selection: SelectionSection = SelectionSection()
    flower: FlowerSection = FlowerSection()

    @field_validator("method", mode="before")
    @classmethod
    def _name_default_method(cls, value: Any) -> Any:
        return _name_choice(value, DEFAULT_METHOD)

    @field_validator("server_optimizer", mode="before")
    @classmethod
    def _name_default_server_optimizer(cls, value: Any) -> Any:
        return _name_choice(value, DEFAULT_SERVER_OPTIMIZER)

    @field_validator("aggregation", mode="before")
    @classmethod
    def _name_default_aggregation(cls, value: Any) -> Any:
        return _name_choice(value, DEFAULT_AGGREGATOR)

    @field_validator("attacks", mode="before")
    @classmethod
    def _name_default_attack(cls, value: Any) -> Any:
        return _name_choice(value, DEFAULT_ATTACK)


def _name_choice(section: Any, default: str) -> Any:
    """A section with the name of its choice, which may be written in any case."""
    if not isinstance(section, Mapping):
        return section
    name = section.get("name", default)
    return {**section, "name": name.lower() if isinstance(name, str) else name}


def list_sections(**chosen: str) -> dict[str, type[BaseModel]]:
    """Lists the sections of the settings by name, with those of a method and other choices."""
    sections: dict[str, type[BaseModel]] = {
        choice: options[chosen.get(choice, DEFAULTS[choice])] for choice, options in CHOICES.items()
    }
    for name, field in Config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            sections[name] = field.annotation
    return sections


def list_settings(**chosen: str) -> dict[str, FieldInfo]:
    """Lists all settings by dotted name, with those of a method and other choices.

    Args:
        chosen: The name of what is chosen for sections with choices, such as ``method``.

    >>> list_settings()["data.clients"].description
    'Number of clients. Left out: 10, or all clients of a natural partition.'
    """
    sections = list_sections(**chosen)
    settings = {n: field for n, field in Config.model_fields.items() if n not in sections}
    for section, fields in sections.items():
        settings |= {f"{section}.{name}": field for name, field in fields.model_fields.items()}
    return settings
