"""Finished runs, read back from their folders, or from an archive: a small Parquet file to publish, which reports take.

An archive has one row a round of a run: `run` (its number), `seed`, `engine`, `commit` and a column `choice.<group>`
for each config group, then the columns of metrics.jsonl. Seconds and losses are kept in single precision, all else
exactly. The first row of a run also has, as JSON, the name of its folder, its config, its summary, its label histograms
[N, C] and, where they were measured, the accuracies of its clients [N]; a run that ended before its first round is that
row alone. What selectors keep of their rounds (trace.jsonl) is not in it.
"""

import io
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from numpy.typing import NDArray

from fedsim.core.disk import unwritable, write_atomically
from fedsim.core.errors import FedsimError, printable
from fedsim.partitions.division import Division
from fedsim.results.files import (
    CLIENTS,
    CONFIG,
    METRICS,
    REPLACEMENTS,
    SUMMARY,
    OutputError,
    json_ready,
    read_metrics,
    read_summary,
)

Floats = NDArray[np.float64]
NUMBERS = ("seed", "num_clients", "num_rounds")
"""Keys of a config without which a run cannot be reported."""
RECORDED = {"round", "selected", "test_accuracy", "participation_ratio", "coverage", "bytes_down", "bytes_up"}
"""Keys that every record of a round has, among others."""


class ReportError(FedsimError):
    """There are no runs to report, or they cannot be read or compared (exit code 3)."""

    exit_code = 3


class Seeds(NamedTuple):
    """What the random numbers of a run come from. Runs of one config at equal seeds are the same run."""

    seed: int
    partition_seed: int
    init_seed: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Seeds":
        """The seeds in a config: those of partition and first model are `seed` unless numbers of their own are set."""
        own = [config.get(name) for name in cls._fields]
        return cls(*(one if isinstance(one, int) else int(config["seed"]) for one in own))

    @property
    def own(self) -> dict[str, int]:
        """The seeds other than `seed`, by their keys, that differ from it."""
        return {name: value for name, value in self._asdict().items() if value != self.seed}

    def __str__(self) -> str:
        """The seed, and those that differ from it: `3 partition_seed=7`."""
        return " ".join([str(self.seed), *(f"{name}={value}" for name, value in self.own.items())])


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run: its folder, config (as saved) and summary."""

    folder: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def seeds(self) -> Seeds:
        """All its seeds, at which it is paired with runs of other configs."""
        return Seeds.of(self.config)

    @property
    def status(self) -> str:
        return str(self.summary["status"])

    @property
    def choices(self) -> Mapping[str, str]:
        """The choice made in each config group."""
        return self.summary["choices"]

    @property
    def num_clients(self) -> int:
        return int(self.config["num_clients"])

    @property
    def num_rounds(self) -> int:
        """Number of rounds that were configured."""
        return int(self.config["num_rounds"])

    @property
    def start_up_rounds(self) -> int | None:
        """Number of initial rounds whose cost differs from that of later ones; None if it was not recorded."""
        return self.summary.get("start_up_rounds")

    @property
    def commit(self) -> str | None:
        """The commit of fedsim that made it, in full; None where none was recorded."""
        revision = self.summary.get("revision")
        return str(revision["commit"]) if isinstance(revision, Mapping) and revision.get("commit") else None

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """The records of its rounds, as in metrics.jsonl."""
        return read_metrics(self.folder)

    def series(self, name: str) -> Floats:
        """A recorded number of every round, [T]; nan if it was not measured."""
        values = [np.nan if r[name] is None else r[name] for r in self.records]
        return np.array(values, dtype=np.float64)

    @cached_property
    def selections(self) -> NDArray[np.int64]:
        """Number of selections of each client, [N]."""
        chosen = [i for r in self.records for i in r["selected"]]
        return np.bincount(np.array(chosen, dtype=np.int64), minlength=self.num_clients)

    @cached_property
    def histograms(self) -> NDArray[np.int64] | None:
        """Training samples of each client by class, [N, C]; None if the partition was not saved."""
        path = self.folder / "partition.npz"
        return Division.load(path).histograms if path.is_file() else None

    @cached_property
    def client_accuracies(self) -> Floats | None:
        """The final model's accuracy on each client, [N], nan where there is none; None if it was not measured."""
        path = self.folder / CLIENTS
        return _read_accuracies(path) if path.is_file() else None


