"""What is computed for a structure is cached on it, and goes with it."""

import copy
import gc
import pickle
import weakref
from dataclasses import replace

import pytest

from fedquilt.structure.groups import Group
from fedquilt.structure.structure import Structure, cache_per_structure

CALLS = []


@cache_per_structure(max_entries=2)
def count_groups(structure: Structure, offset: int) -> int:
    CALLS.append((id(structure), offset))
    return len(structure.groups) + offset


@pytest.fixture
def structure():
    CALLS.clear()
    return Structure({"a": Group("a", 4)}, {}, {})


def test_a_value_is_computed_once_for_each_structure(structure):
    other = Structure({}, {}, {})
    assert [count_groups(s, 1) for s in (structure, other, structure, other)] == [2, 1, 2, 1]
    assert len(CALLS) == 2


def test_no_more_entries_are_kept_than_allowed(structure):
    for offset in (0, 1, 2, 2, 1, 0):
        count_groups(structure, offset)
    assert [offset for _, offset in CALLS] == [0, 1, 2, 0]


@pytest.mark.parametrize(
    "remake",
    [
        lambda s: replace(s, groups={}),
        lambda s: replace(copy.copy(s), groups={}),
        lambda s: replace(copy.deepcopy(s), groups={}),
        lambda s: replace(pickle.loads(pickle.dumps(s)), groups={}),
    ],
    ids=["replace", "copy", "deepcopy", "pickle"],
)
def test_another_structure_has_its_own_values(structure, remake):
    assert count_groups(structure, 0) == 1
    assert count_groups(remake(structure), 0) == 0
    assert count_groups(structure, 0) == 1
    assert len(CALLS) == 2


def test_a_copy_shares_no_cache(structure):
    count_groups(structure, 0)
    assert count_groups(copy.copy(structure), 5) == 6
    assert count_groups(copy.deepcopy(structure), 0) == 1
    assert len(CALLS) == 3


def test_a_cache_does_not_keep_its_structure_alive(structure):
    mine = Structure({}, {}, {})
    count_groups(mine, 0)
    reference = weakref.ref(mine)
    gc.disable()
    try:
        del mine
        assert reference() is None
    finally:
        gc.enable()
