"""Results of runs from Python, and finished runs as pandas DataFrames."""

import json
import shutil
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pandas as pd
import safetensors.torch
from torch import Tensor

from fedsim.config.plan import Plan
from fedsim.core.configs import IRRELEVANT_KEYS, leaves
from fedsim.core.errors import FedsimError
from fedsim.results.ablations import find_ablations
from fedsim.results.files import MODEL
from fedsim.results.frames import runs_frame
from fedsim.results.reading import read_metrics
from fedsim.results.runs import Run
from fedsim.results.sources import read_source
from fedsim.tracking.tables import show_share


class TemporaryFolder:
    """A folder that is deleted with this object, or when the process exits."""

    def __init__(self) -> None:
        self.path = Path(mkdtemp(prefix="fedsim-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


@dataclass(frozen=True, eq=False)
class RunResult:
    """A run that has ended.

    `status` is `done`, `reached` (the accuracy `stop_at`), `diverged` (updates were nan or
    infinite) or `interrupted` (a callback ended it; the same call resumes it). In a sweep it may
    also be `failed`, `data` and `config` (rejected before round 1; `error` says why). `summary` is
    what summary.json holds. `skipped` says that an earlier run with the same config is the result.
    """

    plan: Plan
    status: str
    summary: Mapping[str, Any]
    skipped: bool = False
    place: TemporaryFolder | None = field(default=None, repr=False)

    @property
    def folder(self) -> Path:
        return self.plan.folder

    @property
    def kept(self) -> bool:
        """True if its files stay. Those of other runs are deleted with this object."""
        return self.place is None

    @property
    def error(self) -> str | None:
        """Why it is not done, in words."""
        return self.summary.get("error")

    @property
    def final_accuracy(self) -> float | None:
        """The mean test accuracy of the last `final_window` rounds, in [0, 1], as in reports,
        tables and `load_summaries`; None if none was measured.

        The accuracy of the last round is `summary["last_accuracy"]`.
        """
        return self.summary.get("final_accuracy")

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """The records of all rounds, as in metrics.jsonl."""
        return read_metrics(self.folder)

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """A row for each round; columns as in `load_runs`."""
        return rounds_frame([self.run])

    @cached_property
    def params(self) -> dict[str, Tensor] | None:
        """The model after the last round, by name; None if the run has no end."""
        path = self.folder / MODEL
        return safetensors.torch.load_file(path) if path.is_file() else None

    @property
    def run(self) -> Run:
        """The run as reports have it."""
        summary = {"choices": dict(self.plan.choices), **self.summary}
        return Run(self.folder, self.plan.config, summary)

    def __str__(self) -> str:
        parts = [self.status]
        if self.final_accuracy is not None:
            parts.append(f"final accuracy {show_share(self.final_accuracy)}")
        if self.error:
            parts.append(self.error)
        return f"{self.folder.name}: {', '.join(parts)}"


class RunFailedError(FedsimError):
    """A run failed, by the exception that is its `__cause__`. `result` is what there is of the
    run."""

    def __init__(self, result: RunResult) -> None:
        super().__init__(f"{result.folder}: {result.error}")
        self.result = result


class SweepResult(tuple[RunResult, ...]):
    """The runs of a sweep, in the order of its experiments."""

    __slots__ = ()

    @property
    def rounds(self) -> pd.DataFrame:
        """A row for each round of each run; columns as in `load_runs`."""
        return rounds_frame([result.run for result in self])

    @property
    def summaries(self) -> pd.DataFrame:
        """A row for each run; columns as in `load_summaries`."""
        return summaries_frame([result.run for result in self])


def load_runs(source: str | PathLike[str]) -> pd.DataFrame:
    """Return the rounds of all runs that have ended below a folder, or that are in an archive of
    the report (`--archive runs.parquet`).

    A row is a round of a run, in order. Columns:

    - `run`: the name of the run's folder; `status`; `seed`; one for each config group (`selector`,
      ...): the choice;
    - the config values in which the runs differ, by key (`optimizer.lr`), and `code`, digits that
      stand for the code of your own classes;
    - what metrics.jsonl has of a round (`round`, `test_accuracy`, `bytes_up`, `selected`, ...).

    Values that exist once for a run are in `load_summaries`: means and deviations over rows of
    rounds would be wrong. Runs that ended before their first round have no row. Raises
    `FedsimError` if `source` is neither a folder with finished runs nor an archive.

        runs = fedsim.load_runs("outputs/default")
        runs.groupby(["selector", "round"])["test_accuracy"].mean().unstack("selector").plot()
    """
    return rounds_frame(_read(source))


def load_summaries(source: str | PathLike[str]) -> pd.DataFrame:
    """Return the runs that `load_runs` takes, a row each.

    The columns are those of `load_runs` except those of rounds, `final_accuracy` (the mean of the
    last `final_window` rounds), and the numbers and words of summary.json (`summary.last_accuracy`,
    `summary.totals.bytes_up`).

        runs = fedsim.load_summaries("outputs/default")
        runs.groupby("selector")["final_accuracy"].agg(["mean", "std"])
    """
    return summaries_frame(_read(source))


def load_ablations(source: str | PathLike[str]) -> pd.DataFrame:
    """Return the final accuracies of the runs that `load_runs` takes by one number or two in which
    they differ.

    A row is a point of a line or map. Columns: `keys` of the numbers; `setting` and `method` of the
    line; `value`, and in a map `second_value`; `seeds`; `mean`, and `low` and `high` of its 95 %
    interval; whether it is the `best` of its line; `p_value` of the difference to that at equal
    seeds, corrected over the line (nan below three seeds).
    """
    rows = []
    for points in find_ablations(runs_frame(_read(source))):
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


def _read(source: str | PathLike[str]) -> list[Run]:
    path = Path(source)
    if not path.exists():
        raise FedsimError(f"{path}: neither a folder with runs nor an archive of them (.parquet)")
    return read_source(path)


def rounds_frame(runs: Sequence[Run]) -> pd.DataFrame:
    """Return a row for each round of `runs`."""
    frames = []
    for run, columns in zip(runs, _describe(runs), strict=True):
        if records := run.records:
            frames.append(pd.DataFrame([columns | record for record in records]))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def summaries_frame(runs: Sequence[Run]) -> pd.DataFrame:
    """Return a row for each of `runs`."""
    rows = []
    for run, columns in zip(runs, _describe(runs), strict=True):
        columns["final_accuracy"] = run.summary.get("final_accuracy")
        for key, value in leaves(run.summary):
            is_column = key in ("seed", "status", "final_accuracy") or key.startswith("choices.")
            if not is_column and not isinstance(value, list):
                columns[f"summary.{key}"] = value
        rows.append(columns)
    return pd.DataFrame(rows)


def _describe(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the columns that tell each run from others."""
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
    texts: dict[str, set[str]] = {key: set() for values in all_values for key in values}
    for key in texts:
        texts[key].update(json.dumps(values.get(key), default=str) for values in all_values)
    rows = []
    for run, values in zip(runs, all_values, strict=True):
        row = {"run": run.folder.name, "status": run.status, "seed": run.seed}
        row.update({group: run.choices.get(group) for group in groups})
        row.update({key: values.get(key) for key in texts if len(texts[key]) > 1})
        rows.append(row)
    return rows
