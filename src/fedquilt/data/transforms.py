"""Transforms of images: frozen values with plain settings, and what they do to a batch.

A transform works on a whole batch, on the batch's device. What is random about it is drawn per
image, from the generator that is given, so the same seed gives the same images with any number of
workers. Images are floats in [0, 1], of shape (N, C, H, W), until ``Normalize`` shifts and scales
them.

>>> import torch, fedquilt as fq
>>> fq.transforms.Resize(4).apply(torch.rand(2, 3, 8, 8)).shape
torch.Size([2, 3, 4, 4])
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar, Literal, TypeAlias

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from fedquilt.data.pixels import (
    blend,
    compute_moments,
    draw_events,
    draw_uniform,
    shift_hue,
    take_nearest,
    take_pixels,
    to_gray,
    turn_coordinates,
)
from fedquilt.errors import DataError
from fedquilt.ranges import Count, NotNegative, Number, check_fields

Size: TypeAlias = Count | tuple[Count, Count]
Probability = Annotated[float, Field(ge=0, le=1)]
HalfTurn = Annotated[float, Field(ge=0, le=180)]
HalfCircle = Annotated[float, Field(ge=0, le=0.5)]


class Transform:
    """What all transforms have in common; inherit from it to write your own.

    ``draw`` draws what is random, one row per image. ``apply`` does the work. A geometric transform
    moves pixels. It is asked to move target images in the same way, without mixing their values.
    """

    is_random: ClassVar[bool] = False
    is_geometric: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuses settings that are not of their kind, if the transform is a dataclass."""
        check_fields(self)

    def draw(self, images: Tensor, generator: torch.Generator) -> Tensor | None:
        """Draws what is random for each of the images; None if nothing is."""
        return None

    def apply(
        self, images: Tensor, drawn: Tensor | None = None, *, is_target: bool = False
    ) -> Tensor:
        """Transforms the images as drawn; values of target images are moved and never mixed."""
        raise NotImplementedError

    def for_evaluation(self) -> Transform | None:
        """The transform that takes its place in evaluation, where nothing is random."""
        return None if self.is_random else self


