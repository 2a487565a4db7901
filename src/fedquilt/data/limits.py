"""What a file may unpack to: a small one can hold, or claim, more than a machine has room for."""

from __future__ import annotations

import gzip
import math
import os
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path

from numpy.lib import format as npy

from fedquilt.errors import DataError

UNKNOWN_MEMORY = 64 * 2**30  # bytes, where the system does not tell
SHARE_OF_TEXT = 8  # text takes many times its length once it is parsed
HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def memory() -> int:
    """Bytes of memory that this machine has."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return UNKNOWN_MEMORY


def read_text(file: Path, kind: str) -> str:
    """The text in a file, which may be compressed, if it fits into memory."""
    opened = gzip.open if file.name.endswith(".gz") else open
    most = memory() // SHARE_OF_TEXT
    try:
        with opened(file, "rb") as content:
            data = content.read(most + 1)
        if len(data) > most:
            raise DataError(
                f"a file of text must fit into memory, '{file}' has more than {_size(most)}; "
                "divide it, or read it yourself and pass tensors"
            )
        return data.decode("utf-8")
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise DataError(
            f"'{file}' is not {kind} ({type(error).__name__}); fetch it again"
        ) from error


def check_arrays(file: Path, archive: zipfile.ZipFile, names: Iterable[str]) -> None:
    """Refuses arrays that are not as long as their headers say, or do not fit into memory."""
    infos = [archive.getinfo(f"{name}.npy") for name in names]
    total, most = sum(info.file_size for info in infos), memory()
    if total > most:
        raise DataError(
            f"the arrays of an .npz file must fit into memory, those of '{file}' take "
            f"{_size(total)} and this machine has {_size(most)}; keep fewer examples in it"
        )
    for info in infos:
        with archive.open(info) as member:
            shape, _, dtype = HEADERS[npy.read_magic(member)](member)
            claimed, there = math.prod(shape) * dtype.itemsize, info.file_size - member.tell()
        if claimed != there and not dtype.hasobject:
            raise DataError(
                f"an array must be as long as its header says, '{info.filename}' in '{file}' has "
                f"{there} bytes and should have {claimed}; write it again with numpy.savez"
            )


def _size(count: int) -> str:
    """Bytes for people.

    >>> _size(3 * 2**29)
    '1.5 GiB'
    """
    return f"{count / 2**30:.3g} GiB"
