"""The summary of a report: a JSON file small enough to be kept with the code, for comparison with
later results."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsim.papers.protocol import FREE, comparable_config
from fedsim.papers.published import Claim, Number
from fedsim.results.groups import Group, show_labels
from fedsim.results.measures import measured
from fedsim.results.reading import (
    LIST,
    MAPPING,
    NONE,
    NUMBER,
    TEXT,
    DamagedError,
    content_of,
    has_kinds,
    is_mapping_of,
    parse_json,
)
from fedsim.results.runs import ReportError
from fedsim.results.table import Table, number

SUMMARY_MEASURES = {
    "final_accuracy": "final_accuracy",
    "accuracy_after_15_percent": "accuracy@0.15",
    "accuracy_after_50_percent": "accuracy@0.5",
    "accuracy_after_last_round": "accuracy@1.0",
    "rounds_to_cover": "rounds_to_cover",
    "selection_gini": "selection_gini",
    "most_selections": "most_selections",
    "participation": "participation",
}
"""What every summary holds, by the key in the file, and the names of these measures."""
FOLDERS = ("dataset.path",)
"""Config values that are of a machine."""
_NO_CHOICE = (*FREE, "tracker", "hydra/launcher")
"""Config groups that change no result, or by rounding alone."""


def make_summary(
    groups: Sequence[Group], verdicts: Mapping[str, str], printed: Sequence[Number | Claim] = ()
) -> dict[str, Any]:
    """For each group and seed the `SUMMARY_MEASURES` and what judging the `printed` takes, and
    where it comes from.

    A group has its choices of config groups and a hash of its config, by which `compare_summaries`
    finds it again; each run has the engine and the commit that made it. `verdicts` are those on
    numbers and claims by their ids.
    """
    more = {
        one.measure: one.measure for one in printed if one.measure not in SUMMARY_MEASURES.values()
    }
    measures = {**SUMMARY_MEASURES, **more}
    made = []
    for group in groups:
        seeds: dict[str, dict[str, float | None]] = {str(run.seeds): {} for run in group.complete}
        for key, values in zip(measures, measured(group, measures.values()), strict=True):
            for of_run, value in zip(seeds.values(), values, strict=True):
                of_run[key] = None if value is None else round(value, 5)
        about = {
            "labels": dict(group.labels),
            "choices": {
                name: choice for name, choice in group.choices.items() if name not in _NO_CHOICE
            },
            "config": config_hash(group.runs[0].config),
            "diverged": group.num_diverged,
        }
        made_by = {}
        for run in group.complete:
            dirty = (run.summary.get("revision") or {}).get("dirty")
            torch = run.summary.get("environment", {}).get("torch")
            origin = {
                "engine": run.summary.get("engine"),
                "commit": run.commit,
                "dirty": dirty,
                "torch": torch,
            }
            made_by[str(run.seeds)] = origin
        made.append({**about, "seeds": seeds, "made_by": made_by})
    return {"groups": made, "verdicts": dict(verdicts)}


def config_hash(config: Mapping[str, Any]) -> str:
    """A hash of all config values that can matter for a result, but for seeds, engine, device and
    folders of data."""
    values = {key: value for key, value in comparable_config(config).items() if key not in FOLDERS}
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def compare_summaries(current: Mapping[str, Any], earlier: Mapping[str, Any]) -> Table:
    """A table comparing two summaries: final accuracies at the seeds that both have, and verdicts
    that differ.

    Groups are the same if their configs are; of several, as where data sets differ by folder, the
    one that is most like in its choices and labels. Raises `ReportError` if nothing can be
    compared: no group is in both, or none has a seed in common.
    """
    pairs = [(group, _counterpart(group, earlier["groups"])) for group in current["groups"]]
    rows = [_compared(group, other) for group, other in pairs]
    if not any(int(row[1]) for row in rows):
        raise ReportError(
            f"--against: nothing to compare. These runs: {_described(current['groups'])}; the earlier summary:"
            f" {_described(earlier['groups'])}. Compare with one of the same preset and size, at seeds that it has"
        )
    found = {id(other) for _, other in pairs if other is not None}
    alone = [_name(group) for group in earlier["groups"] if id(group) not in found]
    notes = [_changed_verdicts(current["verdicts"], earlier["verdicts"])]
    notes += [f"In the earlier summary alone: {', '.join(alone)}."] if alone else []
    head = [
        "run",
        "common seeds",
        "mean difference of final accuracy",
        "largest",
        "engine",
        "commit",
        "earlier engine",
    ]
    return Table(
        "against", "Against an earlier summary", [*head, "earlier commit"], rows, " ".join(notes)
    )


def _counterpart(
    group: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    def alike(other: Mapping[str, Any]) -> int:
        return sum(len(group[name].items() & other[name].items()) for name in ("choices", "labels"))

    return max(
        (other for other in earlier if other.get("config") == group["config"]),
        key=alike,
        default=None,
    )


def _compared(group: Mapping[str, Any], other: Mapping[str, Any] | None) -> list[str]:
    ours, before = (
        {s: m["final_accuracy"] for s, m in (one or {"seeds": {}})["seeds"].items()}
        for one in (group, other)
    )
    differences = {s: value - before[s] for s, value in ours.items() if value and before.get(s)}
    largest = number(max(map(abs, differences.values()), default=None), ".4f")
    mean = number(sum(differences.values()) / len(differences) if differences else None, "+.4f")
    origins = [
        _origin(one, list(differences), key)
        for one in (group, other or {})
        for key in ("engine", "commit")
    ]
    return [_name(group), number(len(differences)), mean, largest, *origins]


def _origin(group: Mapping[str, Any], seeds: Sequence[str], key: str) -> str:
    """The engines or commits of these runs; commits by their first ten digits."""
    made = group.get("made_by", {})
    found = {str(made.get(seed, {}).get(key) or "not recorded") for seed in seeds}
    return (
        ", ".join(sorted(text if key == "engine" or " " in text else text[:10] for text in found))
        or "-"
    )


def _changed_verdicts(current: Mapping[str, str], earlier: Mapping[str, str]) -> str:
    changed = [
        f"{key} ({earlier[key]}, now {new})"
        for key, new in current.items()
        if earlier.get(key, new) != new
    ]
    both = len(current.keys() & earlier.keys())
    parts = [f"Verdicts that differ: {', '.join(changed) or 'none'}, of {both} in both."]
    for name, keys in (
        ("new", current.keys() - earlier.keys()),
        ("gone", earlier.keys() - current.keys()),
    ):
        parts += [f"Verdicts that are {name}: {', '.join(sorted(keys))}."] if keys else []
    return " ".join(parts)


def _described(groups: Sequence[Mapping[str, Any]]) -> str:
    shown = [f"{_name(group)} (seeds {', '.join(group['seeds']) or 'none'})" for group in groups]
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


def _name(group: Mapping[str, Any]) -> str:
    return show_labels(group["labels"]) or "run"


def read_summary_file(path: Path, option: str = "") -> dict[str, Any]:
    """The summary.json of a report. Raises `ReportError`, which names the `option`, if the file is
    not one."""
    name = f"{option} {path}".strip()
    try:
        earlier = parse_json(content_of(path), path.name)
    except DamagedError as error:
        raise ReportError(f"{name}: not the summary.json of a report ({error})") from error
    is_sound = has_kinds(earlier, {"groups": LIST, "verdicts": MAPPING}) and earlier.keys() >= {
        "groups",
        "verdicts",
    }
    if not (
        is_sound
        and is_mapping_of(earlier["verdicts"], TEXT)
        and all(map(_is_group, earlier["groups"]))
    ):
        raise ReportError(
            f"{name}: not the summary.json of a report (groups and verdicts are not as it writes them)"
        )
    return {"groups": earlier["groups"], "verdicts": earlier["verdicts"]}


def _is_group(group: Any) -> bool:
    """Return whether it is a group of `make_summary`, as far as `compare_summaries` reads it."""
    return (
        has_kinds(group, {"config": TEXT, "seeds": MAPPING, "made_by": MAPPING})
        and is_mapping_of(group.get("labels"), TEXT)
        and is_mapping_of(group.get("choices"), TEXT)
        and all(is_mapping_of(values, NUMBER | NONE) for values in group.get("seeds", {}).values())
        and all("final_accuracy" in values for values in group["seeds"].values())
        and all(isinstance(origin, dict) for origin in group.get("made_by", {}).values())
    )
