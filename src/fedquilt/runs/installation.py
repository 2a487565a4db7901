"""What this machine and this installation have, and what is missing."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch
from packaging.requirements import InvalidRequirement, Requirement

from fedquilt.devices import CPU, describe_device, find_devices, get_free_memory
from fedquilt.version import __version__

PACKAGE = "fedquilt"
HIDDEN = ("test",)  # extras for those who change fedquilt
MIN_FREE = 1e9  # bytes of disk below which a warning is given
PURPOSES = {
    "onnx": "export models to ONNX",
    "hub": "download MNIST, Fashion-MNIST and CIFAR",
    "lrp": "relevance of channels, for ADDS",
    "metrics": "metrics of torchmetrics",
    "secure": "secure aggregation",
    "serve": "fedquilt watch and fedquilt serve",
    "flower": "train over several machines",
    "privacy": "differential privacy",
    "dpsgd": "differential privacy of single examples",
    "tensorboard": "log to TensorBoard",
    "mlflow": "log to MLflow",
    "wandb": "log to Weights & Biases",
    "notebook": "progress and data frames in notebooks",
    "docs": "build the documentation",
}


@dataclass(frozen=True)
class Extra:
    """An optional part of fedquilt.

    Args:
        name: Its name, as in ``fedquilt[name]``.
        purpose: What it is for.
        versions: The packages that it needs and that are here.
        missing: The packages that it needs and that are missing or too old.
    """

    name: str
    purpose: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()

    @property
    def is_here(self) -> bool:
        """Whether everything that it needs is here."""
        return not self.missing

    @property
    def remedy(self) -> str:
        """What installs it."""
        return f"pip install '{PACKAGE}[{self.name}]'" if self.missing else ""


@dataclass(frozen=True)
class Installation:
    """What is here: versions, the machine, devices, extras; and problems with their remedies."""

    versions: dict[str, str]
    machine: dict[str, Any]
    devices: tuple[str, ...]
    extras: tuple[Extra, ...]
    problems: tuple[str, ...]


def examine_installation() -> Installation:
    """Finds out what this machine and this installation have."""
    requirements = read_requirements()
    core, extras = sort_requirements(requirements or ())
    problems = [
        f"{name} is needed; install it: pip install '{name}'" for name in sorted(core.missing)
    ]
    if requirements is None:
        problems.append(
            f"{PACKAGE} is not installed, only its source is on the path; install it: "
            "pip install -e ."
        )
    machine = read_machine()
    if machine["free_disk"] < MIN_FREE:
        problems.append(
            f"{machine['scratch']} has less than 1 GB left, where updates of clients wait; make "
            "room, or set TMPDIR to another folder"
        )
    return Installation(
        {
            PACKAGE: __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            **{name: version for name, version in core.versions.items() if name != "torch"},
        },
        machine,
        list_devices(),
        tuple(extras),
        tuple(problems),
    )


def read_machine() -> dict[str, Any]:
    """The processor, the memory and the disk of this machine."""
    scratch = tempfile.gettempdir()
    free = get_free_memory(CPU)
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        "free_memory": None if free == float("inf") else int(free),
        "scratch": scratch,
        "free_disk": shutil.disk_usage(scratch).free,
        "python": sys.executable,
    }


def list_devices() -> tuple[str, ...]:
    """The devices that clients can train on."""
    found = find_devices("auto")
    return tuple(dict.fromkeys(("cpu", *(describe_device(d) for d in found if d != CPU))))


def read_requirements() -> list[str] | None:
    """What the installed package says that it needs; None: it is not installed."""
    try:
        return metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return None


def sort_requirements(requirements: Iterable[str]) -> tuple[Extra, list[Extra]]:
    """What is always needed, and what each extra needs.

    >>> core, (plots,) = sort_requirements(["numpy>=1", "no-such-package; extra == 'plots'"])
    >>> core.is_here, plots.missing, plots.remedy
    (True, ('no-such-package',), "pip install 'fedquilt[plots]'")
    """
    parsed = [_parse(text) for text in requirements]
    known = [requirement for requirement in parsed if requirement is not None]
    names = dict.fromkeys(name for r in known for name in _list_extras(r) if name not in HIDDEN)
    extras = [_examine(name, [r for r in known if name in _list_extras(r)]) for name in names]
    return _examine("", [r for r in known if not _list_extras(r)]), extras


def _parse(text: str) -> Requirement | None:
    try:
        return Requirement(text)
    except InvalidRequirement:
        return None


def _list_extras(requirement: Requirement) -> list[str]:
    """The extras that a requirement belongs to; none if it is always needed."""
    text = str(requirement.marker or "")
    words = text.replace("'", '"').split('"')
    return [words[i + 1] for i, word in enumerate(words[:-1]) if word.rstrip().endswith("extra ==")]


def _examine(name: str, requirements: Iterable[Requirement]) -> Extra:
    versions, missing = {}, []
    for requirement in requirements:
        marker = requirement.marker
        if requirement.name == PACKAGE or (marker and not marker.evaluate({"extra": name})):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            missing.append(f"{requirement.name}{requirement.specifier}")
            continue
        if requirement.specifier.contains(version, prereleases=True):
            versions[requirement.name] = version
        else:
            missing.append(f"{requirement.name}{requirement.specifier} (here is {version})")
    return Extra(name, PURPOSES.get(name, ""), versions, tuple(missing))
