"""The report as one self-contained HTML page.

The page begins with what is best, curves (which page.js draws with plotly from JSON) and costs. All
other tables are folded. Pictures are PNGs of figures, embedded in the page. A line is the curve of
a method in a setting, the mean over its runs.
"""

import base64
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
import numpy as np
import pandas as pd

from fedsim.core.configs import leaves
from fedsim.report.curves import (
    AXES,
    accuracy_curve,
    smoothing_window,
    spent_until,
    stack_series,
)
from fedsim.report.headline import header_facts
from fedsim.report.looks import DASHES, MARKERS, Look, colour_on_page
from fedsim.report.sections import ASSETS, Material, Section
from fedsim.report.table import Bold, Table, make_frame, number_in
from fedsim.report.tables import LAST, final_head
from fedsim.results.frames import by, by_setting, finished_rows, first_run
from fedsim.results.grouping import relevant
from fedsim.results.labels import NEW_GROUPS
from fedsim.results.measures import is_recorded
from fedsim.results.runs import Run

OPENING = ("paper", "settings", "advice")
"""Tables at the head of the page."""
COSTS = ("costs", "times")
"""Tables that are not folded."""
FIRST = ("results", "budgets", "targets")
"""Tables that follow the opening if they are printed, too."""
ON_PAGE_ALONE = ("configs", "runs", "results")
"""Tables that are in no file next to the page."""
UNCOMPARED = ("preset", "tracker", "scale")
"""Config groups that change nothing themselves: the values that they set are compared."""
MAX_POINTS = 250
"""Points of a curve."""
ALL_POINTS = 6_000
"""Points of all curves together."""
MAX_ROWS = 300
"""Rows of a table on the page."""
PICTURE_BYTES = 600_000
"""Size of all figures on the page. The others are in files next to it."""
LONG = 60
"""Texts of more characters may be broken into lines."""
VALUES = {
    "smoothed": "test accuracy, mean of the latest rounds (as the final accuracy)",
    "raw": "test accuracy of single rounds",
    "coverage": "share of clients selected so far",
    "participation": "share of clients that upload",
}
"""What curves show, and the label of its axis."""
Pictures = Mapping[str, Sequence[tuple[str, bytes]]]
"""Captions and PNGs of figures, by their place on the page."""


def html_page(
    title: str,
    material: Material,
    sections: Sequence[Section],
    pictures: Pictures | None,
    folder: Path,
) -> str:
    """Return the HTML text of the page, which will be written to `folder`.

    Links to the runs' folders are relative to `folder`. If `pictures` is None (no figures are
    wanted), the page has no curves either.
    """
    runs = material.frame
    shown_runs = runs[:0] if pictures is None else material.shown
    images = {place: _embedded(figures) for place, figures in (pictures or {}).items()}
    tables = [table for section in sections for table in section.tables]
    brief = [table for section in sections for table in section.brief]
    configs, shared = config_differences(runs)
    curves = plotly = thinned = ""
    if len(shown_runs):
        from plotly.offline import get_plotlyjs  # here: 0.3 s, which only curves need

        plotly = get_plotlyjs()
        data = curves_data(shown_runs, material.shown_looks)
        thinned = _thinned(shown_runs, runs, data["points"])
        curves = json.dumps(data, separators=(",", ":"))
        curves = curves.replace("<", "\\u003c")  # no name of a run can end the script element
    first = [table for table in brief if table.name in FIRST]
    unfolded = {*OPENING, *COSTS, *(table.name for table in first)}
    folded = [table for table in tables if table.name not in unfolded]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True)
    template = environment.from_string((ASSETS / "page.html.j2").read_text(encoding="utf-8"))
    return template.render(
        title=title,
        headline=[line for section in sections for line in section.lines],
        opening=[_cells(table) for table in tables if table.name in OPENING],
        overview=images.get("overview", ()),
        first=[_cells(table) for table in first],
        costs=[_cells(table) for table in tables if table.name in COSTS],
        tables=[_cells(table) for table in folded],
        facts=header_facts(list(runs["run"])),
        configs=_cells(configs),
        shared=shared,
        runs=_cells(runs_table(runs)),
        links=[_link(run, folder) for run in runs["run"]],
        sources=[source for section in sections for source in section.sources],
        rules=[rule for section in sections for rule in section.rules],
        ablations=images.get("ablations", ()),
        pictures=images.get("others", ()),
        css=(ASSETS / "page.css").read_text(encoding="utf-8"),
        js=(ASSETS / "page.js").read_text(encoding="utf-8"),
        plotly=plotly,
        curves=curves,
        thinned=thinned,
    )


