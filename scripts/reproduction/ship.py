"""Put the finished runs of presets into docs/results, to publish them.

    uv run python -m scripts.reproduction.ship outputs/pncs_k4_small outputs/gpfl_alpha
    uv run python -m scripts.reproduction.ship --add outputs/gpfl_settings_code

Each folder of docs/results is made anew: runs.parquet with all runs, summary.json, the tables in
`TABLES`, and the files that pages link to. With --add the shipped runs stay, unless the folder has
a newer run of the same name. Runs that have not ended are left out, and so are runs that no commit
made. Absolute paths of data are cut to their last part. Then all folders are judged together
(verdicts.py), and the pages are filled (pages.py), which takes some minutes.

Archives are thinned to keep the repository small (`thin`).
"""

import argparse
import contextlib
import io
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from fedsim.core.arrays import Floats
from fedsim.core.record import CLIENT_ACCURACY, FINAL_WINDOW
from fedsim.report.command import report
from fedsim.report.summary import read_summary_file
from fedsim.results.archive import RUN_COLUMNS, read_archive, rounds_in, write_archive
from fedsim.results.measures import start_up_end
from fedsim.results.reading import FINAL
from fedsim.results.runs import ReportError, Run, read_runs
from scripts.reproduction import pages, verdicts
from scripts.reproduction.shipped import RESULTS, read_shipped, write_summary

TABLES = ("numbers", "claims", "omnibus", "overview", "pairs", "pooled", "selections")
"""Tables of a report that are shipped if they have rows."""
ABOUT_TIME = ("gpfl_fig6", "gpfl_fig6b", "gpfl_fig6_clock", "gpfl_time_k")
"""Folders whose claims are about seconds. They keep the seconds of each round."""
MANY_RUNS = ("selection_benchmark",)
"""Folders with so many runs that each round keeps only what their page is about."""
NOT_SHIPPED = ("wall_seconds", "train_loss", "test_loss")
"""Fields of a round that no table of a report needs."""
NOT_IN_MANY_RUNS = re.compile(rf"seconds_|simulated_(?!seconds$)|{CLIENT_ACCURACY}")
"""Begins the fields that `MANY_RUNS` do not keep either."""
LAST_ROUNDS_ONLY = f"{CLIENT_ACCURACY}_worst_tenth"
"""A field that `MANY_RUNS` keep in the rounds of the final accuracy."""
TIMED_ROUNDS = 200
"""Rounds whose seconds `fedsim.results.measures.cost_of_rounds` sums."""
LINK = re.compile(r"results/(?P<folder>\w+)/(?P<file>[\w.]+)")
MARKER = re.compile(r"<!-- table: from_report (?P<folder>\w+) (?P<name>\w+)")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path, help="such as outputs/pncs_k4_small")
    parser.add_argument("--add", action="store_true", help="keep the shipped runs")
    options = parser.parse_args()
    try:
        for folder in options.folders:
            ship(folder, add=options.add)
    except ReportError as error:
        parser.error(str(error))
    shipped = read_shipped()
    verdicts.update(shipped, write=True)
    pages.update(shipped, write=True)


def ship(folder: Path, *, add: bool = False) -> None:
    """Make the folder of docs/results with the name of `folder` from the runs in it."""
    target = RESULTS / folder.resolve().name
    new = []
    for run in read_runs(folder):
        if problem := why_left_out(run):
            print(f"left out {run.folder.name}: {problem}")
        else:
            thinned = thin(portable(run), target.name)
            new.append(replace(thinned, folder=run.folder.relative_to(folder)))
    print(f"{folder}: {len(new)} runs")
    if not new:
        return
    shipped = {}
    if add:
        shipped = {path.name: read_archive(path) for path in sorted(target.glob("*.parquet"))}
    archives = in_archives(new, shipped, apart=target.name in MANY_RUNS)
    write_tables([run for runs in archives.values() for run in runs], target)
    for name, runs in archives.items():
        write_archive(runs, Path(), target / name)


def why_left_out(run: Run) -> str:
    """Return why a run is not shipped, or an empty text."""
    if run.status not in FINAL:
        return f"its status is {run.status}"
    if not run.commit:
        return "no commit made it"
    if (run.summary.get("revision") or {}).get("dirty"):
        return f"files differ from commit {run.commit}"
    return ""


def portable(run: Run) -> Run:
    """Return a run that does not tell where data lay on one machine."""
    return replace(run, config=_last_parts(run.config), summary=_last_parts(run.summary))


