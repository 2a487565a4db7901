"""A finished run: its scores, its model at any size, and evaluation."""

from __future__ import annotations

import html
import warnings
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedquilt.customize.info import RunInfo
from fedquilt.data.population import Population
from fedquilt.engines.client_state import read_client_state
from fedquilt.errors import ConfigError, TrainingError
from fedquilt.evaluation.accuracy import evaluate, evaluate_by_client
from fedquilt.evaluation.clients import ClientRecord, ClientScore, compute_client_scores
from fedquilt.evaluation.scores import Scores, SizeScore
from fedquilt.evaluation.summary import SCORES, name_score
from fedquilt.federation.client import Failure
from fedquilt.federation.state import Setup, State
from fedquilt.figures.drawing import draw_side_by_side
from fedquilt.methods.method import SIZE_NAMES, Method, PersonalChoice
from fedquilt.runs.attacks import measure_backdoor, restore_attack
from fedquilt.runs.customization import FinishedModel
from fedquilt.runs.directory import RunDirectory
from fedquilt.runs.engines import make_local_engine
from fedquilt.runs.health import Finding
from fedquilt.runs.history import History, read_history
from fedquilt.runs.plots import plot_run
from fedquilt.runs.preflight import check_clients, check_labels
from fedquilt.runs.records import read_clients
from fedquilt.structure.budget import Budget
from fedquilt.training.attack import PGD


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """A finished run: its model at any size, and its scores.

    Made by ``train`` and ``open_run``.

    Args:
        setup: What the run was about, with the model as the method prepared it.
        method: The method.
        state: The state after the last round, or after the one that was selected.
        scores: The scores of each size, the largest first.
        info: What is stored about the run besides its tensors.
        user_setup: What the run was about, with the model that was given.
        population: The clients and their data, if they are at hand.
        directory: Where the run is kept; None: in memory only.
        findings: What the records show about the health of the run.
        client_records: What each client did in each round, of a run without a directory.
        recorded: The numbers of each round, of a run without a directory.

    >>> import torch, fedquilt as fq
    >>> inputs, labels = torch.rand(12, 4), torch.arange(12) % 3
    >>> clients = fq.make_clients((inputs, labels), count=2, budgets=(1.0, 0.5))
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> run = fq.train(model, inputs[:1], "heterofl", clients, rounds=1, workers=0)
    >>> run.customize(width=0.5)[0]
    Linear(in_features=4, out_features=4, bias=True)
    """

    setup: Setup
    method: Method
    state: State
    scores: Scores
    info: RunInfo
    user_setup: Setup
    population: Population | None = None
    directory: RunDirectory | None = None
    findings: tuple[Finding, ...] = ()
    client_records: tuple[Sequence[ClientRecord], ...] = ()  # of a run without a directory
    recorded: History = field(default_factory=History)  # of a run without a directory

    def __repr__(self) -> str:
        size = SIZE_NAMES[self.method.size_kind]
        scores = (f"  {size} {_describe_score(score)}" for score in self.scores)
        return "\n".join([self._describe(), *scores])

    def _repr_html_(self) -> str:
        problems = "".join(f"<li>{html.escape(f.sentence)}</li>" for f in self.findings)
        table = self.scores._repr_html_() if self.scores else ""
        return f"<p>{html.escape(self._describe())}</p>{table}" + (
            f"<ul>{problems}</ul>" if problems else ""
        )

    def _describe(self) -> str:
        where = "" if self.directory is None else f", in {self.directory}"
        rounds = f"{self.setup.rounds} round{'s' * (self.setup.rounds != 1)}"
        selected = f", {self.info.selected}" if self.info.selected else ""
        return f"Run of {type(self.method).__name__}, {rounds}, seed {self.seed}{selected}{where}"

    def plot(self) -> Any:
        """A picture of the run: loss and metric by round, and the metric of every size.

        Returns:
            A figure of matplotlib, which notebooks show, and which ``savefig`` writes.
        """
        figures = plot_run(self.scores, self.history)
        if not figures:
            raise ConfigError("there is nothing to draw: the run has neither losses nor scores")
        return draw_side_by_side(figures)

    @property
    def history(self) -> History:
        """The numbers of every round, by the names that trackers use; also ``to_pandas()``."""
        return self.recorded if self.directory is None else read_history(self.directory)

    @property
    def seed(self) -> int:
        """The seed that the run can be repeated with."""
        return self.setup.seed

    @property
    def folder(self) -> Path | None:
        """The run's directory; None if it was kept in memory only."""
        return None if self.directory is None else self.directory.path

    def customize(
        self,
        width: float | None = None,
        robustness: float | None = None,
        *,
        client: int | None = None,
        **limits: int,
    ) -> nn.Module:
        """An ordinary module of a width (the largest trained one), or one within limits.

        Within limits it is the largest size that was trained, or the widest of all if none fits.
        Limits are ``params``, ``macs``, ``memory`` and ``upload``. ``robustness`` is from 0
        (accurate; the default) to 1, for models that were trained with such a dial. A warning
        says so if the width is smaller than any that was trained.

        A method that averages several nets gives an ``Ensemble`` of those that the width needs, and
        only these are read from the disk. Its settings can be changed later:
        ``with model.at_setting(width=0.5):``. ``client`` asks for the net that a client chose for
        itself, with what it keeps.

        The module answers one example as it answers many. The exception is a run whose clients
        were not asked for statistics (``query_statistics=False``), or whose model has layers that
        keep none: it normalizes every batch by itself, and a warning says so.
        """
        model = FinishedModel(self.setup, self.method, self.state)
        if client is not None:
            return model.customize_for_client(client, lambda: self._read_client_state(client))
        if width is None and not limits:
            return model.customize(None, robustness)
        widest = max(self.method.sizes(self.setup)) if width is None else width
        return model.customize(_make_budget(widest, limits), robustness)

    def evaluate(
        self,
        population: Population | None = None,
        *,
        widths: float | tuple[float, ...] | None = None,
        robustness: float | tuple[float, ...] = (),
        attack: PGD | None = None,
        batch_statistics: bool = False,
        personal_statistics: PersonalChoice = False,
        workers: int | None = None,
        device: str = "cpu",
    ) -> Scores:
        """Scores of every size, or of the given widths, on the population's test data.

        With ``robustness`` at each of these points of the dial; with an ``attack`` also on clients'
        test data that was attacked, with everything known about the model (white box). Scores are
        those of the models that ``customize`` gives; with ``batch_statistics`` every batch of test
        data is normalized by itself instead, as some papers score. With ``personal_statistics``
        there is also the personal value, with statistics of each client's own data: those of each
        ``batch`` of its test data, those that 20 passes over its training data find
        (``refreshed``), or True: those of the method's paper. If hostile clients of the run taught
        a backdoor, its success is among the metrics. ``workers`` and ``device`` are those of
        ``fedquilt.train``.
        """
        people = self.population if population is None else population
        if people is None:
            raise ConfigError("this run was opened without its data; give evaluate(clients)")
        check_clients(people)
        classes = self.setup.structure.classes
        if classes is not None and self.setup.task.has_classes:
            check_labels(self.setup.structure.groups[classes].size, people)
        if attack is not None and not people.testers:
            raise ConfigError(
                "an attack is on the test data of clients, and these have none; divide the test "
                "data among them, or evaluate without an attack"
            )
        sizes = None if widths is None else tuple(Budget(w).width for w in _to_tuple(widths))
        dials = _to_tuple(robustness)
        for value in dials:
            FinishedModel(self.setup, self.method, self.state).choose_robustness(value)
        versions, state = self._require_client_states()
        failures: list[Failure] = []
        make_engine = make_local_engine(workers, device=device)
        with closing(make_engine(self.setup, people, self._clients_folder)) as engine:
            engine.restore(versions)
            find_scores = partial(
                evaluate,
                self.setup,
                self.method,
                state,
                has_server_test=people.has_server_test,
                testers=people.testers,
                widths=sizes,
                robustness=dials,
                batch_statistics=batch_statistics,
                personal_statistics=personal_statistics,
                people=people.registry,
                on_failure=failures.append,
            )
            scores = measure_backdoor(
                restore_attack(self.info.attack),
                engine,
                find_scores(engine=engine, attack=attack),
                find_scores,
            )
        if attack is not None and all(score.robust_value is None for score in scores):
            raise TrainingError(
                "no client's test data could be attacked; an attack needs images whose pixels are "
                f"from {attack.low:g} to {attack.high:g}, or a PGD with their low and high"
            )
        if failures:
            warnings.warn(_describe_failures(failures, len(people.testers)), stacklevel=2)
        return Scores(scores)

    def by_client(self, population: Population, *, workers: int | None = None) -> list[ClientScore]:
        """What each client trained and sent, and the largest net's metric on its own data."""
        people, setup = population.registry, self.setup
        with closing(make_local_engine(workers)(setup, population, self._clients_folder)) as engine:
            engine.restore(self._client_versions)
            values = evaluate_by_client(
                setup, self.method, self.state, engine, population.testers, people=people
            )
        tested = replace(setup, clients=people)
        return compute_client_scores(tested, chain.from_iterable(self.read_clients()), values)

    def read_clients(self) -> tuple[Sequence[ClientRecord], ...]:
        """What clients received, returned and reported in each training round."""
        if self.directory is None:
            return self.client_records
        return read_clients(self.directory, self.setup.structure)

    def _require_client_states(self) -> tuple[Mapping[int, int], State]:
        """The versions of client states that an evaluation needs, and the state to evaluate."""
        versions = self._client_versions
        if not versions or self.directory is not None:
            return versions, self.state
        if self.method.local_params:
            raise ConfigError(
                "the clients' own models ended with the run, which was not kept; its scores are in "
                "run.scores, or train with out=..."
            )
        return {}, replace(self.state, chosen_subnets={})  # the shared model needs none of theirs

    @property
    def _client_versions(self) -> Mapping[int, int]:
        """The versions of what clients keep, if that is part of their models."""
        is_part = self.method.local_params or any(
            subnet.private for subnet in self.state.chosen_subnets.values()
        )
        return self.info.client_versions if is_part else {}

    @property
    def _clients_folder(self) -> Path | None:
        return None if self.directory is None else self.directory.clients

    def _read_client_state(self, client: int) -> Mapping[str, Tensor]:
        """What a client keeps; nothing, if the method's clients keep nothing."""
        version = self._client_versions.get(client)
        if version is None and not self.method.local_params:
            return {}
        if self.directory is None or version is None:
            raise ConfigError(
                f"the state of client {client} is not here; train with out=..., on this machine"
            )
        return read_client_state(self.directory.client_states.path(client, version)) or {}


def _describe_score(score: SizeScore) -> str:
    """A score, without the name of its size, with the first of its values that is known."""
    dial = "" if score.robustness is None else f", robustness {score.robustness:g}"
    text = f"{score.width:g}{dial}: {score.params:,} parameters"
    for name in (*SCORES, "personal_value"):
        value = getattr(score, name)
        if value is not None:
            return f"{text}, {name_score(name, score.metric)} {score.metric.format(value)}"
    return text


def _describe_failures(failures: list[Failure], num_testers: int) -> str:
    """A sentence about clients that gave no valid result."""
    count, first = len({failure.client for failure in failures}), failures[0]
    return (
        f"{count} of {num_testers} clients could not be evaluated, and some scores are without "
        f"them; client {first.client}: {first.reason}"
    )


def _to_tuple(given: float | tuple[float, ...]) -> tuple[float, ...]:
    """One number, or several, as a tuple."""
    return tuple(given) if isinstance(given, (tuple, list)) else (given,)


def _make_budget(width: float, limits: Mapping[str, int]) -> Budget:
    try:
        return Budget(width, **limits)
    except TypeError:
        raise ConfigError(
            "a model is customized by width, robustness, params, macs, memory or upload, got "
            f"{list(limits)}"
        ) from None
