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
from fedsim.report.table import Table, make_frame
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
FREE = ("engine", "device", "client_accuracy")
"""Top-level keys that change a result by rounding alone, or not at all. Seeds, names, folders and
trackers are free, too."""
FOLDERS = ("dataset.path",)
"""Config values that belong to a machine."""
FREE_CHOICES = (*FREE, "tracker", "hydra/launcher")
"""Config groups that change a result by rounding alone, or not at all."""


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
        choices = {name: text for name, text in first.choices.items() if name not in FREE_CHOICES}
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
    return {
        "engine": run.summary.get("engine"),
        "commit": run.commit,
        "dirty": (run.summary.get("revision") or {}).get("dirty"),
        "torch": run.summary.get("environment", {}).get("torch"),
    }


def comparable_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return all values of a config by dotted key that can matter for a result."""
    values = dict(leaves(relevant(config)))
    return {key: value for key, value in values.items() if key.partition(".")[0] not in FREE}


def config_hash(config: Mapping[str, Any]) -> str:
    """Return a hash of all config values that can matter for a result, except folders of data."""
    values = comparable_config(config)
    for key in FOLDERS:
        values.pop(key, None)
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def compare_summaries(current: Mapping[str, Any], earlier: Mapping[str, Any]) -> Table:
    """Return a table of final accuracies at the seeds that both summaries have, and verdicts that
    differ.

    Groups are the same if their configs are. If several are, as where data sets differ by folder,
    the group that is most like in its choices and labels is taken. Raises `ReportError` if nothing
    can be compared: no group is in both, or none has a seed in common.
    """
    counterparts = [_counterpart(group, earlier["groups"]) for group in current["groups"]]
    pairs = list(zip(current["groups"], counterparts, strict=True))
    rows = [_compared(group, other or {"seeds": {}}) for group, other in pairs]
    if not any(row[1] for row in rows):
        raise ReportError(
            f"--against: nothing to compare. These runs: {_described(current['groups'])}; "
            f"the earlier summary: {_described(earlier['groups'])}. Compare with one of the same "
            "preset and size, at seeds that it has"
        )
    matched = list(map(id, counterparts))
    alone = [_name(group) for group in earlier["groups"] if id(group) not in matched]
    note = _changed_verdicts(current["verdicts"], earlier["verdicts"])
    if alone:
        note += f" In the earlier summary alone: {', '.join(alone)}."
    header = ["run", "common seeds", "mean difference of final accuracy", "largest", "engine"]
    header += ["commit", "earlier engine", "earlier commit"]
    formats = {header[2]: "+.4f", "largest": ".4f"}
    frame = make_frame(header, rows)
    return Table("against", "Against an earlier summary", frame, formats, note)


def _counterpart(
    group: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    def num_alike(other: Mapping[str, Any]) -> int:
        return sum(len(group[name].items() & other[name].items()) for name in ("choices", "labels"))

    same_config = [other for other in earlier if other.get("config") == group["config"]]
    return max(same_config, key=num_alike, default=None)


def _compared(group: Mapping[str, Any], other: Mapping[str, Any]) -> list[Any]:
    differences = {}
    for seed, measures in group["seeds"].items():
        accuracy = measures["final_accuracy"]
        before = other["seeds"].get(seed, {}).get("final_accuracy")
        if accuracy is not None and before is not None:
            differences[seed] = accuracy - before
    row: list[Any] = [_name(group), len(differences), None, None]
    if differences:
        row[2] = sum(differences.values()) / len(differences)
        row[3] = max(map(abs, differences.values()))
    for summary in (group, other):
        row += [_origins(summary, list(differences), key) for key in ("engine", "commit")]
    return row


def _origins(group: Mapping[str, Any], seeds: Sequence[str], key: str) -> str:
    """Return the engines or commits of these runs; commits by their first ten digits."""
    made_by = group.get("made_by", {})
    texts = set()
    for seed in seeds:
        text = str(made_by.get(seed, {}).get(key) or "not recorded")
        texts.add(text if key == "engine" or " " in text else text[:10])
    return ", ".join(sorted(texts)) or "-"


def _changed_verdicts(current: Mapping[str, str], earlier: Mapping[str, str]) -> str:
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
    shown = [f"{_name(group)} (seeds {', '.join(group['seeds']) or 'none'})" for group in groups]
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


def _name(group: Mapping[str, Any]) -> str:
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
    """Return whether it is a group of `make_summary`, as far as `compare_summaries` reads it."""
    if not (
        has_kinds(group, {"config": TEXT, "seeds": MAPPING, "made_by": MAPPING})
        and is_mapping_of(group.get("labels"), TEXT)
        and is_mapping_of(group.get("choices"), TEXT)
        and is_mapping_of(group.get("made_by", {}), MAPPING)
    ):
        return False
    seeds = group.get("seeds", {}).values()
    return all(
        is_mapping_of(measures, NUMBER | NONE) and "final_accuracy" in measures
        for measures in seeds
    )
