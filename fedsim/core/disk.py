"""Folders and files for all of fedsim: checks that they can be read and written, and writing that
leaves only complete files and never follows a link.

It does not follow links because a folder of results may be shared: a link there could lead fedsim
to overwrite a file elsewhere. This file also knows the shipped conf/, the variables that a config
may name, and the machine's memory and cores.
"""

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
    """Return the shipped conf/: next to the package in a checkout, inside it if installed from a
    wheel."""
    package = Path(__file__).parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


VARIABLES = (
    "HOME",
    "LOGNAME",
    "SCRATCH",
    "TMPDIR",
    "USER",
    "WORK",
    "WANDB_ENTITY",
    "WANDB_PROJECT",
    "WANDB_RUN_GROUP",
    "WANDB_TAGS",
)
"""Environment variables that a config may name, in addition to those that begin with `FEDSIM_`."""


def config_may_name(variable: str) -> bool:
    """Return whether a config may name an environment variable, and so record its value."""
    return variable in VARIABLES or variable.startswith("FEDSIM_")


def user_path(text: str | Path) -> Path:
    """Return a path that a user wrote, with `~` and the variables of configs replaced as in a
    shell."""
    values = {name: value for name, value in os.environ.items() if config_may_name(name)}
    text = Template(str(text)).safe_substitute(values)
    return Path(os.path.expanduser(text))  # noqa: PTH111, Path's own raises


def memory_of_machine() -> int:
    """Return the bytes of the machine's whole memory, free and used."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def space_problem(key: str, folder: Path, need: int) -> Problem | None:
    """Return the problem of a `folder` that cannot be written or has no room for `need` bytes; None
    if there is no problem. The folder need not exist yet.

    `key` is the config key of the folder. fedsim writes a small file to find out, because
    permissions say little for the superuser and on network file systems.
    """
    place = folder
    megabytes = f"{need / 1e6:.1f} MB"
    try:
        place = existing_folder(folder)
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"\0")
        free = shutil.disk_usage(place).free
    except OSError as error:
        rule = f"cannot write in {place} ({error.strerror or error}); need {megabytes}"
    else:
        if free >= need:
            return None
        rule = f"no room in {place}: need {megabytes}, free {free / 1e6:.1f} MB"
    return Problem(key, str(folder), rule, f"choose another folder with {key}, or make room there")


def existing_folder(folder: Path) -> Path:
    """Return `folder`, or the nearest folder above it that exists.

    Raises OSError if a folder on the way must not be searched.
    """
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return place


def reading_problem(key: str, folder: Path, below: Sequence[Path] = ()) -> Problem | None:
    """Return the problem of a `folder`, or of a folder `below` it, that exists but cannot be read;
    otherwise None."""
    for place in (folder, *below):
        try:
            with os.scandir(place):
                pass
        except FileNotFoundError:
            continue
        except NotADirectoryError:
            # of the places below, only existing folders matter here
            if place == folder:
                return Problem(key, str(folder), "is no folder", f"choose another one with {key}")
        except OSError as error:
            rule = f"cannot read {place} ({error.strerror or error})"
            remedy = f"choose another folder with {key}, or permit it"
            return Problem(key, str(folder), rule, remedy)
    return None


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read it.

    Raises OSError for a pipe, a device or a folder. It does not wait, as opening a pipe usually
    does.
    """
    file = open(path, "rb", opener=_no_wait)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    return file


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Read a regular file. Raises OSError if it cannot be read, or has more than `max_bytes`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            reason = f"has {size:,} bytes, more than the {max_bytes:,} that are read"
            raise OSError(errno.EFBIG, reason, str(path))
        return file.read(size)


def _no_wait(name: str, flags: int) -> int:
    """Open a file without waiting, for `open`."""
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))


def write_atomically(
    path: Path, content: bytes | bytearray, keep_as: Path | None = None, *, alone: bool = True
) -> None:
    """Write a file completely or not at all, and not through a link.

    The content goes to a temporary file next to `path`, which then takes its place. An earlier file
    is moved to `keep_as`, if given. `alone` says that no other process writes this file at the same
    time; otherwise the temporary file gets a random name. Raises OSError.
    """
    suffix = "tmp" if alone else f"{os.urandom(8).hex()}.tmp"
    temporary = path.with_name(f"{path.name}.{suffix}")
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
"""Age from which a temporary file is no longer being written."""


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write `files`, contents by path relative to `folder`, each completely or not at all.

    Missing folders are made.

    Other processes may write the same files. Raises OSError, also if a folder on the way is a link.
    """
    for name, content in files.items():
        path = folder / name
        for relative in reversed(Path(name).parents):  # "." for `folder` itself, "a", "a/b"
            place = folder / relative
            if place.is_symlink():
                raise OSError(errno.ELOOP, f"{place} is a link")
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(path)
        write_atomically(path, content, alone=False)


def _remove_stale(path: Path) -> None:
    """Remove the old temporary files of `path`, which killed processes have left."""
    for temporary in path.parent.glob(f"{path.name}.{'[0-9a-f]' * 16}.tmp"):
        with suppress(FileNotFoundError):
            if time.time() - temporary.stat().st_mtime > STALE_SECONDS:
                temporary.unlink()


def remove_folder(path: Path) -> None:
    """Delete a folder and everything in it that can be deleted. If it is a link, delete the
    link."""
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


def open_no_link(path: Path, mode: str) -> BinaryIO:
    """Open a file without buffering. Raises OSError if it is a link."""
    return cast(BinaryIO, open(path, mode, buffering=0, opener=_no_link))


def _no_link(name: str, flags: int) -> int:
    """Open a file unless it is a link, for `open`."""
    # 0o666 are the permissions of a new file, less the user's umask, as with `open`
    return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


# By the number of the error. The message adds the config key: "choose another output_dir".
WRITE_REMEDIES = {
    errno.ENOSPC: "free some space or choose another",
    errno.EDQUOT: "free some space or choose another",
    errno.ELOOP: "it is a link: remove it or choose another",
    errno.ENOENT: "its folder has been deleted: the same command makes it again, or choose another",
}


def unwritable(key: str, path: Path, error: OSError) -> str:
    """Return the message for a file that cannot be written at or below the path that `key`
    names."""
    remedy = WRITE_REMEDIES.get(error.errno or 0, "permit it or choose another")
    return f"{key}: cannot write {path} ({error.strerror or error}); {remedy} {key}"
