"""The standard output, which may close or fill up, and the tables on it, which fit 80 columns, words unbroken."""

import itertools
import os
import statistics
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, cast

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedsim.core.errors import printable, printable_lines
from fedsim.core.record import FINAL_WINDOW, PHASES

UNWRITABLE = (OSError, ValueError, AttributeError)
"""What a standard output raises that cannot be written, is closed, or is none at all (`fedsim >&-`)."""


class Output:
    """`sys.stdout` of the moment, as a text stream that raises no error.

    A run's files are its record, the screen a copy. Where it cannot be written, all further output goes nowhere: in
    silence if its reader has gone (`fedsim | head -1`), else after a line on stderr. Characters that its encoding lacks
    become question marks.
    """

    def __init__(self) -> None:
        self._refused = False

    @property
    def _stream(self) -> IO[str]:
        """What a progress bar has put in place of `sys.stdout` writes to this one."""
        return cast(IO[str], getattr(sys.stdout, "rich_proxied_file", sys.stdout))

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        stream = self._stream
        with self._kept_going(stream):
            try:
                stream.write(text)
            except UnicodeEncodeError:
                stream.write(text.encode(self.encoding, "replace").decode(self.encoding))
        return len(text)

    def flush(self) -> None:
        stream = self._stream
        with self._kept_going(stream):
            stream.flush()

    def isatty(self) -> bool:
        with suppress(*UNWRITABLE):
            return self._stream.isatty()
        return False

    def fileno(self) -> int:
        return self._stream.fileno()

    @contextmanager
    def _kept_going(self, stream: IO[str]) -> Iterator[None]:
        try:
            yield
        except UNWRITABLE as error:
            if isinstance(error, OSError) and not isinstance(error, BrokenPipeError) and not self._refused:
                self._refused = True
                with suppress(OSError):
                    reason = error.strerror or error
                    sys.stderr.write(f"fedsim: cannot write to the standard output ({reason}); going on without it\n")
            with suppress(*UNWRITABLE):  # what Python still writes as it exits goes there, too
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)


SLOW_SECONDS = 2.0
"""After which the user is told what is waited for."""

CONSOLE = Console(highlight=False, file=cast(IO[str], Output()))
"""Shared by all that write to the terminal, so that no output breaks the progress bar of another."""


def tell_line(text: str) -> None:
    """One line of text for the user."""
    CONSOLE.print(printable_lines(text), soft_wrap=True, markup=False)


