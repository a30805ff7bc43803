"""Results of the runs and sweeps that were run from Python."""

import shutil
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import pandas as pd
import safetensors.torch
from torch import Tensor

from fedsim.api.data_frames import rounds_frame
from fedsim.api.finished_runs import Report, plot_accuracy
from fedsim.config.plan import Plan
from fedsim.core.errors import FedsimError
from fedsim.report.looks import make_looks
from fedsim.results.files import MODEL
from fedsim.results.reading import read_metrics
from fedsim.results.runs import Run
from fedsim.tracking.tables import show_share

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class TemporaryFolder:
    """A folder that is deleted with this object, or when the process exits."""

    def __init__(self) -> None:
        self.path = Path(mkdtemp(prefix="fedsim-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


@dataclass(frozen=True, eq=False, repr=False)
class RunResult:
    """A run that has ended.

    Attributes:
        plan: The plan that was run.
        status: `done`, `reached` (the accuracy `stop_at`), `diverged` (updates were nan or
            infinite) or `interrupted` (a callback ended it; the same call resumes it). In a sweep
            it may also be `failed`, `data` and `config` (rejected before round 1; `error` says
            why).
        summary: The content of summary.json.
        skipped: Whether an earlier run with the same config is the result.
        temporary_folder: The folder that contains `folder` until this object is deleted. None if
            the files of the run are kept.
    """

    plan: Plan
    status: str
    summary: Mapping[str, Any]
    skipped: bool = False
    temporary_folder: TemporaryFolder | None = None

    @property
    def folder(self) -> Path:
        """The folder with the files of the run."""
        return self.plan.folder

    @property
    def kept(self) -> bool:
        """True if the files of the run are kept. Otherwise they are deleted with this object."""
        return self.temporary_folder is None

    @property
    def error(self) -> str | None:
        """Why the run is not done, in words; None if it is."""
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
        """The parameters of the model after the last round, by name; None if the run did not reach
        its end."""
        path = self.folder / MODEL
        return safetensors.torch.load_file(path) if path.is_file() else None

    @property
    def run(self) -> Run:
        """The run as an object with arrays, as reports use it."""
        summary = {"choices": dict(self.plan.choices), **self.summary, "status": self.status}
        return Run(self.folder, self.plan.config, summary)

    def plot(self, x: str = "rounds", axes: "Axes | None" = None) -> "Axes":
        """Draw test accuracy as `Report.plot` does, also of a run that is not done."""
        selector = self.plan.choices.get("selector", "run")
        return plot_accuracy({selector: [self.run]}, make_looks({selector: selector}), x, axes)

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
    """An exception ended a run. It is the `__cause__` of this one.

    `result` is the result of the rounds before it.
    """

    def __init__(self, result: RunResult) -> None:
        super().__init__(f"{result.folder}: {result.error}")
        self.result = result


class SweepResult(tuple[RunResult, ...]):
    """The results of the runs of a sweep, in the order of its experiments."""

    __slots__ = ()

    @property
    def report(self) -> Report:
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
