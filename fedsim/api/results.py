"""Results of runs from Python, and finished runs as pandas DataFrames and figures."""

import functools
import json
import shutil
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from os import PathLike, fspath
from pathlib import Path
from tempfile import mkdtemp
from types import FrameType
from typing import TYPE_CHECKING, Any

import pandas as pd
import safetensors.torch
from torch import Tensor

import fedsim
from fedsim.config.plan import Plan
from fedsim.core.configs import IRRELEVANT_KEYS, leaves
from fedsim.core.errors import FedsimError, check, rule
from fedsim.core.record import CLIENT_ACCURACY, TOTAL_FIELDS
from fedsim.report.curves import AXES
from fedsim.report.looks import Look, make_looks
from fedsim.report.presentation import FILE as PRESENTATION_FILE
from fedsim.report.presentation import Presentation, read_presentation, report_folder
from fedsim.results.ablations import find_ablations
from fedsim.results.files import MODEL
from fedsim.results.frames import by, by_setting, finished_rows, runs_frame
from fedsim.results.measures import BYTES, SAMPLES, is_recorded
from fedsim.results.reading import read_metrics
from fedsim.results.runs import Run
from fedsim.results.sources import find_source, read_source
from fedsim.tracking.tables import show_share

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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


class TemporaryFolder:
    """A folder that is deleted with this object, or when the process exits."""

    def __init__(self) -> None:
        self.path = Path(mkdtemp(prefix="fedsim-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


@dataclass(frozen=True, eq=False, repr=False)
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
    place: TemporaryFolder | None = None

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
        tables and `load_runs`; None if none was measured.

        The accuracy of the last round is `summary["last_accuracy"]`.
        """
        return self.summary.get("final_accuracy")

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """The records of all rounds, as in metrics.jsonl."""
        return read_metrics(self.folder)

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """A row for each round; columns as in `load_rounds`."""
        return rounds_frame([self.run])

    @cached_property
    def params(self) -> dict[str, Tensor] | None:
        """The model after the last round, by name; None if the run has no end."""
        path = self.folder / MODEL
        return safetensors.torch.load_file(path) if path.is_file() else None

    @property
    def run(self) -> Run:
        """The run as reports have it."""
        summary = {"choices": dict(self.plan.choices), **self.summary, "status": self.status}
        return Run(self.folder, self.plan.config, summary)

    def plot(self, x: str = "rounds", axes: "Axes | None" = None) -> "Axes":
        """Draw test accuracy as `Report.plot` does, also of a run that is not done."""
        selector = self.plan.choices.get("selector", "run")
        return _plot({selector: [self.run]}, make_looks({selector: selector}), x, axes)

    def __repr__(self) -> str:
        return f"<RunResult {self}>"

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
    def report(self) -> "Report":
        """The runs as a report compares them."""
        return Report([result.run for result in self])

    @property
    def runs(self) -> pd.DataFrame:
        """A row for each run; columns as in `load_runs`."""
        return self.report.runs

    @property
    def rounds(self) -> pd.DataFrame:
        """A row for each round of each run; columns as in `load_rounds`."""
        return self.report.rounds

    def __repr__(self) -> str:
        counts = Counter(result.status for result in self)
        statuses = ", ".join(f"{count} {status}" for status, count in counts.items())
        return f"<SweepResult of {len(self)} runs: {statuses}>"


def _level_of_user() -> int:
    """Return the `stacklevel` with which a caller's warning names the line that called fedsim."""
    internal = (str(Path(fedsim.__file__).parent), functools.__file__)
    level = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(internal):
        level += 1
        frame = frame.f_back
    return level + 1


@dataclass(frozen=True, eq=False, repr=False)
class Report:
    """Runs that have ended, with methods and settings as `fedsim report` names them.

    `folder` is that of their report, whose file report.yaml says how they are presented.
    """

    found: Sequence[Run]
    folder: Path | None = None

    @property
    def runs(self) -> pd.DataFrame:
        """A row for each run; columns as in `load_runs`."""
        return summaries_frame(self.found)

    @property
    def rounds(self) -> pd.DataFrame:
        """A row for each round of each run; columns as in `load_rounds`."""
        return rounds_frame(self.found)

    @cached_property
    def settings(self) -> dict[str, dict[str, list[Run]]]:
        """The finished runs by setting and method, as report.yaml selects, orders and names them. A
        single setting has the name ""."""
        settings: dict[str, dict[str, list[Run]]] = {}
        frame, _ = self._arranged
        for setting, rows in by_setting(finished_rows(frame)).items():
            lines = by(rows, "method")
            settings[setting] = {method: list(line["run"]) for method, line in lines.items()}
        return settings

    def plot(
        self, x: str = "rounds", setting: str | None = None, axes: "Axes | None" = None
    ) -> "Axes":
        """Draw the test accuracy of each method, the mean over seeds with their range, and return
        the axes.

        `x` is `rounds`, `bytes`, `samples`, `seconds` or `simulated`. `setting` is one of
        `settings`; it can be left out if there is only one. `axes` are yours, or those of a new
        figure. Methods look as in the figures of `fedsim report`.

        report.yaml in the report's folder says which methods are drawn, their order and names,
        where the names are, and whether the x axis is logarithmic. A new figure also has its width
        and style. Without that file, a new figure has the style of matplotlib.
        """
        settings = self.settings
        if setting is None and len(settings) == 1:
            (setting,) = settings
        text = f"must be one of {list(settings)}" if settings else "no run is finished"
        check(rule(setting in settings, "setting", setting, text))
        _, looks = self._arranged
        return _plot(settings[str(setting)], looks, x, axes, self.presentation)

    @cached_property
    def presentation(self) -> Presentation | None:
        """The choices in report.yaml; None if there is no such file."""
        if self.folder is None or not (self.folder / PRESENTATION_FILE).exists():
            return None
        return read_presentation(self.folder, {})

    @cached_property
    def _frame(self) -> pd.DataFrame:
        return runs_frame(self.found)

    @cached_property
    def _arranged(self) -> tuple[pd.DataFrame, dict[str, Look]]:
        """The frame as report.yaml arranges it, and the looks of methods."""
        if self.presentation is None or self.folder is None:
            return Presentation().arrange(self._frame)
        path = self.folder / PRESENTATION_FILE
        frame, looks, notes = self.presentation.arrange_stored(self._frame, path)
        for note in notes:
            warnings.warn(note, stacklevel=_level_of_user())
        return frame, looks

    def __repr__(self) -> str:
        methods = ", ".join(dict.fromkeys(self._frame["method"]))
        return f"<Report of {len(self.found)} runs: {methods}; settings: {len(self.settings)}>"


def load_report(source: str | PathLike[str]) -> Report:
    """Return the runs that `load_runs` takes as a report compares and presents them.

    Raises `FedsimError` as `load_runs` does, and if report.yaml of the runs' report is damaged.

    fedsim.load_report("outputs/default").plot(x="bytes")
    """
    report = Report(_read(source), report_folder(find_source(fspath(source))))
    _ = report.presentation  # raises an error in its file here
    return report


def load_runs(source: str | PathLike[str]) -> pd.DataFrame:
    """Return a row for each run that has ended below a folder, or that is in an archive of the
    report (`--archive runs.parquet`). A name such as `default` means the folder in `outputs/`.

    Columns (accuracies, shares and ratios are in [0, 1]):

    - `run`: the name of the run's folder; `status`; `seed`;
    - one for each config group (`selector`, ...): the choice. `dataset` is the name of the data:
      for data at a path, `dataset.name` or the folder's name;
    - the config values in which runs with the same choices differ, by key (`optimizer.lr`), and
      `code`, digits that stand for the code of your own classes;
    - `final_accuracy`, `last_accuracy`, `best_accuracy`, `initial_accuracy` (before round 1);
    - `rounds`: the number of rounds; `mean_participation_ratio`; `coverage` after the last round;
    - `wall_seconds`; `simulated_seconds` and `late_updates` with a simulated clock; `epsilon` of
      private runs; `client_accuracy_mean` and others if they were measured;
    - sums over all rounds: `bytes_down`, `bytes_up` [bytes], `train_samples`, `forward_samples`,
      `seconds_train` [s] and the others of `fedsim.core.record.TOTAL_FIELDS`.

    Raises `FedsimError` if `source` is neither a folder with finished runs nor an archive.

        runs = fedsim.load_runs("outputs/default")
        runs.groupby("selector")["final_accuracy"].agg(["mean", "std"])
    """
    return summaries_frame(_read(source))


def load_rounds(source: str | PathLike[str]) -> pd.DataFrame:
    """Return a row for each round of the runs that `load_runs` takes, in order.

    Columns:

    - those of `load_runs` up to `code`;
    - the record of the round, as in metrics.jsonl (`fedsim.core.record.Record`): `round`,
      `test_accuracy`, `bytes_up`, `selected`, ...;
    - `bytes_total` (sent both ways) and `samples_total` (passed by clients): sums from round 1 to
      this round.

    Other values that a run has once are in `load_runs`: repeated in each row, they would make means
    and deviations wrong. Runs that ended before their first round have no row.

        rounds = fedsim.load_rounds("outputs/default")
        rounds.groupby(["selector", "round"])["test_accuracy"].mean().unstack("selector").plot()
    """
    return rounds_frame(_read(source))


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
    return read_source(find_source(fspath(source)))


def _plot(
    lines: Mapping[str, list[Run]],
    looks: Mapping[str, Any],
    x: str,
    axes: "Axes | None",
    presentation: Presentation | None = None,
) -> "Axes":
    # Here: these import matplotlib.
    from fedsim.report.accuracy_figures import draw_accuracy
    from fedsim.report.drawing import style
    from fedsim.report.layout import figure_size

    runs = [run for members in lines.values() for run in members]
    check(rule(x in AXES, "x", x, f"must be one of {', '.join(AXES)}"))
    check(rule(all(run.rounds.num for run in runs), "x", x, "needs a run with rounds"))
    is_known = is_recorded(runs, AXES[x].names)
    check(rule(is_known, "x", x, "was not recorded in all of these runs"))
    choices = presentation or Presentation()
    is_styled = presentation is not None and axes is None
    with style(choices.style, choices.inches) if is_styled else nullcontext():
        if axes is None:
            from matplotlib import pyplot  # here: it may open a window

            size = figure_size() if is_styled else None
            axes = pyplot.figure(figsize=size, layout="constrained").subplots()
        draw_accuracy(lines, looks, x, axes, choices.log_x, choices.labels)
    return axes


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
