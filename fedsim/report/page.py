"""The report as one self-contained HTML page: what is best, curves that page.js draws, costs; all
else is folded."""

import base64
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
import numpy as np

from fedsim.core.configs import leaves
from fedsim.core.record import FINAL_WINDOW
from fedsim.papers.published import RULES, VERDICTS
from fedsim.report.headline import header_facts
from fedsim.report.tables import FINAL, LAST
from fedsim.results.curves import (
    AXES,
    SMOOTHED_FROM,
    accuracy_curve,
    is_recorded,
    spent_until,
    stack_series,
)
from fedsim.results.groups import NEW_GROUPS, Group, Panel, relevant, sort_key
from fedsim.results.measures import final_accuracy, last_accuracy
from fedsim.results.runs import Run
from fedsim.results.table import Cell, Table, is_bold, number

UNCOMPARED = ("preset", "tracker", "scale")
"""Config groups that change nothing themselves: the values that they set are compared."""


def config_differences(groups: Sequence[Group]) -> tuple[Table, str]:
    """How the configs of groups differ: a table with a column for each key of all of them, and one
    for keys that only some have; and the keys and values that all have in common, a line each."""
    configs = [_compared(group) for group in groups]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    everywhere = [key for key in keys if all(key in config for config in configs)]
    columns = [key for key in everywhere if len({str(config[key]) for config in configs}) > 1]
    rows = []
    for group, config in zip(groups, configs, strict=True):
        own = ", ".join(f"{key}={value}" for key, value in config.items() if key not in everywhere)
        values = [config[key] for key in columns]
        cells = [Cell(str(one), one) if type(one) in (int, float) else str(one) for one in values]
        rows.append([group.name, *cells, own])
    shared = "\n".join(f"{key}: {configs[0][key]}" for key in everywhere if key not in columns)
    return Table(
        "configs", "How the configs differ", ["run", *columns, "keys of its own"], rows
    ), shared


def _compared(group: Group) -> dict[str, Any]:
    """The choices and values of a group that can change its results; of engine and device, in which
    its runs may differ, all. A class is told by the choice that names it."""
    run = group.runs[0]
    choices = NEW_GROUPS | {
        name: choice for name, choice in run.choices.items() if name not in UNCOMPARED
    }
    told = {f"{name.replace('/', '.')}._target_" for name in choices}
    values = choices | {
        key: value for key, value in leaves(relevant(run.config)) if key not in told
    }
    ran = {"engine": [one.choices.get("engine") for one in group.runs]}
    ran["device"] = [one.config.get("device") for one in group.runs]
    values |= {"code": run.code} if run.code else {}
    return values | {
        key: " and ".join(dict.fromkeys(map(str, ran[key]))) for key in ran if key in values
    }


def runs_table(groups: Sequence[Group]) -> Table:
    """Every run: its group, seed, status, accuracies if it reached its last round, and the name of
    its folder."""
    rows = []
    for group in groups:
        for run in group.runs:
            is_done = run.status == "done"
            shown = [
                number(of(run) if is_done else None, ".4f")
                for of in (final_accuracy, last_accuracy)
            ]
            rows.append(
                [group.name, Cell(str(run.seeds), run.seed), run.status, *shown, run.folder.name]
            )
    return Table("runs", "Runs", ["run", "seed", "status", FINAL, LAST, "folder"], rows)


Look = Mapping[str, Any]
"""The colour, dash and marker of a method, as matplotlib's keyword arguments."""
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
"""Okabe and Ito's palette, told apart with any colour blindness, without its yellow, which white
paper swallows."""
DASHES = {"-": "solid", "--": "dash", ":": "dot", "-.": "dashdot"}
MARKERS = {
    **{"o": "circle", "s": "square", "^": "triangle-up", "D": "diamond", "v": "triangle-down"},
    **{"P": "cross", "X": "x", "<": "triangle-left", ">": "triangle-right"},
}
"""matplotlib's dashes and markers, and plotly's names of them."""


