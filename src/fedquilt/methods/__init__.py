"""One file per paper, and the baselines; a method by name."""

from __future__ import annotations

from collections.abc import Callable

from fedquilt.federation.aggregation import AGGREGATORS, SERVER_OPTIMIZERS, TRANSFORMS
from fedquilt.methods.adds import ADDS
from fedquilt.methods.adversarial import fedavg_at, fedavg_oat
from fedquilt.methods.apfl import APFL, FedPA, fed_uniform
from fedquilt.methods.centralised import Centralised
from fedquilt.methods.depthfl import DepthFL
from fedquilt.methods.fedavg import FedAvg
from fedquilt.methods.feddrop import FedDrop
from fedquilt.methods.fedrolex import FedRolex
from fedquilt.methods.fjord import FjORD
from fedquilt.methods.heterofl import HeteroFL
from fedquilt.methods.method import Method
from fedquilt.methods.nefl import NeFL
from fedquilt.methods.personal import lg_fedavg, standalone
from fedquilt.methods.pfedme import PFedMe
from fedquilt.methods.sheterofl import SHeteroFL
from fedquilt.methods.splitmix import SplitMix
from fedquilt.methods.stc import STC

METHODS: dict[str, Callable[..., Method]] = {
    "adds": ADDS,
    "apfl": APFL,
    "centralised": Centralised,
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
    "pfedme": PFedMe,
    "sheterofl": SHeteroFL,
    "splitmix": SplitMix,
    "standalone": standalone,
    "stc": STC,
}

# what a method by name may be, and hold, so that a run can store it as plain values
METHOD_CLASSES: tuple[type, ...] = (
    *{type(make()) for make in METHODS.values()},
    *SERVER_OPTIMIZERS.values(),
    *AGGREGATORS.values(),
    *TRANSFORMS,
)

__all__ = [
    "ADDS",
    "APFL",
    "METHODS",
    "METHOD_CLASSES",
    "STC",
    "Centralised",
    "DepthFL",
    "FedAvg",
    "FedDrop",
    "FedPA",
    "FedRolex",
    "FjORD",
    "HeteroFL",
    "Method",
    "NeFL",
    "PFedMe",
    "SHeteroFL",
    "SplitMix",
    "fed_uniform",
    "fedavg_at",
    "fedavg_oat",
    "lg_fedavg",
    "standalone",
]
