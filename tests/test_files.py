"""Files of tensors are those of safetensors, and written with their hash."""

from __future__ import annotations

import hashlib

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from fedquilt.files import (
    DTYPE_NAMES,
    hash_file,
    hash_tensor,
    read_tensors,
    save_tensors,
    write_tensors,
)


def make_tensors() -> dict[str, torch.Tensor]:
    kinds = {str(kind): torch.ones(3, 5, dtype=torch.uint8).to(kind) for kind in DTYPE_NAMES}
    shapes = {"scalar": torch.tensor(2.5), "none": torch.empty(0, 4), "odd": torch.ones(1).bool()}
    turned = {"turned": torch.arange(12.0).view(3, 4).t(), "ä": torch.arange(3.0)[1:]}
    return {**shapes, **turned, **kinds}


def test_the_library_reads_tensors_of_every_kind_and_each_is_aligned(tmp_path):
    tensors, path = make_tensors(), tmp_path / "t.safetensors"
    digest = write_tensors(path, tensors)
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest() == hash_file(path)
    for found in (load_file(path), read_tensors(path, digest)):
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert found[name].dtype == tensor.dtype
            assert found[name].shape == tensor.shape
            assert hash_tensor(found[name]) == hash_tensor(tensor)
            assert found[name].data_ptr() % tensor.element_size() == 0


def test_equal_tensors_are_equal_files_whatever_their_order(tmp_path):
    tensors = make_tensors()
    first = write_tensors(tmp_path / "a", tensors)
    assert first == write_tensors(tmp_path / "b", dict(reversed(tensors.items())))
    tensors["scalar"] += 1
    assert first != write_tensors(tmp_path / "c", tensors)


@pytest.mark.parametrize("metadata", [{}, {"digest": "12"}])
def test_what_is_said_about_tensors_is_in_the_file(tmp_path, metadata):
    save_tensors(tmp_path / "t", {"a": torch.ones(2)}, **metadata)
    with safe_open(tmp_path / "t", framework="pt") as file:
        assert (file.metadata() or {}) == metadata
