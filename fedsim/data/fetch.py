"""Download of missing files, by one process at a time."""

import socket
from collections.abc import Callable
from pathlib import Path
from textwrap import shorten

from filelock import FileLock

from fedsim.core.disk import reading_problem, space_problem
from fedsim.core.errors import DataError, Problem

STALL_SECONDS = 30.0
"""A download ends with an error when the server has sent nothing for so long."""


def source_problem(
    folder: Path, data_dir: Path, missing: Callable[[], list[str]], need: int
) -> Problem | None:
    """The problem with `data_dir` of files in `folder` below it: they cannot be read; or
    `missing()` names some, and there is no room for the `need` bytes (0: not known) of them."""
    between = [place for place in (folder, *folder.parents) if data_dir in place.parents]
    problem = reading_problem("data_dir", data_dir, between[::-1])
    return problem or (space_problem("data_dir", data_dir, need) if missing() else None)


def require_files(
    folder: Path,
    data_dir: Path,
    missing: Callable[[], list[str]],
    fetch: Callable[[], None],
    need: int = 0,
    hint: str = "",
) -> None:
    """Call `fetch` if `missing()` returns the names of files that should be in `folder`, which is
    below `data_dir`.

    One process downloads while others wait for it; nothing is written if nothing is missing. Raises
    `DataError` naming the files and their folder; or, before anything is fetched, why there is no
    room for the `need` bytes of them.
    """
    if problem := source_problem(folder, data_dir, missing, need):
        raise DataError(str(problem))
    if not missing():
        return
    before, reason = socket.getdefaulttimeout(), "they are not there afterwards"
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(data_dir / f".{folder.relative_to(data_dir).parts[0]}.lock"):
            socket.setdefaulttimeout(
                STALL_SECONDS
            )  # torchvision and torch.hub set none and would wait for ever
            if missing():
                fetch()
    except Exception as error:  # torchvision and urllib raise many kinds of errors
        reason = shorten(str(error) or type(error).__name__, 300)
    finally:
        socket.setdefaulttimeout(before)
    if names := ", ".join(missing()):
        raise DataError(
            f"data_dir={data_dir}: no {names} in {folder}, and fetching failed ({reason}). "
            f"Put the files there, or point data_dir or FEDSIM_DATA to the folder that has them{hint}"
        )
