"""Download of missing files, by one process at a time; a failed attempt leaves nothing behind."""

import contextlib
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import shorten

from filelock import FileLock, Timeout

from fedsim.core.disk import reading_problem, room_problem
from fedsim.core.errors import DataError, Problem

STALL_SECONDS = 30.0
"""A download ends with an error when the server has sent nothing for so long."""
TELL_SECONDS = 0.5
"""How long a process whose download failed leaves the reason to those that wait for it; they look far more often."""
RETRY_SECONDS = 600.0
"""A process that failed to fetch some files does not try the same again for so long: the later jobs of a sweep."""

_failures: dict[tuple[Path, tuple[str, ...]], tuple[float, str]] = {}
"""When and why this process failed to fetch files (folder, names)."""


def source_problem(folder: Path, data_dir: Path, missing: Callable[[], list[str]], need: int) -> Problem | None:
    """The problem with `data_dir` of files that should be in `folder` below it: they cannot be read; or there is no
    room for the `need` bytes (0: not known) to be fetched because `missing()` names some."""
    between = [place for place in (folder, *folder.parents) if data_dir in place.parents]
    problem = reading_problem("data_dir", data_dir, between[::-1])
    return problem or (room_problem("data_dir", data_dir, need) if missing() else None)


def require_files(
    folder: Path, data_dir: Path, missing: Callable[[], list[str]], fetch: Callable[[], None], need: int = 0
) -> None:
    """Call `fetch` if `missing()` returns the names of files that should be in `folder`, which is below `data_dir`.

    One process downloads while others wait for it; if it fails, they fail for the same reason. Nothing is written if
    nothing is missing. Raises `DataError` naming the files, the folder where they belong, and the settings that say
    where they are; or, before anything is fetched, why there is no room for the `need` bytes of them (0: not known).
    """
    if problem := source_problem(folder, data_dir, missing, need):
        raise DataError(str(problem))
    wanted = tuple(missing())
    if not wanted:
        return
    since, reason = _failures.get((folder, wanted), (-RETRY_SECONDS, ""))
    if time.monotonic() - since >= RETRY_SECONDS:
        reason = _fetch_in_turn(folder, data_dir, missing, fetch) or ""
    if not missing():
        return
    names = ", ".join(missing())
    if not reason:
        raise DataError(f"data_dir={data_dir}: {names} should now be in {folder} but are not")
    _failures.setdefault((folder, wanted), (time.monotonic(), reason))
    raise DataError(
        f"data_dir={data_dir}: no {names} in {folder}, and fetching failed ({reason}). "
        "Put the files there, or point data_dir or FEDSIM_DATA to the folder that has them"
    )


def _fetch_in_turn(
    folder: Path, data_dir: Path, missing: Callable[[], list[str]], fetch: Callable[[], None]
) -> str | None:
    """Fetch, or wait for the process that does. Returns why it failed, or None."""
    name = folder.relative_to(data_dir).parts[0]
    lock, failure = data_dir / f".{name}.lock", data_dir / f".{name}.failed"
    reason = None
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with _turn(lock, name) as waited:
            if waited and missing() and failure.is_file():
                return failure.read_text(encoding="utf-8")
            failure.unlink(missing_ok=True)
            reason = _attempt(folder, data_dir, missing, fetch)
            if reason is not None:  # before the next process has its turn
                failure.write_text(reason, encoding="utf-8")
    except OSError as error:
        reason = reason or _in_words(error)
    finally:
        if reason is not None:
            time.sleep(TELL_SECONDS)
            with contextlib.suppress(OSError):
                failure.unlink()
        if missing():
            _remove_empty(data_dir, data_dir)
    return reason


def _attempt(folder: Path, data_dir: Path, missing: Callable[[], list[str]], fetch: Callable[[], None]) -> str | None:
    """Fetch what is missing; returns why it failed, or None.

    Empty folders are removed in the same turn: later they may be those of the next process.
    """
    try:
        if missing():
            with stall_bounded():
                fetch()
    except Exception as error:  # torchvision and urllib raise many kinds of errors
        return _in_words(error)
    finally:
        if missing():
            _remove_empty(folder, data_dir)
    return None


@contextlib.contextmanager
def stall_bounded() -> Iterator[None]:
    """New connections fail with `TimeoutError` when they have received nothing for `STALL_SECONDS`.

    torchvision and torch.hub set no bound of their own and would wait for ever.
    """
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(STALL_SECONDS)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


@contextlib.contextmanager
def _turn(path: Path, name: str) -> Iterator[bool]:
    """Hold the lock `path`; yields whether another process had it before."""
    lock, waited = FileLock(path), False
    try:
        lock.acquire(timeout=0)
    except Timeout:
        waited = True
        print(f"fedsim: another process is fetching {name}; waiting for it", file=sys.stderr)  # noqa: T201
        lock.acquire()
    try:
        yield waited
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        lock.release()


def _in_words(error: Exception) -> str:
    if isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError):
        return f"the server sent nothing for {STALL_SECONDS:g} s"
    return shorten(str(error) or type(error).__name__, 300)


def _remove_empty(folder: Path, data_dir: Path) -> None:
    """Remove `folder` and its parent folders up to `data_dir`, as far as they are empty."""
    with contextlib.suppress(OSError):
        for place in (folder, *folder.parents):
            if place.is_dir() and place.is_relative_to(data_dir):
                place.rmdir()
