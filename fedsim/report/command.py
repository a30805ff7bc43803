"""`fedsim report <folder or preset>`: print what is best, and write the whole report to
<folder>/report/.

    fedsim report outputs/default
    fedsim report gpfl_table2_fmnist       # the preset's folder below outputs/
    fedsim report gpfl_table2_fmnist --against docs/results/gpfl_table2_fmnist/summary.json
    fedsim report gpfl_table2_fmnist --archive runs.parquet     # also all runs in one small file
    fedsim report runs.parquet             # the report of the runs in such a file
    fedsim report outputs/mine runs.parquet     # one report of both
    fedsim report runs.parquet --where 'cell=cifar_*' --where selector=random,gpfl
    fedsim report default --target 0.75,0.80    # the costs until runs reach these accuracies
    fedsim report default --window 5    # final accuracy: the mean of the last 5 rounds
    fedsim report gpfl_table2_fmnist --all      # print all tables
    fedsim report --rules                  # the rules of verdicts on papers

The report consists of report.html (one page with everything), tables.md, a .tex and a .csv file for
each table, figures as PNG, PDF, SVG and CSV, and summary.json, which is small enough to keep and to
compare. Options such as --names are kept in report.yaml (`fedsim.report.presentation`).
"""

import gc
import json
import os
import re
import sys
import warnings
from argparse import Action, ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, cast

import pandas as pd
from rich.console import Console

from fedsim.core.configs import SHORTHANDS, leaves
from fedsim.core.disk import unwritable, user_path, write_files
from fedsim.core.record import FINAL_WINDOW
from fedsim.core.text import printable_lines
from fedsim.report.headline import listed
from fedsim.report.looks import Look
from fedsim.report.page import Pictures, html_page
from fedsim.report.presentation import FILE as PRESENTATION_FILE
from fedsim.report.presentation import (
    KINDS,
    Presentation,
    presentation_file,
    read_presentation,
    report_folder,
)
from fedsim.report.sections import Material, Section, all_rules, make_sections
from fedsim.report.summary import compare_summaries, make_summary, read_summary_file
from fedsim.report.table import table_files
from fedsim.results.archive import write_archive
from fedsim.results.files import OutputError
from fedsim.results.frames import is_equal, runs_frame
from fedsim.results.runs import ReportError, Run
from fedsim.results.sources import OUTPUTS, find_source, read_source
from fedsim.tracking.tables import Output

COMMAS_OUTSIDE_LISTS = re.compile(r",(?![^\[]*\])")
"""A comma that no closing bracket follows before the next opening one: as in [2,3],[4,5], where it
separates two lists."""
MISSING_CHARACTER = re.compile(r"Glyph (?P<code>\d+) .* missing from font")
"""The beginning of matplotlib's warning about a character that a font lacks. It has the character's
code point."""
DEFAULT_WIDTH = 180
"""Width of the output in characters if it is no terminal and COLUMNS is not set."""


class PrintRules(Action):
    """The option that prints the rules of all sections, and exits."""

    def __call__(self, parser: ArgumentParser, *_: Any) -> None:
        sys.stdout.write("\n\n".join(all_rules()) + "\n")
        parser.exit()


def arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add(
        "folder",
        nargs="+",
        help="a folder with runs below it, the name of a preset that has been run, or an archive; "
        "several: one report",
    )
    add(
        "--output-dir",
        type=user_path,
        default=OUTPUTS,
        help="where presets' folders are (outputs)",
    )
    add(
        "--where",
        action="append",
        default=[],
        metavar="KEY=VALUES",
        help="only runs with one of these values of a key or choices of a group, such as "
        "'cell=cifar_*'; may be repeated",
    )
    add(
        "--target",
        type=accuracies,
        default=(),
        metavar="A,B",
        help="accuracies: the costs until the mean of a window reaches them",
    )
    add(
        "--window",
        type=int,
        metavar="N",
        help="the final accuracy is the mean of the last N rounds (final_window of the runs)",
    )
    add("--to", type=user_path, help="where to write (report in the first folder)")
    add("--all", action="store_true", help="print all tables")
    add(
        "--rules",
        action=PrintRules,
        nargs=0,
        help="print the rules of verdicts on papers, and exit",
    )
    add("--no-figures", action="store_true", help="tables only")
    add("--against", type=user_path, help="an earlier summary.json to compare with")
    add("--archive", type=user_path, help="a .parquet file to write the runs to, to publish them")
    presentation = parser.add_argument_group(
        "presentation", "kept in report.yaml next to the report, and read by the next one"
    )
    _add_presentation(presentation.add_argument)


