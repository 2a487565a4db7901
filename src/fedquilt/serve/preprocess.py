"""From what users send to what the model takes, as the data of the run were prepared."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from fedquilt.customize.info import InputSpec
from fedquilt.data.dataset import TextEncoder
from fedquilt.data.pipeline import Chain, find_normalization, make_pipeline
from fedquilt.data.preprocessing import convert_for_models
from fedquilt.errors import DataError
from fedquilt.runs.from_config import load_run_source
from fedquilt.runs.run import Run
from fedquilt.serve.errors import RequestError
from fedquilt.serve.limits import Limits

IMAGE_FORMATS = ("PNG", "JPEG")
IMAGE_MODES = {1: "L", 3: "RGB"}
NPY_TYPES = ("application/x-npy", "application/octet-stream")
Inputs = tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class InputReader:
    """Reads the body of a request into a batch of inputs.

    Args:
        specs: The shapes and types of the model's inputs.
        transforms: What images go through, as in evaluation; None: only Python knows it.
        encoder: Turns a text into tokens; None: the model does not read text.
        class_names: What the classes are called, if that is known.
    """

    specs: tuple[InputSpec, ...]
    transforms: Chain | None = ()
    encoder: TextEncoder | None = None
    class_names: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """What a person gives: ``image``, ``text`` or ``numbers``."""
        shape = self.specs[0].shape[1:]
        if len(self.specs) > 1:
            return "numbers"
        if self.encoder is not None:
            return "text"
        is_image = len(shape) == 3 and shape[0] in IMAGE_MODES and self.specs[0].dtype == "float32"
        return "image" if is_image and self.transforms is not None else "numbers"

    @property
    def example(self) -> Inputs:
        """One example of zeros."""
        return tuple(torch.zeros(s.shape, dtype=_get_dtype(s))[:1] for s in self.specs)

    def describe(self) -> dict[str, Any]:
        """As JSON: what a page must know to ask a person for an input."""
        facts: dict[str, Any] = {"kind": self.kind}
        if self.kind == "image":
            channels, height, width = self.specs[0].shape[1:]
            scale = find_normalization(self.transforms or ())
            mean = 0.0 if scale is None else sum(scale.mean) / len(scale.mean)
            facts |= {"channels": channels, "height": height, "width": width}
            facts |= {"background": "dark" if mean < 0.5 else "light"}
        if self.encoder is not None:
            facts |= {"length": self.encoder.length, "unit": self.encoder.unit}
        return facts

    def read(self, body: bytes, content_type: str, limits: Limits) -> Inputs:
        """The batch in a request; raises a RequestError with what is wrong about it."""
        kind = content_type.partition(";")[0].strip().lower()
        if kind in ("application/json", ""):
            inputs = self._read_json(body)
        elif kind in ("image/png", "image/jpeg"):
            inputs = (self._read_image(body, limits),)
        elif kind in NPY_TYPES:
            inputs = (self._read_npy(body),)
        elif kind == "text/plain":
            inputs = (self._encode([_decode(body)]),)
        else:
            raise RequestError(
                415,
                "send application/json, image/png, image/jpeg, text/plain or application/x-npy, "
                f"got '{kind[:40]}'",
            )
        return self._check(inputs, limits)

    def _read_json(self, body: bytes) -> Inputs:
        try:
            document = json.loads(body)
        except (ValueError, RecursionError):
            raise RequestError(400, "the body is not JSON") from None
        if not isinstance(document, Mapping) or len(document) != 1:
            raise RequestError(422, 'send {"inputs": …}, {"pixels": …} or {"text": …}, one of them')
        ((name, given),) = document.items()
        readers: Mapping[str, Callable[[Any], Inputs]] = {
            "inputs": self._read_inputs,
            "pixels": lambda value: (self._preprocess(_to_array(value, np.uint8)),),
            "text": lambda value: (self._encode(value if isinstance(value, list) else [value]),),
        }
        if name not in readers:
            raise RequestError(
                422, f"'{name[:40]}' is not known; choose one of: inputs, pixels, text"
            )
        return readers[name](given)

    def _read_inputs(self, given: Any) -> Inputs:
        """Numbers as the model takes them; of several inputs a list with one array each."""
        if len(self.specs) == 1:
            given = [given]
        if not isinstance(given, list) or len(given) != len(self.specs):
            raise RequestError(422, f"the model has {len(self.specs)} inputs; give one array each")
        return tuple(
            torch.from_numpy(_to_array(value, _get_numpy_type(spec)))
            for value, spec in zip(given, self.specs, strict=True)
        )

    def _read_npy(self, body: bytes) -> Tensor:
        """An array: bytes are pixels, other numbers are as the model takes them."""
        try:
            array = np.load(io.BytesIO(body), allow_pickle=False)
        except (ValueError, OSError, EOFError, MemoryError, SyntaxError):
            raise RequestError(400, "the body is not a .npy file of numbers") from None
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "iufb":
            raise RequestError(422, "a .npy file holds one array of numbers")
        if array.dtype == np.uint8 and self.kind == "image":
            return self._preprocess(array)
        return torch.from_numpy(np.ascontiguousarray(array, _get_numpy_type(self.specs[0])))

    def _read_image(self, body: bytes, limits: Limits) -> Tensor:
        if self.kind != "image":
            raise RequestError(415, f"this model takes {self.kind}, not images")
        channels, height, width = self.specs[0].shape[1:]
        try:
            file = Image.open(io.BytesIO(body), formats=IMAGE_FORMATS)
            if file.width * file.height > limits.pixels:
                raise RequestError(413, f"an image has at most {limits.pixels} pixels")
            image = file.convert(IMAGE_MODES[channels])
        except (UnidentifiedImageError, OSError, SyntaxError, ValueError):
            raise RequestError(400, "the body is not a readable PNG or JPEG image") from None
        except Image.DecompressionBombError:
            raise RequestError(413, f"an image has at most {limits.pixels} pixels") from None
        if not self._changes_size and image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        pixels = np.asarray(image, dtype=np.uint8)
        return self._preprocess(pixels[None] if channels == 1 else pixels.transpose(2, 0, 1))

    @property
    def _changes_size(self) -> bool:
        """Whether transforms bring images to the model's size."""
        scale = find_normalization(self.transforms or ())
        return any(transform is not scale for transform in self.transforms or ())

    def _preprocess(self, pixels: np.ndarray[Any, Any]) -> Tensor:
        """Pixels from 0 to 255 as the model takes them, one image or several."""
        if self.kind != "image":
            raise RequestError(422, f"this model takes {self.kind}, not pixels")
        images = convert_for_models(torch.from_numpy(np.array(pixels, dtype=np.uint8)))
        channels = self.specs[0].shape[1]
        if images.ndim == 2 and channels == 1:
            images = images.unsqueeze(0)
        images = images.unsqueeze(0) if images.ndim == 3 else images
        if images.ndim != 4 or images.shape[1] != channels or not images.numel():
            raise self._make_shape_error(images)
        try:
            for transform in self.transforms or ():
                images = transform.apply(images)
        except (DataError, RuntimeError, ValueError):
            raise RequestError(422, "the images do not fit the transforms of the run") from None
        return images

    def _encode(self, texts: Sequence[Any]) -> Tensor:
        if self.encoder is None:
            raise RequestError(422, f"this model takes {self.kind}, not text")
        if not texts or not all(isinstance(text, str) for text in texts):
            raise RequestError(422, "give a text, or a list of texts")
        return torch.stack([self.encoder(text) for text in texts])

    def _check(self, inputs: Inputs, limits: Limits) -> Inputs:
        """Inputs with a batch axis and of the model's shapes, all finite."""
        batches = []
        for value, spec in zip(inputs, self.specs, strict=True):
            shape = spec.shape[1:]
            if tuple(value.shape) == shape:
                value = value.unsqueeze(0)
            if tuple(value.shape[1:]) != shape or value.ndim != len(shape) + 1:
                raise self._make_shape_error(value)
            if value.is_floating_point() and not value.isfinite().all():
                raise RequestError(422, "all numbers must be finite")
            batches.append(value)
        sizes = {len(value) for value in batches}
        if len(sizes) > 1:
            raise RequestError(422, "all inputs must have the same number of examples")
        (count,) = sizes
        if not 0 < count <= limits.examples:
            raise RequestError(
                413 if count else 422, f"send 1 to {limits.examples} examples, got {count}"
            )
        return tuple(batches)

    def _make_shape_error(self, value: Tensor) -> RequestError:
        shapes = " and ".join(str(list(spec.shape[1:])) for spec in self.specs)
        return RequestError(422, f"an example has the shape {shapes}, got {list(value.shape)[:8]}")


