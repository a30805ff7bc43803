"""Groups of runs that differ only by their seed, labelled by what distinguishes them from other groups; and panels of
groups that are drawn and compared together: one panel per setting, with one line per method."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedsim.core.configs import IRRELEVANT, SEEDS, by_meaning, flat
from fedsim.results.runs import Run, complete

LABEL_ORDER = ("cell", "dataset", "partition", "model", "system", "selector")
"""Config groups whose choices label runs, in this order; parts of a selector and single values come after them."""
OTHER_CHOICES = ("aggregator", "optimizer", "availability", "engine")
"""Config groups whose choices label runs that differ in nothing that stands before them."""
SETTING = ("cell", "dataset", "partition", "model", "system")
"""Config groups whose choices and values define a setting, in which methods are compared."""
NEW_GROUPS = {"system": "none"}
"""Groups that runs of earlier versions do not have, and the choice that changes nothing."""
NATIVE = {"_target_": "NativeBackend", "workers": "auto"}
"""The config of engine=native."""
REFERENCE = "random"
"""The selector that others are compared with, if there are runs of it."""


@dataclass(frozen=True, eq=False)
class Group:
    """Runs of one config at several seeds. `labels` distinguish it from other groups; {} if it is the only one."""

    labels: Mapping[str, str]
    runs: Sequence[Run]

    @property
    def name(self) -> str:
        return show_labels(self.labels) or self.runs[0].choices.get("selector", "run")

    @property
    def choices(self) -> Mapping[str, str]:
        return self.runs[0].choices

    @property
    def complete(self) -> list[Run]:
        return complete(self.runs)

    @property
    def num_diverged(self) -> int:
        return sum(run.status == "diverged" for run in self.runs)


def group_runs(runs: Iterable[Run]) -> list[Group]:
    """The groups, sorted by their labels: numbers by value, random selection first.

    Of runs that are the same but for their names, as two presets can hold them, one counts (see `distinct`).
    """
    by_config: dict[str, list[Run]] = {}
    configs: dict[str, Mapping[str, Any]] = {}
    different = distinct(runs)
    for run, config in zip(different, compared_configs(different), strict=True):
        configs.setdefault(key := _key(config), config)
        by_config.setdefault(key, []).append(run)
    all_labels = _make_labels([members[0] for members in by_config.values()], list(configs.values()))
    groups = [
        Group(labels, sorted(members, key=lambda run: run.seeds))
        for labels, members in zip(all_labels, by_config.values(), strict=True)
    ]
    return sorted(groups, key=lambda group: [sort_key(text) for text in group.labels.values()])


def distinct(runs: Iterable[Run]) -> list[Run]:
    """The runs without repetitions: of equal configs and seeds the first that has finished, or else the first."""
    found: dict[str, Run] = {}
    given = list(runs)
    for run, config in zip(given, compared_configs(given), strict=True):
        key = f"{run.seeds} {_key(config)}"
        if key not in found or (run.status == "done" and found[key].status != "done"):
            found[key] = run
    return list(found.values())


def _key(config: Mapping[str, Any]) -> str:
    """A text that is the same for equal configs: 1 and 1.0 are the same number."""
    return json.dumps(_with_numbers_alike(config), sort_keys=True, default=str)


def _with_numbers_alike(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_numbers_alike(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_with_numbers_alike(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def show_labels(labels: Mapping[str, str]) -> str:
    """All labels as one text, in their order: choices of config groups by themselves, config values as `key=value`.

    Of a dotted key its last part is shown, where this says which of the labels it is.
    """
    ends = Counter(key.rpartition(".")[2] for key in labels)
    return " ".join(_show_label(key, value, whole=ends[key.rpartition(".")[2]] > 1) for key, value in labels.items())


def _show_label(key: str, value: str, *, whole: bool) -> str:
    if key in (*LABEL_ORDER, *OTHER_CHOICES) or "/" in key:
        return value
    return f"{key if whole else key.rpartition('.')[2]}={value}"


def sort_key(text: str) -> tuple[bool, list[str | float]]:
    """A key that sorts texts with numbers in them by value, and `REFERENCE` first."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)", text)
    return text != REFERENCE, [float(part) if position % 2 else part for position, part in enumerate(parts)]


