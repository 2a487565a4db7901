"""Files for other programs; each is loaded again and compared before success is reported."""

from __future__ import annotations

import inspect
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fedquilt.customize.ensemble import Ensemble
from fedquilt.customize.family import Family
from fedquilt.customize.info import find_info
from fedquilt.errors import ConfigError, FedquiltError, describe_unknown
from fedquilt.structure.dispatch import unfused_kernels
from fedquilt.structure.tensors import Example, call_with_tensors, named_tensors, to_arguments
from fedquilt.training.scaler import has_hooked_scale

TOLERANCE = 1e-4  # of the largest output


def export(
    model: nn.Module,
    path: str | Path,
    example: Example | None = None,
    about: Mapping[str, Any] | None = None,
    *,
    family: bool = False,
) -> Path:
    """Writes a model to ``.safetensors``, ``.pt2`` or ``.onnx``, by the file's ending.

    Args:
        model: A model from ``customize``, or any other.
        path: The file.
        example: An input; None: the one that a model from ``customize`` knows.
        about: What to note in the file besides the model.
        family: Whether all widths and robustnesses of the model go into one ``.onnx`` or ``.pt2``.
            Its last input is the robustness, and its output has a row for each width, see
            ``fedquilt.customize.family``. Otherwise it is written as it is set.

    Returns:
        The path of the file.

    >>> import tempfile, torch, fedquilt as fq
    >>> model = torch.nn.Linear(4, 3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fq.export(model, f"{folder}/model.safetensors", example=torch.zeros(1, 4)).name
    'model.safetensors'
    """
    path = Path(path)
    writer = WRITERS.get(path.suffix)
    if writer is None:
        raise ConfigError(describe_unknown("file ending", path.suffix or path.name, WRITERS))
    if family and writer is _write_safetensors:
        raise ConfigError("a family is a program, not only weights; write it to .onnx or .pt2")
    example = example if example is not None else _known_example(model)
    whole = Family(model) if family else model
    was_training = model.training
    whole.eval()
    part = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # without PyTorch's fast path for transformers, which no exporter knows
        with torch.no_grad(), torch.random.fork_rng(devices=[]), unfused_kernels():
            trials = _make_trials(whole, example)
            fewer = tuple(
                _take_first(x, 2) for x in trials[0][0]
            )  # files take any number of examples
            with _explain_errors(path, model):
                answer = writer(whole, part, fewer, dict(about or {}))
                for inputs, expected in trials:
                    torch.default_generator.manual_seed(0)  # a net may draw in use, such as a mask
                    _compare(path, answer(*inputs), expected)
        part.chmod(0o644)
        part.replace(path)
    except OSError as problem:
        raise FedquiltError(f"{path} could not be written ({problem})") from problem
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        model.train(was_training)
    return path


