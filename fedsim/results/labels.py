"""Labels: the choices of config groups and the config values that distinguish groups of runs.

Labels about data, model and clients belong to the setting in which a group ran. The others name its
method.
"""

import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
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
"""Config groups that label runs, in this order, if their choices differ."""
OTHER_CHOICES = ("local_algorithm", "aggregator", "optimizer", "availability")
"""Config groups that label runs, in this order, if their labels are otherwise equal."""
NEW_GROUPS = {"system": "none", "clients": "honest", "local_algorithm": "plain"}
"""The usual choices in config groups that earlier versions do not have."""
REFERENCE = "random"
"""The selector that others are compared with, if there are runs of it."""
CEILING = "clairvoyant"
"""The selector that shows what the best choices could gain. It is no method: it looks ahead."""
CONTROL = "random_control"
"""The selector that is random selection with other random numbers. Comparisons must find it equal
to random selection."""
MISSING = "-"
"""The text of a label for a group whose config does not have the key."""
Labels = dict[str, str]
"""Texts of choices by config group, and of config values by dotted key (`partition.alpha`)."""


def make_labels(runs: Sequence[Run]) -> list[Labels]:
    """Return the labels of groups, each of which is given by one of its runs.

    Only what distinguishes groups is a label. All labels have their keys in the same order.
    """
    configs = [compared_config(run) for run in runs]
    choices = [_choices(run) for run in runs]
    values = _values_as_text(configs)
    # 1. The main choices that differ.
    labels = _main_labels(choices)
    # 2. What distinguishes groups that have equal labels so far. The engine comes last: groups that
    #    differ in anything else are not distinguished by the engine that happened to run them.
    for details in (
        _parts_of_selectors(choices),
        _named_choices(OTHER_CHOICES, choices, configs),
        _values_besides_engine(values, configs),
        _named_choices(("engine",), choices, configs),
        values,
    ):
        _distinguish(labels, details)
    # 3. Settings have one name, whatever methods ran in them.
    _complete_settings(labels, values)
    # 4. Versions of the user's code.
    _add_code_versions(labels, runs)
    return [{key: printable(text) for key, text in label.items()} for label in labels]


def is_setting(key: str) -> bool:
    """Return whether a label belongs to the setting, by its key."""
    return key.partition(".")[0] in SETTING


def is_value(key: str) -> bool:
    """Return whether a label is a config value, and not the choice of a config group."""
    return not (key in (*MAIN_CHOICES, *OTHER_CHOICES, "engine") or "/" in key)


def show_labels(labels: Mapping[str, str]) -> str:
    """Return all labels as one text: choices without their group, config values as `key=value` with
    their `short_names`."""
    names = short_names(key for key in labels if is_value(key))
    shown = [f"{names[key]}={text}" if key in names else text for key, text in labels.items()]
    return " ".join(shown)


def split_labels(labels: Mapping[str, str]) -> tuple[str, str]:
    """Return the labels of the setting, and those of the method in it, as texts."""
    setting = {key: text for key, text in labels.items() if is_setting(key)}
    method = {key: text for key, text in labels.items() if key not in setting}
    return show_labels(setting), show_labels(method)


def sort_key(text: str) -> tuple[bool, list[str | float]]:
    """Return a key that sorts `REFERENCE` first, and numbers in texts by value (-2, 2, 10)."""
    # A minus is a sign at the beginning of a word or value, as in lr=-2, but not in dirichlet-2.
    number = r"((?:(?<![^\s=])-)?\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
    parts: list[str | float] = list(re.split(number, text))
    parts[1::2] = map(float, parts[1::2])  # re.split puts the numbers at odd places
    return text != REFERENCE, parts


def _choices(run: Run) -> Labels:
    """Return the choices of a run. In groups newer than the run it made the usual choice."""
    choices = NEW_GROUPS | dict(run.choices)
    choices["dataset"] = run.dataset or ""
    return choices


def _values_as_text(configs: Sequence[Mapping[str, Any]]) -> list[Labels]:
    """Return the values of configs as text. Where a key has equal numbers, such as 1 and 1.0, all
    have the text of the first."""
    texts: dict[tuple[str, Hashable], str] = {}
    rows = []
    for config in configs:
        row = {}
        for key, value in leaves(config):
            row[key] = texts.setdefault((key, comparable(value)), str(value))
        rows.append(row)
    return rows


def _main_labels(choices: Sequence[Labels]) -> list[Labels]:
    """Return the `MAIN_CHOICES` in which groups differ.

    A cell is a combination of data set, partition and so on. What it determines is no label.
    """
    groups = []
    for group in MAIN_CHOICES:
        if len({chosen.get(group, "") for chosen in choices}) > 1:
            groups.append(group)
    if "cell" in groups:
        groups = [group for group in groups if group == "cell" or not _in_cell(group, choices)]
    return [{group: chosen.get(group) or MISSING for group in groups} for chosen in choices]


