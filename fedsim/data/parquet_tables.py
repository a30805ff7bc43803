"""Parquet and Arrow files: opened, their memory, and their tables joined."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsim.core.errors import DataError
from fedsim.data.parquet_columns import is_type

if TYPE_CHECKING:
    import pyarrow as pa

ROW_BYTES = 300
"""Memory that a row needs in addition to its values while it is read."""


@contextmanager
def data_errors(path: Path) -> Iterator[None]:
    """Raise `DataError` in place of the errors of PyArrow about a file."""
    import pyarrow as pa

    try:
        yield
    except MemoryError:  # which is an ArrowException, too
        raise
    except (pa.ArrowException, OSError) as error:
        remedy = "fetch it again, or make it again"
        if path.suffix not in (".parquet", ".arrow"):
            remedy = "convert it, for example with pandas.read_csv and DataFrame.to_parquet"
        raise DataError(f"{path} is no sound parquet file ({error}); {remedy}") from error


def open_table(path: Path, source: Any, **options: Any) -> Any:
    """Return a file of the Hub's, opened as a parquet file.

    The checksums of its pages are verified, if it has any (few files do).
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with data_errors(path):
        if path.suffix == ".arrow":
            # A stream of Arrow's tables has no footer, so that it is rewritten as a parquet file.
            content = pa.BufferOutputStream()
            pq.write_table(pa.ipc.open_stream(source).read_all(), content)
            source = pa.BufferReader(content.getvalue())
        return pq.ParquetFile(source, page_checksum_verification=True, **options)


def read_columns(file: Any, columns: Sequence[str]) -> "pa.Table":
    """Return the columns of an open parquet file, read one group of rows after another.

    PyArrow cannot read a column of structs from several groups at once: each group has a dictionary
    of its own, and bytes beyond 2 GiB need several arrays.
    """
    import pyarrow as pa

    groups = []
    for number in range(file.num_row_groups):
        groups.append(file.read_row_group(number, columns=columns))
    return pa.concat_tables(groups) if groups else file.read(columns=columns)


def bytes_needed(metadata: Any, columns: Sequence[str]) -> int:
    """Return the memory that the columns of a file need, computed from its footer."""
    num_bytes = ROW_BYTES * metadata.num_rows
    for group_number in range(metadata.num_row_groups):
        group = metadata.row_group(group_number)
        for index in range(group.num_columns):
            chunk = group.column(index)
            if chunk.path_in_schema in columns:
                num_bytes += chunk.total_uncompressed_size
    return num_bytes


def without_categories(table: "pa.Table") -> "pa.Table":
    """Return the table with plain columns in place of dictionary-encoded ones (categories)."""
    for index, column in enumerate(table.columns):
        if is_type(column.type, "dictionary"):
            values = column.cast(column.type.value_type)
            table = table.set_column(index, table.column_names[index], values)
    return table
