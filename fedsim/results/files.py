"""The files of a run's folder: config.yaml, metrics.jsonl, summary.json, the final model.

They are the authoritative record of a run. While a run is not finished, its checkpoints lie next to
them (`fedsim.running.checkpoint`). A file is there completely or not at all, and one process at a
time owns a folder.
"""

import errno
import hashlib
import json
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from fedsim.core.disk import (
    open_no_link,
    read_regular,
    remove_folder,
    sync_folder,
    unwritable,
    write_atomically,
)
from fedsim.core.errors import FedsimError
from fedsim.results.reading import CONFIG, METRICS, SUMMARY

ERROR = "error.txt"
TRACE = "trace.jsonl"
PARTITION = "partition.npz"
CLIENTS = "clients.npz"
IMPERFECT = "imperfect.json"
MODEL = "model.safetensors"
NEWEST = "checkpoint.safetensors"
PREVIOUS = "checkpoint.previous.safetensors"
LOCKS = ".locks"
TABLE = "metrics.csv"
TENSORBOARD = "tensorboard"
WANDB = "wandb"
WANDB_ID = "wandb.id"
MLFLOW_ID = "mlflow.id"
REPLACEMENTS = ".replacements"
"""Folder next to the runs' folders: here `overwrite=true` makes a run, until it is complete and
replaces the old one."""
MOST_OF_HOLDER = 10_000
"""Size limit in bytes of the file that says who holds a lock."""
LOOK_SECONDS = 0.5
"""Seconds for which a lock is tried, because a process that tests a lock holds it for a moment."""


class OutputError(FedsimError):
    """A run's folder cannot be written (no space, no permission)."""


class HeldError(FedsimError):
    """Another process is running this. `holder` says which one; empty if that is not known."""

    def __init__(self, folder: Path) -> None:
        self.holder = ""
        with suppress(OSError, ValueError):
            self.holder = read_regular(_beside(folder, "holder.txt"), MOST_OF_HOLDER).decode()
        super().__init__(
            f"{folder}: another process is running this now ({self.holder or 'unknown which'})"
        )


class RunFolder:
    """The writer of a run's folder. Files are written whole, and records as whole lines."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, config: Mapping[str, Any]) -> "RunFolder":
        """Create `path` for a new run, delete the files that an earlier run left there, and write
        the config."""
        folder = cls(path)
        refuse_links(path)
        with _write_errors_explained(path):
            path.mkdir(parents=True, exist_ok=True)
            folder._delete(
                SUMMARY,
                NEWEST,
                PREVIOUS,
                METRICS,
                TRACE,
                MODEL,
                CLIENTS,
                IMPERFECT,
                ERROR,
                WANDB_ID,
            )
        folder.write_config(config)
        return folder

    def reopen(self, lengths: Mapping[str, int]) -> None:
        """Resume a run that has not ended: cut files of records to `lengths` (bytes), and delete
        what is written when a run ends. A shorter file stays as it is."""
        refuse_links(self.path)
        with _write_errors_explained(self.path):
            self._delete(SUMMARY, MODEL, CLIENTS, ERROR)
            for name in (METRICS, TRACE):
                if (self.path / name).exists():
                    with open_no_link(self.path / name, "rb+") as file:
                        size = os.fstat(file.fileno()).st_size
                        file.truncate(min(lengths.get(name, 0), size))

    def _delete(self, *names: str) -> None:
        """Delete files, what a killed process may have left, and what trackers wrote: they get the
        rounds again."""
        paths = [self.path / name for name in (*names, TABLE)]
        for path in (*paths, *self.path.glob("*.tmp")):
            path.unlink(missing_ok=True)
        remove_folder(self.path / WANDB)
        remove_folder(self.path / TENSORBOARD)

    def append(self, record: Mapping[str, Any], name: str = METRICS) -> None:
        """Append `record` as one JSON line to the file `name`, which survives a kill of the
        process."""
        path = self.path / name
        line = (json.dumps(json_ready(record)) + "\n").encode()
        with _write_errors_explained(path), open_no_link(path, "ab") as file:
            end = file.tell()
            try:
                written = file.write(line)
                if written != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                os.ftruncate(file.fileno(), end)
                raise

    def sync_records(self) -> dict[str, int]:
        """Force the files of records to the disk, and return the number of bytes in each."""
        lengths = {}
        for name in (METRICS, TRACE):
            if (self.path / name).exists():
                with (
                    _write_errors_explained(self.path / name),
                    open_no_link(self.path / name, "rb+") as file,
                ):
                    os.fsync(file.fileno())
                    lengths[name] = os.fstat(file.fileno()).st_size
        return lengths

    def write_config(self, config: Mapping[str, Any]) -> None:
        self.write_text(
            CONFIG, yaml.safe_dump(json_ready(config), sort_keys=False, allow_unicode=True)
        )

    def write_error(self, config: Mapping[str, Any], text: str) -> None:
        """Write why a run could not begin, and its config. Other files of an earlier run stay."""
        refuse_links(self.path)
        with _write_errors_explained(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        self.write_config(config)
        self.write_text(ERROR, text)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json, whose presence indicates that the run has ended."""
        self.write_text(SUMMARY, json.dumps(json_ready(summary), indent=2) + "\n")

    def write_text(self, name: str, text: str) -> None:
        self.write_bytes(name, text.encode())

    def write_bytes(
        self, name: str, content: bytes | bytearray, keep_as: str | None = None
    ) -> None:
        """Write a file. `keep_as` is a new name for the file that was there before."""
        with _write_errors_explained(self.path / name):
            write_atomically(
                self.path / name, content, None if keep_as is None else self.path / keep_as
            )

    def rename(self, name: str, new: str) -> None:
        """Rename the file `name` to `new`, which it replaces."""
        with _write_errors_explained(self.path / new):
            (self.path / name).replace(self.path / new)