@dataclass(frozen=True)
class Normalize(Transform):
    """Shift and scale per channel: (x - mean) / std for x in [0, 1]. It comes last in a chain.

    One mean and one standard deviation are for all channels.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        """Refuses settings that make no sense."""
        super().__post_init__()
        if len(self.mean) != len(self.std) or not all(std > 0 for std in self.std):
            raise DataError(
                "a normalization has a mean and a positive standard deviation for each channel, "
                f"got {self.mean} and {self.std}; give as many of each as there are channels"
            )

    @staticmethod
    def from_images(inputs: Tensor) -> Normalize:
        """Measures mean and standard deviation of uint8 images / 255, rounded to four digits.

        >>> Normalize.from_images(torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 1, 2))
        Normalize(mean=(0.5,), std=(0.5,))
        """
        if inputs.dtype != torch.uint8 or inputs.ndim != 4 or inputs.numel() == 0:
            raise DataError(
                "a normalization is measured on uint8 images (N, C, H, W), got "
                f"{inputs.dtype} with shape {tuple(inputs.shape)}; give mean and std yourself"
            )
        moments = [compute_moments(inputs[:, channel]) for channel in range(inputs.shape[1])]
        return Normalize(tuple(m for m, _ in moments), tuple(s for _, s in moments))

    def check_channels(self, channels: int) -> None:
        """Checks that images have the channels of the normalization."""
        if len(self.mean) not in (1, channels):
            raise DataError(
                f"the normalization has {len(self.mean)} channels but the images have "
                f"{channels}; give a mean and a standard deviation for each of them, or one for all"
            )

    def apply(
        self, images: Tensor, drawn: Tensor | None = None, *, is_target: bool = False
    ) -> Tensor:
        """Shifts and scales the images."""
        self.check_channels(images.shape[1])
        mean, std = (column.to(images.device) for column in self._columns)
        return (images - mean) / std

    @cached_property
    def _columns(self) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.mean).view(-1, 1, 1), torch.tensor(self.std).view(-1, 1, 1)


@dataclass(frozen=True)
class Resize(Transform):
    """Images of another size: one number for both sides, or (height, width).

    ``bilinear`` averages over the pixels that become one when an image shrinks (anti-aliasing), as
    Pillow does. ``nearest`` takes the pixel in the middle.
    """

    size: Size
    mode: Literal["bilinear", "nearest"] = "bilinear"

    is_geometric: ClassVar[bool] = True

    def apply(
        self, images: Tensor, drawn: Tensor | None = None, *, is_target: bool = False
    ) -> Tensor:
        """Resizes the images."""
        height, width = size = _to_pair(self.size)
        if size == tuple(images.shape[-2:]):
            return images
        if not is_target and self.mode == "bilinear":
            return functional.interpolate(images, size, mode="bilinear", antialias=True)
        rows, columns = (
            ((torch.arange(new) + 0.5) * (old / new)).long().clamp_(max=old - 1).to(images.device)
            for old, new in zip(images.shape[-2:], (height, width), strict=True)
        )
        return images.index_select(-2, rows).index_select(-1, columns)


@dataclass(frozen=True)
class CenterCrop(Transform):
    """The middle of each image: one number for both sides, or (height, width)."""

    size: Size

    is_geometric: ClassVar[bool] = True

    def apply(
        self, images: Tensor, drawn: Tensor | None = None, *, is_target: bool = False
    ) -> Tensor:
        """Cuts out the middle; of an odd border the larger part is at the bottom and the right."""
        height, width = size = _to_pair(self.size)
        _check_room(self, size, images, padding=0)
        top, left = ((old - new) // 2 for old, new in zip(images.shape[-2:], size, strict=True))
        return images[..., top : top + height, left : left + width]


@dataclass(frozen=True)
class RandomCrop(Transform):
    """A random part of each image, after its border was padded with zeros.

    Args:
        size: The size of the part; None: that of the image, which is shifted then.
        padding: The pixels of zeros that are added on each side.
    """

    size: Size | None = None
    padding: Number = 0

    is_random: ClassVar[bool] = True
    is_geometric: ClassVar[bool] = True

    def for_evaluation(self) -> Transform | None:
        """The middle of the image, if the part has a size."""
        return None if self.size is None else CenterCrop(self.size)

    def draw(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Draws the first row and the first column of each part."""
        size = self._get_size(images)
        _check_room(self, size, images, self.padding)
        top, left = (
            torch.randint(
                old + 2 * self.padding - new + 1,
                (len(images),),
                generator=generator,
                device=generator.device,
            )
            for old, new in zip(images.shape[-2:], size, strict=True)
        )
        return torch.stack([top, left], 1)

    def apply(
        self, images: Tensor, drawn: Tensor | None = None, *, is_target: bool = False
    ) -> Tensor:
        """Cuts out the parts that start as drawn."""
        if drawn is None:
            return images
        height, width = self._get_size(images)
        top, left = drawn.to(images.device).unbind(1)
        padded = functional.pad(images, (self.padding,) * 4)
        rows = top[:, None] + torch.arange(height, device=images.device)
        columns = left[:, None] + torch.arange(width, device=images.device)
        pixels = rows[:, :, None] * padded.shape[-1] + columns[:, None, :]  # (N, H, W)
        return take_pixels(padded, pixels)

    def _get_size(self, images: Tensor) -> tuple[int, int]:
        height, width = images.shape[-2:]
        return (height, width) if self.size is None else _to_pair(self.size)


