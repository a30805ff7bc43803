"""The running process: what is set up before the first slow import.

- `tune`: settings that make torch faster on a CPU.
- `open_missing_streams`: standard streams that the process was started without.
- `STOP`: the stop signals that the process has received. Code that runs rounds reads its `status`
  after each round.
- `world`: the place of the process among those of torchrun.

`fedsim.run` uses this module first, and `fedsim.jobs.task_worker` does in processes that other
software has started. It needs the standard library only.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
        # Smaller blocks [bytes] come from memory that glibc keeps, not from mappings of their own.
        mallopt(MMAP_THRESHOLD, 2**30)
        # glibc gives back freed memory only above this size [bytes], the largest int.
        mallopt(TRIM_THRESHOLD, 2**31 - 1)
        # glibc requests memory from the kernel in pieces of this size [bytes].
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
STOP_CODES = {"interrupted": 130, "preempted": 75}
"""Exit codes of a process that a signal stopped. The keys are all statuses of runs that a signal
stopped."""
NOTICE = b"\nfedsim: finishing this round and saving it; Ctrl-C again stops at once\n"
"""The line on stderr after a signal while rounds run."""


class Preempted(BaseException):
    """A signal of `PREEMPTING` stops the process. (Ctrl-C raises KeyboardInterrupt.)"""


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
        # Contexts are counted: each of several lanes enters `deferred` and leaves it at its end.
        self._num_working = 0
        self._num_deferring = 0
        self._notice = NOTICE

    @property
    def status(self) -> str | None:
        """`interrupted` or `preempted` after the first signal, None before."""
        if not self.received:
            return None
        return "interrupted" if self.received[0] == signal.SIGINT else "preempted"

    @property
    def _is_urgent(self) -> bool:
        """True after a second Ctrl-C, which does not wait for the end of a round."""
        return self.received.count(signal.SIGINT) > 1

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
    def working(self) -> Iterator[None]:
        """Enter this context while jobs run, so that a signal lets them save."""
        self._num_working += 1
        try:
            yield
        finally:
            self._num_working -= 1

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Enter this context to run rounds, and read `status` after each: signals only set it."""
        with self.working():
            self._num_deferring += 1
            try:
                yield
            finally:
                self._num_deferring -= 1

    def defer_always(self) -> None:
        """Only note signals from here on.

        A process that works for another process calls this. The other process learns of the signal
        from the results.
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
            os._exit(STOP_CODES[str(self.status)])
        if self._num_deferring and not self._is_urgent:
            with suppress(OSError):
                os.write(2, self._notice)  # sys.stderr may be in the middle of a write
        else:
            self.raise_if_asked()

    def raise_if_asked(self) -> None:
        """Raise KeyboardInterrupt or `Preempted` if there was a signal; otherwise do nothing."""
        if self.status == "interrupted" or self._is_urgent:
            raise KeyboardInterrupt
        if self.status == "preempted":
            raise Preempted


STOP = StopRequests()
"""The stop requests of this process."""


@dataclass(frozen=True)
class World:
    """The place of this process among those of torchrun: `rank` of `size` processes.

    `local_rank` is its number among the processes of this machine. It is also the number of its
    GPU.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0


def world() -> World:
    """Return the place that torchrun has set in the environment.

    If a variable of it is missing or no number, this process is the only one.
    """
    rank = os.environ.get("RANK", "")
    size = os.environ.get("WORLD_SIZE", "")
    local_rank = os.environ.get("LOCAL_RANK", "0")
    has_address = os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT")
    are_numbers = rank.isdecimal() and size.isdecimal() and local_rank.isdecimal()
    if not has_address or not are_numbers or int(size) < 2:
        return World()
    return World(int(rank), int(size), int(local_rank))