def config_differences(runs: pd.DataFrame) -> tuple[Table, str]:
    """Return how the configs of groups differ, and what they have in common.

    The table has a column for each key that all have and that differs, and one for keys that only
    some have. The text has the common keys and values, a line each.
    """
    groups = by(runs, "group")
    values = pd.DataFrame([_compared(rows) for rows in groups.values()], dtype=object)
    everywhere = [key for key in values if values[key].notna().all()]
    differing = [key for key in everywhere if values[key].map(str).nunique() > 1]
    rows = []
    for name, (_, row) in zip(groups, values.iterrows(), strict=True):
        remaining = row.drop(everywhere).dropna()
        rows.append(
            [name, *row[differing], ", ".join(f"{key}={remaining[key]}" for key in remaining.index)]
        )
    frame = make_frame(["run", *differing, "keys of its own"], rows)
    common = [key for key in everywhere if key not in differing]
    shared = "\n".join(f"{key}: {values[key].iloc[0]}" for key in common)
    return Table("configs", "How the configs differ", frame), shared


def _compared(rows: pd.DataFrame) -> dict[str, Any]:
    """Return the choices and config values of a group that can change its results.

    Its runs may differ in engine and device: all that occur are listed. A group's `_target_` is
    left out, because the choice implies it.
    """
    run = first_run(rows)
    values: dict[str, Any] = dict(NEW_GROUPS)
    values.update({key: text for key, text in run.choices.items() if key not in UNCOMPARED})
    targets = {f"{group.replace('/', '.')}._target_" for group in values}
    for key, value in leaves(relevant(run.config)):
        if key not in targets:
            values[key] = value
    if run.code:
        values["code"] = run.code
    used = {
        "engine": [other.choices.get("engine") for other in rows["run"]],
        "device": [other.config.get("device") for other in rows["run"]],
    }
    for key, texts in used.items():
        if key in values:
            values[key] = " and ".join(dict.fromkeys(map(str, texts)))
    return values


def runs_table(runs: pd.DataFrame) -> Table:
    """Return every run: its group, seed, status, accuracies if it reached its last round, and the
    name of its folder."""
    rows = []
    for run, group, final, last in zip(
        runs["run"], runs["group"], runs["final_accuracy"], runs["last_accuracy"], strict=True
    ):
        seeds = run.seed, str(run.seeds)
        rows.append([group, seeds, run.status, final, last, run.folder.name])
    head = final_head(runs)
    frame = make_frame(["run", "seed", "status", head, LAST, "folder"], rows)
    formats = {"seed": lambda seeds: seeds[1], head: ".4f", LAST: ".4f"}
    return Table("runs", "Runs", frame, formats)


