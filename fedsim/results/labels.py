"""Labels: the choices of config groups and the config values that distinguish groups of runs.

A group is the set of runs that differ in their seeds alone. (Groups of the config, such as dataset,
are called config groups here.) Labels about data, model and clients belong to the setting in which
a group ran. The others name its method.
"""

import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from fedsim.core.configs import leaves, short_names
from fedsim.core.text import printable
from fedsim.results.grouping import (
    NATIVE,
    comparable,
    compared_config,
    config_key,
    precision_of,
)
from fedsim.results.runs import Run

SETTING = ("cell", "dataset", "partition", "model", "system", "clients")
"""Config groups whose choices and values define a setting, in which methods are compared."""
MAIN_CHOICES = (*SETTING, "selector")
"""Config groups that label groups of runs, in this order, if their choices differ."""
OTHER_CHOICES = ("local_algorithm", "aggregator", "optimizer", "availability")
"""Config groups that label groups only where main choices and parts of selectors are equal."""
NEW_GROUPS = {"system": "none", "clients": "honest", "local_algorithm": "plain"}
"""The usual choices in config groups that earlier versions do not have."""
REFERENCE = "random"
"""The selector that others are compared with, if there are runs of it."""
CEILING = "clairvoyant"
"""The selector that shows what the best choices could gain. It looks ahead, which no server can."""
CONTROL = "random_control"
"""The selector that is random selection with other random numbers. Comparisons must find it equal
to random selection."""
MISSING = "-"
"""The text of a label for a group that does not have the key. A setting has no such label."""
PRECISION = "engine.precision"
"""The key of the only value of the engine that can change results beyond rounding errors."""
Labels = dict[str, str]
"""The labels of a group: texts of choices by config group, and of config values by dotted key
(`partition.alpha`)."""
Candidates = dict[str, str]
"""Candidates for labels of a group: choices or config values as text, with keys as in `Labels`."""


def make_labels(runs: Sequence[Run]) -> list[Labels]:
    """Return the labels of groups of runs, each of which is given by one of its runs.

    Labels are what distinguishes groups, and what else is needed so that a method has the same keys
    in every setting, and a setting the same for every method. Their keys are in one order.
    """
    configs = [compared_config(run) for run in runs]
    choices = [_choices(run) for run in runs]
    values = _values_as_text(configs)
    # 1. The main choices that differ.
    all_labels = _main_labels(choices)
    # 2. What distinguishes groups that have equal labels so far. The engine is a label only if
    #    nothing else differs, since it does not change results beyond rounding errors.
    _distinguish(all_labels, _only(choices, lambda key: key.startswith("selector/")))
    _distinguish(all_labels, _named_choices(OTHER_CHOICES, choices, configs))
    _distinguish(all_labels, _only(values, _changes_results))
    _distinguish(all_labels, _named_choices(["engine"], choices, configs))
    _distinguish(all_labels, values)  # only those of the engine and the device still differ
    # 3. Settings have one name, whatever methods ran in them.
    _complete_settings(all_labels, values)
    # 4. The version of the user's code, if there are several, also where labels differ already.
    _add_code_versions(all_labels, runs)
    # 5. One order of keys.
    keys = dict.fromkeys(key for labels in all_labels for key in labels)
    ordered = []
    for labels in all_labels:
        ordered.append({key: printable(labels[key]) for key in keys if key in labels})
    return ordered


def is_setting(key: str) -> bool:
    """Return whether a label belongs to the setting, by its key."""
    return re.split(r"[./]", key)[0] in SETTING


def is_value(key: str) -> bool:
    """Return whether a label is a config value, and not the choice of a config group."""
    return key not in (*MAIN_CHOICES, *OTHER_CHOICES, "engine") and "/" not in key


def show_labels(labels: Mapping[str, str]) -> str:
    """Return all labels as one text: choices without their group, config values as `key=value` with
    their `short_names`."""
    names = short_names(key for key in labels if is_value(key))
    shown = [f"{names[key]}={text}" if key in names else text for key, text in labels.items()]
    return " ".join(shown)


def split_labels(labels: Mapping[str, str]) -> tuple[str, str]:
    """Return the labels of the setting, and those of the method in it, as texts."""
    method = _method_labels(labels)
    setting = {key: text for key, text in labels.items() if key not in method}
    return show_labels(setting), show_labels(method)


def _method_labels(labels: Mapping[str, str]) -> Labels:
    """Return the labels that do not belong to the setting."""
    return {key: text for key, text in labels.items() if not is_setting(key)}


def sort_key(text: str) -> tuple[bool, list[str | float]]:
    """Return a key that sorts the text `REFERENCE` first, and numbers in texts by value."""
    # A minus is a sign at the beginning of a word or value, as in lr=-2, but not in dirichlet-2.
    number = r"((?:(?<![^\s=])-)?\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
    parts: list[str | float] = list(re.split(number, text))
    parts[1::2] = map(float, parts[1::2])  # re.split puts the numbers at odd places
    return text != REFERENCE, parts


def _choices(run: Run) -> Candidates:
    """Return the choices of a run. In config groups newer than the run it made the usual choice."""
    choices = NEW_GROUPS | dict(run.choices)
    choices["dataset"] = run.dataset or ""
    return choices