def make_reader(run: Run, class_names: tuple[str, ...] = ()) -> InputReader:
    """How a run's inputs are read; texts need the run's data, for their vocabulary."""
    specs = run.info.inputs
    reader = InputReader(specs, _find_transforms(run), class_names=class_names)
    if len(specs) > 1 or specs[0].dtype != "int64":
        return reader
    try:
        source = load_run_source(run)
    except DataError:  # without the data, tokens are numbers
        return reader
    if source is None or source.text_encoder is None:
        return reader
    names = class_names or source.class_names
    return InputReader(specs, (), source.text_encoder, names)


def _find_transforms(run: Run) -> Chain | None:
    scale = run.info.normalization
    try:
        return make_pipeline((), [*run.info.transforms, *((scale,) if scale else ())]).evaluation
    except DataError:  # a function that only Python knows
        return None


def _decode(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError:
        raise RequestError(400, "a text is UTF-8") from None


def _get_dtype(spec: InputSpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype


def _get_numpy_type(spec: InputSpec) -> Any:
    return torch.zeros(0, dtype=_get_dtype(spec)).numpy().dtype


def _to_array(value: Any, dtype: Any) -> np.ndarray[Any, Any]:
    """Nested lists as an array; whole numbers stay whole, and in their range."""
    kind = np.dtype(dtype).kind
    try:
        array = np.array(value, dtype=np.float64 if kind in "iu" else dtype)
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise RequestError(422, "inputs are numbers in nested lists of equal length") from None
    if kind not in "iu":
        return array
    limits = np.iinfo(dtype)
    if not (np.isfinite(array).all() and (array == np.floor(array)).all()):
        raise RequestError(422, "this input takes whole numbers")
    if array.size and not (limits.min <= array.min() and array.max() <= limits.max):
        raise RequestError(422, f"whole numbers from {limits.min} to {limits.max} are taken")
    return array.astype(dtype)
