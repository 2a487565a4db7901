"""One file per paper, and the baselines; a method by name."""

from __future__ import annotations

from collections.abc import Callable

from fedquilt.methods.adversarial import fedavg_at, fedavg_oat
from fedquilt.methods.fedavg import FedAvg
from fedquilt.methods.heterofl import HeteroFL
from fedquilt.methods.method import Method
from fedquilt.methods.personal import lg_fedavg, standalone
from fedquilt.methods.sheterofl import SHeteroFL
from fedquilt.methods.splitmix import SplitMix

METHODS: dict[str, Callable[..., Method]] = {
    "fedavg": FedAvg,
    "fedavg-at": fedavg_at,
    "fedavg-oat": fedavg_oat,
    "heterofl": HeteroFL,
    "lg-fedavg": lg_fedavg,
    "sheterofl": SHeteroFL,
    "splitmix": SplitMix,
    "standalone": standalone,
}

__all__ = [
    "METHODS",
    "FedAvg",
    "HeteroFL",
    "Method",
    "SHeteroFL",
    "SplitMix",
    "fedavg_at",
    "fedavg_oat",
    "lg_fedavg",
    "standalone",
]
