"""Fetching what is absent: by one process at a time, and without a trace of an attempt that failed."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from textwrap import shorten

from filelock import FileLock

from fedsim.errors import DataError


def require(folder: Path, data_dir: Path, missing: Callable[[], list[str]], fetch: Callable[[], None]) -> None:
    """Call `fetch` if `missing()` names files that `folder`, which lies below `data_dir`, should hold.

    One process fetches, others wait for it. Nothing is written where nothing is missing. Raises `DataError` naming the
    files, where they belong, and how to say where they are.
    """
    if not missing():
        return
    lock = data_dir / f".{folder.relative_to(data_dir).parts[0]}.lock"
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(lock):
            try:
                if missing():
                    fetch()
            finally:
                with contextlib.suppress(OSError):
                    lock.unlink()
    except Exception as error:  # torchvision and urllib raise all kinds
        _remove_empty(folder, data_dir)
        reason = shorten(str(error) or type(error).__name__, 300)
        raise DataError(
            f"data_dir={data_dir}: no {', '.join(missing())} in {folder}, and fetching failed ({reason}). "
            "Put the files there, or point data_dir or FEDSIM_DATA to the folder that has them"
        ) from error
    if missing():
        raise DataError(f"data_dir={data_dir}: {', '.join(missing())} should now be in {folder} but are not")


def _remove_empty(folder: Path, data_dir: Path) -> None:
    """Remove `folder` and the folders above it, up to `data_dir`, as long as there is nothing in them."""
    for place in (folder, *folder.parents):
        if place.is_dir() and place.is_relative_to(data_dir):
            try:
                place.rmdir()
            except OSError:
                return
