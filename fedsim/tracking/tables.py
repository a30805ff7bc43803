"""The standard output, which may close or fill up, and the tables on it, which fit 80 columns,
words unbroken."""

import os
import statistics
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import IO, Any, cast

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedsim.core.record import FINAL_WINDOW, PHASES
from fedsim.core.text import printable, printable_lines

UNWRITABLE = (OSError, ValueError, AttributeError)
"""What a standard output raises that cannot be written, is closed, or is none at all (`fedsim
>&-`)."""


class Output:
    """`sys.stdout` of the moment, as a text stream that raises no error. Where it cannot be
    written, all further output goes nowhere: in silence if its reader has gone (`fedsim | head
    -1`), else after a line on stderr."""

    def __init__(self) -> None:
        self._refused = False

    @property
    def _stream(self) -> IO[str]:
        """That behind what a progress bar has put in place of `sys.stdout`."""
        return cast(IO[str], getattr(sys.stdout, "rich_proxied_file", sys.stdout))

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        self._go_on(
            lambda stream: stream.write(text.encode(self.encoding, "replace").decode(self.encoding))
        )
        return len(text)

    def flush(self) -> None:
        self._go_on(lambda stream: stream.flush())

    def isatty(self) -> bool:
        with suppress(*UNWRITABLE):
            return self._stream.isatty()
        return False

    def fileno(self) -> int:
        return self._stream.fileno()

    def _go_on(self, call: Callable[[IO[str]], object]) -> None:
        stream = self._stream
        try:
            call(stream)
        except UNWRITABLE as error:
            if (
                isinstance(error, OSError)
                and not isinstance(error, BrokenPipeError)
                and not self._refused
            ):
                self._refused = True
                with suppress(OSError):
                    reason = error.strerror or error
                    sys.stderr.write(
                        f"fedsim: cannot write to the standard output ({reason}); going on without it\n"
                    )
            with suppress(*UNWRITABLE):  # what Python still writes as it exits goes there, too
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)


SLOW_SECONDS = 2.0
"""After which the user is told what is waited for."""

CONSOLE = Console(highlight=False, file=cast(IO[str], Output()))
"""Shared by all that write to the terminal."""


def print_line(text: str) -> None:
    CONSOLE.print(printable_lines(text), soft_wrap=True, markup=False)


