"""The tables of a report that compare methods within a setting: results, paired differences,
costs, times.

Many of them have a row for each group (runs that differ in seeds alone), and columns that are
measures of runs, aggregated over seeds: `COLUMNS` and `BY_GROUP`. The other tables compare methods
with the reference of their setting (`fedsim.report.contrasts`). Titles and notes are in
assets/tables.yaml.
"""

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import yaml

from fedsim.core.arrays import Floats
from fedsim.core.configs import SYMBOLS, YAML_LOADER, leaves, short_names
from fedsim.core.record import CLIENT_ACCURACY, CLIENT_ACCURACY_MEASURES, PHASES
from fedsim.report.contrasts import (
    choose_reference,
    preferences,
    to_references,
)
from fedsim.report.sections import ASSETS, Material, Section
from fedsim.report.table import (
    MISSING,
    Format,
    Table,
    best_places,
    make_frame,
    median_reached,
    show_interval,
    show_p,
    show_reached,
)
from fedsim.results.frames import (
    by,
    by_setting,
    by_target,
    finished_rows,
    first_run,
    measured,
    without_target,
)
from fedsim.results.grouping import compared_config
from fedsim.results.labels import is_setting, is_value, show_labels
from fedsim.results.measures import (
    BYTES,
    PHASE_SECONDS,
    SAMPLES,
    SIMULATED,
    cut,
    total_cost,
)
from fedsim.results.ranking import EQUAL, WHOLE, seen_by_server
from fedsim.results.statistics import (
    UNIT,
    Difference,
    corrected_alike,
    estimate,
    half_width_in_sd,
    paired,
    pooled,
    sign_flip_test,
)
from fedsim.tracking.tables import show_bytes, show_seconds

LEVEL_MARGIN = 0.02
"""Methods whose final accuracies differ by less are called level with each other."""
MORE = 0.02
"""The second target of `costs_table` is the final accuracy of random selection plus this."""
NUMBERS = {
    "margin": LEVEL_MARGIN,
    "equal": EQUAL,
    "more": MORE,
    "whole": WHOLE,
    "three": half_width_in_sd(3),
    "five": half_width_in_sd(5),
    "ten": half_width_in_sd(10),
}
"""Numbers that the notes below tables name. `three`, `five`, `ten` are half widths of intervals at
so many seeds, in standard deviations."""
TEXTS = yaml.load((ASSETS / "tables.yaml").read_text(encoding="utf-8"), YAML_LOADER)
FINAL = "final accuracy"
"""Column of the mean of the last rounds, by which everything is compared. Its head also has the
number of rounds (`final_head`)."""
LAST = "last accuracy"
"""Column of the accuracy of the last evaluated round alone."""
ENDED = "ended after"
"""Column of the mean number of rounds of runs with `stop_at`. The lowest value is the best."""


def final_head(runs: pd.DataFrame) -> str:
    """Return the head of the column `FINAL`. All runs of a report have the same window."""
    return f"{FINAL} (last {first_run(runs).final_window})"


def make_table(
    name: str,
    header: Sequence[str],
    rows: Sequence[Sequence[Any]],
    formats: Mapping[str, Format] | None = None,
    runs: pd.DataFrame | None = None,
    **numbers: str,
) -> Table:
    """Return a table with the title and note of assets/tables.yaml.

    If a group of `runs` has several seeds, the title says how these are summarised. `NUMBERS` and
    `numbers` are filled into the note.
    """
    texts = TEXTS[name]
    title, note = texts["title"], texts.get("note", "")
    if runs is not None and max(map(len, by(finished_rows(runs), "group").values()), default=0) > 1:
        title = f"{title}: {texts['over_seeds']}"
    values: dict[str, Any] = {**NUMBERS, **numbers}
    meanings = {
        columns: text.format(**values) for columns, text in texts.get("columns", {}).items()
    }
    frame = make_frame(header, rows)
    return Table(name, title, frame, formats or {}, note.format(**values), meanings)


ACCURACY, REACHED = "accuracy", "reached"
"""Two ways to show a measure over seeds, besides the formats of numbers: the mean with its
interval, and the median of the rounds in which runs first reach something."""


def _total(names: Sequence[str]) -> str:
    """Return the name of the measure that sums quantities over a run."""
    return f"total:{','.join(names)}"


