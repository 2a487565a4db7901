"""From raw inputs to inputs of a model: conversion to floats, normalization, augmentation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from fedquilt.errors import DataError

AUGMENTS = ("none", "crop-flip")
PADDING = 4  # pixels by which an image may be shifted
COMPACT = (torch.int8, torch.int16, torch.int32)  # types in which tokens may be stored


@dataclass(frozen=True)
class Normalization:
    """Shift and scale per channel: (x - mean) / std for x in [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @staticmethod
    def from_images(inputs: Tensor) -> Normalization:
        """Measures mean and standard deviation of uint8 images / 255, rounded to four digits.

        >>> Normalization.from_images(torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 1, 2))
        Normalization(mean=(0.5,), std=(0.5,))
        """
        if inputs.dtype != torch.uint8 or inputs.ndim != 4 or inputs.numel() == 0:
            raise DataError(
                "a normalization is measured on uint8 images (N, C, H, W), got "
                f"{inputs.dtype} with shape {tuple(inputs.shape)}; give mean and std yourself"
            )
        moments = [_compute_moments(inputs[:, channel]) for channel in range(inputs.shape[1])]
        return Normalization(tuple(m for m, _ in moments), tuple(s for _, s in moments))

    def __call__(self, images: Tensor) -> Tensor:
        """Shifts and scales the images."""
        mean, std = self._columns
        return (images - mean) / std

    @cached_property
    def _columns(self) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.mean).view(-1, 1, 1), torch.tensor(self.std).view(-1, 1, 1)


def _compute_moments(channel: Tensor) -> tuple[float, float]:
    # counting the 256 values is exact, and needs no float copy of the whole set
    count = torch.bincount(channel.flatten(), minlength=256).double()
    values = torch.arange(256, dtype=torch.float64) / 255
    mean = (count * values).sum() / count.sum()
    std = ((count * (values - mean).square()).sum() / count.sum()).sqrt()
    return round(mean.item(), 4), round(std.item(), 4) or 1.0


def convert_for_models(raw: Tensor) -> Tensor:
    """Converts pixels to floats in [0, 1] and tokens to int64."""
    if raw.dtype in COMPACT:
        return raw.long()
    return raw.float().div_(255) if raw.dtype == torch.uint8 else raw


def crop_and_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shifts each image by up to four pixels, and mirrors it with probability 1/2."""
    count, channels, height, width = images.shape
    top = torch.randint(2 * PADDING + 1, (count, 1), generator=generator)
    left = torch.randint(2 * PADDING + 1, (count, 1), generator=generator)
    mirrored = torch.randint(2, (count, 1), generator=generator).bool()
    columns = torch.arange(width).expand(count, -1)
    columns = left + torch.where(mirrored, columns.flip(1), columns)
    rows = top + torch.arange(height)
    padded = functional.pad(images, (PADDING,) * 4)
    pixels = rows[:, :, None] * (width + 2 * PADDING) + columns[:, None, :]  # (N, H, W)
    flat = pixels.view(count, 1, -1).expand(-1, channels, -1)
    return padded.flatten(2).gather(2, flat).view_as(images)
