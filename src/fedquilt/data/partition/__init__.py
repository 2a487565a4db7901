"""Partitions: labels and a seed in, lists of row numbers for each client out."""

from fedquilt.data.partition.by_class import split_by_class, split_dirichlet
from fedquilt.data.partition.by_group import split_by_group
from fedquilt.data.partition.flwr import FlwrPartitioner, from_flwr
from fedquilt.data.partition.iid import split_iid
from fedquilt.data.partition.partition import Partition, parse_partition
from fedquilt.data.partition.rows import Indices, Numbers
from fedquilt.data.partition.selection import (
    choose_natural_clients,
    count_fraction,
    draw_holdout_clients,
    split_holdout_rows,
    take_first_rows,
)

__all__ = [
    "FlwrPartitioner",
    "Indices",
    "Numbers",
    "Partition",
    "choose_natural_clients",
    "count_fraction",
    "draw_holdout_clients",
    "from_flwr",
    "parse_partition",
    "split_by_class",
    "split_by_group",
    "split_dirichlet",
    "split_holdout_rows",
    "split_iid",
    "take_first_rows",
]
