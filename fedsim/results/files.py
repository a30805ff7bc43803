"""The files of a run's folder: config.yaml, metrics.jsonl, summary.json, the final model. They are
the authoritative record of a run. While it is not finished, checkpoints lie beside them
(fedsim.running.checkpoint)."""

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
    open_regular,
    read_regular,
    remove_folder,
    sync_folder,
    unwritable,
    write_atomically,
)
from fedsim.core.errors import FedsimError
from fedsim.results.reading import CONFIG, METRICS, SUMMARY

ERROR = "error.txt"
TRACE, PARTITION, CLIENTS, LOCKS = "trace.jsonl", "partition.npz", "clients.npz", ".locks"
IMPERFECT = "imperfect.json"
MODEL, NEWEST, PREVIOUS = (
    "model.safetensors",
    "checkpoint.safetensors",
    "checkpoint.previous.safetensors",
)
WANDB_ID = "wandb.id"
REPLACEMENTS = ".replacements"
"""Beside the runs' folders: what `overwrite=true` makes, until it is complete and takes the place
of the old one."""
MOST_OF_HOLDER = 10_000
"""Bytes of the file that says who holds a lock."""
LOOK_SECONDS = 0.5
"""For how long a lock is tried: those that look whether it is free hold it for a moment."""


class OutputError(FedsimError):
    """A run's folder cannot be written (no space, no permission)."""


class HeldError(FedsimError):
    """Another process is running this. `holder`: which, in words; empty if that is not known."""

    def __init__(self, folder: Path) -> None:
        self.holder = ""
        with suppress(OSError, ValueError):
            self.holder = read_regular(_beside(folder, "holder.txt"), MOST_OF_HOLDER).decode()
        super().__init__(
            f"{folder}: another process is running this now ({self.holder or 'unknown which'})"
        )


class RunFolder:
    """The writer of a run's folder. A file is there completely or not at all; records are appended
    as whole lines."""

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
        """Go on with a run that has not ended: files of records are cut to `lengths` (bytes), what
        is not to be kept is deleted."""
        refuse_links(self.path)
        with _write_errors_explained(self.path):
            self._delete(SUMMARY, MODEL, CLIENTS, ERROR)
            for name in (METRICS, TRACE):
                if (self.path / name).exists():
                    with open_no_link(self.path / name, "rb+") as file:
                        file.truncate(lengths.get(name, 0))

    def _delete(self, *names: str) -> None:
        """And what a killed process may have left; W&B is sent its rounds again."""
        for path in (*(self.path / name for name in names), *self.path.glob("*.tmp")):
            path.unlink(missing_ok=True)
        remove_folder(self.path / "wandb")

    def append(self, record: Mapping[str, Any], name: str = METRICS) -> None:
        """Append `record` as one JSON line to the file `name`, which survives a kill of the
        process."""
        path, line = self.path / name, (json.dumps(json_ready(record)) + "\n").encode()
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
        """Force the files of records to the disk; returns how many bytes are in each."""
        found = {}
        for name in (METRICS, TRACE):
            if (self.path / name).exists():
                with (
                    _write_errors_explained(self.path / name),
                    open_no_link(self.path / name, "rb+") as file,
                ):
                    os.fsync(file.fileno())
                    found[name] = os.fstat(file.fileno()).st_size
        return found

    def write_config(self, config: Mapping[str, Any]) -> None:
        self.write_text(
            CONFIG, yaml.safe_dump(json_ready(config), sort_keys=False, allow_unicode=True)
        )

    def write_error(self, config: Mapping[str, Any], text: str) -> None:
        """Write why a run could not begin, and its config; what an earlier run has left stays as it
        is."""
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
        """`keep_as`: another name for the file that was there before."""
        with _write_errors_explained(self.path / name):
            write_atomically(
                self.path / name, content, None if keep_as is None else self.path / keep_as
            )

    def rename(self, name: str, new: str) -> None:
        """Give the file `name` the name `new`, and with it the place of the file that has it."""
        with _write_errors_explained(self.path / new):
            (self.path / name).replace(self.path / new)


def replacement_of(folder: Path) -> Path:
    """Where a run that is to replace the finished one in `folder` is kept until it is complete."""
    return folder.parent / REPLACEMENTS / folder.name


