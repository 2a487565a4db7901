"""The finished model on disk: whole, checked, and read only where it is needed."""

import contextlib
import copy
import json
from dataclasses import fields

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fedquilt as fq
from fedquilt.customize import bundle
from fedquilt.customize.info import InputSpec, RunInfo
from fedquilt.errors import CheckpointError, CorruptFileError
from fedquilt.files import hash_file, write_document
from fedquilt.structure.derive import make_uncut_structure
from fedquilt.structure.serialization import from_json, to_json

PARAMS = {
    "w@0": torch.randn(3, 2),
    "w@1": torch.randn(3, 2),
    "half": torch.randn(4).to(torch.bfloat16),
    "n": torch.tensor(4),
    "mask": torch.tensor([True, False]),
    "none": torch.empty(0, 3),
}
INFO = RunInfo(0, 2, {"class": "FedAvg"}, (1.0,), (InputSpec((2, 2, 5, 5), "float32"),))
NET = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))


@pytest.fixture(scope="module")
def structure():
    return fq.trace_structure(NET, torch.zeros(2, 2, 5, 5))


@pytest.fixture
def folder(tmp_path, structure):
    bundle.save_bundle(tmp_path, PARAMS, structure, INFO)
    return tmp_path


def damage(path, tensor):
    """Changes one bit of one tensor in a file."""
    values = load_file(path)
    found = path.read_bytes()
    old = values[tensor].numpy().tobytes()
    assert found.count(old) == 1
    path.write_bytes(found.replace(old, bytes([old[0] ^ 1]) + old[1:]))


def test_a_bundle_comes_back_as_it_was(folder):
    found = bundle.load_bundle(folder)
    assert found.info == INFO
    assert set(found.params) == PARAMS.keys()
    assert len(found.params) == len(PARAMS)
    for name, tensor in PARAMS.items():
        assert found.params[name].dtype == tensor.dtype
        assert torch.equal(found.params[name], tensor)
        assert found.params.shape(name) == tuple(tensor.shape)
    assert found.params.get("nothing") is None
    assert sorted(p.name for p in folder.iterdir()) == [
        "bundle.json",
        "params.safetensors",
        "structure.json",
    ]


def test_a_tensor_is_checked_when_it_is_read_and_others_are_not_read(folder):
    damage(folder / "params.safetensors", "w@1")
    params = bundle.load_bundle(folder).params
    assert "w@1" in params
    assert params.shape("w@1") == (3, 2)
    assert torch.equal(params["w@0"], PARAMS["w@0"])
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"is damaged: 'w@1' is not what was written"):
            params["w@1"]


@pytest.mark.parametrize(
    "change",
    [
        {"w@1": PARAMS["w@1"].reshape(2, 3)},
        {"w@1": PARAMS["w@1"].view(torch.int32)},
        {"w@1": -PARAMS["w@1"]},
    ],
    ids=["shape", "dtype", "values"],
)
def test_another_tensor_of_the_same_name_is_refused(folder, change):
    save_file({**PARAMS, **change}, folder / "params.safetensors")
    params = bundle.load_bundle(folder).params
    with pytest.raises(CheckpointError, match="'w@1' is not what was written"):
        params["w@1"]


def test_other_names_are_refused_at_once(folder):
    save_file({"v": torch.zeros(1)}, folder / "params.safetensors")
    with pytest.raises(CheckpointError, match="damaged"):
        bundle.load_bundle(folder)


def test_a_file_that_is_cut_short_is_refused_at_once(folder):
    path = folder / "params.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="damaged"):
        bundle.load_bundle(folder)


@pytest.mark.parametrize("name", ["params.safetensors", "structure.json"])
def test_a_bundle_in_which_a_file_is_missing_is_refused(folder, name):
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        bundle.load_bundle(folder)


def test_a_damaged_structure_is_refused(folder):
    path = folder / "structure.json"
    path.write_text(path.read_text().replace("4", "5", 1))
    with pytest.raises(CheckpointError, match="damaged"):
        bundle.load_bundle(folder)


def rewrite(folder, *, version=4, without=(), **changes):
    """Writes the description anew, with its hash."""
    path = folder / "bundle.json"
    about = {**json.loads(path.read_text()), "version": version, **changes}
    kept = {n: v for n, v in about.items() if n not in (*without, "digest")}
    write_document(path, kept)


def test_a_bundle_of_an_unknown_version_is_refused(folder):
    rewrite(folder, version=5)
    with pytest.raises(CheckpointError, match="has version 5, this fedquilt reads version 4"):
        bundle.load_bundle(folder)


