"""Labels: the choices of config groups and the config values that distinguish groups of runs.

A group is the set of runs that differ in their seeds alone. (Groups of the config, such as dataset,
are called config groups here.) Labels about data, model and clients belong to the setting in which
a group ran. The others name its method.
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
Texts = dict[str, str]
"""Candidates for labels: every choice, or every config value, of a group. Keys as in `Labels`."""


def make_labels(runs: Sequence[Run]) -> list[Labels]:
    """Return the labels of groups of runs, each of which is given by one of its runs.

    Labels are what distinguishes groups, and what else is needed so that a method has the same keys
    in every setting, and a setting the same for every method. Their keys are in one order.
    """
    configs = [compared_config(run) for run in runs]
    choices = [_choices(run) for run in runs]
    values = _values_as_text(configs)
    # 1. The main choices that differ.
    labels = _main_labels(choices)
    # 2. What distinguishes groups that have equal labels so far. The engine is last: it is a label
    #    only if nothing else differs, since it does not change results beyond rounding errors.
    for details in (
        _parts_of_selectors(choices),
        _named_choices(OTHER_CHOICES, choices, configs),
        _without_engine(values),  # but with the precision
        _named_choices(("engine",), choices, configs),
        values,  # of the engine and the device, as all others are equal by now
    ):
        _distinguish(labels, details)
    # 3. Settings have one name, whatever methods ran in them.
    _complete_settings(labels, values)
    # 4. The version of the user's code, if there are several, also where labels differ already.
    _add_code_versions(labels, runs)
    # 5. One order of keys.
    keys = dict.fromkeys(key for label in labels for key in label)
    ordered = []
    for label in labels:
        ordered.append({key: printable(label[key]) for key in keys if key in label})
    return ordered


def is_setting(key: str) -> bool:
    """Return whether a label belongs to the setting, by its key."""
    return re.split(r"[./]", key)[0] in SETTING


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
    """Return a key that sorts the text `REFERENCE` first, and numbers in texts by value."""
    # A minus is a sign at the beginning of a word or value, as in lr=-2, but not in dirichlet-2.
    number = r"((?:(?<![^\s=])-)?\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
    parts: list[str | float] = list(re.split(number, text))
    parts[1::2] = map(float, parts[1::2])  # re.split puts the numbers at odd places
    return text != REFERENCE, parts


def _choices(run: Run) -> Texts:
    """Return the choices of a run. In config groups newer than the run it made the usual choice."""
    choices = NEW_GROUPS | dict(run.choices)
    choices["dataset"] = run.dataset or ""
    return choices


def _values_as_text(configs: Sequence[Mapping[str, Any]]) -> list[Texts]:
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


def _without_engine(values: Sequence[Texts]) -> list[Texts]:
    """Return the values without those of engine and device, except the precision."""
    rows = []
    for texts in values:
        row = {}
        for key, text in texts.items():
            if key == PRECISION or key.partition(".")[0] not in ("engine", "device"):
                row[key] = text
        rows.append(row)
    return rows


def _main_labels(choices: Sequence[Texts]) -> list[Labels]:
    """Return the `MAIN_CHOICES` that differ.

    A cell is a combination of data set, partition and so on. If each cell has one choice in such a
    config group, that choice is left out.
    """
    config_groups = []
    for name in MAIN_CHOICES:
        if len({chosen.get(name, "") for chosen in choices}) > 1:
            config_groups.append(name)
    if "cell" in config_groups:
        config_groups = [
            name for name in config_groups if name == "cell" or not _in_cell(name, choices)
        ]
    return [{name: chosen.get(name) or MISSING for name in config_groups} for chosen in choices]


def _in_cell(name: str, choices: Sequence[Texts]) -> bool:
    """Return whether a config group belongs to the setting, as cells do, and each cell has one
    choice in it."""
    cells = {chosen.get("cell") for chosen in choices}
    pairs = {(chosen.get("cell"), chosen.get(name)) for chosen in choices}
    return is_setting(name) and len(pairs) == len(cells)


def _parts_of_selectors(choices: Sequence[Texts]) -> list[Texts]:
    """Return the choices in config groups such as `selector/exploration`, of which selectors are
    made."""
    rows = []
    for chosen in choices:
        rows.append({key: text for key, text in chosen.items() if key.startswith("selector/")})
    return rows


def _named_choices(
    config_groups: Sequence[str],
    choices: Sequence[Texts],
    configs: Sequence[Mapping[str, Any]],
) -> list[Texts]:
    """Return the choices in some config groups.

    Choices with equal configs get the name of the first of them, so that they are no difference.
    """
    # `compared_config` turns an engine=auto that chose native into native. It gets this name, too.
    names: dict[Hashable, str] = {("engine", config_key({"engine": NATIVE})): "native"}
    rows = []
    for chosen, config in zip(choices, configs, strict=True):
        row = {}
        for name in config_groups:
            if name in chosen:
                key = name, config_key({name: config.get(name)})
                row[name] = names.setdefault(key, chosen[name])
        rows.append(row)
    return rows


def _distinguish(labels: Sequence[Labels], details: Sequence[Texts]) -> None:
    """Make labels of those `details` that distinguish groups with equal labels, in place.

    If a key distinguishes some groups of a method, all groups of the method get it as a label. A
    method is here all groups whose labels before this call are equal, except those of the setting.
    Otherwise the method would have another name in settings where it ran with one value only, and
    comparisons over settings would miss it. For example, if gpfl ran with rho 1 and 2 in one
    setting and only with 1 in another, the latter gets rho=1 as well.
    """
    methods = [_method_labels(label) for label in labels]
    # 1. Groups with equal labels get the details in which they differ.
    with_equal_labels: dict[Hashable, list[int]] = {}
    for index, label in enumerate(labels):
        with_equal_labels.setdefault(frozenset(label.items()), []).append(index)
    for indices in with_equal_labels.values():
        keys = {key for index in indices for key in details[index]}
        for key in sorted(keys):
            texts = [details[index].get(key, MISSING) for index in indices]
            if len(set(texts)) > 1:
                for index, text in zip(indices, texts, strict=True):
                    labels[index][key] = text
    # 2. All groups of a method get the keys that one of them has.
    keys_of: dict[Hashable, dict[str, None]] = {}
    for method, label in zip(methods, labels, strict=True):
        method_keys = keys_of.setdefault(method, {})
        method_keys.update((key, None) for key in label if not is_setting(key))
    for method, label, texts_by_key in zip(methods, labels, details, strict=True):
        for key in keys_of[method]:
            label.setdefault(key, texts_by_key.get(key, MISSING))


def _method_labels(label: Labels) -> Hashable:
    """Return the labels that name a method, in a hashable form."""
    return frozenset(item for item in label.items() if not is_setting(item[0]))


def _complete_settings(labels: Sequence[Labels], values: Sequence[Texts]) -> None:
    """Let all groups have the config values of settings that label one of them, in place.

    Otherwise a method that ran in one setting alone would seem to have a setting of its own. A
    group whose config does not have the key has no such label.
    """
    keys = {key for label in labels for key in label if is_setting(key) and "." in key}
    for label, texts in zip(labels, values, strict=True):
        for key in sorted(keys):
            if key in texts:
                label[key] = texts[key]
            else:
                label.pop(key, None)


def _add_code_versions(labels: Sequence[Labels], runs: Sequence[Run]) -> None:
    """Add the version of the user's code, in place, where there are several versions of the same
    classes."""
    versions = {(str(run.own_classes), run.code) for run in runs}
    num_versions = Counter(classes for classes, _ in versions)
    for label, run in zip(labels, runs, strict=True):
        if num_versions[str(run.own_classes)] > 1:
            label["code"] = str(run.code)
