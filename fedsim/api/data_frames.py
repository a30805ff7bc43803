"""Finished runs as pandas DataFrames: a row for each run, for each round, or for each point of an
ablation."""

import json
from collections.abc import Sequence
from typing import Any

import pandas as pd

from fedsim.core.configs import IRRELEVANT_KEYS, leaves
from fedsim.core.record import CLIENT_ACCURACY, TOTAL_FIELDS
from fedsim.results.ablations import find_ablations
from fedsim.results.frames import runs_frame
from fedsim.results.measures import BYTES, SAMPLES, is_recorded
from fedsim.results.runs import Run

TOTALS = {"bytes_total": BYTES, "samples_total": SAMPLES}
"""Columns of rounds that add up quantities from the first round to this one."""
OF_RUN = (
    "final_accuracy",
    "last_accuracy",
    "best_accuracy",
    "initial_accuracy",
    "rounds",
    "mean_participation_ratio",
    "coverage",
    "wall_seconds",
    "simulated_seconds",
    "late_updates",
    "epsilon",
)
"""Values of summary.json that are columns of runs."""


def rounds_frame(runs: Sequence[Run]) -> pd.DataFrame:
    """Return a row for each round of `runs`."""
    frames = []
    for run, columns in zip(runs, _describe(runs), strict=True):
        if records := run.records:
            frame = pd.DataFrame([columns | record for record in records])
            for name, quantities in TOTALS.items():
                if is_recorded([run], quantities):
                    frame[name] = frame[list(quantities)].sum(axis=1).cumsum()
            frames.append(frame)
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def summaries_frame(runs: Sequence[Run]) -> pd.DataFrame:
    """Return a row for each of `runs`."""
    rows = []
    for run, columns in zip(runs, _describe(runs), strict=True):
        summary = run.summary
        columns.update({name: summary[name] for name in OF_RUN if name in summary})
        for name, value in (summary.get(CLIENT_ACCURACY) or {}).items():
            columns[f"{CLIENT_ACCURACY}_{name}"] = value
        totals = summary.get("totals") or {}
        columns.update({name: totals[name] for name in TOTAL_FIELDS if name in totals})
        rows.append(columns)
    return pd.DataFrame(rows)


def ablations_frame(runs: Sequence[Run]) -> pd.DataFrame:
    """Return a row for each point of each ablation, with the columns of `fedsim.load_ablations`."""
    rows = []
    for points in find_ablations(runs_frame(runs)):
        for point in points:
            low, high = point.accuracy.interval
            row = {
                "keys": " ".join(point.keys),
                "setting": point.setting,
                "method": point.method,
                "value": point.value,
                "second_value": point.second_value,
                "seeds": point.accuracy.num,
                "mean": point.accuracy.mean,
                "low": low,
                "high": high,
                "best": point.is_best,
                "p_value": point.p_value,
            }
            rows.append(row)
    return pd.DataFrame(rows)


def _describe(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the columns that tell each run from others.

    Config values are among them if runs with the same choices in their group differ in them.
    """
    groups = sorted({group for run in runs for group in run.choices})
    all_values = []
    for run in runs:
        values = {"code": run.code}
        for key, value in leaves(run.config):
            top = key.partition(".")[0]
            is_told = top in IRRELEVANT_KEYS or top == "seed" or key.endswith("_target_")
            if not is_told:
                values[key] = value
        all_values.append(values)
    keys = dict.fromkeys(key for values in all_values for key in values)
    differing = []
    for key in keys:
        parts = [group for group in groups if group.split("/")[0] == key.split(".")[0]]
        texts: dict[tuple[str | None, ...], str] = {}
        for run, values in zip(runs, all_values, strict=True):
            text = json.dumps(values.get(key), default=str)
            choices = tuple(run.choices.get(group) for group in parts)
            if texts.setdefault(choices, text) != text:
                differing.append(key)
                break
    rows = []
    for run, values in zip(runs, all_values, strict=True):
        row = {"run": run.folder.name, "status": run.status, "seed": run.seed}
        row.update({group: run.choices.get(group) for group in groups})
        row["dataset"] = run.dataset
        row.update({key: values.get(key) for key in differing})
        rows.append(row)
    return rows