def replacement_of(folder: Path) -> Path:
    """Return the folder of a run that will replace the finished run in `folder`."""
    return folder.parent / REPLACEMENTS / folder.name


def replace_folder(folder: Path) -> None:
    """Move the replacement of `folder`, whose lock is held, to its place. The old folder is deleted
    last.

    A process that is killed between the two renames leaves no `folder`, but both the old and the
    new one.
    """
    new = replacement_of(folder)
    old = folder.parent / REPLACEMENTS / f"{folder.name}.old"
    with _write_errors_explained(folder):
        if folder.exists():
            remove_folder(old)
            folder.rename(old)
        new.rename(folder)
        sync_folder(folder.parent)
        remove_folder(old)
        with suppress(OSError):  # other runs may have replacements there
            new.parent.rmdir()


def code_digits(summary: Mapping[str, Any]) -> str | None:
    """Return six digits that stand for the user's code of a run; None if none is recorded.

    A run that was resumed with other code has the digits of all its codes together.
    """
    codes = [*(summary.get("earlier_code") or ()), summary.get("code")]
    if not any(codes):
        return None
    return hashlib.sha256(json.dumps(codes).encode()).hexdigest()[:6]


def set_aside(folder: Path, code: str | None, new_code: str | None) -> Path:
    """Move a result of other code next to the run's folder, whose lock is held, and return its new
    folder.

    A result of the new code that was moved aside before takes its place. `code` and `new_code` are
    their `code_digits`.
    """
    aside = folder.with_name(f"{folder.name}-code-{code}")
    earlier = folder.with_name(f"{folder.name}-code-{new_code}")
    with _write_errors_explained(folder):
        while aside.exists():
            aside = aside.with_name(f"{aside.name}+")
        folder.rename(aside)
        if earlier.exists():
            earlier.rename(folder)
        sync_folder(folder.parent)
    return aside


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder, and name the holder in a file next to it.

    The lock is released however the process ends. Raises `HeldError` if another process holds it,
    and `OutputError` if the folder is a link.
    """
    refuse_links(folder)
    lock = FileLock(_beside(folder, "lock"))
    with _write_errors_explained(_beside(folder, "lock")):
        (folder.parent / LOCKS).mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=LOOK_SECONDS)
        except Timeout:
            raise HeldError(folder) from None
    try:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        holder = f"process {os.getpid()} on {socket.gethostname()}, since {now}"
        with suppress(OSError):  # a full disk is no reason to stop: the file is for people
            write_atomically(_beside(folder, "holder.txt"), holder.encode())
        yield
    finally:
        with suppress(OSError):
            _beside(folder, "holder.txt").unlink(missing_ok=True)
        lock.release()


def refuse_links(folder: Path) -> None:
    """Raise `OutputError` if a run's folder is a link, or a folder next to it in which fedsim
    writes."""
    for place in (folder, folder.parent / LOCKS, folder.parent / REPLACEMENTS):
        if place.is_symlink():
            raise OutputError(
                f"output_dir: {place} is a link; remove it, or choose another output_dir"
            )


def is_free(folder: Path) -> bool:
    """Return whether no process holds the lock of a run's folder. Nothing is written."""
    if not _beside(folder, "lock").exists():
        return True
    try:
        with FileLock(_beside(folder, "lock")).acquire(timeout=0):
            return True
    except Timeout:
        return False
    except OSError:  # `owned` explains it
        return True


def _beside(folder: Path, kind: str) -> Path:
    return folder.parent / LOCKS / f"{folder.name}.{kind}"


@contextmanager
def _write_errors_explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(unwritable("output_dir", path, error)) from error


def save_model(folder: RunFolder, name: str, params: Mapping[str, Any]) -> None:
    """Write a model's parameters, by name, to a file of the folder."""
    import safetensors.torch  # here: commands that look at folders need no torch

    on_cpu = {key: value.detach().cpu().contiguous() for key, value in params.items()}
    folder.write_bytes(name, safetensors.torch.save(on_cpu))


def json_ready(value: Any) -> Any:
    """Return `value` as plain JSON types: NumPy and torch values, paths and tuples are converted;
    nan and infinity become None."""
    if isinstance(value, Mapping):
        return {str(k): json_ready(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return [json_ready(v) for v in value]
    if hasattr(value, "tolist"):
        return json_ready(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Path):
        return str(value)
    return value
