"""What runs from Python return, and runs as pandas DataFrames: a row a round, with choices and
summary beside it."""

import json
import shutil
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import safetensors.torch
from torch import Tensor

from fedsim.config.plan import Plan
from fedsim.core.configs import IRRELEVANT_KEYS, leaves
from fedsim.core.errors import FedsimError
from fedsim.results.ablations import find_ablations
from fedsim.results.files import MODEL
from fedsim.results.groups import group_runs
from fedsim.results.reading import read_metrics
from fedsim.results.runs import Run
from fedsim.results.sources import read_source
from fedsim.tracking.tables import show_share

if TYPE_CHECKING:
    from pandas import DataFrame


class TemporaryFolder:
    """A folder that is deleted with this object, or when the process exits."""

    def __init__(self) -> None:
        self.path = Path(mkdtemp(prefix="fedsim-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


@dataclass(frozen=True, eq=False)
class RunResult:
    """A run that has ended.

    `status` is `done`, `diverged` (updates were nan or infinite), `interrupted` (a callback has
    ended it; the same call goes on), or in a sweep also `failed`, `data` and `config` (refused
    before round 1; `error` says why). `summary` is what summary.json holds. `skipped`: an earlier
    run with the same config had done it.
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
        """Whether its files stay; those of other runs are deleted with this object."""
        return self.place is None

    @property
    def error(self) -> str | None:
        """Why it is not done, in words."""
        return self.summary.get("error")

    @property
    def final_accuracy(self) -> float | None:
        """The mean test accuracy of the last 11 rounds, in [0, 1], as in reports, tables and
        `load_summaries`; None if none was measured. That of the last round is
        `summary["last_accuracy"]`."""
        return self.summary.get("smoothed_accuracy")

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """As in metrics.jsonl."""
        return read_metrics(self.folder)

    @cached_property
    def rounds(self) -> "DataFrame":
        """A row a round; columns as in `load_runs`."""
        return rounds_frame([self.run])

    @cached_property
    def params(self) -> dict[str, Tensor] | None:
        """The model after the last round, by name; None of a run that has no end."""
        path = self.folder / MODEL
        return safetensors.torch.load_file(path) if path.is_file() else None

    @property
    def run(self) -> Run:
        """As reports have it."""
        return Run(
            self.folder, self.plan.config, {"choices": dict(self.plan.choices), **self.summary}
        )

    def __str__(self) -> str:
        accuracy = (
            None
            if self.final_accuracy is None
            else f"final accuracy {show_share(self.final_accuracy)}"
        )
        return f"{self.folder.name}: {', '.join(filter(None, (self.status, accuracy, self.error)))}"


class RunFailedError(FedsimError):
    """A run has failed, by the exception that is its `__cause__`; `result` is what there is of the
    run."""

    def __init__(self, result: RunResult) -> None:
        super().__init__(f"{result.folder}: {result.error}")
        self.result = result


class SweepResult(tuple[RunResult, ...]):
    """The runs of a sweep, in the order of its experiments."""

    __slots__ = ()

    @property
    def rounds(self) -> "DataFrame":
        """A row for each round of each run; columns as in `load_runs`."""
        return rounds_frame([result.run for result in self])

    @property
    def summaries(self) -> "DataFrame":
        """A row for each run; columns as in `load_summaries`."""
        return summaries_frame([result.run for result in self])


class PandasMissingError(FedsimError, ImportError):
    """pandas is not installed."""


def load_runs(source: "str | PathLike[str]") -> "DataFrame":
    """The rounds of all runs that have ended below a folder, or that are in an archive of the
    report (`--archive runs.parquet`).

    A row is a round of a run, in order. Columns:

    - `run`: the name of the run's folder; `status`; `seed`; one for each config group (`selector`, ...): the choice;
    - the config values in which the runs differ, by key (`optimizer.lr`), and `code`, digits that stand for the code of
      your own classes;
    - what metrics.jsonl has of a round (`round`, `test_accuracy`, `bytes_up`, `selected`, ...).

    What there is once a run is in `load_summaries`: means and deviations over rows of rounds would
    be wrong. Runs that ended before their first round have no row. Raises `FedsimError` if `source`
    is neither a folder with finished runs nor an archive, `PandasMissingError` without pandas.

        runs = fedsim.load_runs("outputs/default")
        runs.groupby(["selector", "round"])["test_accuracy"].mean().unstack("selector").plot()
    """
    _pandas()
    return rounds_frame(_runs_of(Path(source)))


def load_summaries(source: "str | PathLike[str]") -> "DataFrame":
    """The runs that `load_runs` takes, a row each: its columns but for those of rounds,
    `final_accuracy` (the mean of the last 11 rounds), and the numbers and words of summary.json
    (`summary.last_accuracy`, `summary.totals.bytes_up`).

        runs = fedsim.load_summaries("outputs/default")
        runs.groupby("selector")["final_accuracy"].agg(["mean", "std"])
    """
    _pandas()
    return summaries_frame(_runs_of(Path(source)))


def load_ablations(source: "str | PathLike[str]") -> "DataFrame":
    """The ablations of the runs that `load_runs` takes: where they differ in one number or two, the
    final accuracy.

    A row is a point of a line or map. Columns: `keys` of the numbers; `setting` and `method` of the
    line; `value`, and in a map `second_value`; `seeds`; `mean`, and `low` and `high` of its 95 %
    interval; whether it is the `best` of its line; `p_value` of the difference to that at equal
    seeds, corrected over the line (nan below three seeds).
    """
    columns = [
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
    ]
    rows = [
        (
            " ".join(one.keys),
            *line,
            *(*at.values, None)[:2],
            at.mean.num,
            at.mean.mean,
            *at.mean.interval,
            *at[-2:],
        )
        for one in find_ablations(group_runs(_runs_of(Path(source))))
        for line, points in one.lines.items()
        for at in points
    ]
    return _pandas().DataFrame(rows, columns=columns)


def _runs_of(path: Path) -> list[Run]:
    if not path.exists():
        raise FedsimError(f"{path}: neither a folder with runs nor an archive of them (.parquet)")
    return read_source(path)


def rounds_frame(runs: Sequence[Run]) -> "DataFrame":
    """A row for each round of `runs`."""
    pd = _pandas()
    rows = ([{**about, **record} for record in run.records] for run, about in _about(runs))
    frames = [pd.DataFrame(of_run) for of_run in rows if of_run]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def summaries_frame(runs: Sequence[Run]) -> "DataFrame":
    """A row for each of `runs`."""
    rows = []
    for run, about in _about(runs):
        outcome = leaves(
            {
                key: value
                for key, value in run.summary.items()
                if key not in ("choices", "seed", "status")
            }
        )
        summary = {f"summary.{key}": value for key, value in outcome if not isinstance(value, list)}
        rows.append({**about, "final_accuracy": run.summary.get("smoothed_accuracy"), **summary})
    return _pandas().DataFrame(rows)


def _about(runs: Sequence[Run]) -> Iterator[tuple[Run, dict[str, Any]]]:
    """Each run with the columns that tell it from others."""
    groups = sorted({group for run in runs for group in run.choices})
    ignored = (*IRRELEVANT_KEYS, "seed")  # cannot change a result, or has a column of its own
    values = []
    for run in runs:
        config = leaves({key: value for key, value in run.config.items() if key not in ignored})
        values.append(
            {
                key: value
                for key, value in [*config, ("code", run.code)]
                if not key.endswith("_target_")
            }
        )
    keys = dict.fromkeys(key for one in values for key in one)
    texts = {key: {json.dumps(one.get(key), default=str) for one in values} for key in keys}
    for run, own in zip(runs, values, strict=True):
        about = {"run": run.folder.name, "status": run.status, "seed": run.seed}
        about |= {group: run.choices.get(group) for group in groups}
        yield run, about | {key: own.get(key) for key, found in texts.items() if len(found) > 1}


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        remedy = "install pandas, or the extra of this package: fedsim-selection[pandas]"
        raise PandasMissingError(
            f"DataFrames need pandas, which cannot be imported ({error}); {remedy}"
        ) from error
    return pandas
