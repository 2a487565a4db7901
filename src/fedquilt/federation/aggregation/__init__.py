"""How the updates of a round become the next state: parts, and the pipeline they are chained to."""

from __future__ import annotations

from fedquilt.federation.aggregation.catalog import AGGREGATORS, TRANSFORMS
from fedquilt.federation.aggregation.coordinate_rules import CoordinateRule, Median, TrimmedMean
from fedquilt.federation.aggregation.full_mean import FullMean
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
from fedquilt.federation.aggregation.robust import RobustAggregator
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
from fedquilt.federation.aggregation.transforms import (
    CapWeight,
    ClipNorm,
    ClipQuantile,
    EqualWeights,
)
from fedquilt.federation.aggregation.vector_rules import (
    CenteredClipping,
    GeometricMedian,
    Krum,
    MultiKrum,
    VectorRule,
)

__all__ = [
    "AGGREGATORS",
    "SERVER_OPTIMIZERS",
    "TAKE_MEAN",
    "TRANSFORMS",
    "Aggregate",
    "AggregationPipeline",
    "Aggregator",
    "CapWeight",
    "CenteredClipping",
    "ClipNorm",
    "ClipQuantile",
    "CoordinateRule",
    "Decoder",
    "EqualWeights",
    "FedAdagrad",
    "FedAdam",
    "FedAvgM",
    "FedYogi",
    "FullMean",
    "GeometricMedian",
    "Krum",
    "LabelAwareMean",
    "Mean",
    "Median",
    "MultiKrum",
    "Part",
    "PlainDecoder",
    "RobustAggregator",
    "ServerOptimizer",
    "ServerSGD",
    "ServerUpdate",
    "TrimmedMean",
    "UpdateTransform",
    "Validator",
    "VectorRule",
    "average",
    "chain",
]
