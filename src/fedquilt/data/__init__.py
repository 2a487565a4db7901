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
from fedquilt.data.pipeline import Pipeline, make_pipeline
from fedquilt.data.transformed import TransformedExamples
from fedquilt.data.transforms import Normalize
from fedquilt.data.windows import Windows

__all__ = [
    "ClientData",
    "ConcatExamples",
    "Dataset",
    "DatasetExamples",
    "Examples",
    "Normalize",
    "Partition",
    "Pipeline",
    "TransformedExamples",
    "Windows",
    "count_targets",
    "from_flwr",
    "load_dataset",
    "make_pipeline",
    "parse_partition",
    "split_by_class",
    "split_by_group",
    "split_dirichlet",
    "split_iid",
    "to_examples",
]
