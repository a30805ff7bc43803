"""The rule for which runs may be judged: their configs must agree with the preset's in all keys
that can change a result.

A preset describes several jobs, each with its choices and config. A group of runs is compared with
the job that is most like it. A deviation is a key in which they differ.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import pandas as pd

from fedsim.core.errors import ConfigError
from fedsim.report.summary import comparable_config
from fedsim.results.files import json_ready
from fedsim.results.frames import finished_rows, first_run, has_values

MAX_SHOWN = 3
"""Number of deviations that are shown."""


class UnjudgedError(Exception):
    """The reason why a number or a claim is not judged."""


@dataclass(frozen=True, eq=False)
class Cases:
    """The runs of one preset and size, by group, and checks whether they may be judged.

    Without a preset, or with one that is not shipped, no group has deviations. `substitutes` has,
    by config group, choices that may replace the preset's: a user may hold the same data in another
    form, for example.
    """

    groups: Mapping[str, pd.DataFrame]
    preset: str = ""
    scale: str = "full"
    substitutes: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @cached_property
    def deviations(self) -> Mapping[str, Sequence[str]]:
        """The deviations of each group from the most similar job of the preset, as `key=value
        (preset: value)`."""
        settings = preset_settings(self.preset, self.scale) if self.preset else ()
        configs = [comparable_config(config) for _, config in settings]
        deviations: dict[str, Sequence[str]] = {}
        for name, rows in self.groups.items():
            ignored = self.substituted(name)
            ours = _without(comparable_config(first_run(rows).config), ignored)
            each = [_differences(ours, _without(theirs, ignored)) for theirs in configs]
            deviations[name] = min(each, key=len, default=[])
        return deviations

    def substituted(self, name: str) -> list[str]:
        """Return the config groups in which a group of runs uses substitutes."""
        choices = first_run(self.groups[name]).choices
        return [key for key, values in self.substitutes.items() if choices.get(key) in values]

    def remark(self, name: str) -> str:
        """Return the substitutes that a group of runs uses, in words."""
        choices = first_run(self.groups[name]).choices
        return "; ".join(f"{key}={choices[key]}" for key in self.substituted(name))

    def rounds(self, name: str) -> str:
        """Return how many rounds a group has of those of the preset at full size; empty if it has
        as many, or if jobs of the preset differ in that."""
        ours = first_run(self.groups[name]).num_rounds
        lengths = {config["num_rounds"] for _, config in preset_settings(self.preset, "full")}
        if len(lengths) != 1 or ours in lengths:
            return ""
        return f"{ours} of {lengths.pop()} rounds"

    def nearest(self, expected: Mapping[str, str]) -> list[str]:
        """Return the groups with these choices that have the fewest deviations; several if they
        have equally many."""
        matching = [name for name, rows in self.groups.items() if has_values(rows, expected)]
        fewest = min((len(self.deviations[name]) for name in matching), default=0)
        return [name for name in matching if len(self.deviations[name]) == fewest]

    def usable(self, expected: Mapping[str, str]) -> pd.DataFrame:
        """Return the finished runs of the group with these choices.

        Raises `UnjudgedError` if there is none or more than one, if it deviates from the preset, or
        if it has no finished run.
        """
        nearest = self.nearest(expected)
        shown = ", ".join(f"{key}={value}" for key, value in expected.items())
        if not nearest:
            raise UnjudgedError(f"no runs of {shown}")
        if len(nearest) > 1:
            raise UnjudgedError(f"several runs are of {shown}: {', '.join(nearest)}")
        (name,) = nearest
        if deviations := self.deviations[name]:
            text = ", ".join(deviations[:MAX_SHOWN])
            num_hidden = len(deviations) - MAX_SHOWN
            text += f" and {num_hidden} more" if num_hidden > 0 else ""
            raise UnjudgedError(f"{name} is not as the preset: {text}")
        finished = finished_rows(self.groups[name])
        if finished.empty:
            raise UnjudgedError(f"{name} has no finished run")
        return finished


@cache
def preset_settings(
    preset: str, scale: str
) -> Sequence[tuple[Mapping[str, str], Mapping[str, Any]]]:
    """Return the choices and config of each job of a shipped preset at this scale, with seed 0;
    nothing if there is no such preset."""
    from fedsim.config.compose import (  # here: a report that judges nothing needs no torch
        compose_jobs,
        search_path,
    )
    from fedsim.config.settings import with_one_amount_of_work

    try:
        with search_path():
            jobs = compose_jobs([f"preset={preset}", f"scale={scale}", "seed=0"], multirun=True)
    except ConfigError:
        return ()
    return [(dict(job.choices), json_ready(with_one_amount_of_work(job.config))) for job in jobs]


def _without(values: Mapping[str, Any], groups: Sequence[str]) -> dict[str, Any]:
    """Return config values by dotted key, without those of some config groups."""
    return {key: value for key, value in values.items() if key.partition(".")[0] not in groups}


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return the deviations of `ours` from `theirs` in words.

    A key that one side lacks counts as null there, because a new key of fedsim is null where it
    changes nothing.
    """
    differences = []
    for key in sorted({*ours, *theirs}):
        if ours.get(key) != theirs.get(key):
            shown = f"{key}={ours[key]}" if key in ours else f"no {key}"
            differences.append(f"{shown} (preset: {theirs.get(key, 'none')})")
    return differences
