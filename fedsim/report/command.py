"""`fedsim report <folder or preset>`: prints what is best, and writes the whole report to
<folder>/report/.

    fedsim report outputs/default fedsim report gpfl_table2_fmnist          # the preset's folder
    below outputs/ fedsim report gpfl_table2_fmnist --against
    docs/results/gpfl_table2_fmnist/summary.json fedsim report gpfl_table2_fmnist --archive
    runs.parquet    # also all runs in one small file fedsim report runs.parquet                #
    the report of the runs in such a file fedsim report outputs/mine runs.parquet   # of both in one
    fedsim report runs.parquet --where 'cell=cifar_*' --where selector=random,gpfl     # of some of
    the runs fedsim report gpfl_table2_fmnist --all    # print all tables fedsim report --rules
    # the rules of verdicts on papers

Writes report.html (one page with everything), tables.md, and for each table a .tex and a .csv file,
figures as PNG and PDF, and summary.json, which is small enough to keep and to compare.
"""

import gc
import json
import sys
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any, cast

from rich.console import Console

from fedsim.core.configs import leaves
from fedsim.core.disk import unwritable, user_path, write_files
from fedsim.core.text import printable_lines
from fedsim.papers import tables as papers
from fedsim.papers.judge import correct, examine_all, verdicts_by_id
from fedsim.papers.pair_study import claims_table, judge_conditions, make_tables, read_conditions
from fedsim.papers.published import RULES
from fedsim.report.headline import MOST, drawn_lines, headline, listed
from fedsim.report.page import OPENING, html_page
from fedsim.report.summary import compare_summaries, make_summary, read_summary_file
from fedsim.report.tables import all_tables, by_group
from fedsim.results.ablations import Ablation, find_ablations
from fedsim.results.archive import write_archive
from fedsim.results.files import OutputError
from fedsim.results.groups import Group, Panel, distinct, group_runs, make_panels
from fedsim.results.ranking import Comparison, compare
from fedsim.results.runs import ReportError, Run
from fedsim.results.sources import read_source
from fedsim.results.table import Table, table_files
from fedsim.tracking.tables import Output

DEFAULT_WIDTH = 180
"""Width of the output in characters if it is not a terminal."""
Pictures = list[tuple[str, bytes]]
"""Captions and PNGs."""


class PrintRules(Action):
    def __call__(self, parser: ArgumentParser, *_: Any) -> None:
        sys.stdout.write("\n\n".join(RULES.values()) + "\n")
        parser.exit()


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        nargs="+",
        help="a folder with runs below it, the name of a preset that has been run, or an archive; several: one report",
    )
    parser.add_argument(
        "--output-dir",
        type=user_path,
        default=Path("outputs"),
        help="where presets' folders are (outputs)",
    )
    where = "only runs with one of these values of a key or choices of a group, such as 'cell=cifar_*'; may be repeated"
    parser.add_argument("--where", action="append", default=[], metavar="KEY=VALUES", help=where)
    parser.add_argument("--to", type=user_path, help="where to write (report in the first folder)")
    parser.add_argument("--all", action="store_true", help="print all tables")
    parser.add_argument(
        "--rules",
        action=PrintRules,
        nargs=0,
        help="print the rules of verdicts on papers, and exit",
    )
    parser.add_argument("--no-figures", action="store_true", help="tables only")
    parser.add_argument("--against", type=user_path, help="an earlier summary.json to compare with")
    parser.add_argument(
        "--archive", type=user_path, help="a .parquet file to write the runs to, to publish them"
    )


def run(options: Namespace) -> int:
    """Make the report. Raises `ReportError` where there is nothing to report, `OutputError` where
    it cannot be written."""
    source, *others = [find_source(name, options.output_dir) for name in options.folder]
    runs = [run for path in (source, *others) for run in read_source(path)]
    for word in options.where:
        runs = chosen(runs, word)
    if options.archive is not None:
        write_archive(runs, source, options.archive)
    figures = not options.no_figures
    report(
        runs, source, options.to, figures=figures, against=options.against, everything=options.all
    )
    return 0


def find_source(name: str, output_dir: Path) -> Path:
    """The archive or folder `name`, or the folder of the preset `name` below `output_dir`. Raises
    `ReportError` if none of them exists."""
    path = next((path for path in (Path(name), output_dir / name) if path.is_dir()), None)
    if path is None and Path(name).is_file():
        return Path(name)
    if path is None:
        raise ReportError(
            f"{name}: neither a folder nor a preset with results in {output_dir}/; run it first"
        )
    return path


def chosen(runs: Sequence[Run], word: str) -> list[Run]:
    """The runs of which `word`, KEY=VALUES, holds: values with a comma between them, in which *
    stands for any text. Raises `ReportError` if there are none."""
    key, _, values = word.partition("=")
    told = [
        str(run.choices.get(key) or {**dict(leaves(run.config)), "code": run.code}.get(key))
        for run in runs
    ]
    found = [
        run
        for run, text in zip(runs, told, strict=True)
        if any(fnmatchcase(text, v) for v in values.split(","))
    ]
    if not found:
        known = listed(sorted({*told} - {"None"}))
        raise ReportError(
            f"--where {word}: holds of no run; {f'there are {known}' if known else f'none has a {key}'}"
        )
    return found


