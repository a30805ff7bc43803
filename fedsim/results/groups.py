"""Groups of runs that differ only by their seed, labelled by what distinguishes them from other
groups; and panels of groups that are drawn and compared together: one panel per setting, with one
line per method."""

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from fedsim.core.configs import IRRELEVANT_KEYS, SEED_KEYS, SHORTHANDS, canonical, leaves
from fedsim.core.disk import conf_dir
from fedsim.core.server_data import declared_signals, server_data
from fedsim.core.text import printable
from fedsim.results.runs import Run

LABEL_ORDER = ("cell", "dataset", "partition", "model", "system", "clients", "selector")
OTHER_CHOICES = ("local_algorithm", "aggregator", "optimizer", "availability", "engine")
"""Config groups whose choices label runs, in this order: the others those that differ in nothing
before them."""
SETTING = ("cell", "dataset", "partition", "model", "system", "clients")
"""Config groups whose choices and values define a setting, in which methods are compared."""
NEW_GROUPS = {"system": "none", "clients": "honest", "local_algorithm": "plain"}
"""Choices in groups that runs of earlier versions lack."""
NATIVE = {"_target_": "NativeBackend", "workers": "auto"}
"""The config of engine=native."""
SYMBOLS = {key: symbol for symbol, (*_, key) in SHORTHANDS.items()}
REFERENCE = "random"
"""The selector that others are compared with, if there are runs of it."""
CEILING = "clairvoyant"
"""The selector that is no method: what the best choices could have bought."""
CONTROL = "random_control"
"""The selector that is random selection by other draws, and must come out level with it."""
CLASSES: Mapping[str, str] = {
    "updates": r"gradient|update of|soft labels|(^|; )training(;|$)",
    "label counts": r"label.counts",
    "losses": r"loss",
    "speeds": r"seconds|timed|resources|response",
    "nothing": r"^nothing",
}
"""What methods ask of clients, and what tells it in a text: of several the first."""
AT_SERVER = "; server: "
"""Text in the class of a method between what it asks of clients and what it needs at the server."""


@dataclass(frozen=True, eq=False)
class Group:
    """Runs of one config at several seeds. `labels` distinguish it from other groups; {} if it is
    the only one."""

    labels: Mapping[str, str]
    runs: Sequence[Run]

    @cached_property
    def name(self) -> str:
        return show_labels(self.labels) or printable(self.runs[0].choices.get("selector", "run"))

    @cached_property
    def choices(self) -> Mapping[str, str]:
        return self.runs[0].choices

    @cached_property
    def complete(self) -> list[Run]:
        return [run for run in self.runs if run.status == "done"]

    @cached_property
    def beside_selector(self) -> set[tuple[str, str]]:
        """Choices and values, but for those of the selector."""
        values = {**dict(leaves(compared_config(self.runs[0]))), **self.choices}
        return {
            (key, str(value)) for key, value in values.items() if not key.startswith("selector")
        }

    @property
    def num_diverged(self) -> int:
        return sum(run.status == "diverged" for run in self.runs)


def group_runs(runs: Iterable[Run]) -> list[Group]:
    """The groups of the `distinct` runs, sorted by their labels: numbers by value, random selection
    first."""
    by_config: dict[Hashable, list[Run]] = {}
    for run in distinct(runs):
        config = compared_config(run)
        engine = config.get("engine")
        precision = engine.get("precision", "float32") if isinstance(engine, Mapping) else "float32"
        by_config.setdefault(_key({**config, "device": "any", "engine": precision}), []).append(run)
    all_members = [members for same in by_config.values() for members in _by_engine(same)]
    all_labels = _make_labels([members[0] for members in all_members])
    groups = [
        Group(labels, sorted(members, key=lambda run: run.seeds))
        for labels, members in zip(all_labels, all_members, strict=True)
    ]
    return sorted(groups, key=lambda group: [sort_key(text) for text in group.labels.values()])


def _by_engine(runs: Sequence[Run]) -> list[Sequence[Run]]:
    """Runs that differ in seeds, engine and device: all together if no seed is there twice, as
    where a GPU ran some of them; else, as where engines are compared, those of each."""
    if len({run.seeds for run in runs}) == len(runs):
        return [runs]
    found: dict[Hashable, list[Run]] = {}
    for run in runs:
        found.setdefault(_key(compared_config(run)), []).append(run)
    return list(found.values())


