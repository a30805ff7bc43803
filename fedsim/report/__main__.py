"""`python -m fedsim.report <folder or preset>`: tables on the terminal, and all of it in <folder>/report/.

    python -m fedsim.report outputs/default
    python -m fedsim.report gpfl_table2_fmnist          # the preset's folder below outputs/
    python -m fedsim.report gpfl_table2_fmnist --against docs/results/gpfl_table2_fmnist/summary.json

Writes report.html (one page with everything), tables.md, and for each table a .tex and a .csv file, figures as PNG and
PDF, and summary.json, which is small enough to keep and to compare.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from fedsim.errors import FedsimError
from fedsim.report.figures import all_plots
from fedsim.report.groups import Group, group_runs
from fedsim.report.html_page import page
from fedsim.report.pair_study.analysis import table_one
from fedsim.report.pair_study.claims import judge_table_one, table_one_claims
from fedsim.report.panels import Panel, panels_of
from fedsim.report.runs import read_runs
from fedsim.report.summary import compare, summary_of
from fedsim.report.tables import papers, results, times
from fedsim.report.tables.table import Table
from fedsim.report.verdicts.judge import Judged, judge_all

WIDE = 180
"""Columns where there is no terminal."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fedsim.report", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", help="a folder with runs below it, or the name of a preset that has been run")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"), help="where presets' folders are (outputs)")
    parser.add_argument("--to", type=Path, help="where to write (<folder>/report)")
    parser.add_argument("--no-figures", action="store_true", help="tables only")
    parser.add_argument("--against", type=Path, help="an earlier summary.json to compare with")
    options = parser.parse_args(argv)
    try:
        folder = folder_of(options.folder, options.output_dir)
        report(folder, options.to, figures=not options.no_figures, against=options.against)
    except FedsimError as error:
        Console(stderr=True, highlight=False).print(f"fedsim.report: {error}", soft_wrap=True, markup=False)
        return 3
    return 0


def folder_of(name: str, output_dir: Path) -> Path:
    """A folder as it is, or that of a preset."""
    found = next((path for path in (Path(name), output_dir / name) if path.is_dir()), None)
    if found is None:
        raise FedsimError(f"{name}: neither a folder nor a preset with results in {output_dir}/; run it first")
    return found


def report(folder: Path, to: Path | None = None, *, figures: bool = True, against: Path | None = None) -> None:
    """Read all runs below `folder`, print the tables, and write everything to `to`."""
    runs = read_runs(folder)
    groups = group_runs(runs)
    panels = panels_of(groups)
    compared = judge_all(groups)
    judged = [one for _, some in compared for one in some]
    pair_rows = judge_table_one(runs)
    verdicts = {one.printed.id: one.verdict for one in judged} | {row.id: row.verdict for row in pair_rows}
    summary = summary_of(groups, verdicts)
    pair_tables = [*([table_one_claims(pair_rows)] if pair_rows else []), *table_one(runs)]
    made = [*all_tables(groups, panels, judged), *pair_tables]
    if against is not None:
        made.append(compare(summary, read_earlier(against)))
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDE)
    for table in made:
        console.print(table.rich())
    target = to or folder / "report"
    write(target, made)
    plots = {plot.save(target / "figures"): plot for plot in (all_plots(panels) if figures else [])}
    html = page(folder.resolve().name, runs, made, plots, [publication for publication, _ in compared])
    (target / "report.html").write_text(html, encoding="utf-8")
    (target / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    console.print(f"report in {target}", soft_wrap=True, markup=False)


def read_earlier(path: Path) -> dict[str, Any]:
    """The summary of another report. Raises `FedsimError` where it is none."""
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
        return {"groups": earlier["groups"], "verdicts": earlier["verdicts"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FedsimError(f"--against {path}: not the summary.json of a report ({error})") from error


def all_tables(groups: Sequence[Group], panels: Sequence[Panel], judged: Sequence[Judged]) -> list[Table]:
    """Verdicts first where there are any; tables without rows are left out."""
    made = [
        papers.numbers(judged),
        papers.claims(judged),
        results.overview(groups),
        results.checkpoints(groups),
        results.pairs(panels),
        results.targets(panels),
        results.selections(groups),
        times.phases(groups),
        times.selection_times(groups),
    ]
    return [table for table in made if table.rows]


def write(target: Path, made: Sequence[Table]) -> None:
    """tables.md, and each table as .tex and .csv."""
    target.mkdir(parents=True, exist_ok=True)
    (target / "tables.md").write_text("\n".join(table.markdown() for table in made), encoding="utf-8")
    for table in made:
        (target / f"{table.name}.tex").write_text(table.latex(), encoding="utf-8")
        (target / f"{table.name}.csv").write_text(table.csv(), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