def _last_parts(value: Any) -> Any:
    """Cut absolute paths to their last part, at any depth."""
    if isinstance(value, Mapping):
        return {key: _last_parts(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_last_parts(item) for item in value]
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value


def thin(run: Run, folder: str) -> Run:
    """Return a run without what the tables of its folder do not need.

    Losses and wall times are left out. Measured seconds of a round are replaced by means, so that
    sums stay equal (`smooth`), except in folders `ABOUT_TIME`; `MANY_RUNS` have none. Accuracies of
    clients have six decimals.
    """
    records = run.records
    names = list(dict.fromkeys(name for record in records for name in record))
    columns = {name: [record.get(name) for record in records] for name in names}
    for name in names:
        if name == LAST_ROUNDS_ONLY and folder in MANY_RUNS:
            early = max(len(records) - FINAL_WINDOW, 0)
            columns[name][:early] = [None] * early
        elif name in NOT_SHIPPED or (folder in MANY_RUNS and NOT_IN_MANY_RUNS.match(name)):
            del columns[name]
        elif name.startswith("seconds_") and folder not in ABOUT_TIME:
            columns[name] = smooth(np.array(columns[name]), start_up_end(run) or 0).tolist()
    rows = pa.table(columns)
    archived = {name: getattr(run, name) for name in RUN_COLUMNS}
    if run.client_accuracies is not None:
        archived["client_accuracies"] = run.client_accuracies.round(6)
    return replace(run, archived=archived | {"rows": rows, "rounds": rounds_in(rows)})


def smooth(seconds: Floats, end_of_start_up: int) -> Floats:
    """Replace seconds [T] by their means over the start-up, the rest of 200 rounds, and later ones.

    The slowest round keeps its seconds, which a table shows.
    """
    smoothed = seconds.copy()
    rounds = np.arange(len(seconds))
    is_slowest = rounds == np.argmax(seconds)
    period = (rounds >= end_of_start_up).astype(int) + (rounds >= TIMED_ROUNDS)
    for number in np.unique(period):
        chosen = (period == number) & ~is_slowest
        smoothed[chosen] = seconds[chosen].mean() if chosen.any() else 0.0
    return smoothed


def in_archives(
    new: Sequence[Run], shipped: Mapping[str, Sequence[Run]], *, apart: bool
) -> dict[str, list[Run]]:
    """Return all runs by the name of their archive, sorted by folder.

    A new run replaces the shipped run of the same folder. Other new runs go to runs.parquet, or to
    an archive of their own if they are to be `apart`.
    """
    by_folder = {run.folder: run for run in new}
    archives = {}
    for name, runs in shipped.items():
        archives[name] = [by_folder.pop(run.folder, run) for run in runs]
    if by_folder:
        name = f"runs_{len(archives) + 1}.parquet" if apart and archives else "runs.parquet"
        archives.setdefault(name, []).extend(by_folder.values())
    return {name: sorted(runs, key=lambda run: run.folder) for name, runs in archives.items()}


def write_tables(runs: Sequence[Run], target: Path) -> None:
    """Write the tables and figures of a report that are shipped to the folder `target`."""
    linked = named_files(target.name)
    has_figures = any(name.endswith(".png") for name in linked)
    with tempfile.TemporaryDirectory() as name:
        made = Path(name)
        with contextlib.redirect_stdout(io.StringIO()):
            report(runs, target, made, with_figures=has_figures)
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        write_summary(target, read_summary_file(made / "summary.json"))
        for file in {f"{table}.csv" for table in TABLES} | linked:
            figure = made / "figures" / file
            if (made / file).is_file():
                shutil.copyfile(made / file, target / file)
            elif figure.is_file():  # a palette takes a third of the bytes
                image = Image.open(figure).convert("RGB")
                image = image.quantize(255, dither=Image.Dither.NONE)
                image.save(target / file, optimize=True)
            elif file in linked:
                print(f"{target.name}: the pages name {file}, which its report does not have")


def named_files(folder: str) -> set[str]:
    """Return the files of a folder of docs/results that pages link to or make tables of."""
    names = set()
    for page in RESULTS.parent.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        names |= {link["file"] for link in LINK.finditer(text) if link["folder"] == folder}
        markers = MARKER.finditer(text)
        names |= {f"{marker['name']}.csv" for marker in markers if marker["folder"] == folder}
    return {name for name in names if not name.endswith((".parquet", "summary.json"))}


if __name__ == "__main__":
    main()
