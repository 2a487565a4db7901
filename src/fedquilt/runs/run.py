"""Train a model over clients, and take smaller ones out of what was learned."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedquilt.customize import bundle
from fedquilt.customize.mixture import Mixture
from fedquilt.data.population import Population
from fedquilt.engines.engine import Engine
from fedquilt.engines.kept import KeptStates, read
from fedquilt.engines.local import LocalEngine
from fedquilt.engines.worker import Timeouts
from fedquilt.errors import (
    BudgetError,
    CheckpointError,
    ConfigError,
    DamageError,
    DataError,
    StructureError,
    TrainingError,
)
from fedquilt.evaluation.accuracy import SizeScore, accuracy_by_client, cost_of, evaluate
from fedquilt.evaluation.clients import ClientScore, client_scores
from fedquilt.federation.client import Client
from fedquilt.federation.state import Setup, State
from fedquilt.files import locked, read_sealed, remove_parts, sync, write_sealed
from fedquilt.methods.method import SIZE_NAMES, Method, shares_weights
from fedquilt.models import made_by
from fedquilt.ranges import Number, check_value
from fedquilt.runs.checkpoint import saved
from fedquilt.runs.health import Finding
from fedquilt.runs.loop import Loop, Pace, Tolerance, Watch, ignore, num_rounds
from fedquilt.runs.preflight import check_clients, check_start, find_method, warn_of_lost_values
from fedquilt.runs.records import final_findings, final_scores
from fedquilt.structure.budget import Budget, fit
from fedquilt.structure.cut import build, load, source_name
from fedquilt.structure.groups import Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.supported import separate_buffers
from fedquilt.structure.trace import Example, arguments, named_tensors
from fedquilt.training.attack import PGD
from fedquilt.training.dualnorm import (
    NO_DIAL,
    checked_robustness,
    has_dial,
    set_robustness,
)
from fedquilt.training.plain import as_plain
from fedquilt.training.scaler import fold_scale
from fedquilt.training.tracking import needs_batches, untracked

CLIENTS_FILE = "clients.json"  # who takes part, where clients are nodes
FIRST_FILES = ("config.toml", "lock", CLIENTS_FILE)  # that there may be before there is a run
TRAINING = ("optimiser", "fraction")  # settings of methods that a finished model does not need
UNTRAINED = (
    "no client trained a model of size {0:g}, which may answer no better than chance; the smallest "
    "that was trained is {1:g}"
)
NEEDS_BATCHES = (
    "this model normalises every batch by itself, so that its answer to an example depends on the "
    "others in the batch; train with query_statistics (the default), and with layers whose "
    "track_running_stats is true"
)
MakeEngine = Callable[[Setup, Population, Path | None], Engine]


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run: its model at any size, and its scores."""

    setup: Setup
    method: Method
    state: State
    scores: tuple[SizeScore, ...]
    population: Population | None = None
    folder: Path | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    whole: Setup | None = None  # with the user's model, before the method prepared it
    findings: tuple[Finding, ...] = ()  # what its records show about its health

    def __repr__(self) -> str:
        where = "" if self.folder is None else f", in {self.folder}"
        method, rounds = type(self.method).__name__, self.setup.rounds
        count = f"{rounds} round{'s' * (rounds > 1)}"
        head = f"Run of {method}, {count}, seed {self.seed}{where}"
        size = SIZE_NAMES[self.method.size_kind]
        return "\n".join([head, *(f"  {size} {_line(score)}" for score in self.scores)])

    @property
    def seed(self) -> int:
        """The seed that the run can be repeated with."""
        return self.setup.seed

    def customize(
        self,
        width: float | None = None,
        robustness: float | None = None,
        *,
        client: int | None = None,
        **limits: int,
    ) -> nn.Module:
        """An ordinary module of a width (the largest trained one), or the widest within limits.

        A warning says so if the smallest size that was trained is larger.

        Limits are ``params``, ``macs``, ``memory`` and ``upload``. ``robustness`` is from 0
        (accurate; the default) to 1, for models that were trained with such a dial.

        A method that mixes several nets gives a ``Mixture`` of those that the width needs, and only
        they are read from the disk. Its dials can be turned later: ``with model.at(width=0.5):``.
        ``client`` asks for the net that a client chose for itself, with what it keeps.

        The model answers one example as it answers many. The exception is a run whose clients were
        not asked for statistics (``query_statistics=False``), or whose model has layers that keep
        none: it normalises every batch by itself, and a warning says so.
        """
        if not shares_weights(self.setup, self.method):
            raise ConfigError(
                "this method's models stay on the clients, so there is none to take away; "
                "train with a method that shares its model, such as heterofl"
            )
        if client is not None:
            return self._chosen_by(client)
        setup, sizes = self.setup, self.method.sizes(self.setup)
        dial = self._dial(robustness)
        found = self._width_within(_budget(max(sizes) if width is None else width, limits))
        nets = [self._module(subnet) for subnet in self.method.mix(setup, self.state, found)]
        if found < min(sizes) - 1e-9:
            warnings.warn(UNTRAINED.format(found, min(sizes)), stacklevel=2)
        if not self.method.has_statistics(setup):
            nets = [untracked(net) for net in nets]
        if any(map(needs_batches, nets)):
            warnings.warn(NEEDS_BATCHES, stacklevel=2)
        small: Any = nets[0]
        if len(self.method.mix(setup, self.state, max(sizes))) > 1:
            small = Mixture(nets, base=min(sizes))
            found = small.width
        if dial is not None:
            set_robustness(small, dial)
        small.fedquilt_example, small.fedquilt_width = setup.example, found
        small.fedquilt_robustness = dial
        module: nn.Module = small.eval()
        return module

    def _chosen_by(self, client: int) -> nn.Module:
        """The net that a client chose for itself, with what it keeps."""
        setup, subnet = self.setup, self.state.chosen.get(client)
        if subnet is None:
            raise ConfigError(
                f"client {client} has no net of its own; "
                + (f"those are {sorted(self.state.chosen)}" if self.state.chosen else "none has")
            )
        small: Any = self._module(subnet)
        names = {n: source_name(n, setup.structure, subnet) for n in named_tensors(small)}
        own = {n: source for n, source in names.items() if source != n}
        kept = self._kept_by(client) if self.method.home or client in self._kept() else {}
        missing = [n for n in own if n in setup.structure.statistics and own[n] not in kept]
        if missing:
            raise ConfigError(
                f"client {client} has no statistics of its own net ('{missing[0]}' is not there); "
                "they are found when a run ends, unless query_statistics is false"
            )
        load(small, {n: kept[source] for n, source in own.items() if source in kept})
        small.fedquilt_example, small.fedquilt_width = setup.example, 1.0
        small.fedquilt_robustness = None
        module: nn.Module = small.eval()
        return module

    def _module(self, subnet: Subnet) -> nn.Module:
        """A subnet of the finished model, as it was trained: with the scale of its outputs."""
        setup = self.setup
        module = build(setup.model, setup.structure, subnet, self._tensors(subnet))
        if self.method.scales_outputs:
            return fold_scale(module, setup.structure, setup.example)
        return module

    def _kept_by(self, client: int) -> Mapping[str, Tensor]:
        """What a client keeps."""
        version = self._kept().get(client)
        if self.folder is None or version is None:
            raise ConfigError(
                f"what client {client} keeps is not here; train with out=..., on this machine"
            )
        return read(KeptStates(self.folder / "clients").path(client, version)) or {}

    def _dial(self, robustness: float | None) -> float | None:
        """Where a model's dial is turned to; None if it has none."""
        if has_dial(self.setup.model):
            return checked_robustness(robustness or 0.0)
        if robustness is not None:
            raise ConfigError(NO_DIAL)
        return None

    def _tensors(self, subnet: Subnet) -> dict[str, Tensor]:
        """The global tensors that a subnet is cut from; no others are read."""
        structure, params = self.setup.structure, self.state.params
        there = (name for name in structure.shapes if name not in structure.gone(subnet))
        names = {name: source_name(name, structure, subnet) for name in there}
        wanted = (own if own in params else name for name, own in names.items())
        return {name: params[name] for name in wanted if name in params}

    def _width_within(self, budget: Budget) -> float:
        """The widest trained size within limits, or the widest of all if none fits."""
        if budget.is_width_alone:
            return budget.width
        setup = self.setup
        for width in self.method.sizes(setup):
            price = cost_of(setup, self.method.mix(setup, self.state, width))
            if width <= budget.width and budget.allows(price):
                return width
        width = fit(setup.model, setup.structure, budget, setup.example)[0]
        try:
            price = cost_of(setup, self.method.mix(setup, self.state, width))
        except ConfigError as problem:  # a method without a model that small
            raise BudgetError(f"no size meets {budget}: {problem}") from problem
        if not budget.allows(price):
            raise BudgetError(f"no size meets {budget}; the one nearest to it costs {price}")
        return width

    def evaluate(
        self,
        population: Population | None = None,
        *,
        widths: float | tuple[float, ...] | None = None,
        robustness: float | tuple[float, ...] = (),
        attack: PGD | None = None,
        batch_statistics: bool = False,
        workers: int | None = None,
    ) -> list[SizeScore]:
        """Scores of every size, or of the given widths, on the population's test data.

        With ``robustness`` at each of these points of the dial; with an ``attack`` also on clients'
        test data that was attacked, with everything known about the model (white box). Scores are
        those of the models that ``customize`` gives; with ``batch_statistics`` every batch of test
        data is normalised by itself instead, as some papers score.
        """
        people = population or self.population
        if people is None:
            raise ConfigError("this run was opened without its data; give evaluate(population)")
        check_clients(people)
        if attack is not None and not people.testers:
            raise ConfigError(
                "an attack is on the test data of clients, and these have none; divide the test "
                "data among them, or evaluate without an attack"
            )
        sizes = None
        if widths is not None:
            sizes = tuple(Budget(width).width for width in _several(widths))
        dials = _several(robustness)
        for value in dials:
            self._dial(value)
        kept = self._kept()
        state = self.state
        if kept and self.folder is None and not self.method.home:
            kept, state = {}, replace(state, chosen={})  # the shared model needs nothing of theirs
        if kept and self.folder is None:
            raise ConfigError(
                "the clients' own models ended with the run, which was kept nowhere; its scores "
                "are in run.scores, or train with out=..."
            )
        setup = self._with_clients(people.clients)
        with closing(local_engine(workers)(setup, people, self._clients_folder())) as engine:
            engine.restore(kept)
            scores = evaluate(
                setup,
                self.method,
                state,
                engine,
                held_out=people.held_out,
                testers=people.testers,
                widths=sizes,
                robustness=dials,
                attack=attack,
                batch_statistics=batch_statistics,
            )
        if attack is not None and all(score.robust_accuracy is None for score in scores):
            raise TrainingError(
                "no client's test data could be attacked; an attack needs images whose pixels are "
                f"from {attack.low:g} to {attack.high:g}, or a PGD with their low and high"
            )
        return scores

    def report(
        self, out: str | Path = "report", *, clients: bool = True, workers: int | None = None
    ) -> Path:
        """Writes a page about the run, see ``fedquilt.report``; its path."""
        from fedquilt.report.runs import report  # which is about runs, and so comes after them

        return report([self], out, clients=clients, workers=workers)

    def by_client(self, population: Population, *, workers: int | None = None) -> list[ClientScore]:
        """What each client trained and sent, and the largest net's accuracy on its own data."""
        setup = self.planned(population)
        with closing(local_engine(workers)(setup, population, self._clients_folder())) as engine:
            engine.restore(self._kept())
            accuracy = accuracy_by_client(
                setup, self.method, self.state, engine, population.testers
            )
        return client_scores(setup, self.method, accuracy, self.state.chosen)

    def planned(self, population: Population) -> Setup:
        """The setup as the method planned with it."""
        assert self.whole is not None
        return self.method.prepared(replace(self.whole, clients=population.clients))

    def _with_clients(self, clients: tuple[Client, ...]) -> Setup:
        s = self.setup
        return Setup(s.model, s.structure, s.example, clients, s.rounds, s.seed)

    def _kept(self) -> dict[int, int]:
        """The versions of what clients keep, if that is part of their models."""
        is_part = self.method.home or any(net.own for net in self.state.chosen.values())
        kept = self.about.get("kept", {}) if is_part else {}
        return {int(c): v for c, v in kept.items()}

    def _clients_folder(self) -> Path | None:
        return None if self.folder is None else self.folder / "clients"


