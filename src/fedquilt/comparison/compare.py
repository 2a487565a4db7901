"""``fedquilt.compare``: a comparison of Python objects."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedquilt.comparison.comparison import Comparison
from fedquilt.comparison.progress import ComparisonCallback, ignore_events
from fedquilt.comparison.store import TrialStore
from fedquilt.comparison.study import Candidate, MakeTrial, Study
from fedquilt.comparison.trial import describe_data
from fedquilt.comparison.variants import ALL
from fedquilt.data.population import Population
from fedquilt.engines.scratch import ScratchDirectory
from fedquilt.errors import ConfigError
from fedquilt.federation.state import Phase, Setup
from fedquilt.files import hash_tensor
from fedquilt.learning.batch import bind_inputs
from fedquilt.learning.task import LearningTask, make_task
from fedquilt.methods import METHODS
from fedquilt.methods.method import Method
from fedquilt.runs.directory import RunDirectory
from fedquilt.runs.identity import compute_fingerprint
from fedquilt.runs.plan import RunPlan
from fedquilt.runs.policies import Cadence
from fedquilt.runs.preflight import check_clients, check_model, find_method
from fedquilt.settings.compare import load_options
from fedquilt.structure.create import trace_structure
from fedquilt.structure.supported import unshare_buffers
from fedquilt.structure.tensors import Example, map_tensors, move_to_host, named_tensors
from fedquilt.training.settings import LocalTraining

EVALUATIONS = 10  # of a run


def compare(
    model: nn.Module | Callable[[], nn.Module],
    example: Example,
    methods: str | Sequence[str | Method] | Mapping[str, str | Method],
    clients: Population | Callable[[int], Population],
    rounds: int = 20,
    *,
    loss: Any = None,
    metrics: Any = None,
    seeds: int | Sequence[int] = 3,
    bytes: float | None = None,
    macs: float | None = None,
    seconds: float | None = None,
    local_training: LocalTraining | None = None,
    fraction: float | None = None,
    search_lr: bool = False,
    learning_rates: Sequence[float] | None = None,
    metric: str | None = None,
    target: float | None = None,
    out: str | Path | None = None,
    workers: int | None = None,
    device: str = "cpu",
    exclude: tuple[str, ...] = (),
    callback: ComparisonCallback = ignore_events,
) -> Comparison:
    """Compares methods on the same clients, batches and initial weights.

    A method by name gets the same local training and the same fraction of clients as all others. A
    method that is given as an object keeps its own.

    Args:
        model: The supernet, or a function that makes one; it is called after the seed is set, so
            that each seed has other initial weights.
        example: An input like the clients'; its first axis is the batch.
        methods: Methods or their names, by the names of the rows if they are in a mapping.
            ``"all"``: every method that fits.
        clients: The clients, or a function of the seed that makes them.
        rounds: The rounds of training.
        loss: What is learned, as ``train`` takes it; None: to classify.
        metrics: How models are scored, as ``train`` takes them; None: as usual for the loss.
        seeds: The number of seeds, or the seeds.
        bytes: What a run may send both ways, instead of rounds.
        macs: The MACs that all clients may compute, instead of rounds.
        seconds: The simulated seconds that a run may take, instead of rounds.
        local_training: Of methods by name; None: ``LocalTraining()``.
        fraction: Of the clients that take part in a round, for methods by name; None: a tenth, but
            at least ten clients.
        search_lr: Whether each method's learning rate is searched first, on validation data.
        learning_rates: Those that are searched.
        metric: The score that decides; None: the first that all runs have.
        target: The score to reach; None: 95 % of the best one.
        out: The folder of runs and table, in which nothing is done twice; None: nothing is kept.
        workers: How many runs are done at a time; None: one per core, 0: one in this process.
        device: The device that clients train on; on an accelerator one run is done at a time.
        exclude: Modules that are never cut, as ``trace_structure`` takes them.
        callback: Is called with what happens.

    Returns:
        The table, the best row first.

    >>> import torch, fedquilt as fq
    >>> data = (torch.rand(24, 4), torch.arange(24) % 3)
    >>> clients = fq.make_clients(data, test=data, count=2, budgets=(1.0, 0.5))
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> methods = ["heterofl", "fjord"]
    >>> table = fq.compare(model, data[0][:1], methods, clients, 1, seeds=2, workers=0)
    >>> sorted(row["variant"] for row in table)
    ['fjord', 'heterofl']
    """
    given: dict[str, Any] = {
        "seeds": seeds if isinstance(seeds, int) else tuple(seeds),
        "bytes": bytes,
        "macs": macs,
        "seconds": seconds,
        "search_lr": search_lr,
        "learning_rates": learning_rates,
        "metric": metric,
        "target": target,
    }
    options = load_options({name: v for name, v in given.items() if v is not None})
    subject = Subject(model, example, clients, make_task(loss, metrics), exclude, device)
    shared = SharedTraining(local_training or LocalTraining(), fraction)
    candidates = [
        Candidate(name, _bind(name, method, subject, shared, rounds), is_named)
        for name, (method, is_named) in list_methods(methods).items()
    ]
    with ScratchDirectory() as scratch:
        store = TrialStore(scratch if out is None else out)
        study = Study(candidates, options, store, workers, callback, {"rounds": rounds})
        comparison = study.run()
    if out is None:
        return replace(comparison, folder=None)
    comparison.save(out)
    return comparison


def list_methods(
    methods: str | Sequence[str | Method] | Mapping[str, str | Method],
) -> dict[str, tuple[str | Method, bool]]:
    """The methods by the names of their rows, and whether each was named."""
    if isinstance(methods, Mapping):
        return {name: (method, True) for name, method in methods.items()}
    found: dict[str, tuple[str | Method, bool]] = {}
    for method in [methods] if isinstance(methods, str) else methods:
        if method == ALL:
            found |= {name: (name, False) for name in METHODS if name not in found}
            continue
        name = method.lower() if isinstance(method, str) else type(method).__name__
        if name in found and found[name][1]:
            raise ConfigError(
                f"rows have names of their own, got '{name}' twice; give a mapping from names to "
                "methods"
            )
        found[name] = (method, True)
    return found


@dataclass(frozen=True, eq=False)
class Subject:
    """What methods are compared on."""

    model: nn.Module | Callable[[], nn.Module]
    example: Example
    clients: Population | Callable[[int], Population]
    task: LearningTask
    exclude: tuple[str, ...] = ()
    device: str = "cpu"

    def make_model(self, seed: int) -> nn.Module:
        """A model with the initial weights of a seed; that of the user is left as it is."""
        if isinstance(self.model, nn.Module):
            return copy.deepcopy(move_to_host(self.model))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.model()
        check_model(model)
        return move_to_host(model)

    def make_clients(self, seed: int) -> Population:
        """The clients of a seed."""
        clients = self.clients if isinstance(self.clients, Population) else self.clients(seed)
        check_clients(clients)
        return clients if self.task.has_classes else clients.without_labels()


@dataclass(frozen=True)
class SharedTraining:
    """What all methods by name have in common."""

    local_training: LocalTraining
    fraction: float | None

    def make(self, method: str | Method, num_clients: int) -> Method:
        """The method of a name with the common settings, or the method itself."""
        if not isinstance(method, str):
            return find_method(method)
        find_method(method)
        cohort = Phase("train", 1, self.fraction).cohort_size(num_clients)
        return METHODS[method.lower()](
            local_training=self.local_training, fraction=cohort / num_clients
        )


def _bind(
    variant: str, method: str | Method, subject: Subject, shared: SharedTraining, default: int
) -> MakeTrial:
    """What makes the runs of a method."""

    def make_trial(
        seed: int,
        *,
        rounds: int | None = None,
        lr: float | None = None,
        fraction: float | None = None,
    ) -> ObjectTrial:
        population = subject.make_clients(seed)
        made: Any = shared.make(method, len(population))
        if lr is not None:
            made = replace(made, local_training=replace(made.local_training, lr=lr))
        if fraction is not None:
            made = replace(made, fraction=fraction)
        return ObjectTrial(variant, seed, rounds or default, made, subject, population)

    return make_trial


@dataclass(frozen=True, eq=False)
class ObjectTrial:
    """A run of Python objects."""

    variant: str
    seed: int
    rounds: int
    method: Method
    subject: Subject
    population: Population
    clients_per_pass: ClassVar[int] = 1
    scoring: ClassVar[None] = None

    @property
    def device(self) -> str:
        """The device that clients train on."""
        return self.subject.device

    @property
    def name(self) -> str:
        """The method and the seed."""
        return f"{type(self.method).__name__.lower()}-{self.seed}"

    @cached_property
    def setup(self) -> Setup:
        """What the run is about."""
        model = self.subject.make_model(self.seed)
        unshare_buffers(model)
        example = map_tensors(Tensor.cpu, bind_inputs(model, self.subject.example))
        structure = trace_structure(model, example, exclude=self.subject.exclude)
        clients, task = self.population.clients, self.subject.task
        return Setup(model, structure, example, clients, self.rounds, self.seed, task=task)

    def describe(self) -> dict[str, Any]:
        """Model, method, clients and data, with hashes of all tensors.

        Code of models and methods is known by its name only.
        """
        tensors = {n: hash_tensor(t) for n, t in named_tensors(self.setup.model).items()}
        data = [
            [split, client, describe_data(data)]
            for split, parts in self.population.data.items()
            for client, data in parts.items()
        ]
        text = json.dumps([tensors, data], sort_keys=True)
        return {
            "fingerprint": compute_fingerprint(self.setup, self.method),
            "contents": hashlib.sha256(text.encode()).hexdigest(),
            "rounds": self.rounds,
        }

    def plan(self, folder: Path) -> RunPlan:
        """The run in this directory; each plan has its own copy of the model."""
        setup = replace(self.setup, model=copy.deepcopy(self.setup.model))
        cadence = Cadence(evaluate_every=max(1, self.rounds // EVALUATIONS))
        return RunPlan(setup, self.method, self.population, RunDirectory(folder), cadence=cadence)
