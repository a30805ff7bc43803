"""The report as one self-contained HTML page: what the runs are, all tables, curves that page.js draws, all figures."""

import base64
import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
import numpy as np
from numpy.typing import NDArray

from fedsim.core.configs import flat
from fedsim.core.record import FINAL_WINDOW
from fedsim.papers.published import RULES, VERDICTS, Publication
from fedsim.report.plot import Look
from fedsim.report.tables import FINAL, LAST
from fedsim.results import measures
from fedsim.results.curves import AXES, SMOOTHED_FROM, accuracy_curve, is_recorded, spent_until, stack_series
from fedsim.results.groups import NEW_GROUPS, Group, Panel, relevant
from fedsim.results.runs import ArchivedRun, Floats, Run
from fedsim.results.table import Cell, Table, number

MOST = 8
"""Values of a fact that are listed; of more, their number is told."""
UNCOMPARED = ("preset", "tracker", "scale")
"""Config groups that change nothing themselves: the values that they set are compared."""


def header_facts(runs: Sequence[Run]) -> dict[str, str]:
    """The facts at the head of the page, as texts by their names; those that no run has are left out."""
    facts = {
        "data set": _choices(runs, "dataset"),
        "partition": _choices(runs, "partition"),
        "model": _choices(runs, "model"),
        "clients (N)": _values(runs, "num_clients"),
        "clients a round (K)": _values(runs, "cohort_size"),
        "rounds": _values(runs, "num_rounds"),
        "seeds": _seeds(runs),
        "runs": f"{len(runs)} ({', '.join(f'{n} {status}' for status, n in Counter(r.status for r in runs).items())})",
        "commit": _listed(sorted({run.commit[:10] for run in runs if run.commit is not None})),
        "environment": "; ".join(sorted({_environment(run) for run in runs} - {""})),
    }
    return {name: text for name, text in facts.items() if text}


def _seeds(runs: Sequence[Run]) -> str:
    found = sorted({run.seeds for run in runs})
    return _listed(found if any(seeds.own for seeds in found) else [seeds.seed for seeds in found])


def _choices(runs: Sequence[Run], group: str) -> str:
    return _listed(list(dict.fromkeys(run.choices[group] for run in runs if group in run.choices)))


def _values(runs: Sequence[Run], key: str) -> str:
    return _listed(
        sorted({run.config[key] for run in runs if key in run.config}, key=lambda value: (str(type(value)), value))
    )


def _listed(values: Sequence[Any]) -> str:
    """The values; consecutive integers as a range."""
    if len(values) > 2 and values == list(range(values[0], values[-1] + 1) if isinstance(values[0], int) else ()):
        return f"{values[0]} to {values[-1]}"
    shown = ", ".join(map(str, values[:MOST]))
    return shown if len(values) <= MOST else f"{shown} and {len(values) - MOST} more"


def _environment(run: Run) -> str:
    return ", ".join(f"{name} {value}" for name, value in run.summary.get("environment", {}).items())


def config_differences(groups: Sequence[Group]) -> Table:
    """How the configs of groups differ: a column for each key of all of them, and one for keys that only some have."""
    configs = [_compared(group.runs[0]) for group in groups]
    everywhere = [key for key in _keys(configs) if all(key in config for config in configs)]
    columns = [key for key in everywhere if len({config[key] for config in configs}) > 1]
    rows = []
    for group, config in zip(groups, configs, strict=True):
        own = ", ".join(f"{key}={value}" for key, value in config.items() if key not in everywhere)
        rows.append([group.name, *(config[key] for key in columns), own])
    return Table("configs", "How the configs differ", ["run", *columns, "keys of its own"], rows)


def shared_config(groups: Sequence[Group]) -> str:
    """The keys and values that all configs have in common, a line each."""
    configs = [_compared(group.runs[0]) for group in groups]
    shared = {key: value for key, value in configs[0].items() if all(config.get(key) == value for config in configs)}
    return "\n".join(f"{key}: {value}" for key, value in shared.items())


