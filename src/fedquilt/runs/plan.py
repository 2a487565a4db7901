"""One path to every run: plan it, start or resume it, train it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedquilt.customize.bundle import save_bundle
from fedquilt.customize.info import ModelCall, RunInfo, TaskNames, describe_inputs
from fedquilt.data.pipeline import find_normalization, name_transforms
from fedquilt.data.population import Population
from fedquilt.engines.engine import Engine
from fedquilt.engines.stacks import PassSize, PassSizes
from fedquilt.errors import CheckpointError, ConfigError
from fedquilt.evaluation.scores import Scores
from fedquilt.federation.hostile import Attack
from fedquilt.federation.privacy import Privacy, make_secret
from fedquilt.federation.secure import SecureAggregation
from fedquilt.federation.secure.settings import require_cryptography
from fedquilt.federation.state import Setup, State
from fedquilt.files import MAX_WAIT, read_document, write_document
from fedquilt.learning.task import CLASSIFICATION
from fedquilt.methods.method import Method
from fedquilt.models import get_factory_call
from fedquilt.models.pretrained import LoadReport, load_pretrained
from fedquilt.runs.attacks import check_attack, describe_attack
from fedquilt.runs.directory import RunDirectory
from fedquilt.runs.engines import EngineFactory, make_local_engine
from fedquilt.runs.event_log import EventLogger
from fedquilt.runs.events import (
    Callback,
    PassSizeChosen,
    RunEnded,
    RunStarted,
    WaitingForLock,
    combine_callbacks,
    list_callbacks,
)
from fedquilt.runs.examples import check_examples
from fedquilt.runs.history import HistoryRecorder
from fedquilt.runs.identity import compute_fingerprint, describe_settings
from fedquilt.runs.loop import TrainingLoop
from fedquilt.runs.phases import count_rounds
from fedquilt.runs.policies import Cadence, FaultPolicy
from fedquilt.runs.preflight import check_local_training, check_start
from fedquilt.runs.privacy import PrivateRounds
from fedquilt.runs.run import Run
from fedquilt.runs.saved_run import Position
from fedquilt.runs.secure_preflight import check_secure
from fedquilt.runs.selection import Selection
from fedquilt.runs.status import StatusWriter
from fedquilt.settings.load import flatten_settings
from fedquilt.structure.cut import load_tensors
from fedquilt.structure.memory import OffloadedModels
from fedquilt.structure.tensors import named_tensors
from fedquilt.training.serialization import to_plain


@dataclass(frozen=True)
class RunSource:
    """What commands can open a run by later: the settings that describe it.

    ``config`` are all settings, ``toml`` the same as the text of ``config.toml``. A run from Python
    has neither. ``weights`` is a file that the model starts from; with ``is_strict`` all of it must
    fit.
    """

    config: dict[str, object] | None = None
    toml: str | None = None
    weights: str | Path | None = None
    is_strict: bool = True


@dataclass(frozen=True, eq=False)
class RunPlan:
    """Everything that a run depends on, before it is started or resumed.

    ``setup`` has the user's model, which the run may change. ``available`` returns the clients
    that can be asked now; None means all of them.
    """

    setup: Setup
    method: Method
    population: Population
    directory: RunDirectory | None = None
    source: RunSource = field(default_factory=RunSource)
    cadence: Cadence = field(default_factory=Cadence)
    faults: FaultPolicy = field(default_factory=FaultPolicy)
    engine: EngineFactory | None = None  # None: this machine, one worker per core
    available: Callable[[], Collection[int]] | None = None
    privacy: Privacy | None = None  # None: the run is not private
    secure: SecureAggregation | None = None  # None: the server sees every update
    selection: Selection = field(default_factory=Selection)
    attack: Attack | None = None  # None: all clients are honest
    callbacks: tuple[Callback, ...] = ()  # of the settings: trackers


def start_run(plan: RunPlan) -> PreparedRun:
    """Checks a plan for a new run; nothing is written before ``train``."""
    _check(plan, resume=False)
    plan = _make_private(plan)
    report = _load_weights(plan)
    return PreparedRun(plan, _prepare(plan), load_report=report)


def resume_run(plan: RunPlan) -> PreparedRun:
    """Checks a plan for a run that goes on from its directory, with the first values of the run."""
    directory = plan.directory
    if directory is None:
        raise ConfigError("a run is resumed from its directory, and there is none; give out=...")
    _check(plan, resume=True)
    plan = _make_private(plan)
    try:
        load_tensors(plan.setup.model, directory.read_initial())
    except (KeyError, RuntimeError) as problem:
        raise CheckpointError(
            f"{directory} was started with another model ({problem})"
        ) from problem
    return PreparedRun(plan, _prepare(plan), is_resumed=True)


def _prepare(plan: RunPlan) -> Setup:
    """The setup with the model that is trained; parts that do not go together are refused."""
    setup = plan.method.prepare_model(plan.setup)
    for phase in plan.method.phases(setup):
        plan.method.aggregation(setup, phase.name)
    _check_secure(plan, setup)
    check_attack(plan.attack, setup, is_secure=plan.secure is not None)
    plan.selection.find_attack(plan.method)
    return setup


def _check(plan: RunPlan, *, resume: bool) -> None:
    setup = plan.setup
    check_start(setup.model, setup.example, plan.population, setup.rounds, setup.task)
    check_local_training(plan.method, setup.model, setup.rounds)
    if plan.cadence.test_locally and not setup.task.counts_hits:
        raise ConfigError(
            "run.test_locally counts right answers, and the metric of this task is "
            f"{setup.task.metric.name}; leave it out"
        )
    plan.selection.check(
        plan.cadence, plan.population.validators, is_private=plan.privacy is not None
    )
    if plan.directory is not None:
        plan.directory.check(resume=resume)


def _make_private(plan: RunPlan) -> RunPlan:
    """The plan without anything that tells of clients' data, if the run is to be private."""
    if plan.privacy is None:
        return plan
    if plan.cadence.test_locally:
        raise ConfigError(
            "a private run is not told how clients' own models do; leave out run.test_locally"
        )
    if plan.faults.oversample:
        raise ConfigError(
            "a private run asks each client with a known probability; leave out flower.oversample"
        )
    setup = replace(plan.setup, clients=plan.setup.registry.without_data())
    faults = replace(plan.faults, attempts=1)  # another attempt would be another release
    return replace(plan, setup=setup, method=plan.method.make_private(), faults=faults)


