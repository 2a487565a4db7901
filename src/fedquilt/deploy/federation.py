"""A federation on this machine: a SuperLink and SuperNodes as processes, over loopback.

With TLS, and only nodes whose keys are registered are let in, unless it is to be insecure.
Everything is in one folder that only its owner may look into:

    certificates/   an authority, the server's certificate and key
    keys/           a key pair for each node
    nodes/          what each node was started with
    flower/         Flower's own folder; its config.toml says how to reach the SuperLink
    link.db         what the SuperLink remembers: nodes and runs
    state/          what clients keep
    logs/           of every process
"""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedquilt.config import as_value
from fedquilt.deploy.connection import Connection, environment, executable
from fedquilt.deploy.service import Service
from fedquilt.errors import ConfigError, FederationError
from fedquilt.files import write_text

if TYPE_CHECKING:
    from fedquilt.deploy.certificates import Certificates, NodeKey
    from fedquilt.deploy.control import Control

HOST = "127.0.0.1"
NAME = "fedquilt"  # of the SuperLink, for Flower's commands
ABOUT = "federation.json"
PAUSE = 0.2  # seconds between two looks
START = 120.0  # seconds in which a SuperLink must answer, and nodes must be online

Value = bool | int | float | str
NodeConfig = Mapping[str, Value]


@dataclass(frozen=True)
class NodeStatus:
    """A node as it is now; its exit code is None while it runs."""

    number: int
    pid: int
    exit_code: int | None
    is_online: bool
    config: NodeConfig

    @property
    def is_running(self) -> bool:
        """Whether its process is there."""
        return self.exit_code is None

    @property
    def budget(self) -> Value | None:
        """With which it was started; None: as the settings of a run deal them."""
        return self.config.get("budget")


