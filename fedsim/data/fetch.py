"""Download of missing files, by one process at a time; a failed attempt leaves nothing behind."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from textwrap import shorten

from filelock import FileLock

from fedsim.errors import DataError


def require_files(folder: Path, data_dir: Path, missing: Callable[[], list[str]], fetch: Callable[[], None]) -> None:
    """Call `fetch` if `missing()` returns the names of files that should be in `folder`, which is below `data_dir`.

    One process downloads while others wait for it. Nothing is written if nothing is missing. Raises `DataError` naming
    the files, the folder where they belong, and the settings that say where they are.
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
    except Exception as error:  # torchvision and urllib raise many kinds of errors
        _remove_empty(folder, data_dir)
        reason = shorten(str(error) or type(error).__name__, 300)
        raise DataError(
            f"data_dir={data_dir}: no {', '.join(missing())} in {folder}, and fetching failed ({reason}). "
            "Put the files there, or point data_dir or FEDSIM_DATA to the folder that has them"
        ) from error
    if missing():
        raise DataError(f"data_dir={data_dir}: {', '.join(missing())} should now be in {folder} but are not")


def _remove_empty(folder: Path, data_dir: Path) -> None:
    """Remove `folder` and its parent folders up to `data_dir`, as far as they are empty."""
    for place in (folder, *folder.parents):
        if place.is_dir() and place.is_relative_to(data_dir):
            try:
                place.rmdir()
            except OSError:
                return