def _line(score: SizeScore) -> str:
    """A score behind the name of its size, with the first of its accuracies that is known."""
    dial = "" if score.robustness is None else f", robustness {score.robustness:g}"
    found = ""
    for name in ("accuracy", "user_accuracy", "local_accuracy", "personal_accuracy"):
        value = getattr(score, name)
        if value is not None:
            found = f", {name.replace('_', ' ')} {value:.1%}"
            break
    return f"{score.width:g}{dial}: {score.params:,} parameters{found}"


def _several(given: float | tuple[float, ...]) -> tuple[float, ...]:
    """One number, or several, as a tuple of them."""
    return tuple(given) if isinstance(given, (tuple, list)) else (given,)


def _budget(width: float, limits: Mapping[str, int]) -> Budget:
    try:
        return Budget(width, **limits)
    except TypeError:
        raise ConfigError(
            "a model is customized by width, robustness, params, macs, memory or upload, got "
            f"{list(limits)}"
        ) from None


def train(
    model: nn.Module,
    example: Example,
    method: Method | str,
    clients: Population,
    rounds: int,
    *,
    seed: int = 0,
    workers: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    exclude: tuple[str, ...] = (),
    blocks: tuple[str, ...] | None = None,
    keep_numbers: tuple[str, ...] = (),
    structure: Structure | None = None,
    pace: Pace | None = None,
    tolerance: Tolerance | None = None,
    watch: Watch = ignore,
    engine: MakeEngine | None = None,
    about: Mapping[str, Any] | None = None,
    present: Callable[[], Collection[int]] | None = None,
) -> Run:
    """Trains a model over clients of any size.

    ``example`` is an input like the clients' (its first axis is the batch). ``method`` may be a
    name, such as ``"heterofl"``: that method with its defaults. With ``out`` the run is kept in
    that directory and can be resumed there. ``workers`` processes do the clients' work, one per
    core by default; 0 means this process. ``exclude``, ``blocks`` and ``keep_numbers`` are what
    ``Structure.trace`` takes. The model given is left as it is.
    """
    method = find_method(method)
    check_value("seed", seed, Number)
    if resume and out is None:
        raise ConfigError("a run is resumed from its directory, and there is none; give out=...")
    check_start(model, example, clients, rounds)
    if not resume:
        warn_of_lost_values(model, method)
    model = copy.deepcopy(model)
    separate_buffers(model)
    found = structure or Structure.trace(
        model, example, exclude=exclude, blocks=blocks, keep_numbers=keep_numbers
    )
    new = () if out is None else missing(Path(out))
    folder = None if out is None else prepared(Path(out), resume=resume)
    if folder is not None and resume:
        _restore_initial(model, folder)
    whole = Setup(model, found, example, clients.clients, rounds, seed)
    with removed_if_refused(new):
        setup = method.prepared(whole)
    make, home = engine or local_engine(workers), None if folder is None else folder / "clients"
    with removed_if_refused(new), locked(folder), closing(make(setup, clients, home)) as running:
        if folder is not None:
            remove_parts(folder)
            remove_parts(folder / "model")
        if folder is not None and not resume:
            _remember_initial(model, folder)
        loop = Loop(
            setup,
            method,
            running,
            clients.held_out,
            clients.testers,
            folder,
            fingerprint(setup, method),
            pace or Pace(),
            watch,
            tolerance or Tolerance(),
        )

        def described(state: State) -> dict[str, Any]:
            came = {
                "kept": {str(c): v for c, v in running.kept().items()},
                "chosen": {str(c): s.encode().decode() for c, s in state.chosen.items()},
                "origins": [dict(place) for place in loop.origins],
            }
            return {**_description(setup, method), **(about or _from_python(whole, method)), **came}

        def keep(state: State) -> None:
            if folder is not None:
                bundle.save(folder / "model", state.params, found, described(state))

        loop.keep, loop.present = keep, present
        state, scores = loop.run(resume=resume)
        return Run(
            setup, method, state, scores, clients, folder, described(state), whole, loop.findings
        )


