"""The runs of a report in one Parquet file, small enough to publish, from which the report can be made again.

One row a round of a run: `run` (its number), `seed`, `engine`, `commit` and a column `choice.<group>` for each config
group, then the columns of metrics.jsonl. Seconds and losses are kept in single precision, all else exactly. The first
row of a run also has, as JSON, the name of its folder, its config, its summary, its label histograms [N, C] and, where
they were measured, the accuracies of its clients [N]; a run that ended before its first round is that row alone. What
selectors keep of their rounds (trace.jsonl) is not in it.
"""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from fedsim.disk import unwritable, write_atomically
from fedsim.report.runs import Floats, ReportError, Run
from fedsim.tracking.files import OutputError, json_ready

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
        records: list[dict[str, Any]] = self.rows.to_pylist()
        return records

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
    records, runs, first = table.select(names), [], 0
    lengths = np.bincount(table["run"].to_numpy()).tolist()
    for length in lengths:
        found = [key for key in TOLD if key in table.column_names]
        told: dict[str, Any] = {key: json.loads(table[key][first].as_py()) for key in found}
        rounds = 0 if records["round"][first].as_py() is None else length
        run = ArchivedRun(
            Path(told["folder"]),
            told["config"],
            told["summary"],
            records.slice(first, rounds),
            told["histograms"],
            told.get("client_accuracies"),
        )
        runs.append(run)
        first += length
    return list(runs)


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
    rows: list[str | None] = []
    for value, run in zip(values, runs, strict=True):
        rows += [json.dumps(value), *[None] * (len(_rows(run)) - 1)]
    return pa.array(rows, pa.string())


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
