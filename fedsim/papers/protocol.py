"""Which runs may be judged: those whose configs are as the preset's in every key that can matter
for a result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from fedsim.core.configs import leaves
from fedsim.core.errors import ConfigError
from fedsim.results.files import json_ready
from fedsim.results.groups import Group, has_made, relevant

FREE = ("engine", "device", "client_accuracy")
"""Top-level keys that change a result by rounding alone, or none. Seeds, names, folders and
trackers are free, too."""
MOST_SHOWN = 3


class UnjudgedError(Exception):
    """The reason why a number or a claim is not judged."""


@dataclass(frozen=True)
class Cases:
    """The groups of one preset and size, and checks whether they may be judged.

    Without a preset, or with one that is not shipped, they are not compared with any.
    `substitutes`: by config group, other choices that may take the place of the preset's; for data
    that a preset downloads and a user holds in another form.
    """

    groups: Sequence[Group]
    preset: str = ""
    scale: str = "full"
    substitutes: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @cached_property
    def deviations(self) -> Mapping[Group, Sequence[str]]:
        """Keys in which runs differ from the nearest setting of the preset, as `key=value (preset:
        value)`."""
        settings = (preset_settings(self.preset, self.scale) if self.preset else None) or ()
        theirs = [comparable_config(config) for _, config in settings]
        found = {}
        for group in self.groups:
            without = self._substituted(group)
            ours = _without(comparable_config(group.runs[0].config), without)
            all_differences = (_differences(ours, _without(one, without)) for one in theirs)
            found[group] = min(all_differences, key=len, default=[])
        return found

    def _substituted(self, group: Group) -> list[str]:
        return [name for name, some in self.substitutes.items() if group.choices.get(name) in some]

    def remark(self, group: Group) -> str:
        """Substitutes that runs made use of."""
        return "; ".join(f"{name}={group.choices[name]}" for name in self._substituted(group))

    def find(self, wanted: Mapping[str, str]) -> Group | None:
        """The group that made these choices; of several, the one that deviates least from the
        preset."""
        return next(iter(self._nearest(wanted)), None)

    def _nearest(self, wanted: Mapping[str, str]) -> list[Group]:
        found = [
            g for g in self.groups if has_made(g.runs[0].config, {**g.choices, **g.labels}, wanted)
        ]
        least = min((len(self.deviations[group]) for group in found), default=0)
        return [group for group in found if len(self.deviations[group]) == least]

    def usable(self, wanted: Mapping[str, str]) -> Group:
        """The group that made these choices. Raises `UnjudgedError` if it cannot be judged."""
        nearest, shown = (
            self._nearest(wanted),
            ", ".join(f"{key}={value}" for key, value in wanted.items()),
        )
        if not nearest:
            raise UnjudgedError(f"no runs of {shown}")
        if len(nearest) > 1:
            raise UnjudgedError(
                f"several runs are of {shown}: {', '.join(group.name for group in nearest)}"
            )
        (group,) = nearest
        if deviations := self.deviations[group]:
            more = (
                f" and {len(deviations) - MOST_SHOWN} more" if len(deviations) > MOST_SHOWN else ""
            )
            raise UnjudgedError(
                f"{group.name} is not as the preset: {', '.join(deviations[:MOST_SHOWN])}{more}"
            )
        if not group.complete:
            raise UnjudgedError(f"{group.name} has no finished run")
        return group


@cache
def preset_settings(
    preset: str, scale: str
) -> Sequence[tuple[Mapping[str, str], Mapping[str, Any]]] | None:
    """The choices and configs of all jobs of a shipped preset in a size, at seed 0; None without
    such a preset."""
    from fedsim.config.compose import (
        compose_jobs,
        search_path,
    )  # here: a report that judges nothing needs no torch
    from fedsim.config.settings import with_one_amount_of_work

    try:
        with search_path():
            jobs = compose_jobs([f"preset={preset}", f"scale={scale}", "seed=0"], multirun=True)
    except ConfigError:
        return None
    return [(dict(job.choices), json_ready(with_one_amount_of_work(job.config))) for job in jobs]


def comparable_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """All values of a config by dotted key that can matter for a result."""
    return _without(dict(leaves(relevant(config))), FREE)


def _without(values: Mapping[str, Any], groups: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key.partition(".")[0] not in groups}


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """A key that one side lacks is one that is null there: new keys are null where nothing
    changes."""
    return [
        f"{f'{key}={ours[key]}' if key in ours else f'no {key}'} (preset: {theirs.get(key, 'none')})"
        for key in sorted({*ours, *theirs})
        if ours.get(key) != theirs.get(key)
    ]