def _keys(configs: Sequence[Mapping[str, str]]) -> list[str]:
    return list(dict.fromkeys(key for config in configs for key in config))


def _compared(run: Run) -> dict[str, str]:
    """The choices and values of a run that can change its results; a class is told by the choice that names it."""
    choices = NEW_GROUPS | {group: choice for group, choice in run.choices.items() if group not in UNCOMPARED}
    values = {
        key: number(value) if type(value) in (int, float) else str(value) for key, value in flat(relevant(run.config))
    }
    told = {f"{group.replace('/', '.')}._target_" for group in choices}
    return choices | {key: value for key, value in values.items() if key not in told}


def runs_table(groups: Sequence[Group]) -> Table:
    """Every run: its group, seed, status, accuracies if it reached its last round, and the name of its folder."""
    rows = []
    for group in groups:
        for run in group.runs:
            is_done = run.status == "done"
            both = measures.final_accuracy, measures.last_accuracy
            shown = [number(measure(run) if is_done else None, ".4f") for measure in both]
            rows.append([group.name, Cell(str(run.seeds), run.seed), run.status, *shown, run.folder.name])
    return Table("runs", "Runs", ["run", "seed", "status", FINAL, LAST, "folder"], rows)


def folder_links(groups: Sequence[Group], start: Path) -> list[str | None]:
    """Links from the folder `start` to the runs' folders, in the order of `runs_table`; None for runs of an archive."""
    runs = [run for group in groups for run in group.runs]
    return [
        None if isinstance(run, ArchivedRun) else quote(Path(os.path.relpath(run.folder, start)).as_posix()) + "/"
        for run in runs
    ]


MAX_POINTS = 250
DASHES = {"-": "solid", "--": "dash", ":": "dot", "-.": "dashdot"}
SYMBOLS = {
    **{"o": "circle", "s": "square", "^": "triangle-up", "D": "diamond", "v": "triangle-down"},
    **{"P": "cross", "X": "x", "<": "triangle-left", ">": "triangle-right"},
}
"""plotly's names of matplotlib's dashes and markers."""
VALUES = {
    "smoothed": f"test accuracy, mean of the last {FINAL_WINDOW} rounds",
    "raw": "test accuracy of single rounds",
    "coverage": "share of clients selected so far",
    "participation": "share of clients that upload",
}


def curves_data(panels: Sequence[Panel], looks: Mapping[str, Look]) -> dict[str, Any]:
    """Axes and values with their labels, axes' units, which value the ranges are of, methods' looks, panels' lines."""
    runs = [run for panel in panels for group in panel.lines.values() for run in group.complete]
    axes = {name: axis.label for name, axis in AXES.items() if is_recorded(runs, axis.needs)}
    short = all(run.num_rounds < SMOOTHED_FROM for run in runs)  # then nothing is smoothed
    return {
        "axes": axes,
        "units": {name: AXES[name].unit for name in axes if AXES[name].unit is not None},
        "range_of": "raw" if short else "smoothed",
        "values": {name: label for name, label in VALUES.items() if not (short and name == "smoothed")},
        "looks": {
            name: {"color": look.colour, "dash": DASHES[look.dash], "symbol": SYMBOLS[look.marker]}
            for name, look in looks.items()
        },
        "panels": [
            {"title": panel.title, "lines": [_line(name, group, list(axes)) for name, group in panel.lines.items()]}
            for panel in panels
        ],
    }


def _line(name: str, group: Group, axes: Sequence[str]) -> dict[str, Any]:
    curve = accuracy_curve(group.complete)
    at = curve.rounds - 1
    series = {
        **{axis: spent_until(group.complete, axis)[at] for axis in axes},
        **{"raw": curve.raw, "smoothed": curve.smoothed, "low": curve.low, "high": curve.high},
        "coverage": stack_series(group.complete, "coverage").mean(0)[at],
        "participation": stack_series(group.complete, "participation_ratio").mean(0)[at],
    }
    kept = _kept(len(at))
    return {
        "name": name,
        "seeds": len(group.complete),
        **{key: _rounded(values[kept]) for key, values in series.items()},
    }