def _make_trials(model: nn.Module, example: Example) -> list[tuple[tuple[Any, ...], Tensor]]:
    """Inputs to compare outputs on, three and not all zeros, and the model's outputs."""
    generator = torch.Generator().manual_seed(0)

    def drawn(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        some = x[:1].expand(3, *x.shape[1:]).contiguous()
        return torch.randn(some.shape, generator=generator).to(x) if x.is_floating_point() else some

    inputs = tuple(drawn(x) for x in to_arguments(example))
    torch.default_generator.manual_seed(0)
    return model.make_trials(inputs) if isinstance(model, Family) else [(inputs, model(*inputs))]


def _take_first(x: Any, count: int) -> Any:
    return x[:count] if isinstance(x, Tensor) and x.ndim else x


def _known_example(model: nn.Module) -> Example:
    info = find_info(model)
    if info is None:
        raise ConfigError("export needs an example input for this model; give example=...")
    return info.example


def _compare(path: Path, found: Tensor, expected: Tensor) -> None:
    error = (found - expected).abs().max().item()
    tolerance = max(TOLERANCE, 8 * torch.finfo(expected.dtype).eps)
    if not error <= tolerance * max(expected.abs().max().item(), 1.0):
        raise FedquiltError(
            f"{path} was not written: read back, it gives other outputs than the model "
            f"(by {error:.2g})"
        )


Answer = Callable[..., Tensor]  # what the written file says
Writer = Callable[[nn.Module, Path, tuple[Any, ...], dict[str, Any]], Answer]


@contextmanager
def _explain_errors(path: Path, model: nn.Module) -> Iterator[None]:
    """Errors of exporters, and of what reads their files again, as a sentence: they fill pages."""
    try:
        yield
    except (FedquiltError, OSError):
        raise
    except Exception as problem:  # onnxruntime's have no class in common
        reason = str(problem.__cause__ or problem).strip().partition("\n")[0]
        kinds = {t.dtype for t in named_tensors(model).values() if t.is_floating_point()}
        odd = sorted(str(kind) for kind in kinds - {torch.float32})
        remedy = f"; it has weights of {odd[0]}: export a copy in .float()" if odd else ""
        raise FedquiltError(
            f"{path} was not written: the model cannot be exported for any number of examples "
            f"({reason}){remedy}"
        ) from problem


def _write_safetensors(
    model: nn.Module, path: Path, inputs: tuple[Any, ...], about: dict[str, Any]
) -> Answer:
    if has_hooked_scale(model):
        raise ConfigError(
            "the weights alone are not this model: outputs of its layers are scaled, by a factor "
            "that its tied or computed weights cannot hold; write it to .onnx or .pt2"
        )
    plain = torch.contiguous_format  # copies, since a file has no tensors that share memory
    tensors = {n: t.detach().clone(memory_format=plain) for n, t in named_tensors(model).items()}
    save_file(tensors, path, metadata={"fedquilt": json.dumps(about, sort_keys=True)})
    with safe_open(path, framework="pt") as file:
        values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return lambda *inputs: call_with_tensors(model, values, inputs)


def _write_pt2(
    model: nn.Module, path: Path, inputs: tuple[Any, ...], about: dict[str, Any]
) -> Answer:
    with _quiet():
        program = torch.export.export(
            model, inputs, dynamic_shapes=_make_batch_dynamic(model, inputs)
        )
        torch.export.save(program, path, extra_files={"fedquilt.json": json.dumps(about)})
        found: Answer = torch.export.load(path).module()
    return found


def _write_onnx(
    model: nn.Module, path: Path, inputs: tuple[Any, ...], about: dict[str, Any]
) -> Answer:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError:
        raise ConfigError("ONNX needs the extra: pip install 'fedquilt[onnx]'") from None
    names = _name_inputs(model, len(inputs))
    with _quiet():
        program = torch.onnx.export(
            model,
            inputs,
            dynamo=True,
            dynamic_shapes=_make_batch_dynamic(model, inputs),
            input_names=names,
            output_names=["logits_by_width" if isinstance(model, Family) else "logits"],
            verbose=False,
        )
        assert program is not None
        program.model.metadata_props["fedquilt"] = json.dumps(about, sort_keys=True)
        program.save(path, external_data=False)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def answer(*inputs: Tensor) -> Tensor:
        feed = {n: x.numpy() for n, x in zip(names, inputs, strict=True)}
        return torch.from_numpy(session.run(None, feed)[0])

    return answer


def _name_inputs(model: nn.Module, count: int) -> list[str]:
    """The names that a net's own ``forward`` gives its inputs; a mixture has its nets'."""
    if isinstance(model, Family):
        others = count - model.has_dial
        return [*_name_inputs(model.mixture, others), "robustness"][:count]
    net = model.nets[0] if isinstance(model, Ensemble) else model
    names = [p.name for p in _positional(net)][:count]
    return names if len(names) == count else [f"input_{i}" for i in range(count)]


def _make_batch_dynamic(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """That the first axis of every input has any size, nested as ``forward(x, *others)`` has it."""
    shapes = tuple(
        {0: torch.export.Dim.DYNAMIC} if isinstance(x, Tensor) and x.ndim else None for x in inputs
    )
    count = len(_positional(model))
    return shapes if len(inputs) <= count else (*shapes[:count], shapes[count:])


def _positional(model: nn.Module) -> list[inspect.Parameter]:
    found = inspect.signature(model.forward).parameters.values()
    return [p for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


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


WRITERS: dict[str, Writer] = {
    ".safetensors": _write_safetensors,
    ".pt2": _write_pt2,
    ".onnx": _write_onnx,
}
