"""Finished runs as a data frame with a row for each run.

A group is the set of runs that differ in their seeds alone (`fedsim.results.grouping`). Its labels
distinguish it from the other groups, and name its setting and its method (`fedsim.results.labels`).
Methods are compared within a setting, at equal seeds: the index holds the seeds as text, so that
subtracting the columns of two methods pairs them. Columns:

- `run`: the `Run` itself, for its arrays.
- `status`: `done` if the run reached its last round, `reached` if it ended at `stop_at`. Other runs
  are not finished (`fedsim.results.reading`).
- `group`: the name of the group.
- `labels`: the labels of the group by key, {} if there is only one group.
- `setting` and `method`: their labels as text.
- `is_reference`: whether other methods are compared with this one: random selection.
- `choice.<config group>` and `config.<dotted key>`: choices, and values that can change results.
- `OVERVIEW`: measures, nan for runs that are not finished.
"""

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from fedsim.core.configs import leaves
from fedsim.core.text import printable
from fedsim.results.grouping import comparable, compared_config, distinct, groups_of
from fedsim.results.labels import (
    MISSING,
    NEW_GROUPS,
    REFERENCE,
    Labels,
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
    groups = [sorted(members, key=lambda run: run.seeds) for members in groups_of(distinct(runs))]
    all_labels = make_labels([members[0] for members in groups])
    compares_settings = _compares_settings(groups, all_labels)
    # 1. A row for each run.
    named_groups = list(zip(all_labels, groups, strict=True))
    named_groups.sort(key=lambda named: [sort_key(text) for text in named[0].values()])
    rows = []
    for labels, members in named_groups:
        selector = printable(members[0].choices.get("selector", "run"))  # run: it is unknown
        name = show_labels(labels) or selector
        if compares_settings:  # each setting takes the place of a method
            setting, method = "", name
        else:
            setting, method = split_labels(labels)
        method = method or selector
        is_reference = members[0].choices.get("selector") == REFERENCE
        for run in members:
            row = (str(run.seeds), run, run.status, name, labels, setting, method, is_reference)
            rows.append(row)
    columns = ["seeds", "run", "status", "group", "labels", "setting", "method", "is_reference"]
    frame = pd.DataFrame(rows, columns=columns)
    # 2. Choices, config values and measures as further columns.
    choices = pd.DataFrame([run.choices for run in frame["run"]], dtype=object)
    for config_group, usual_choice in NEW_GROUPS.items():
        if config_group in choices:
            choices[config_group] = choices[config_group].fillna(usual_choice)
    values = [dict(leaves(compared_config(run))) for run in frame["run"]]
    configs = pd.DataFrame(values, dtype=object)
    measures = pd.DataFrame({name: measured(frame, name) for name in OVERVIEW})
    parts = [frame, choices.add_prefix("choice."), configs.add_prefix("config."), measures]
    return pd.concat(parts, axis=1).set_index("seeds")


def _compares_settings(groups: Sequence[Sequence[Run]], all_labels: Sequence[Labels]) -> bool:
    """Return whether one method ran in several settings of the same data, or in one.

    Then there is nothing to compare within a setting, so each setting takes the place of a method:
    for example, random selection with `partition.alpha` 0.1 and 1.
    """
    keys = {key for labels in all_labels for key in labels}
    datasets = {members[0].dataset for members in groups}
    same_data = len(datasets) <= 1 and not any(key.startswith("dataset.") for key in keys)
    return same_data and all(map(is_setting, keys))


def measured(rows: pd.DataFrame, name: str) -> pd.Series:
    """Return a measure of each run (`fedsim.results.measures`); nan for runs that are not
    finished."""
    if name in OVERVIEW and name in rows:
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


def finished_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of runs that reached their last round, or the accuracy `stop_at`."""
    return rows[rows["status"].isin(FINISHED)]


def first_run(rows: pd.DataFrame) -> Run:
    """Return the run of a group with the lowest seeds. Rows are sorted by seeds."""
    return rows["run"].iloc[0]


def by_target(rows: pd.DataFrame) -> dict[float | None, pd.DataFrame]:
    """Return the rows by the accuracy at which runs end; None is the key of runs without `stop_at`.

    Final accuracies of runs that end at an accuracy are near it, and cannot be compared.
    """
    targets = [run.config.get("stop_at") or None for run in rows["run"]]
    return {
        target: rows[[other == target for other in targets]]
        for target in sorted(set(targets), key=lambda target: target or 0.0)
    }


def without_target(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of runs that do not end at an accuracy."""
    return by_target(rows).get(None, rows[:0])


def selector_of(rows: pd.DataFrame) -> str | None:
    """Return the selector that a group chose; None if its runs do not say it."""
    return first_run(rows).choices.get("selector")


def reference_of(
    methods: Mapping[str, pd.DataFrame], method: str, candidates: Sequence[str]
) -> str | None:
    """Return the name of the reference that a method of a setting is compared with.

    `methods` are the rows of the setting by method, and `candidates` the names of its references.
    If there are several, the result is the one that shares the most config values with `method`. It
    may be `method` itself. None if there is none.
    """
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    values = _besides_selector(methods[method])
    return max(candidates, key=lambda name: len(values & _besides_selector(methods[name])))


def _besides_selector(rows: pd.DataFrame) -> set[tuple[str, Hashable]]:
    """Return choices and compared config values of a group, except those of the selector."""
    run = first_run(rows)
    pairs = [*leaves(compared_config(run)), *run.choices.items()]
    values = set()
    for key, value in pairs:
        if re.split(r"[./]", key)[0] != "selector":
            values.add((key, comparable(value)))
    return values


def has_values(rows: pd.DataFrame, expected: Mapping[str, Any]) -> bool:
    """Return whether a group has all the expected values by key.

    A key is a config group, a label, or a dotted config key (`partition.alpha`). Expect null for a
    key that the group does not have.
    """
    run = first_run(rows)
    values = {key: str(value) for key, value in leaves(run.config)}
    values.update(NEW_GROUPS)
    values.update(run.choices)
    for key, text in rows["labels"].iloc[0].items():
        if text != MISSING:
            values[key] = text
    return all(is_equal(str(values.get(key)), str(value)) for key, value in expected.items())


def is_equal(text: str, expected: str) -> bool:
    """Return whether two texts are equal, or represent the same number."""
    try:
        return text == expected or float(text) == float(expected)
    except ValueError:
        return False
