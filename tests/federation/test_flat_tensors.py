import copy
import gc
import os
import pickle
import weakref

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedquilt.federation import flat_tensors

KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8]
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(KINDS), SHAPES), max_size=5), st.integers(0, 99))
def test_tensors_of_any_kind_come_back_after_the_file_is_gone(tmp_path_factory, kinds, seed):
    path = tmp_path_factory.mktemp("flat") / "tensors"
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"{i}": torch.randint(0, 2, shape, generator=generator).to(kind)
        for i, (kind, shape) in enumerate(kinds)
    }
    slots = flat_tensors.write_flat(path, tensors)
    found = flat_tensors.read_flat(path, slots)
    path.unlink()
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_what_is_not_contiguous_is_written_in_its_order(tmp_path):
    tensor = torch.arange(12.0).view(3, 4).t()
    slots = flat_tensors.write_flat(tmp_path / "t", {"t": tensor})
    assert torch.equal(flat_tensors.read_flat(tmp_path / "t", slots)["t"], tensor)


def test_a_system_that_takes_little_at_a_time_still_writes_all(tmp_path, monkeypatch):
    taken = []

    def little(file: int, parts: list[memoryview]) -> int:
        taken.append(len(parts))
        return os.write(file, bytes(parts[0])[:7])

    monkeypatch.setattr(os, "writev", little)
    tensors = {f"t{i}": torch.arange(i, dtype=torch.float32) for i in range(40)}
    found = flat_tensors.read_flat(tmp_path / "f", flat_tensors.write_flat(tmp_path / "f", tensors))
    assert all(torch.equal(found[n], t) for n, t in tensors.items())
    assert max(taken) <= flat_tensors.MAX_PARTS


def test_more_tensors_than_one_call_may_take(tmp_path):
    tensors = {str(i): torch.tensor([float(i)]) for i in range(1500)}
    found = flat_tensors.read_flat(tmp_path / "f", flat_tensors.write_flat(tmp_path / "f", tensors))
    assert [float(t) for t in found.values()] == list(range(1500))


def test_large_tensors_are_mapped_one_by_one_and_outlive_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(flat_tensors, "MIN_MAPPED_BYTES", 64)
    tensors = flat_tensors.join_parts([
        {"a": torch.arange(5000.0), "b": torch.tensor(True), "none": torch.empty(0, 3)},
        {"a": torch.arange(30).view(5, 6).bfloat16()},
    ])  # fmt: skip
    slots = flat_tensors.write_flat(tmp_path / "t", tensors)
    parts = flat_tensors.split_parts(flat_tensors.read_flat(tmp_path / "t", slots), 2)
    (tmp_path / "t").unlink()
    assert [list(part) for part in parts] == [["a", "b", "none"], ["a"]]
    found = flat_tensors.join_parts(parts)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert parts[0]["a"] is found["0/a"]
    kept = weakref.ref(found["0/a"])
    del found
    assert kept() is None  # what is not in use takes no memory
    parts[0]["a"].zero_()
    assert parts[0]["a"][1] == 1.0


def test_offloaded_tensors_are_the_same_and_a_copy_of_them_needs_no_file(monkeypatch):
    tensors = {"a": torch.arange(5000.0).view(50, 100).t(), "b": torch.tensor(True)}
    assert flat_tensors.offload(tensors) is tensors  # small
    monkeypatch.setattr(flat_tensors, "MIN_MAPPED_BYTES", 64)
    monkeypatch.setattr(flat_tensors, "MAX_HELD_BYTES", 64)
    offloaded = flat_tensors.offload(tensors)
    assert isinstance(offloaded, flat_tensors.MappedTensors)
    assert flat_tensors.offload(offloaded) is offloaded
    copies = [copy.deepcopy(offloaded), pickle.loads(pickle.dumps(offloaded))]
    for found in (offloaded, *copies):
        assert list(found) == list(tensors)
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    del offloaded, found
    gc.collect()
    assert all(type(each) is dict and each["a"].sum() == tensors["a"].sum() for each in copies)


def test_without_room_tensors_stay_in_memory(monkeypatch):
    def refuse(*_: object) -> int:
        raise OSError("no space left")

    monkeypatch.setattr(flat_tensors, "MIN_MAPPED_BYTES", 64)
    monkeypatch.setattr(os, "writev", refuse)
    tensors = {"a": torch.arange(5000.0)}
    assert flat_tensors.offload(tensors) is tensors
