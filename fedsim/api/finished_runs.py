"""Finished runs in Python: a report on them, data frames of them, and figures of their accuracy."""

import functools
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from os import PathLike, fspath
from pathlib import Path
from traceback import walk_stack
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

import fedsim
from fedsim.api.data_frames import ablations_frame, rounds_frame, summaries_frame
from fedsim.core.errors import check, rule
from fedsim.report.curves import AXES
from fedsim.report.looks import Look
from fedsim.report.presentation import FILE as PRESENTATION_FILE
from fedsim.report.presentation import Presentation, read_presentation, report_folder
from fedsim.results.frames import by, by_setting, finished_rows, runs_frame
from fedsim.results.measures import is_recorded
from fedsim.results.runs import Run
from fedsim.results.sources import find_source, read_source

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, eq=False, repr=False)
class Report:
    """Runs that have ended, with methods and settings as `fedsim report` names them.

    Attributes:
        ended_runs: The runs as objects with arrays.
        folder: The folder of their report, whose file report.yaml, if there is one, says how they
            are presented. None if the runs have no such folder.
    """

    ended_runs: Sequence[Run]
    folder: Path | None = None

    @property
    def runs(self) -> pd.DataFrame:
        """A row for each run; columns as in `load_runs`."""
        return summaries_frame(self.ended_runs)

    @property
    def rounds(self) -> pd.DataFrame:
        """A row for each round of each run; columns as in `load_rounds`."""
        return rounds_frame(self.ended_runs)

    @cached_property
    def settings(self) -> dict[str, dict[str, list[Run]]]:
        """The finished runs by setting and method, as report.yaml selects, orders and names them. A
        single setting has the name ""."""
        settings: dict[str, dict[str, list[Run]]] = {}
        frame, _ = self._frame_and_looks
        for setting, rows in by_setting(finished_rows(frame)).items():
            methods = by(rows, "method").items()
            settings[setting] = {method: list(line["run"]) for method, line in methods}
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
        _, looks = self._frame_and_looks
        return plot_accuracy(settings[str(setting)], looks, x, axes, self.presentation)

    @cached_property
    def presentation(self) -> Presentation | None:
        """The choices in report.yaml; None if there is no such file."""
        if self.folder is None or not (self.folder / PRESENTATION_FILE).exists():
            return None
        return read_presentation(self.folder, {})

    @cached_property
    def _frame(self) -> pd.DataFrame:
        return runs_frame(self.ended_runs)

    @cached_property
    def _frame_and_looks(self) -> tuple[pd.DataFrame, dict[str, Look]]:
        """The frame as report.yaml arranges it, and the looks of methods."""
        presentation = self.presentation or Presentation()
        path = (self.folder or Path()) / PRESENTATION_FILE
        frame, looks, notes = presentation.arrange_stored(self._frame, path)
        for note in notes:
            warnings.warn(note, stacklevel=_level_of_user())
        return frame, looks

    def __repr__(self) -> str:
        methods = ", ".join(dict.fromkeys(self._frame["method"]))
        num_settings = self._frame["setting"].nunique()
        return f"<Report of {len(self.ended_runs)} runs: {methods}; settings: {num_settings}>"


def _level_of_user() -> int:
    """Return the `stacklevel` with which a caller's warning names the line that called fedsim."""
    # A cached property calls this through functools.
    internal = (f"{Path(fedsim.__file__).parent}{os.sep}", functools.__file__)
    level = 1
    for frame, _ in walk_stack(sys._getframe(1)):
        if not frame.f_code.co_filename.startswith(internal):
            break
        level += 1
    return level


def plot_accuracy(
    lines: Mapping[str, list[Run]],
    looks: Mapping[str, Look],
    x: str,
    axes: "Axes | None",
    presentation: Presentation | None = None,
) -> "Axes":
    """Draw the test accuracy of the runs of each line against `x`, and return the axes.

    The arguments are as in `Report.plot`; `looks` are by the names of the `lines`. Raises
    `ConfigError` if `x` is unknown, if it was not recorded, or if a run has no evaluated round.
    """
    # Here: these import matplotlib.
    from fedsim.report.accuracy_figures import draw_accuracy
    from fedsim.report.drawing import style
    from fedsim.report.layout import figure_size

    runs = [run for members in lines.values() for run in members]
    check(rule(x in AXES, "x", x, f"must be one of {', '.join(AXES)}"))
    has_accuracies = all(np.isfinite(run.columns["test_accuracy"]).any() for run in runs)
    check(rule(has_accuracies, "x", x, "needs runs with an evaluated round"))
    is_known = is_recorded(runs, AXES[x].names)
    check(rule(is_known, "x", x, "was not recorded in all of these runs"))
    is_styled = presentation is not None and axes is None
    choices = presentation or Presentation()
    with style(choices.style, choices.inches) if is_styled else nullcontext():
        if axes is None:
            from matplotlib import pyplot  # here: it may open a window

            size = figure_size() if is_styled else None
            axes = pyplot.figure(figsize=size, layout="constrained").subplots()
        draw_accuracy(lines, looks, x, axes, choices.log_x, choices.labels)
    return axes


def load_report(source: str | PathLike[str]) -> Report:
    """Return a report on the runs of `load_runs(source)`, which names and presents them as `fedsim
    report` does.

    Raises `FedsimError` as `load_runs` does, and if report.yaml of the runs' report is damaged.

        fedsim.load_report("outputs/default").plot(x="bytes")
    """
    path = find_source(fspath(source))
    report = Report(read_source(path), report_folder(path))
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
    """Return a row for each round of the runs of `load_runs(source)`, in order.

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
    """Return final accuracies by the values of numbers in the config, such as `optimizer.lr`.

    The runs are those of `load_runs(source)`. A line has runs that differ in one number and in
    seeds. A map has runs that differ in two. Each row is a point of a line or a map. Columns:

    - `keys`: the names of the numbers; `value`, and in a map `second_value`;
    - `setting` and `method` of the line or map;
    - `seeds`: the number of runs; the `mean` of their final accuracies in [0, 1]; `low` and `high`
      of its 95 % interval;
    - `best`: whether the mean is the highest of the line or map;
    - `p_value` of the difference from the best point at equal seeds, corrected over the line or
      map; nan for the best point, and with fewer than three common seeds.

    Raises `FedsimError` as `load_runs` does.
    """
    return ablations_frame(_read(source))


def _read(source: str | PathLike[str]) -> list[Run]:
    return read_source(find_source(fspath(source)))
