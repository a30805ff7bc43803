"""Archives: finished runs in one small Parquet file, to publish.

An archive has one row a round of a run: `run` (its number), `seed`, `engine`, `commit` and a column
`choice.<group>` for each config group, then the columns of metrics.jsonl, seconds and losses in
single precision. The first row of a run also has, as JSON, its `TOLD`; a run that ended before its
first round is that row alone.

`read_archive` returns each run as a `Run` whose `archived` has two values next to `TOLD`: `rows`,
a pyarrow table with a row a round and the columns of metrics.jsonl, and `rounds`, the same as
`Rounds` (NumPy arrays by column, and the clients selected in each round).
"""

import io
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fedsim.core.arrays import Floats
from fedsim.core.disk import open_regular, unwritable, write_atomically
from fedsim.results.files import (
    OutputError,
    json_ready,
)
from fedsim.results.reading import (
    INT,
    LIST,
    NONE,
    NUMBER,
    OF_RECORD,
    TEXT,
    DamagedError,
    Kinds,
    Rounds,
    check_kinds,
    has_kinds,
    parse_json,
)
from fedsim.results.runs import ReportError, Run, tell_left_out

META = b"fedsim.runs"
FORMAT = 1
TOLD = ("folder", "config", "summary", "histograms", "imperfect", "client_accuracies")
"""Columns with what holds for a whole run; earlier archives lack the last two."""
PLACES = ("data_dir", "cache_dir", "output_dir")
"""Keys that name folders of the machine: left out, as archives are published."""
KINDS = {
    "run": pa.int32(),
    "seed": pa.int64(),
    **dict.fromkeys(("engine", "commit", *TOLD), pa.string()),
}


def write_archive(runs: Sequence[Run], root: Path, path: Path) -> None:
    """Write `runs`, whose folders are below `root`, to the file `path`. Raises `OutputError` where
    it cannot."""
    rows = [row for number, run in enumerate(runs) for row in _rows(number, run, root)]
    records = list(dict.fromkeys(name for run in runs for record in run.records for name in record))
    groups = sorted({f"choice.{group}" for run in runs for group in run.choices})
    names = ["run", "seed", "engine", "commit", *groups, *records, *TOLD]
    table = pa.table(
        {name: pa.array([row.get(name) for row in rows], _kind(name)) for name in names}
    )
    table = table.replace_schema_metadata(
        {META: json.dumps({"format": FORMAT, "records": records}).encode()}
    )
    single = [name for name in names if table[name].type == pa.float32()]
    coded, file = [name for name in names if name not in single], io.BytesIO()
    pq.write_table(
        table,
        file,
        compression="zstd",
        compression_level=19,
        use_dictionary=coded,
        use_byte_stream_split=single,
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, file.getvalue(), alone=False)
    except OSError as error:
        raise OutputError(unwritable("--archive", path, error)) from error


def _rows(number: int, run: Run, root: Path) -> list[dict[str, Any]]:
    told = {
        "folder": (
            run.folder.relative_to(root) if run.folder.is_relative_to(root) else run.folder
        ).as_posix(),
        "config": {key: value for key, value in run.config.items() if key not in PLACES},
        "summary": dict(run.summary),
        "histograms": None if run.histograms is None else run.histograms.tolist(),
        "client_accuracies": json_ready(run.client_accuracies),
        "imperfect": json_ready(run.imperfect),
    }
    whole = {
        "run": number,
        "seed": run.seed,
        "engine": run.summary.get("engine"),
        "commit": run.commit,
    }
    whole |= {f"choice.{group}": choice for group, choice in run.choices.items()}
    first, *others = [{**whole, **record} for record in run.records or [{}]]
    return [first | {key: json.dumps(value) for key, value in told.items()}, *others]


def _kind(name: str) -> pa.DataType | None:
    """The type of a column; None: what its values say."""
    if name.startswith("seconds_") or name == "wall_seconds" or name.endswith("_loss"):
        return pa.float32()
    return KINDS.get(name, pa.string() if name.startswith("choice.") else None)


MOST_VALUES, MOST_BYTES_OF_ARCHIVE = 2**29, 2**33
"""Numbers and texts in an archive, and bytes that they take when it is unpacked, by what its end
says."""


