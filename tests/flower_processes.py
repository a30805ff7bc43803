"""A deployment of Flower on loopback: a SuperLink and SuperNodes, each a process of its own."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

BINARIES = Path(sys.executable).parent
WAIT_SECONDS = 900
"""No step takes this long, even on a busy machine."""


class Federation:
    """A SuperLink and a SuperNode for each client from 0 to `num_nodes` - 1, with files in `home`.

    Leaving the context kills all processes, also those that Flower has started itself: each process
    has FLWR_HOME=`home` in its environment.
    """

    def __init__(self, home: Path, num_nodes: int) -> None:
        self.home = home.absolute()
        self.num_nodes = num_nodes
        self.port, *self.node_ports = free_ports(num_nodes + 1)
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}
        self.environment = {
            **os.environ,
            "FLWR_HOME": str(self.home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PATH": f"{BINARIES}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(Path(__file__).parents[1]),
        }

    def __enter__(self) -> "Federation":
        self.home.mkdir(parents=True)
        connection = f'[superlink.local]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        (self.home / "config.toml").write_text(connection)
        try:
            self.start_link()
            for client in range(self.num_nodes):
                self.start_node(client)
        except BaseException:
            self.kill_all()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            for log in sorted(self.home.glob("*.log")):
                error.add_note(f"--- {log.name}\n{log.read_text()[-5000:]}")
        self.kill_all()

    def start_link(self) -> None:
        """Start the SuperLink, and wait until it listens. It keeps its state in a file."""
        options = "--insecure --disable-runtime-dependency-installation --database superlink.db"
        self.link = self._start("superlink", *options.split(), "--port", str(self.port))
        wait_until(lambda: self._listens(self.port), self.link)

    def start_node(self, client: int) -> None:
        """Start the SuperNode of a client."""
        options = f"--insecure --superlink 127.0.0.1:{self.port} --port {self.node_ports[client]}"
        config = f"partition-id={client}"
        self.nodes[client] = self._start(
            "supernode", *options.split(), "--node-config", config, log=f"node_{client}"
        )

    def run(self, app: Path) -> None:
        """Submit an app, as `flwr run APP local`."""
        command = [BINARIES / "flwr", "run", app, "local"]
        done = subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=WAIT_SECONDS,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def kill_node(self, client: int) -> None:
        """Kill the SuperNode of a client and what it has started, without any warning."""
        os.killpg(self.nodes.pop(client).pid, signal.SIGKILL)

    def kill_server(self) -> None:
        """Kill the SuperLink and what it has started, without any warning."""
        groups = {node.pid for node in self.nodes.values()}
        for pid in self.processes():
            with suppress(ProcessLookupError):
                if os.getpgid(pid) not in groups:
                    os.kill(pid, signal.SIGKILL)
        self.link.wait()

    def apps(self, client: int) -> list[int]:
        """Return the ids of the processes in which the node of a client runs its app now."""
        group = self.nodes[client].pid
        ids = []
        for pid in self.processes():
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if b"clientapp" in command and os.getpgid(pid) == group:
                    ids.append(pid)
        return ids

    def processes(self) -> list[int]:
        """Return the ids of all processes of this deployment."""
        mark = f"FLWR_HOME={self.home}".encode()
        ids = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    ids.append(int(folder.name))
        return ids

    def kill_all(self) -> None:
        """Kill all processes. Those that a process starts meanwhile are killed in the next turn."""
        while ids := self.processes():
            for pid in ids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    def _start(self, kind: str, *options: str, log: str = "link") -> subprocess.Popen[bytes]:
        command = [BINARIES / f"flower-{kind}", *options]
        with (self.home / f"{log}.log").open("ab") as out:
            return subprocess.Popen(
                command,
                env=self.environment,
                cwd=self.home,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @staticmethod
    def _listens(port: int) -> bool:
        with socket.socket() as connection:
            return connection.connect_ex(("127.0.0.1", port)) == 0


def free_ports(count: int) -> list[int]:
    """Return numbers of ports that nobody uses now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in sockets]
    for server in sockets:
        server.close()
    return ports


def wait_until(is_done: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Wait until something is done. Fails if the process that does it ends, or after
    `WAIT_SECONDS`."""
    end = time.monotonic() + WAIT_SECONDS
    while not is_done():
        assert process.poll() is None, "the process has ended"
        assert time.monotonic() < end, f"not done after {WAIT_SECONDS} s"
        time.sleep(0.2)
