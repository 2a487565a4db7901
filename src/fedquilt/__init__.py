"""Fedquilt: one federated model, cut to fit every device."""

from fedquilt.customize.export import export
from fedquilt.data.population import Population, clients
from fedquilt.errors import FedquiltError
from fedquilt.evaluation.accuracy import SizeScore
from fedquilt.federation.average import average
from fedquilt.federation.client import Client, Task, Update
from fedquilt.federation.state import Phase, Setup, State
from fedquilt.methods import (
    ADDS,
    APFL,
    METHODS,
    STC,
    Centralised,
    DepthFL,
    FedAvg,
    FedDrop,
    FedPA,
    FedRolex,
    FjORD,
    HeteroFL,
    Method,
    NeFL,
    PFedMe,
    SHeteroFL,
    SplitMix,
    fed_uniform,
    fedavg_at,
    fedavg_oat,
    lg_fedavg,
    standalone,
)
from fedquilt.models.pretrained import load_pretrained
from fedquilt.report.runs import report  # shadows the package, which stays importable
from fedquilt.runs.loop import Pace
from fedquilt.runs.run import Run, open_run, train
from fedquilt.structure.budget import Budget, fit
from fedquilt.structure.cost import Cost, cost
from fedquilt.structure.cut import build, take
from fedquilt.structure.groups import Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.training.attack import PGD
from fedquilt.training.descent import Optimiser
from fedquilt.training.sgd import SGD
from fedquilt.version import __version__

__all__ = [
    "ADDS",
    "APFL",
    "METHODS",
    "PGD",
    "SGD",
    "STC",
    "Budget",
    "Centralised",
    "Client",
    "Cost",
    "DepthFL",
    "FedAvg",
    "FedDrop",
    "FedPA",
    "FedRolex",
    "FedquiltError",
    "FjORD",
    "HeteroFL",
    "Method",
    "NeFL",
    "Optimiser",
    "PFedMe",
    "Pace",
    "Phase",
    "Population",
    "Run",
    "SHeteroFL",
    "Setup",
    "SizeScore",
    "SplitMix",
    "State",
    "Structure",
    "Subnet",
    "Task",
    "Update",
    "__version__",
    "average",
    "build",
    "clients",
    "cost",
    "export",
    "fed_uniform",
    "fedavg_at",
    "fedavg_oat",
    "fit",
    "lg_fedavg",
    "load_pretrained",
    "open_run",
    "report",
    "standalone",
    "take",
    "train",
]
