"""Data: what a client holds, where it comes from, and how it is divided among clients."""

from fedquilt.data.examples import ClientData, DatasetExamples, Examples, Normalise, as_examples
from fedquilt.data.load import load
from fedquilt.data.partition import Partition, by_class, by_group, dirichlet, from_flwr, iid, parse
from fedquilt.data.source import Source
from fedquilt.data.windows import Windows

__all__ = [
    "ClientData",
    "DatasetExamples",
    "Examples",
    "Normalise",
    "Partition",
    "Source",
    "Windows",
    "as_examples",
    "by_class",
    "by_group",
    "dirichlet",
    "from_flwr",
    "iid",
    "load",
    "parse",
]
