"""The summary of a report: a JSON file small enough to be kept with the code, for comparison with
later results."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fedsim.core.configs import leaves
from fedsim.report.sections import Section
from fedsim.report.table import MISSING, Table, make_frame
from fedsim.results.frames import by, finished_rows, first_run, measured
from fedsim.results.grouping import relevant
from fedsim.results.labels import show_labels
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
from fedsim.results.runs import ReportError, Run

MEASURES = {
    "final_accuracy": "final_accuracy",
    "accuracy_after_15_percent": "accuracy@0.15",
    "accuracy_after_50_percent": "accuracy@0.5",
    "accuracy_after_last_round": "accuracy@1.0",
    "rounds_to_cover": "rounds_to_cover",
    "selection_gini": "selection_gini",
    "most_selections": "most_selections",
    "participation": "participation",
}
"""The measures in every summary, by their keys in the file."""
FREE_KEYS = ("engine", "device", "client_accuracy")
"""Top-level config keys that change a result by rounding alone, or not at all. So do the keys that
`relevant` removes: seeds, names, folders and trackers."""
FREE_GROUPS = ("engine", "device", "client_accuracy", "tracker", "hydra/launcher")
"""Config groups whose choice changes a result by rounding alone, or not at all."""
FOLDERS = ("dataset.path",)
"""Config values that belong to a machine."""
MAX_DESCRIBED = 3
"""Number of groups that an error names."""
NOT_RECORDED = "not recorded"
"""The text in place of an engine or commit that an earlier version did not write."""


def make_summary(runs: pd.DataFrame, sections: Sequence[Section] = ()) -> dict[str, Any]:
    """Return the content of summary.json.

    `groups` has an item for each group of runs: its labels and choices, a hash of its config (by
    which `compare_summaries` finds it again), and by seed the measures (`MEASURES` and those of the
    sections) and the origin (engine and commit) of each finished run. `verdicts` has the verdicts
    of the sections by the ids of numbers and claims.
    """
    keys = dict(MEASURES)
    verdicts: dict[str, str] = {}
    for section in sections:
        verdicts.update(section.verdicts)
        for measure in section.measures:
            if measure not in MEASURES.values():
                keys[measure] = measure
    groups = []
    for members in by(runs, "group").values():
        finished = finished_rows(members)
        values = pd.DataFrame({key: measured(finished, name) for key, name in keys.items()})
        seeds = {}
        made_by = {}
        for run, row in zip(finished["run"], values.to_dict("records"), strict=True):
            seeds[str(run.seeds)] = {
                key: None if pd.isna(value) else round(value, 5) for key, value in row.items()
            }
            made_by[str(run.seeds)] = _origin_of(run)
        first = first_run(members)
        choices = {name: text for name, text in first.choices.items() if name not in FREE_GROUPS}
        group = {
            "labels": members["labels"].iloc[0],
            "choices": choices,
            "config": config_hash(first.config),
            "diverged": int((members["status"] == "diverged").sum()),
            "seeds": seeds,
            "made_by": made_by,
        }
        groups.append(group)
    return {"groups": groups, "verdicts": verdicts}


def _origin_of(run: Run) -> dict[str, Any]:
    """Return which engine and which versions of fedsim and torch made a run; None where the run did
    not record it. `dirty` says whether the code had changes that are in no commit."""
    return {
        "engine": run.summary.get("engine"),
        "commit": run.commit,
        "dirty": (run.summary.get("revision") or {}).get("dirty"),
        "torch": run.summary.get("environment", {}).get("torch"),
    }


def comparable_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return all values of a config by dotted key that can matter for a result."""
    values = {}
    for key, value in leaves(relevant(config)):
        if key.partition(".")[0] not in FREE_KEYS:
            values[key] = value
    return values


def config_hash(config: Mapping[str, Any]) -> str:
    """Return a hash of all config values that can matter for a result, except folders of data."""
    values = comparable_config(config)
    for key in FOLDERS:
        values.pop(key, None)
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def compare_summaries(current: Mapping[str, Any], earlier: Mapping[str, Any]) -> Table:
    """Return a table of final accuracies at the seeds that both summaries have.

    The table has a row for each group of the `current` summary. The note lists verdicts that
    differ, and groups that only the `earlier` summary has. Raises `ReportError` if nothing can be
    compared: no group is in both, or none has a seed in common.
    """
    rows = []
    matched = []  # ids of the earlier groups that were found again
    has_common_seeds = False
    for group in current["groups"]:
        counterpart = _counterpart(group, earlier["groups"])
        matched.append(id(counterpart))
        differences = _differences(group, counterpart)
        has_common_seeds = has_common_seeds or bool(differences)
        rows.append(_against_row(group, counterpart, differences))
    if not has_common_seeds:
        raise ReportError(
            f"--against: nothing to compare. These runs: {_described(current['groups'])}; "
            f"the earlier summary: {_described(earlier['groups'])}. Compare with one of the same "
            "preset and size, at seeds that it has"
        )
    alone = [_name(group) for group in earlier["groups"] if id(group) not in matched]
    note = _changed_verdicts(current["verdicts"], earlier["verdicts"])
    if alone:
        note += f" In the earlier summary alone: {', '.join(alone)}."
    mean_head = "mean difference of final accuracy"
    header = ["run", "common seeds", mean_head, "largest", "engine"]
    header += ["commit", "earlier engine", "earlier commit"]
    formats = {mean_head: "+.4f", "largest": ".4f"}
    frame = make_frame(header, rows)
    return Table("against", "Against an earlier summary", frame, formats, note)


