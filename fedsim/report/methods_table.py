"""The table that papers have: final accuracies with a row for each method and a column for each
setting, or the other way round."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from fedsim.report.sections import Material, Section
from fedsim.report.table import HALF_WIDTH, Table, best_places
from fedsim.report.tables import make_table
from fedsim.results.frames import by, by_setting, finished_rows, without_target
from fedsim.results.labels import is_setting
from fedsim.results.statistics import UNIT, Mean, estimate

MAX_PRINTED = 8
"""The table is printed if it has at most this many columns of accuracies, unless all tables are."""


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

    `methods` are in order. They are the rows, unless there are more settings than methods. Diverged
    runs have no final accuracy; the note counts them. The table is empty if fewer than two methods,
    or runs of fewer than two settings, are finished.
    """
    finished = finished_rows(runs)
    if finished["setting"].nunique() < 2 or finished["method"].nunique() < 2:
        return make_table("methods", [], [], diverged="")
    means = pd.DataFrame(index=pd.Index(methods, name="method"), dtype=object)
    is_best = pd.DataFrame(False, index=means.index, columns=[])
    diverged = []
    for setting, members in by_setting(runs).items():
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
        means[setting] = pd.Series(cells, means.index, dtype=object)
        best_rows = best_places(cells, [setting] * len(cells))
        is_best[setting] = np.isin(np.arange(len(cells)), best_rows)
    if len(means.columns) > len(methods):
        means = means.rename_axis(columns="setting").T
        is_best = is_best.T
    lines = means.reset_index()
    formats = dict.fromkeys(means, HALF_WIDTH)
    best = {name: np.flatnonzero(is_best[name]).tolist() for name in means}
    note = f" Runs that diverged are left out: {', '.join(diverged)}." if diverged else ""
    table = make_table(
        "methods", list(lines), lines.to_numpy().tolist(), formats, runs, diverged=note
    )
    return replace(table, best=best, num_names=1)
