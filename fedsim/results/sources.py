"""The runs that a path names: a folder of runs, or an archive."""

from pathlib import Path

from fedsim.results.archive import read_archive
from fedsim.results.runs import Run, read_runs


def read_source(path: Path, left_out: list[str] | None = None) -> list[Run]:
    """The sound runs in an archive, or below a folder. `left_out`: where the others are named,
    instead of on stderr. Raises `ReportError` if there are none."""
    return (read_archive if path.is_file() else read_runs)(path, left_out)
