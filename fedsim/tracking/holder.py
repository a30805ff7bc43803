"""Which process holds the lock of a run's folder, as a file beside the lock tells those that wait for it."""

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from fedsim.disk import write_atomically


@dataclass(frozen=True)
class Holder:
    """A process: its `host`, its `pid` there, and `since` when it holds the lock (seconds since 1970)."""

    host: str
    pid: int
    since: float

    @classmethod
    def this_process(cls) -> "Holder":
        return cls(socket.gethostname(), os.getpid(), time.time())

    @classmethod
    def read(cls, path: Path) -> "Holder | None":
        """The holder that `path` names, or None if it cannot be read."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            return cls(str(found["host"]), int(found["pid"]), float(found["since"]))
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None

    def write(self, path: Path) -> None:
        """Write the file atomically. That a disk is full is no reason not to work: the file is for people."""
        with suppress(OSError):
            write_atomically(path, json.dumps(asdict(self)).encode())

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, for {_duration(time.time() - self.since)}"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{max(seconds, 0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