@contextmanager
def told_if_slow(text: str) -> Iterator[None]:
    """Say `text` in a line if what is within takes more than `SLOW_SECONDS`."""
    timer = threading.Timer(SLOW_SECONDS, tell_line, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def closing_table(summary: Mapping[str, Any]) -> Table:
    """A run's final accuracy, participation, time by phase, bytes and samples."""
    totals, clients = summary["totals"], summary.get("client_accuracy")
    smoothed, final, best, initial = (
        show_share(summary.get(f"{name}_accuracy")) for name in ("smoothed", "final", "best", "initial")
    )
    window, phases = min(FINAL_WINDOW, summary["rounds"]), ((p, show_seconds(totals[f"seconds_{p}"])) for p in PHASES)
    table = Table(show_header=False, box=None, padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row("final accuracy", f"[bold]{smoothed}[/]  mean of the last {window} rounds")
    table.add_row("", f"last round {final}, best {best}, before round 1 {initial}")
    if clients:
        never = clients["never_selected"]
        shares = [show_share(clients[name]) for name in ("mean", "worst_tenth", "std")]
        text = "mean {}, worst tenth {}, standard deviation {}".format(*shares)
        table.add_row("by client", text + ("" if never is None else f", never selected {show_share(never)}"))
    ratio, coverage = show_share(summary["mean_participation_ratio"]), show_share(summary["coverage"])
    table.add_row("participation", f"{ratio} of clients a round, {coverage} covered")
    parts = ", ".join(f"{phase} {seconds}" for phase, seconds in phases)
    table.add_row("wall time", f"{show_seconds(summary['wall_seconds'])} ({parts})")
    if summary.get("simulated_seconds") is not None:
        late = f", {summary['late_updates']:,} updates too late" if summary.get("late_updates") else ""
        table.add_row("simulated time", show_seconds(summary["simulated_seconds"]) + late)
    table.add_row("bytes", f"{show_bytes(totals['bytes_down'])} down, {show_bytes(totals['bytes_up'])} up")
    samples = f"{totals['train_samples']:,} trained on, {totals['forward_samples']:,} more passed forward"
    table.add_row("samples", samples)
    table.add_row("engine", _shown(str(summary.get("engine", ""))))
    return table


Row = Mapping[str, Any]
"""A job: labels (keys and values of the command line except the seed), seed, status and summary."""
Column = Callable[[Mapping[str, Any]], str]
COLUMNS: Mapping[str, Column] = {
    "final %": lambda summary: show_percent(summary.get("smoothed_accuracy")),
    "last %": lambda summary: show_percent(summary["final_accuracy"]),
    "part. %": lambda summary: show_percent(summary["mean_participation_ratio"]),
    "time": lambda summary: show_seconds(summary["wall_seconds"]),
    "down": lambda summary: show_bytes(summary["totals"]["bytes_down"]),
    "up": lambda summary: show_bytes(summary["totals"]["bytes_up"]),
}
"""The text of a job's cell in each column, from its summary."""
LEFT_OUT_FIRST = ("part. %", "up", "down", "time", "last %")
"""Columns that a narrow terminal does without, in this order, before names would be broken."""
CAPTION = f"final: mean of the last {FINAL_WINDOW} rounds; last: the last round alone"


def sweep_table(rows: Sequence[Row], console: Console | None = None) -> None:
    """Print one row per job with the choices that differ, then means and deviations over jobs that differ only by seed.

    Where the choices do not fit side by side, they stand one below the other.
    """
    console = console or CONSOLE
    differing = differing_keys([r["labels"] for r in rows])
    for stacked, count in itertools.product((False, True), range(len(LEFT_OUT_FIRST) + 1)):
        left_out = LEFT_OUT_FIRST[:count]
        columns = {name: column for name, column in COLUMNS.items() if name not in left_out}
        table = _table(differing, stacked, ("seed", "status", *columns), _jobs(rows, differing, columns))
        if _fits(table, console):
            break
    console.print(f"{len(rows)} jobs", style="italic")
    console.print(table)
    console.print(CAPTION + (f"; left out at this width: {', '.join(left_out)}" if left_out else ""), style="dim")
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(_key(row, differing), []).append(row)
    if len(groups) == len(rows):
        return
    for stacked in (False, True):
        table = _table(differing, stacked, ("done", "final %", "last %", "diverged"), _seed_means(groups))
        if _fits(table, console):
            break
    console.print("over seeds (mean ± standard deviation of the runs that are done)", style="italic")
    console.print(table)


Line = tuple[tuple[str, ...], list[str]]
"""Of a table: the choices that differ, and the cells behind them."""


def _table(differing: Sequence[str], stacked: bool, heads: Sequence[str], lines: Iterable[Line]) -> Table:
    """A column for each of the choices that differ, or if `stacked` one for all, and then those with these `heads`."""
    stacked = stacked and bool(differing)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ["job"] if stacked else differing:
        table.add_column(_shown(name), overflow="fold")
    for head in heads:
        table.add_column(head, justify="left" if head == "status" else "right", no_wrap=True)
    for key, cells in lines:
        names = [_shown(value) for value in key]
        if stacked:
            names = ["\n".join(_shown(f"{name}={value}") for name, value in zip(differing, key, strict=True))]
        table.add_row(*names, *cells)
    return table


def _fits(table: Table, console: Console) -> bool:
    wide = console.options.update(max_width=10_000)  # wider than any table
    return console.measure(table, options=wide).maximum <= console.width


def _key(row: Row, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(row["labels"].get(n, "")) for n in names)


def _jobs(rows: Sequence[Row], differing: Sequence[str], columns: Mapping[str, Column]) -> Iterator[Line]:
    for row in rows:
        summary, style = row["summary"], {"done": "green"}.get(row["status"], "red")
        cells = [show(summary) if "totals" in summary else "-" for show in columns.values()]
        yield _key(row, differing), [str(row["seed"]), f"[{style}]{_shown(row['status'])}[/]", *cells]


def _seed_means(groups: Mapping[tuple[str, ...], Sequence[Row]]) -> Iterator[Line]:
    for key, group in groups.items():
        done = [row["summary"] for row in group if row["status"] == "done"]
        means = [_mean_and_spread([s.get(name) for s in done]) for name in ("smoothed_accuracy", "final_accuracy")]
        diverged = sum(row["status"] == "diverged" for row in group)
        finished = str(len(done)) if len(done) == len(group) else f"{len(done)}/{len(group)}"
        yield key, [finished, *means, f"{diverged}/{len(group)}" if diverged else ""]


def _mean_and_spread(accuracies: Sequence[float | None]) -> str:
    known = [value for value in accuracies if value is not None]
    spread = f" ± {100 * statistics.stdev(known):.2f}" if len(known) > 1 else ""
    return f"{100 * statistics.mean(known):.2f}{spread}" if known else "-"


def differing_keys(labels: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys in which jobs differ, in the order in which they come."""
    names = list(dict.fromkeys(name for row in labels for name in row))
    return [n for n in names if len({str(row.get(n)) for row in labels}) > 1]


def show_share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"


def show_percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"


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
