"""New processes on every platform: forked where that is possible, or started anew.

A forked process has all that its parent has. One that is started anew gets a file: classes and
functions of scripts, notebooks, closures and lambdas by value, those of modules by their names, and
tensors as they are in memory, which all processes map. The script is not run again there, so it
needs no ``if __name__ == "__main__":``.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Generic, TypeVar

import cloudpickle  # type: ignore[import-untyped]
import torch

from fedquilt.devices import CPU, has_accelerator, is_accelerator
from fedquilt.errors import ConfigError
from fedquilt.user_code import list_loaded_files, load_file

T = TypeVar("T")


def choose_start_method(device: torch.device = CPU) -> str:
    """How processes are started: ``fork`` where that is possible, or ``spawn``.

    No runtime of an accelerator works in a forked process. And where PyTorch has an accelerator,
    its gradients do not either, on any device, once this process has computed some. A program that
    has called ``multiprocessing.set_start_method`` with another method than fork gets ``spawn``.
    """
    wanted = multiprocessing.get_start_method(allow_none=True)
    if sys.platform != "linux" or is_accelerator(device) or wanted not in (None, "fork"):
        return "spawn"
    return "spawn" if has_accelerator() and not _can_differentiate_forked() else "fork"


def _can_differentiate_forked() -> bool:
    """Whether gradients can be computed in a process forked from this one, by trying (Linux)."""
    if sys.platform != "linux":
        return False
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            torch.ones(1, requires_grad=True).sum().backward()
            code = 0
        os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def start_process(
    method: str, target: Callable[..., None], args: tuple[object, ...], *, daemon: bool
) -> BaseProcess:
    """Starts a process in which Ctrl-C is held until it says what to do with it."""
    context: Any = multiprocessing.get_context(method)
    process: BaseProcess = context.Process(target=target, args=args, daemon=daemon)
    with _hold_interrupts(), _without_main_module() if method == "spawn" else _unchanged():
        process.start()
    return process


@contextlib.contextmanager
def _hold_interrupts() -> Iterator[None]:
    """Delays Ctrl-C, here and in processes that are started meanwhile."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _without_main_module() -> Iterator[None]:
    """Hides the script, which multiprocessing would run again in a process that starts anew."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _unchanged() -> Iterator[None]:
    yield


class ProcessInput(Generic[T]):
    """Something that new processes work with.

    Args:
        value: What they get.
        path: A file for it, which is written when it is first needed.
        what: What it is, for errors.
    """

    def __init__(self, value: T, path: Path, what: str) -> None:
        self.value, self._path, self._what = value, path, what
        self._stored: StoredInput[T] | None = None

    def for_method(self, method: str) -> ForkedInput[T] | StoredInput[T]:
        """The argument from which a process that is started with this method loads the value."""
        if method == "fork":
            return ForkedInput(self.value)
        if self._stored is None:
            self._stored = _store(self.value, self._path, self._what)
        return self._stored


@dataclass(frozen=True)
class ForkedInput(Generic[T]):
    """The input of a forked process: the same objects."""

    value: T

    def load(self) -> T:
        """The value."""
        return self.value


@dataclass(frozen=True)
class StoredInput(Generic[T]):
    """The input of a process that is started anew: a copy in a file, and what it depends on."""

    path: Path
    what: str
    user_files: Mapping[str, str]  # files that were loaded as modules, by the modules' names
    dtype: torch.dtype  # of new tensors
    precision: str  # of matrix products
    is_deterministic: bool

    def load(self) -> T:
        """The value, with tensors that are mapped; what is written to is copied.

        Raises a ConfigError if something that it needs is not there.
        """
        torch.set_default_dtype(self.dtype)
        torch.set_float32_matmul_precision(self.precision)
        torch.use_deterministic_algorithms(self.is_deterministic)
        try:
            for name, path in self.user_files.items():
                load_file(name, Path(path))
            value: T = torch.load(self.path, mmap=True, weights_only=False)
        except Exception as problem:
            raise ConfigError(
                f"a new process cannot load {self.what} ({type(problem).__name__}: {problem}); "
                "define them where other processes can import them, or use workers = 0"
            ) from problem
        return value


def _store(value: T, path: Path, what: str) -> StoredInput[T]:
    pickle_module = types.SimpleNamespace(__name__="cloudpickle", Pickler=cloudpickle.Pickler)
    try:
        torch.save(value, path, pickle_module, pickle.HIGHEST_PROTOCOL)
    except OSError:
        raise
    except Exception as problem:
        raise ConfigError(
            f"new processes need a copy of {what}, and it cannot be made "
            f"({type(problem).__name__}: {problem}); define what cannot be copied in a module and "
            "open files there when they are used, or use workers = 0"
        ) from problem
    return StoredInput(
        path,
        what,
        list_loaded_files(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )


def encode_message(message: object, method: str) -> bytes:
    """A message for a process that was started with this method, which ``pickle`` decodes."""
    if method == "fork":
        with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):
            return pickle.dumps(message)
    try:
        data: bytes = cloudpickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    except Exception as problem:
        raise ConfigError(
            f"what a client does is sent to another process, and cannot be ({problem}); make its "
            "recipe of plain values, or use workers = 0"
        ) from problem
    return data


def exit_with_parent(parent: int) -> None:
    """Makes this process end when its parent does, even if that is killed (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def retain_freed_memory() -> None:
    """Makes the C library keep freed memory (glibc).

    Training frees and allocates the same large blocks at every step. By default each of them is
    returned to the system, which clears it again.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: keep up to 2 GB that was freed
            libc.mallopt(-4, 0)  # M_MMAP_MAX: also of the largest blocks