def _in_cell(group: str, choices: Sequence[Labels]) -> bool:
    """Return whether a config group belongs to the setting, and each cell has one choice in it."""
    cells = {chosen.get("cell") for chosen in choices}
    pairs = {(chosen.get("cell"), chosen.get(group)) for chosen in choices}
    return is_setting(group) and len(pairs) <= len(cells)


def _parts_of_selectors(choices: Sequence[Labels]) -> list[Labels]:
    """Return the choices in groups such as `selector/exploration`, of which selectors are made."""
    rows = []
    for chosen in choices:
        rows.append({key: text for key, text in chosen.items() if key.startswith("selector/")})
    return rows


def _named_choices(
    groups: Sequence[str], choices: Sequence[Labels], configs: Sequence[Mapping[str, Any]]
) -> list[Labels]:
    """Return the choices in some config groups.

    Choices with equal configs get the name of the first of them, so that they are no difference.
    """
    # The config of engine=native is always called native: engine=auto may have chosen it.
    names: dict[Hashable, str] = {("engine", config_key({"engine": NATIVE})): "native"}
    rows = []
    for chosen, config in zip(choices, configs, strict=True):
        row = {}
        for group in groups:
            if group in chosen:
                key = group, config_key({group: config.get(group)})
                row[group] = names.setdefault(key, chosen[group])
        rows.append(row)
    return rows


def _values_besides_engine(
    values: Sequence[Labels], configs: Sequence[Mapping[str, Any]]
) -> list[Labels]:
    """Return the values without those of engine and device, except the precision."""
    rows = []
    for texts, config in zip(values, configs, strict=True):
        row = {}
        for key, text in texts.items():
            if key.partition(".")[0] not in ("engine", "device"):
                row[key] = text
        row["engine.precision"] = precision_of(config)
        rows.append(row)
    return rows


def _distinguish(labels: Sequence[Labels], details: Sequence[Labels]) -> None:
    """Add those `details` to the labels that distinguish groups with equal labels, in place.

    What distinguishes some groups of a method labels all its groups. Otherwise the method would
    have another name in the settings where it ran with one value only, and comparisons over
    settings would miss it.
    """
    methods = [_method_labels(label) for label in labels]  # before details are added
    # 1. Groups with equal labels get the details in which they differ.
    with_equal_labels: dict[Hashable, list[int]] = {}
    for number, label in enumerate(labels):
        with_equal_labels.setdefault(frozenset(label.items()), []).append(number)
    for numbers in with_equal_labels.values():
        for key in sorted(set().union(*(details[number] for number in numbers))):
            texts = [details[number].get(key, MISSING) for number in numbers]
            if len(set(texts)) > 1:
                for number, text in zip(numbers, texts, strict=True):
                    labels[number][key] = text
    # 2. The other groups of the same method get them, too.
    keys_of: dict[Hashable, dict[str, None]] = {}
    for method, label in zip(methods, labels, strict=True):
        keys = keys_of.setdefault(method, {})
        keys.update((key, None) for key in label if not is_setting(key))
    for method, label, own_details in zip(methods, labels, details, strict=True):
        for key in keys_of[method]:
            label.setdefault(key, own_details.get(key, MISSING))


def _method_labels(label: Labels) -> Hashable:
    """Return the labels that name a method, in a hashable form."""
    return frozenset(item for item in label.items() if not is_setting(item[0]))


def _complete_settings(labels: Sequence[Labels], values: Sequence[Labels]) -> None:
    """Let values of a setting that label some groups label all groups, in place, and put the keys
    in one order.

    Otherwise a method that ran in one setting alone would seem to have a setting of its own.
    """
    keys = dict.fromkeys(key for label in labels for key in label)
    for label, texts in zip(labels, values, strict=True):
        for key in keys:
            if is_setting(key) and "." in key and key in texts:
                label[key] = texts[key]
        in_order = {key: label[key] for key in keys if key in label}
        label.clear()
        label.update(in_order)


def _add_code_versions(labels: Sequence[Labels], runs: Sequence[Run]) -> None:
    """Add the version of the user's code, in place, where there are several versions of the same
    classes."""
    versions = {(str(run.own_classes), run.code) for run in runs}
    num_versions = Counter(classes for classes, _ in versions)
    for label, run in zip(labels, runs, strict=True):
        if num_versions[str(run.own_classes)] > 1:
            label["code"] = str(run.code)
