"""The entry point of a process: `fedsim`, or `python -m fedsim.run`.

It imports nothing that takes time before it handles signals.
"""

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    try:
        working_folder = os.getcwd()  # noqa: PTH109
    except OSError:  # it was deleted
        working_folder = ""
    # Python puts the working folder first for -m. Its files must not replace installed modules.
    if sys.path[:1] == [working_folder]:
        del sys.path[0]

from collections.abc import Sequence
from contextlib import suppress

from fedsim import __version__
from fedsim.running.process import STOP, open_missing_streams, world

RUN_FLAGS = {
    "-m",
    "--multirun",
    "-cd",
    "--config-dir",
    "-cn",
    "--config-name",
    "-cp",
    "--config-path",
}
"""Flags of commands that run jobs. All others ask a question."""


def main() -> None:
    """Run the command line and exit with its code, however early a signal asks to end."""
    open_missing_streams()
    # No child process imports from the working folder before all other places.
    os.environ["PYTHONSAFEPATH"] = "1"
    STOP.install()
    if world().rank == 0:
        announce(sys.argv[1:])
    from fedsim.running.process import tune

    tune()
    from fedsim.commands.dispatch import main

    main()


def announce(argv: Sequence[str]) -> None:
    """Print on stderr that a command that runs jobs is starting: imports and checks take seconds.

    Other commands (`--help`, `--cfg job`, a first word that is no override) answer questions, and
    perhaps to a program.
    """
    flags = {word.partition("=")[0] for word in argv if word.startswith("-")}
    first = argv[0] if argv else "-"
    is_experiment = first.startswith(("-", "+", "~")) or "=" in first
    if is_experiment and flags <= RUN_FLAGS:
        with suppress(OSError, ValueError, AttributeError):  # stderr may be closed
            sys.stderr.write(f"fedsim {__version__}: loading, and checking the config\n")
            sys.stderr.flush()


if __name__ == "__main__":
    main()
