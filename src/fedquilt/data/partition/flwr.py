"""Partitioners of flwr-datasets."""

from __future__ import annotations

import copy
from typing import Protocol

import numpy as np

from fedquilt.data.partition.rows import Indices, Numbers, require_examples, to_integers
from fedquilt.errors import DataError
from fedquilt.federation.columns import RaggedColumn


class FlwrPartitioner(Protocol):
    """What is used of a flwr-datasets partitioner. Its ``dataset`` is set by ``from_flwr``."""

    @property
    def num_partitions(self) -> int:
        """The number of clients."""

    def load_partition(self, partition_id: int) -> object:
        """The rows of one client."""


def from_flwr(partitioner: FlwrPartitioner, labels: Numbers) -> list[Indices]:
    """Divides examples with these labels by a flwr-datasets partitioner.

    The partitioner sees a table with the columns ``idx`` and ``label``. One that uses labels takes
    ``partition_by="label"``. It is copied, so the object you pass does not change.
    """
    # dir, not hasattr: the properties raise before a dataset is set
    if not {"dataset", "load_partition", "num_partitions"} <= set(dir(partitioner)):
        raise DataError(
            "a flwr-datasets partitioner has dataset, load_partition and num_partitions, "
            f"{type(partitioner).__name__} does not; pass e.g. IidPartitioner(num_partitions=10)"
        )
    own = copy.deepcopy(partitioner)
    own.dataset = _make_index_table(to_integers(labels))  # type: ignore[attr-defined]
    parts = (own.load_partition(i) for i in range(own.num_partitions))
    rows = [np.sort(np.asarray(part["idx"], dtype=np.int64)) for part in parts]  # type: ignore[index]
    return list(require_examples(RaggedColumn.of(rows)))


def _make_index_table(labels: Indices) -> object:
    try:
        import datasets  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise DataError(
            "a flwr-datasets partitioner needs the extra: pip install 'fedquilt[hub]'"
        ) from error
    return datasets.Dataset.from_dict({"idx": np.arange(len(labels)), "label": labels})
