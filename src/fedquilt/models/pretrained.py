"""A model that starts from weights in a file, and a report of what was taken from it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedquilt.errors import ConfigError

WRAPPERS = ("state_dict", "model")  # what training scripts put a state dict under
COUNTERS = "num_batches_tracked"
MAX_NAMES = 3  # in a sentence


class ShapeMismatch(NamedTuple):
    """A tensor that has one shape in the file and another in the model."""

    name: str
    given: tuple[int, ...]
    expected: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"{self.name} ({_format_shape(self.given)} there, {_format_shape(self.expected)} here)"
        )


@dataclass(frozen=True)
class LoadReport:
    """What a model has taken from a file; everything else in it kept its initial values.

    ``counters`` are batch normalization's counts of batches that only the file or only the model
    has. Nothing depends on them, so they are never missed.
    """

    path: str
    loaded: tuple[str, ...]  # names in the model, as in all that follow but ``unused``
    missing: tuple[str, ...] = ()  # not in the file
    different: tuple[ShapeMismatch, ...] = ()  # of another shape there
    unused: tuple[str, ...] = ()  # names in the file that the model has not
    counters: tuple[str, ...] = ()
    wrapper: str = ""  # the entry of the file that held the weights, "" if it was the whole
    prefix: str = ""  # what the file's names have before the model's

    def __str__(self) -> str:
        return self.describe()

    def describe(self) -> str:
        """A short text: what was taken, and what was not."""
        total = len(self.loaded) + len(self.missing) + len(self.different)
        entry = f", its entry '{self.wrapper}'" if self.wrapper else ""
        names = f", names without '{self.prefix}'" if self.prefix else ""
        lines = [f"{len(self.loaded)} of {total} tensors start from {self.path}{entry}{names}"]
        kept = "kept at their initial values"
        for what, which in (
            (f"{kept}, of another shape in the file", self.different),
            (f"{kept}, not in the file", self.missing),
            ("not used, the model has no such tensors", self.unused),
            ("of no importance, in only one of them", self.counters),
        ):
            if which:
                lines.append(f"  {what}: {_format_list(which)}")
        return "\n".join(lines)


def load_pretrained(model: nn.Module, path: str | Path, *, strict: bool = True) -> LoadReport:
    """Writes the weights of a file into a model, in place, and reports what fitted.

    The classifier head, which is the last layer of the model, may be of another number of classes
    or not in the file; it then keeps its initial values.

    Args:
        model: The model to write into.
        path: A ``.safetensors`` file, or a state dict written by ``torch.save``, also as the entry
            ``state_dict`` or ``model`` of a dict. A prefix that its names have, such as
            ``module.``, is left out: the one without which most of the model's names are found.
        strict: Whether anything else that does not fit is an error, raised before a value is
            written. Otherwise it is left out and reported.

    >>> import tempfile, torch, fedquilt as fq
    >>> old = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> new = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 5))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save(old.state_dict(), f"{folder}/old.pt")
    ...     report = fq.load_pretrained(new, f"{folder}/old.pt")
    >>> report.loaded
    ('0.weight', '0.bias')
    """
    tensors, others, wrapper = _read(Path(path))
    own = {n: t for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    prefix = _find_prefix(tensors, own)
    source = {n.removeprefix(prefix): n for n in tensors} | {n: n for n in tensors if n in own}
    fitting = {n for n in own if n in source and tensors[source[n]].shape == own[n].shape}
    shared = {id(own[n]) for n in fitting}  # a tied tensor needs one of its names
    missing = [n for n in own if n not in source and id(own[n]) not in shared]
    used = {source[n] for n in own if n in source}
    unused = [n for n in tensors if n not in used] + others
    report = LoadReport(
        str(path),
        loaded=tuple(n for n in own if id(own[n]) in shared),
        missing=tuple(n for n in missing if not n.endswith(COUNTERS)),
        different=tuple(
            ShapeMismatch(n, tuple(tensors[source[n]].shape), tuple(own[n].shape))
            for n in own
            if n in source and n not in fitting
        ),
        unused=tuple(n for n in unused if not n.endswith(COUNTERS)),
        counters=tuple(n for n in missing + unused if n.endswith(COUNTERS)),
        wrapper=wrapper,
        prefix=prefix,
    )
    _refuse_what_does_not_fit(report, _find_head(model), strict=strict)
    with torch.no_grad():
        for name in fitting:
            own[name].copy_(tensors[source[name]])
    return report


def _read(path: Path) -> tuple[dict[str, Tensor], list[str], str]:
    """The tensors of a file by name, entries that are none, and where in the file they were."""
    if not path.is_file():
        raise ConfigError(f"the file of weights '{path}' does not exist")
    try:
        content = _read_content(path)
    except Exception as problem:  # a foreign file can fail anywhere in a reader
        raise ConfigError(
            f"'{path}' cannot be read as weights; give a .safetensors file, or a state dict alone "
            "as torch.save(model.state_dict(), path) writes it"
        ) from problem
    content, wrapper = _unwrap(content)
    entries = content if isinstance(content, Mapping) else {}
    tensors = {str(n): t for n, t in entries.items() if isinstance(t, Tensor)}
    if not tensors:
        raise ConfigError(
            f"'{path}' holds no tensors by name; give a .safetensors file, or a state dict as "
            "torch.save(model.state_dict(), path) writes it"
        )
    return tensors, [str(n) for n, t in entries.items() if not isinstance(t, Tensor)], wrapper


def _read_content(path: Path) -> Any:
    if path.suffix == ".safetensors":
        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)  # never runs code of the file


def _unwrap(content: Any) -> tuple[Any, str]:
    """A state dict, and the entries that it was under."""
    under: list[str] = []
    while isinstance(content, Mapping):
        entry = next((w for w in WRAPPERS if isinstance(content.get(w), Mapping)), None)
        if entry is None:
            break
        content = content[entry]
        under.append(entry)
    return content, ".".join(under)


def _find_prefix(found: Iterable[str], wanted: Collection[str]) -> str:
    """What to leave out of names so that most of the wanted ones are found; no more than needed.

    >>> _find_prefix(["module.a.weight", "module.b.weight"], ["a.weight", "b.weight"])
    'module.'
    >>> _find_prefix(["backbone.a.weight", "head.weight"], ["a.weight", "head.weight"])
    'backbone.'
    >>> _find_prefix(["a.weight", "average.a.weight"], ["a.weight", "b.weight"])
    ''
    """
    behind: dict[str, set[str]] = {"": set()}
    for name in found:
        parts = name.split(".")
        for i in range(len(parts)):
            if (rest := ".".join(parts[i:])) in wanted:
                behind.setdefault(".".join([*parts[:i], ""]), set()).add(rest)
    return max(behind, key=lambda prefix: (len(behind[prefix] | behind[""]), -len(prefix)))


def _find_head(model: nn.Module) -> frozenset[str]:
    """Names of the tensors of the last layer."""
    names: list[str] = []
    for place, layer in model.named_modules():
        own = [name for name, _ in layer.named_parameters(recurse=False)]
        names = [f"{place}.{name}" if place else name for name in own] or names
    return frozenset(names)


def _refuse_what_does_not_fit(report: LoadReport, head: frozenset[str], *, strict: bool) -> None:
    """One sentence about weights of another model, or about the first names that do not fit."""
    start = f"the weights in '{report.path}' do not fit the model: "
    if not report.loaded:
        raise ConfigError(
            f"{start}no tensor has the name and the shape of one of its own, the file has "
            f"{_format_list(report.unused or report.different)}; give weights of this model"
        )
    missing = [name for name in report.missing if name not in head]
    different = [d for d in report.different if d.name not in head or d.given[1:] != d.expected[1:]]
    problems = [
        f"{what} {_format_list(which)}"
        for what, which in (
            ("not in the file:", missing),
            ("of another shape:", different),
            ("not in the model:", report.unused),
        )
        if which
    ]
    if strict and problems:
        raise ConfigError(
            f"{start}{'; '.join(problems)}; to start from the {len(report.loaded)} tensors that "
            "fit, set model.weights_strict = false (in Python strict=False)"
        )


def _format_list(items: Collection[object]) -> str:
    """The first few, and how many more."""
    first = ", ".join(str(item) for item in list(items)[:MAX_NAMES])
    more = len(items) - MAX_NAMES
    return f"{first} and {more} more" if more > 0 else first


def _format_shape(sizes: tuple[int, ...]) -> str:
    return "×".join(map(str, sizes)) or "a number"