COLUMNS: Mapping[str, tuple[str, Format]] = {
    FINAL: ("final_accuracy", ACCURACY),
    LAST: ("last_accuracy", ACCURACY),
    "15 %": ("accuracy@0.15", ACCURACY),
    "around 15 %": ("accuracy_around@0.15", ACCURACY),
    "50 %": ("accuracy@0.5", ACCURACY),
    "around 50 %": ("accuracy_around@0.5", ACCURACY),
    "fluct.": ("fluctuation", ".3f"),
    "part.": ("participation", ".3f"),
    "covered after": ("rounds_to_cover", REACHED),
    "never": ("never_selected", ".3g"),
    "min": ("fewest_selections", ".3g"),
    "median": ("median_selections", ".3g"),
    "max": ("most_selections", ".3g"),
    "Gini": ("selection_gini", ".3f"),
    "clients never selected": ("never_selected", ".3g"),
    "rounds": ("num_rounds", ".0f"),
    ENDED: ("ended_after", ".4g"),
    "start-up rounds": ("start_up_rounds", ".0f"),
    "down": ("bytes_down", show_bytes),
    "up": ("bytes_up", show_bytes),
    "samples": (_total(SAMPLES), ",.0f"),
    "start-up bytes": (f"start_up:{','.join(BYTES)}", show_bytes),
    "start-up time": (f"start_up:{','.join(PHASE_SECONDS)}", show_seconds),
    "bytes a round": (f"a_round:{','.join(BYTES)}", show_bytes),
    "time a round": (f"a_round:{','.join(PHASE_SECONDS)}", show_seconds),
    "simulated a round": ("a_round:simulated_seconds", show_seconds),
    "time": (_total(PHASE_SECONDS), show_seconds),
    "longest select": ("longest_selection", show_seconds),
    "simulated": ("total:simulated_seconds", show_seconds),
    "simulated ask": ("total:simulated_seconds_ask", show_seconds),
    "simulated train": ("total:simulated_seconds_train", show_seconds),
    "late a round": ("late_a_round", ".2f"),
}
"""Columns of tables with a row for each group: the name of a measure, and how its values are shown.

Any format except `ACCURACY` and `REACHED` shows the mean over seeds, if all runs have the measure.
"""
PHASE_COLUMNS: Mapping[str, tuple[str, Format]] = {
    phase: (f"total:seconds_{phase}", show_seconds) for phase in PHASES
}
"""The columns with the seconds of each phase of a round, by their heads."""
CLIENT_COLUMNS = {
    name.replace("_", " "): (f"{CLIENT_ACCURACY}_{name}", ACCURACY)
    for name in CLIENT_ACCURACY_MEASURES
}
"""The columns with aggregates of the clients' accuracies, by their heads."""
ALL_COLUMNS: Mapping[str, tuple[str, Format]] = {**COLUMNS, **PHASE_COLUMNS, **CLIENT_COLUMNS}
SEEDS_COLUMN, MEASURED_ON, SERVER_SEES = "seeds", "measured on", "server sees"
"""Columns that are no measures: how many runs finished and diverged, which samples the clients'
accuracies are of, and what the server must see of single clients."""
TITLES = {"run", SEEDS_COLUMN, MEASURED_ON, SERVER_SEES, *ALL_COLUMNS}
"""The titles of all columns except those of config values."""
BY_GROUP: Mapping[str, Sequence[str]] = {
    "results": [SEEDS_COLUMN, FINAL, ENDED, "part.", "time", "simulated", "down", "up"],
    "overview": [
        SEEDS_COLUMN,
        FINAL,
        LAST,
        "fluct.",
        "covered after",
        "Gini",
        "part.",
        "down",
        "up",
    ],
    "checkpoints": [SEEDS_COLUMN, "15 %", "around 15 %", "50 %", "around 50 %", FINAL, LAST],
    "selections": ["covered after", "never", "min", "median", "max", "Gini"],
    "clients": [SEEDS_COLUMN, MEASURED_ON, *CLIENT_COLUMNS, "clients never selected"],
    "costs": [
        SERVER_SEES,
        "rounds",
        "start-up rounds",
        "time",
        "simulated",
        "down",
        "up",
        "samples",
        "start-up bytes",
        "start-up time",
        "bytes a round",
        "time a round",
        "simulated a round",
    ],
    "times": [
        "rounds",
        "time",
        *PHASE_COLUMNS,
        "longest select",
        "simulated",
        "simulated ask",
        "simulated train",
        "late a round",
    ],
}
"""The columns of each table that has a row for each group."""


BEST = [title for title, (_, form) in COLUMNS.items() if form == ACCURACY]
"""The columns in which the highest value is the best."""


