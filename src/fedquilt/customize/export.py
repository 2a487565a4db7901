"""Files for other programs; each is loaded again and compared before success is reported."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fedquilt.errors import ConfigError, FedquiltError, unknown
from fedquilt.structure.trace import Example, arguments, named_tensors

TOLERANCE = 1e-4  # of the largest output


def export(
    model: nn.Module,
    path: str | Path,
    example: Example | None = None,
    about: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a model to ``.safetensors``, ``.pt2`` or ``.onnx``, by the file's ending.

    A model from ``customize`` knows its example input; for others give one.
    """
    path = Path(path)
    writer = WRITERS.get(path.suffix)
    if writer is None:
        raise ConfigError(unknown("file ending", path.suffix or path.name, WRITERS))
    inputs = _probe(example if example is not None else _remembered(model))
    was_training = model.training
    model.eval()
    part = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with torch.no_grad():
            expected = model(*inputs)
            _compare(path, writer(model, part, inputs, dict(about or {})), expected)
        part.chmod(0o644)
        part.replace(path)
    except OSError as problem:
        raise FedquiltError(f"{path} could not be written ({problem})") from problem
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        model.train(was_training)
    return path


def _probe(example: Example) -> tuple[Any, ...]:
    """Inputs to compare outputs on: two, so that files take any number, and not all zeros."""
    generator = torch.Generator().manual_seed(0)

    def drawn(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        pair = x[:1].expand(2, *x.shape[1:]).contiguous()
        return torch.randn(pair.shape, generator=generator) if x.is_floating_point() else pair

    return tuple(drawn(x) for x in arguments(example))


def _remembered(model: nn.Module) -> Example:
    example = getattr(model, "fedquilt_example", None)
    if example is None:
        raise ConfigError("export needs an example input for this model; give example=...")
    found: Example = example
    return found


def _compare(path: Path, found: Tensor, expected: Tensor) -> None:
    error = (found - expected).abs().max().item()
    if not error <= TOLERANCE * max(expected.abs().max().item(), 1.0):
        raise FedquiltError(
            f"{path} was not written: read back, it gives other outputs than the model "
            f"(by {error:.2g})"
        )


Writer = Callable[[nn.Module, Path, tuple[Any, ...], dict[str, Any]], Tensor]


def _safetensors(
    model: nn.Module, path: Path, inputs: tuple[Any, ...], about: dict[str, Any]
) -> Tensor:
    tensors = {n: t.detach().contiguous() for n, t in named_tensors(model).items()}
    save_file(tensors, path, metadata={"fedquilt": json.dumps(about, sort_keys=True)})
    with safe_open(path, framework="pt") as file:
        values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    output: Tensor = torch.func.functional_call(model, values, inputs)
    return output


def _pt2(model: nn.Module, path: Path, inputs: tuple[Any, ...], about: dict[str, Any]) -> Tensor:
    with _quiet():
        program = torch.export.export(model, inputs, dynamic_shapes=_any_batch(inputs))
        torch.export.save(program, path, extra_files={"fedquilt.json": json.dumps(about)})
        output: Tensor = torch.export.load(path).module()(*inputs)
    return output


def _onnx(model: nn.Module, path: Path, inputs: tuple[Any, ...], about: dict[str, Any]) -> Tensor:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError:
        raise ConfigError("ONNX needs the extra: pip install 'fedquilt[onnx]'") from None
    with _quiet():
        torch.onnx.export(
            model,
            inputs,
            path,
            dynamo=True,
            dynamic_shapes=_any_batch(inputs),
            external_data=False,
            verbose=False,
        )
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    feed = {n: x.numpy() for n, x in zip(names, inputs, strict=True)}
    return torch.from_numpy(session.run(None, feed)[0])


def _any_batch(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple({0: torch.export.Dim.DYNAMIC} if isinstance(x, Tensor) else None for x in inputs)


class _quiet:
    """Exporters talk to the terminal and warn about themselves; the library does not print."""

    def __enter__(self) -> None:
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        warnings.simplefilter("ignore")
        self._output = redirect_stdout(io.StringIO())
        self._output.__enter__()
        self._level = logging.root.manager.disable
        logging.disable(logging.WARNING)

    def __exit__(self, *problem: Any) -> None:
        logging.disable(self._level)
        self._output.__exit__(*problem)
        self._warnings.__exit__(*problem)


WRITERS: dict[str, Writer] = {".safetensors": _safetensors, ".pt2": _pt2, ".onnx": _onnx}
