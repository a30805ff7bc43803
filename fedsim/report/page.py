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
PRINTED = ("methods", "results", "budgets", "targets")
"""Tables that follow the opening, above the curves, if they are printed. Others are folded."""
COSTS = ("costs", "times")
"""Tables below the curves, which are not folded."""
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
    images = {place: _embedded(figures) for place, figures in (pictures or {}).items()}
    tables = _tables_by_place(sections)
    configs, shared = config_differences(runs)
    curves = plotly = thinned = ""
    if pictures is not None and len(material.shown):
        plotly, curves, thinned = _curves(material)
    environment = jinja2.Environment(autoescape=True, trim_blocks=True)
    template = environment.from_string((ASSETS / "page.html.j2").read_text(encoding="utf-8"))
    return template.render(
        title=title,
        headline=[line for section in sections for line in section.lines],
        opening=tables["opening"],
        overview=images.get("overview", ()),
        first=tables["first"],
        costs=tables["costs"],
        tables=tables["folded"],
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


def _tables_by_place(sections: Sequence[Section]) -> dict[str, list[dict[str, Any]]]:
    """Return the cells of all tables (`_cells`) by their place on the page."""
    by_place: dict[str, list[dict[str, Any]]] = {
        "opening": [],
        "first": [],
        "costs": [],
        "folded": [],
    }
    places = {**dict.fromkeys(OPENING, "opening"), **dict.fromkeys(COSTS, "costs")}
    for section in sections:
        for table in section.brief:
            if table.name in PRINTED:
                places[table.name] = "first"
                by_place["first"].append(_cells(table))
    for section in sections:
        for table in section.tables:
            place = places.get(table.name, "folded")
            if place != "first":  # is there already
                by_place[place].append(_cells(table))
    return by_place


def _curves(material: Material) -> tuple[str, str, str]:
    """Return plotly's script, the data of the curves as JSON, and sentences on what the curves do
    not show."""
    from plotly.offline import get_plotlyjs  # here: 0.3 s, which only curves need

    data = curves_data(material.shown, material.shown_looks)
    text = json.dumps(data, separators=(",", ":"))
    text = text.replace("<", "\\u003c")  # no name of a run can end the script element
    return get_plotlyjs(), text, _thinned(material.shown, material.frame, data["points"])


def config_differences(runs: pd.DataFrame) -> tuple[Table, str]:
    """Return how the configs of groups differ, and what they have in common.

    The table has a row for each group. A key that all groups have with different values is a
    column. The last column has the keys that only some groups have. The text has the common keys
    and values, a line each.
    """
    groups = by(runs, "group")
    values = pd.DataFrame([_config_of(rows) for rows in groups.values()], dtype=object)
    everywhere = [key for key in values if values[key].notna().all()]
    differing = [key for key in everywhere if values[key].map(str).nunique() > 1]
    rows = []
    for name, (_, row) in zip(groups, values.iterrows(), strict=True):
        of_its_own = row.drop(everywhere).dropna()
        texts = [f"{key}={value}" for key, value in of_its_own.items()]
        rows.append([name, *row[differing], ", ".join(texts)])
    frame = make_frame(["run", *differing, "keys of its own"], rows)
    common = [key for key in everywhere if key not in differing]
    shared = "\n".join(f"{key}: {values[key].iloc[0]}" for key in common)
    return Table("configs", "How the configs differ", frame), shared


def _config_of(rows: pd.DataFrame) -> dict[str, Any]:
    """Return the choices and config values of a group that can change its results, by key.

    The runs of the group may differ in engine and device: all that occur are listed. The class
    (`_target_`) of a config group is left out, because the choice implies it.
    """
    first = first_run(rows)
    values: dict[str, Any] = dict(NEW_GROUPS)
    for config_group, choice in first.choices.items():
        if config_group not in UNCOMPARED:
            values[config_group] = choice
    implied = {f"{config_group.replace('/', '.')}._target_" for config_group in values}
    for key, value in leaves(relevant(first.config)):
        if key not in implied:
            values[key] = value
    if first.code:
        values["code"] = first.code
    occurring = {
        "engine": [run.choices.get("engine") for run in rows["run"]],
        "device": [run.config.get("device") for run in rows["run"]],
    }
    for key, each in occurring.items():
        if key in values:
            values[key] = " and ".join(dict.fromkeys(map(str, each)))
    return values


def runs_table(runs: pd.DataFrame) -> Table:
    """Return every run: its group, seed, status, accuracies if it reached its last round, and the
    name of its folder."""
    rows = []
    for run, group, final, last in zip(
        runs["run"], runs["group"], runs["final_accuracy"], runs["last_accuracy"], strict=True
    ):
        seeds = run.seed, str(run.seeds)  # the number for sorting, and the text
        rows.append([group, seeds, run.status, final, last, run.folder.name])
    head = final_head(runs)
    frame = make_frame(["run", "seed", "status", head, LAST, "folder"], rows)
    formats = {"seed": lambda seeds: seeds[1], head: ".4f", LAST: ".4f"}
    return Table("runs", "Runs", frame, formats)


def curves_data(runs: pd.DataFrame, method_looks: Mapping[str, Look]) -> dict[str, Any]:
    """Return the data of the curves for page.js, from finished runs and the look of each method.

    - `axes` and `values`: the labels of what can be chosen for x and y.
    - `units`: the units of axes that have one.
    - `range_of`: the value to which the ranges of seeds belong.
    - `looks`: colour, dashes and marker of each method.
    - `panels`: the lines of each setting (`_line`).
    - `points`: the largest number of points of a line.
    """
    all_runs = list(runs["run"])
    axes = {name: axis.label for name, axis in AXES.items() if is_recorded(all_runs, axis.names)}
    points = min(MAX_POINTS, ALL_POINTS // runs["group"].nunique())
    panels = []
    for setting, rows in by_setting(runs).items():
        lines = []
        for method, line in by(rows, "method").items():
            lines.append(_line(method, list(line["run"]), list(axes), points))
        panels.append({"title": setting, "lines": lines})
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
    """Return what a line shows at evaluated rounds: its value on each of the `axes`, and all of
    `VALUES`.

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
    """Return the captions of the first pictures, and their PNGs in base64.

    These have up to `PICTURE_BYTES` in all. No picture after them is embedded, however small.
    """
    embedded = []
    size = 0
    for caption, png in pictures:
        size += len(png)
        if size <= PICTURE_BYTES:
            embedded.append((caption, base64.b64encode(png).decode("ascii")))
    return embedded


def _cells(table: Table) -> dict[str, Any]:
    """Return a table for the template.

    Each cell has its text, the number by which it is sorted (`sort`), and its CSS class (`kind`,
    empty if it has none).
    """
    header, columns = [], []
    for name in table.shown:
        is_text = table.is_text(name)
        header.append({"text": name or "setting", "left": is_text})
        texts, values = table.shown[name][:MAX_ROWS], table.values[name][:MAX_ROWS]
        column = []
        for text, value in zip(texts, values, strict=True):
            kind = ""
            if text in table.styles:
                kind = table.styles[text]
            elif is_text:
                kind = "long" if len(text) > LONG else "text"
            is_bold = isinstance(text, Bold)
            column.append({"text": text, "sort": number_in(value), "bold": is_bold, "kind": kind})
        columns.append(column)
    rows = list(zip(*columns, strict=True))
    note = table.shown_note
    if len(rows) < len(table.values):
        file = "" if table.name in ON_PAGE_ALONE else f": {table.name}.csv has all of them"
        note = f"The first {len(rows)} of {len(table.values)} rows{file}. {note}".strip()
    return {"name": table.name, "title": table.title, "header": header, "rows": rows, "note": note}
