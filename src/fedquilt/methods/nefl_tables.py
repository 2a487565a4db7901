"""The submodels of NeFL's tables, which ``NeFL(table=...)`` uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedquilt.errors import ConfigError, describe_unknown

SIZES = (0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True)
class Row:
    """A line of NeFL's tables: γ_W, γ_D as printed, and the blocks of each stage (1: kept).

    ``is_restored``: the line is damaged in the text of the paper that we have, or contradicts its
    γ_D; its blocks and γ_W are those of the authors' public code.
    """

    size: float
    width: float  # γ_W
    depth: float  # γ_D
    blocks: str
    is_restored: bool = False


def _rows(*rows: tuple[float, float, float, str], restored: Sequence[int] = ()) -> tuple[Row, ...]:
    return tuple(Row(*row, is_restored=i in restored) for i, row in enumerate(rows))


def _first(*kept: int, of: Sequence[int]) -> str:
    return " ".join("1" * k + "0" * (n - k) for k, n in zip(kept, of, strict=True))


def _ends(first: int, of: Sequence[int]) -> str:
    """The first blocks of each stage and its last one (ResNet110, Table 14)."""
    return " ".join("1" * first + "0" * (n - first - 1) + "1" for n in of)


_R18, _R34, _R56, _R110 = (2, 2, 2, 2), (3, 4, 6, 3), (9, 9, 9), (18, 18, 18)
_WRN101, _VIT = (3, 4, 23, 3), (12,)

TABLES: Mapping[tuple[str, str], tuple[Row, ...]] = {
    # Table 10; its second row of D, 10 00 10 10 (γ_D 0.42), contradicts its γ_D and Table 8, whose
    # 6.68 M parameters and 102 M MACs on average the row of the code gives
    ("resnet18", "D"): _rows(
        (0.2, 1, 0.20, "11 00 11 00"),
        (0.4, 1, 0.38, "11 11 00 10"),
        (0.6, 1, 0.57, "11 11 11 10"),
        (0.8, 1, 0.81, "10 11 00 11"),
        (1.0, 1, 1, "11 11 11 11"),
        restored=(1,),
    ),
    ("resnet18", "WD"): _rows(
        (0.2, 0.34, 0.58, "11 11 11 10"),
        (0.4, 0.4, 1, "11 11 11 11"),
        (0.6, 0.6, 1, "11 11 11 11"),
        (0.8, 0.8, 1, "11 11 11 11"),
        (1.0, 1, 1, "11 11 11 11"),
    ),
    # Table 11
    ("resnet34", "D"): _rows(
        (0.2, 1, 0.23, "100 1000 100000 100"),
        (0.4, 1, 0.39, "111 1111 110001 100"),
        (0.6, 1, 0.61, "111 1111 110001 101"),
        (0.8, 1, 0.81, "111 1001 110001 111"),
        (1.0, 1, 1, "111 1111 111111 111"),
    ),
    ("resnet34", "WD"): _rows(
        (0.2, 0.38, 0.53, "111 1001 100001 101"),
        (0.4, 0.63, 0.64, "111 1001 111001 101"),
        (0.6, 0.77, 0.78, "111 1111 111101 101"),
        (0.8, 0.90, 0.89, "111 1111 111001 111"),
        (1.0, 1, 1, "111 1111 111111 111"),
    ),
    # Table 12
    ("resnet56", "D"): _rows(
        (0.2, 1, 0.2, _first(2, 2, 2, of=_R56)),
        (0.4, 1, 0.4, _first(3, 3, 4, of=_R56)),
        (0.6, 1, 0.6, _first(4, 4, 6, of=_R56)),
        (0.8, 1, 0.8, _first(9, 8, 7, of=_R56)),
        (1.0, 1, 1, _first(*_R56, of=_R56)),
    ),
    ("resnet56", "WD"): _rows(
        (0.2, 0.46, 0.43, _first(4, 4, 4, of=_R56)),
        (0.4, 0.61, 0.66, _first(6, 6, 6, of=_R56)),
        (0.6, 0.77, 0.77, _first(7, 7, 7, of=_R56)),
        (0.8, 0.90, 0.89, _first(8, 8, 8, of=_R56)),
        (1.0, 1, 1, _first(*_R56, of=_R56)),
    ),
    # Table 13
    ("vit-b16", "D"): _rows(
        (0.5, 1, 0.5, _first(6, of=_VIT)),
        (0.75, 1, 0.75, _first(9, of=_VIT)),
        (1.0, 1, 1, _first(12, of=_VIT)),
    ),
    ("vit-b16", "W"): _rows(
        (0.5, 0.5, 1, _first(12, of=_VIT)),
        (0.75, 0.75, 1, _first(12, of=_VIT)),
        (1.0, 1, 1, _first(12, of=_VIT)),
    ),
    # Table 14; in WD the code keeps the first blocks, and as many as are printed with the last one
    ("resnet110", "D"): _rows(
        (0.2, 1, 0.20, _first(16, 4, 3, of=_R110)),
        (0.4, 1, 0.40, _first(14, 7, 7, of=_R110)),
        (0.6, 1, 0.60, _first(17, 13, 10, of=_R110)),
        (0.8, 1, 0.80, _first(16, 16, 14, of=_R110)),
        (1.0, 1, 1, _first(*_R110, of=_R110)),
        restored=(0, 1, 2, 3),
    ),
    ("resnet110", "WD"): _rows(
        (0.2, 0.46, 0.44, _ends(7, _R110)),
        (0.4, 0.60, 0.66, _ends(11, _R110)),
        (0.6, 0.77, 0.77, _ends(13, _R110)),
        (0.8, 0.90, 0.89, _ends(15, _R110)),
        (1.0, 1, 1, _first(*_R110, of=_R110)),
        restored=(0, 2, 3),
    ),
    ("resnet110", "D small"): _rows(
        (0.04, 1, 0.04, _first(1, 1, 1, of=_R110)),
        (0.16, 1, 0.16, _first(5, 3, 3, of=_R110)),
        (0.36, 1, 0.37, _first(6, 6, 7, of=_R110)),
        (0.64, 1, 0.65, _first(11, 11, 12, of=_R110)),
        (1.0, 1, 1, _first(*_R110, of=_R110)),
        restored=(1, 2, 3),
    ),
    ("resnet110", "WD small"): _rows(
        (0.04, 0.188, 0.21, _first(4, 4, 4, of=_R110)),
        (0.16, 0.366, 0.44, _first(8, 8, 8, of=_R110)),
        (0.36, 0.594, 0.61, _first(11, 11, 11, of=_R110)),
        (0.64, 0.770, 0.83, _first(15, 15, 15, of=_R110)),
        (1.0, 1, 1, _first(*_R110, of=_R110)),
        restored=(0, 1, 2, 3),
    ),
    # Table 15, of which the text has three stages of the first row
    ("wideresnet101-2", "D"): _rows(
        (0.5, 1, 0.51, _first(3, 4, 9, 2, of=_WRN101)),
        (0.75, 1, 0.75, _first(3, 4, 14, 3, of=_WRN101)),
        (1.0, 1, 1, _first(*_WRN101, of=_WRN101)),
        restored=(0, 1),
    ),
}


def get_table(name: str, scaling: str) -> tuple[Row, ...]:
    """The rows of NeFL's table for a net: ``D``, ``WD``, or ``W``, which scales all alike.

    ``D small`` and so on are those of γ = 0.04 ... 1 (ResNet110, Table 9).
    """
    if scaling in ("W", "W small") and (name, scaling) not in TABLES:
        whole = TABLES[_require_known(name, scaling.replace("W", "D"))]
        return tuple(Row(row.size, row.size, 1, whole[-1].blocks) for row in whole)
    return TABLES[_require_known(name, scaling)]


def _require_known(name: str, scaling: str) -> tuple[str, str]:
    nets = sorted({net for net, _ in TABLES})
    if name not in nets:
        raise ConfigError(describe_unknown("table of NeFL", name, nets))
    if (name, scaling) not in TABLES:
        known = {"W", *(kind for net, kind in TABLES if net == name)}
        raise ConfigError(describe_unknown(f"scaling in NeFL's table of {name}", scaling, known))
    return name, scaling
