"""Which cells of a net a client holds, as grids, and the grids as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import torch
from torch import Tensor

from fedquilt.structure.cut import index_cells, write_cells
from fedquilt.structure.structure import Structure
from fedquilt.structure.subnet import Subnet

CELL, GAP, LABEL, TOP = 6, 10, 118, 34
LOCAL, SENT = "local", "sent"
COLORS = {
    "": "#e4e7ec",
    "1": "#9cc0ea",
    "2": "#4f8bd0",
    "3": "#1d4f91",
    LOCAL: "#e8a33d",
    SENT: "#1d4f91",
}

Grid = tuple[tuple[str, ...], ...]  # the class of each cell of a matrix, by rows
Net = Mapping[str, Grid]  # the matrices of a net by name


@dataclass(frozen=True)
class Panel:
    """What one client has in one round: a net, or several with names."""

    nets: tuple[Net, ...]
    names: tuple[str, ...] = ()


def mark_cells(structure: Structure, subnets: Sequence[Subnet], shown: Sequence[str]) -> Net:
    """The matrices of a net, each cell with the number of subnets that hold it.

    Kernels count as one cell: a matrix has a row for each output channel, a column for each input.
    """
    counts = {name: torch.zeros(structure.shapes[name], dtype=torch.int64) for name in shown}
    for subnet in subnets:
        cells = index_cells(structure, subnet.shape)
        for name in set(shown) & set(cells):
            held = torch.zeros(structure.shapes[name], dtype=torch.bool)
            write_cells(held, cells[name], True)
            counts[name] += held
    return {name: to_grid(count) for name, count in counts.items()}


def to_grid(counts: Tensor) -> Grid:
    """Numbers as classes of cells, the largest of each kernel."""
    flat = counts.reshape(*counts.shape[:2], -1).amax(2)
    return tuple(tuple(str(min(n, 3)) if n else "" for n in row) for row in flat.tolist())


def mark_matrix(grid: Grid, kind: str) -> Grid:
    """A matrix whose held cells are of one class."""
    return tuple(tuple(kind if cell else "" for cell in row) for row in grid)


def draw_picture(
    rows: Mapping[str, Sequence[Panel]], heads: Sequence[str], legend: Mapping[str, str]
) -> str:
    """An SVG: a row for each client, a column for each round.

    Args:
        rows: The panels of each client, by its label.
        heads: What stands above the columns.
        legend: What the classes of cells mean.
    """
    widths = [max(measure(panels[c])[0] for panels in rows.values()) for c in range(len(heads))]
    starts = [LABEL + sum(widths[:c]) + 3 * GAP * c for c in range(len(heads))]
    parts, y = [], TOP
    for x, head in zip(starts, heads, strict=True):
        parts.append(write(head, x, 16, "head"))
    names = label_matrices(next(iter(rows.values()))[0])
    parts += [write(label, start + x, 29, "small") for start in starts for label, x in names]
    for label, panels in rows.items():
        height = max(measure(panel)[1] for panel in panels)
        parts.append(write(label, 8, y + height / 2 + 4, "label"))
        parts += [draw_panel(panel, x, y) for panel, x in zip(panels, starts, strict=True)]
        y += height + 2 * GAP
    x = LABEL
    for kind, meaning in legend.items():
        parts.append(f'<rect x="{x}" y="{y}" width="10" height="10" fill="{COLORS[kind]}"/>')
        parts.append(write(meaning, x + 15, y + 9, "small"))
        x += 30 + 6 * len(meaning)
    width = max(starts[-1] + widths[-1], x) + GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + 20}" width="{width}">'
        "<style>text{font-family:sans-serif;fill:#1b2a41}.head{font-size:12px;font-weight:bold}"
        ".label{font-size:12px}.small{font-size:9.5px}"
        f"path{{stroke-width:{CELL - 1};stroke-dasharray:{CELL - 1} 1}}</style>"
        f'<rect width="100%" height="100%" rx="6" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def write(text: str, x: float, y: float, kind: str) -> str:
    """A text of the picture."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>'


def measure(panel: Panel) -> tuple[int, int]:
    """The width and height of a panel: nets of several matrices stand beside one another."""
    height = max(len(g) * CELL for net in panel.nets for g in net.values())
    return list_starts(panel)[-1], height


def list_starts(panel: Panel) -> list[int]:
    """Where each matrix of a panel starts, and where the last one ends."""
    starts = [0]
    for net in panel.nets:
        for name, grid in net.items():
            label = 0 if len(panel.nets) > 1 else 6 * len(shorten(name))
            starts.append(starts[-1] + max(len(grid[0]) * CELL, label) + GAP)
        starts[-1] += GAP * (len(panel.nets) > 1)
    return starts


def label_matrices(panel: Panel) -> list[tuple[str, int]]:
    """What stands above matrices, and where: their names, or those of nets if there are several."""
    starts = list_starts(panel)
    if panel.names:
        sizes = [len(net) for net in panel.nets]
        return [(name, starts[sum(sizes[:n])]) for n, name in enumerate(panel.names)]
    return list(zip(map(shorten, panel.nets[0]), starts, strict=False))


def shorten(name: str) -> str:
    """The name of a matrix as readers see it.

    >>> shorten("net.block.0.conv.weight")
    'block 0'
    """
    short = name.removesuffix(".weight").removesuffix(".conv").removesuffix(".classifier")
    return short.removeprefix("net.").removeprefix("heads.").replace(".", " ")


def draw_panel(panel: Panel, x: int, y: int) -> str:
    """The matrices of a panel, one path for each class of cells."""
    paths: dict[str, list[str]] = {}
    grids = [grid for net in panel.nets for grid in net.values()]
    for left, grid in zip(list_starts(panel), grids, strict=False):
        for row, cells in enumerate(grid):
            for kind, start, count in find_stretches(cells):
                line = f"M{x + left + start * CELL} {y + row * CELL + CELL / 2:g}"
                paths.setdefault(kind, []).append(f"{line}h{count * CELL - 1}")
    lines = paths.items()  # dashes of a line are its cells
    return "".join(f'<path stroke="{COLORS[kind]}" d="{"".join(d)}"/>' for kind, d in lines)


def find_stretches(cells: Sequence[str]) -> list[tuple[str, int, int]]:
    """Neighbors of one class: the class, the first of them, their number.

    >>> find_stretches(["1", "1", "", "1"])
    [('1', 0, 2), ('', 2, 1), ('1', 3, 1)]
    """
    stretches: list[tuple[str, int, int]] = []
    for position, kind in enumerate(cells):
        if stretches and stretches[-1][0] == kind:
            kind, start, count = stretches.pop()
            stretches.append((kind, start, count + 1))
        else:
            stretches.append((kind, position, 1))
    return stretches
