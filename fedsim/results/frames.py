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

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from fedsim.core.configs import IRRELEVANT_KEYS, SEED_KEYS, canonical, leaves, short_names
from fedsim.core.text import printable
from fedsim.results.measures import find_measure
from fedsim.results.reading import FINISHED
from fedsim.results.runs import Run

LABEL_ORDER = ("cell", "dataset", "partition", "model", "system", "clients", "selector")
OTHER_CHOICES = ("local_algorithm", "aggregator", "optimizer", "availability", "engine")
"""Config groups that label runs, in this order, if their labels are otherwise equal."""
SETTING = ("cell", "dataset", "partition", "model", "system", "clients")
"""Config groups whose choices and values define a setting, in which methods are compared."""
NEW_GROUPS = {"system": "none", "clients": "honest", "local_algorithm": "plain"}
"""The usual choices in config groups that earlier versions do not have."""
NATIVE = {"_target_": "NativeBackend", "workers": "auto"}
"""The config of engine=native."""
REFERENCE = "random"
"""The selector that others are compared with, if there are runs of it."""
CEILING = "clairvoyant"
"""The selector that shows what the best choices could gain. It is no method: it looks ahead."""
CONTROL = "random_control"
"""The selector that is random selection with other random numbers. Comparisons must find it equal
to random selection."""
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
Labels = dict[str, str]
"""Choices by config group, and config values as text by dotted key."""


def runs_frame(runs: Iterable[Run]) -> pd.DataFrame:
    """Return the frame of the `distinct` runs.

    Rows are sorted by group and seeds, and groups by their labels: numbers by value, random
    selection first.
    """
    # 1. Groups in the order of their labels. All groups have labels in the same order of keys.
    groups = _groups(distinct(runs))
    all_labels = _make_labels([members[0] for members in groups])
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


def distinct(runs: Iterable[Run]) -> list[Run]:
    """Return one run for each config and seeds: the first that is done, otherwise the first.

    Configs are compared without keys that cannot change a result, such as the run's name.
    """
    by_config: dict[Hashable, Run] = {}
    for run in runs:
        key = run.seeds, _key(compared_config(run))
        earlier = by_config.setdefault(key, run)
        if run.status in FINISHED and earlier.status not in FINISHED:
            by_config[key] = run
    return list(by_config.values())


