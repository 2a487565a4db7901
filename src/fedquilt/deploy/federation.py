"""A Flower deployment on this machine: a SuperLink and SuperNodes as processes, over loopback.

It uses TLS and accepts only nodes whose keys are registered, unless it is insecure. All files are
in one folder that only its owner can read:

    certificates/   a certificate authority, the server's certificate and key
    keys/           a key pair for each node
    nodes/          the configuration of each node
    flower/         Flower's own folder; its config.toml names the SuperLink
    link.db         the SuperLink's database of nodes and runs
    state/          the state of clients
    logs/           the log of every process
"""

from __future__ import annotations

import importlib.util
import json
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedquilt.deploy.flower_cli import SuperLinkConnection, find_executable, make_environment
from fedquilt.deploy.flower_internals import SuperLinkClient, find_node_id
from fedquilt.deploy.node_config import NodeConfig, Value
from fedquilt.deploy.process import KILL, ManagedProcess
from fedquilt.errors import ConfigError, FederationError
from fedquilt.files import write_text
from fedquilt.settings.toml import format_value

if TYPE_CHECKING:
    from fedquilt.deploy.certificates import Certificates, NodeKey

HOST = "127.0.0.1"
CONNECTION_NAME = "fedquilt"  # of the SuperLink, in Flower's configuration
INFO_FILE = "federation.json"
POLL_INTERVAL = 0.2  # seconds
START_TIMEOUT = 120.0  # seconds until a SuperLink responds, and until nodes are online


@dataclass(frozen=True)
class NodeStatus:
    """The state of a node's process; its exit code is None while it runs."""

    number: int
    pid: int
    exit_code: int | None
    is_online: bool
    config: NodeConfig

    @property
    def is_running(self) -> bool:
        """Whether its process runs."""
        return self.exit_code is None

    @property
    def budget(self) -> Value | None:
        """The budget that it was started with; None: a run's settings decide."""
        return self.config.get("budget")


