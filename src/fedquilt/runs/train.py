"""``fedquilt.train``: a run from Python objects."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedquilt.data.population import Population
from fedquilt.errors import ConfigError
from fedquilt.federation.hostile import Attack
from fedquilt.federation.privacy import Privacy
from fedquilt.federation.privacy.settings import choose_sampling
from fedquilt.federation.secure import SecureAggregation
from fedquilt.federation.state import Sampling, Setup
from fedquilt.learning.batch import bind_inputs
from fedquilt.learning.task import make_task
from fedquilt.methods.method import Method
from fedquilt.ranges import Number, check_value
from fedquilt.runs.directory import RunDirectory
from fedquilt.runs.engines import EngineFactory, make_local_engine
from fedquilt.runs.events import Callback
from fedquilt.runs.plan import RunPlan, resume_run, start_run
from fedquilt.runs.policies import Cadence, FaultPolicy
from fedquilt.runs.preflight import (
    check_clients,
    check_model,
    check_start,
    find_method,
    warn_of_lost_values,
)
from fedquilt.runs.run import Run
from fedquilt.runs.selection import Selection
from fedquilt.structure.create import trace_structure
from fedquilt.structure.structure import Structure
from fedquilt.structure.supported import unshare_buffers
from fedquilt.structure.tensors import Example, map_tensors, move_to_host


def train(
    model: nn.Module,
    example: Example,
    method: Method | str,
    clients: Population,
    rounds: int,
    *,
    loss: Any = None,
    metrics: Any = None,
    seed: int = 0,
    workers: int | None = None,
    device: str = "cpu",
    clients_per_pass: int | str = 1,
    out: str | Path | None = None,
    resume: bool = False,
    exclude: tuple[str, ...] = (),
    blocks: tuple[str, ...] | None = None,
    keep_numbers: tuple[str, ...] = (),
    structure: Structure | None = None,
    cadence: Cadence | None = None,
    faults: FaultPolicy | None = None,
    callbacks: Iterable[Callback] = (),
    engine: EngineFactory | None = None,
    available: Callable[[], Collection[int]] | None = None,
    privacy: Privacy | None = None,
    sampling: Sampling | None = None,
    secure_aggregation: SecureAggregation | None = None,
    selection: Selection | None = None,
    attacks: Attack | None = None,
) -> Run:
    """Trains a model over clients of any size.

    The model given is left as it is.

    Args:
        model: The supernet, with its initial values.
        example: An input like the clients'; its first axis is the batch. Several inputs are a tuple
            of the model's arguments, or a dict by their names.
        method: The method, or its name, such as ``"heterofl"``: that method with its defaults.
        clients: Who takes part, and their data, from ``make_clients``.
        rounds: The number of rounds of training.
        loss: What clients minimize: a name such as ``"mse"``, a callable (output, target) that
            returns the mean over the batch, or one of (model, batch); None: cross entropy.
        metrics: What models are measured by, the first being *the* metric: names such as ``"r2"``,
            functions decorated with ``fq.metric``, or metrics of torchmetrics; None: those usual
            for the loss.
        seed: The seed of all random streams.
        workers: The number of processes that do the clients' work; None: one per core, 0: the work
            is done in this process. On accelerators it is the number of processes on each; None:
            this process, or one for each if there are several.
        device: Where clients train: ``"auto"``, ``"cpu"``, ``"cuda"`` for all GPUs, ``"cuda:1"``
            for one, ``"mps"`` or ``"xpu"``. See docs/devices.md.
        clients_per_pass: How many clients with subnets of one shape a process trains in one pass:
            a number, ``"auto"`` for a short trial, or the ``passes.json`` of another run. Results
            differ by rounding. See docs/speed.md.
        out: A directory in which the run is kept; None: in memory only.
        resume: Whether to go on with the run in ``out``.
        exclude: Modules that are never cut, as ``trace_structure`` takes them.
        blocks: Blocks that may be skipped, as ``trace_structure`` takes them.
        keep_numbers: Numbers of modules that are no widths, as ``trace_structure`` takes them.
        structure: What can be cut in the model; None: ``trace_structure`` finds it.
        cadence: How often the run evaluates and saves; None: ``Cadence()``.
        faults: How many missing answers a round tolerates; None: half of its clients.
        callbacks: Are called with every event of the run, see ``fedquilt.runs.events``.
        engine: Makes the engine that runs tasks; None: one on this machine with ``workers``.
        available: Returns the numbers of the clients that can be asked now; None: all can.
        privacy: What differential privacy to keep, such as ``Privacy(epsilon=4.0)``; None: none.
        sampling: How cohorts are drawn: ``"fixed"`` of one size, ``"poisson"`` each client with
            the same probability; None: poisson for a private run, else fixed.
        secure_aggregation: How the server sums updates without seeing a single one; None: it sees
            every update.
        selection: Which round's model is kept, and when the run stops early, such as
            ``Selection(keep="best", patience=5)``; None: the last round's.
        attacks: Hostile clients that are simulated, to measure a defence, such as
            ``SignFlip(clients=0.2)``; None: all clients are honest.

    Returns:
        The finished run.

    >>> import torch, fedquilt as fq
    >>> data = (torch.rand(12, 4), torch.arange(12) % 3)
    >>> clients = fq.make_clients(data, test=data, count=2, budgets=(1.0, 0.5))
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> run = fq.train(model, data[0][:1], "heterofl", clients, rounds=1, workers=0)
    >>> [(score.width, score.params) for score in run.scores]
    [(1.0, 67), (0.5, 35)]
    """
    method = find_method(method)
    check_value("seed", seed, Number)
    if resume and out is None:
        raise ConfigError("a run is resumed from its directory, and there is none; give out=...")
    make_engine = _choose_engine(
        engine, workers, device, clients_per_pass
    )  # a device may not be there
    task = make_task(loss, metrics)
    check_model(model)
    model, example = move_to_host(model), map_tensors(Tensor.cpu, bind_inputs(model, example))
    check_clients(clients)
    clients = clients if task.has_classes else clients.without_labels()
    check_start(model, example, clients, rounds, task)  # before the model is traced
    if not resume:
        warn_of_lost_values(model, method)
    model = copy.deepcopy(model)
    unshare_buffers(model)
    structure = structure or trace_structure(
        model, example, exclude=exclude, blocks=blocks, keep_numbers=keep_numbers
    )
    plan = RunPlan(
        Setup(
            model,
            structure,
            example,
            clients.clients,
            rounds,
            seed,
            choose_sampling(sampling, privacy),
            task,
        ),
        method,
        clients,
        None if out is None else RunDirectory(out),
        cadence=cadence or Cadence(),
        faults=faults or FaultPolicy(),
        engine=make_engine,
        available=available,
        privacy=privacy if privacy is not None and privacy.is_on else None,
        secure=secure_aggregation,
        selection=selection or Selection(),
        attack=attacks,
    )
    return (resume_run if resume else start_run)(plan).train(callbacks)


def _choose_engine(
    engine: EngineFactory | None, workers: int | None, device: str, clients_per_pass: int | str
) -> EngineFactory:
    """What makes the engine: as given, or one on this machine."""
    if engine is not None and not callable(engine):
        raise ConfigError(
            f"engine is a function that makes an engine, got {engine!r}; leave it out to train on "
            "this machine, or train on Flower with the command fedquilt train"
        )
    if engine is not None and device != "cpu":
        raise ConfigError(
            f"an engine of your own chooses its devices, got device={device!r} as well; leave out "
            "one of them"
        )
    if engine is not None and clients_per_pass != 1:
        raise ConfigError(
            "an engine of your own says itself how many clients train in one pass, got "
            f"clients_per_pass={clients_per_pass!r} as well; leave out one of them"
        )
    return engine or make_local_engine(workers, device=device, clients_per_pass=clients_per_pass)
