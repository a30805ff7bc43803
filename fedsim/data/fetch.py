"""Download missing files, by one process at a time.

Data sets and backbones call this; the function `fetch` that they pass does the download itself.
"""

import socket
from collections.abc import Callable
from pathlib import Path
from textwrap import shorten

from filelock import FileLock

from fedsim.core.disk import reading_problem, space_problem
from fedsim.core.errors import DataError, Problem

STALL_SECONDS = 30.0
"""A download fails after the server has sent nothing for this many seconds."""


def source_problem(
    folder: Path, data_dir: Path, missing: Callable[[], list[str]], need: int
) -> Problem | None:
    """Return the problem with `data_dir` if files in `folder` can be neither read nor fetched.

    `missing()` names the files that are not there; `need` is the bytes that they take (0: unknown).
    """
    # from the top down, so that the problem names the highest folder at fault
    between = [place for place in (folder, *folder.parents) if data_dir in place.parents]
    problem = reading_problem("data_dir", data_dir, between[::-1])
    if problem is None and missing():
        problem = space_problem("data_dir", data_dir, need)
    return problem


def require_files(
    folder: Path,
    data_dir: Path,
    missing: Callable[[], list[str]],
    fetch: Callable[[], None],
    need: int = 0,
    hint: str = "",
) -> None:
    """Call `fetch` if `missing()` names files that should be in `folder`, below `data_dir`.

    One process downloads while others wait; nothing is written if nothing is missing. Raises
    `DataError` with the files, their folder and `hint`; or, before fetching, if there is no room
    for the `need` bytes.
    """
    problem = source_problem(folder, data_dir, missing, need)
    if problem is not None:
        raise DataError(str(problem))
    if not missing():
        return
    reason = "they are not there afterwards"
    previous_timeout = socket.getdefaulttimeout()
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(data_dir / f".{folder.relative_to(data_dir).parts[0]}.lock"):
            # torchvision and torch.hub set no timeout and would wait for ever.
            socket.setdefaulttimeout(STALL_SECONDS)
            if missing():
                fetch()
    except Exception as error:  # torchvision and urllib raise many kinds of errors
        reason = shorten(str(error) or type(error).__name__, 300)
    finally:
        socket.setdefaulttimeout(previous_timeout)
    still_missing = ", ".join(missing())
    if still_missing:
        raise DataError(
            f"data_dir={data_dir}: no {still_missing} in {folder}, and fetching failed ({reason}). "
            "Put the files there, or point data_dir or FEDSIM_DATA to the folder that has "
            f"them{hint}"
        )
