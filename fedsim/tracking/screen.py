"""The standard output, as all parts of fedsim write to it. It may close or fill up; the run goes on without it."""

import atexit
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, cast

from rich.console import Console

from fedsim.printable import printable_lines

UNWRITABLE = (OSError, ValueError, AttributeError)
"""What a standard output raises that cannot be written, is closed, or is none at all (`fedsim >&-`)."""


class Output:
    """`sys.stdout` of the moment, as a text stream that raises no error.

    A run's files are its record, the screen a copy. Whose reader has gone (`fedsim | head -1`) gets nothing any more.
    What a full disk refuses is lost, which is told once on stderr; later lines are tried again. Characters that its
    encoding lacks become question marks.
    """

    def __init__(self) -> None:
        self._refused = False

    @property
    def _stream(self) -> IO[str]:
        """What a progress bar has put in place of `sys.stdout` writes to this one."""
        return cast(IO[str], getattr(sys.stdout, "rich_proxied_file", sys.stdout))

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        with self._kept_going():
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                self._stream.write(text.encode(self.encoding, "replace").decode(self.encoding))
        return len(text)

    def flush(self) -> None:
        with self._kept_going():
            self._stream.flush()

    def isatty(self) -> bool:
        with suppress(*UNWRITABLE):
            return self._stream.isatty()
        return False

    def fileno(self) -> int:
        return self._stream.fileno()

    @contextmanager
    def _kept_going(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            _leave(self._stream)
        except UNWRITABLE as error:
            if isinstance(error, OSError) and not self._refused:
                self._refused = True
                atexit.register(_flush_or_leave)
                with suppress(OSError):
                    reason = error.strerror or error
                    sys.stderr.write(f"fedsim: cannot write to the standard output ({reason}); going on without it\n")


def _leave(stream: IO[str]) -> None:
    """Let all further output to `stream`, and what Python writes as it exits, go nowhere."""
    with suppress(*UNWRITABLE):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _flush_or_leave() -> None:
    """At the exit: output that still cannot be written would else make Python exit with code 120."""
    try:
        sys.stdout.flush()
    except UNWRITABLE:
        _leave(sys.stdout)


SLOW_SECONDS = 2.0
"""After which the user is told what is waited for."""

CONSOLE = Console(highlight=False, file=cast(IO[str], Output()))
"""Shared by all that write to the terminal, so that no output breaks the progress bar of another."""


def tell_line(text: str) -> None:
    """One line of text for the user."""
    CONSOLE.print(printable_lines(text), soft_wrap=True, markup=False)


@contextmanager
def told_if_slow(text: str) -> Iterator[None]:
    """Say `text` in a line if what is within takes more than `SLOW_SECONDS`."""
    timer = threading.Timer(SLOW_SECONDS, tell_line, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