def _add_presentation(add: Callable[..., Action]) -> None:
    """Add the options that are values of `Presentation`."""
    add("--names", type=_pairs, metavar="METHOD=NAME,...", help="other names of methods")
    add("--order", type=_words, metavar="METHODS", help="the methods that come first")
    add("--only", type=_words, metavar="METHODS", help="the methods to compare; '': all")
    add(
        "--reference",
        type=_words,
        metavar="METHOD",
        help="what methods are compared with within a setting (random selection)",
    )
    add(
        "--log-x",
        action=BooleanOptionalAction,
        help="logarithmic axes below accuracy (where costs differ more than tenfold)",
    )
    add("--width", help="of all figures: column, page, 3.3in, 84mm, ...")
    add("--style", help="paper (default), slides or dark")
    add("--labels", help="names of lines: in a legend (default) or at their ends")
    add("--spread", help="after means in tables: interval (95 %%, default) or sd")


def _words(text: str) -> list[str]:
    """Return the words of a list with commas. A word may have a list in brackets in it."""
    return [word.strip() for word in COMMAS_OUTSIDE_LISTS.split(text) if word.strip()]


def _pairs(text: str) -> dict[str, str]:
    """Return the pairs of a list such as `gpfl=GPFL,random=Random`."""
    pairs = {}
    for word in _words(text):
        method, _, name = word.rpartition("=")
        if not (method and name):
            raise ArgumentTypeError(f"{word}: must be METHOD=NAME, such as gpfl=GPFL")
        pairs[method] = name
    return pairs


def run(options: Namespace) -> int:
    """Make the report. Raises `ReportError` if there is nothing to report, and `OutputError` if it
    cannot be written."""
    sources = [find_source(name, options.output_dir) for name in options.folder]
    runs = []
    for source in sources:
        runs += read_source(source)
    for condition in options.where:
        runs = filtered(runs, condition)
    shown = with_window(runs, options.window)
    choices = {}
    for key in KINDS:
        value = getattr(options, key)
        if value is not None:
            choices[key] = value
    if options.archive is not None:
        write_archive(runs, sources[0], options.archive)  # as they were run
    report(
        shown,
        sources[0],
        options.to,
        with_figures=not options.no_figures,
        against=options.against,
        print_all=options.all,
        choices=choices,
        targets=options.target,
    )
    return 0


def accuracies(word: str) -> list[float]:
    """Return the accuracies in a word such as `0.75,0.80`. Raises `ArgumentTypeError`."""
    targets: list[float] = []
    with suppress(ValueError):
        targets = list(map(float, word.split(",")))
    if not (targets and 0 < min(targets) <= max(targets) <= 1):
        raise ArgumentTypeError(f"{word}: must be accuracies above 0 and up to 1, as in 0.75,0.80")
    return targets


def with_window(runs: list[Run], window: int | None) -> list[Run]:
    """Return the runs with the mean of the last `window` rounds as their final accuracy.

    If `window` is None, all runs keep their `final_window`. Raises `ReportError` if these windows
    differ, or if `window` is below 1.
    """
    if window is None:
        windows = {run.final_window for run in runs}
        if len(windows) == 1:
            return runs
        shown = listed(sorted(windows))
        raise ReportError(f"the runs have final_window {shown}; choose one, as in --window 11")
    if window < 1:
        raise ReportError(f"--window {window}: must be a number of rounds, 1 or more")
    value = None if window == FINAL_WINDOW else window
    return [replace(run, config={**run.config, "final_window": value}) for run in runs]