def distinct(runs: Iterable[Run]) -> list[Run]:
    """Of equal configs and seeds the first run that has finished, or else the first."""
    found: dict[Hashable, Run] = {}
    for run in runs:
        key = run.seeds, _key(compared_config(run))
        if key not in found or (run.status == "done" and found[key].status != "done"):
            found[key] = run
    return list(found.values())


def relevant(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without seeds and without keys that cannot change a result. `init_seed=per_client`
    is not a seed."""
    seeds = {k for k in SEED_KEYS if not isinstance(config.get(k), str)}
    return canonical(
        {k: v for k, v in config.items() if k not in seeds and k not in IRRELEVANT_KEYS}
    )


def compared_config(run: Run) -> dict[str, Any]:
    """Return what is `relevant` of a run, with engine=native where engine=auto took it, and the
    user's code."""
    config = relevant(run.config) | ({"code": run.code} if run.code else {})
    engine = config.get("engine")
    is_auto = isinstance(engine, Mapping) and engine.get("_target_") == "choose_backend"
    took_native = str(run.summary.get("engine", "")).startswith("native")
    return {**config, "engine": NATIVE} if is_auto and took_native else config


def _key(config: Mapping[str, Any]) -> Hashable:
    """The same for equal configs: 1 and 1.0 are the same number."""
    return frozenset(
        (key, str(value) if isinstance(value, list) else value) for key, value in leaves(config)
    )


def show_labels(labels: Mapping[str, str]) -> str:
    """All labels as one text: choices of config groups by themselves, config values as `key=value`,
    of whose dotted key the last part is shown where this says which of the labels it is."""
    told = {SYMBOLS.get(key, key): value for key, value in labels.items()}
    ends = Counter(key.rpartition(".")[2] for key in told)
    shown = []
    for key, value in told.items():
        end = key.rpartition(".")[2]
        is_choice = key in (*LABEL_ORDER, *OTHER_CHOICES) or "/" in key
        shown.append(value if is_choice else f"{key if ends[end] > 1 else end}={value}")
    return " ".join(shown)


def sort_key(text: str) -> tuple[bool, list[str | float]]:
    """A key that sorts texts with numbers in them by value, and `REFERENCE` first."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)", text)
    return text != REFERENCE, [
        float(part) if position % 2 else part for position, part in enumerate(parts)
    ]


def _make_labels(runs: Sequence[Run]) -> list[dict[str, str]]:
    made = [{**NEW_GROUPS, **run.choices} for run in runs]
    names = [name for name in LABEL_ORDER if len({choices.get(name, "") for choices in made}) > 1]
    if "cell" in names:  # leave out what it determines, such as the partition
        seen = {
            name: len({(choices.get("cell"), choices.get(name)) for choices in made})
            for name in names
        }
        names = [n for n in names if n == "cell" or not is_setting(n) or seen[n] > seen["cell"]]
    labels = [{name: choices.get(name) or "-" for name in names} for choices in made]
    configs = [compared_config(run) for run in runs]
    first: dict[Hashable, str] = {
        ("engine", _key({"engine": NATIVE})): "native"
    }  # of choices with the same config
    others = [
        {
            group: first.setdefault((group, _key({group: config.get(group)})), choices[group])
            for group in OTHER_CHOICES
            if group in choices
        }
        for choices, config in zip(made, configs, strict=True)
    ]
    parts = [
        {g: choice for g, choice in choices.items() if g.startswith("selector/")}
        for choices in made
    ]
    values = [dict(leaves(config)) for config in configs]
    for told in (parts, others, values):
        _add_distinguishing(labels, told)
    # A setting's values that label any runs label all that have them: so a method run in one
    # setting alone is in it.
    settings = dict.fromkeys(
        key for label in labels for key in label if is_setting(key) and "." in key
    )
    for label, own in zip(labels, values, strict=True):
        label.update({key: str(own[key]) for key in settings if key in own})
    versions = Counter(classes for classes, _ in {(str(run.own_classes), run.code) for run in runs})
    for label, run in zip(labels, runs, strict=True):
        if (
            versions[str(run.own_classes)] > 1
        ):  # in other settings, too, over which methods are compared
            label["code"] = str(run.code)
    return [{key: printable(text) for key, text in label.items()} for label in labels]


def is_setting(key: str) -> bool:
    return key.partition(".")[0] in SETTING


def _add_distinguishing(
    labels: Sequence[dict[str, str]], values: Sequence[Mapping[str, Any]]
) -> None:
    """Add to `labels`, in place, those of the `values` in which runs with the same labels
    differ."""
    same_label: dict[tuple[str, ...], list[int]] = {}
    for position, label in enumerate(labels):
        same_label.setdefault(tuple(label.values()), []).append(position)
    for positions in same_label.values():
        for key in sorted({key for p in positions for key in values[p]}):
            shown = [str(values[p].get(key, "-")) for p in positions]
            if len(set(shown)) > 1:
                for p, text in zip(positions, shown, strict=True):
                    labels[p][key] = text


def has_made(
    config: Mapping[str, Any], choices: Mapping[str, str], wanted: Mapping[str, Any]
) -> bool:
    """Whether a run has made the choices `wanted`, or has these config values
    (`partition.alpha`)."""
    values = {**{key: str(value) for key, value in leaves(config)}, **choices}
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

    @property
    def reference(self) -> Group:
        """The first group of `REFERENCE`, or the first of all."""
        return min(
            self.lines.values(), key=lambda group: group.choices.get("selector") != REFERENCE
        )

    def reference_of(self, group: Group, choice: str) -> Group | None:
        """The group of selector `choice`, or the line of that name, to compare `group` with: of
        several the one whose config is most like that of `group`; None if there is none."""
        found = [
            other
            for name, other in self.lines.items()
            if choice in (name, other.choices.get("selector"))
        ]
        return max(
            found,
            key=lambda other: len(group.beside_selector & other.beside_selector),
            default=None,
        )

    @property
    def besides_partition(self) -> str:
        """What distinguishes its setting from others but for how the data are divided among
        clients, as text."""
        labels = next(iter(self.lines.values())).labels
        names = [
            k for k in labels if is_setting(k) and k.partition(".")[0] not in ("cell", "partition")
        ]
        return show_labels({k: labels[k] for k in names})

    def name_of(self, group: Group) -> str:
        return next(name for name, other in self.lines.items() if other is group)


def class_of(groups: Sequence[Group]) -> str:
    """Return what a method asks of clients, one of `CLASSES`, and needs at the server: "nothing;
    server: the test set".

    summary.json says both (`asks`, `server_data`). For earlier runs the file of the shipped choice
    and the source of the selector's class do. "everybody trains" where that is so in one of the
    groups; "unknown" where nothing is known.
    """
    ratios = [[run.columns["participation_ratio"] for run in group.complete] for group in groups]
    if any(
        np.equal(np.concatenate(own), 1).all() for own in ratios
    ):  # elsewhere clients may be away
        return "everybody trains"
    run = groups[0].complete[0]
    text = str(run.summary.get("asks") or _asked(run.choices.get("selector", "")))
    asked = next((name for name, pattern in CLASSES.items() if re.search(pattern, text)), "unknown")
    held = str(
        run.summary.get("server_data") or server_data(declared_signals(run.config.get("selector")))
    )
    return asked if held == "nothing" else f"{asked}{AT_SERVER}{held}"


@cache
def _asked(choice: str) -> str:
    """What the file of a shipped selector, or of the one that it builds on, says that it asks;
    empty if it is none."""
    path = conf_dir() / "selector" / f"{choice}.yaml"
    text = (
        path.read_text(encoding="utf-8") if re.fullmatch(r"\w+", choice) and path.is_file() else ""
    )
    told, base = (
        re.search(line, text, re.MULTILINE) for line in (r"^#\s+asks:\s+(.+)$", r"^\s+- (\w+)$")
    )
    return told[1] if told else _asked(base[1]) if base else ""


def split_labels(labels: Mapping[str, str]) -> tuple[str, str]:
    """What tells a setting, and what a method in it, as texts."""
    setting = {key: text for key, text in labels.items() if is_setting(key)}
    return show_labels(setting), show_labels(
        {key: text for key, text in labels.items() if key not in setting}
    )


def make_panels(groups: Sequence[Group]) -> list[Panel]:
    """One a setting, sorted; groups that differ only by setting are the lines of a single panel."""
    if all(is_setting(name) for group in groups for name in group.labels):
        return [Panel("", {group.name: group for group in groups})]
    panels: dict[str, dict[str, Group]] = {}
    for group in groups:
        title, line = split_labels(group.labels)
        panels.setdefault(title, {})[line] = group
    return [Panel(title, panels[title]) for title in sorted(panels, key=sort_key)]
