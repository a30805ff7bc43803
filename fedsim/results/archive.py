"""Archives: finished runs in one small Parquet file, to publish.

An archive has one row for each round of each run. Its columns are `run` (a number from 0), `seed`,
`engine`, `commit`, one `choice.<group>` for each config group, and the columns of metrics.jsonl.
The first row of a run also holds what is true of the whole run, as JSON in the columns
`RUN_COLUMNS`. A run that ended before its first round has that row alone.

Three things make the file small. Seconds and losses have single precision. `selected` holds the
sorted ids of a round as differences: 3, 7, 8 is stored as 3, 4, 1. Parquet stores repeated values
once.

A compact archive has the fields `COMPACT_FIELDS` of a record alone, and no histograms or
accuracies of clients. It lacks who was selected, so that reports have no figures and measures of
selections.
"""

import io
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fedsim.core.arrays import Floats
from fedsim.core.disk import open_regular, unwritable, write_atomically
from fedsim.results.files import OutputError, json_ready
from fedsim.results.reading import (
    INT,
    LIST,
    NONE,
    NUMBER,
    RECORD_KINDS,
    TEXT,
    DamagedError,
    Kinds,
    Rounds,
    check_kinds,
    has_kinds,
    parse_json,
)
from fedsim.results.runs import ReportError, Run, tell_left_out

METADATA_KEY = b"fedsim.runs"
"""Key of the description of an archive, JSON, in the metadata of the Parquet file."""
FORMAT = 2
RUN_COLUMNS = ("folder", "config", "summary", "histograms", "imperfect", "client_accuracies")
"""Columns that describe a whole run. Early archives lack the last two."""
EARLY_COLUMNS = RUN_COLUMNS[:4]
"""Columns that all archives have."""
LARGE_COLUMNS = ("histograms", "imperfect", "client_accuracies")
"""Columns whose JSON grows with the number of clients."""
MACHINE_KEYS = ("data_dir", "cache_dir", "output_dir")
"""Config keys that name folders of the machine. Archives are published, so these are left out."""
COLUMN_TYPES = {
    "run": pa.int32(),
    "seed": pa.int64(),
    "engine": pa.string(),
    "commit": pa.string(),
    "selected": pa.list_(pa.int32()),
    **dict.fromkeys(RUN_COLUMNS, pa.string()),
}
"""Types of columns that do not follow from their values."""
COMPACT_FIELDS = (
    "round",
    "test_accuracy",
    "participation_ratio",
    "coverage",
    "bytes_down",
    "bytes_up",
    "simulated_time",
)
"""Fields of a record in a compact archive. The simulated time is there where the accuracy was
measured, in single precision."""
MAX_VALUES = 2**29
"""Maximum number of values in an archive that is read."""
MAX_BYTES = 2**33
"""Maximum size in bytes of an unpacked archive that is read."""


# --- writing ---


def write_archive(runs: Sequence[Run], root: Path, path: Path, *, compact: bool = False) -> None:
    """Write runs, whose folders are below `root`, to the file `path`.

    Raises `OutputError` if the file cannot be written.
    """
    rows: list[dict[str, Any]] = []
    record_names: dict[str, None] = {}
    groups: set[str] = set()
    for number, run in enumerate(runs):
        records = run.records
        if compact:
            run, records = _compact(run, records)
        rows_of_run = _rows_of_run(number, run, records, root)
        if compact:
            rows_of_run[0] |= {"histograms": None, "client_accuracies": None}
        rows += rows_of_run
        groups.update(run.choices)
        for record in records:
            record_names.update(dict.fromkeys(record))
    choice_names = sorted(f"choice.{group}" for group in groups)
    names = ["run", "seed", "engine", "commit", *choice_names, *record_names, *RUN_COLUMNS]
    columns = {}
    for name in names:
        is_single = compact and name == "simulated_time"
        column_type = pa.float32() if is_single else _type_of(name)
        columns[name] = pa.array([row.get(name) for row in rows], column_type)
    metadata = {"format": FORMAT, "records": list(record_names)}
    table = pa.table(columns).replace_schema_metadata({METADATA_KEY: json.dumps(metadata).encode()})
    # Seconds and losses seldom repeat, so that a dictionary does not help. Their bytes are split
    # into streams instead, which compress better. Of round numbers the differences are stored.
    noisy = [name for name in names if table[name].type == pa.float32()]
    file = io.BytesIO()
    pq.write_table(
        table,
        file,
        compression="zstd",
        compression_level=19,
        use_dictionary=[name for name in names if name not in (*noisy, "round")],
        use_byte_stream_split=noisy,
        column_encoding={"round": "DELTA_BINARY_PACKED"} if record_names else None,
        write_statistics=[name for name in names if name not in RUN_COLUMNS],
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, file.getvalue(), alone=False)
    except OSError as error:
        raise OutputError(unwritable("--archive", path, error)) from error


