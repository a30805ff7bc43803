"""Put the finished runs of presets into docs/results: all runs in one archive, and what the pages
show of their report.

    uv run python -m scripts.reproduction.ship outputs/pncs_k4_small outputs/gpfl_alpha
    uv run python -m scripts.reproduction.ship --add outputs/gpfl_settings_code

Each folder of docs/results is made anew and holds runs.parquet, summary.json, the tables of TABLES,
and what else the pages name. Absolute paths of data are cut to their last part. With --add the runs
that are shipped already stay, but for those of which the folder has another; in folders of THIN new
ones get a file of their own. Runs that have not ended, or that were not made by a commit, are left
out with a message. Then all folders are judged together (scripts/reproduction/verdicts.py) and the
pages filled (scripts/reproduction/pages.py): some minutes of a core.
"""

import argparse
import contextlib
import io
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from PIL import Image

from fedsim.core.record import CLIENT_ACCURACY, FINAL_WINDOW
from fedsim.report.command import report
from fedsim.results.archive import RUN_COLUMNS, read_archive, write_archive
from fedsim.results.reading import FINAL
from fedsim.results.runs import ReportError, Run, read_runs
from scripts.reproduction import pages, verdicts
from scripts.reproduction.shipped import RESULTS, read_shipped

TABLES = ("numbers", "claims", "omnibus", "overview", "pairs", "pooled", "selections")
"""Tables of a report that are shipped wherever they have rows."""
THIN = ("selection_benchmark",)
"""Folders with so many runs that of each round only what their page is about is shipped."""
OF_A_ROUND = (
    *(
        "round",
        "test_accuracy",
        "participation_ratio",
        "contacted",
        "trained",
        "uploaded",
        "selected",
        "late",
    ),
    *(
        "bytes_down",
        "bytes_up",
        "forward_samples",
        "train_samples",
        "server_forward_samples",
        "simulated_seconds",
    ),
    *("coverage", "nonfinite_reports", "dropped_updates"),
)
WORST = f"{CLIENT_ACCURACY}_worst_tenth"
LINK = re.compile(r"results/(?P<folder>\w+)/(?P<file>[\w.]+)")
MARKER = re.compile(r"<!-- table: from_report (?P<folder>\w+) (?P<name>\w+)")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "folders",
        nargs="+",
        type=Path,
        help="folders of presets' runs, such as outputs/pncs_k4_small",
    )
    parser.add_argument(
        "--add", action="store_true", help="keep the shipped runs that the folders do not have"
    )
    words = parser.parse_args()
    try:
        ship_all(words.folders, add=words.add)
    except ReportError as error:
        parser.error(str(error))
    shipped = read_shipped()
    verdicts.update(shipped, write=True)
    pages.update(shipped, write=True)


def ship_all(folders: Sequence[Path], *, add: bool = False) -> None:
    for folder in folders:
        target = RESULTS / folder.resolve().name
        shipped = {
            path.name: read_archive(path) for path in sorted(target.glob("*.parquet")) if add
        }
        if runs := [portable(run) for run in shippable(read_runs(folder))]:
            is_thin = target.name in THIN
            archives = in_archives(
                [*map(thin, runs)] if is_thin else runs, folder, shipped, apart=is_thin
            )
            ship(archives, folder, target)
        print(f"{folder}: {len(runs)} runs")


def in_archives(
    runs: Sequence[Run], folder: Path, shipped: Mapping[str, Sequence[Run]], *, apart: bool
) -> dict[str, list[Run]]:
    """All runs by the name of their archive: `runs`, whose folders are below `folder`, each in
    place of the `shipped` one of its name, new ones in runs.parquet or, if they are to be `apart`,
    in a file of their own."""
    new = {run.folder.relative_to(folder).as_posix(): run for run in runs}
    found = {name: {run.folder.as_posix(): run for run in some} for name, some in shipped.items()}
    for some in found.values():
        some.update({name: new.pop(name) for name in [*new] if name in some})
    if new:
        found.setdefault(
            f"runs_{len(found) + 1}.parquet" if apart and found else "runs.parquet", {}
        ).update(new)
    return {name: [run for _, run in sorted(some.items())] for name, some in found.items()}


def shippable(runs: Sequence[Run]) -> list[Run]:
    """Those of `runs` that ended, be it that they diverged, and were made by a commit as it is."""
    kept = []
    for run in runs:
        changed = bool((run.summary.get("revision") or {}).get("dirty"))
        if run.status in FINAL and run.commit and not changed:
            kept.append(run)
        else:
            print(
                f"left out {run.folder.name}: {run.status}, commit {run.commit}, changed files: {changed}"
            )
    return kept


def portable(run: Run) -> Run:
    """`run` with the last part alone of absolute paths in its config and summary: where data lay on
    one machine."""
    return replace(run, config=_last_parts(run.config), summary=_last_parts(run.summary))


def thin(run: Run) -> Run:
    """`run` with `OF_A_ROUND` alone of its rounds, and, in those of the final accuracy, that of the
    worst tenth."""
    records = run.records
    rows = [{name: record[name] for name in OF_A_ROUND if name in record} for record in records]
    for number, (row, record) in enumerate(
        zip(rows, records, strict=True), FINAL_WINDOW - len(rows)
    ):
        row[WORST] = record.get(WORST) if number >= 0 else None
    return replace(
        run,
        archived={name: getattr(run, name) for name in RUN_COLUMNS}
        | {"rows": pa.Table.from_pylist(rows)},
    )


def _last_parts(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _last_parts(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_last_parts(item) for item in value]
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value


def ship(archives: Mapping[str, Sequence[Run]], folder: Path, target: Path) -> None:
    """Make the folder `target` from runs, which are below `folder`."""
    also, runs = named_files(target.name), [run for some in archives.values() for run in some]
    with tempfile.TemporaryDirectory() as made:
        with contextlib.redirect_stdout(io.StringIO()):
            report(runs, folder, Path(made), figures=any(name.endswith(".png") for name in also))
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for name in sorted({"summary.json", *(f"{table}.csv" for table in TABLES), *also}):
            found = next(
                (
                    path
                    for path in (Path(made, name), Path(made, "figures", name))
                    if path.is_file()
                ),
                None,
            )
            if found is not None and found.suffix == ".png":  # a palette takes a third of the bytes
                Image.open(found).convert("RGB").quantize(255, dither=Image.Dither.NONE).save(
                    target / name, optimize=True
                )
            elif found is not None:
                shutil.copyfile(found, target / name)
            elif name in also:
                print(
                    f"{target.name}: the pages name {name}, which its report does not have",
                    file=sys.stderr,
                )
    for name, some in archives.items():
        write_archive(some, folder, target / name)


def named_files(folder: str) -> set[str]:
    """The files of a folder of docs/results that the pages link to or make tables of."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in RESULTS.parent.rglob("*.md"))
    links = {found["file"] for found in LINK.finditer(text) if found["folder"] == folder}
    tables = {
        f"{found['name']}.csv" for found in MARKER.finditer(text) if found["folder"] == folder
    }
    return {name for name in links | tables if not name.endswith(".parquet")}


if __name__ == "__main__":
    main()