@contextmanager
def print_if_slow(text: str) -> Iterator[None]:
    """Say `text` in a line if what is within takes more than `SLOW_SECONDS`."""
    timer = threading.Timer(SLOW_SECONDS, print_line, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


SPOKEN = {"std": "standard deviation"}


def closing_table(summary: Mapping[str, Any]) -> Table:
    """A run's final accuracy, participation, time by phase, bytes and samples."""

    def share(name: str) -> str:
        return show_share(summary.get(name))

    totals, simulated = summary["totals"], summary.get("simulated_seconds")
    clients = summary.get("client_accuracy") or {}
    window, late, epsilon = (
        min(FINAL_WINDOW, summary["rounds"]),
        summary.get("late_updates"),
        summary.get("epsilon"),
    )
    phases = ", ".join(f"{phase} {show_seconds(totals[f'seconds_{phase}'])}" for phase in PHASES)
    names = [
        n for n in ("mean", "worst_tenth", "std", "never_selected") if clients.get(n) is not None
    ]
    accuracies = [f"{SPOKEN.get(n, n.replace('_', ' '))} {show_share(clients[n])}" for n in names]
    rows = {
        "final accuracy": f"[bold]{share('smoothed_accuracy')}[/]  mean of the last {window} rounds\n"
        f"last round {share('last_accuracy')}, best {share('best_accuracy')}, "
        f"before round 1 {share('initial_accuracy')}",
        "by client": ", ".join(accuracies),
        "participation": f"{share('mean_participation_ratio')} of clients a round, {share('coverage')} covered",
        "privacy": ""
        if epsilon is None
        else f"epsilon {epsilon:.4g} of each client, at aggregator.delta",
        "wall time": f"{show_seconds(summary['wall_seconds'])} ({phases})",
        "simulated time": ""
        if simulated is None
        else show_seconds(simulated) + (f", {late:,} updates too late" if late else ""),
        "bytes": f"{show_bytes(totals['bytes_down'])} down, {show_bytes(totals['bytes_up'])} up",
        "samples": f"{totals['train_samples']:,} trained on, {totals['forward_samples']:,} more passed forward",
        "engine": _shown(str(summary.get("engine", ""))),
    }
    table = Table(show_header=False, box=None, padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, text in rows.items():
        if text:
            table.add_row(name, text)
    return table


CURVE_LINES, BLOCKS = 8, " ▁▂▃▄▅▆▇█"


def accuracy_curve(accuracies: Mapping[int, float], width: int) -> str:
    """Test accuracies by round as lines of blocks, at most `width` wide: means of neighbours where
    they are many."""
    rounds, values = list(accuracies), list(accuracies.values())
    low, high, columns = min(values), max(values), min(max(width, 30) - 10, 8 * len(values))
    starts = [column * len(values) // columns for column in range(columns + 1)]
    means = [
        statistics.fmean(values[start : max(end, start + 1)]) for start, end in pairwise(starts)
    ]
    heights = [
        1 + round((8 * CURVE_LINES - 1) * (mean - low) / (high - low or 1)) for mean in means
    ]
    rows = [
        "".join(BLOCKS[min(max(height - 8 * row, 0), 8)] for height in heights)
        for row in range(CURVE_LINES)
    ]
    labels = [show_share(low), *[""] * (CURVE_LINES - 2), show_share(high)]
    lines = [f"{label:>8}  {row}" for label, row in zip(labels, rows, strict=True)]
    return "\n".join(
        [*lines[::-1], f"   round  {rounds[0]}{rounds[-1]:>{columns - len(str(rounds[0]))}}"]
    )


Row = Mapping[str, Any]
"""A job: labels (keys and values of the command line except the seed), seed, status and summary."""
COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "final %": lambda summary: show_share(summary.get("smoothed_accuracy"), ""),
    "last %": lambda summary: show_share(summary["last_accuracy"], ""),
    "part. %": lambda summary: show_share(summary["mean_participation_ratio"], ""),
    "time": lambda summary: show_seconds(summary["wall_seconds"]),
    "down": lambda summary: show_bytes(summary["totals"]["bytes_down"]),
    "up": lambda summary: show_bytes(summary["totals"]["bytes_up"]),
}
"""The text of a job's cell in each column, from its summary."""
LEFT_OUT_FIRST = ("part. %", "up", "down", "time", "last %")
"""Columns that a narrow terminal does without, in this order, before names would be broken."""
CAPTION = f"final: mean of the last {FINAL_WINDOW} rounds; last: the last round alone"
Line = tuple[Row, Mapping[str, str]]
"""Of a table: a job, of which the choices are shown that differ, and the cells behind them."""


def sweep_table(rows: Sequence[Row], console: Console | None = None) -> None:
    """Print a line per job with the choices that differ, then means over jobs that differ only by
    seed."""
    console = console or CONSOLE
    differing = differing_keys([row["labels"] for row in rows])
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(_choices(row, differing)), []).append(row)
    console.print(f"{len(rows)} jobs", style="italic")
    left_out = _print_table(differing, [(row, _job_cells(row)) for row in rows], console)
    console.print(CAPTION + left_out, style="dim")
    if len(groups) < len(rows):
        console.print(
            "over seeds (mean ± standard deviation of the runs that are done)", style="italic"
        )
        _print_table(
            differing, [(group[0], _mean_cells(group)) for group in groups.values()], console
        )


def _print_table(differing: Sequence[str], lines: Sequence[Line], console: Console) -> str:
    """With as many columns as fit beside the longest word of the choices that differ. Returns which
    it leaves out."""
    wide = console.options.update(max_width=10_000)  # wider than any table
    for count in range(len(LEFT_OUT_FIRST) + 1):
        left_out = [name for name in LEFT_OUT_FIRST[:count] if name in lines[0][1]]
        if (
            console.measure(_table(differing, lines, left_out, "\n"), options=wide).maximum
            <= console.width
        ):
            break
    console.print(_table(differing, lines, left_out, " "))
    return f"; left out at this width: {', '.join(left_out)}" if left_out else ""


def _table(
    differing: Sequence[str], lines: Sequence[Line], left_out: Sequence[str], between: str
) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(between.join(map(_shown, differing)), overflow="fold")
    heads = [head for head in lines[0][1] if head not in left_out]
    for head in heads:
        table.add_column(head, justify="left" if head == "status" else "right", no_wrap=True)
    for row, cells in lines:
        table.add_row(
            between.join(map(_shown, _choices(row, differing))), *(cells[head] for head in heads)
        )
    return table


def _choices(row: Row, names: Sequence[str]) -> list[str]:
    return [str(row["labels"].get(name, "-")) for name in names]


def _job_cells(row: Row) -> Mapping[str, str]:
    summary, style = row["summary"], "green" if row["status"] == "done" else "red"
    cells = {name: show(summary) if "totals" in summary else "-" for name, show in COLUMNS.items()}
    return {"seed": str(row["seed"]), "status": f"[{style}]{_shown(row['status'])}[/]", **cells}


def _mean_cells(group: Sequence[Row]) -> Mapping[str, str]:
    done = [row["summary"] for row in group if row["status"] == "done"]
    diverged = sum(row["status"] == "diverged" for row in group)
    return {
        "done": str(len(done)) if len(done) == len(group) else f"{len(done)}/{len(group)}",
        "final %": _mean_and_spread([summary.get("smoothed_accuracy") for summary in done]),
        "last %": _mean_and_spread([summary.get("last_accuracy") for summary in done]),
        "diverged": f"{diverged}/{len(group)}" if diverged else "",
    }


def _mean_and_spread(accuracies: Sequence[float | None]) -> str:
    known = [value for value in accuracies if value is not None]
    spread = f" ± {100 * statistics.stdev(known):.2f}" if len(known) > 1 else ""
    return f"{100 * statistics.mean(known):.2f}{spread}" if known else "-"


def differing_keys(labels: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys in which jobs differ, in the order in which they come."""
    names = list(dict.fromkeys(name for row in labels for name in row))
    return [n for n in names if len({str(row.get(n)) for row in labels}) > 1]


def show_share(value: float | None, unit: str = " %") -> str:
    return "-" if value is None else f"{100 * value:.2f}{unit}"


def show_seconds(value: float) -> str:
    if value < 100:
        return f"{value:.1f} s" if value >= 1 else f"{1000 * value:.0f} ms"
    return f"{value / 60:.1f} min" if value < 6000 else f"{value / 3600:.1f} h"


def show_bytes(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def _shown(text: str) -> str:
    return escape(printable(text))
