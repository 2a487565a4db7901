"""Aggregators by name, as settings give them."""

from __future__ import annotations

from fedquilt.federation.aggregation.coordinate_rules import Median, TrimmedMean
from fedquilt.federation.aggregation.full_mean import FullMean
from fedquilt.federation.aggregation.mean import Mean
from fedquilt.federation.aggregation.parts import Aggregator, UpdateTransform
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
)

AGGREGATORS: dict[str, type[Aggregator]] = {
    "mean": Mean,  # that of the method
    "holder-mean": Mean,
    "full-mean": FullMean,
    "trimmed-mean": TrimmedMean,
    "median": Median,
    "geometric-median": GeometricMedian,
    "centered-clipping": CenteredClipping,
    "krum": Krum,
    "multi-krum": MultiKrum,
}

TRANSFORMS: tuple[type[UpdateTransform], ...] = (EqualWeights, CapWeight, ClipNorm, ClipQuantile)