def read_archive(path: Path, left_out: list[str] | None = None) -> list[Run]:
    """The runs in the file `path`, without damaged ones (`left_out` as in `read_source`). Raises
    `ReportError` if it is not an archive of runs."""
    try:
        with open_regular(path) as file:
            table, records = _read_table(pq.ParquetFile(file, read_dictionary=TOLD[:4]))
        numbers = table["run"].to_numpy()
        if len(numbers) and (numbers[0] != 0 or not np.isin(np.diff(numbers), (0, 1)).all()):
            raise ValueError("its rows are not those of one run after another")
        lengths = np.bincount(numbers).tolist()
    except DamagedError as error:
        raise ReportError(f"{path}: {error}") from error
    except MemoryError as error:
        raise ReportError(f"{path}: takes more memory than there is") from error
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
        raise ReportError(f"{path}: cannot be read as an archive of runs ({error})") from error
    runs: list[Run] = []
    first = 0
    for number, length in enumerate(lengths):
        try:
            run = _archived(table, records, first, length)
            run.check()
            runs.append(run)
        except DamagedError as error:
            tell_left_out(path, f"run {number}: {error}", left_out)
        first += length
    return runs


def _read_table(file: pq.ParquetFile) -> tuple[pa.Table, list[str]]:
    """The rows of an archive, and the names of the columns that are records. Raises `DamagedError`
    if it is none."""
    meta = parse_json((file.schema_arrow.metadata or {}).get(META, b"null"), "its description")
    if (
        not has_kinds(meta, {"format": INT, "records": LIST})
        or meta.get("format") != FORMAT
        or "records" not in meta
    ):
        raise DamagedError("not an archive of runs (fedsim report <folder> --archive writes one)")
    groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
    values = sum(
        group.column(number).num_values for group in groups for number in range(group.num_columns)
    )
    if (
        values > MOST_VALUES
        or sum(group.total_byte_size for group in groups) > MOST_BYTES_OF_ARCHIVE
    ):
        raise DamagedError(
            f"holds {values:,} values, more than an archive that is read; write several"
        )
    told = [name for name in TOLD if name in file.schema_arrow.names]
    return file.read(["run", *meta["records"], *told]), meta["records"]


def _archived(table: pa.Table, records: Sequence[str], first: int, length: int) -> Run:
    """The run in so many rows of an archive from the `first` on. Raises `DamagedError`."""
    told = {}
    for key in [key for key in TOLD if key in table.column_names]:
        told[key] = parse_json(table[key][first].as_py() or "null", key, is_large=key in TOLD[3:])
    if not isinstance(told["folder"], str):
        raise DamagedError("its folder is not a text")
    told["rows"] = table.select(records).slice(
        first, 0 if table["round"][first].as_py() is None else length
    )
    told["rounds"] = rounds_in(told["rows"])
    return Run(Path(told["folder"]), told["config"], told["summary"], told)


def rounds_in(rows: pa.Table) -> Rounds:
    """The records in rows of an archive. Raises `DamagedError`."""
    names = [name for name in rows.column_names if _is_there(rows, name)]
    check_kinds({name: _kinds(rows[name]) for name in names})
    columns: dict[str, Floats] = {}
    for name in names:
        column = (
            pc.list_value_length(rows[name]) if pa.types.is_list(rows[name].type) else rows[name]
        )
        columns[name] = column.to_numpy().astype(np.float64)
    selected = rows["selected"].combine_chunks() if names else pa.array([], pa.list_(pa.int32()))
    chosen = np.array([pc.list_parent_indices(selected), pc.list_flatten(selected)], np.int32)
    return Rounds(len(rows), columns or defaultdict(lambda: np.empty(0)), chosen)


def _is_there(rows: pa.Table, name: str) -> bool:
    """Whether a run of an archive has this field of records: of those that are never None, others
    may have it alone."""
    column = rows[name]
    return name in OF_RECORD and column.null_count < len(column) + (
        type(None) in OF_RECORD[name] and len(column) > 0
    )


def _kinds(column: pa.ChunkedArray) -> Kinds:
    """The types of JSON values that a column of records would have in metrics.jsonl."""
    kind, absent = column.type, NONE if column.null_count else Kinds()
    if column.null_count == len(column):
        return NONE
    if pa.types.is_list(kind) and (
        pa.types.is_integer(kind.value_type) or pa.types.is_null(kind.value_type)
    ):
        return absent | LIST
    return absent | (
        INT if pa.types.is_integer(kind) else NUMBER if pa.types.is_floating(kind) else TEXT
    )
