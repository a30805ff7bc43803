"""The table that papers have: final accuracies with a row for each method and a column for each
setting."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from fedsim.report.sections import Material, Section
from fedsim.report.table import HALF_WIDTH, Table, best_places
from fedsim.report.tables import make_table
from fedsim.results.frames import by, by_setting, finished_rows, without_target
from fedsim.results.labels import is_setting
from fedsim.results.statistics import UNIT, Mean, estimate

MAX_PRINTED = 8
"""The table is printed with at most this many settings, unless all tables are."""


def section(material: Material) -> Section:
    """Return the table, if several methods finished in several settings.

    It is printed if it is not wide, and if there is no ablation over a number of the setting, whose
    table is similar. Runs with `stop_at` are left out, because their final accuracies are all near
    their targets.
    """
    table = methods_table(without_target(material.frame), list(material.looks))
    numbers = [name for points in material.ablations for name in points[0].keys]
    is_in_ablation = any(map(is_setting, numbers))
    is_wide = len(table.values.columns) > 1 + MAX_PRINTED
    return Section([table], brief=[] if is_in_ablation or is_wide else [table])


def methods_table(runs: pd.DataFrame, methods: Sequence[str]) -> Table:
    """Return mean final accuracies by method and setting, with the best of each setting in bold.

    `methods` are the rows in order. Diverged runs have no final accuracy; the note counts them. The
    table is empty if fewer than two methods, or runs of fewer than two settings, are finished.
    """
    finished = finished_rows(runs)
    if finished["setting"].nunique() < 2 or finished["method"].nunique() < 2:
        return make_table("methods", [], [], diverged="")
    settings = by_setting(runs)
    columns: dict[str, list[Any]] = {"method": list(methods)}
    best = {}
    diverged = []
    for setting, members in settings.items():
        rows_of_methods = by(members, "method")
        cells: list[Mean | None] = []
        for method in methods:
            if method not in rows_of_methods:
                cells.append(None)
                continue
            rows = rows_of_methods[method]
            accuracies = finished_rows(rows)["final_accuracy"].dropna()
            cells.append(estimate(accuracies.tolist(), UNIT))
            num_diverged = (rows["status"] == "diverged").sum()
            if num_diverged:
                diverged.append(f"{method} in {setting} ({num_diverged} of {len(rows)})")
        columns[setting] = cells
        best[setting] = best_places(cells, [setting] * len(cells))
    note = f" Runs that diverged are left out: {', '.join(diverged)}." if diverged else ""
    lines = list(zip(*columns.values(), strict=True))
    formats = dict.fromkeys(settings, HALF_WIDTH)
    table = make_table("methods", list(columns), lines, formats, runs, diverged=note)
    return replace(table, best=best, num_names=1)
