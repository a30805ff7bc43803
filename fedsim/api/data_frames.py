"""Finished runs as pandas DataFrames: a row for each run, for each round, or for each point of an
ablation."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from fedsim.core.configs import IRRELEVANT_KEYS, leaves
from fedsim.core.record import CLIENT_ACCURACY, TOTAL_FIELDS
from fedsim.results.ablations import find_ablations
from fedsim.results.frames import runs_frame
from fedsim.results.grouping import comparable
from fedsim.results.measures import BYTES, SAMPLES, is_recorded
from fedsim.results.runs import Run

RUNNING_TOTALS = {"bytes_total": BYTES, "samples_total": SAMPLES}
"""Columns with a sum from round 1 to the row's round, and the fields of records that are summed."""
SUMMARY_COLUMNS = (
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
"""Values of summary.json that are columns, if the summary of a run has them."""
ABLATION_COLUMNS = (
    "keys",
    "setting",
    "method",
    "value",
    "second_value",
    "seeds",
    "mean",
    "low",
    "high",
    "best",
    "p_value",
)


def summaries_frame(runs: Sequence[Run]) -> pd.DataFrame:
    """Return a row for each run, with the columns of `fedsim.load_runs`."""
    rows = _first_columns(runs)
    for run, row in zip(runs, rows, strict=True):
        summary = run.summary
        row.update({name: summary[name] for name in SUMMARY_COLUMNS if name in summary})
        for name, value in (summary.get(CLIENT_ACCURACY) or {}).items():
            row[f"{CLIENT_ACCURACY}_{name}"] = value
        totals = summary.get("totals") or {}
        row.update({name: totals[name] for name in TOTAL_FIELDS if name in totals})
    return pd.DataFrame(rows)


def rounds_frame(runs: Sequence[Run]) -> pd.DataFrame:
    """Return a row for each round of each run, with the columns of `fedsim.load_rounds`."""
    frames = []
    for run, columns in zip(runs, _first_columns(runs), strict=True):
        if records := run.records:
            frame = pd.DataFrame([columns | record for record in records])
            for name, quantities in RUNNING_TOTALS.items():
                if is_recorded([run], quantities):
                    frame[name] = frame[list(quantities)].sum(axis=1).cumsum()
            frames.append(frame)
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def ablations_frame(runs: Sequence[Run]) -> pd.DataFrame:
    """Return a row for each point of each ablation, with the columns of `fedsim.load_ablations`."""
    rows = []
    for points in find_ablations(runs_frame(runs)):
        for point in points:
            row = (
                " ".join(point.keys),
                point.setting,
                point.method,
                point.value,
                point.second_value,
                point.accuracy.num,
                point.accuracy.mean,
                *point.accuracy.interval,
                point.is_best,
                point.p_value,
            )
            rows.append(row)
    return pd.DataFrame(rows, columns=ABLATION_COLUMNS)


def _first_columns(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the first cells of each run's row, by column.

    The columns are the name of the run's folder, its status and seed, its choices, and the config
    values of `_unexplained_keys`.
    """
    groups = sorted({group for run in runs for group in run.choices})
    values_of_runs = [_values(run) for run in runs]
    keys = _unexplained_keys(runs, values_of_runs, groups)
    rows = []
    for run, values in zip(runs, values_of_runs, strict=True):
        row = {"run": run.folder.name, "status": run.status, "seed": run.seed}
        row.update({group: run.choices.get(group) for group in groups})
        row["dataset"] = run.dataset
        for key in keys:
            value = values.get(key)
            # Data frames can be grouped by texts, but not by lists.
            row[key] = str(value) if isinstance(value, list) else value
        rows.append(row)
    return rows


def _values(run: Run) -> dict[str, Any]:
    """Return the config values of a run that can change its result, by dotted key, and its `code`.

    The seed is left out, which has a column of its own, and so are classes, which choices name.
    """
    values = {"code": run.code}
    for key, value in leaves(run.config):
        is_irrelevant = key.partition(".")[0] in (*IRRELEVANT_KEYS, "seed")
        if not is_irrelevant and not key.endswith("_target_"):
            values[key] = value
    return values


def _unexplained_keys(
    runs: Sequence[Run], values_of_runs: Sequence[Mapping[str, Any]], groups: Sequence[str]
) -> list[str]:
    """Return the keys in whose values some runs differ although they made the same choices.

    Only the choices that set a value count: for `optimizer.lr`, those in the config groups
    `optimizer` and `optimizer/schedule`. No choice sets a key such as `num_rounds`, which is in no
    group, and `code`.
    """
    unexplained = []
    for key in dict.fromkeys(key for values in values_of_runs for key in values):
        top = key.partition(".")[0]
        groups_of_key = [group for group in groups if group.partition("/")[0] == top]
        choices = [tuple(map(run.choices.get, groups_of_key)) for run in runs]
        values_of_key = [comparable(values.get(key)) for values in values_of_runs]
        pairs = set(zip(choices, values_of_key, strict=True))
        # With more pairs than choices, the same choices come with several values.
        if len(pairs) > len(set(choices)):
            unexplained.append(key)
    return unexplained
