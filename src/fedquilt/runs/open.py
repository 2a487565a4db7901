"""``fedquilt.open_run``: a finished run from its directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from fedquilt.customize.bundle import load_bundle
from fedquilt.customize.info import RunInfo
from fedquilt.data.population import Population
from fedquilt.errors import CheckpointError, CorruptFileError
from fedquilt.evaluation.scores import Scores
from fedquilt.federation.client import Client
from fedquilt.federation.state import Setup, State
from fedquilt.learning.known_metrics import METRICS
from fedquilt.learning.losses import LOSSES, MissingLoss
from fedquilt.learning.task import LearningTask, make_task
from fedquilt.methods.method import Method
from fedquilt.runs.directory import RunDirectory
from fedquilt.runs.identity import describe_default, describe_settings
from fedquilt.runs.phases import count_rounds
from fedquilt.runs.preflight import find_method
from fedquilt.runs.records import read_final_findings, read_final_scores
from fedquilt.runs.run import Run
from fedquilt.structure.budget import Budget
from fedquilt.structure.tensors import move_to_host, named_tensors

# settings that a finished model does not depend on
TRAINING = ("local_training", "fraction", "server_optimizer", "aggregator", "transforms")


def open_run(
    folder: str | Path,
    model: nn.Module,
    method: Method | str,
    *,
    clients: Population | None = None,
    loss: Any = None,
    metrics: Any = None,
) -> Run:
    """Opens a finished run from its directory.

    Tensors are read when a module is made of them. How the model can be cut is stored with it, so
    arguments of ``train`` about that are not needed again.

    Args:
        folder: The run's directory.
        model: The model that the run was trained with; its values do not matter.
        method: The method that the run was trained with, or its name.
        clients: The clients of the run. With them it is as ``train`` returned it; without them it
            can be customized, and evaluated on other data.
        loss: The loss that the run was trained with, if it is a function of yours.
        metrics: The metrics of the run, if some are functions of yours.

    >>> import tempfile, torch, fedquilt as fq
    >>> inputs, labels = torch.rand(12, 4), torch.arange(12) % 3
    >>> clients = fq.make_clients((inputs, labels), count=2)
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = fq.train(model, inputs[:1], "fedavg", clients, rounds=1, workers=0, out=folder)
    ...     fq.open_run(folder, model, "fedavg").customize()[1]
    Linear(in_features=8, out_features=3, bias=True)
    """
    directory, method, model = RunDirectory(folder), find_method(method), move_to_host(model)
    directory.require_run()
    bundle = load_bundle(directory.model)
    info = bundle.info
    _require_same_method(directory, info, method)
    if bundle.structure.shapes != {n: tuple(t.shape) for n, t in named_tensors(model).items()}:
        raise _make_model_error(directory)
    sizes = tuple(Client(i, 1, (), Budget(width)) for i, width in enumerate(info.sizes))
    task = _restore_task(info, loss, metrics)
    user_setup = Setup(
        model, bundle.structure, info.example, sizes, info.rounds, info.seed, task=task
    )
    setup = method.prepare_model(user_setup)
    expected = setup.structure.shapes
    if any(expected.get(n.partition("@")[0]) != bundle.params.shape(n) for n in bundle.params):
        raise _make_model_error(directory)
    selected = info.model_round
    last = setup.rounds if selected is None else selected
    state = State(last, "", bundle.params, chosen_subnets=info.decode_subnets())
    try:
        evaluated = count_rounds(method, setup) if selected is None else selected
        scores = read_final_scores(directory, evaluated)
        findings = read_final_findings(directory)
    except CorruptFileError:  # the model can be used without its records
        scores, findings = (), ()
    return Run(setup, method, state, Scores(scores), info, user_setup, clients, directory, findings)


def _restore_task(info: RunInfo, loss: Any, metrics: Any) -> LearningTask:
    """The task of a run: as it is given, or by the names that the run knows."""
    if loss is not None or metrics is not None or info.task is None:
        return make_task(loss, metrics)
    names = info.task
    if names.loss not in LOSSES or not all(name in METRICS for name in names.metrics):
        return LearningTask(MissingLoss(names.loss), (METRICS["loss"],))
    return make_task(names.loss, names.metrics)


def _require_same_method(directory: RunDirectory, info: RunInfo, method: Method) -> None:
    """Refuses a method that would make another model of the same tensors."""
    given, trained = describe_settings(method), info.method
    for name in ("class", *sorted({*given, *trained} - {"class", *TRAINING})):
        if given.get(name) != trained.get(name):
            what = "" if name == "class" else f"{name} = "
            default = describe_default(method, name)
            was, now = (settings.get(name, default) for settings in (trained, given))
            raise CheckpointError(
                f"{directory} was trained with {what}{was}, got {what}{now}; open it with the "
                "method that it was trained with"
            )


def _make_model_error(directory: RunDirectory) -> CheckpointError:
    return CheckpointError(f"{directory} was trained with another model; give the one it was")
