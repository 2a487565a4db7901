"""Style sheets and scripts that are part of the package; pages load nothing from other hosts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files

CONTENT_TYPES = {"css": "text/css", "js": "text/javascript", "html": "text/html"}


@cache
def read_asset(package: str, name: str) -> str:
    """The text of a file in the folder ``static`` of a package.

    >>> read_asset("fedquilt.web", "theme.css").startswith("/*")
    True
    """
    return files(package).joinpath("static", name).read_text(encoding="utf-8")


def collect_assets(*assets: tuple[str, str]) -> Mapping[str, tuple[bytes, str]]:
    """The contents and content types of files by their names, ready to be sent."""
    return {
        name: (
            read_asset(package, name).encode(),
            f"{CONTENT_TYPES[name.rpartition('.')[2]]}; charset=utf-8",
        )
        for package, name in assets
    }
