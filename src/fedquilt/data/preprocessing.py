"""From raw inputs to inputs of a model: conversion to the types that models take."""

from __future__ import annotations

import torch
from torch import Tensor

COMPACT = (torch.int8, torch.int16, torch.int32)  # types in which tokens may be stored


def convert_for_models(raw: Tensor) -> Tensor:
    """Converts pixels to floats in [0, 1] and tokens to int64."""
    if raw.dtype in COMPACT:
        return raw.long()
    return raw.float().div_(255) if raw.dtype == torch.uint8 else raw
