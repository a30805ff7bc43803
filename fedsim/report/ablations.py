"""The tables of ablations (`fedsim.results.ablations`): final accuracy by the values of one or two
numbers."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pandas as pd

from fedsim.core.configs import short_names
from fedsim.report.sections import Material, Section
from fedsim.report.table import Bold, Table, make_frame, show_result
from fedsim.results.ablations import Point, axis, file_name
from fedsim.results.frames import by, selector_of
from fedsim.results.statistics import MIN_SEEDS

NOTE = (
    "mean [95 % interval] over the seeds that are done (Student's t). Bold: the best of a line or "
    "map. "
    "≈: not told apart from it at equal seeds, "
    f"{MIN_SEEDS} at least (paired t-tests, Holm's correction)."
)


def section(material: Material) -> Section:
    """Return a table for each ablation."""
    ablations = material.ablations
    spread = material.presentation.spread
    tables = [ablation_table(points, spread) for points in ablations]
    plots = partial(_plots, ablations, material.frame)
    return Section(tables, tables, plots=plots, place="ablations")


def _plots(ablations: Sequence[Sequence[Point]], runs: pd.DataFrame) -> list[Any]:
    from fedsim.report.ablation_figures import ablation_plots  # here: it imports matplotlib

    selectors = {group: selector_of(rows) or group for group, rows in by(runs, "group").items()}
    return ablation_plots(ablations, selectors)


def ablation_table(points: Sequence[Point], spread: str = "interval") -> Table:
    """Return a table with a column for each value of the last number.

    It has a row for each line, or in a map a row for each value of the first number. `spread` is as
    in `Table`.
    """
    keys = points[0].keys
    columns = axis(points, -1)
    rows: dict[tuple[Any, ...], list[Any]] = {}
    for point in points:
        row_key = point.setting, point.method, *point.values[:-1]
        row = rows.setdefault(row_key, [None] * len(columns))
        row[columns.index(point.values[-1])] = point.accuracy.mean, point
    names = list(short_names(keys).values())
    titles = [f"{names[-1]}={value:g}" for value in columns]
    frame = make_frame(
        ["", "run", *names[:-1], *titles], [[*key, *row] for key, row in rows.items()]
    )
    show_cell = partial(_show_point, spread=spread)
    formats = {**dict.fromkeys(names, "g"), **dict.fromkeys(titles, show_cell)}
    title = f"Final accuracy by {' and '.join(keys)}"
    return Table(file_name(points), title, frame, formats, NOTE)


def _show_point(cell: tuple[float, Point] | None, spread: str) -> str:
    if cell is None:
        return "-"
    _, point = cell
    text = show_result(point.accuracy, spread)
    if point.num_diverged:
        text += f" ({point.num_diverged} diverged)"
    text += " ≈" * point.is_level
    return Bold(text) if point.is_best else text
