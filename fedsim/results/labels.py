"""Labels: the choices and config values that distinguish groups of runs."""

import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from fedsim.core.configs import leaves, short_names
from fedsim.core.text import printable
from fedsim.results.grouping import NATIVE, compared_config, config_key
from fedsim.results.runs import Run

LABEL_ORDER = ("cell", "dataset", "partition", "model", "system", "clients", "selector")
OTHER_CHOICES = ("local_algorithm", "aggregator", "optimizer", "availability", "engine")
"""Config groups that label runs, in this order, if their labels are otherwise equal."""
SETTING = ("cell", "dataset", "partition", "model", "system", "clients")
"""Config groups whose choices and values define a setting, in which methods are compared."""
NEW_GROUPS = {"system": "none", "clients": "honest", "local_algorithm": "plain"}
"""The usual choices in config groups that earlier versions do not have."""
REFERENCE = "random"
"""The selector that others are compared with, if there are runs of it."""
CEILING = "clairvoyant"
"""The selector that shows what the best choices could gain. It is no method: it looks ahead."""
CONTROL = "random_control"
"""The selector that is random selection with other random numbers. Comparisons must find it equal
to random selection."""
Labels = dict[str, str]
"""Choices by config group, and config values as text by dotted key."""


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


def make_labels(runs: Sequence[Run]) -> list[Labels]:
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
    first_names: dict[Hashable, str] = {("engine", config_key({"engine": NATIVE})): "native"}
    named = []
    for chosen, config in zip(choices, configs, strict=True):
        names = {}
        for group in OTHER_CHOICES:
            if group in chosen:
                key = group, config_key({group: config.get(group)})
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