class Federation:
    """A SuperLink and its SuperNodes. They run between ``start`` and ``stop``, or inside ``with``.

    Args:
        folder: Where all files are.
        nodes: Flower's node config of each node: ``partition-id``, and optionally ``budget``,
            ``data`` and ``state``.
        insecure: Without TLS, and open to any node.
        simulation: Without nodes: Flower simulates as many as a run asks for.
        port: The SuperLink's port; None means a free one.
    """

    def __init__(
        self,
        folder: Path,
        nodes: Sequence[NodeConfig] = (),
        *,
        insecure: bool = False,
        simulation: bool = False,
        port: int | None = None,
    ) -> None:
        require_flower()
        if simulation and nodes:
            raise ConfigError("a simulation starts no nodes; leave out nodes")
        self.folder, self.nodes = folder.resolve(), tuple(nodes)
        self._is_simulation, self._is_insecure = simulation, insecure or simulation
        self._port = port
        self._link: ManagedProcess | None = None
        self._processes: dict[int, ManagedProcess] = {}  # by number of the node

    @property
    def address(self) -> str:
        """The SuperLink's address."""
        return f"{HOST}:{self._ports[0]}"

    @property
    def security(self) -> str:
        """How nodes connect, and which may."""
        if self._is_insecure:
            return "without TLS, open to any node"
        return "with TLS, open to registered nodes only"

    @property
    def connection(self) -> SuperLinkConnection:
        """The connection through which runs are started."""
        return SuperLinkConnection(CONNECTION_NAME, self.folder / "flower")

    def start(self) -> None:
        """Starts all processes. The SuperLink responds then; nodes may not be online yet."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for name in ("flower", "logs", "nodes", "state"):
                (self.folder / name).mkdir(exist_ok=True, mode=0o700)
        except OSError as problem:
            raise ConfigError(
                f"the folder {self.folder} cannot be used ({problem}); choose another"
            ) from problem
        if read_federation_info(self.folder) is not None:
            raise ConfigError(
                f"a federation is already running in {self.folder}; stop it, or choose another"
            )
        try:
            self._start_link()
            for number in range(len(self.nodes)):
                self.start_node(number)
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Federation:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait(self, timeout: float = START_TIMEOUT) -> None:
        """Waits until all nodes are online."""
        logs = self.folder / "logs"
        _wait_until(self._are_online, f"not all nodes are online; see {logs}", timeout)

    def _are_online(self) -> bool:
        statuses = self.status()
        for status in statuses:
            if not status.is_running:
                process = self._processes[status.number]
                raise FederationError(_describe_exit(f"node {status.number}", process))
        return all(status.is_online for status in statuses)

    def status(self) -> list[NodeStatus]:
        """The state of every node; raises a FederationError if the SuperLink has ended."""
        if self._link is None or self._link.exit_code is not None:
            raise FederationError(_describe_exit("the SuperLink", self._link))
        online = self._client.list_online_nodes() if self._processes else set()
        return [
            NodeStatus(
                number,
                process.pid,
                process.exit_code,
                process.exit_code is None and find_node_id(process.log_text) in online,
                self.nodes[number],
            )
            for number, process in sorted(self._processes.items())
        ]

    def list_processes(self) -> set[int]:
        """The ids of all running processes, descendants included."""
        processes = [*self._processes.values(), *([] if self._link is None else [self._link])]
        return {pid for process in processes for pid in process.list_processes()}

    def stop(self) -> None:
        """Stops all processes, nodes first."""
        (self.folder / INFO_FILE).unlink(missing_ok=True)
        for process in self._processes.values():
            process.send_signal()
        for process in self._processes.values():
            process.terminate()
        if self._link is not None:
            self._link.send_signal()
            self._link.terminate()
        self._link, self._processes = None, {}

    def start_node(self, number: int) -> None:
        """Starts a node that is not running, once the SuperLink does not list it as online."""
        if number in self._processes and self._processes[number].exit_code is None:
            raise ConfigError(f"node {number} is already running")
        path = self.folder / "nodes" / f"node-{number}.toml"
        lines = (f"{name} = {format_value(value)}\n" for name, value in self.nodes[number].items())
        write_text(path, "".join(lines))
        command = [find_executable("flower-supernode"), "--superlink", self.address]
        command += ["--port", str(self._ports[1 + number]), "--node-config", str(path)]
        if self._is_insecure:
            command += ["--insecure"]
        else:
            key = self._ensure_key(number)
            problem = f"the SuperLink still lists node {number} as online"
            _wait_until(lambda: not self._client.is_online(key.public), problem)
            command += ["--root-certificates", str(self._certificates.authority)]
            command += ["--auth-supernode-private-key", str(key.private)]
            command += self._make_tls_options()
        log = self.folder / "logs" / f"node-{number}.log"
        self._processes[number] = ManagedProcess(command, log, self._environment)

    def stop_node(self, number: int, signal_number: signal.Signals = signal.SIGTERM) -> None:
        """Stops a node."""
        self._processes[number].send_signal(signal_number)
        self._processes[number].terminate()

    def restart_link(self, signal_number: signal.Signals = KILL) -> None:
        """Stops the SuperLink, and starts it again with the same port and database."""
        if self._link is not None:
            self._link.send_signal(signal_number)
            self._link.terminate()
        self._start_link()

    def _start_link(self) -> None:
        """Starts the SuperLink, and registers the nodes."""
        command = [find_executable("flower-superlink"), "--host", HOST]
        command += ["--port", str(self._ports[0]), "--database", str(self.folder / "link.db")]
        command += ["--disable-runtime-dependency-installation"]
        command += ["--simulation"] if self._is_simulation else []
        if self._is_insecure:
            command += ["--insecure"]
        else:
            command += ["--enable-supernode-auth", *self._make_tls_options()]
        self._write_flower_config()
        log = self.folder / "logs" / "superlink.log"
        self._link = link = ManagedProcess(command, log, self._environment)
        _wait_until(lambda: self._is_available(link), f"the SuperLink does not respond; see {log}")
        if not self._is_insecure:
            for number in range(len(self.nodes)):
                self._client.register(self._ensure_key(number).public, f"node-{number}")
        info = {"port": self._ports[0], "is_insecure": self._is_insecure, "nodes": self.nodes}
        write_text(self.folder / INFO_FILE, json.dumps(info, indent=1))

    def _is_available(self, link: ManagedProcess) -> bool:
        if link.exit_code is not None:
            raise FederationError(_describe_exit("the SuperLink", link))
        return self._client.is_available()

    def _write_flower_config(self) -> None:
        """Writes Flower's configuration, which names the SuperLink for its commands."""
        lines = ["[superlink]", f'default = "{CONNECTION_NAME}"', ""]
        lines += [f"[superlink.{CONNECTION_NAME}]", f'address = "{self.address}"']
        if self._is_insecure:
            lines += ["insecure = true"]
        else:
            lines += [f"root-certificates = {format_value(str(self._certificates.authority))}"]
        write_text(self.folder / "flower" / "config.toml", "\n".join([*lines, ""]))

    def _make_tls_options(self) -> list[str]:
        certificates = self._certificates
        options = {
            "--ssl-ca-certfile": certificates.authority,
            "--ssl-certfile": certificates.certificate,
            "--ssl-keyfile": certificates.key,
        }
        return [text for option, path in options.items() for text in (option, str(path))]

    @cached_property
    def _ports(self) -> tuple[int, ...]:
        return _find_free_ports(len(self.nodes) + 1, self._port)

    @cached_property
    def _certificates(self) -> Certificates:
        from fedquilt.deploy.certificates import ensure_server_certificates

        return ensure_server_certificates(self.folder / "certificates")

    def _ensure_key(self, number: int) -> NodeKey:
        from fedquilt.deploy.certificates import ensure_node_key

        return ensure_node_key(self.folder / "keys", f"node-{number}")

    @cached_property
    def _client(self) -> SuperLinkClient:
        authority = None if self._is_insecure else self._certificates.authority
        return SuperLinkClient(HOST, self._ports[0], authority)

    @property
    def _environment(self) -> dict[str, str]:
        home = self.folder / "flower"
        return {**make_environment(home), "FEDQUILT_STATE": str(self.folder / "state")}


