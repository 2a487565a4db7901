"""Files that lie about what is in them, or unpack to more than fits."""

import gzip
import io
import struct
import zipfile

import numpy as np
import pytest

from fedquilt.data import limits, load_dataset
from fedquilt.errors import DataError


def npz(path, compression=zipfile.ZIP_STORED, **members):
    """An archive of bytes or arrays."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content if isinstance(content, bytes) else npy(content))
    return str(path)


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def header(shape, descr="|u1"):
    """What comes before an array of bytes of this shape."""
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"
    text += " " * (-(len(text) + 11) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


def content(**changes):
    whole = {
        "x_train": np.zeros((6, 4, 4), np.uint8),
        "y_train": np.arange(6) % 2,
        "x_test": np.zeros((2, 4, 4), np.uint8),
        "y_test": np.arange(2),
    }
    return {**whole, **changes}


def refusal(path):
    with pytest.raises(DataError) as problem:
        load_dataset(path)
    assert "\n" not in str(problem.value)
    return str(problem.value)


@pytest.mark.parametrize("shape", ["(6, 4, 5)", "(6, 4, 3)", "(1000000, 1000000)", "(10, 10**9)"])
def test_an_array_whose_header_lies_about_its_shape_is_refused(tmp_path, shape):
    sizes = shape.replace("10**9", str(10**9))
    lying = header(sizes) + bytes(96)
    said = refusal(npz(tmp_path / "a.npz", **content(x_train=lying)))
    assert "as long as its header says" in said
    assert "'x_train.npy'" in said
    honest = header("(6, 4, 4)") + bytes(96)
    assert len(load_dataset(npz(tmp_path / "b.npz", **content(x_train=honest))).train) == 6


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x93NUMPY\x09\x00",
        header("(" * 500) + bytes(96),
        header("(-6, 4, 4)") + bytes(96),
        header("(6, 4, 4)", "|u9") + bytes(96),
        header("'x'") + bytes(96),
    ],
)
def test_a_header_that_is_none_is_refused_in_a_sentence(tmp_path, data):
    refusal(npz(tmp_path / "a.npz", **content(x_train=data)))


def test_a_member_in_a_folder_or_without_an_ending_is_no_array(tmp_path):
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("inner/x_train.npy", npy(np.zeros((6, 4, 4), np.uint8)))
        archive.writestr("y_train", b"bytes")
    assert "lacks x_train, y_train" in refusal(str(path))


def test_arrays_that_unpack_to_more_than_fits_are_refused_before_they_are_read(
    tmp_path, monkeypatch
):
    bomb = np.zeros((4000, 32, 32), np.uint8)  # 4 MB from 5 kB
    members = content(x_train=bomb, y_train=np.arange(4000) % 2, x_test=bomb[:2])
    path = npz(tmp_path / "a.npz", zipfile.ZIP_DEFLATED, **members)
    assert len(load_dataset(path).train) == 4000
    monkeypatch.setattr(limits, "get_total_memory", lambda: 2**20)
    monkeypatch.setattr(np, "load", None)
    assert "must fit into memory" in refusal(path)


@pytest.mark.parametrize("name", ["train.txt.gz", "train.txt", "a.json.gz", "a.json"])
def test_text_that_unpacks_to_more_than_fits_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.setattr(limits, "get_total_memory", lambda: 8 * 1000)
    opened = gzip.open if name.endswith(".gz") else open
    with opened(tmp_path / name, "wb") as file:
        file.write(b" " * 1001)
    path = tmp_path if name.startswith("train") else tmp_path / name
    assert "must fit into memory" in refusal(str(path))


def test_a_machine_has_memory():
    assert 2**28 < limits.get_total_memory() < 2**60
