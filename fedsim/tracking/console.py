"""The tracker that shows a run on the terminal, and the progress of runs in lanes.

Runs are in lanes if they are trained together in one process.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fedsim.core.text import printable_lines
from fedsim.tracking.base import RunInfo, SweepPosition, Tracker
from fedsim.tracking.tables import CONSOLE, accuracy_curve, closing_table, show_seconds, show_share

PLAIN_LINES = 10
"""Number of lines that show the progress of a run if the output is not a terminal."""


class RoundProgress:
    """The display of how many rounds have ended.

    It is a progress bar on a terminal, and otherwise at most `PLAIN_LINES` lines.
    """

    def __init__(self, total: int, console: Console) -> None:
        self._console = console
        self._total = total
        self._last = 0
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("round"),
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=console,
                expand=True,
            )
            self._task = self._bar.add_task("", total=total)
            self._bar.start()

    def show(self, round: int, *texts: str, in_lines: bool = True) -> None:
        """Show that `round` has ended, and the `texts` that are not empty.

        Without a terminal, this prints a line if one is due and `in_lines` is true.
        """
        text = "  ".join(text for text in texts if text)
        if self._bar is not None:
            self._bar.update(self._task, completed=round, description=text)
        elif in_lines and self._num_lines_due(round) > self._num_lines_due(self._last):
            self._console.print(f"  round {round}/{self._total}  {text}")
        self._last = max(self._last, round)

    def _num_lines_due(self, round: int) -> int:
        """Return how many of the `PLAIN_LINES` are due by the end of `round`."""
        return round * PLAIN_LINES // self._total

    def stop(self) -> None:
        """Remove the progress bar."""
        if self._bar is not None:
            self._bar.stop()


class ConsoleTracker(Tracker):
    """A tracker that prints a line at the start of a run and a table at its end.

    If `progress` is true, it shows the progress between them. On a terminal, the table comes below
    the curve of the accuracy. Jobs of a sweep have no table, because the sweep reports how they
    ended.
    """

    def __init__(self, *, progress: bool) -> None:
        self.progress = progress
        self.console = CONSOLE
        self._rounds: RoundProgress | None = None
        self._accuracies: dict[int, float] = {}

    def start(self, info: RunInfo) -> None:
        self._info = info
        text = escape(printable_lines(headline(info.name, info.choices, info.seed)))
        self.console.print(job_number(info.sweep) + text, soft_wrap=True)
        if self.progress and info.alone:
            self._rounds = RoundProgress(info.num_rounds, self.console)

    def log(self, record: Mapping[str, Any]) -> None:
        self._show(record, in_lines=True)

    def replay(self, record: Mapping[str, Any]) -> None:
        self._show(record, in_lines=False)

    def _show(self, record: Mapping[str, Any], in_lines: bool) -> None:
        """Show the progress. `in_lines` is as in `RoundProgress.show`."""
        if record["test_accuracy"] is not None:
            self._accuracies[record["round"]] = record["test_accuracy"]
        if self._rounds is not None:
            round = record["round"]
            measured = max(self._accuracies, default=round)
            accuracy = f"test accuracy {show_share(self._accuracies.get(measured))}"
            if measured != round:
                accuracy += f" (round {measured})"
            left = time_left(self._info.sweep)
            self._rounds.show(round, accuracy, left, in_lines=in_lines)

    def message(self, text: str) -> None:
        self.console.print(text, style="dim", soft_wrap=True, markup=False)

    def finish(self, summary: Mapping[str, Any]) -> None:
        console = self.console
        if self._rounds is not None:
            self._rounds.stop()
        if self._info.sweep is not None:
            return
        can_show_curve = console.is_terminal and not console.options.ascii_only
        if len(self._accuracies) > 1 and can_show_curve:
            console.print(accuracy_curve(self._accuracies, console.width))
        console.print(closing_table(summary))
        if summary.get("error"):
            text = f"{summary['status']}: {summary['error']}"
            console.print(text, style="red", soft_wrap=True, markup=False)
        console.print(f"results in {self._info.results}", soft_wrap=True, markup=False)


def headline(name: str, choices: Mapping[str, str], seed: int) -> str:
    """Return the line that names a run."""
    groups = ("dataset", "partition", "model", "selector")
    parts = [choices[group] for group in groups if group in choices]
    return f"{name}: {' · '.join(parts)} · seed {seed}"


def job_number(sweep: SweepPosition | None) -> str:
    """Return the beginning of a job's line. It is empty for a run that is no job of a sweep."""
    return "" if sweep is None else f"job {sweep.number}/{sweep.total} "


def time_left(sweep: SweepPosition | None) -> str:
    """Return the time left for a sweep in words, or an empty text if it is not known."""
    seconds = None if sweep is None else sweep.remaining_seconds()
    return "" if seconds is None else f"sweep: {show_seconds(seconds)} left"


def lanes_accuracy(accuracies: Sequence[float]) -> str:
    """Return the lowest and the highest test accuracy of runs in lanes, in words."""
    low = min(accuracies, default=None)
    high = max(accuracies, default=None)
    return show_share(low) if low == high else f"{show_share(low)} to {show_share(high)}"


@contextmanager
def lanes_progress(
    num_runs: int,
    num_rounds: int,
    accuracies: Callable[[], Sequence[float]],
    left: Callable[[], str],
    how: str,
) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of runs in lanes within this context, by a bar or a few lines.

    Yields a function that shows the present progress. Its arguments are the number of runs left,
    and how many of the `num_rounds` rounds have ended. It calls `accuracies` for the latest test
    accuracy of each run, and `left` for the time left in words. The first line has the number of
    runs and `how` they run.
    """
    CONSOLE.print(f"{num_runs} runs {how}")
    rounds = RoundProgress(num_rounds, CONSOLE)

    def show(runs_left: int, round: int) -> None:
        accuracy = lanes_accuracy(accuracies())
        rounds.show(round, f"{runs_left} runs, test accuracy {accuracy}", left())

    try:
        yield show
    finally:
        rounds.stop()
