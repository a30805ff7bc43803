"""The running process: settings that make torch on a CPU faster, signals that ask it to end, and
its exit code. Needs the standard library alone: it is in place before the first import that takes
time."""

import ctypes
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

from fedsim.core.errors import ConfigError, FedsimError
from fedsim.core.text import printable_lines

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3  # of mallopt
T = TypeVar("T")


def tune() -> None:
    """Short spinning of idle threads, which stalls runs that share cores, and freed memory kept,
    which glibc gives back to the kernel for every step to get anew; each only where the user's
    environment does not say otherwise."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    if sys.platform == "linux" and not {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & set(
        os.environ
    ):
        if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):  # none in another C library
            for option, value in (
                (MMAP_THRESHOLD, 2**30),
                (TRIM_THRESHOLD, 2**31 - 1),
                (TOP_PAD, 64 * 2**20),
            ):
                mallopt(option, value)


def open_missing_streams() -> None:
    """Open /dev/null for each of stdin, stdout and stderr that the process was started without.
    Otherwise the next file gets its number, and a notice on stderr is written into a result."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: PTH123, SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


PREEMPTING = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
"""What clusters send before they take a machine away."""
CODES = {
    "interrupted": 130,
    "preempted": 75,
}  # of a process that was asked to end, by the status of its runs
NOTICE = b"\nfedsim: finishing this round and saving it; Ctrl-C again stops at once\n"


class Preempted(BaseException):
    """The process was asked to end by one of `PREEMPTING`, as KeyboardInterrupt is by Ctrl-C."""


class StopRequests:
    """What signals have asked for. Before jobs run, and after that, their handler ends the process;
    within `deferred`, where rounds are run, it only notes the signal, and the second Ctrl-C raises
    KeyboardInterrupt; elsewhere it raises KeyboardInterrupt or `Preempted`."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._deferring, self._working, self._notice = 0, 0, NOTICE

    @property
    def status(self) -> str | None:
        """`interrupted` or `preempted` after the first signal, None before."""
        if not self.received:
            return None
        return "interrupted" if self.received[0] == signal.SIGINT else "preempted"

    def install(self) -> None:
        """Handle Ctrl-C and the signals of `PREEMPTING`; those that the parent has ignored (nohup)
        stay so."""
        if threading.current_thread() is not threading.main_thread():
            return
        for name in ("SIGINT", *PREEMPTING):
            number = getattr(signal, name, None)  # Windows lacks most
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self.handle)

    @contextmanager
    def working(self, deferring: int = 0) -> Iterator[None]:
        """Jobs are run."""
        self._working += 1
        self._deferring += deferring
        try:
            yield
        finally:
            self._working -= 1
            self._deferring -= deferring

    def deferred(self) -> AbstractContextManager[None]:
        """Rounds are run, of one run or (entered once for each) of several side by side: they look
        at `status`."""
        return self.working(deferring=1)

    def defer_always(self) -> None:
        """This process is given jobs by another, which learns from their results that it was asked
        to end."""
        if not self._deferring:
            self.install()
            self._working, self._deferring, self._notice = 1, 1, b""

    def handle(self, number: int, frame: FrameType | None = None) -> None:
        self.received.append(number)
        if not self._working:
            os._exit(CODES[str(self.status)])
        if self._deferring and self.received.count(signal.SIGINT) < 2:
            with suppress(OSError):
                os.write(2, self._notice)
            return
        self.raise_if_asked()

    def raise_if_asked(self) -> None:
        """Raise KeyboardInterrupt or `Preempted` if there was a signal."""
        if self.status == "interrupted" or self.received.count(signal.SIGINT) > 1:
            raise KeyboardInterrupt
        if self.status == "preempted":
            raise Preempted


STOP = StopRequests()


@dataclass(frozen=True)
class World:
    """`rank` of `size` processes; `local_rank` among those of this machine, whose GPU of that
    number it takes."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0


def world() -> World:
    """As torchrun has set it in the environment; a process of its own where that is not
    complete."""
    there = {"LOCAL_RANK": "0", **os.environ}
    numbers = [there.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    placed = (
        all(map(str.isdecimal, numbers)) and there.get("MASTER_ADDR") and there.get("MASTER_PORT")
    )
    return World(*map(int, numbers)) if placed and int(numbers[1]) > 1 else World()


EXIT_CODES = {"done": 0, "failed": 1, "config": 2, "data": 3, "diverged": 4, **CODES}
CLOSED_PIPE = 141  # as shells report a process whose output nobody reads


def exit_code(work: Callable[[], T], program: str = "fedsim") -> T | int:
    """What `work` returns, or the code of the error or signal that ends it; an error is told in the
    name of `program`. What is no `FedsimError`, a mistake in fedsim itself, is raised."""
    try:
        return work()
    except FedsimError as error:
        if os.environ.get("FEDSIM_DEBUG") == "1":
            raise
        print_error(error, program)
        return error.exit_code
    except (KeyboardInterrupt, Preempted) as end:
        return CODES["interrupted" if isinstance(end, KeyboardInterrupt) else "preempted"]
    except BrokenPipeError:  # of a reader that has seen enough, such as `head`
        silence()
        return CLOSED_PIPE
    except OSError as error:
        cause = outside_cause(error)
        if not cause:
            raise
        print_error(FedsimError(cause), program)
        return FedsimError.exit_code


def silence() -> None:
    """Send the standard output nowhere from here on, also what Python still writes as it exits."""
    with suppress(io.UnsupportedOperation):  # where it was replaced by an object that is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def outside_cause(error: OSError) -> str:
    """Return why an error is none of fedsim's own: a standard output that cannot be written, which
    is silent from here on, or a working folder that was deleted. Empty if neither is so."""
    try:
        print(end="", flush=True)
    except OSError:
        silence()
        return f"cannot write to the standard output ({error.strerror})"
    try:
        os.getcwd()  # noqa: PTH109
    except OSError:
        return "the working folder was deleted; change to one that exists"
    return ""


def print_error(error: FedsimError, program: str = "fedsim") -> None:
    """One screen on stderr."""
    lines = [f"{program}: {error}"]
    if isinstance(error, ConfigError):
        count = len(error.problems)
        lines = [
            f"{program}: {count} problem{'s' if count > 1 else ''} in the config; nothing was run"
        ]
        lines += [f"  {problem}" for problem in error.problems]
    with suppress(OSError):  # it may be full, too
        for line in lines:
            print(printable_lines(line), file=sys.stderr)
