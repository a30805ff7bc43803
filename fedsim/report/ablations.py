"""The tables of ablations (`fedsim.results.ablations`): final accuracy by the values of one or two
numbers."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pandas as pd

from fedsim.core.configs import short_names
from fedsim.report.sections import Material, Section
from fedsim.report.table import MISSING, Bold, Table, make_frame, show_result
from fedsim.results.ablations import Point, axis, file_name
from fedsim.results.frames import by, selector_of
from fedsim.results.statistics import MIN_SEEDS

NOTE = (
    "mean [95 % interval] over the seeds that are done (Student's t). "
    "Bold: the best of a line or map. "
    f"≈: not told apart from it at equal seeds, {MIN_SEEDS} at least "
    "(paired t-tests, Holm's correction)."
)


def section(material: Material) -> Section:
    """Return the section with a table and a figure for each ablation."""
    ablations = material.ablations
    spread = material.presentation.spread
    tables = [ablation_table(points, spread) for points in ablations]
    plots = partial(_plots, ablations, material.frame)
    return Section(tables, brief=tables, plots=plots, place="ablations")


def _plots(ablations: Sequence[Sequence[Point]], runs: pd.DataFrame) -> list[Any]:
    """Return a figure for each ablation. `runs` is the frame of all runs."""
    from fedsim.report.ablation_figures import ablation_plots  # here: it imports matplotlib

    selectors = {}
    for group, rows in by(runs, "group").items():
        selectors[group] = selector_of(rows) or group
    return ablation_plots(ablations, selectors)


def ablation_table(points: Sequence[Point], spread: str = "interval") -> Table:
    """Return the table of an ablation: final accuracies, with a column for each value of the last
    number.

    On a line, the table has a row for each setting and method. In a map, it has a row for each of
    these and each value of the first number. `spread` is as in `Table`.
    """
    keys = points[0].keys
    *row_names, column_name = short_names(keys).values()
    column_values = axis(points, -1)
    titles = [f"{column_name}={value:g}" for value in column_values]
    cells: dict[tuple[Any, ...], list[Any]] = {}
    for point in points:
        *row_values, column_value = point.values
        row_key = point.setting, point.method, *row_values
        row_cells = cells.setdefault(row_key, [None] * len(titles))
        # A table takes the first of these, the mean, for the number of the cell.
        row_cells[column_values.index(column_value)] = point.accuracy.mean, point
    rows = [[*row_key, *row_cells] for row_key, row_cells in cells.items()]
    frame = make_frame(["", "run", *row_names, *titles], rows)
    show_cell = partial(_show_point, spread=spread)
    formats: dict[str, Any] = {**dict.fromkeys(row_names, "g"), **dict.fromkeys(titles, show_cell)}
    title = f"Final accuracy by {' and '.join(keys)}"
    return Table(file_name(points), title, frame, formats, NOTE)


def _show_point(cell: tuple[float, Point] | None, spread: str) -> str:
    """Return the text of a cell. A combination of values without runs has no point."""
    if cell is None:
        return MISSING
    _, point = cell
    text = show_result(point.accuracy, spread)
    if point.num_diverged:
        text += f" ({point.num_diverged} diverged)"
    if point.is_level:
        text += " ≈"
    return Bold(text) if point.is_best else text
