"""Fedquilt: one federated model, cut to fit every device.

Clients of different budgets train parts of one model. Data, models, methods and server optimizers
can be had by name:

>>> import fedquilt as fq
>>> digits = fq.load_dataset("digits")
>>> clients = fq.make_clients(digits.train, test=digits.test, count=4, budgets=(1.0, 0.25),
...                           transforms=[fq.transforms.Rotation(15)])
>>> model = fq.make_model("mlp", {"image_size": 8, "hidden": [16]})
>>> method = fq.HeteroFL(fq.LocalTraining(epochs=1), server_optimizer=fq.FedAvgM(lr=0.5))
>>> run = fq.train(model, digits.example, method, clients, rounds=1, workers=0)
>>> run.customize(width=0.25).classifier
Linear(in_features=4, out_features=10, bias=True)
>>> "mlp" in fq.MODELS, fq.METHODS["heterofl"] is fq.HeteroFL, "fedavgm" in fq.SERVER_OPTIMIZERS
(True, True, True)
>>> fq.AGGREGATORS["median"] is fq.Median, fq.ATTACKS["alie"] is fq.ALIE
(True, True)
>>> "mse" in fq.LOSSES, "r2" in fq.METRICS, "csv" in fq.TRACKERS
(True, True, True)
>>> fq.__version__.count(".") >= 2
True
"""

import logging

from fedquilt.comparison.compare import compare
from fedquilt.comparison.comparison import Comparison
from fedquilt.customize.export import export
from fedquilt.data import Dataset, load_dataset, transforms
from fedquilt.data.population import Population, make_clients
from fedquilt.engines.engine import Engine
from fedquilt.engines.local import LocalEngine
from fedquilt.errors import FedquiltError, UpdateError
from fedquilt.evaluation.accuracy import evaluate
from fedquilt.evaluation.scores import SizeScore
from fedquilt.federation.aggregation import (
    AGGREGATORS,
    SERVER_OPTIMIZERS,
    Aggregate,
    AggregationPipeline,
    Aggregator,
    CapWeight,
    CenteredClipping,
    ClipNorm,
    ClipQuantile,
    CoordinateRule,
    Decoder,
    EqualWeights,
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedYogi,
    FullMean,
    GeometricMedian,
    Krum,
    Mean,
    Median,
    MultiKrum,
    Part,
    RobustAggregator,
    ServerOptimizer,
    ServerSGD,
    ServerUpdate,
    TrimmedMean,
    UpdateTransform,
    Validator,
    VectorRule,
    average,
    chain,
)
from fedquilt.federation.client import Client, ClientResult, Failure, Recipe, Task, Update
from fedquilt.federation.hostile import (
    ALIE,
    Attack,
    GaussianNoise,
    InnerProduct,
    Mimic,
    ScaledUpdate,
    SignFlip,
)
from fedquilt.federation.privacy import Accountant, Privacy, PrivacySpent
from fedquilt.federation.secure import SecureAggregation
from fedquilt.federation.state import Phase, Setup, State
from fedquilt.learning.known_metrics import METRICS
from fedquilt.learning.losses import LOSSES, BatchLoss, Loss
from fedquilt.learning.metric import Metric, MetricInfo
from fedquilt.learning.metrics import metric
from fedquilt.learning.task import LearningTask
from fedquilt.learning.torch_metric import TorchMetric
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
from fedquilt.methods.base import BaseMethod
from fedquilt.models import MODELS, make_model
from fedquilt.models.pretrained import load_pretrained
from fedquilt.report.progress import ProgressBar
from fedquilt.report.runs import write_report  # shadows the package, which stays importable
from fedquilt.runs.audit import audit_run
from fedquilt.runs.events import (
    Callback,
    CheckpointSaved,
    ClientDone,
    Evaluated,
    Event,
    ProblemFound,
    RoundDone,
    RoundStarted,
    RunEnded,
    RunStarted,
)
from fedquilt.runs.open import open_run
from fedquilt.runs.policies import Cadence, FaultPolicy
from fedquilt.runs.run import Run
from fedquilt.runs.selection import Selection
from fedquilt.runs.trackers.catalog import TRACKERS
from fedquilt.runs.trackers.csv_file import CSVTracker
from fedquilt.runs.trackers.mlflow import MLflowTracker
from fedquilt.runs.trackers.tensorboard import TensorBoardTracker
from fedquilt.runs.trackers.tracker import Tracker
from fedquilt.runs.trackers.wandb import WandbTracker
from fedquilt.runs.train import train
from fedquilt.structure.budget import Budget, fit_budget
from fedquilt.structure.cost import Cost, compute_cost
from fedquilt.structure.create import declare_structure, trace_structure
from fedquilt.structure.cut import build_module, copy_subnet_tensors
from fedquilt.structure.structure import Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.training.attack import PGD
from fedquilt.training.context import ClientContext
from fedquilt.training.local_sgd import LocalSGD
from fedquilt.training.optimizer_settings import SGDSettings
from fedquilt.training.optimizers import make_optimizer
from fedquilt.training.poisoning import ATTACKS, Backdoor, LabelFlip
from fedquilt.training.settings import LocalTraining
from fedquilt.training.torch_optimizers import TorchOptimizer
from fedquilt.version import __version__

