"""Columns of a table of clients."""

from __future__ import annotations

import numpy as np
import pytest

from fedquilt.federation.columns import CodedColumn


@pytest.mark.parametrize(
    "column",
    [
        CodedColumn(("rich", "poor", "none has it"), np.array([1, 0, 1])),
        CodedColumn.blocks([("poor", 1), ("rich", 1), ("poor", 1), ("none has it", 0)]),
    ],
    ids=["rows", "blocks"],
)
def test_values_that_no_row_has_are_not_mapped_and_leave_nothing_behind(column):
    seen = []
    mapped = column.map(lambda value: seen.append(value) or value.upper())
    assert list(mapped) == ["POOR", "RICH", "POOR"]
    assert sorted(seen) == ["poor", "rich"]
    assert set(mapped.values) == {"POOR", "RICH"}  # all of them are written to checkpoints


def test_a_column_without_rows_is_mapped_to_one():
    assert list(CodedColumn(("rich",), np.zeros(0, np.int64)).map(str.upper)) == []
