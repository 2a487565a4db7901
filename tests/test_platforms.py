"""Names that only some systems have are used behind a guard; see ``make types-platforms`` too."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
import torch

import fedquilt
from fedquilt.engines.scratch import ScratchDirectory
from fedquilt.federation import flat_tensors

FILES = sorted(Path(fedquilt.__file__).parent.rglob("*.py"))
ATTRIBUTES = {
    "os": "fork forkpty killpg setsid sysconf pread pwrite writev getloadavg sched_getaffinity"
    " uname getuid mkfifo wait3 wait4 O_TMPFILE posix_fallocate",
    "signal": "SIGKILL SIGHUP SIGSTOP SIGCONT SIGALRM SIGUSR1 pthread_sigmask setitimer alarm",
    "select": "epoll poll kqueue",
    "socket": "AF_UNIX socketpair",
}
MODULES = {"fcntl", "resource", "termios", "pwd", "grp", "msvcrt", "winreg", "pty", "syslog"}
FOLDERS = ("/proc", "/dev/", "/tmp", "/var", "/sys")
GUARDS = ("sys.platform", "hasattr(", "except", ".is_dir()", ".exists()")


def find_platform_names(node: ast.AST) -> str | None:
    """What a node uses that only some systems have."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        is_known = node.attr in ATTRIBUTES.get(node.value.id, "").split()
        return f"{node.value.id}.{node.attr}" if is_known else None
    if isinstance(node, ast.Import):
        return next((alias.name for alias in node.names if alias.name in MODULES), None)
    if isinstance(node, ast.ImportFrom):
        return node.module if node.module in MODULES else None
    if isinstance(node, ast.keyword):
        return node.arg if node.arg == "preexec_fn" else None
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value if node.value.startswith(FOLDERS) else None
    return None


def list_unguarded(source: str) -> list[str]:
    """Uses without a guard in the same function, or, outside of functions, in the same statement.

    A path that is only named may be guarded anywhere in the module.
    """
    unguarded = []
    tree = ast.parse(source)
    for scope in [*_list_functions(tree), *tree.body]:
        if isinstance(scope, ast.ClassDef):
            continue
        text = ast.get_source_segment(source, scope) or ""
        for node in ast.walk(scope):
            name = find_platform_names(node)
            where = source if name is not None and name.startswith("/") else text
            if name is not None and not any(guard in where for guard in GUARDS):
                unguarded.append(f"line {node.lineno}: {name}")  # type: ignore[attr-defined]
    return unguarded


def _list_functions(tree: ast.Module) -> list[ast.AST]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_names_of_one_system_are_used_behind_a_guard(path: Path) -> None:
    assert not list_unguarded(path.read_text()), "ask sys.platform or hasattr, and have a fallback"


@pytest.mark.parametrize(
    ("line", "use"),
    [
        ("def f(): {}", "os.fork()"),
        ("class A:\n    def f(self): {}", "run(preexec_fn=None)"),
        ("def f(number={}): pass", "signal.SIGHUP"),
        ("LIMIT = {}", "signal.SIGKILL"),
        ("def f(): return {}", "open('/proc/meminfo')"),
    ],
)
def test_the_search_finds_what_has_no_guard(line: str, use: str) -> None:
    assert list_unguarded(line.format(use))
    assert not list_unguarded(line.format(f"{use} if sys.platform == 'linux' else None"))


def test_the_search_finds_modules_of_one_system() -> None:
    assert list_unguarded("import fcntl")
    assert not list_unguarded("if sys.platform != 'win32':\n    import fcntl")


def test_updates_are_read_where_mapped_files_cannot_be_removed(tmp_path, monkeypatch):
    tensors = {"a": torch.arange(5), "b": torch.rand(2, 3), "c": torch.empty(0, 4)}
    slots = flat_tensors.write_flat(tmp_path / "update", tensors)
    mapped = flat_tensors.read_flat(tmp_path / "update", slots)
    monkeypatch.setattr(sys, "platform", "win32")
    copied = flat_tensors.read_flat(tmp_path / "update", slots)
    monkeypatch.undo()
    assert all(
        torch.equal(tensors[n], mapped[n]) and torch.equal(tensors[n], copied[n]) for n in tensors
    )


def test_a_scratch_directory_of_a_living_process_stays_and_leaves_nothing(tmp_path):
    first = ScratchDirectory(tmp_path)
    with ScratchDirectory(tmp_path) as second:
        assert first.folder.is_dir()
        assert second.is_dir()
        assert second != first.folder
    assert first.folder.is_dir()
    first.close()
    assert not list(tmp_path.iterdir())
