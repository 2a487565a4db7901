"""How the updates of a round become the next state: parts, and the pipeline they are chained to."""

from __future__ import annotations

from fedquilt.federation.aggregation.mean import LabelAwareMean, Mean, average
from fedquilt.federation.aggregation.parts import (
    Aggregate,
    Aggregator,
    Decoder,
    Part,
    ServerUpdate,
    UpdateTransform,
    Validator,
)
from fedquilt.federation.aggregation.pipeline import AggregationPipeline, PlainDecoder, chain
from fedquilt.federation.aggregation.server_optimizers import (
    SERVER_OPTIMIZERS,
    TAKE_MEAN,
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedYogi,
    ServerOptimizer,
    ServerSGD,
)

__all__ = [
    "SERVER_OPTIMIZERS",
    "TAKE_MEAN",
    "Aggregate",
    "AggregationPipeline",
    "Aggregator",
    "Decoder",
    "FedAdagrad",
    "FedAdam",
    "FedAvgM",
    "FedYogi",
    "LabelAwareMean",
    "Mean",
    "Part",
    "PlainDecoder",
    "ServerOptimizer",
    "ServerSGD",
    "ServerUpdate",
    "UpdateTransform",
    "Validator",
    "average",
    "chain",
]
