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

ERROR = "error.txt"  # why a run could not begin
TRACE = "trace.jsonl"  # what the selector itself writes about its rounds
PARTITION = "partition.npz"  # who holds which training samples, and how many of each label
CLIENTS = "clients.npz"  # the final model's accuracy on each client
IMPERFECT = "imperfect.json"  # the ids of clients with wrong labels or false updates
MODEL = "model.safetensors"
NEWEST = "checkpoint.safetensors"
PREVIOUS = "checkpoint.previous.safetensors"
TABLE = "metrics.csv"  # what the tracker csv writes; the others write what follows
TENSORBOARD = "tensorboard"
WANDB = "wandb"
WANDB_ID = "wandb.id"
MLFLOW_ID = "mlflow.id"
LOCKS = ".locks"
"""The folder with the locks of runs, next to the runs' folders."""
REPLACEMENTS = ".replacements"
"""The folder in which `overwrite=true` makes a run until it is complete and replaces the old one.
It is next to the runs' folders."""
MAX_HOLDER_BYTES = 10_000
"""Maximum size of the file that says who holds a lock."""
LOCK_SECONDS = 0.5
"""Time for which `owned` waits for a lock. A process that looks at a lock holds it for a moment."""


class OutputError(FedsimError):
    """A run's folder cannot be written (no space, no permission)."""


class HeldError(FedsimError):
    """Another process holds the lock of a run's folder: it is running this run now."""

    def __init__(self, folder: Path) -> None:
        holder = holder_of(folder) or "unknown which"
        super().__init__(f"{folder}: another process is running this now ({holder})")


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
            # The summary is the first: without it, the earlier run counts as unfinished.
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
        """Prepare the folder of a run that resumes.

        Each file of records is cut to its length at the checkpoint: `lengths` has the numbers of
        bytes by file name. A shorter file stays as it is. What is written when a run ends is
        deleted, and what trackers wrote.
        """
        refuse_links(self.path)
        with _write_errors_explained(self.path):
            self._delete(SUMMARY, MODEL, CLIENTS, ERROR)
            for path in self._files_of_records():
                with open_no_link(path, "rb+") as file:
                    size = os.fstat(file.fileno()).st_size
                    file.truncate(min(lengths.get(path.name, 0), size))

    def _delete(self, *names: str) -> None:
        """Delete files in this order, then the temporary files of a killed process, and what
        trackers wrote, which get all rounds again."""
        paths = [self.path / name for name in (*names, TABLE)]
        for path in (*paths, *self.path.glob("*.tmp")):
            path.unlink(missing_ok=True)
        remove_folder(self.path / WANDB)
        remove_folder(self.path / TENSORBOARD)

    def append(self, record: Mapping[str, Any], name: str = METRICS) -> None:
        """Append `record` as one JSON line to the file `name`. A process that is killed afterwards
        does not lose the line."""
        path = self.path / name
        line = (json.dumps(json_ready(record)) + "\n").encode()
        with _write_errors_explained(path), open_no_link(path, "ab") as file:
            length = file.tell()
            try:
                num_written = file.write(line)
                if num_written != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                os.ftruncate(file.fileno(), length)
                raise

    def sync_records(self) -> dict[str, int]:
        """Force the files of records to the disk, and return the number of bytes in each."""
        lengths = {}
        for path in self._files_of_records():
            with _write_errors_explained(path), open_no_link(path, "rb+") as file:
                os.fsync(file.fileno())
                lengths[path.name] = os.fstat(file.fileno()).st_size
        return lengths

    def _files_of_records(self) -> list[Path]:
        paths = [self.path / METRICS, self.path / TRACE]
        return [path for path in paths if path.exists()]

    def write_config(self, config: Mapping[str, Any]) -> None:
        text = yaml.safe_dump(json_ready(config), sort_keys=False, allow_unicode=True)
        self.write_text(CONFIG, text)

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
        """Write a file. A file that is already there is replaced, or renamed to `keep_as`."""
        kept_path = None if keep_as is None else self.path / keep_as
        with _write_errors_explained(self.path / name):
            write_atomically(self.path / name, content, kept_path)

    def rename(self, name: str, new: str) -> None:
        """Rename the file `name` to `new`, which it replaces."""
        with _write_errors_explained(self.path / new):
            (self.path / name).replace(self.path / new)


def replacement_of(folder: Path) -> Path:
    """Return the folder of a run that will replace the finished run in `folder`."""
    return folder.parent / REPLACEMENTS / folder.name


def replace_folder(folder: Path) -> None:
    """Move the replacement of `folder` to its place, and then delete the old folder.

    The caller holds the lock of `folder`. A process that is killed between the two renames leaves
    no `folder`, but both the old and the new one.
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
    """Move the result of other code out of a run's folder to one next to it, and return that one.

    If a result of the new code was set aside earlier, it moves back into the run's folder. The
    caller holds the lock of `folder`. `code` and `new_code` are the `code_digits` of the two
    results.
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
            lock.acquire(timeout=LOCK_SECONDS)
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


def holder_of(folder: Path) -> str:
    """Return which process holds the lock of a run's folder, in words; "" if that is not known."""
    with suppress(OSError, ValueError):
        return read_regular(_beside(folder, "holder.txt"), MAX_HOLDER_BYTES).decode()
    return ""


def refuse_links(folder: Path) -> None:
    """Raise `OutputError` if a run's folder is a link, or a folder next to it in which fedsim
    writes."""
    for place in (folder, folder.parent / LOCKS, folder.parent / REPLACEMENTS):
        if place.is_symlink():
            text = f"output_dir: {place} is a link; remove it, or choose another output_dir"
            raise OutputError(text)


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
    """Return the path of a file about the lock of a run's folder: its `lock` or `holder.txt`."""
    return folder.parent / LOCKS / f"{folder.name}.{kind}"


@contextmanager
def _write_errors_explained(path: Path) -> Iterator[None]:
    """Raise an OSError as an `OutputError` that explains why `path` cannot be written."""
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
    """Return `value` as plain JSON types. NumPy and torch values, paths, tuples and sets are
    converted; nan and infinity become None."""
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [json_ready(item) for item in value]
    if hasattr(value, "tolist"):
        return json_ready(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Path):
        return str(value)
    return value