def _read_accuracies(path: Path) -> Floats | None:
    """The accuracies [N] in clients.npz; None, and a line on stderr, where the file cannot be read."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return np.asarray(file["accuracy"], dtype=np.float64)
    except Exception as error:  # a damaged archive fails in zipfile, zlib or numpy, each in its own way
        sys.stderr.write(f"fedsim report: left out {path}: {type(error).__name__}: {error}\n")
        return None


def read_runs(folder: Path) -> list[Run]:
    """All runs below `folder` that have ended, sorted by path. Raises `ReportError` if there are none."""
    paths = [path for path in sorted(folder.rglob(SUMMARY)) if REPLACEMENTS not in path.parts]
    runs = [run for path in paths if (run := _read_or_tell(path.parent)) is not None]
    if not runs:
        raise ReportError(f"{folder}: no finished run below it (a run's folder holds {CONFIG} and {SUMMARY})")
    return runs


def _read_or_tell(folder: Path) -> Run | None:
    """The run in `folder`; where its files cannot be used, one line on stderr and None."""
    if not (folder / CONFIG).is_file():  # a summary of something else, such as a report
        return None
    found = _read(folder)
    if isinstance(found, Run):
        return found
    sys.stderr.write(printable(f"fedsim report: left out {folder}: {found}") + "\n")
    return None


def _read(folder: Path) -> Run | str:
    """The run in `folder`, or what is wrong with its files."""
    summary = read_summary(folder)
    if summary is None or not isinstance(summary.get("choices"), Mapping):
        return f"{SUMMARY} is not that of a run"
    try:
        config = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        return f"{CONFIG} cannot be read ({' '.join(str(error).split())[:100]})"
    if not isinstance(config, Mapping) or not all(isinstance(config.get(key), int) for key in NUMBERS):
        return f"{CONFIG} is not that of a run"
    run = Run(folder, config, summary)
    if run.status == "done" and len(run.records) < run.num_rounds:
        return f"{METRICS} holds {len(run.records)} of {run.num_rounds} rounds; run it again with overwrite=true"
    if not all(record.keys() >= RECORDED for record in run.records):
        return f"{METRICS} holds lines that are not records of rounds"
    return run


def complete(runs: Iterable[Run]) -> list[Run]:
    """The runs that reached their last round."""
    return [run for run in runs if run.status == "done"]


META = b"fedsim.runs"
FORMAT = 1
TOLD = ("folder", "config", "summary", "histograms", "client_accuracies")
"""Columns with what holds for a whole run. Archives from before a column came lack it."""
PLACES = ("data_dir", "cache_dir", "output_dir")
"""Keys of a config that name folders of the machine: left out, as archives are published."""


@dataclass(frozen=True, eq=False)
class ArchivedRun(Run):
    """A run read from an archive; its folder is the name that it had."""

    rows: pa.Table
    label_counts: Sequence[Sequence[int]] | None
    accuracies: Sequence[float | None] | None = None

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        return self.rows.to_pylist()

    @cached_property
    def histograms(self) -> NDArray[np.int64] | None:
        return None if self.label_counts is None else np.array(self.label_counts, dtype=np.int64)

    @cached_property
    def client_accuracies(self) -> Floats | None:
        return None if self.accuracies is None else np.array(self.accuracies, dtype=np.float64)


def write_archive(runs: Sequence[Run], root: Path, path: Path) -> None:
    """Write `runs` to the file `path`. Raises `OutputError` where it cannot.

    Their folders are below `root`; those of runs from another archive are names already.
    """
    names = list(dict.fromkeys(name for run in runs for record in run.records for name in record))
    groups = sorted({group for run in runs for group in run.choices})
    columns: dict[str, pa.Array] = {
        "run": _repeated(list(range(len(runs))), runs, pa.int32()),
        "seed": _repeated([run.seed for run in runs], runs, pa.int64()),
        "engine": _repeated([run.summary.get("engine") for run in runs], runs, pa.string()),
        "commit": _repeated([run.commit for run in runs], runs, pa.string()),
        **{f"choice.{g}": _repeated([run.choices.get(g) for run in runs], runs, pa.string()) for g in groups},
        **{name: _column(name, [record.get(name) for run in runs for record in _rows(run)]) for name in names},
    }
    for key in TOLD:
        columns[key] = _on_first_rows([_told(run, root)[key] for run in runs], runs)
    meta = json.dumps({"format": FORMAT, "records": names})
    table = pa.table(columns).replace_schema_metadata({META: meta.encode()})
    single = [name for name, column in columns.items() if column.type == pa.float32()]
    coded = [name for name in table.column_names if name not in single]
    file = io.BytesIO()
    pq.write_table(
        table, file, compression="zstd", compression_level=19, use_dictionary=coded, use_byte_stream_split=single
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, file.getvalue())
    except OSError as error:
        raise OutputError(unwritable("--archive", path, error)) from error


def read_archive(path: Path) -> list[Run]:
    """The runs in the file `path`. Raises `ReportError` if it is not an archive of runs."""
    try:
        table = pq.read_table(path)
        meta = json.loads((table.schema.metadata or {}).get(META, b"null"))
        if not isinstance(meta, Mapping) or meta.get("format") != FORMAT:
            raise ReportError(f"{path}: not an archive of runs (fedsim report <folder> --archive writes one)")
        return _runs(table, meta["records"])
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
        raise ReportError(f"{path}: cannot be read as an archive of runs ({error})") from error


def _runs(table: pa.Table, names: Sequence[str]) -> list[Run]:
    runs: list[Run] = []
    records, first = table.select(names), 0
    for length in np.bincount(table["run"].to_numpy()).tolist():
        told = {key: json.loads(table[key][first].as_py()) for key in TOLD if key in table.column_names}
        rounds = 0 if records["round"][first].as_py() is None else length
        own = records.slice(first, rounds), told["histograms"], told.get("client_accuracies")
        runs.append(ArchivedRun(Path(told["folder"]), told["config"], told["summary"], *own))
        first += length
    return runs


def _told(run: Run, root: Path) -> dict[str, Any]:
    return {
        "folder": (run.folder.relative_to(root) if run.folder.is_relative_to(root) else run.folder).as_posix(),
        "config": {key: value for key, value in run.config.items() if key not in PLACES},
        "summary": dict(run.summary),
        "histograms": None if run.histograms is None else run.histograms.tolist(),
        "client_accuracies": json_ready(run.client_accuracies),
    }


def _on_first_rows(values: Sequence[Any], runs: Sequence[Run]) -> pa.Array:
    """A value of each run as JSON in the first of its rows; null in the others."""
    rows = [[json.dumps(value), *[None] * (len(_rows(run)) - 1)] for value, run in zip(values, runs, strict=True)]
    return pa.array([cell for some in rows for cell in some], pa.string())


def _rows(run: Run) -> list[dict[str, Any]]:
    return run.records or [{}]


def _repeated(values: Sequence[Any], runs: Sequence[Run], kind: pa.DataType) -> pa.Array:
    """A value of each run, in each of its rows."""
    return pa.array([value for value, run in zip(values, runs, strict=True) for _ in _rows(run)], kind)


def _column(name: str, values: list[Any]) -> pa.Array:
    if name.startswith("seconds_") or name == "wall_seconds" or name.endswith("_loss"):
        return pa.array(values, pa.float32())
    if any(isinstance(value, float) for value in values):
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    return pa.array(values)
