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
"""Number of progress lines per run if the output is not a terminal."""
Latest = Callable[[], Sequence[float]]


class RoundsShown:
    """How many of `total` rounds have ended: a progress bar on a terminal, some ten lines
    elsewhere."""

    def __init__(self, total: int, console: Console) -> None:
        self._console, self._total, self._last = console, total, 0
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (TextColumn("round"), MofNCompleteColumn(), BarColumn(bar_width=None))
            told = TextColumn("{task.fields[told]}")
            self._bar = Progress(
                *columns, told, TimeRemainingColumn(), console=console, expand=True
            )
            self._task = self._bar.add_task("", total=total, told="")
            self._bar.start()

    def show(self, round: int, *told: str, in_lines: bool = True) -> None:
        """`told`: what is said of them."""
        text = "  ".join(filter(None, told))
        if self._bar is not None:
            self._bar.update(self._task, completed=round, told=text)
        elif (
            in_lines
            and round * PLAIN_LINES // self._total > self._last * PLAIN_LINES // self._total
        ):
            self._console.print(f"  round {round}/{self._total}  {text}")
        self._last = max(self._last, round)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()


class ConsoleTracker(Tracker):
    """Shows a line at the start, and if `progress` a progress bar on a terminal or a few lines
    elsewhere.

    A run that is no job of a sweep ends with a table, on a terminal below the curve of its
    accuracy; jobs of a sweep are told of by the sweep.
    """

    def __init__(self, *, progress: bool) -> None:
        self.progress, self.console = progress, CONSOLE
        self._rounds: RoundsShown | None = None
        self._accuracies: dict[int, float] = {}

    def start(self, info: RunInfo) -> None:
        self._info = info
        text = headline(info.name, info.choices, info.seed)
        self.console.print(
            f"{job_number(info.sweep)}{escape(printable_lines(text))}", soft_wrap=True
        )
        if self.progress and info.alone:
            self._rounds = RoundsShown(info.num_rounds, self.console)

    def log(self, record: Mapping[str, Any], in_lines: bool = True) -> None:
        if record["test_accuracy"] is not None:
            self._accuracies[record["round"]] = record["test_accuracy"]
        if self._rounds is not None:
            latest, left = (
                next(reversed(self._accuracies.values()), None),
                time_left(self._info.sweep),
            )
            self._rounds.show(
                record["round"], f"test accuracy {show_share(latest)}", left, in_lines=in_lines
            )

    def replay(self, record: Mapping[str, Any]) -> None:
        self.log(record, in_lines=False)

    def message(self, text: str) -> None:
        self.console.print(text, style="dim", soft_wrap=True, markup=False)

    def finish(self, summary: Mapping[str, Any]) -> None:
        if self._rounds is not None:
            self._rounds.stop()
        if self._info.sweep is not None:
            return
        if (
            len(self._accuracies) > 1
            and self.console.is_terminal
            and not self.console.options.ascii_only
        ):
            self.console.print(accuracy_curve(self._accuracies, self.console.width))
        self.console.print(closing_table(summary))
        if summary.get("error"):
            self.console.print(
                f"{summary['status']}: {summary['error']}",
                style="red",
                soft_wrap=True,
                markup=False,
            )
        self.console.print(f"results in {self._info.results}", soft_wrap=True, markup=False)


def headline(name: str, choices: Mapping[str, str], seed: int) -> str:
    parts = [
        choices[group]
        for group in ("dataset", "partition", "model", "selector")
        if group in choices
    ]
    return f"{name}: {' · '.join(parts)} · seed {seed}"


def job_number(sweep: SweepPosition | None) -> str:
    return "" if sweep is None else f"job {sweep.number}/{sweep.total} "


def time_left(sweep: SweepPosition | None) -> str:
    seconds = None if sweep is None else sweep.remaining_seconds()
    return "" if seconds is None else f"sweep: {show_seconds(seconds)} left"


def lanes_accuracy(accuracies: Sequence[float]) -> str:
    """The lowest and the highest test accuracy of runs side by side."""
    low, high = min(accuracies, default=None), max(accuracies, default=None)
    return show_share(low) if low == high else f"{show_share(low, '')} to {show_share(high)}"


@contextmanager
def lanes_progress(
    num_lanes: int,
    num_rounds: int,
    accuracies: Latest,
    left: Callable[[], str],
    *,
    how: str = "side by side",
) -> Iterator[Callable[[int, int], None]]:
    """One progress bar, or a few lines, for runs side by side: yields a function to call with the
    number of runs left and how many of `num_rounds` have ended. `accuracies`: the latest of each
    run; `left`: the time left, in words."""
    CONSOLE.print(f"{num_lanes} runs {how}")
    rounds = RoundsShown(num_rounds, CONSOLE)
    try:
        yield lambda runs, round: rounds.show(
            round, f"{runs} runs, test accuracy {lanes_accuracy(accuracies())}", left()
        )
    finally:
        rounds.stop()