def _values_as_text(configs: Sequence[Mapping[str, Any]]) -> list[Candidates]:
    """Return the values of configs as text, and the precision also where it is not in the config.

    Where a key has equal numbers, such as 1 and 1.0, all have the text of the first.
    """
    texts: dict[tuple[str, Hashable], str] = {}
    rows = []
    for config in configs:
        row = {}
        for key, value in leaves(config):
            row[key] = texts.setdefault((key, comparable(value)), str(value))
        row[PRECISION] = precision_of(config)
        rows.append(row)
    return rows


def _only(candidates: Sequence[Candidates], is_wanted: Callable[[str], bool]) -> list[Candidates]:
    """Return the candidates whose keys are wanted."""
    rows = []
    for texts in candidates:
        rows.append({key: text for key, text in texts.items() if is_wanted(key)})
    return rows


def _changes_results(key: str) -> bool:
    """Return whether a config value can change results beyond rounding errors, by its key."""
    return key == PRECISION or key.partition(".")[0] not in ("engine", "device")


def _main_labels(choices: Sequence[Candidates]) -> list[Labels]:
    """Return the `MAIN_CHOICES` that differ.

    A cell is a combination of data set, partition and so on. The choices that it makes are left out
    if cells differ.
    """
    config_groups: list[str] = []
    for name in MAIN_CHOICES:  # the cell is the first
        is_different = len({chosen.get(name, "") for chosen in choices}) > 1
        is_made_by_cell = "cell" in config_groups and _is_made_by_cell(name, choices)
        if is_different and not is_made_by_cell:
            config_groups.append(name)
    return [{name: chosen.get(name) or MISSING for name in config_groups} for chosen in choices]


def _is_made_by_cell(name: str, choices: Sequence[Candidates]) -> bool:
    """Return whether the choice in a config group of the setting is the same wherever the cell is
    the same."""
    cells = {chosen.get("cell") for chosen in choices}
    pairs = {(chosen.get("cell"), chosen.get(name)) for chosen in choices}
    return is_setting(name) and len(pairs) == len(cells)


def _named_choices(
    config_groups: Sequence[str],
    choices: Sequence[Candidates],
    configs: Sequence[Mapping[str, Any]],
) -> list[Candidates]:
    """Return the choices of each group of runs in some config groups.

    Choices with equal configs get the name of the first of them, so that they are no difference.
    """
    names: dict[tuple[str, Hashable], str] = {}
    # `compared_config` turns an engine=auto that chose native into native. It gets this name, too.
    names["engine", config_key({"engine": NATIVE})] = "native"
    rows = []
    for chosen, config in zip(choices, configs, strict=True):
        row = {}
        for name in config_groups:
            if name in chosen:
                key = name, config_key({name: config.get(name)})
                row[name] = names.setdefault(key, chosen[name])
        rows.append(row)
    return rows


def _distinguish(all_labels: Sequence[Labels], candidates: Sequence[Candidates]) -> None:
    """Add the candidates that distinguish groups with equal labels to their labels, in place.

    If a key distinguishes some groups of a method, all groups of the method get it as a label. For
    example, gpfl may have run with rho 1 and 2 in one setting and only with 1 in another. If it had
    the label rho=1 only in the first, comparisons over settings would take it for two methods.
    """
    methods = [frozenset(_method_labels(labels).items()) for labels in all_labels]
    # 1. Groups with equal labels get the candidates in which they differ.
    indices_by_labels: dict[Hashable, list[int]] = {}
    for index, labels in enumerate(all_labels):
        indices_by_labels.setdefault(frozenset(labels.items()), []).append(index)
    for indices in indices_by_labels.values():
        keys = {key for index in indices for key in candidates[index]}
        for key in sorted(keys):
            texts = [candidates[index].get(key, MISSING) for index in indices]
            if len(set(texts)) > 1:
                for index, text in zip(indices, texts, strict=True):
                    all_labels[index][key] = text
    # 2. All groups of a method get the new keys of one of them. Before step 1, the labels of these
    #    groups were equal, except those of the setting.
    keys_by_method: dict[Hashable, Labels] = {}
    for method, labels in zip(methods, all_labels, strict=True):
        keys_by_method.setdefault(method, {}).update(_method_labels(labels))
    for method, labels, texts_by_key in zip(methods, all_labels, candidates, strict=True):
        for key in keys_by_method[method]:
            labels.setdefault(key, texts_by_key.get(key, MISSING))


def _complete_settings(all_labels: Sequence[Labels], values: Sequence[Candidates]) -> None:
    """Give all groups the config values of settings that label one of them, in place.

    Otherwise a method that ran in one setting alone would seem to have a setting of its own. A
    group whose config does not have the key has no such label.
    """
    keys = {key for labels in all_labels for key in labels if is_setting(key) and "." in key}
    for labels, texts in zip(all_labels, values, strict=True):
        for key in sorted(keys):
            if key in texts:
                labels[key] = texts[key]
            else:
                labels.pop(key, None)


def _add_code_versions(all_labels: Sequence[Labels], runs: Sequence[Run]) -> None:
    """Add the version of the user's code, in place, where there are several versions of the same
    classes."""
    versions = {(str(run.own_classes), run.code) for run in runs}
    num_versions = Counter(classes for classes, _ in versions)
    for labels, run in zip(all_labels, runs, strict=True):
        if num_versions[str(run.own_classes)] > 1:
            labels["code"] = str(run.code)