def section(material: Material) -> Section:
    """Return the tables within settings."""
    runs = material.frame
    finished = runs[runs["group"].isin(finished_rows(runs)["group"])]
    has_clients = [bool(run.config.get(CLIENT_ACCURACY)) for run in finished["run"]]
    comparable = without_target(runs)
    tables = [
        by_group("overview", runs),
        by_group("checkpoints", runs),
        pairs(comparable),
        pooled_pairs(comparable),
        budgets(comparable),
        by_group("selections", finished),
        imperfect(runs),
        by_group("clients", finished.loc[has_clients]),
        by_group("costs", finished),
        by_group("times", finished),
    ]
    brief = [by_group("results", runs), *(table for table in tables if table.name == "budgets")]
    return Section(tables, brief, plots=lambda: _plots(material))


def _plots(material: Material) -> list[Any]:
    from fedsim.report.figures import all_plots  # here: it imports matplotlib

    log_x = material.presentation.log_x
    shown_runs = material.shown
    return all_plots(shown_runs, material.shown_looks, log_x) if len(shown_runs) else []


def by_group(name: str, runs: pd.DataFrame) -> Table:
    """Return the table of `BY_GROUP` with this name.

    It has a row for each group of `runs`. Measures are those of finished runs.
    """
    groups = by(runs, "group")
    finished = finished_rows(runs)
    # Measures are computed for all finished runs at once, and split by group.
    places = [np.flatnonzero(finished["group"] == group) for group in groups]
    cells: dict[str, list[Any]] = name_columns(groups)
    num_names = max(len(cells), 2)
    formats: dict[str, Format] = {SEEDS_COLUMN: _show_seeds}
    races = _races(groups)
    # Final accuracies of runs that end at a target are all near it. They are not compared.
    compared = [setting if target is None else None for setting, target in races]
    best: dict[str, list[int]] = {}
    for title in BY_GROUP[name]:
        if title == SEEDS_COLUMN:
            diverged = [int((rows["status"] == "diverged").sum()) for rows in groups.values()]
            cells[title] = list(zip(map(len, places), diverged, strict=True))
            continue
        if title == MEASURED_ON:
            cells[title] = [
                str(first_run(rows).config[CLIENT_ACCURACY]) for rows in groups.values()
            ]
            continue
        if title == SERVER_SEES:
            cells[title] = [seen_by_server(first_run(rows)) for rows in groups.values()]
            continue
        measure, form = ALL_COLUMNS[title]
        values = measured(finished, measure).to_numpy()
        head = final_head(runs) if title == FINAL else title
        cells[head] = [_aggregate(values[place], form) for place in places]
        if name == "checkpoints" and form == ACCURACY:
            # A run that `stop_at` ended may not have the round of a checkpoint. A mean over the
            # other seeds would be one of the slower runs.
            for number, place in enumerate(places):
                if np.isnan(values[place]).any():
                    cells[head][number] = MISSING
        if form != ACCURACY:
            formats[head] = show_reached if form == REACHED else form
        if title in BEST:
            best[head] = best_places(cells[head], compared)
        elif title == ENDED:
            best[head] = best_places(cells[head], races, lowest=True)
    rows = list(zip(*cells.values(), strict=True))
    table = make_table(name, list(cells), rows, formats, runs)
    return replace(table, best=best, num_names=num_names)


def _races(groups: Mapping[str, pd.DataFrame]) -> list[tuple[str, float | None]]:
    """Return the setting of each group, and the accuracy at which its runs end, if they do."""
    races = []
    for rows in groups.values():
        (target,) = by_target(rows)  # the runs of a group have the same config, and so one target
        races.append((rows["setting"].iloc[0], target))
    return races


def name_columns(groups: Mapping[str, pd.DataFrame]) -> dict[str, list[Any]]:
    """Return the columns that name the groups.

    Several config values that tell groups apart have a column each, and are cut out of the names.
    The title of such a column is the short name of the key, or the whole key if another column has
    that title.
    """
    labels = [rows["labels"].iloc[0] for rows in groups.values()]
    heads = short_names(key for label in labels for key in label if is_value(key))
    if len(heads) < 2:
        return {"run": list(groups)}
    names = []
    for group, label in zip(groups, labels, strict=True):
        name = group
        for key in heads.keys() & label.keys():
            name = _without_value(name, key, label[key])
        names.append(name.strip())
    columns = {}
    for key, head in heads.items():
        if head in TITLES:
            head = SYMBOLS.get(key, key)
        columns[head] = [_value_of(key, rows) for rows in groups.values()]
    return {"run": names, **columns}


def _value_of(key: str, rows: pd.DataFrame) -> str:
    """Return the value of a config key in a group of runs: that of its label, or of its config if
    the key is no part of its name."""
    labels = rows["labels"].iloc[0]
    if key in labels:
        return str(labels[key])
    config = dict(leaves(first_run(rows).config))
    return str(config[key]) if key in config else MISSING