def replace_folder(folder: Path) -> None:
    """Put the replacement of `folder`, whose lock is held, in its place; the old one is deleted
    last. A process that is killed between the two renames leaves no `folder`, and both of what
    belongs there."""
    new, old = replacement_of(folder), folder.parent / REPLACEMENTS / f"{folder.name}.old"
    with _write_errors_explained(folder):
        if folder.exists():
            remove_folder(old)
            folder.rename(old)
        new.rename(folder)
        sync_folder(folder.parent)
        remove_folder(old)
        with suppress(OSError):  # others may have theirs there
            new.parent.rmdir()


def code_digits(summary: Mapping[str, Any]) -> str | None:
    """Six digits that stand for the user's code of a run, or the codes if it has gone on with
    another; None if there is none, or none recorded."""
    codes = [*(summary.get("earlier_code") or ()), summary.get("code")]
    return hashlib.sha256(json.dumps(codes).encode()).hexdigest()[:6] if any(codes) else None


def set_aside(folder: Path, code: str | None, wanted: str | None) -> Path:
    """Move a result of other code next to the run's folder, whose lock is held, and put one of the
    `wanted` code in its place if it was moved there before. Both are told by their `code_digits`.
    Returns where it is."""
    aside, other = (folder.with_name(f"{folder.name}-code-{digits}") for digits in (code, wanted))
    with _write_errors_explained(folder):
        while aside.exists():
            aside = aside.with_name(f"{aside.name}+")
        folder.rename(aside)
        if other.exists():
            other.rename(folder)
        sync_folder(folder.parent)
    return aside


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder, and say so beside it; however its process ends, it is
    released. Raises `HeldError` if another process holds it, and `OutputError` if the folder is a
    link."""
    refuse_links(folder)
    lock = FileLock(_beside(folder, "lock"))
    with _write_errors_explained(_beside(folder, "lock")):
        (folder.parent / LOCKS).mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=LOOK_SECONDS)
        except Timeout:
            raise HeldError(folder) from None
    try:
        holder = f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}"
        with suppress(OSError):  # a full disk is no reason not to work: the file is for people
            write_atomically(_beside(folder, "holder.txt"), holder.encode())
        yield
    finally:
        with suppress(OSError):
            _beside(folder, "holder.txt").unlink(missing_ok=True)
        lock.release()


def refuse_links(folder: Path) -> None:
    """Raise `OutputError` if a run's folder is a link, or one next to it in which fedsim writes for
    the run."""
    for place in (folder, folder.parent / LOCKS, folder.parent / REPLACEMENTS):
        if place.is_symlink():
            raise OutputError(
                f"output_dir: {place} is a link; remove it, or choose another output_dir"
            )


def is_free(folder: Path) -> bool:
    """Whether no process holds the lock of a run's folder. Nothing is written."""
    if not _beside(folder, "lock").exists():
        return True
    try:
        with FileLock(_beside(folder, "lock")).acquire(timeout=0):
            return True
    except Timeout:
        return False
    except OSError:  # which is explained when it is to be held
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
    import safetensors.torch  # here: what looks at folders needs no torch

    on_cpu = {key: value.detach().cpu().contiguous() for key, value in params.items()}
    folder.write_bytes(name, safetensors.torch.save(on_cpu))


MOST_OF_HEADER = 100_000_000
"""Bytes of the JSON that a file of safetensors begins with, by its format."""


def is_whole_model(path: Path, before: int = 0) -> bool:
    """Return whether a file of safetensors is as long as its header says. The header comes `before`
    bytes after the beginning of the file. Raises OSError where it cannot be read."""
    with open_regular(path) as file:
        file.seek(before)
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(length)) if length <= MOST_OF_HEADER else {}
            ends = [
                tensor["data_offsets"][1]
                for name, tensor in header.items()
                if name != "__metadata__"
            ]
            return bool(os.fstat(file.fileno()).st_size == before + 8 + length + max(ends))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return False


def json_ready(value: Any) -> Any:
    """`value` as plain JSON types: converts NumPy and torch values, paths and tuples; nan and
    infinity become None."""
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
