"""The layers of the library as a picture, from the contract that the tests enforce."""

from __future__ import annotations

from draw_layers import read_layers

ROW, WIDTH = 34, 640


def draw_layers() -> str:
    """The packages of each layer in a row, as SVG; a row may import from those below it."""
    layers = read_layers()
    parts = []
    for row, names in enumerate(layers):
        width = WIDTH / len(names)
        for column, name in enumerate(names):
            x, y = column * width + 3, row * ROW + 3
            parts.append(
                f'<rect x="{x:g}" y="{y}" width="{width - 6:g}" height="{ROW - 6}" rx="4"/>'
                f'<text x="{x + width / 2 - 3:g}" y="{y + 19}">{name}</text>'
            )
    height = ROW * len(layers)
    style = "rect{fill:#e8eef7;stroke:#4a6fa5}"
    style += "text{font:14px sans-serif;text-anchor:middle;fill:#1b2a41}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
        f"<title>Layers</title><style>{style}</style>{''.join(parts)}</svg>\n"
    )