def _without_value(name: str, key: str, value: str) -> str:
    """Return the name of a group without the word KEY=VALUE, in which the key may be longer or
    shorter by the config groups in front of it."""
    last_part = SYMBOLS.get(key, key).rpartition(".")[2]
    word = re.escape(f"{last_part}={value}")
    return re.sub(rf"(^|(?<= ))[\w./]*{word}( |$)", "", name)


def _show_seeds(counts: tuple[int, int]) -> str:
    """Return the numbers of finished and of diverged runs as text."""
    num_done, num_diverged = counts
    return f"{num_done}, {num_diverged} diverged" if num_diverged else str(num_done)


def _aggregate(values: Floats, form: Format) -> Any:
    """Return a measure over seeds: an estimate, a median, or the mean if all runs have it."""
    if form == ACCURACY:
        return estimate(values[~np.isnan(values)].tolist(), UNIT)
    if form == REACHED:
        return median_reached(values.tolist())
    is_known = len(values) > 0 and not np.isnan(values).any()
    return float(np.mean(values)) if is_known else MISSING


SIGN_FLIPS = "p (sign flips)"
"""The one of `P_COLUMNS` that the table `pooled` does not have."""
P_COLUMNS: Mapping[str, Format] = {
    "mean": "+.4f",
    "95 % interval": show_interval,
    "p": show_p,
    SIGN_FLIPS: show_p,
    "interval (Holm)": show_interval,
    "p (Holm)": show_p,
    "level": show_p,
    "pairs": "",
    "detectable": ".4f",
}


"""Columns of tables of differences, with the formats of their cells (`_difference_cells`)."""


def _difference_cells(
    difference: Difference, p_holm: float, corrected: tuple[float, float]
) -> dict[str, Any]:
    """Return the cells of a difference by their heads (`P_COLUMNS`), without the sign-flip test.

    `p_holm` and `corrected` are its p-value and interval, corrected by Holm's method.
    """
    return {
        "mean": difference.mean,
        "95 % interval": difference.interval,
        "p": difference.p_value,
        "interval (Holm)": corrected,
        "p (Holm)": p_holm,
        "level": difference.p_equivalent(LEVEL_MARGIN),
        "pairs": difference.num,
        "detectable": difference.detectable,
    }


def pairs(runs: pd.DataFrame) -> Table:
    """Return final accuracy of each method minus that of its reference, paired by seed."""
    contrasts = to_references(runs)
    rows = []
    for contrast in contrasts:
        cells: dict[str, Any] = {"mean": MISSING}
        difference = contrast.difference
        if difference is not None:
            cells = _difference_cells(difference, contrast.p_holm, contrast.corrected)
            cells[SIGN_FLIPS] = sign_flip_test(difference.values)
        title = f"{contrast.method} - {contrast.reference}"
        rows.append([contrast.setting, title, *(cells.get(head, "") for head in P_COLUMNS)])
    if all(contrast.difference is None for contrast in contrasts):
        rows = []  # nothing to pair, as with one seed
    header = ["", "difference of final accuracy", *P_COLUMNS]
    return make_table("pairs", header, rows, P_COLUMNS)


def pooled_pairs(runs: pd.DataFrame) -> Table:
    """Return differences to the reference, averaged over divisions of the data at each seed.

    Settings that differ only in how data are divided among clients are pooled. Methods that are
    missing in one of them are skipped.
    """
    # Pools of settings that have the same key; each setting has its runs by method.
    pools: dict[Hashable, list[Mapping[str, pd.DataFrame]]] = {}
    titles: dict[Hashable, list[str]] = {}
    for rows in by_setting(runs).values():
        key = _besides_partition(rows)
        pools.setdefault(key, []).append(by(rows, "method"))
        titles.setdefault(key, []).append(show_labels(_labels_of_pool(rows)))
    compared = []
    for key, settings in pools.items():
        title = ", ".join(dict.fromkeys(titles[key]))
        if len(settings) > 1:
            compared += [(title, *pooled_line) for pooled_line in _pooled_lines(settings)]
    corrected = corrected_alike([difference for *_, difference in compared])
    columns = [head for head in P_COLUMNS if head != SIGN_FLIPS]
    table_rows = []
    for (title, name, difference), (p_holm, interval) in zip(compared, corrected, strict=True):
        cells = _difference_cells(difference, p_holm, interval)
        table_rows.append([title, name, difference.strata, *(cells[head] for head in columns)])
    header = ["", "difference of final accuracy", "settings", *columns]
    return make_table("pooled", header, table_rows, P_COLUMNS)


