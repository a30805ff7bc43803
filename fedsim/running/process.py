"""The running process: settings that make torch faster on a CPU, and stop signals.

`fedsim.run` uses it first, and processes of other software do so in `fedsim.jobs.task_worker`. It
needs the standard library only, because it is used before the first slow import. `STOP` has the
stop signals of this process: code that runs rounds reads its `status` after each.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

# Numbers of options of glibc's mallopt (malloc.h).
TRIM_THRESHOLD = -1
TOP_PAD = -2
MMAP_THRESHOLD = -3


def tune() -> None:
    """Make torch on a CPU faster, unless the user's environment says otherwise.

    Idle threads spin for a short time only, because spinning stalls runs that share cores. glibc
    keeps freed memory, which it would give back to the kernel and request anew in every step.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        # Turns of the loop in which an idle thread of GNU OpenMP waits before it sleeps.
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    is_set = "MALLOC_TRIM_THRESHOLD_" in os.environ or "MALLOC_MMAP_THRESHOLD_" in os.environ
    if sys.platform != "linux" or is_set:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # other C libraries have none
        # In bytes: smaller blocks come from memory that glibc keeps, not from a mapping of their
        # own; freed memory is given back only above the largest int; memory is requested in pieces
        # of 64 MiB.
        mallopt(MMAP_THRESHOLD, 2**30)
        mallopt(TRIM_THRESHOLD, 2**31 - 1)
        mallopt(TOP_PAD, 64 * 2**20)


def open_missing_streams() -> None:
    """Open /dev/null for each standard stream that the process was started without.

    Otherwise the next file that is opened gets the stream's number (0, 1 or 2), and a notice on
    stderr would be written into a result.
    """
    if sys.stdin is None:
        sys.stdin = _open_nowhere("r")
    if sys.stdout is None:
        sys.stdout = _open_nowhere("w")
    if sys.stderr is None:
        sys.stderr = _open_nowhere("w")


def _open_nowhere(mode: str) -> Any:
    stream = open(os.devnull, mode, encoding="utf-8")  # noqa: PTH123, SIM115
    os.set_inheritable(stream.fileno(), True)  # as standard streams are, also in child processes
    return stream


PREEMPTING = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
"""Signals that clusters send before they take a machine away."""
CODES = {"interrupted": 130, "preempted": 75}
"""Exit codes of a process that a signal stopped, by the status of its runs."""
NOTICE = b"\nfedsim: finishing this round and saving it; Ctrl-C again stops at once\n"
"""The line on stderr after a signal while rounds run."""


class Preempted(BaseException):
    """One of `PREEMPTING` stopped the process, as Ctrl-C does with KeyboardInterrupt."""


class StopRequests:
    """The stop signals that the process has received, and what they do.

    - Outside of `working` (before jobs run, and after them), a signal ends the process.
    - Within `working`, it raises KeyboardInterrupt or `Preempted`.
    - Within `deferred`, where rounds run, it is only noted. A second Ctrl-C raises
      KeyboardInterrupt.

    `received` has the numbers of the signals. `fedsim.run` calls `install`.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        # The contexts that are entered at present: all of them, and those of `deferred`.
        self._num_working = 0
        self._num_deferring = 0
        self._notice = NOTICE

    @property
    def status(self) -> str | None:
        """`interrupted` or `preempted` after the first signal, None before."""
        if not self.received:
            return None
        return "interrupted" if self.received[0] == signal.SIGINT else "preempted"

    def install(self) -> None:
        """Handle Ctrl-C and the signals of `PREEMPTING`.

        Signals that the parent process ignores (nohup) stay ignored.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for name in ("SIGINT", *PREEMPTING):
            number = getattr(signal, name, None)  # Windows lacks most
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self.handle)

    @contextmanager
    def working(self, deferring: int = 0) -> Iterator[None]:
        """Enter this context while jobs run, so that a signal lets them save.

        With `deferring=1` signals are only noted: see `deferred`.
        """
        self._num_working += 1
        self._num_deferring += deferring
        try:
            yield
        finally:
            self._num_working -= 1
            self._num_deferring -= deferring

    def deferred(self) -> AbstractContextManager[None]:
        """Return a context for code that runs rounds and looks at `status` after each.

        Contexts are counted, because each of several lanes enters one and leaves it at its end.
        """
        return self.working(deferring=1)

    def defer_always(self) -> None:
        """Only note signals from here on.

        Processes that work for another one call this: that one learns of the signal from their
        results.
        """
        if not self._num_deferring:
            self.install()
            self._num_working = 1
            self._num_deferring = 1
            self._notice = b""

    def handle(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal: note it, and do what the class's docstring says."""
        self.received.append(number)
        if not self._num_working:
            # There is nothing to save. Cleaning up may hang in the middle of an import.
            os._exit(CODES[str(self.status)])
        if self._num_deferring and self.received.count(signal.SIGINT) < 2:
            with suppress(OSError):
                os.write(2, self._notice)  # sys.stderr may be in the middle of a write
        else:
            self.raise_if_asked()

    def raise_if_asked(self) -> None:
        """Raise KeyboardInterrupt or `Preempted` if there was a signal; otherwise do nothing."""
        if self.status == "interrupted" or self.received.count(signal.SIGINT) > 1:
            raise KeyboardInterrupt
        if self.status == "preempted":
            raise Preempted


STOP = StopRequests()
"""The stop requests of this process."""


@dataclass(frozen=True)
class World:
    """The place of this process among those of torchrun: `rank` of `size` processes.

    `local_rank` is its number among the processes of this machine, and that of its GPU.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0


def world() -> World:
    """Return what torchrun has set in the environment; without all of it, a single process."""
    rank = os.environ.get("RANK", "")
    size = os.environ.get("WORLD_SIZE", "")
    local_rank = os.environ.get("LOCAL_RANK", "0")
    has_address = os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT")
    if not has_address or not all(map(str.isdecimal, (rank, size, local_rank))) or int(size) < 2:
        return World()
    return World(int(rank), int(size), int(local_rank))
