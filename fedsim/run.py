"""The entry point: `fedsim`, or `python -m fedsim.run`. Imports nothing that takes time before
signals are handled."""

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    try:
        here = os.getcwd()  # noqa: PTH109
    except OSError:  # it was deleted
        here = ""
    if sys.path[:1] == [here]:
        del sys.path[
            0
            # where -m puts the working folder: its files would be imported in place of installed
            # modules
        ]

from collections.abc import Sequence
from contextlib import suppress

from fedsim import __version__
from fedsim.running.process import STOP, open_missing_streams, world

RUNNING_FLAGS = {
    "-m",
    "--multirun",
    "-cd",
    "--config-dir",
    "-cn",
    "--config-name",
    "-cp",
    "--config-path",
}
"""Flags of commands that run jobs; all others ask a question."""


def main() -> None:
    """Run the command line and exit with its code, however early it is asked to end."""
    open_missing_streams()
    os.environ["PYTHONSAFEPATH"] = (
        "1"  # no child (`python -c`) imports from the working folder before all other places
    )
    STOP.install()
    if not world().rank:
        announce(sys.argv[1:])
    from fedsim.running.process import tune

    tune()
    from fedsim.commands.dispatch import main

    main()


def announce(argv: Sequence[str]) -> None:
    """Say on stderr that a command that runs jobs is on its way: imports and checks take seconds.

    Other commands (`--help`, `--cfg job`, a first word that is no override) answer questions,
    perhaps to a program.
    """
    flags = {word.partition("=")[0] for word in argv if word.startswith("-")}
    runs = not argv or argv[0].startswith(("-", "+", "~")) or "=" in argv[0]
    if runs and flags <= RUNNING_FLAGS:
        with suppress(OSError, ValueError, AttributeError):  # stderr may be closed
            sys.stderr.write(f"fedsim {__version__}: loading, and checking the config\n")
            sys.stderr.flush()


if __name__ == "__main__":
    main()
