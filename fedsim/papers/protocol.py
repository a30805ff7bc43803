"""Whether runs are those that a preset describes: their configs are compared with the preset's, key by key.

A folder's name says nothing: a preset can be run with other rounds, learning rates or selectors under the same name.
Verdicts are for runs that follow the preset in every key that can matter for a result.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from fedsim.config.compose import compose_jobs, search_path
from fedsim.config.plan import with_one_amount_of_work
from fedsim.core.configs import flat
from fedsim.core.errors import ConfigError
from fedsim.results.files import json_ready
from fedsim.results.groups import Group, relevant
from fedsim.results.runs import Run

FREE = ("engine", "device", "client_accuracy")
"""Top-level keys that change a result by rounding alone, or none. Seeds, names, folders and trackers are free, too."""
MOST_SHOWN = 3


@dataclass(frozen=True)
class Protocol:
    """What a preset's own sweep sets: one flat config for each of its settings, seeds left out.

    `substitutes`: by config group, other choices that may take the place of the preset's; for data that a preset
    downloads and a user holds in another form.
    """

    preset: str
    scale: str
    settings: Sequence[Mapping[str, Any]]
    substitutes: Mapping[str, Sequence[str]]

    def deviations(self, group: Group) -> list[str]:
        """Keys in which runs differ from the nearest setting of the preset, as `key=value (preset: value)`."""
        without = [g for g, choices in self.substitutes.items() if group.choices.get(g) in choices]
        ours = comparable_config(group.runs[0].config, without)
        distances = [_differences(ours, _without(theirs, without)) for theirs in self.settings]
        return min(distances, key=len)

    def remarks(self, group: Group) -> list[str]:
        """Substitutes that runs made use of."""
        return [f"{g}={group.choices[g]}" for g, some in self.substitutes.items() if group.choices.get(g) in some]


def protocol_of(preset: str, scale: str, substitutes: Mapping[str, Sequence[str]] | None = None) -> Protocol | None:
    """The protocol of a shipped preset in a size; None where there is no such preset or size."""
    settings = _settings(preset, scale)
    return None if settings is None else Protocol(preset, scale, settings, substitutes or {})


@cache
def _settings(preset: str, scale: str) -> Sequence[Mapping[str, Any]] | None:
    composed = preset_settings(preset, scale)
    return None if composed is None else [comparable_config(config) for _, config in composed]


@cache
def preset_settings(preset: str, scale: str) -> Sequence[tuple[Mapping[str, str], Mapping[str, Any]]] | None:
    """The choices and configs of all jobs of a shipped preset in a size, at seed 0; None without such a preset."""
    try:
        with search_path():
            jobs = compose_jobs([f"preset={preset}", f"scale={scale}", "seed=0"], multirun=True)
    except ConfigError:
        return None
    return [(dict(job.choices), json_ready(with_one_amount_of_work(job.config))) for job in jobs]


def by_preset(runs: Iterable[Run]) -> dict[tuple[str, str], list[Run]]:
    """The runs of each preset and size, sorted by these; those without a preset are left out."""
    found: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        if preset := run.choices.get("preset"):
            found.setdefault((preset, run.choices.get("scale", "full")), []).append(run)
    return dict(sorted(found.items()))


def show_deviations(deviations: Sequence[str]) -> str:
    """The first of them, and how many there are more."""
    rest = len(deviations) - MOST_SHOWN
    return ", ".join(deviations[:MOST_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def comparable_config(config: Mapping[str, Any], without: Sequence[str] = ()) -> dict[str, Any]:
    """All values of a config by dotted key that can matter for a result, without those of some config groups."""
    return _without(dict(flat(relevant(config))), [*without, *FREE])


def _without(values: Mapping[str, Any], groups: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key.partition(".")[0] not in groups}


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """A key that one side lacks is one that is null there: new keys are null where nothing changes."""
    keys = sorted(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key))
    return [f"{_shown(key, ours)} (preset: {theirs.get(key, 'none')})" for key in keys]


def _shown(key: str, values: Mapping[str, Any]) -> str:
    return f"{key}={values[key]}" if key in values else f"no {key}"