def _compact(run: Run, records: Sequence[Mapping[str, Any]]) -> tuple[Run, list[dict[str, Any]]]:
    """Return a run and its records without what a compact archive leaves out.

    Of the summary these are totals of measured seconds, and what follows from the config. The
    caller leaves out what the files of the partition and the clients hold.
    """
    short_records = []
    for record in records:
        short = {name: record[name] for name in COMPACT_FIELDS if name in record}
        if short["test_accuracy"] is None:
            short.pop("simulated_time", None)
        short_records.append(short)
    left_out = ("config_hash", "swept")
    summary = {key: value for key, value in run.summary.items() if key not in left_out}
    totals = run.summary.get("totals", {})
    short_totals = {key: value for key, value in totals.items() if not key.startswith("seconds_")}
    return replace(run, summary={**summary, "totals": short_totals}), short_records


def _rows_of_run(
    number: int, run: Run, records: Sequence[Mapping[str, Any]], root: Path
) -> list[dict[str, Any]]:
    """Return the rows of a run, each by column. The first row also describes the whole run."""
    same_in_all = {
        "run": number,
        "seed": run.seed,
        "engine": run.summary.get("engine"),
        "commit": run.commit,
    }
    for group, choice in run.choices.items():
        same_in_all[f"choice.{group}"] = choice
    rows = []
    for record in records:
        row = same_in_all | dict(record)
        if record.get("selected") is not None:  # otherwise the run comes from a compact archive
            selected = np.array(record["selected"], np.int64)
            row["selected"] = np.diff(selected, prepend=0).tolist()
        rows.append(row)
    if not rows:
        rows.append(same_in_all)
    folder = run.folder
    if folder.is_relative_to(root):
        folder = folder.relative_to(root)
    of_run = {
        "folder": folder.as_posix(),
        "config": {key: value for key, value in run.config.items() if key not in MACHINE_KEYS},
        "summary": dict(run.summary),
        "histograms": None if run.histograms is None else run.histograms.tolist(),
        "client_accuracies": json_ready(run.client_accuracies),
        "imperfect": json_ready(run.imperfect),
    }
    rows[0] |= {name: json.dumps(value) for name, value in of_run.items()}
    return rows


def _type_of(name: str) -> pa.DataType | None:
    """Return the type of a column; None if pyarrow infers it from the values."""
    if name.startswith("seconds_") or name == "wall_seconds" or name.endswith("_loss"):
        return pa.float32()
    if name.startswith("choice."):
        return pa.string()
    return COLUMN_TYPES.get(name)


# --- reading ---


def read_archive(path: Path, left_out: list[str] | None = None) -> list[Run]:
    """Return the runs in an archive, without damaged ones.

    Each damaged run is reported in a line, on stderr or in the list `left_out`. The `archived` of
    a run holds its `RUN_COLUMNS`, its `rows` (a pyarrow table with a row for each round) and its
    `rounds` (the same as `Rounds`). Raises `ReportError` if the file is not an archive.
    """
    try:
        with open_regular(path) as file:
            parquet = pq.ParquetFile(file, read_dictionary=EARLY_COLUMNS)
            table, record_names = _read_table(parquet)
        lengths = _numbers_of_rows(table)
    except DamagedError as error:
        raise ReportError(f"{path}: {error}") from error
    except MemoryError as error:
        raise ReportError(f"{path}: takes more memory than there is") from error
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
        raise ReportError(f"{path}: cannot be read as an archive of runs ({error})") from error
    runs: list[Run] = []
    start = 0
    for number, length in enumerate(lengths):
        try:
            run = _run_in(table.slice(start, length), record_names)
            run.check()
            runs.append(run)
        except DamagedError as error:
            tell_left_out(path, f"run {number}: {error}", left_out)
        start += length
    return runs