def _kept(num_points: int) -> NDArray[np.int64]:
    """Positions of at most `MAX_POINTS` of the points, the first and the last among them."""
    return np.unique(np.linspace(0, num_points - 1, min(num_points, MAX_POINTS)).round().astype(np.int64))


def _rounded(values: Floats) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


LONG = 60
"""Texts of more characters may be broken into lines."""
HERE = Path(__file__).parent / "assets"
CLASSES: Mapping[str, str] = {
    **dict.fromkeys(VERDICTS, "undecided"),
    "reproduced": "reproduced",
    "not reproduced": "not",
}
"""The style of a cell with a verdict."""


@dataclass(frozen=True)
class Picture:
    """A figure as a PNG file's content, and its caption."""

    caption: str
    png: bytes


@dataclass(frozen=True)
class Content:
    """What the page shows. `panels`: those with finished runs; none of them, none of the curves."""

    title: str
    groups: Sequence[Group]
    panels: Sequence[Panel]
    looks: Mapping[str, Look]
    tables: Sequence[Table]
    pictures: Sequence[Picture]
    publications: Sequence[Publication]


def html_page(content: Content, folder: Path) -> str:
    """The HTML text of the page that will lie in `folder`, from which it links to the runs' folders."""
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(HERE), autoescape=True, trim_blocks=True)
    return environment.get_template("page.html.j2").render(
        title=content.title,
        facts=header_facts([run for group in content.groups for run in group.runs]),
        tables=[_cells(table.without_empty_columns()) for table in content.tables],
        configs=_cells(config_differences(content.groups).without_empty_columns()),
        shared=shared_config(content.groups),
        runs=_cells(runs_table(content.groups)),
        links=folder_links(content.groups, folder),
        sources=[f"{p.title}: {p.source}" for p in content.publications],
        rules=RULES.values(),
        pictures=[{"caption": p.caption, "data": base64.b64encode(p.png).decode("ascii")} for p in content.pictures],
        css=(HERE / "page.css").read_text(encoding="utf-8"),
        js=(HERE / "page.js").read_text(encoding="utf-8"),
        plotly=_plotly() if content.panels else "",
        curves=_as_script(curves_data(content.panels, content.looks)) if content.panels else "",
    )


def _cells(table: Table) -> dict[str, Any]:
    """A table for the template: each cell with its text, the number it is sorted by, and its class if it has one."""
    sorts = [[_number_in(cell) for cell in row] for row in table.rows]
    of_text = [all(value is None for value in column) for column in zip(*sorts, strict=True)]
    rows = [
        [
            {"text": text, "sort": value, "kind": CLASSES.get(text, _kind(text) if left else "")}
            for text, value, left in zip(row, values, of_text, strict=True)
        ]
        for row, values in zip(table.rows, sorts, strict=True)
    ]
    header = [{"text": text or "setting", "left": left} for text, left in zip(table.header, of_text, strict=True)]
    return {"name": table.name, "title": table.title, "header": header, "rows": rows, "note": table.note}


def _number_in(cell: str) -> float | None:
    return cell.value if isinstance(cell, Cell) and not math.isnan(cell.value) else None


def _kind(text: str) -> str:
    return "long" if len(text) > LONG else "text"


def _plotly() -> str:
    """The library plotly.js, which draws the curves."""
    from plotly.offline import get_plotlyjs  # 0.3 s, which a report without curves does not pay

    return str(get_plotlyjs())


def _as_script(data: Mapping[str, Any]) -> str:
    """The data as JSON that can stand in a script element, whatever texts are in it."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