def _check_secure(plan: RunPlan, setup: Setup) -> None:
    """Refuses a run whose updates cannot be summed without seeing them, if they are to be."""
    if plan.secure is None:
        return
    require_cryptography()
    if plan.cadence.test_locally:
        raise ConfigError(
            "with secure aggregation clients report nothing about themselves; leave out "
            "run.test_locally"
        )
    if plan.privacy is not None and plan.privacy.clipping != "flat":
        raise ConfigError(
            f"in a secure sum clients clip their changes themselves, each as a whole, got "
            f"privacy.clipping = '{plan.privacy.clipping}'; leave it out"
        )
    if plan.selection.is_on:
        raise ConfigError(
            "a model is selected by what each client tells of its validation data, which secure "
            "aggregation does not let see; leave out selection"
        )
    if plan.population.testers and not plan.population.has_server_test:
        warnings.warn(
            "with secure aggregation clients tell nothing of their own test data, and the server "
            "has none, so this run has no scores; give the server test data, or evaluate later "
            "where the data are",
            stacklevel=2,
        )
    check_secure(setup, plan.method, plan.secure)


def _load_weights(plan: RunPlan) -> LoadReport | None:
    """Loads the file of weights, if there is one, into the model that the method starts from."""
    path = plan.source.weights
    if path is None:
        return None
    if plan.method.reinitializes:
        raise ConfigError(
            f"{type(plan.method).__name__} draws the initial values anew, so that it would not use "
            f"model.weights = '{path}'; leave it out, or choose a method such as heterofl"
        )
    return load_pretrained(plan.setup.model, path, strict=plan.source.is_strict)


