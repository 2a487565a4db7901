"""The arithmetic of transforms: random draws, pixels by their coordinates, and colors."""

from __future__ import annotations

import torch
from torch import Tensor

LUMA = (0.2989, 0.587, 0.114)  # what red, green and blue add to the brightness of a pixel
BITS = 24  # of a number that is drawn to decide with a probability


def draw_uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draws numbers in [-1, 1)."""
    return 2 * torch.rand(shape, generator=generator, device=generator.device) - 1


def draw_events(p: float, count: int, generator: torch.Generator) -> Tensor:
    """Draws whether something happens, with probability ``p`` each.

    For 1/2 it happens as often and in the same cases as the bits that ``torch.randint(2)`` draws:
    the last bit of the number is taken as its first.
    """
    number = torch.randint(2**BITS, (count,), generator=generator, device=generator.device)
    number = (number >> 1) | ((number & 1) << (BITS - 1))
    return number.ge(round((1 - p) * 2**BITS))


def spread(values: Tensor, images: Tensor) -> Tensor:
    """One value per image, shaped so that it applies to all of the image's pixels."""
    return values.to(images.device).view(-1, 1, 1, 1)


def take_pixels(images: Tensor, pixels: Tensor) -> Tensor:
    """Takes pixels by their number in the image, for images of any type."""
    count, channels = images.shape[:2]
    flat = pixels.reshape(count, 1, -1).expand(-1, channels, -1)
    return images.flatten(2).gather(2, flat).view(count, channels, *pixels.shape[1:])


def take_nearest(images: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Takes the pixels that are nearest to the coordinates; 0 outside the images."""
    height, width = images.shape[-2:]
    rows, columns = y.round().long(), x.round().long()
    is_inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    pixels = rows.clamp(0, height - 1) * width + columns.clamp(0, width - 1)
    return take_pixels(images, pixels) * is_inside[:, None].to(images.dtype)


def turn_coordinates(degrees: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Where each pixel of a turned image comes from: rows and columns, (N, H, W) each."""
    radians = torch.deg2rad(degrees)[:, None, None]
    y = (torch.arange(height, device=degrees.device) - (height - 1) / 2)[:, None]
    x = torch.arange(width, device=degrees.device) - (width - 1) / 2
    cosine, sine = radians.cos(), radians.sin()
    return x * sine + y * cosine + (height - 1) / 2, x * cosine - y * sine + (width - 1) / 2


def blend(images: Tensor, others: Tensor, factors: Tensor) -> Tensor:
    """Mixes images with others: factor 1 keeps them, 0 takes the others; values stay in [0, 1]."""
    factors = spread(factors, images)
    return (factors * images + (1 - factors) * others).clamp(0, 1)


def to_gray(images: Tensor) -> Tensor:
    """The brightness of each pixel, as one channel."""
    if images.shape[1] != 3:
        return images.mean(1, keepdim=True)
    weights = images.new_tensor(LUMA).view(-1, 1, 1)
    return (images * weights).sum(1, keepdim=True)


def shift_hue(images: Tensor, shift: Tensor) -> Tensor:
    """Shifts the hue, with value and saturation as they are (the hexagon of HSV)."""
    red, green, blue = images.unbind(1)
    value, lowest = images.amax(1), images.amin(1)
    chroma = value - lowest
    divisor = torch.where(chroma > 0, chroma, 1)
    sector = torch.where(
        value == red,
        (green - blue) / divisor,
        torch.where(value == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    hue = sector + 6 * spread(shift, images)[:, 0]
    channels = []
    for number in (5, 3, 1):
        k = (number + hue) % 6
        channels.append(value - chroma * torch.minimum(k, 4 - k).clamp(0, 1))
    return torch.stack(channels, 1)


def compute_moments(channel: Tensor) -> tuple[float, float]:
    """Computes mean and standard deviation of uint8 values / 255, rounded to four digits."""
    # counting the 256 values is exact, and needs no float copy of the whole set
    count = torch.bincount(channel.flatten(), minlength=256).double()
    values = torch.arange(256, dtype=torch.float64) / 255
    mean = (count * values).sum() / count.sum()
    std = ((count * (values - mean).square()).sum() / count.sum()).sqrt()
    return round(mean.item(), 4), round(std.item(), 4) or 1.0