@dataclass(frozen=True)
class _Flip(Transform):
    p: Probability = 0.5

    is_random: ClassVar[bool] = True
    is_geometric: ClassVar[bool] = True
    axis: ClassVar[int]

    def draw(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Draws which images are mirrored."""
        return draw_events(self.p, len(images), generator)

    def apply(
        self, images: Tensor, drawn: Tensor | None = None, *, is_target: bool = False
    ) -> Tensor:
        """Mirrors the images that were drawn."""
        if drawn is None:
            return images
        rows = drawn.nonzero().flatten().to(images.device)
        return images.index_copy(0, rows, images.index_select(0, rows).flip(self.axis))


@dataclass(frozen=True)
class HorizontalFlip(_Flip):
    """Mirrors each image, left to right, with probability ``p``."""

    axis: ClassVar[int] = -1


@dataclass(frozen=True)
class VerticalFlip(_Flip):
    """Mirrors each image, top to bottom, with probability ``p``."""

    axis: ClassVar[int] = -2


@dataclass(frozen=True)
class Rotation(Transform):
    """Turns each image around its middle by a random angle in [-degrees, degrees].

    A positive angle is counterclockwise. Pixels are interpolated bilinearly. What comes from
    outside the image has the value ``fill``, and 0 in target images.
    """

    degrees: HalfTurn
    fill: float = 0.0

    is_random: ClassVar[bool] = True
    is_geometric: ClassVar[bool] = True

    def draw(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Draws an angle for each image, in degrees."""
        return self.degrees * draw_uniform((len(images),), generator)

    def apply(
        self, images: Tensor, drawn: Tensor | None = None, *, is_target: bool = False
    ) -> Tensor:
        """Turns the images by the angles that were drawn."""
        if drawn is None or self.degrees == 0:
            return images
        height, width = images.shape[-2:]
        y, x = turn_coordinates(drawn.to(images.device), height, width)
        if is_target:
            return take_nearest(images, y, x)
        grid = torch.stack([(2 * x + 1) / width - 1, (2 * y + 1) / height - 1], -1)
        turned = functional.grid_sample(images - self.fill, grid, align_corners=False)
        return turned + self.fill


@dataclass(frozen=True)
class ColorJitter(Transform):
    """Random brightness, contrast, saturation and hue of each image, in this order.

    The first three are blended with black, with the mean gray of the image, and with its gray
    version, by a factor drawn from [1 - setting, 1 + setting] (never below 0). Hue is shifted by a
    number in [-hue, hue], where 1 is the whole circle. Values stay in [0, 1].
    """

    brightness: NotNegative = 0.0
    contrast: NotNegative = 0.0
    saturation: NotNegative = 0.0
    hue: HalfCircle = 0.0

    is_random: ClassVar[bool] = True

    def draw(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Draws three factors and a shift of the hue for each image."""
        reach = torch.tensor([self.brightness, self.contrast, self.saturation, self.hue])
        start = torch.tensor([1.0, 1.0, 1.0, 0.0])
        uniform = draw_uniform((len(images), 4), generator)
        drawn = start.to(uniform.device) + reach.to(uniform.device) * uniform
        return torch.cat([drawn[:, :3].clamp(min=0), drawn[:, 3:]], 1)

    def apply(
        self, images: Tensor, drawn: Tensor | None = None, *, is_target: bool = False
    ) -> Tensor:
        """Changes the colors as drawn."""
        if self.saturation or self.hue:
            _check_colors(self, images)
        if drawn is None:
            return images
        brightness, contrast, saturation, hue = drawn.to(images.device).unbind(1)
        if self.brightness:
            images = blend(images, torch.zeros_like(images), brightness)
        if self.contrast:
            images = blend(images, to_gray(images).mean((1, 2, 3), keepdim=True), contrast)
        if self.saturation:
            images = blend(images, to_gray(images), saturation)
        return shift_hue(images, hue) if self.hue else images


@dataclass(frozen=True)
class Grayscale(Transform):
    """Color images in gray, with one channel or with three equal ones."""

    channels: Literal[1, 3] = 1

    def apply(
        self, images: Tensor, drawn: Tensor | None = None, *, is_target: bool = False
    ) -> Tensor:
        """Takes the brightness of each pixel."""
        return to_gray(images).expand(-1, self.channels, -1, -1)


@dataclass(frozen=True)
class ToRGB(Transform):
    """Gray images with three equal channels; color images stay as they are."""

    def apply(
        self, images: Tensor, drawn: Tensor | None = None, *, is_target: bool = False
    ) -> Tensor:
        """Repeats the only channel."""
        if images.shape[1] == 1:
            return images.expand(-1, 3, -1, -1)
        _check_colors(self, images)
        return images


TRANSFORMS: dict[str, type[Transform]] = {
    kind.__name__: kind
    for kind in (
        CenterCrop,
        ColorJitter,
        Grayscale,
        HorizontalFlip,
        Normalize,
        RandomCrop,
        Resize,
        Rotation,
        ToRGB,
        VerticalFlip,
    )
}


def _to_pair(size: Size) -> tuple[int, int]:
    return size if isinstance(size, tuple) else (size, size)


def _check_room(transform: Transform, size: tuple[int, int], images: Tensor, padding: int) -> None:
    height, width = images.shape[-2:]
    if size[0] > height + 2 * padding or size[1] > width + 2 * padding:
        raise DataError(
            f"{transform!r} needs images of at least its size, got {height}x{width}; "
            "use a smaller size, more padding, or Resize before it"
        )


def _check_colors(transform: Transform, images: Tensor) -> None:
    if images.shape[1] != 3:
        raise DataError(
            f"{transform!r} needs color images with three channels, got {images.shape[1]}; "
            "leave it out, or put ToRGB before it"
        )