class Federation:
    """Runs between ``start`` and ``stop``, or inside of ``with``.

    ``nodes`` says for each node what Flower calls its node config: ``partition-id``, and perhaps
    ``budget``, ``data`` and ``state``. With ``simulation`` there are no nodes: Flower simulates as
    many as a run asks for. Without a ``port`` a free one is taken.
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
            raise ConfigError("a simulation has no nodes of its own; give none")
        self.folder, self.nodes = folder.resolve(), tuple(nodes)
        self._is_simulation, self._is_insecure = simulation, insecure or simulation
        self._wanted_port = port
        self._link: Service | None = None
        self._services: dict[int, Service] = {}

    @property
    def address(self) -> str:
        """Where the SuperLink is."""
        return f"{HOST}:{self._ports[0]}"

    @property
    def security(self) -> str:
        """Who may connect, and how, in a few words."""
        if self._is_insecure:
            return "without TLS, and open to any node"
        return "with TLS, and open to registered nodes only"

    @property
    def connection(self) -> Connection:
        """How runs are sent there."""
        return Connection(NAME, self.folder / "flower")

    def start(self) -> None:
        """Starts all processes; the SuperLink answers, nodes may not be online yet."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for name in ("flower", "logs", "nodes", "state"):
                (self.folder / name).mkdir(exist_ok=True, mode=0o700)
        except OSError as problem:
            raise ConfigError(f"{self.folder} cannot hold a federation ({problem})") from problem
        if about(self.folder) is not None:
            raise ConfigError(
                f"a federation runs in {self.folder} already; stop it, or choose another folder"
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

    def wait(self, seconds: float = START) -> None:
        """Waits until all nodes are online."""
        logs = self.folder / "logs"
        _until(self._are_online, f"nodes are not online; see {logs}", seconds)

    def _are_online(self) -> bool:
        statuses = self.status()
        for status in statuses:
            if not status.is_running:
                service = self._services[status.number]
                raise FederationError(_death(f"node {status.number}", service))
        return all(status.is_online for status in statuses)

    def status(self) -> list[NodeStatus]:
        """How every node is; raises a FederationError if the SuperLink has died."""
        if self._link is None or self._link.exit_code is not None:
            raise FederationError(_death("the SuperLink", self._link))
        online = self._control.online() if self._services else set()
        return [
            NodeStatus(
                number,
                service.pid,
                service.exit_code,
                service.exit_code is None and _flowers_number(service) in online,
                self.nodes[number],
            )
            for number, service in sorted(self._services.items())
        ]

    def family(self) -> set[int]:
        """All of its processes that run, and those that they have started."""
        services = [*self._services.values(), *([] if self._link is None else [self._link])]
        return {pid for service in services for pid in service.family()}

    def stop(self) -> None:
        """Ends all processes, nodes first."""
        (self.folder / ABOUT).unlink(missing_ok=True)
        for service in self._services.values():
            service.ask()
        for service in self._services.values():
            service.end()
        if self._link is not None:
            self._link.ask()
            self._link.end()
        self._link, self._services = None, {}

    def start_node(self, number: int) -> None:
        """Starts a node that does not run; waits until its SuperLink knows that it does not."""
        if number in self._services and self._services[number].exit_code is None:
            raise ConfigError(f"node {number} runs already")
        path = self.folder / "nodes" / f"node-{number}.toml"
        lines = (f"{name} = {as_value(value)}\n" for name, value in self.nodes[number].items())
        write_text(path, "".join(lines))
        command = [executable("flower-supernode"), "--superlink", self.address]
        command += ["--port", str(self._ports[1 + number]), "--node-config", str(path)]
        if self._is_insecure:
            command += ["--insecure"]
        else:
            key = self._key(number)
            _until(lambda: not self._control.is_online(key.public), f"node {number} is still there")
            command += ["--root-certificates", str(self._certificates.authority)]
            command += ["--auth-supernode-private-key", str(key.private)]
            command += self._served_with_tls()
        log = self.folder / "logs" / f"node-{number}.log"
        self._services[number] = Service(command, log, self._environment)

    def stop_node(self, number: int, how: signal.Signals = signal.SIGTERM) -> None:
        """Ends a node."""
        self._services[number].ask(how)
        self._services[number].end()

    def restart_link(self, how: signal.Signals = signal.SIGKILL) -> None:
        """Ends the SuperLink, and starts it again on the same port with what it remembers."""
        if self._link is not None:
            self._link.ask(how)
            self._link.end()
        self._start_link()

    def _start_link(self) -> None:
        """Starts the SuperLink, and lets the nodes in."""
        command = [executable("flower-superlink"), "--host", HOST, "--port", str(self._ports[0])]
        command += ["--database", str(self.folder / "link.db")]
        command += ["--disable-runtime-dependency-installation"]
        command += ["--simulation"] if self._is_simulation else []
        if self._is_insecure:
            command += ["--insecure"]
        else:
            command += ["--enable-supernode-auth", *self._served_with_tls()]
        self._write_config()
        log = self.folder / "logs" / "superlink.log"
        self._link = link = Service(command, log, self._environment)
        _until(lambda: self._answers(link), f"the SuperLink gives no answer; see {log}")
        if not self._is_insecure:
            for number in range(len(self.nodes)):
                self._control.register(self._key(number).public, f"node-{number}")
        words = {"port": self._ports[0], "is_insecure": self._is_insecure, "nodes": self.nodes}
        write_text(self.folder / ABOUT, json.dumps(words, indent=1))

    def _answers(self, link: Service) -> bool:
        if link.exit_code is not None:
            raise FederationError(_death("the SuperLink", link))
        return self._control.is_there()

    def _write_config(self) -> None:
        """Tells Flower's commands how to reach the SuperLink."""
        lines = ["[superlink]", f'default = "{NAME}"', "", f"[superlink.{NAME}]"]
        lines += [f'address = "{self.address}"']
        if self._is_insecure:
            lines += ["insecure = true"]
        else:
            lines += [f"root-certificates = {as_value(str(self._certificates.authority))}"]
        write_text(self.folder / "flower" / "config.toml", "\n".join([*lines, ""]))

    def _served_with_tls(self) -> list[str]:
        found = self._certificates
        options = {
            "--ssl-ca-certfile": found.authority,
            "--ssl-certfile": found.certificate,
            "--ssl-keyfile": found.key,
        }
        return [word for option, path in options.items() for word in (option, str(path))]

    @cached_property
    def _ports(self) -> tuple[int, ...]:
        return _free_ports(len(self.nodes) + 1, self._wanted_port)

    @cached_property
    def _certificates(self) -> Certificates:
        from fedquilt.deploy.certificates import server_certificates

        return server_certificates(self.folder / "certificates")

    def _key(self, number: int) -> NodeKey:
        from fedquilt.deploy.certificates import node_key

        return node_key(self.folder / "keys", f"node-{number}")

    @cached_property
    def _control(self) -> Control:
        from fedquilt.deploy.control import Control

        authority = None if self._is_insecure else self._certificates.authority
        return Control(HOST, self._ports[0], authority)

    @property
    def _environment(self) -> dict[str, str]:
        home = self.folder / "flower"
        return {**environment(home), "FEDQUILT_STATE": str(self.folder / "state")}


def require_flower() -> None:
    """Refuses what needs Flower if it is not installed."""
    if importlib.util.find_spec("flwr") is None:
        raise ConfigError("a federation needs the extra: pip install 'fedquilt[flower]'")


def about(folder: Path) -> dict[str, Any] | None:
    """What the federation that runs in a folder says about itself; None if there is none."""
    from fedquilt.deploy.control import Control

    try:
        words: dict[str, Any] = json.loads((folder / ABOUT).read_text())
        authority = None if words["is_insecure"] else folder / "certificates" / "ca.crt"
        return words if Control(HOST, words["port"], authority).is_there() else None
    except (OSError, ValueError):
        return None


def _until(is_so: Callable[[], bool], otherwise: str, seconds: float = START) -> None:
    """Waits until something is so."""
    until = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() >= until:
            raise FederationError(f"after {seconds:g} seconds {otherwise}")
        time.sleep(PAUSE)


def _free_ports(count: int, first: int | None) -> tuple[int, ...]:
    """Ports that nobody listens on, the first of them as wanted."""
    with ExitStack() as stack:
        found = []
        for wanted in (first or 0, *[0] * (count - 1)):
            place = stack.enter_context(socket.socket())
            place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                place.bind((HOST, wanted))
            except OSError as problem:
                raise ConfigError(
                    f"port {wanted} cannot be used ({problem.strerror}); choose another"
                ) from problem
            found.append(place.getsockname()[1])
        return tuple(found)


def _flowers_number(service: Service) -> int | None:
    """The number under which Flower knows a node; it says so in its log."""
    found = re.findall(r"SuperNode ID: (\d+)", service.said)
    return int(found[-1]) if found else None


def _death(who: str, service: Service | None) -> str:
    if service is None:
        return f"{who} does not run"
    return f"{who} ended with exit code {service.exit_code}: {service.last_words}"