def relevant(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without seeds and without keys that cannot change a result. `init_seed=per_client` is not a seed."""
    seeds = {k for k in SEEDS if not isinstance(config.get(k), str)}
    return by_meaning({k: v for k, v in config.items() if k not in seeds and k not in IRRELEVANT})


def compared_configs(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """What is `relevant` of each run, with engine=native where engine=auto took it: its results are the same."""
    configs = [relevant(run.config) for run in runs]
    taken = [str(run.summary.get("engine", "")).startswith("native") for run in runs]
    on_c = {_key(config) for config, native in zip(configs, taken, strict=True) if native and _is_auto(config)}
    return [{**config, "engine": NATIVE} if _key(config) in on_c else config for config in configs]


def _is_auto(config: Mapping[str, Any]) -> bool:
    engine = config.get("engine")
    return isinstance(engine, Mapping) and str(engine.get("_target_")) == "choose_backend"


def _make_labels(runs: Sequence[Run], configs: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    names = [name for name in LABEL_ORDER if len({_choice(run, name) for run in runs}) > 1]
    if "cell" in names:  # a cell determines the partition
        names = [name for name in names if name != "partition"]
    labels = [{name: _choice(run, name) or "-" for name in names} for run in runs]
    parts = [{g: c for g, c in run.choices.items() if g.startswith("selector/")} for run in runs]
    _add_distinguishing_values(labels, parts)
    _add_distinguishing_values(labels, _other_choices(runs, configs))
    values = [dict(flat(config)) for config in configs]
    _add_distinguishing_values(labels, values)
    _tell_setting_everywhere(labels, values)
    return labels


def _other_choices(runs: Sequence[Run], configs: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The choice of each run in each of `OTHER_CHOICES`; of choices with the same config the first one."""
    first = {f"engine {_key(NATIVE)}": "native"}
    return [
        {
            g: first.setdefault(f"{g} {_key(config.get(g) or {})}", run.choices[g])
            for g in OTHER_CHOICES
            if g in run.choices
        }
        for run, config in zip(runs, configs, strict=True)
    ]


def _choice(run: Run, group: str) -> str:
    """The choice made in a config group, "" where there was none; runs from before a group came made its default."""
    return run.choices.get(group, NEW_GROUPS.get(group, ""))


def _tell_setting_everywhere(labels: Sequence[dict[str, str]], values: Sequence[Mapping[str, Any]]) -> None:
    """Add the values of settings that label any runs to the labels of all that have them, in place.

    A method that was run in one setting alone is so told to belong to it.
    """
    keys = [key for key in dict.fromkeys(k for label in labels for k in label) if is_setting(key) and "." in key]
    for label, own in zip(labels, values, strict=True):
        label.update({key: str(own[key]) for key in keys if key in own})


def is_setting(key: str) -> bool:
    """Whether a label's key, of a config group or a value, is one of a setting."""
    return key.partition(".")[0] in SETTING


def _add_distinguishing_values(labels: Sequence[dict[str, str]], values: Sequence[Mapping[str, Any]]) -> None:
    """Add to `labels`, in place, those of the `values` in which runs with the same labels differ."""
    same_label: dict[tuple[str, ...], list[int]] = {}
    for position, label in enumerate(labels):
        same_label.setdefault(tuple(label.values()), []).append(position)
    for positions in same_label.values():
        for key in sorted({key for p in positions for key in values[p]}):
            shown = [str(values[p].get(key, "-")) for p in positions]
            if len(set(shown)) > 1:
                for p, text in zip(positions, shown, strict=True):
                    labels[p][key] = text


def has_made(config: Mapping[str, Any], choices: Mapping[str, str], wanted: Mapping[str, Any]) -> bool:
    """Whether a run made the choices `wanted` in config groups, or has these config values (`partition.alpha`)."""
    values = {**{key: str(value) for key, value in flat(config)}, **choices}
    return all(is_equal(values.get(name), str(value)) for name, value in wanted.items())


def is_equal(found: str | None, wanted: str) -> bool:
    """Whether two texts are equal, or represent the same number."""
    try:
        return found == wanted or (found is not None and float(found) == float(wanted))
    except ValueError:
        return False


@dataclass(frozen=True, eq=False)
class Panel:
    """The groups of one setting, by the labels that distinguish them."""

    title: str
    lines: Mapping[str, Group]

    def reference(self, selector: str) -> Group:
        """The group of the given selector, or the first group."""
        groups = list(self.lines.values())
        return next((g for g in groups if g.choices.get("selector") == selector), groups[0])

    def reference_of(self, group: Group, choice: str) -> Group | None:
        """The group of selector `choice`, or the line of that name, to compare `group` with; None if there is none.

        Of several, as where learning rates are varied, too, it is the one that is most like `group` in what labels
        the two.
        """
        found = [other for name, other in self.lines.items() if choice in (name, other.choices.get("selector"))]
        return max(found, key=lambda other: _num_shared(group, other), default=None)

    @property
    def besides_partition(self) -> str:
        """What distinguishes its setting from others but for the division of the data, as text."""
        labels = next(iter(self.lines.values())).labels
        names = [k for k in labels if is_setting(k) and k.partition(".")[0] not in DIVISION]
        return show_labels({k: labels[k] for k in names})

    def name_of(self, group: Group) -> str:
        return next(name for name, other in self.lines.items() if other is group)


def _num_shared(group: Group, other: Group) -> int:
    """The number of labels of either, besides selectors and their parts, in which two groups are alike.

    A group that differs from no other by a value has no label of it, and yet the value.
    """
    labels = {key for key in (*group.labels, *other.labels) if key.partition(".")[0].partition("/")[0] != "selector"}
    ours, theirs = ({key: _label(one, key) for key in labels} for one in (group, other))
    return sum(ours[key] == theirs[key] for key in labels)


def _label(group: Group, key: str) -> str | None:
    """Its label, or what it would be: a choice in a config group, or a value."""
    if key in group.labels or key in group.choices:
        return group.labels.get(key, group.choices.get(key))
    found = dict(flat(group.runs[0].config)).get(key)
    return None if found is None else str(found)


DIVISION = ("cell", "partition")
"""Config groups among those of a setting that say how the data are divided among clients."""


def make_panels(groups: Sequence[Group]) -> list[Panel]:
    """Panels sorted by setting. If groups differ only by setting, they are the lines of a single panel."""
    if all(is_setting(name) for group in groups for name in group.labels):
        return [Panel("", {group.name: group for group in groups})]
    panels: dict[str, dict[str, Group]] = {}
    for group in groups:
        title = show_labels({k: v for k, v in group.labels.items() if is_setting(k)})
        line = show_labels({k: v for k, v in group.labels.items() if not is_setting(k)})
        panels.setdefault(title, {})[line] = group
    return [Panel(title, panels[title]) for title in sorted(panels, key=sort_key)]


def drawn_panels(panels: Sequence[Panel]) -> list[Panel]:
    """The panels with those of their lines that have finished runs; panels without any are left out."""
    found = [Panel(panel.title, {name: g for name, g in panel.lines.items() if g.complete}) for panel in panels]
    return [panel for panel in found if panel.lines]
