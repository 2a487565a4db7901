"""Tables of Hugging Face and Arrow as datasets: rows are read when they are asked for."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils import data as torch_data

from fedquilt.errors import DataError
from fedquilt.learning.batch import TARGET_NAMES


def is_table(data: object) -> bool:
    """Whether data are a table of Hugging Face datasets or of Arrow, which is not imported here."""
    kind = type(data)
    module, name = kind.__module__.partition(".")[0], kind.__name__
    return (module, name) in {
        ("datasets", "Dataset"),
        ("datasets", "DatasetDict"),
        ("datasets", "IterableDataset"),
        ("pyarrow", "Table"),
    }


class TableDataset(torch_data.Dataset[Any]):
    """The rows of a table, as dicts of tensors; the file that holds them is not copied.

    Args:
        table: A ``datasets.Dataset``, or a ``pyarrow.Table``.
        target: The column that is the target; None: the first of the usual names.
    """

    def __init__(self, table: Any, target: str | None = None) -> None:
        kind = type(table).__name__
        if kind == "DatasetDict":
            listed = ", ".join(f"'{name}'" for name in table)
            raise DataError(f"a DatasetDict holds several sets, {listed}; pass one of them")
        if kind == "IterableDataset":
            raise DataError(
                "rows are drawn by number, and an IterableDataset has none; load it "
                "without streaming"
            )
        if kind == "Table":
            table = _wrap_arrow(table)
        self.table = table if table.format["type"] else table.with_format("torch")
        self._target = target

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.table)

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Reads a row."""
        item: dict[str, Any] = self.table[row]
        return item

    @cached_property
    def targets(self) -> npt.NDArray[np.int64] | None:
        """The column of targets, if they are integers: read at once, without the inputs."""
        names = (self._target,) if self._target is not None else TARGET_NAMES
        for name in names:
            if name in self.table.column_names:
                column = np.asarray(self.table.with_format("numpy")[name])
                is_class = column.ndim == 1 and column.dtype.kind in "iu"
                return column.astype(np.int64) if is_class else None
        return None


def _wrap_arrow(table: Any) -> Any:
    try:
        import datasets  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise DataError("a table of Arrow needs the extra: pip install 'fedquilt[hub]'") from error
    return datasets.Dataset(table)
