"""The runs that a path or a name stands for: a folder of runs, or an archive."""

from pathlib import Path

from fedsim.results.archive import read_archive
from fedsim.results.reading import SUMMARY
from fedsim.results.runs import ReportError, Run, read_runs

OUTPUTS = Path("outputs")
"""The usual folder of all results."""


def find_source(name: str, output_dir: Path = OUTPUTS) -> Path:
    """Return the archive or folder `name`, or the folder of the results `name` in `output_dir`.

    Of two folders, the first one with finished runs is meant. Raises `ReportError` if there is
    neither a folder nor an archive.
    """
    folders = [path for path in (Path(name), output_dir / name) if path.is_dir()]
    for folder in folders:
        if next(folder.rglob(SUMMARY), None) is not None:
            return folder
    if folders:
        return folders[0]
    if Path(name).is_file():
        return Path(name)
    raise ReportError(
        f"{name}: neither a folder with runs, nor the name of results in {output_dir}/, nor an "
        "archive (.parquet); run it first"
    )


def read_source(path: Path, left_out: list[str] | None = None) -> list[Run]:
    """Return the sound runs in an archive, or below a folder.

    Damaged runs are reported in the list `left_out`; on stderr if it is None. Raises `ReportError`
    if there are none.
    """
    if path.is_dir():
        return read_runs(path, left_out)
    runs = read_archive(path, left_out)
    if not runs:
        raise ReportError(f"{path}: no sound run in it")
    return runs
