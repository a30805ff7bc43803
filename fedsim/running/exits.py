"""How a command of `fedsim` ends: its exit code, and what stderr says of the error that ended it.

Codes: 0 done, 1 a run failed, 2 config, 3 data, 4 diverged, 75 preempted (a signal asked it to end; the same command
goes on), 130 interrupted (Ctrl-C; likewise), 141 nobody reads its output any more. FEDSIM_DEBUG=1 shows tracebacks.
"""

import os
import sys
from collections.abc import Callable
from typing import TypeVar

from fedsim.errors import ConfigError, FedsimError
from fedsim.printable import printable_lines
from fedsim.running.signals import CODES, Preempted

T = TypeVar("T")

EXIT_CODES = {"done": 0, "failed": 1, "config": 2, "data": 3, "diverged": 4, **CODES}
CLOSED_PIPE = 141
"""As shells report a process whose output nobody reads (128 + SIGPIPE)."""


def exit_code(work: Callable[[], T], program: str = "fedsim") -> T | int:
    """What `work` returns, or the code of the error or signal that ends it; an error is told in the name of `program`.

    Whatever is no `FedsimError` is raised: it is a mistake in fedsim itself.
    """
    try:
        return work()
    except FedsimError as error:
        if os.environ.get("FEDSIM_DEBUG") == "1":
            raise
        tell(error, program)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_CODES["interrupted"]
    except Preempted:
        return EXIT_CODES["preempted"]
    except BrokenPipeError:  # of a reader that has seen enough, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE


def tell(error: FedsimError, program: str = "fedsim") -> None:
    """One screen on stderr."""
    if isinstance(error, ConfigError):
        count = len(error.problems)
        print(f"{program}: {count} problem{'s' if count > 1 else ''} in the config; nothing was run", file=sys.stderr)
        for problem in error.problems:
            print(printable_lines(f"  {problem}"), file=sys.stderr)
    else:
        print(printable_lines(f"{program}: {error}"), file=sys.stderr)