def report(
    runs: Sequence[Run],
    source: Path,
    to: Path | None = None,
    *,
    figures: bool = True,
    against: Path | None = None,
    everything: bool = False,
) -> None:
    """Print what is best in `runs`, or all tables, and write the report to `to` (None: the folder
    `report` in or beside `source`)."""
    counted = distinct(runs)
    if repeated := len(runs) - len(counted):
        sys.stderr.write(
            f"fedsim report: {repeated} runs differ from others in name alone; each counts once\n"
        )
    found = find(runs, counted, against)
    lines = headline(found.panels, None if everything else MOST, found.over)
    screen = Output()  # the files are written even if nobody reads the tables to their end
    console = Console(
        highlight=False,
        file=cast(IO[str], screen),
        width=None if screen.isatty() else DEFAULT_WIDTH,
    )
    console.print(*(printable_lines(line) for line in lines), "", sep="\n", markup=False)
    console.print(*(table.rich() for table in (found.tables if everything else found.brief)))
    target = to or (source.parent if source.is_file() else source) / "report"
    place = (
        to.resolve() if to else target
    )  # a link is followed where it was typed, not where a stranger has left it
    told = source.resolve()
    of_file = told.parent.name if told.stem == "runs" else told.stem
    try:
        _write(found, place, of_file if source.is_file() else told.name, lines, figures)
    except OSError as error:
        raise OutputError(unwritable("--to", target, error)) from error
    console.print(f"report in {target}", soft_wrap=True, markup=False)


@dataclass(frozen=True)
class Findings:
    """What a report is made of. `results`: the table of all runs. `tables`: the others, none of
    them empty. `brief`: those that are printed unless all are wanted. `sources`: titles of papers,
    and where they are."""

    groups: Sequence[Group]
    panels: Sequence[Panel]
    over: Comparison | None
    ablations: Sequence[Ablation]
    results: Table
    tables: Sequence[Table]
    brief: Sequence[Table]
    summary: dict[str, Any]
    sources: Sequence[str]


def find(runs: Sequence[Run], counted: Sequence[Run], against: Path | None) -> Findings:
    """All comparisons and verdicts; `counted`: each of `runs` once. Raises `ReportError` for
    `against`."""
    groups = group_runs(counted)
    panels = make_panels(groups)
    over = compare(panels)
    compared = correct(examine_all(runs))
    judged = [judgement for _, judgements in compared for judgement in judgements]
    pairs = read_conditions(counted)
    pair_rows = judge_conditions(*pairs)
    summary = make_summary(
        groups, verdicts_by_id([*judged, *pair_rows]), [judgement.printed for judgement in judged]
    )
    totals, ablations = papers.totals(compared), find_ablations(groups)
    varied = [ablation.table() for ablation in ablations]
    tables = [totals, papers.numbers(judged), papers.all_numbers(judged), papers.claims(judged)]
    tables += [
        *varied,
        *all_tables(groups, panels, over),
        claims_table(pair_rows),
        *make_tables(*pairs),
    ]
    tables = [table for table in tables if table.rows]
    asked = (
        []
        if against is None
        else [compare_summaries(summary, read_summary_file(against, "--against"))]
    )
    opening = [table for table in tables if table.name in OPENING]
    verdicts = [replace(totals, note="")] if totals.rows else []
    results = by_group("results", groups)
    brief = [*opening, results, *varied, *verdicts, *asked]
    sources = [f"{publication.title}: {publication.source}" for publication, _ in compared]
    return Findings(
        groups, panels, over, ablations, results, [*tables, *asked], brief, summary, sources
    )


def _write(found: Findings, target: Path, name: str, lines: Sequence[str], figures: bool) -> None:
    """All files of the report; `lines`: the head of its page."""
    write_files(target, table_files(found.tables))
    drawn = drawn_lines(found.panels) if figures else []
    overview, ablated, pictures = _draw(found, drawn, target / "figures") if drawn else ([], [], [])
    html = html_page(
        *(name, found.groups, [found.results, *found.tables], target),
        headline=lines,
        overview=overview,
        panels=drawn,
        ablations=ablated,
        pictures=pictures,
        sources=found.sources,
    )
    texts = {
        "report.html": printable_lines(html),
        "summary.json": json.dumps(found.summary, indent=1) + "\n",
    }
    write_files(target, {file: text.encode() for file, text in texts.items()})


def _draw(
    found: Findings, drawn: Sequence[Panel], folder: Path
) -> tuple[Pictures, Pictures, Pictures]:
    """Save the figures over settings, of ablations, and all others."""
    from fedsim.report.ablations import (
        ablation_plots,
    )  # here: matplotlib takes half a second to import
    from fedsim.report.figures import all_plots, save
    from fedsim.report.settings_figures import settings_plots

    gc.freeze()  # `save` collects after large figures: not all runs each time
    overview = save(settings_plots(found.over), folder)
    ablated, pictures = (
        save(ablation_plots(found.ablations), folder),
        save(all_plots(drawn), folder),
    )
    gc.unfreeze()
    return overview, ablated, pictures
