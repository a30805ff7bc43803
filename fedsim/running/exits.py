"""Exit codes of a command, and its errors on stderr.

Commands use this module before the first slow import. Like `fedsim.running.process`, it therefore
needs no other package.
"""

import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from fedsim.core.errors import ConfigError, FedsimError
from fedsim.core.text import printable_lines
from fedsim.running.process import STOP_CODES, Preempted

T = TypeVar("T")

EXIT_CODES = {
    "done": 0,
    "reached": 0,
    "failed": 1,
    "config": 2,
    "data": 3,
    "diverged": 4,
} | STOP_CODES
"""The exit codes of a command by the status of its worst run."""
CLOSED_PIPE = 141
"""The exit code that a shell reports for a process whose output nobody reads."""


def exit_code(work: Callable[[], T], program: str = "fedsim") -> T | int:
    """Return what `work` returns, or the exit code of the error or signal that ends it.

    A `FedsimError` is printed in the name of `program`, and so is an `OSError` with a known cause
    (`outside_cause`). Any other error is a mistake in fedsim itself, and is raised.
    """
    try:
        return work()
    except FedsimError as error:
        if os.environ.get("FEDSIM_DEBUG") == "1":
            raise
        print_error(error, program)
        return error.exit_code
    except KeyboardInterrupt:
        return STOP_CODES["interrupted"]
    except Preempted:
        return STOP_CODES["preempted"]
    except BrokenPipeError:  # the reader has seen enough, as `head` has
        silence()
        return CLOSED_PIPE
    except OSError:
        cause = outside_cause()
        if not cause:
            raise
        print_error(FedsimError(cause), program)
        return FedsimError.exit_code


def silence() -> None:
    """Send the standard output nowhere from here on, also what Python writes as it exits."""
    with suppress(io.UnsupportedOperation):  # it was replaced by an object that is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def outside_cause() -> str:
    """Return the cause of an `OSError` if it lies outside fedsim, and an empty text otherwise.

    Two causes are known. The standard output cannot be written; it is silent from here on. Or the
    working folder was deleted. The error itself does not tell them apart, so both are tried.
    """
    try:
        print(end="", flush=True)
    except OSError as output_error:
        silence()
        return f"cannot write to the standard output ({output_error.strerror})"
    try:
        os.getcwd()  # noqa: PTH109
    except OSError:
        return "the working folder was deleted; change to one that exists"
    return ""


def print_error(
    error: FedsimError, program: str = "fedsim", *, after: str = "; nothing was run"
) -> None:
    """Print an error on stderr in the name of `program`.

    A `ConfigError` is printed as the number of its problems, the text `after`, and the problems.
    """
    lines = [f"{program}: {error}"]
    if isinstance(error, ConfigError):
        count = len(error.problems)
        noun = "problem" if count == 1 else "problems"
        lines = [f"{program}: {count} {noun} in the config{after}"]
        lines += [f"  {problem}" for problem in error.problems]
    warn("".join(f"{printable_lines(line)}\n" for line in lines))


def warn(text: str) -> None:
    """Write `text` to stderr, unless that fails: stderr may be a file on a full disk."""
    with suppress(OSError):
        sys.stderr.write(text)