def _as_written(value: Any) -> str:
    """Return a config value as a command line has it: null, true, 0.1."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def filtered(runs: Sequence[Run], condition: str) -> list[Run]:
    """Return the runs that meet a condition KEY=VALUES: they have one of the values.

    There are commas between the values, and * stands for any text in them. A value may be a list,
    such as [2,3]. The key may be a shorthand such as `selector.rho`. Raises `ReportError` if no run
    meets the condition, and tells on stderr which values no run has.
    """
    key, _, values = condition.partition("=")
    # Brackets stand for themselves: a pattern writes [[] for an opening one.
    patterns = [
        value.replace("[", "[[]") for value in COMMAS_OUTSIDE_LISTS.split(values.replace(" ", ""))
    ]
    matching = []
    occurring = set()
    for run in runs:
        texts = _texts_of(run, key)
        occurring |= texts
        if any(_matches(text.replace(" ", ""), patterns) for text in texts):
            matching.append(run)
    known = listed(sorted(occurring))
    if not matching:
        remedy = f"there are {known}" if known else f"none has a {key}"
        raise ReportError(f"--where {condition}: holds of no run; {remedy}")
    for pattern in patterns:
        if not any(_matches(text.replace(" ", ""), [pattern]) for text in occurring):
            value = pattern.replace("[[]", "[")
            _print_note(f"--where {condition}: no run has {value}; there are {known}")
    return matching


def _texts_of(run: Run, key: str) -> set[str]:
    """Return the texts of a run that a condition on `key` is about.

    It is a config value, the choice of a config group, or the version of the user's code. `dataset`
    may also be the name of the data set. Empty if the run has no such key.
    """
    *_, long_key = SHORTHANDS.get(key, (key,))
    values = {**dict(leaves(run.config)), "code": run.code, **run.choices}
    texts = set()
    if key in values or long_key in values:
        texts.add(_as_written(values.get(key, values.get(long_key))))
    if key == "dataset":
        texts.add(str(run.dataset))
    return texts


def _matches(text: str, patterns: Sequence[str]) -> bool:
    """Return whether a text without spaces matches a pattern, or is the same number."""
    return any(fnmatchcase(text, pattern) or is_equal(text, pattern) for pattern in patterns)


def report(
    runs: Sequence[Run],
    source: Path,
    to: Path | None = None,
    *,
    with_figures: bool = True,
    against: Path | None = None,
    print_all: bool = False,
    choices: Mapping[str, Any] = MappingProxyType({}),
    targets: Sequence[float] = (),
) -> None:
    """Print what is best in `runs`, or all tables, and write the report to the folder `to`.

    If `to` is None, the report is written to the folder `report` in or next to `source`. `choices`
    are values of `Presentation`; they replace the values in the folder's report.yaml. Raises
    `ReportError` if the choices name a method that does not exist, or if the summary `against`
    cannot be compared with this one.
    """
    # A link that the user typed is followed. A folder `report` that is a link is not.
    folder = to.resolve() if to else report_folder(source)
    shown_folder = to or folder
    presentation = read_presentation(folder, choices)
    frame, looks = _arranged(runs, folder, presentation, choices)
    material = Material(runs, frame, print_all, targets, presentation, looks)
    sections = make_sections(material)
    summary = make_summary(frame, sections)
    if against is not None:
        changes = compare_summaries(summary, read_summary_file(against, "--against"))
        sections += [Section([changes], brief=[changes])]
    for note in notes_on_data(frame):
        _print_note(note)
    # The files are written even if nobody reads the tables to their end.
    console = _console()
    for section in sections:
        for line in section.lines:
            console.print(printable_lines(line), markup=False)
        for table in section.tables if print_all else section.brief:
            console.print(table)
    earlier = _times_of_files(folder)
    try:
        write_files(folder, presentation_file(presentation, folder))
        write_files(folder, table_files([table for each in sections for table in each.tables]))
        pictures = None
        if with_figures:
            pictures = _draw(sections, folder / "figures", presentation)
        page = html_page(_title(source), material, sections, pictures, folder)
        texts = {
            "report.html": printable_lines(page),
            "summary.json": json.dumps(summary, indent=1) + "\n",
        }
        write_files(folder, {name: text.encode() for name, text in texts.items()})
    except OSError as error:
        raise OutputError(unwritable("--to", shown_folder, error)) from error
    console.print(f"report in {shown_folder}", soft_wrap=True, markup=False)
    now = _times_of_files(folder)
    if kept := [path.name for path, time in earlier.items() if now.get(path) == time]:
        _print_note(
            f"{shown_folder} also has files of an earlier report, perhaps of other runs: "
            f"{listed(kept)}; delete the folder, and report again, to be rid of them"
        )


def _times_of_files(folder: Path) -> dict[Path, int]:
    """Return when each table and figure in a report's folder was written [ns]."""
    times = {}
    for path in sorted((*folder.glob("*"), *folder.glob("figures/*"))):
        if path.suffix in (".md", ".csv", ".tex", ".png", ".pdf", ".svg"):
            times[path] = path.stat().st_mtime_ns
    return times


