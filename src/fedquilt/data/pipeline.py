"""Chains of transforms: what images go through, in training and in evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from fedquilt.data.transforms import (
    TRANSFORMS,
    ColorJitter,
    HorizontalFlip,
    Normalize,
    RandomCrop,
    Transform,
)
from fedquilt.errors import DataError, describe_unknown
from fedquilt.user_code import parse_call

AnyTransform: TypeAlias = Transform | str | Callable[[Tensor], Tensor]
Chain: TypeAlias = tuple[Transform, ...]

SHIFT = RandomCrop(padding=4)
AUGMENTATIONS: Mapping[str, Chain] = {  # chains that have a name
    "none": (),
    "flip": (HorizontalFlip(),),
    "crop": (SHIFT,),
    "crop-flip": (SHIFT, HorizontalFlip()),
    "crop-jitter": (  # NeFL, Appendix B.2, for SVHN: digits are not mirrored
        RandomCrop(padding=2),
        ColorJitter(brightness=63 / 255, contrast=0.8, saturation=0.5),
    ),
}


@dataclass(frozen=True, repr=False)
class PerImage(Transform):
    """A function of one image (C, H, W), such as a transform of ``torchvision.transforms.v2``.

    It is applied image by image. What it draws from PyTorch's default generator follows the
    batch's generator. It may move pixels, so it is not used where targets are images.
    """

    function: Callable[[Tensor], Tensor]

    is_random: ClassVar[bool] = True  # whether it is cannot be seen
    is_geometric: ClassVar[bool] = True

    def __repr__(self) -> str:
        return f"PerImage({getattr(self.function, '__name__', type(self.function).__name__)})"

    def draw(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Draws the seed of PyTorch's default generator."""
        return torch.randint(2**62, (1,), generator=generator, device=generator.device)

    def apply(
        self, images: Tensor, drawn: Tensor | None = None, *, is_target: bool = False
    ) -> Tensor:
        """Applies the function to one image after another."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0 if drawn is None else int(drawn.item()))
            results = [self.function(image) for image in images]
        shapes = {tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in results}
        if len(shapes) > 1 or not all(isinstance(x, Tensor) and x.ndim == 3 for x in results):
            raise DataError(
                "a transform must make an image (C, H, W) of every image, all of one shape, "
                f"{self!r} made {', '.join(sorted(map(str, shapes)))}; return a tensor"
            )
        return torch.stack(results) if results else images


@dataclass(frozen=True)
class Pipeline:
    """What images go through: in training, and in evaluation, where nothing is random.

    A normalization comes last, and is the same in both. Made by ``make_pipeline``.

    Args:
        training: The chain of training.
        evaluation: The chain of evaluation.
        transform_targets: Whether targets are images that move with the inputs.
    """

    training: Chain = ()
    evaluation: Chain = ()
    transform_targets: bool = False

    @property
    def normalization(self) -> Normalize | None:
        """The normalization; None if there is none."""
        return find_normalization(self.evaluation)

    def with_normalization(self, scale: Normalize | None) -> Pipeline:
        """Returns the pipeline with another normalization at its end, or with none."""
        last = () if scale is None else (scale,)
        training, evaluation = (
            (*(t for t in chain if not isinstance(t, Normalize)), *last)
            for chain in (self.training, self.evaluation)
        )
        return replace(self, training=training, evaluation=evaluation)

    def get_chain(self, generator: torch.Generator | None) -> Chain:
        """The chain of training if there is a generator, else that of evaluation."""
        return self.evaluation if generator is None else self.training


def make_pipeline(
    transforms: Iterable[AnyTransform],
    test_transforms: Iterable[AnyTransform] | None = None,
    *,
    transform_targets: bool = False,
) -> Pipeline:
    """Makes a pipeline of transforms, of their texts, or of functions of one image.

    Without ``test_transforms``, evaluation uses those of training that are not random, and takes
    the middle of images where training takes random crops.

    >>> make_pipeline(["RandomCrop(24)", "HorizontalFlip"]).evaluation
    (CenterCrop(size=24),)
    """
    training = tuple(map(_to_transform, transforms))
    own = [t for t in training if isinstance(t, PerImage)]
    if test_transforms is None:
        if own:
            raise DataError(
                "a function may be random, which evaluation must not be, and transforms has "
                f"{own[0]!r}; say what evaluation does instead with test_transforms=[...]"
            )
        evaluation = tuple(e for t in training if (e := t.for_evaluation()) is not None)
    else:
        evaluation = tuple(map(_to_transform, test_transforms))
    for transform in evaluation:
        if transform.is_random and not isinstance(transform, PerImage):
            raise DataError(
                f"evaluation must not be random, and test_transforms has {transform!r}; leave it "
                "out"
            )
    for chain in (training, evaluation):
        if any(isinstance(transform, Normalize) for transform in chain[:-1]):
            raise DataError(
                f"Normalize comes last, after what works on pixels in [0, 1], got {list(chain)}; "
                "put one at the end"
            )
    scales = {s for chain in (training, evaluation) if (s := find_normalization(chain))}
    if len(scales) > 1:
        raise DataError(
            "training and evaluation must normalize alike, got "
            f"{' and '.join(map(repr, (training[-1], evaluation[-1])))}; leave out the second"
        )
    pipeline = Pipeline(training, evaluation, transform_targets)
    return pipeline.with_normalization(scales.pop()) if scales else pipeline


def get_augmentation(name: str) -> Pipeline:
    """Gets the pipeline that has this name."""
    if name not in AUGMENTATIONS:
        raise DataError(describe_unknown("augmentation", name, AUGMENTATIONS))
    return make_pipeline(AUGMENTATIONS[name])


def _to_transform(given: object) -> Transform:
    if isinstance(given, Transform):
        return given
    if isinstance(given, str):
        return parse_transform(given)
    if callable(given) and not isinstance(given, type):
        return PerImage(given)
    raise DataError(
        "a transform is a value of fedquilt.transforms, its text, or a function of one image, "
        f"got {given!r}; write Resize(32) or 'Resize(32)'"
    )


def parse_transform(text: str) -> Transform:
    """Makes a transform of its text, which is the call that makes it in Python.

    >>> parse_transform("RandomCrop(32, padding=4)")
    RandomCrop(size=32, padding=4)
    >>> parse_transform("HorizontalFlip")
    HorizontalFlip(p=0.5)
    """
    try:
        name, values, named = parse_call(text)
    except ValueError as problem:
        raise DataError(
            "a transform is written like a call with plain numbers, such as 'Resize(32)' or "
            f"'RandomCrop(32, padding=4)', got '{text}'"
        ) from problem
    if name not in TRANSFORMS:
        raise DataError(describe_unknown("transform", name, TRANSFORMS))
    try:
        return TRANSFORMS[name](*values, **named)
    except TypeError as problem:
        rule = str(problem).partition("__init__() ")[2]
        raise DataError(f"'{text}' does not fit the settings of {name}: it {rule}") from problem


def find_normalization(chain: Chain) -> Normalize | None:
    """Finds the normalization at the end of a chain; None if there is none."""
    return chain[-1] if chain and isinstance(chain[-1], Normalize) else None


def name_transforms(chain: Sequence[Transform]) -> tuple[str, ...]:
    """The text of each transform but the normalization, which is kept apart.

    >>> name_transforms(make_pipeline(["Resize(8)", "HorizontalFlip"]).evaluation)
    ("Resize(size=8, mode='bilinear')",)
    """
    return tuple(repr(t) for t in chain if not isinstance(t, Normalize))
