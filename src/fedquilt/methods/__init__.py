"""One file per paper, and the baselines; a method by name."""

from __future__ import annotations

from collections.abc import Callable

from fedquilt.methods.adds import ADDS
from fedquilt.methods.adversarial import fedavg_at, fedavg_oat
from fedquilt.methods.apfl import APFL, FedPA, fed_uniform
from fedquilt.methods.depthfl import DepthFL
from fedquilt.methods.fedavg import FedAvg
from fedquilt.methods.feddrop import FedDrop
from fedquilt.methods.fedrolex import FedRolex
from fedquilt.methods.fjord import FjORD
from fedquilt.methods.heterofl import HeteroFL
from fedquilt.methods.method import Method
from fedquilt.methods.nefl import NeFL
from fedquilt.methods.personal import lg_fedavg, standalone
from fedquilt.methods.sheterofl import SHeteroFL
from fedquilt.methods.splitmix import SplitMix

METHODS: dict[str, Callable[..., Method]] = {
    "adds": ADDS,
    "apfl": APFL,
    "depthfl": DepthFL,
    "fedavg": FedAvg,
    "fedavg-at": fedavg_at,
    "fedavg-oat": fedavg_oat,
    "feddrop": FedDrop,
    "fedrolex": FedRolex,
    "feduniform": fed_uniform,
    "fjord": FjORD,
    "heterofl": HeteroFL,
    "lg-fedavg": lg_fedavg,
    "nefl": NeFL,
    "sheterofl": SHeteroFL,
    "splitmix": SplitMix,
    "standalone": standalone,
}

__all__ = [
    "ADDS",
    "APFL",
    "METHODS",
    "DepthFL",
    "FedAvg",
    "FedDrop",
    "FedPA",
    "FedRolex",
    "FjORD",
    "HeteroFL",
    "Method",
    "NeFL",
    "SHeteroFL",
    "SplitMix",
    "fed_uniform",
    "fedavg_at",
    "fedavg_oat",
    "lg_fedavg",
    "standalone",
]
