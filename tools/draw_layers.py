"""Draws the layers contract of pyproject.toml into docs/architecture.md, between two markers.

Run ``python tools/draw_layers.py`` after you change the contract. A test compares the two.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from importlinter.api import read_configuration

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
START, END = "<!-- layers: drawn by tools/draw_layers.py -->\n", "<!-- end of layers -->\n"


def read_layers(pyproject: Path = ROOT / "pyproject.toml") -> list[list[str]]:
    """The packages of each layer of the contract, from the top to the bottom."""
    contracts = read_configuration(str(pyproject))["contracts_options"]
    (contract,) = (one for one in contracts if one["type"] == "layers")
    return [[name.strip(" ()") for name in layer.split("|")] for layer in contract["layers"]]


def draw_layers(layers: list[list[str]]) -> str:
    """The layers as a Mermaid flowchart: each may import those below it.

    >>> print(draw_layers([["cli"], ["runs"], ["files", "ranges"]]))
    ```mermaid
    flowchart TD
        cli --> runs
        runs --> files & ranges
    ```
    <BLANKLINE>
    """
    rows = [" & ".join(layer) for layer in layers]
    arrows = (f"    {upper} --> {lower}" for upper, lower in pairwise(rows))
    return "\n".join(["```mermaid", "flowchart TD", *arrows, "```", ""])


def update_page(text: str, drawing: str) -> str:
    """The page with another drawing between its markers."""
    before, _, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"the page needs the lines {START!r} and {END!r}")
    return f"{before}{START}\n{drawing}\n{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(update_page(PAGE.read_text(), draw_layers(read_layers())))