def local_engine(workers: int | None, timeouts: Timeouts | None = None) -> MakeEngine:
    """The engine of this machine, with one worker a core unless told otherwise."""
    check_value("workers", workers, Number | None)
    count = (
        len(os.sched_getaffinity(0))
        if workers is None and hasattr(os, "sched_getaffinity")
        else workers
    )
    count = (os.cpu_count() or 1) if count is None else count

    def make(setup: Setup, people: Population, folder: Path | None) -> LocalEngine:
        return LocalEngine(
            setup.model,
            setup.structure,
            people.data,
            workers=count,
            folder=folder,
            timeouts=timeouts,
        )

    return make


def prepared(folder: Path, *, resume: bool) -> Path:
    """The run's directory, refused if that would overwrite one or if there is none to resume."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file, and cannot hold a run; choose another --out")
    has_run = (folder / "initial.safetensors").exists()
    if resume and not has_run:
        raise CheckpointError(f"{folder} holds no run to resume; start one with --out {folder}")
    if not resume and folder.exists() and any(folder.iterdir()):
        if has_run:
            raise CheckpointError(
                f"{folder} already holds a run; go on with it: --resume {folder}, or choose "
                "another --out"
            )
        found = {p.name for p in folder.iterdir()}
        if not all(n in FIRST_FILES or _is_unfinished(n) for n in found):
            raise CheckpointError(f"{folder} is not empty and holds no run; choose another --out")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def removed_if_refused(new: Sequence[Path]) -> Iterator[None]:
    """Takes directories that were ``missing`` away again if their run is refused.

    What fails later, in training, stays.
    """
    try:
        yield
    except (BudgetError, ConfigError, DataError, StructureError):
        if new and not (new[0] / "metrics.jsonl").exists():
            shutil.rmtree(new[0], ignore_errors=True)
            for parent in new[1:]:
                with suppress(OSError):  # somebody else has put something there
                    parent.rmdir()
        raise


def missing(folder: Path) -> tuple[Path, ...]:
    """A run's directory and those around it, as far as they do not exist yet."""
    return tuple(path for path in (folder, *folder.parents) if not path.exists())