def test_no_bit_of_the_description_is_believed_when_it_is_another(folder):
    path = folder / "bundle.json"
    whole, about = path.read_bytes(), bundle.load_bundle(folder).info
    for position in range(0, len(whole), 3):
        data = bytearray(whole)
        data[position] ^= 1 << position % 7
        path.write_bytes(data)
        with contextlib.suppress(CheckpointError):
            assert bundle.load_bundle(folder).info == about


@pytest.mark.parametrize(
    "name", ["seed", "rounds", "method", "sizes", "inputs", "sha256", "structure"]
)
def test_a_description_that_lacks_something_is_refused_in_a_sentence(folder, name):
    rewrite(folder, without=(name,))
    with pytest.raises(CorruptFileError, match=f"'{name}': field required") as problem:
        bundle.load_bundle(folder)
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"sizes": []},
        {"sizes": "all"},
        {"rounds": 0},
        {"inputs": [{"shape": [2, 3], "dtype": "load"}]},
        {"inputs": [{"shape": [10**6, 10**6], "dtype": "float32"}]},
        {"inputs": [{"shape": [-1], "dtype": "float32"}]},
        {"client_versions": {"first": 1}},
        {"chosen_subnets": [1]},
        {"chosen_subnets": {"1": "no subnet"}},
        {"sha256": 3},
        {"normalization": {"mean": 1}},
    ],
    ids=str,
)
def test_a_description_of_another_shape_is_refused_in_a_sentence(folder, changes):
    rewrite(folder, **changes)
    with pytest.raises(CorruptFileError, match=r"bundle\.json is damaged: ") as problem:
        bundle.load_bundle(folder)
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize("text", ["[]", "3", "{", '{"a": 1}', "[" * 100_000, ""])
def test_another_kind_of_json_is_refused_in_a_sentence(folder, text):
    (folder / "bundle.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"bundle\.json") as problem:
        bundle.load_bundle(folder)
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize("text", ["[]", "{}", '{"axes": 3}', "[" * 100_000])
def test_a_structure_of_another_shape_is_refused_in_a_sentence(folder, text):
    (folder / "structure.json").write_text(text)
    rewrite(folder, structure=hash_file(folder / "structure.json"))
    with pytest.raises(CorruptFileError, match="describes no structure"):
        bundle.load_bundle(folder)


def test_whoever_has_a_bundle_open_keeps_it_when_it_is_written_again(folder, structure):
    params = bundle.load_bundle(folder).params
    bundle.save_bundle(folder, {"w@0": torch.zeros(3, 2)}, structure, INFO)
    assert torch.equal(params["w@0"], PARAMS["w@0"])
    assert torch.equal(bundle.load_bundle(folder).params["w@0"], torch.zeros(3, 2))


def test_a_full_disk_leaves_the_old_bundle(folder, structure, monkeypatch):
    def full(path, tensors):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    monkeypatch.setattr("fedquilt.customize.bundle.write_tensors", full)
    with pytest.raises(CheckpointError, match="No space left"):
        bundle.save_bundle(folder, PARAMS, structure, INFO)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_stored_tensors_can_be_copied(folder):
    other = copy.deepcopy(bundle.load_bundle(folder).params)
    assert torch.equal(other["w@0"], PARAMS["w@0"])


def test_a_folder_without_a_model_says_how_to_finish(tmp_path):
    with pytest.raises(CheckpointError, match="finish its run first"):
        bundle.load_bundle(tmp_path / "model")


# structures


class Joined(nn.Module):
    """Has axes of several spans."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(8, 4), nn.Linear(8, 6)
        self.norm = nn.BatchNorm1d(10)
        self.classifier = nn.Linear(10, 3)

    def forward(self, x):
        return self.classifier(self.norm(torch.cat([self.one(x), self.other(x)], -1)))


def same(one, other):
    return all(getattr(one, f.name) == getattr(other, f.name) for f in fields(one) if f.repr)


def test_a_structure_comes_back_from_plain_values_as_it_was(structure):
    joined = fq.trace_structure(Joined(), torch.zeros(2, 8))
    assert any(axis and len(axis) > 1 for axes in joined.axes.values() for axis in axes)
    axes = {"0.weight": ("h", None, None, None), "0.bias": ("h",), "3.weight": (None, "h")}
    declared = fq.declare_structure(NET, axes, sizes={"0.out_channels": "h"})
    assert declared.size_attributes
    small = make_uncut_structure(fq.build_module(NET, structure, structure.subnet(0.5)), structure)
    assert small.origin
    for found in (structure, joined, declared, small):
        again = from_json(json.loads(json.dumps(to_json(found))))
        assert same(again, found)
        assert list(again.shapes) == list(found.shapes)
        assert again.describe() == found.describe()
    assert not same(structure, small)