def _labels_of_pool(rows: pd.DataFrame) -> dict[str, str]:
    """Return the labels of a setting, without those of the partition, by key."""
    labels = {}
    for key, text in rows["labels"].iloc[0].items():
        if is_setting(key) and key.partition(".")[0] != "partition":
            labels[key] = text
    return labels


def _besides_partition(rows: pd.DataFrame) -> Hashable:
    """Return what defines a setting, except how the data are divided among clients.

    These are its labels. The label `cell` may stand for any value of the config. If there is one,
    it is replaced by all config values, except those of the partition and the method.
    """
    values = _labels_of_pool(rows)
    if values.pop("cell", None) is None:
        return frozenset(values.items())
    for key, value in leaves(compared_config(first_run(rows))):
        if key.partition(".")[0] not in ("partition", "selector", "server"):
            values[key] = str(value)
    return frozenset(values.items())


def _pooled_lines(
    settings: Sequence[Mapping[str, pd.DataFrame]],
) -> list[tuple[str, Difference]]:
    """Return pooled differences with their names ("method - reference").

    A method is skipped if a setting does not have it, if it has different references in the
    settings, or if it is a reference itself.
    """
    lines = []
    for method in settings[0]:
        if not all(method in setting for setting in settings):
            continue
        references = []
        strata = []
        for setting in settings:
            reference = choose_reference(setting, method)
            references.append(reference)
            accuracies = setting[method]["final_accuracy"]
            strata.append(paired(accuracies, setting[reference]["final_accuracy"]))
        difference = pooled(strata)
        has_one_reference = len(set(references)) == 1 and method not in references
        if has_one_reference and difference is not None:
            lines.append((f"{method} - {references[0]}", difference))
    return lines


def imperfect(runs: pd.DataFrame) -> Table:
    """Return how often each method chose imperfect clients."""
    formats: dict[str, Format] = {
        "seeds": "",
        "of the clients": ".3f",
        "of the choices": "",
        "times as often": ".2f",
        "p": show_p,
        "p (Holm)": show_p,
    }
    rows = []
    for setting, method, chosen_share, client_share, p_value, p_holm in preferences(runs):
        times_as_often = chosen_share.mean / client_share
        shares = [chosen_share.num, client_share, chosen_share, times_as_often]
        rows.append([setting, method, *shares, p_value, p_holm])
    return make_table("imperfect", ["", "run", *formats], rows, formats, runs)


BUDGETS: Mapping[Sequence[str], tuple[str, Format]] = {
    BYTES: ("bytes", show_bytes),
    SIMULATED: ("simulated time", show_seconds),
}
"""Quantities whose sums are budgets at which methods are compared, with their names."""
SAME = 1.001
"""Costs that differ by a smaller factor are equal."""


def budgets(runs: pd.DataFrame) -> Table:
    """Return final accuracy at equal rounds, and the one at equal bytes and simulated time.

    The budget is what the cheapest finished run of a setting spends. Costs that are equal for all
    runs of a setting, or not recorded, have no cells. The table is empty if all are.
    """
    formats: dict[str, Format] = {"all rounds": ""}
    for name, show_cost in BUDGETS.values():
        formats.update({f"at equal {name}": "", name: show_cost, f"rounds ({name})": ".4g"})
    rows = []
    has_unequal_costs = False
    for setting, members in by_setting(finished_rows(runs)).items():
        costs_of_runs = {}
        for names in BUDGETS:
            costs_of_runs[names] = [total_cost(run, names) for run in members["run"]]
        for method, line in by(members, "method").items():
            row: list[Any] = [setting, method, _aggregate(line["final_accuracy"], ACCURACY)]
            for names, costs in costs_of_runs.items():
                budget = float(np.min(costs))
                if max(costs) > SAME * budget:
                    has_unequal_costs = True
                    row += _at_budget(line, budget, names)
                else:
                    row += [MISSING] * 3
            rows.append(row)
    header = ["", "run", *formats]
    return make_table("budgets", header, rows if has_unequal_costs else [], formats, runs)


def _at_budget(rows: pd.DataFrame, budget: float, names: Sequence[str]) -> list[Any]:
    """Return three cells: what the final accuracy of a method would be within a `budget` of some
    quantities, the budget, and the mean number of rounds within it."""
    accuracies = []
    nums_of_rounds = []
    for run in rows["run"]:
        accuracy, num_rounds = cut(run, budget, names)
        accuracies.append(accuracy)
        nums_of_rounds.append(num_rounds)
    mean_rounds = float(np.mean(nums_of_rounds, dtype=np.float64))
    return [_aggregate(np.array(accuracies), ACCURACY), budget, mean_rounds]