def _counterpart(
    group: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    """Return the earlier group with the same config as `group`; None if there is none.

    Several groups have the same config if their data sets differ by folder only. Then it is the
    group that has the most choices and labels in common with `group`.
    """

    def num_in_common(other: Mapping[str, Any]) -> int:
        return sum(len(group[name].items() & other[name].items()) for name in ("choices", "labels"))

    same_config = [other for other in earlier if other.get("config") == group["config"]]
    return max(same_config, key=num_in_common, default=None)


def _differences(
    group: Mapping[str, Any], counterpart: Mapping[str, Any] | None
) -> dict[str, float]:
    """Return final accuracy in a group minus that in its counterpart, by seed, at the seeds at
    which both have one."""
    if counterpart is None:
        return {}
    differences = {}
    for seed, measures in group["seeds"].items():
        accuracy = measures["final_accuracy"]
        earlier_accuracy = counterpart["seeds"].get(seed, {}).get("final_accuracy")
        if accuracy is not None and earlier_accuracy is not None:
            differences[seed] = accuracy - earlier_accuracy
    return differences


def _against_row(
    group: Mapping[str, Any],
    counterpart: Mapping[str, Any] | None,
    differences: Mapping[str, float],
) -> list[Any]:
    """Return the row of a group in the table of `compare_summaries`."""
    mean = largest = None
    if differences:
        mean = sum(differences.values()) / len(differences)
        largest = max(map(abs, differences.values()))
    row = [_name(group), len(differences), mean, largest]
    for summary in (group, counterpart or {}):
        row += [_origins(summary, list(differences), key) for key in ("engine", "commit")]
    return row


def _origins(group: Mapping[str, Any], seeds: Sequence[str], key: str) -> str:
    """Return the engines or commits (`key`) of the runs of a group at these seeds.

    Commits are shown by their first ten digits.
    """
    made_by = group.get("made_by", {})
    texts = set()
    for seed in seeds:
        origin = made_by.get(seed, {}).get(key)
        if not origin:
            texts.add(NOT_RECORDED)
        elif key == "commit":
            texts.add(str(origin)[:10])
        else:
            texts.add(str(origin))
    return ", ".join(sorted(texts)) or MISSING


def _changed_verdicts(current: Mapping[str, str], earlier: Mapping[str, str]) -> str:
    """Return sentences on the verdicts that differ, are new, or are gone."""
    changed = []
    for key, verdict in current.items():
        if earlier.get(key, verdict) != verdict:
            changed.append(f"{key} ({earlier[key]}, now {verdict})")
    num_common = len(current.keys() & earlier.keys())
    text = f"Verdicts that differ: {', '.join(changed) or 'none'}, of {num_common} in both."
    new, gone = sorted(current.keys() - earlier.keys()), sorted(earlier.keys() - current.keys())
    if new:
        text += f" Verdicts that are new: {', '.join(new)}."
    if gone:
        text += f" Verdicts that are gone: {', '.join(gone)}."
    return text


def _described(groups: Sequence[Mapping[str, Any]]) -> str:
    """Return the names and seeds of the first `MAX_DESCRIBED` groups, and the number of others."""
    shown = []
    for group in groups[:MAX_DESCRIBED]:
        seeds = ", ".join(group["seeds"]) or "none"
        shown.append(f"{_name(group)} (seeds {seeds})")
    num_hidden = len(groups) - len(shown)
    more = f" and {num_hidden} more" if num_hidden else ""
    return ", ".join(shown) + more


def _name(group: Mapping[str, Any]) -> str:
    """Return the labels of a group as text. A single group has none."""
    return show_labels(group["labels"]) or "run"


def read_summary_file(path: Path, option: str = "") -> dict[str, Any]:
    """Return the summary.json of a report. Raises `ReportError`, which names the `option`, if the
    file is not one."""
    rule = f"{option} {path}: not the summary.json of a report".strip()
    try:
        summary = parse_json(content_of(path), path.name)
    except DamagedError as error:
        raise ReportError(f"{rule} ({error})") from error
    is_sound = has_kinds(summary, {"groups": LIST, "verdicts": MAPPING})
    is_sound = is_sound and summary.keys() >= {"groups", "verdicts"}
    is_sound = is_sound and is_mapping_of(summary["verdicts"], TEXT)
    if not (is_sound and all(map(_is_group, summary["groups"]))):
        raise ReportError(f"{rule} (groups and verdicts are not as it writes them)")
    return {"groups": summary["groups"], "verdicts": summary["verdicts"]}


def _is_group(group: Any) -> bool:
    """Return whether a value is a group as `make_summary` writes it, as far as `compare_summaries`
    reads it. Earlier versions did not write `made_by`."""
    if not has_kinds(group, {"config": TEXT, "seeds": MAPPING, "made_by": MAPPING}):
        return False
    for key in ("labels", "choices"):
        if not is_mapping_of(group.get(key), TEXT):
            return False
    if not is_mapping_of(group.get("made_by", {}), MAPPING):
        return False
    for measures in group.get("seeds", {}).values():
        if not is_mapping_of(measures, NUMBER | NONE) or "final_accuracy" not in measures:
            return False
    return True