def make_looks(panels: Sequence[Panel]) -> Mapping[str, Look]:
    """The look of each line of the panels by its name, in the order in which legends have them.
    Colours repeat after seven methods, with another dash; colour and marker together after 63."""
    names = sorted({name for panel in panels for name in panel.lines}, key=sort_key)
    dashes, markers = list(DASHES), list(MARKERS)
    looks = {}
    for at, name in enumerate(names):
        style = {
            "linestyle": dashes[at // len(COLOURS) % len(dashes)],
            "marker": markers[at % len(markers)],
        }
        looks[name] = {"color": COLOURS[at % len(COLOURS)], **style, "markerfacecolor": "white"}
    return looks


MAX_POINTS, ALL_POINTS = 250, 6_000
"""Of a curve, and of all curves together."""
MOST_ROWS, PICTURE_BYTES = 300, 600_000
"""Of a table on the page, and of the figures on it: what is beyond is in files beside it."""
VALUES = {
    "smoothed": f"test accuracy, mean of the last {FINAL_WINDOW} rounds",
    "raw": "test accuracy of single rounds",
    "coverage": "share of clients selected so far",
    "participation": "share of clients that upload",
}


def curves_data(panels: Sequence[Panel]) -> dict[str, Any]:
    """Axes and values with their labels, axes' units, which value the ranges are of, methods'
    looks, panels' lines."""
    runs = [run for panel in panels for group in panel.lines.values() for run in group.complete]
    axes = {name: axis.label for name, axis in AXES.items() if is_recorded(runs, axis.names)}
    points = min(MAX_POINTS, ALL_POINTS // max(1, sum(len(panel.lines) for panel in panels)))
    short = all(run.num_rounds < SMOOTHED_FROM for run in runs)  # then nothing is smoothed
    return {
        "axes": axes,
        "points": points,
        "units": {name: AXES[name].unit for name in axes if AXES[name].unit is not None},
        "range_of": "raw" if short else "smoothed",
        "values": {
            name: label for name, label in VALUES.items() if not (short and name == "smoothed")
        },
        "looks": {
            name: {
                "color": look["color"],
                "dash": DASHES[look["linestyle"]],
                "symbol": MARKERS[look["marker"]],
            }
            for name, look in make_looks(panels).items()
        },
        "panels": [
            {
                "title": panel.title,
                "lines": [_line(name, g.complete, axes, points) for name, g in panel.lines.items()],
            }
            for panel in panels
        ],
    }


def _line(name: str, runs: Sequence[Run], axes: Iterable[str], most: int) -> dict[str, Any]:
    """A line at no more than `most` of the evaluated rounds, the first and the last among them."""
    curve = accuracy_curve(runs)
    at = curve.rounds - 1
    series = {
        **{axis: spent_until(runs, axis)[at] for axis in axes},
        **{"raw": curve.raw, "smoothed": curve.smoothed, "low": curve.low, "high": curve.high},
        "coverage": stack_series(runs, "coverage").mean(0)[at],
        "participation": stack_series(runs, "participation_ratio").mean(0)[at],
    }
    kept = np.unique(np.linspace(0, len(at) - 1, min(len(at), most)).round().astype(np.int64))
    points = {
        key: [float(f"{value:.5g}") for value in values[kept]] for key, values in series.items()
    }
    return {"name": name, "seeds": len(runs), **points}


OPENING, COSTS = ("settings", "advice"), ("costs", "times")
"""Tables at the head of the page, and those that are not folded."""
LONG = 60
"""Texts of more characters may be broken into lines."""
HERE = Path(__file__).parent / "assets"
CLASSES: Mapping[str, str] = {
    **dict.fromkeys(VERDICTS, "undecided"),
    "reproduced": "reproduced",
    "not reproduced": "not",
}
"""The style of a cell with a verdict."""


def html_page(
    title: str,
    groups: Sequence[Group],
    tables: Sequence[Table],
    folder: Path,
    *,
    headline: Sequence[str] = (),
    overview: Sequence[tuple[str, bytes]] = (),
    panels: Sequence[Panel] = (),
    ablations: Sequence[tuple[str, bytes]] = (),
    pictures: Sequence[tuple[str, bytes]] = (),
    sources: Sequence[str] = (),
) -> str:
    """The HTML text of the page that will lie in `folder`, from which it links to the runs'
    folders.

    `headline`: the lines at its head; the `OPENING` and the first of the `tables` are below them.
    `panels`: those with finished runs; none of them, none of the curves. `overview` (below
    `OPENING`), `ablations`, `pictures`: captions and PNG files' contents.
    """
    opening = [_cells(table.shown) for table in tables if table.name in OPENING]
    first, *others = [_cells(table.shown) for table in tables if table.name not in OPENING]
    runs, (configs, shared) = (
        [run for group in groups for run in group.runs],
        config_differences(groups),
    )
    template = (HERE / "page.html.j2").read_text(encoding="utf-8")
    curves = plotly = thinned = ""
    if panels:  # as JSON that can stand in a script element, whatever texts are in it
        from plotly.offline import (
            get_plotlyjs,
        )  # here: 0.3 s, which a report without curves does not pay

        plotly, data = get_plotlyjs(), curves_data(panels)
        thinned = _thinned(panels, groups, data["points"])
        curves = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return (
        jinja2.Environment(autoescape=True, trim_blocks=True)
        .from_string(template)
        .render(
            title=title,
            headline=headline,
            opening=opening,
            overview=_embedded(overview),
            first=first,
            costs=[table for table in others if table["name"] in COSTS],
            tables=[table for table in others if table["name"] not in COSTS],
            facts=header_facts(runs),
            configs=_cells(configs.shown),
            shared=shared,
            runs=_cells(runs_table(groups)),
            links=[
                None
                if run.archived
                else f"{quote(Path(os.path.relpath(run.folder, folder)).as_posix())}/"
                for run in runs
            ],
            sources=sources,
            rules=RULES.values(),
            ablations=_embedded(ablations),
            pictures=_embedded(pictures),
            css=(HERE / "page.css").read_text(encoding="utf-8"),
            js=(HERE / "page.js").read_text(encoding="utf-8"),
            plotly=plotly,
            curves=curves,
            thinned=thinned,
        )
    )


def _thinned(panels: Sequence[Panel], groups: Sequence[Group], points: int) -> str:
    """What is left out of the curves, in words."""
    drawn, known = (
        sum(len(panel.lines) for panel in panels),
        sum(bool(group.complete) for group in groups),
    )
    most = max(
        run.rounds.num
        for panel in panels
        for group in panel.lines.values()
        for run in group.complete
    )
    fewer = f"{drawn} of {known} lines: the most accurate of each setting, and what they are compared with."
    return " ".join(
        [f"Each line is thinned to {points} rounds."] * (most > points)
        + [f"Drawn are {fewer}"] * (known > drawn)
    )


def _embedded(pictures: Sequence[tuple[str, bytes]]) -> list[tuple[str, str]]:
    """Captions and base64 of the first PNGs that do not make the page too large."""
    sizes = accumulate(len(png) for _, png in pictures)
    found = [one for one, size in zip(pictures, sizes, strict=True) if size <= PICTURE_BYTES]
    return [(caption, base64.b64encode(png).decode("ascii")) for caption, png in found]


def _cells(table: Table) -> dict[str, Any]:
    """A table for the template: each cell with its text, the number it is sorted by, and its class
    if it has one. No note with rules of verdicts, which end the page."""
    shown = table.rows[:MOST_ROWS]
    sorts = [[_number_in(cell) for cell in row] for row in shown]
    of_text = [all(value is None for value in column) for column in zip(*sorts, strict=True)]
    rows = [
        [
            {
                "text": text,
                "sort": value,
                "bold": is_bold(text),
                "kind": CLASSES.get(text, ("long" if len(text) > LONG else "text") * left),
            }
            for text, value, left in zip(row, values, of_text, strict=True)
        ]
        for row, values in zip(shown, sorts, strict=True)
    ]
    note = "" if any(rule in table.note for rule in RULES.values()) else table.note
    if len(shown) < len(table.rows):
        file = (
            ""
            if table.name in ("configs", "runs", "results")
            else f": {table.name}.csv has all of them"
        )
        note = f"The first {len(shown)} of {len(table.rows)} rows{file}. {note}".strip()
    header = [
        {"text": text or "setting", "left": left}
        for text, left in zip(table.header, of_text, strict=True)
    ]
    return {"name": table.name, "title": table.title, "header": header, "rows": rows, "note": note}


def _number_in(cell: str) -> float | None:
    return cell.value if isinstance(cell, Cell) and not math.isnan(cell.value) else None
