"""Limits on what a file may unpack to: a small file can unpack to more than the memory."""

from __future__ import annotations

import gzip
import math
import os
import sys
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path

from numpy.lib import format as npy

from fedquilt.errors import DataError

UNKNOWN_MEMORY = 64 * 2**30  # bytes, assumed where the system does not report it
TEXT_MEMORY_FACTOR = 8  # text takes many times its length once it is parsed
HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def get_total_memory() -> int:
    """Gets the bytes of memory that this machine has."""
    if sys.platform == "win32":
        return UNKNOWN_MEMORY
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return UNKNOWN_MEMORY


def read_text(file: Path, kind: str) -> str:
    """Reads a text file, which may be compressed; it must fit into memory."""
    open_file = gzip.open if file.name.endswith(".gz") else open
    limit = get_total_memory() // TEXT_MEMORY_FACTOR
    try:
        with open_file(file, "rb") as content:
            data = content.read(limit + 1)
        if len(data) > limit:
            raise DataError(
                f"a file of text must fit into memory, '{file}' has more than "
                f"{_format_size(limit)}; divide it, or read it yourself and pass tensors"
            )
        return data.decode("utf-8")
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise DataError(
            f"'{file}' is not {kind} ({type(error).__name__}); fetch it again"
        ) from error


def check_headers(file: Path, archive: zipfile.ZipFile, names: Iterable[str]) -> None:
    """Checks that arrays are as long as their headers say, and fit into memory."""
    infos = [archive.getinfo(f"{name}.npy") for name in names]
    total, limit = sum(info.file_size for info in infos), get_total_memory()
    if total > limit:
        raise DataError(
            f"the arrays of an .npz file must fit into memory, those of '{file}' take "
            f"{_format_size(total)} and this machine has {_format_size(limit)}; keep fewer "
            "examples in it"
        )
    for info in infos:
        with archive.open(info) as member:
            shape, _, dtype = HEADERS[npy.read_magic(member)](member)
            claimed, actual = math.prod(shape) * dtype.itemsize, info.file_size - member.tell()
        if claimed != actual and not dtype.hasobject:
            raise DataError(
                f"an array must be as long as its header says, '{info.filename}' in '{file}' has "
                f"{actual} bytes and should have {claimed}; write it again with numpy.savez"
            )


def _format_size(count: int) -> str:
    """Formats a number of bytes.

    >>> _format_size(3 * 2**29)
    '1.5 GiB'
    """
    return f"{count / 2**30:.3g} GiB"
