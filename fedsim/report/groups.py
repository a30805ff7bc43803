"""Runs that differ by their seed alone belong together, and are named by what tells them from the others."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedsim.config.moved import without_added_nulls
from fedsim.config.plan import IRRELEVANT
from fedsim.report.runs import Run, complete

SEEDS = ("seed", "partition_seed", "init_seed")
FIRST = ("cell", "dataset", "partition", "model", "selector")
"""Config groups whose choices name runs, in this order and before those of a selector's parts and single values."""
REFERENCE = "random"
"""The selector that others are compared with, where there is one."""


@dataclass(frozen=True, eq=False)
class Group:
    """Runs of one config at several seeds. `labels` say what differs from other groups, `{}` where there is one."""

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
    """Groups in the order of their labels: numbers by value, random selection first."""
    together: dict[str, list[Run]] = {}
    for run in runs:
        together.setdefault(json.dumps(relevant(run.config), sort_keys=True, default=str), []).append(run)
    kinds = list(together.values())
    groups = [
        Group(labels, sorted(kind, key=lambda run: run.seed))
        for labels, kind in zip(_labels([kind[0] for kind in kinds]), kinds, strict=True)
    ]
    return sorted(groups, key=lambda group: [rank(text) for text in group.labels.values()])


def show_labels(labels: Mapping[str, str]) -> str:
    """All of them, in their order."""
    return " ".join(show_label(key, value) for key, value in labels.items())


def show_label(key: str, value: str) -> str:
    """A choice by itself, a value with its key's last word."""
    return f"{key.rpartition('.')[2]}={value}" if "." in key else value


def rank(text: str) -> tuple[bool, list[str | float]]:
    """For sorting texts: numbers within them are ordered by value."""
    parts = re.split(r"(\d+(?:\.\d+)?)", text)
    return text != REFERENCE, [float(part) if position % 2 else part for position, part in enumerate(parts)]


def relevant(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without seeds (`init_seed=per_client` is none) and without what cannot change a result."""
    seeds = {k for k in SEEDS if not isinstance(config.get(k), str)}
    return without_added_nulls({k: v for k, v in config.items() if k not in seeds and k not in IRRELEVANT})


def _labels(runs: Sequence[Run]) -> list[dict[str, str]]:
    names = [name for name in FIRST if len({run.choices.get(name, "") for run in runs}) > 1]
    if "cell" in names:  # which decides the partition
        names = [name for name in names if name != "partition"]
    labels = [{name: run.choices.get(name, "-") for name in names} for run in runs]
    _tell_apart(labels, [{g: c for g, c in run.choices.items() if g.startswith("selector/")} for run in runs])
    _tell_apart(labels, [dict(flat(relevant(run.config))) for run in runs])
    return labels


def _tell_apart(labels: Sequence[dict[str, str]], values: Sequence[Mapping[str, Any]]) -> None:
    """Adds those values in which runs of the same label differ."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for position, label in enumerate(labels):
        alike.setdefault(tuple(label.values()), []).append(position)
    for positions in alike.values():
        for key in sorted({key for p in positions for key in values[p]}):
            shown = [str(values[p].get(key, "-")) for p in positions]
            if len(set(shown)) > 1:
                for p, text in zip(positions, shown, strict=True):
                    labels[p][key] = text


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Values of nested mappings by dotted key."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
