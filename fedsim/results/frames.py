"""Finished runs as a data frame with a row for each run.

A group is the set of runs that differ in their seeds alone. Its labels are the choices of config
groups and the config values that distinguish it from the other groups. The labels about data,
model and clients name its setting, the other labels its method. Methods are compared within a
setting, at equal seeds: the index holds the seeds as text, so that subtracting the columns of two
methods pairs them. Columns:

- `run`: the `Run` itself, for its arrays.
- `status`: `done` if the run reached its last round, `reached` if it ended at `stop_at`.
- `group`: the name of the group.
- `labels`: the labels of the group by key, {} if there is only one group.
- `setting` and `method`: their labels as text.
- `choice.<config group>` and `config.<dotted key>`: choices, and values that can change results.
- `OVERVIEW`: measures, nan for runs that are not done.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from fedsim.core.configs import leaves
from fedsim.core.text import printable
from fedsim.results.grouping import compared_config, distinct, groups_of
from fedsim.results.labels import (
    is_setting,
    make_labels,
    show_labels,
    sort_key,
    split_labels,
)
from fedsim.results.measures import find_measure
from fedsim.results.reading import FINISHED
from fedsim.results.runs import Run

OVERVIEW = (
    "final_accuracy",
    "last_accuracy",
    "fluctuation",
    "rounds_to_cover",
    "selection_gini",
    "participation",
    "bytes_down",
    "bytes_up",
)
"""Measures that are columns of the frame."""


def runs_frame(runs: Iterable[Run]) -> pd.DataFrame:
    """Return the frame of the `distinct` runs.

    Rows are sorted by group and seeds, and groups by their labels: numbers by value, random
    selection first.
    """
    # 1. Groups in the order of their labels. All groups have labels in the same order of keys.
    groups = groups_of(distinct(runs))
    all_labels = make_labels([members[0] for members in groups])
    order = sorted(range(len(groups)), key=lambda at: [*map(sort_key, all_labels[at].values())])
    # 2. A row for each run. If no label is about the method, the labels name methods, not settings,
    #    so that there is something to compare. Data sets are always settings.
    keys = {key for labels in all_labels for key in labels}
    has_datasets = any(key.partition(".")[0] == "dataset" for key in keys)
    is_one_method = all(map(is_setting, keys)) and not has_datasets
    rows = []
    for at in order:
        labels = all_labels[at]
        members = sorted(groups[at], key=lambda run: run.seeds)
        selector = printable(members[0].choices.get("selector", "run"))
        name = show_labels(labels) or selector
        setting, method = ("", name) if is_one_method else split_labels(labels)
        method = method or selector
        for run in members:
            rows.append((str(run.seeds), run, run.status, name, labels, setting, method))
    columns = ["seeds", "run", "status", "group", "labels", "setting", "method"]
    frame = pd.DataFrame(rows, columns=columns)
    # 3. Choices, config values and measures as further columns.
    choices = pd.DataFrame([run.choices for run in frame["run"]], dtype=object)
    configs = pd.DataFrame(
        [dict(leaves(compared_config(run))) for run in frame["run"]], dtype=object
    )
    measures = pd.DataFrame({name: measured(frame, name) for name in OVERVIEW})
    parts = [frame, choices.add_prefix("choice."), configs.add_prefix("config."), measures]
    return pd.concat(parts, axis=1).set_index("seeds")


def measured(rows: pd.DataFrame, name: str) -> pd.Series:
    """Return a measure of each run (`fedsim.results.measures`); nan for runs that are not done."""
    if name in rows:  # the measures in OVERVIEW are columns
        return rows[name]
    measure = find_measure(name)
    values = [
        measure(run) if status in FINISHED else float("nan")
        for run, status in zip(rows["run"], rows["status"], strict=True)
    ]
    return pd.Series(values, rows.index, "float64", name)


def by(rows: pd.DataFrame, column: str) -> dict[str, pd.DataFrame]:
    """Return the rows by the values of a column such as `group` or `method`, in the order in which
    the values first occur."""
    return dict(iter(rows.groupby(column, sort=False)))


def by_setting(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the rows by setting, sorted: numbers by value."""
    settings = by(rows, "setting")
    return {setting: settings[setting] for setting in sorted(settings, key=sort_key)}


def done(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of runs that reached their last round, or the accuracy `stop_at`."""
    return rows[rows["status"].isin(FINISHED)]


def first_run(rows: pd.DataFrame) -> Run:
    """Return the run of a group with the lowest seeds. Rows are sorted by seeds."""
    return rows["run"].iloc[0]


def by_target(rows: pd.DataFrame) -> dict[float | None, pd.DataFrame]:
    """Return the rows by the accuracy at which runs end (`stop_at`); None: at their last round.

    Final accuracies of runs that end at an accuracy are near it, and cannot be compared.
    """
    targets = [run.config.get("stop_at") or None for run in rows["run"]]
    return {
        target: rows[[other == target for other in targets]]
        for target in sorted(set(targets), key=lambda target: target or 0.0)
    }


def without_target(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of runs that do not end at an accuracy."""
    return by_target(runs).get(None, runs[:0])


def selector_of(rows: pd.DataFrame) -> str | None:
    """Return the selector that a group chose; None if its runs do not say it."""
    return first_run(rows).choices.get("selector")


def reference_of(lines: Mapping[str, pd.DataFrame], method: str, choice: str) -> str | None:
    """Return the method of a setting that has the selector or the name `choice`; None if there is
    none.

    `lines` are the rows of the setting by method. Of several such methods, the result is the one
    that shares the most config values with `method`.
    """
    candidates = [name for name, rows in lines.items() if choice in (name, selector_of(rows))]
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    values = _besides_selector(lines[method])
    return max(candidates, key=lambda name: len(values & _besides_selector(lines[name])))


def _besides_selector(rows: pd.DataFrame) -> set[tuple[str, str]]:
    """Return choices and config values of a group as (key, text), without those of the selector."""
    values = _values(first_run(rows))
    return {item for item in values.items() if not item[0].startswith("selector")}


def _values(run: Run) -> dict[str, str]:
    """Return choices and compared config values of a run, as text by key."""
    values = {key: str(value) for key, value in leaves(compared_config(run))}
    return values | dict(run.choices)


def has_made(rows: pd.DataFrame, expected_values: Mapping[str, Any]) -> bool:
    """Return whether a group has all these values.

    A key is a config group, a label, or a dotted config key (`partition.alpha`).
    """
    run = first_run(rows)
    values = {key: str(value) for key, value in leaves(run.config)}
    values.update(run.choices)
    values.update(rows["labels"].iloc[0])
    return all(is_equal(values.get(key), str(value)) for key, value in expected_values.items())


def is_equal(text: str | None, expected: str) -> bool:
    """Return whether two texts are equal, or represent the same number."""
    try:
        return text == expected or (text is not None and float(text) == float(expected))
    except ValueError:
        return False
