"""The files of a run's folder: config.yaml, metrics.jsonl, summary.json. They are the authoritative record of a run."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from fedsim.errors import FedsimError

CONFIG, METRICS, SUMMARY, ERROR = "config.yaml", "metrics.jsonl", "summary.json", "error.txt"
TRACE, LOCKS = "trace.jsonl", ".locks"


class OutputError(FedsimError):
    """A run's folder cannot be written (no space, no permission), or another process is using it."""


class RunFolder:
    """The writer of a run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, config: Mapping[str, Any]) -> "RunFolder":
        """Create `path` for a new run, delete the files that an earlier run left there, and write the config."""
        folder = cls(path)
        with _write_errors_explained(path):
            path.mkdir(parents=True, exist_ok=True)
            for name in (METRICS, SUMMARY, ERROR, TRACE):
                (path / name).unlink(missing_ok=True)
        folder.write_text(CONFIG, yaml.safe_dump(json_ready(config), sort_keys=False, allow_unicode=True))
        return folder

    def append(self, record: Mapping[str, Any], name: str = METRICS) -> None:
        """Append `record` as one JSON line to the file `name`.

        The line is handed to the operating system before this returns, so that it survives a kill of the process. It is
        not forced to the disk, which would take milliseconds: a power failure may lose the last lines.
        """
        with _write_errors_explained(self.path / name), (self.path / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(json_ready(record)) + "\n")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json, whose presence indicates that the run has ended."""
        self.write_text(SUMMARY, json.dumps(json_ready(summary), indent=2) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write a file atomically: completely or not at all."""
        target, temporary = self.path / name, self.path / f"{name}.tmp"
        with _write_errors_explained(target):
            try:
                with temporary.open("w", encoding="utf-8") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(target)
            finally:
                temporary.unlink(missing_ok=True)


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder. Raises `OutputError` if another process holds it.

    The operating system releases the lock when its process ends, in whatever way.
    """
    lock = FileLock(folder.parent / LOCKS / f"{folder.name}.lock")
    with _write_errors_explained(folder):
        Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise OutputError(f"{folder}: another process is running this now; wait for it, or stop it") from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _write_errors_explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"output_dir: cannot write {path} ({error.strerror or error}); free some space or choose another output_dir"
        ) from error


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


def read_metrics(folder: Path, name: str = METRICS) -> list[dict[str, Any]]:
    """The records in metrics.jsonl of a run, or in another file `name` of JSON lines.

    An incomplete last line is ignored; there are no records if the file does not exist.
    """
    path = folder / name
    if not path.is_file():
        return []
    records: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
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