def curves_data(runs: pd.DataFrame, method_looks: Mapping[str, Look]) -> dict[str, Any]:
    """Return the data of the curves for page.js. `method_looks` has the look of each method.

    `axes` and `values` have the labels of what can be chosen for x and y, and `units` the units of
    axes. `range_of` names the value to which the ranges of seeds belong. `looks` are those of
    methods, `panels` has the lines of each setting, and `points` is the largest number of points of
    a line.
    """
    all_runs = list(runs["run"])
    axes = {name: axis.label for name, axis in AXES.items() if is_recorded(all_runs, axis.names)}
    points = min(MAX_POINTS, ALL_POINTS // runs["group"].nunique())
    panels = []
    for setting, rows in by_setting(runs).items():
        lines = by(rows, "method").items()
        curves = [_line(method, list(line["run"]), list(axes), points) for method, line in lines]
        panels.append({"title": setting, "lines": curves})
    looks = {}
    for name, look in method_looks.items():
        dash, symbol = DASHES[look["linestyle"]], MARKERS[look["marker"]]
        looks[name] = {"color": colour_on_page(look), "dash": dash, "symbol": symbol}
    values = dict(VALUES)
    groups = by(runs, "group").values()
    is_smoothed = any(smoothing_window(list(rows["run"])) > 1 for rows in groups)
    if not is_smoothed:
        del values["smoothed"]
    return {
        "axes": axes,
        "points": points,
        "units": {name: AXES[name].unit for name in axes if AXES[name].unit is not None},
        "range_of": "smoothed" if is_smoothed else "raw",
        "values": values,
        "looks": looks,
        "panels": panels,
    }


def _line(method: str, runs: Sequence[Run], axes: Sequence[str], max_points: int) -> dict[str, Any]:
    """Return the series of a line at evaluated rounds.

    Of more than `max_points` evaluated rounds, evenly spaced ones are taken, with the first and the
    last.
    """
    curve = accuracy_curve(runs)
    places = curve.rounds - 1  # rounds are counted from 1
    series = {axis: spent_until(runs, axis)[places] for axis in axes}
    series.update(raw=curve.raw, smoothed=curve.smoothed, low=curve.low, high=curve.high)
    series["coverage"] = stack_series(runs, "coverage").mean(0)[places]
    series["participation"] = stack_series(runs, "participation_ratio").mean(0)[places]
    num_points = min(len(places), max_points)
    kept = np.unique(np.linspace(0, len(places) - 1, num_points).round().astype(np.int64))
    line: dict[str, Any] = {"name": method, "seeds": len(runs)}
    for name, values in series.items():
        line[name] = [float(f"{value:.5g}") for value in values[kept]]
    return line


def _thinned(shown_runs: pd.DataFrame, runs: pd.DataFrame, points: int) -> str:
    """Return sentences on rounds and lines that the curves do not show; empty if they show all."""
    texts = []
    if max(run.rounds.num for run in shown_runs["run"]) > points:
        texts.append(f"Each line is thinned to {points} rounds.")
    num_shown = shown_runs["group"].nunique()
    num_finished = finished_rows(runs)["group"].nunique()
    if num_finished > num_shown:
        texts.append(
            f"Drawn are {num_shown} of {num_finished} lines: the most accurate of each setting, "
            "and what they are compared with."
        )
    return " ".join(texts)


def _link(run: Run, folder: Path) -> str | None:
    """Return the relative address of a run's folder; None for a run of an archive."""
    if run.archived:
        return None
    return f"{quote(Path(os.path.relpath(run.folder, folder)).as_posix())}/"


def _embedded(pictures: Sequence[tuple[str, bytes]]) -> list[tuple[str, str]]:
    """Return the captions of the first pictures, and their PNGs in base64, up to `PICTURE_BYTES` in
    all."""
    embedded = []
    size = 0
    for caption, png in pictures:
        size += len(png)
        if size <= PICTURE_BYTES:
            embedded.append((caption, base64.b64encode(png).decode("ascii")))
    return embedded


def _cells(table: Table) -> dict[str, Any]:
    """Return a table for the template: each cell with its text, the number by which it is sorted,
    and its class, if it has one."""
    header, columns = [], []
    for name in table.shown:
        texts = table.shown[name][:MAX_ROWS]
        numbers = [number_in(value) for value in table.values[name][:MAX_ROWS]]
        is_text = all(number is None for number in numbers)
        header.append({"text": name or "setting", "left": is_text})
        cells = []
        for text, number in zip(texts, numbers, strict=True):
            kind = "long" if len(text) > LONG else "text"
            style = table.styles.get(text, kind if is_text else "")
            is_bold = isinstance(text, Bold)
            cells.append({"text": text, "sort": number, "bold": is_bold, "kind": style})
        columns.append(cells)
    rows = list(zip(*columns, strict=True))
    note = table.shown_note
    if len(rows) < len(table.values):
        file = "" if table.name in ON_PAGE_ALONE else f": {table.name}.csv has all of them"
        note = f"The first {len(rows)} of {len(table.values)} rows{file}. {note}".strip()
    return {"name": table.name, "title": table.title, "header": header, "rows": rows, "note": note}