def _read_table(file: pq.ParquetFile) -> tuple[pa.Table, list[str]]:
    """Return the rows of an archive, and the names of the columns of metrics.jsonl.

    Raises `DamagedError` if the file is not an archive, or too large.
    """
    raw = (file.schema_arrow.metadata or {}).get(METADATA_KEY, b"null")
    metadata = parse_json(raw, "its description")
    is_archive = (
        has_kinds(metadata, {"format": INT, "records": LIST})
        and metadata.get("format") == FORMAT
        and "records" in metadata
    )
    if not is_archive:
        raise DamagedError(
            "not an archive of runs that this version reads "
            "(fedsim report <folder> --archive writes one)"
        )
    values = 0
    size = 0
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        size += group.total_byte_size
        for column in range(group.num_columns):
            values += group.column(column).num_values
    if values > MAX_VALUES or size > MAX_BYTES:
        raise DamagedError(
            f"holds {values:,} values, more than an archive that is read; write several"
        )
    record_names: list[str] = metadata["records"]
    run_columns = [name for name in RUN_COLUMNS if name in file.schema_arrow.names]
    table = file.read(["run", *record_names, *run_columns])
    if "selected" in record_names:
        position = table.column_names.index("selected")
        table = table.set_column(position, "selected", _ids_of(table["selected"]))
    return table, record_names


def _ids_of(differences: pa.ChunkedArray) -> pa.ListArray:
    """Return the lists of ids whose differences an archive holds (the first id is its difference
    to 0). Null stays null."""
    # The cumulative sum runs over all lists at once. What it had reached before each list is
    # subtracted from the list.
    lists = differences.combine_chunks()
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
    sums = np.cumsum(pc.list_flatten(lists).to_numpy(), dtype=np.int64)
    ends = np.cumsum(lengths)
    sums_before = np.append(0, sums)[ends - lengths]
    ids = pa.array(sums - np.repeat(sums_before, lengths)).cast(pa.int32())
    offsets = np.append(0, ends).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, ids, mask=lists.is_null())


def _numbers_of_rows(table: pa.Table) -> list[int]:
    """Return the number of rows of each run. Raises ValueError if run numbers are not 0, 1, ..."""
    numbers = table["run"].to_numpy()
    if len(numbers):
        steps = np.diff(numbers)
        if numbers[0] != 0 or not np.isin(steps, (0, 1)).all():
            raise ValueError("its rows are not those of one run after another")
    return np.bincount(numbers).tolist()


def _run_in(rows: pa.Table, record_names: Sequence[str]) -> Run:
    """Return the run that these rows of an archive hold. Raises `DamagedError`."""
    archived: dict[str, Any] = {}
    for name in RUN_COLUMNS:
        if name in rows.column_names:
            text = rows[name][0].as_py() or "null"
            archived[name] = parse_json(text, name, is_large=name in LARGE_COLUMNS)
    if not isinstance(archived["folder"], str):
        raise DamagedError("its folder is not a text")
    has_rounds = rows["round"][0].as_py() is not None  # otherwise its only row is no round
    records = rows.select(record_names).slice(0, None if has_rounds else 0)
    archived["rows"] = records
    archived["rounds"] = rounds_in(records)
    return Run(Path(archived["folder"]), archived["config"], archived["summary"], archived)


def rounds_in(rows: pa.Table) -> Rounds:
    """Return the rounds in rows of an archive as arrays. Raises `DamagedError`."""
    names = [name for name in rows.column_names if _is_recorded(name, rows[name])]
    kinds = {name: _kinds(rows[name]) for name in names}
    if names and "selected" not in names:
        kinds["selected"] = LIST  # the run comes from a compact archive
    check_kinds(kinds)
    # Without records, every column is there and empty.
    columns: dict[str, Floats] = {} if names else defaultdict(lambda: np.empty(0))
    for name in names:
        column = rows[name]
        if pa.types.is_list(column.type):
            column = pc.list_value_length(column)
        columns[name] = column.to_numpy().astype(np.float64)
    if "selected" not in names:
        return Rounds(len(rows), columns, np.empty((2, 0), np.int32))
    selected = rows["selected"].combine_chunks()
    chosen = np.array([pc.list_parent_indices(selected), pc.list_flatten(selected)], np.int32)
    return Rounds(len(rows), columns, chosen)


def _is_recorded(name: str, column: pa.ChunkedArray) -> bool:
    """Return whether the run of these rows recorded a field.

    All runs of an archive share its columns. A column without any value was recorded by other runs
    alone, unless the field may be None.
    """
    if name not in RECORD_KINDS:
        return False
    may_be_none = type(None) in RECORD_KINDS[name] and len(column) > 0
    return may_be_none or column.null_count < len(column)


def _kinds(column: pa.ChunkedArray) -> Kinds:
    """Return the types of JSON values that a column would have in metrics.jsonl."""
    if column.null_count == len(column):
        return NONE
    kinds = TEXT
    if pa.types.is_list(column.type):
        item = column.type.value_type
        if pa.types.is_integer(item) or pa.types.is_null(item):
            kinds = LIST
    elif pa.types.is_integer(column.type):
        kinds = INT
    elif pa.types.is_floating(column.type):
        kinds = NUMBER
    return kinds | NONE if column.null_count else kinds
