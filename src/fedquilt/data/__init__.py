"""Data of clients: loading data sets, dividing them among clients, and drawing batches."""

from fedquilt.data.conversion import DatasetExamples, to_examples
from fedquilt.data.dataset import Dataset
from fedquilt.data.examples import ClientData, ConcatExamples, Examples, count_targets
from fedquilt.data.load import load_dataset
from fedquilt.data.partition import (
    Partition,
    from_flwr,
    parse_partition,
    split_by_class,
    split_by_group,
    split_dirichlet,
    split_iid,
)
from fedquilt.data.preprocessing import Normalization
from fedquilt.data.windows import Windows

__all__ = [
    "ClientData",
    "ConcatExamples",
    "Dataset",
    "DatasetExamples",
    "Examples",
    "Normalization",
    "Partition",
    "Windows",
    "count_targets",
    "from_flwr",
    "load_dataset",
    "parse_partition",
    "split_by_class",
    "split_by_group",
    "split_dirichlet",
    "split_iid",
    "to_examples",
]
