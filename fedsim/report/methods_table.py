"""The table that papers have: final accuracies with a row for each method and a column for each
setting."""

from dataclasses import replace
from typing import Any

import pandas as pd

from fedsim.report.sections import Material, Section
from fedsim.report.table import HALF_WIDTH, Table, best_places
from fedsim.report.tables import make_table
from fedsim.results.frames import by, by_setting, finished_rows, without_target
from fedsim.results.labels import is_setting
from fedsim.results.statistics import UNIT, Mean, estimate


def section(material: Material) -> Section:
    """Return the table, if several methods ran in several settings.

    It is printed unless the table of an ablation already has a column for each setting.
    """
    table = methods_table(without_target(material.frame))
    names = [name for points in material.ablations for name in points[0].keys]
    has_columns_of_settings = any(map(is_setting, names))
    return Section([table], brief=[] if has_columns_of_settings else [table])


def methods_table(runs: pd.DataFrame) -> Table:
    """Return mean final accuracies by method and setting, with the best of each setting in bold.

    The table is empty with fewer than two methods or settings. A cell is empty if no run of the
    method is finished in the setting. Diverged runs have no final accuracy; the note counts them.
    """
    settings = by_setting(runs)
    methods = list(by(runs, "method"))
    if len(settings) < 2 or len(methods) < 2:
        return make_table("methods", [], [], diverged="")
    columns: dict[str, list[Any]] = {"method": methods}
    best = {}
    diverged = []
    for setting, members in settings.items():
        rows_of_methods = by(members, "method")
        cells: list[Mean | None] = []
        for method in methods:
            rows = rows_of_methods.get(method, members[:0])
            accuracies = finished_rows(rows)["final_accuracy"].dropna()
            cells.append(estimate(accuracies.tolist(), UNIT))
            num_diverged = (rows["status"] == "diverged").sum()
            if num_diverged:
                diverged.append(f"{method} in {setting} ({num_diverged} of {len(rows)})")
        columns[setting] = cells
        best[setting] = best_places(cells, [setting] * len(cells))
    note = f" Runs that diverged are left out: {', '.join(diverged)}." if diverged else ""
    rows = list(zip(*columns.values(), strict=True))
    formats = dict.fromkeys(settings, HALF_WIDTH)
    table = make_table("methods", list(columns), rows, formats, runs, diverged=note)
    return replace(table, best=best, num_names=1)