@dataclass(frozen=True, eq=False)
class PreparedRun:
    """A checked run that is ready to train.

    ``setup`` has the model as the method prepared it; ``load_report`` says which weights were
    loaded from a file.
    """

    plan: RunPlan
    setup: Setup
    is_resumed: bool = False
    load_report: LoadReport | None = None

    def train(self, callbacks: Iterable[Callback] = ()) -> Run:
        """Trains to the last round, with the directory locked; ``callbacks`` get every event."""
        plan, directory = self.plan, self.plan.directory
        recorder = HistoryRecorder()
        own = (recorder,) if directory is None else (StatusWriter(directory),)
        callbacks = (EventLogger(), *list_callbacks(callbacks), *plan.callbacks, *own)
        notify = combine_callbacks(callbacks)
        waiting = WaitingForLock(None if directory is None else directory.path, MAX_WAIT)
        held = (
            nullcontext()
            if directory is None
            else directory.hold(resume=self.is_resumed, on_wait=lambda: notify(waiting))
        )
        make_engine = plan.engine or make_local_engine(None)
        with held, OffloadedModels(self.setup.model, plan.setup.model) as offloaded:
            check_examples(directory, plan.population, is_resumed=self.is_resumed)
            secret = self._find_secret()
            if directory is not None and not self.is_resumed:
                self._write_settings(directory)
                directory.write_initial(named_tensors(plan.setup.model))
                directory.write_structure(self.setup.structure)
            states = None if directory is None else directory.clients
            with closing(make_engine(self.setup, plan.population, states)) as engine:
                self._keep_pass_sizes(engine, notify)
                loop = TrainingLoop(
                    self.setup,
                    plan.method,
                    engine,
                    plan.population.has_server_test,
                    plan.population.testers,
                    directory,
                    compute_fingerprint(
                        self.setup, plan.method, plan.privacy, plan.secure, plan.attack
                    ),
                    plan.cadence,
                    callbacks,
                    plan.faults,
                    self._save_bundle,
                    plan.available,
                    None
                    if plan.privacy is None
                    else PrivateRounds(plan.privacy, self.setup, plan.method, secret, plan.secure),
                    plan.secure,
                    plan.selection,
                    plan.population.validators,
                    attack=plan.attack,
                )
                return replace(self._finish(loop, notify, offloaded), recorded=recorder.history)

    def _keep_pass_sizes(self, engine: Engine, notify: Callback) -> None:
        """Stores how many clients train in one pass; a run that goes on has the same choices."""
        sizes: PassSizes | None = getattr(engine, "pass_sizes", None)
        if sizes is None:
            return
        path = None if self.plan.directory is None else self.plan.directory.passes_file
        if path is not None and self.is_resumed and path.exists():
            document = read_document(path)
            if document.get("clients_per_pass") == sizes.setting:
                sizes.load(document)

        def keep(kind: str, size: PassSize) -> None:
            notify(PassSizeChosen(kind, size.clients, size.reason))
            if path is not None:
                write_document(path, sizes.describe())

        sizes.on_change = keep

    def _find_secret(self) -> bytes:
        """The secret of a private run: a new one, or that of the run which goes on."""
        directory = self.plan.directory
        if self.plan.privacy is None:
            return b""
        if directory is not None and self.is_resumed:
            return directory.read_secret()
        secret = make_secret()
        if directory is not None:
            directory.write_secret(secret)
        return secret

    def _finish(self, loop: TrainingLoop, notify: Callback, offloaded: OffloadedModels) -> Run:
        """Runs the loop to its end; ``notify`` hears of the start and of the end."""
        positions = [self._find_position(loop, offloaded)]
        with _announce(self._make_start_event(positions[0].checkpoint.state.round), notify):
            state, scores = loop.train_from(positions.pop())  # so that nothing here keeps its state
        return Run(
            self.setup,
            self.plan.method,
            state,
            Scores(scores),
            self._describe(loop, state),
            self.plan.setup,
            self.plan.population,
            self.plan.directory,
            loop.findings,
            loop.clients,
        )

    def _make_start_event(self, round: int) -> RunStarted:
        """The event of a run that starts, or goes on after a round."""
        plan, setup = self.plan, self.setup
        if plan.source.config is not None:
            named = flatten_settings(plan.source.config)
            settings = {name: value for name, value in named.items() if value is not None}
        else:
            settings = {
                "method": type(plan.method).__name__,
                "rounds": setup.rounds,
                "seed": setup.seed,
                "clients": len(setup.clients),
                **_list_nested(describe_settings(plan.method), "method."),
            }
        folder = None if plan.directory is None else plan.directory.path
        total = count_rounds(plan.method, setup)
        return RunStarted(total, round, settings, folder, self.is_resumed)

    def _find_position(self, loop: TrainingLoop, offloaded: OffloadedModels) -> Position:
        """Where training begins."""
        position = loop.restore() if self.is_resumed else loop.start()
        offloaded.release()  # the state has the initial values now
        directory = self.plan.directory
        if directory is not None and self.is_resumed:  # after the checkpoint was found to fit
            self._write_settings(directory)
        return position

    def _write_settings(self, directory: RunDirectory) -> None:
        if self.plan.source.toml is not None:
            directory.write_config(self.plan.source.toml)

    def _save_bundle(self, loop: TrainingLoop, state: State) -> None:
        """Writes the finished model."""
        if self.plan.directory is not None:
            structure = self.plan.setup.structure
            save_bundle(
                self.plan.directory.model, state.params, structure, self._describe(loop, state)
            )

    def _describe(self, loop: TrainingLoop, state: State) -> RunInfo:
        """What is stored with the finished model."""
        setup, method, source = self.setup, self.plan.method, self.plan.source
        chain = self.plan.population.evaluation_transforms
        info = RunInfo(
            setup.seed,
            setup.rounds,
            describe_settings(method),
            tuple(method.sizes(setup)),
            describe_inputs(setup.example),
            method.exceeds_budgets(setup),
            config=source.config,
            privacy=loop.privacy_spent,
            attack=describe_attack(self.plan.attack, setup),
            transforms=name_transforms(chain),
            normalization=find_normalization(chain),
            task=None if setup.task is CLASSIFICATION else TaskNames(**setup.task.describe()),
        )
        if source.config is None:
            call = get_factory_call(self.plan.setup.model)
            info = replace(
                info,
                model_call=None if call is None else ModelCall(**call),
                method_settings=_to_plain_or_none(method),
            )
        if self.plan.selection.is_on:
            info = replace(info, model_round=state.round, trained_rounds=loop.num_trained)
        return info.with_results(
            loop.engine.client_versions(), state.chosen_subnets, loop.environments
        )


@contextmanager
def _announce(start: RunStarted, notify: Callback) -> Iterator[None]:
    """Tells of the start of a run, and of its end, whatever that is."""
    notify(start)
    try:
        yield
    except KeyboardInterrupt:
        notify(RunEnded("stopped"))
        raise
    except BaseException as problem:
        notify(RunEnded("failed", str(problem) or type(problem).__name__))
        raise
    notify(RunEnded("finished"))


def _list_nested(settings: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Settings in settings, by dotted name, without the classes.

    >>> _list_nested({"class": "FedAvg", "training": {"class": "LocalTraining", "lr": 0.5}}, "")
    {'training.lr': 0.5}
    """
    named: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            named |= _list_nested(value, f"{prefix}{name}.")
        elif name != "class":
            named[f"{prefix}{name}"] = value
    return named


def _to_plain_or_none(method: Method) -> dict[str, object] | None:
    """The settings that make the method again; None if it holds more than plain values."""
    try:
        settings: dict[str, object] = to_plain(method)
    except ConfigError:
        return None
    return settings