def _arranged(
    runs: Sequence[Run], folder: Path, presentation: Presentation, choices: Mapping[str, Any]
) -> tuple[pd.DataFrame, dict[str, Look]]:
    """Return the frame of the runs to show, and the looks of their methods.

    Print notes on runs and methods that are not shown, and on names in the file of the report's
    `folder` that are ignored.
    """
    frame = runs_frame(runs)
    num_repeated = len(runs) - len(frame)
    if num_repeated:
        _print_note(f"{num_repeated} runs differ from others in name alone; each counts once")
    num_methods = frame["method"].nunique()
    path = folder / PRESENTATION_FILE
    frame, looks, notes = presentation.arrange_stored(frame, path, choices.keys())
    for note in notes:
        _print_note(note)
    num_hidden = num_methods - frame["method"].nunique()
    if num_hidden and "only" not in choices:
        _print_note(
            f"{path} keeps an earlier --only, which hides {num_hidden} of {num_methods} methods"
        )
    return frame, looks


def _print_note(note: str) -> None:
    sys.stderr.write(printable_lines(f"fedsim report: {note}\n"))


def _console() -> Console:
    """Return the console of the output. It is as wide as the terminal, or as COLUMNS says."""
    screen = Output()
    has_width = screen.isatty() or "COLUMNS" in os.environ
    width = None if has_width else DEFAULT_WIDTH
    return Console(highlight=False, file=cast(IO[str], screen), width=width)


def notes_on_data(frame: pd.DataFrame) -> list[str]:
    """Return a line for each setting in which runs have read different files."""
    notes = []
    for setting, runs in frame.groupby("setting", sort=False)["run"]:
        checksums = set()
        for run in runs:
            checksum = (run.summary.get("data") or {}).get("sha256")
            if checksum:
                checksums.add(str(checksum)[:12])
        if len(checksums) > 1:
            shown = listed(sorted(checksums))
            where = f" in setting {setting}" if setting else ""
            notes.append(
                f"runs{where} have read different files (data.sha256 {shown} in summary.json), so "
                "their accuracies do not compare; overwrite=true runs them again"
            )
    return notes


def _draw(sections: Sequence[Section], folder: Path, presentation: Presentation) -> Pictures:
    """Save the figures of all sections; return captions and PNGs by their place on the page."""
    from fedsim.report.drawing import save, style  # here: matplotlib takes half a second to import

    pictures: dict[str, list[tuple[str, bytes]]] = {}
    gc.freeze()  # `save` collects garbage after large figures; the runs are no garbage
    try:
        with (
            _note_on_missing_characters(),
            style(presentation.style, presentation.inches, presentation.labels),
        ):
            for section in sections:
                plots = section.plots()
                if plots:
                    pictures.setdefault(section.place, []).extend(save(plots, folder))
    finally:
        gc.unfreeze()
    return pictures


@contextmanager
def _note_on_missing_characters() -> Iterator[None]:
    """Print one note on the characters that the font of figures lacks, instead of matplotlib's
    warnings about each of them. Other warnings are issued as usual, at the end."""
    with warnings.catch_warnings(record=True) as issued:
        warnings.filterwarnings("always", MISSING_CHARACTER.pattern, UserWarning)
        yield
    characters = []
    for warning in issued:
        missing = MISSING_CHARACTER.match(str(warning.message))
        if missing:
            characters.append(chr(int(missing["code"])))
        else:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
    if characters:
        shown = " ".join(dict.fromkeys(characters))
        _print_note(
            f"the font of figures lacks {shown} and shows boxes instead; "
            "--names METHOD=NAME gives a method another name"
        )


def _title(source: Path) -> str:
    path = source.resolve()
    if source.is_file():
        return path.parent.name if path.stem == "runs" else path.stem
    return path.name