def relevant(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config without seeds and without keys that cannot change a result.

    `init_seed=per_client` is not a seed.
    """
    values = {}
    for key, value in config.items():
        is_seed = key in SEED_KEYS and not isinstance(value, str)
        if not is_seed and key not in IRRELEVANT_KEYS:
            values[key] = value
    return canonical(values)


def compared_config(run: Run) -> dict[str, Any]:
    """Return the config by which runs are compared.

    It is the `relevant` config, with two changes: the digits of the user's code are added as
    `code`, and engine=auto is replaced by engine=native in a run for which it chose that.
    """
    config = relevant(run.config)
    if run.code:
        config["code"] = run.code
    engine = config.get("engine")
    is_auto = isinstance(engine, Mapping) and engine.get("_target_") == "choose_backend"
    if is_auto and str(run.summary.get("engine", "")).startswith("native"):
        config["engine"] = NATIVE
    return config


def show_labels(labels: Mapping[str, str]) -> str:
    """Return all labels as one text: choices without their group, config values as `key=value` with
    their `short_names`."""
    names = short_names(key for key in labels if is_value(key))
    shown = [f"{names[key]}={text}" if key in names else text for key, text in labels.items()]
    return " ".join(shown)


def is_value(key: str) -> bool:
    """Return whether a label is a config value, and not the choice of a config group."""
    return not (key in LABEL_ORDER or key in OTHER_CHOICES or "/" in key)


def split_labels(labels: Mapping[str, str]) -> tuple[str, str]:
    """Return the labels of the setting, and those of the method in it, as texts."""
    setting = {key: text for key, text in labels.items() if is_setting(key)}
    method = {key: text for key, text in labels.items() if key not in setting}
    return show_labels(setting), show_labels(method)


def is_setting(key: str) -> bool:
    """Return whether a choice or value belongs to the setting."""
    return key.partition(".")[0] in SETTING


def sort_key(text: str) -> tuple[bool, list[str | float]]:
    """Return a key that sorts `REFERENCE` first, and numbers in texts by value (2 before 10)."""
    parts: list[str | float] = list(re.split(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)", text))
    parts[1::2] = map(float, parts[1::2])  # re.split puts the numbers at odd places
    return text != REFERENCE, parts


def _groups(runs: Sequence[Run]) -> list[list[Run]]:
    """Return the groups: runs whose configs are equal except for seeds.

    Engine and device may differ in a group if each seed occurs once: a GPU may have run some of the
    seeds. If a seed occurs twice, engines are compared, and each engine and device has a group.
    """
    families: dict[Hashable, list[Run]] = {}
    for run in runs:
        config = compared_config(run)
        engine = config.get("engine")
        precision = engine.get("precision") if isinstance(engine, Mapping) else None
        config.update(device="any", engine=precision or "float32")
        families.setdefault(_key(config), []).append(run)
    groups: list[list[Run]] = []
    for family in families.values():
        if len({run.seeds for run in family}) == len(family):  # no seed occurs twice
            groups.append(family)
            continue
        by_engine: dict[Hashable, list[Run]] = {}
        for run in family:
            by_engine.setdefault(_key(compared_config(run)), []).append(run)
        groups += by_engine.values()
    return groups


def _key(config: Mapping[str, Any]) -> Hashable:
    """Return a hashable key that equal configs share. 1 and 1.0 are equal."""
    items = set()
    for key, value in leaves(config):
        items.add((key, str(value) if isinstance(value, list) else value))
    return frozenset(items)


def _make_labels(runs: Sequence[Run]) -> list[Labels]:
    """Return the labels that distinguish each of the runs. There is one run of each group."""
    choices = [NEW_GROUPS | dict(run.choices) for run in runs]
    for chosen, run in zip(choices, runs, strict=True):
        chosen["dataset"] = run.dataset or ""
    configs = [compared_config(run) for run in runs]
    # 1. Choices that differ, in the order of LABEL_ORDER. A cell is a combination of data set,
    #    partition and so on: what it determines is not repeated.
    names = []
    for name in LABEL_ORDER:
        if len({chosen.get(name, "") for chosen in choices}) > 1:
            names.append(name)
    if "cell" in names:
        names = [name for name in names if name == "cell" or not _in_cell(name, choices)]
    labels = [{name: chosen.get(name) or "-" for name in names} for chosen in choices]
    # 2. What distinguishes runs with equal labels: parts of the selector, other choices, values.
    #    What tells runs apart by their choices needs no values.
    values = [dict(leaves(config)) for config in configs]
    parts = [_parts_of_selector(chosen) for chosen in choices]
    others = _other_choices(choices, configs)
    for kind in (parts, others, values):
        methods = [_of_method(label) for label in labels]
        _add_distinguishing(labels, kind)
        _label_methods_alike(labels, methods, kind)
    # 3. Values of a setting that label some runs label all runs. Otherwise a method that ran in one
    #    setting alone would seem to have a setting of its own.
    keys = dict.fromkeys(key for label in labels for key in label)
    of_settings = [key for key in keys if is_setting(key) and "." in key]
    for label, own_values in zip(labels, values, strict=True):
        label.update({key: str(own_values[key]) for key in of_settings if key in own_values})
    for label in labels:  # in one order: names of equal settings must be equal
        in_order = {key: label[key] for key in keys if key in label}
        label.clear()
        label.update(in_order)
    # 4. The version of the user's code, if any of the settings has runs of several versions of the
    #    same classes.
    versions = {(str(run.own_classes), run.code) for run in runs}
    num_versions = Counter(classes for classes, _ in versions)
    for label, run in zip(labels, runs, strict=True):
        if num_versions[str(run.own_classes)] > 1:
            label["code"] = str(run.code)
    return [{key: printable(text) for key, text in label.items()} for label in labels]


def _of_method(label: Labels) -> Hashable:
    """Return the labels that name a method, in a hashable form."""
    return frozenset(item for item in label.items() if not is_setting(item[0]))


def _label_methods_alike(
    labels: Sequence[Labels], methods: Sequence[Hashable], values: Sequence[Mapping[str, Any]]
) -> None:
    """Let what distinguishes some runs of a method label all of its runs, in place.

    `methods` are those before `values` distinguished their runs. Otherwise a method would have
    other names in the settings where its parameters have several values than in the rest, and would
    be missing in comparisons over settings.
    """
    keys_of: dict[Hashable, dict[str, None]] = {}
    for label, method in zip(labels, methods, strict=True):
        keys = {key: None for key in label if not is_setting(key)}
        keys_of.setdefault(method, {}).update(keys)
    for label, method, own_values in zip(labels, methods, values, strict=True):
        for key in keys_of[method]:
            label.setdefault(key, str(own_values.get(key, "-")))


def _in_cell(name: str, choices: Sequence[Mapping[str, str]]) -> bool:
    """Return whether `name` is a config group of the setting whose choice the cell determines."""
    cells = {chosen.get("cell") for chosen in choices}
    pairs = {(chosen.get("cell"), chosen.get(name)) for chosen in choices}
    return is_setting(name) and len(pairs) <= len(cells)  # no cell has two choices


def _parts_of_selector(choices: Mapping[str, str]) -> Labels:
    """Return the choices in groups such as `selector/...`, of which a selector is made."""
    return {group: choice for group, choice in choices.items() if group.startswith("selector/")}


def _other_choices(
    choices: Sequence[Mapping[str, str]], configs: Sequence[Mapping[str, Any]]
) -> list[Labels]:
    """Return each run's choices in `OTHER_CHOICES`.

    Choices with equal configs get the name of the first of them, so that they are no difference.
    """
    # The config of engine=native is always called native: engine=auto may have chosen it.
    first_names: dict[Hashable, str] = {("engine", _key({"engine": NATIVE})): "native"}
    named = []
    for chosen, config in zip(choices, configs, strict=True):
        names = {}
        for group in OTHER_CHOICES:
            if group in chosen:
                key = group, _key({group: config.get(group)})
                names[group] = first_names.setdefault(key, chosen[group])
        named.append(names)
    return named


def _add_distinguishing(labels: Sequence[Labels], values: Sequence[Mapping[str, Any]]) -> None:
    """Add `values` to `labels`, in place, where they distinguish runs with equal labels."""
    same_labels: dict[tuple[str, ...], list[int]] = {}
    for position, label in enumerate(labels):
        same_labels.setdefault(tuple(label.values()), []).append(position)
    for positions in same_labels.values():
        keys = sorted(set().union(*(values[position] for position in positions)))
        for key in keys:
            texts = [str(values[position].get(key, "-")) for position in positions]
            if len(set(texts)) > 1:
                for position, text in zip(positions, texts, strict=True):
                    labels[position][key] = text
