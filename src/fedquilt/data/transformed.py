"""Examples whose images go through a pipeline of transforms whenever a batch is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedquilt.data.examples import ClientData, ConcatExamples, Examples, Rows
from fedquilt.data.pipeline import Chain, PerImage, Pipeline
from fedquilt.data.transforms import Normalize, Resize, Transform
from fedquilt.errors import DataError
from fedquilt.learning.batch import Batch, as_batch, concatenate

IMAGE_NAMES = ("image", "images", "pixel_values")  # of an input's entry, in this order


@dataclass(frozen=True, eq=False)
class TransformedExamples:
    """Examples whose images go through a pipeline when a batch is asked for.

    Nothing is copied and nothing computed before. Made by ``transform_examples``.
    """

    data: ClientData
    pipeline: Pipeline

    def __len__(self) -> int:
        """The number of examples."""
        return len(self.data)

    @property
    def labels(self) -> Tensor | None:
        """The label of every example; None: no classes."""
        return self.data.labels

    @property
    def label_set(self) -> tuple[int, ...]:
        """The labels present, in order."""
        return self.data.label_set

    @property
    def scale(self) -> Normalize | None:
        """The normalization; None if there is none."""
        return self.pipeline.normalization

    @property
    def has_fixed_batches(self) -> bool:
        """Whether a batch is always the same rows of all examples: nothing is drawn."""
        chain = self.pipeline.training
        is_fixed = chain == self.pipeline.evaluation and not any(t.is_random for t in chain)
        return is_fixed and getattr(self.data, "has_fixed_batches", False)

    def batch(self, rows: Tensor, generator: torch.Generator | None = None) -> Batch:
        """Returns transformed inputs, and targets; a generator means training, None evaluation."""
        chain = self.pipeline.get_chain(generator)
        if len(rows) <= 1 or not (_may_mix_sizes(self.data) and _begins_with_resize(chain)):
            batch = as_batch(self.data.batch(rows, generator))
            return self._transform(batch, chain, generator)
        items = (as_batch(self.data.batch(row, generator)) for row in rows.split(1))
        resized = [self._transform(item, chain[:1], generator) for item in items]
        joined = resized[0].with_parts(*map(concatenate, zip(*resized, strict=True)))
        return self._transform(joined, chain[1:], generator)

    def select(self, rows: Rows) -> TransformedExamples:
        """Selects some rows."""
        return replace(self, data=self.data.select(rows))

    def _transform(self, batch: Batch, chain: Chain, generator: torch.Generator | None) -> Batch:
        inputs, targets = batch
        key = _find_images(inputs)
        images = inputs if key is None else inputs[key]
        moves_targets = self.pipeline.transform_targets
        for transform in chain:
            drawn = None
            if generator is not None and transform.is_random:
                drawn = transform.draw(images, generator)
            if moves_targets and transform.is_geometric:
                targets = _move_targets(transform, targets, drawn)
            images = transform.apply(images, drawn)
        return batch.with_parts(_replace_images(inputs, key, images), targets)


def transform_examples(data: ClientData, pipeline: Pipeline) -> TransformedExamples:
    """Puts examples through a pipeline; the first one is tried, so that errors come at once.

    A pipeline without a normalization keeps the one that the examples have. Examples that have a
    pipeline get this one instead.
    """
    scale = getattr(data, "scale", None)
    if isinstance(data, TransformedExamples):
        data = data.data
    elif isinstance(data, Examples):
        data = replace(data, scale=None)
    if pipeline.normalization is None and scale is not None:
        pipeline = pipeline.with_normalization(scale)
    transformed = TransformedExamples(data, pipeline)
    if len(data):
        first = torch.zeros(1, dtype=torch.int64)
        inputs, targets = data.batch(first)
        key = _find_images(inputs)
        _check_images(inputs if key is None else inputs[key], targets, pipeline)
        for generator in (None, torch.Generator()):
            transformed.batch(first, generator)
    return transformed


def check_sizes(data: ClientData) -> None:
    """Refuses images of different sizes that no transform makes equal, if the data can tell."""
    if isinstance(data, TransformedExamples):
        if all(map(_begins_with_resize, (data.pipeline.training, data.pipeline.evaluation))):
            return
        data = data.data
    if hasattr(data, "check_sizes"):
        data.check_sizes()


def list_evaluation_transforms(data: ClientData) -> Chain:
    """Lists what inputs of these examples went through in evaluation, after conversion."""
    if isinstance(data, TransformedExamples):
        return data.pipeline.evaluation
    if isinstance(data, ConcatExamples):
        return find_common_transforms(data.parts)
    scale = getattr(data, "scale", None)
    return () if scale is None else (scale,)


def find_common_transforms(parts: Iterable[ClientData]) -> Chain:
    """Finds what inputs of all of these examples went through; empty if they differ."""
    chains = list(map(list_evaluation_transforms, parts))
    return chains[0] if chains and all(chain == chains[0] for chain in chains) else ()


def _may_mix_sizes(data: ClientData) -> bool:
    return bool(getattr(data, "may_mix_sizes", False))


def _begins_with_resize(chain: Chain) -> bool:
    return bool(chain) and isinstance(chain[0], Resize)


def _find_images(inputs: Any) -> Any:
    """Finds the entry of a dict or tuple that is the images; None: the inputs are the images."""
    if isinstance(inputs, Tensor):
        return None
    entries = inputs if isinstance(inputs, Mapping) else dict(enumerate(inputs))
    named: list[Any] = [name for name in IMAGE_NAMES if name in entries]
    found = named or [key for key, value in entries.items() if _are_images(value)]
    if not found or (len(found) > 1 and not named):
        raise DataError(
            "transforms need one entry of the inputs that is images (N, C, H, W), got "
            f"{len(found)} among {', '.join(map(str, entries))}; call it '{IMAGE_NAMES[0]}'"
        )
    return found[0]


def _replace_images(inputs: Any, key: Any, images: Tensor) -> Any:
    """The inputs with other images."""
    if key is None:
        return images
    if isinstance(inputs, Mapping):
        return {**inputs, key: images}
    return (*inputs[:key], images, *inputs[key + 1 :])


def _are_images(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 4 and value.is_floating_point()


def _check_images(images: Tensor, targets: Any, pipeline: Pipeline) -> None:
    """Checks that there are images to transform, and what is said of their targets."""
    if not _are_images(images):
        raise DataError(
            "only images (N, C, H, W) can be normalized or augmented, got "
            f"{images.dtype} of shape {tuple(images.shape)}; leave out the transforms"
        )
    moving = [t for t in (*pipeline.training, *pipeline.evaluation) if t.is_geometric]
    is_one = isinstance(targets, Tensor) and targets.ndim >= 3
    are_images = is_one and targets.shape[-2:] == images.shape[-2:]
    if pipeline.transform_targets and not are_images:
        raise DataError(
            "transform_targets is for targets that are images of the size of the inputs, got "
            f"targets of shape {tuple(getattr(targets, 'shape', ()))[1:]}; leave it out"
        )
    if not are_images or not moving:
        return
    if not pipeline.transform_targets:
        raise DataError(
            f"targets are images of shape {tuple(targets.shape[1:])}, and {moving[0]!r} moves the "
            "pixels of the inputs; set transform_targets, so that targets move with them"
        )
    own = [t for t in moving if isinstance(t, PerImage)]
    if own:
        raise DataError(
            f"a function of one image cannot move targets too, got {own[0]!r}; write it as a "
            "class that inherits from fedquilt.transforms.Transform"
        )


def _move_targets(transform: Transform, targets: Tensor, drawn: Tensor | None) -> Tensor:
    """Moves target images (N, H, W) or (N, C, H, W) as the inputs are moved."""
    if targets.ndim == 3:
        return transform.apply(targets.unsqueeze(1), drawn, is_target=True).squeeze(1)
    return transform.apply(targets, drawn, is_target=True)