def _is_unfinished(name: str) -> bool:
    """Whether this is what a run left that was killed while it wrote its first file."""
    return name.startswith(".") and name.endswith(".part")


def _restore_initial(model: nn.Module, folder: Path) -> None:
    """The first values of the model belong to the run: a resumed one starts from the same."""
    path = folder / "initial.safetensors"
    try:
        load(model, read_sealed(path))
    except (KeyError, RuntimeError) as problem:
        raise CheckpointError(f"{folder} was started with another model ({problem})") from problem


def _remember_initial(model: nn.Module, folder: Path) -> None:
    """Writes the first values of the model; from now on there is a run in the folder."""
    prepared(folder, resume=False)  # another process may have been quicker
    path = folder / "initial.safetensors"
    try:
        write_sealed(path, named_tensors(model))
        sync(path)
        sync(folder)
    except OSError as problem:
        raise CheckpointError(
            f"the run could not be started in {folder} ({problem}); make room"
        ) from problem


def fingerprint(setup: Setup, method: Method) -> str:
    """What must be the same for a run to be resumed: model, method, clients and seed."""
    parts = [
        sorted(setup.structure.shapes.items()),
        setup.structure.describe(),
        repr(method),
        [repr(c) for c in setup.clients],
        setup.seed,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _description(setup: Setup, method: Method) -> dict[str, Any]:
    return {
        "seed": setup.seed,
        "rounds": setup.rounds,
        "method": repr(method),
        "method_settings": _settings(method),
        "sizes": list(method.sizes(setup)),
        "exceeds_budgets": method.exceeds_budgets(setup),
        "example": [
            {"shape": list(x.shape), "dtype": str(x.dtype).removeprefix("torch.")}
            for x in arguments(setup.example)
        ],
    }


def _from_python(whole: Setup, method: Method) -> dict[str, Any]:
    """What commands can open a run by that no settings describe; None: only Python can."""
    try:
        settings = as_plain(method)
    except ConfigError:  # a method that holds more than plain values
        settings = None
    return {"model": made_by(whole.model), "settings": settings}


def open_run(
    folder: str | Path,
    model: nn.Module,
    method: Method | str,
    *,
    clients: Population | None = None,
    exclude: tuple[str, ...] = (),
) -> Run:
    """A finished run from its directory, for the model and method it was trained with.

    With its ``clients`` it is as ``train`` returned it; without them it can be customized, and
    evaluated on other data. Tensors are read when a model is made of them. ``exclude`` is for
    bundles of version 1, which did not remember the structure of their model.
    """
    folder, method = Path(folder), find_method(method)
    found = bundle.load(folder / "model")
    _refuse_other_method(folder, found.about, method)
    example = tuple(
        torch.zeros(x["shape"], dtype=getattr(torch, x["dtype"])) for x in found.about["example"]
    )
    structure = found.structure or Structure.trace(model, example, exclude=exclude)
    if structure.shapes != {n: tuple(t.shape) for n, t in named_tensors(model).items()}:
        raise _of_another_model(folder)
    people = tuple(Client(i, 1, (), Budget(w)) for i, w in enumerate(found.about["sizes"]))
    whole = Setup(
        model,
        structure,
        example if len(example) > 1 else example[0],
        people,
        found.about["rounds"],
        found.about["seed"],
    )
    setup = method.prepared(whole)
    expected = setup.structure.shapes
    if any(expected.get(n.partition("@")[0]) != found.params.shape(n) for n in found.params):
        raise _of_another_model(folder)
    state = State(setup.rounds, "", found.params, chosen=_chosen(found.about, folder))
    _refuse_missing_statistics(folder, setup, method, state)
    try:
        scores = final_scores(folder, num_rounds(method, setup))
        health = final_findings(folder)
    except DamageError:  # the model is whole all the same
        scores, health = (), ()
    return Run(setup, method, state, scores, clients, folder, found.about, whole, health)


def _refuse_missing_statistics(folder: Path, setup: Setup, method: Method, state: State) -> None:
    """Refuses runs of earlier versions whose models needed batches: they have no statistics."""
    if not (method.has_statistics(setup) and shares_weights(setup, method)):
        return
    for subnet in method.mix(setup, state, max(method.sizes(setup))):
        for name in setup.structure.statistics - setup.structure.gone(subnet):
            if not {name, source_name(name, setup.structure, subnet)} & state.params.keys():
                raise CheckpointError(
                    f"{folder} was trained by a version that kept no statistics ('{name}' is not "
                    "there), so that its model cannot answer one example; train it again"
                )


def _chosen(about: Mapping[str, Any], folder: Path) -> dict[int, Subnet]:
    """The nets that clients chose for themselves."""
    try:
        return {int(c): Subnet.decode(s.encode()) for c, s in about.get("chosen", {}).items()}
    except (TypeError, ValueError) as problem:
        raise DamageError(
            f"{folder} is damaged: 'chosen' holds other things than nets"
        ) from problem


def _settings(method: Method) -> dict[str, str]:
    """What a finished model depends on: the class of its method, and settings but for training."""
    names: list[str] = [f.name for f in fields(method)] if is_dataclass(method) else []
    chosen = {name: repr(getattr(method, name)) for name in names if name not in TRAINING}
    return {"class": type(method).__name__, **chosen}


def _refuse_other_method(folder: Path, about: Mapping[str, Any], method: Method) -> None:
    """Refuses a method that would make another model of the same tensors.

    Of runs of earlier versions no more than the class is known.
    """
    given = _settings(method)
    trained = about.get("method_settings") or {"class": about["method"].partition("(")[0]}
    for name in ("class", *trained):
        if given.get(name, trained[name]) != trained[name]:
            what = "" if name == "class" else f"{name} = "
            raise CheckpointError(
                f"{folder} was trained with {what}{trained[name]}, got {what}{given[name]}; open "
                "it with the method that it was trained with"
            )


def _of_another_model(folder: Path) -> CheckpointError:
    return CheckpointError(f"{folder} was trained with another model; give the one it was")


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint of a run."""
    found = saved(folder / "checkpoints")
    return found[-1] if found else None
