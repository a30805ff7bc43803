"""The runs that a path names: a folder of runs, or an archive."""

from pathlib import Path

from fedsim.results.archive import read_archive
from fedsim.results.runs import Run, read_runs


def read_source(path: Path, left_out: list[str] | None = None) -> list[Run]:
    """Return the sound runs in an archive, or below a folder.

    Damaged runs are reported in the list `left_out`; on stderr if it is None. Raises `ReportError`
    if there are none.
    """
    return read_archive(path, left_out) if path.is_file() else read_runs(path, left_out)
