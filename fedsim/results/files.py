"""The files of a run's folder: config.yaml, metrics.jsonl, summary.json, the final model. They are the authoritative
record of a run. While it is not finished, checkpoints lie beside them (fedsim.running.checkpoint); a file beside the
lock of a folder tells which process holds it.

Every file is written completely or not at all: under another name, forced to the disk, and renamed.
"""

import errno
import json
import math
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open

from fedsim.core.disk import opened, sync_folder, unwritable, write_atomically
from fedsim.core.errors import FedsimError


@dataclass(frozen=True)
class Holder:
    """A process: its `host`, its `pid` there, and `since` when it holds the lock (seconds since 1970)."""

    host: str
    pid: int
    since: float

    @classmethod
    def this_process(cls) -> "Holder":
        return cls(socket.gethostname(), os.getpid(), time.time())

    @classmethod
    def read(cls, path: Path) -> "Holder | None":
        """The holder that `path` names, or None if it cannot be read."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            return cls(str(found["host"]), int(found["pid"]), float(found["since"]))
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None

    def write(self, path: Path) -> None:
        """Write the file atomically. That a disk is full is no reason not to work: the file is for people."""
        with suppress(OSError):
            write_atomically(path, json.dumps(asdict(self)).encode())

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, for {max(time.time() - self.since, 0) / 60:.0f} min"


CONFIG, METRICS, SUMMARY, ERROR = "config.yaml", "metrics.jsonl", "summary.json", "error.txt"
TRACE, PARTITION, CLIENTS, LOCKS = "trace.jsonl", "partition.npz", "clients.npz", ".locks"
MODEL, NEWEST, PREVIOUS = "model.safetensors", "checkpoint.safetensors", "checkpoint.previous.safetensors"
WANDB_ID = "wandb.id"
"""The id of the run at Weights & Biases."""
REPLACEMENTS = ".replacements"
"""Beside the runs' folders: what `overwrite=true` makes, until it is complete and takes the place of the old one."""
LOOK_SECONDS = 0.5
"""For how long a lock is tried: those that look whether it is free hold it for a moment."""


class OutputError(FedsimError):
    """A run's folder cannot be written (no space, no permission)."""


class HeldError(FedsimError):
    """Another process is running this. `holder`: which, if that is known."""

    def __init__(self, folder: Path) -> None:
        self.holder = Holder.read(_beside(folder, "holder.json"))
        super().__init__(f"{folder}: another process is running this now ({self.holder or 'unknown which'})")


