"""The summary of a report: a JSON file small enough to be kept with the code, for comparison with later results."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsim.papers.protocol import FREE, comparable_config
from fedsim.papers.published import Claim, Number
from fedsim.results.groups import Group, show_labels
from fedsim.results.measures import find_measure
from fedsim.results.runs import ReportError, Run
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


def make_summary(
    groups: Sequence[Group], verdicts: Mapping[str, str], printed: Sequence[Number | Claim] = ()
) -> dict[str, Any]:
    """For each group and seed the `SUMMARY_MEASURES` and what judging the `printed` takes, and where it comes from.

    A group has its choices of config groups and a hash of its config, by which `compare_summaries` finds it again; each
    run has the engine and the commit that made it. `verdicts` are those on numbers and claims by their ids.
    """
    names = dict(SUMMARY_MEASURES) | {one.measure: one.measure for one in printed}
    always = set(SUMMARY_MEASURES.values())
    kept = {key: find_measure(name) for key, name in names.items() if key in SUMMARY_MEASURES or name not in always}
    return {
        "groups": [
            {
                "labels": dict(group.labels),
                "choices": {name: choice for name, choice in group.choices.items() if name not in _NO_CHOICE},
                "config": config_hash(group.runs[0].config),
                "diverged": group.num_diverged,
                "seeds": {
                    str(run.seeds): {key: _rounded(measure(run)) for key, measure in kept.items()}
                    for run in group.complete
                },
                "made_by": {str(run.seeds): made_by(run) for run in group.complete},
            }
            for group in groups
        ],
        "verdicts": dict(verdicts),
    }


FOLDERS = ("dataset.path",)
"""Config values that are of a machine."""
_NO_CHOICE = (*FREE, "tracker", "hydra/launcher")
"""Config groups that change no result, or by rounding alone."""


def config_hash(config: Mapping[str, Any]) -> str:
    """A hash of all config values that can matter for a result, but for seeds, engine, device and folders of data."""
    values = {key: value for key, value in comparable_config(config).items() if key not in FOLDERS}
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def made_by(run: Run) -> dict[str, Any]:
    """The engine and the commit that a run's summary names; null where it names none."""
    revision = run.summary.get("revision") or {}
    return {
        "engine": run.summary.get("engine"),
        "commit": run.commit,
        "dirty": revision.get("dirty"),
        "torch": run.summary.get("environment", {}).get("torch"),
    }


def compare_summaries(current: Mapping[str, Any], earlier: Mapping[str, Any]) -> Table:
    """A table comparing two summaries: final accuracies at the seeds that both have, and verdicts that differ.

    Groups are the same if their configs are, or, where the earlier file has none, if all choices that it records agree.
    Raises `ReportError` if nothing can be compared: no group is in both, or none has a seed in common.
    """
    pairs = [(group, _counterpart(group, current["groups"], earlier["groups"])) for group in current["groups"]]
    rows = [_compared(group, other) for group, other in pairs]
    if not any(int(row[1]) for row in rows):
        raise ReportError(
            "--against: nothing to compare. These runs: "
            f"{_described(current['groups'])}; the earlier summary: {_described(earlier['groups'])}. A run is the same"
            " if all its choices and config values but seed, engine and device are; compare with the summary of the"
            " same preset and size, at seeds that it has"
        )
    found = {id(other) for _, other in pairs if other is not None}
    alone = [_name(group) for group in earlier["groups"] if id(group) not in found]
    notes = [_changed_verdicts(current["verdicts"], earlier["verdicts"])]
    notes += [f"In the earlier summary alone: {', '.join(alone)}."] if alone else []
    head = ["run", "common seeds", "mean difference of final accuracy", "largest", "engine", "commit", "earlier engine"]
    return Table("against", "Against an earlier summary", [*head, "earlier commit"], rows, " ".join(notes))


def _counterpart(
    group: Mapping[str, Any], current: Sequence[Mapping[str, Any]], earlier: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    """The one earlier group with the same config; None if there is none, or if several could be it."""
    if exact := [other for other in earlier if "config" in other and other["config"] == group["config"]]:
        alike = [*exact, *(one for one in current if one.get("config") == group["config"])]
        if len({_folders(one) for one in alike}) > 1:  # here they tell data sets apart, which the hash does not
            exact = [other for other in exact if _folders(other) == _folders(group)]
        return next((other for other in exact if _agree(group, other)), exact[0] if exact else None)
    agreeing = [other for other in earlier if "config" not in other and _agree(group, other)]
    if len(agreeing) != 1 or sum(_agree(one, agreeing[0]) for one in current) != 1:
        return None
    return agreeing[0]


def _folders(group: Mapping[str, Any]) -> tuple[str | None, ...]:
    """Those labels that are folders of data."""
    return tuple(group["labels"].get(key) for key in FOLDERS)


def _agree(group: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether all choices and labels that both groups have are the same, and none of the other's labels is missing."""
    ours = {**group.get("choices", {}), **group["labels"]}
    theirs = {**other.get("choices", {}), **other["labels"]}
    return other["labels"].keys() <= ours.keys() and all(
        ours[name] == value for name, value in theirs.items() if name in ours
    )


def _compared(group: Mapping[str, Any], other: Mapping[str, Any] | None) -> list[str]:
    before = {} if other is None else other["seeds"]
    common = [s for s in group["seeds"] if s in before and _final(group["seeds"][s]) and _final(before[s])]
    differences = [_final(group["seeds"][s]) - _final(before[s]) for s in common]
    largest = number(max(map(abs, differences), default=None), ".4f")
    mean = number(sum(differences) / len(differences) if differences else None, "+.4f")
    origins = [_origin(one, common, key) for one in (group, other or {}) for key in ("engine", "commit")]
    return [_name(group), number(len(common)), mean, largest, *origins]


def _origin(group: Mapping[str, Any], seeds: Sequence[str], key: str) -> str:
    """The engines or commits of these runs; commits by their first ten digits."""
    made = group.get("made_by", {})
    found = {str(made.get(seed, {}).get(key) or "not recorded") for seed in seeds}
    return ", ".join(sorted(text if key == "engine" or " " in text else text[:10] for text in found)) or "-"


def _changed_verdicts(current: Mapping[str, str], earlier: Mapping[str, str]) -> str:
    changed = [f"{key} ({earlier[key]}, now {new})" for key, new in current.items() if earlier.get(key, new) != new]
    parts = [
        f"Verdicts that differ: {', '.join(changed) or 'none'}, of {len(current.keys() & earlier.keys())} in both."
    ]
    for name, keys in (("new", current.keys() - earlier.keys()), ("gone", earlier.keys() - current.keys())):
        parts += [f"Verdicts that are {name}: {', '.join(sorted(keys))}."] if keys else []
    return " ".join(parts)


def _described(groups: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{_name(group)} (seeds {', '.join(group['seeds']) or 'none'})" for group in groups[:3]) + (
        f" and {len(groups) - 3} more" if len(groups) > 3 else ""
    )


def _name(group: Mapping[str, Any]) -> str:
    return show_labels(group["labels"]) or "run"


def _final(measured: Mapping[str, Any]) -> float:
    return measured["final_accuracy"] or 0.0


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def read_summary_file(path: Path, option: str = "") -> dict[str, Any]:
    """The summary.json of a report. Raises `ReportError`, which names the `option`, if the file is not one."""
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
        return {"groups": earlier["groups"], "verdicts": earlier["verdicts"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReportError(f"{option} {path}".strip() + f": not the summary.json of a report ({error})") from error
