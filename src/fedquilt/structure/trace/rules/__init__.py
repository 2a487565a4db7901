"""How each tensor operation carries channels from its inputs to its outputs.

One small rule per ATen operation, by name; everything PyTorch computes is made of these. A rule
gets the call, ties what the operation makes inseparable, and returns the labels of its outputs. An
operation without a rule raises an error that names it.

To support another operation, decorate a function with ``register_rule`` in the file of its family.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import torch

from fedquilt.structure.dispatch import get_base_name
from fedquilt.structure.trace.rules.pointwise import tie_pointwise
from fedquilt.structure.trace.rules.registry import RULES, Rule

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)  # each file registers its rules


def find_rule(func: Any) -> Rule | None:
    """The rule of an ATen overload: by name, or the pointwise one if PyTorch tags it so."""
    name = get_base_name(func)
    if name in RULES:
        return RULES[name]
    packet = getattr(torch.ops.aten, name, None)  # an in-place form has no tag of its own
    overloads = [] if packet is None else [getattr(packet, o) for o in packet.overloads()]
    tagged = any(torch.Tag.pointwise in f.tags for f in (func, *overloads))
    return tie_pointwise if tagged else None
