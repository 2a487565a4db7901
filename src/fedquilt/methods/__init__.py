"""One file per paper, and the baselines; a method by name."""

from __future__ import annotations

from collections.abc import Callable

from fedquilt.methods.fedavg import FedAvg
from fedquilt.methods.heterofl import HeteroFL
from fedquilt.methods.method import Method
from fedquilt.methods.personal import lg_fedavg, standalone

METHODS: dict[str, Callable[..., Method]] = {
    "fedavg": FedAvg,
    "heterofl": HeteroFL,
    "lg-fedavg": lg_fedavg,
    "standalone": standalone,
}

__all__ = ["METHODS", "FedAvg", "HeteroFL", "Method", "lg_fedavg", "standalone"]