logging.getLogger(__name__).addHandler(logging.NullHandler())

__all__ = [
    "ADDS",
    "AGGREGATORS",
    "ALIE",
    "APFL",
    "ATTACKS",
    "LOSSES",
    "METHODS",
    "METRICS",
    "MODELS",
    "PGD",
    "SERVER_OPTIMIZERS",
    "STC",
    "TRACKERS",
    "Accountant",
    "Aggregate",
    "AggregationPipeline",
    "Aggregator",
    "Attack",
    "Backdoor",
    "BaseMethod",
    "BatchLoss",
    "Budget",
    "CSVTracker",
    "Cadence",
    "Callback",
    "CapWeight",
    "CenteredClipping",
    "Centralised",
    "CheckpointSaved",
    "Client",
    "ClientContext",
    "ClientDone",
    "ClientResult",
    "ClipNorm",
    "ClipQuantile",
    "Comparison",
    "CoordinateRule",
    "Cost",
    "Dataset",
    "Decoder",
    "DepthFL",
    "Engine",
    "EqualWeights",
    "Evaluated",
    "Event",
    "Failure",
    "FaultPolicy",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedDrop",
    "FedPA",
    "FedRolex",
    "FedYogi",
    "FedquiltError",
    "FjORD",
    "FullMean",
    "GaussianNoise",
    "GeometricMedian",
    "HeteroFL",
    "InnerProduct",
    "Krum",
    "LabelFlip",
    "LearningTask",
    "LocalEngine",
    "LocalSGD",
    "LocalTraining",
    "Loss",
    "MLflowTracker",
    "Mean",
    "Median",
    "Method",
    "Metric",
    "MetricInfo",
    "Mimic",
    "MultiKrum",
    "NeFL",
    "PFedMe",
    "Part",
    "Phase",
    "Population",
    "Privacy",
    "PrivacySpent",
    "ProblemFound",
    "ProgressBar",
    "Recipe",
    "RobustAggregator",
    "RoundDone",
    "RoundStarted",
    "Run",
    "RunEnded",
    "RunStarted",
    "SGDSettings",
    "SHeteroFL",
    "ScaledUpdate",
    "SecureAggregation",
    "Selection",
    "ServerOptimizer",
    "ServerSGD",
    "ServerUpdate",
    "Setup",
    "SignFlip",
    "SizeScore",
    "SplitMix",
    "State",
    "Structure",
    "Subnet",
    "Task",
    "TensorBoardTracker",
    "TorchMetric",
    "TorchOptimizer",
    "Tracker",
    "TrimmedMean",
    "Update",
    "UpdateError",
    "UpdateTransform",
    "Validator",
    "VectorRule",
    "WandbTracker",
    "__version__",
    "audit_run",
    "average",
    "build_module",
    "chain",
    "compare",
    "compute_cost",
    "copy_subnet_tensors",
    "declare_structure",
    "evaluate",
    "export",
    "fed_uniform",
    "fedavg_at",
    "fedavg_oat",
    "fit_budget",
    "lg_fedavg",
    "load_dataset",
    "load_pretrained",
    "make_clients",
    "make_model",
    "make_optimizer",
    "metric",
    "open_run",
    "standalone",
    "trace_structure",
    "train",
    "transforms",
    "write_report",
]
