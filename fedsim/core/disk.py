"""Whether folders can be read and written, and files written completely or not at all, never
through a link."""

import errno
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from string import Template
from typing import BinaryIO, cast

from fedsim.core.errors import Problem


def conf_dir() -> Path:
    """The shipped conf/: beside the package in a checkout, inside it when installed from a
    wheel."""
    package = Path(__file__).parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


VARIABLES = (
    *("HOME", "LOGNAME", "SCRATCH", "TMPDIR", "USER", "WORK"),
    *("WANDB_ENTITY", "WANDB_PROJECT", "WANDB_RUN_GROUP", "WANDB_TAGS"),
)
"""Environment variables that a config may name, besides those that begin with `FEDSIM_`."""


def config_may_name(variable: str) -> bool:
    """Return whether a config may name an environment variable: it records what that stands for."""
    return variable in VARIABLES or variable.startswith("FEDSIM_")


def user_path(text: str | Path) -> Path:
    """Return the path that a user has written, with `~` and the variables of configs replaced as by
    a shell."""
    known = {name: value for name, value in os.environ.items() if config_may_name(name)}
    return Path(os.path.expanduser(Template(str(text)).safe_substitute(known)))  # noqa: PTH111, Path's own raises


def memory_of_machine() -> int:
    """Return the bytes of the whole memory, and not of what is free."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def space_problem(key: str, folder: Path, need: int) -> Problem | None:
    """The problem of a `folder` to be made or written that has no room for `need` bytes, or None.
    It is tried out: permissions say little for the superuser and for network file systems."""
    place, needed = folder, f"need {need / 1e6:.1f} MB"
    try:
        place = existing_folder(folder)
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"\0")
        free = shutil.disk_usage(place).free
    except OSError as error:
        told = f"cannot write in {place} ({error.strerror or error}); {needed}"
    else:
        told = f"no room in {place}: {needed}, free {free / 1e6:.1f} MB"
        if free >= need:
            return None
    return Problem(key, str(folder), told, f"choose another folder with {key}, or make room there")


def existing_folder(folder: Path) -> Path:
    """`folder`, or the nearest one above it that is there. Raises OSError where one may not be
    looked into."""
    return next(
        place for place in (folder.absolute(), *folder.absolute().parents) if place.exists()
    )


def reading_problem(key: str, folder: Path, below: Sequence[Path] = ()) -> Problem | None:
    """The problem of a `folder`, or of one of those `below` it, that is there but cannot be read;
    or None."""
    for place in (folder, *below):
        try:
            with os.scandir(place):
                pass
        except (FileNotFoundError, NotADirectoryError) as error:
            if place == folder and isinstance(error, NotADirectoryError):
                return Problem(key, str(folder), "is no folder", f"choose another one with {key}")
        except OSError as error:
            told = f"cannot read {place} ({error.strerror or error})"
            return Problem(
                key, str(folder), told, f"choose another folder with {key}, or permit it"
            )
    return None


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read it. Raises OSError at once where it is a pipe, a device or a folder."""
    file = open(path, "rb", opener=_no_wait)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    return file


def read_regular(path: Path, most: int) -> bytes:
    """Read a regular file of at most so many bytes. Raises OSError."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(
                errno.EFBIG, f"has {size:,} bytes, more than the {most:,} that are read", str(path)
            )
        return file.read(size)


def _no_wait(name: str, flags: int) -> int:
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))


def write_atomically(
    path: Path, content: bytes | bytearray, keep_as: Path | None = None, *, alone: bool = True
) -> None:
    """Write a file completely or not at all, and not through a link. `keep_as`: where the file goes
    that was there before. `alone`: whether no other process writes this file at the same time.
    Raises OSError."""
    temporary = path.with_name(
        f"{path.name}.tmp" if alone else f"{path.name}.{os.urandom(8).hex()}.tmp"
    )
    temporary.unlink(missing_ok=True)
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if keep_as is not None and path.exists():
            path.replace(keep_as)
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


STALE_SECONDS = 3600.0
"""Age of a temporary file that no process is writing any more."""


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files by their names below `folder`, which is made, each completely or not at all.
    Other processes may write the same files. Raises OSError, also where a folder on the way is a
    link."""
    for name, content in files.items():
        path = folder / name
        for place in (folder, path.parent):
            if place.is_symlink():
                raise OSError(errno.ELOOP, f"{place} is a link")
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(
            f"{path.name}.{'[0-9a-f]' * 16}.tmp"
        ):  # by a process that was killed
            with suppress(FileNotFoundError):
                if time.time() - left.stat().st_mtime > STALE_SECONDS:
                    left.unlink()
        write_atomically(path, content, alone=False)


def remove_folder(path: Path) -> None:
    """Delete a folder with all that is in it and can be deleted. Of a link, only the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Force renames in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_unlinked(path: Path, mode: str) -> BinaryIO:
    """The file `path`, not buffered. Raises OSError where it is a link."""
    return cast(BinaryIO, open(path, mode, buffering=0, opener=_no_link))


def _no_link(name: str, flags: int) -> int:
    return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


REMEDIES = {
    errno.ENOSPC: "free some space or choose another",
    errno.EDQUOT: "free some space or choose another",
    errno.ELOOP: "it is a link: remove it or choose another",
    errno.ENOENT: "its folder has been deleted: the same command makes it again, or choose another",
}


def unwritable(key: str, path: Path, error: OSError) -> str:
    """What to say of a file that cannot be written below the folder, or at the path, that `key`
    names."""
    remedy = REMEDIES.get(error.errno or 0, "permit it or choose another")
    return f"{key}: cannot write {path} ({error.strerror or error}); {remedy} {key}"