class RunFolder:
    """The writer of a run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, config: Mapping[str, Any]) -> "RunFolder":
        """Create `path` for a new run, delete the files that an earlier run left there, and write the config."""
        folder = cls(path)
        refuse_link(path)
        with _write_errors_explained(path):
            path.mkdir(parents=True, exist_ok=True)
            for name in (SUMMARY, NEWEST, PREVIOUS, METRICS, TRACE, MODEL, CLIENTS, ERROR, WANDB_ID):
                (path / name).unlink(missing_ok=True)
            folder._clean()
        folder.write_config(config)
        return folder

    def reopen(self, lengths: Mapping[str, int]) -> None:
        """Go on with a run that has not ended: files of records are cut to `lengths` (bytes), what is not to be kept is
        deleted."""
        refuse_link(self.path)
        with _write_errors_explained(self.path):
            for name in (SUMMARY, MODEL, CLIENTS, ERROR):
                (self.path / name).unlink(missing_ok=True)
            self._clean()
            for name in (METRICS, TRACE):
                if (self.path / name).exists():
                    with opened(self.path / name, "rb+") as file:
                        file.truncate(lengths.get(name, 0))

    def _clean(self) -> None:
        """Delete what a killed process may have left: temporary files, and W&B's records of rounds that it is sent
        again."""
        for left in self.path.glob("*.tmp"):
            left.unlink(missing_ok=True)
        shutil.rmtree(self.path / "wandb", ignore_errors=True)

    def append(self, record: Mapping[str, Any], name: str = METRICS) -> None:
        """Append `record` as one JSON line to the file `name`: the whole line, or an error and nothing of it.

        The line is handed to the operating system before this returns, so that it survives a kill of the process. It is
        forced to the disk with the next checkpoint; a power failure may lose the lines since.
        """
        path, line = self.path / name, (json.dumps(json_ready(record)) + "\n").encode()
        with _write_errors_explained(path), opened(path, "ab") as file:
            end = file.tell()
            try:
                written = file.write(line)
                if written != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                os.ftruncate(file.fileno(), end)
                raise

    def sync_records(self) -> dict[str, int]:
        """Force the files of records to the disk; returns how many bytes are in each."""
        found = {}
        for name in (METRICS, TRACE):
            if (self.path / name).exists():
                with _write_errors_explained(self.path / name), opened(self.path / name, "rb+") as file:
                    os.fsync(file.fileno())
                    found[name] = os.fstat(file.fileno()).st_size
        return found

    def write_config(self, config: Mapping[str, Any]) -> None:
        self.write_text(CONFIG, yaml.safe_dump(json_ready(config), sort_keys=False, allow_unicode=True))

    def write_error(self, config: Mapping[str, Any], text: str) -> None:
        """Write why a run could not begin, and its config; what an earlier run has left stays as it is."""
        refuse_link(self.path)
        with _write_errors_explained(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        self.write_config(config)
        self.write_text(ERROR, text)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json, whose presence indicates that the run has ended."""
        self.write_text(SUMMARY, json.dumps(json_ready(summary), indent=2) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write a file atomically: completely or not at all."""
        self.write_bytes(name, text.encode())

    def write_bytes(self, name: str, content: bytes | bytearray, keep_as: str | None = None) -> None:
        """Write a file atomically. `keep_as`: another name for the file that was there before."""
        with _write_errors_explained(self.path / name):
            write_atomically(self.path / name, content, None if keep_as is None else self.path / keep_as)

    def rename(self, name: str, new: str) -> None:
        """Give the file `name` the name `new`, and with it the place of the file that has it."""
        with _write_errors_explained(self.path / new):
            (self.path / name).replace(self.path / new)


def replacement_of(folder: Path) -> Path:
    """Where a run that is to replace the finished one in `folder` is kept until it is complete."""
    return folder.parent / REPLACEMENTS / folder.name


def replace_folder(folder: Path) -> None:
    """Put the replacement of `folder` in its place; the old one is deleted last. To be called by the owner of its lock.

    A process that is killed between the two renames leaves no `folder`, and both of what belongs there.
    """
    new, old = replacement_of(folder), folder.parent / REPLACEMENTS / f"{folder.name}.old"
    with _write_errors_explained(folder):
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        new.rename(folder)
        sync_folder(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
        with suppress(OSError):  # others may have theirs there
            new.parent.rmdir()


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder, and say so beside it. Raises `HeldError` if another process holds it, and
    `OutputError` if the folder is a link.

    The operating system releases the lock when its process ends, in whatever way.
    """
    refuse_link(folder)
    lock = FileLock(_beside(folder, "lock"))
    with _write_errors_explained(folder):
        (folder.parent / LOCKS).mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=LOOK_SECONDS)
        except Timeout:
            raise HeldError(folder) from None
    try:
        Holder.this_process().write(_beside(folder, "holder.json"))
        yield
    finally:
        with suppress(OSError):
            _beside(folder, "holder.json").unlink(missing_ok=True)
        lock.release()


def refuse_link(folder: Path) -> None:
    """Raise `OutputError` if a run's folder is a link: the files of what it leads to would be deleted or replaced."""
    if folder.is_symlink():
        raise OutputError(f"output_dir: {folder} is a link; remove it, or choose another output_dir")


def is_free(folder: Path) -> bool:
    """Whether no process holds the lock of a run's folder. Nothing is written."""
    if not _beside(folder, "lock").exists():
        return True
    lock = FileLock(_beside(folder, "lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return False
    except OSError:  # which is explained when it is to be held
        return True
    lock.release()
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
    """Write a model, its tensors by name, as a file of safetensors."""
    import safetensors.torch  # here: what looks at folders needs no torch

    on_cpu = {key: value.detach().cpu().contiguous() for key, value in params.items()}
    folder.write_bytes(name, safetensors.torch.save(on_cpu))


def is_whole_model(path: Path) -> bool:
    """Whether a file of safetensors is there and as long as its header says. Its numbers are not read."""
    try:
        with safe_open(path, framework="pt"):
            return True
    except (OSError, SafetensorError):
        return False


def json_ready(value: Any) -> Any:
    """`value` as plain JSON types: converts NumPy and torch values, paths and tuples; nan and infinity become None."""
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


def read_metrics(folder: Path, name: str = METRICS, end: int | None = None) -> list[dict[str, Any]]:
    """The records in metrics.jsonl of a run, or in another file `name` of JSON lines; those in its first `end` bytes.

    An incomplete last line is ignored; there are no records if the file does not exist.
    """
    path = folder / name
    if not path.is_file():
        return []
    records: list[dict[str, Any]] = []
    for line in path.read_bytes()[:end].decode(errors="replace").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(record, dict):
            break
        records.append(record)
    return records


def read_summary(folder: Path) -> dict[str, Any] | None:
    """The summary of a run, or None if the run has not ended or its summary cannot be read."""
    try:
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return summary if isinstance(summary, dict) and isinstance(summary.get("status"), str) else None


FINAL = ("done", "diverged")
"""Statuses of runs that have an end; runs of others go on with the same command."""