def require_flower() -> None:
    """Raises a ConfigError if Flower is not installed."""
    if importlib.util.find_spec("flwr") is None:
        raise ConfigError("a federation needs Flower; install it: pip install 'fedquilt[flower]'")


def read_federation_info(folder: Path) -> dict[str, Any] | None:
    """The port, security and nodes of the federation that runs in a folder; None if none does."""
    try:
        info: dict[str, Any] = json.loads((folder / INFO_FILE).read_text())
        authority = None if info["is_insecure"] else folder / "certificates" / "ca.crt"
        return info if SuperLinkClient(HOST, info["port"], authority).is_available() else None
    except (OSError, ValueError):
        return None


def _wait_until(
    condition: Callable[[], bool], problem: str, timeout: float = START_TIMEOUT
) -> None:
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() >= end:
            raise FederationError(f"after {timeout:g} seconds {problem}")
        time.sleep(POLL_INTERVAL)


def _find_free_ports(count: int, first: int | None) -> tuple[int, ...]:
    """Ports that are free; ``first`` is the first of them, if it is given."""
    with ExitStack() as stack:
        ports = []
        for wanted in (first or 0, *[0] * (count - 1)):
            listener = stack.enter_context(socket.socket())
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((HOST, wanted))
            except OSError as problem:
                raise ConfigError(
                    f"port {wanted} cannot be used ({problem.strerror}); choose another"
                ) from problem
            ports.append(listener.getsockname()[1])
        return tuple(ports)


def _describe_exit(name: str, process: ManagedProcess | None) -> str:
    if process is None:
        return f"{name} is not running"
    return f"{name} ended with exit code {process.exit_code}: {process.last_error}"
