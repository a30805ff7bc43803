"""The standard output, and what fedsim prints on it: lines, results of a run, a table of a sweep.

The standard output may close or fill up; fedsim then continues without it. Tables fit a terminal of
80 columns, with words unbroken.
"""

import os
import statistics
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise, product
from typing import IO, Any, cast

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedsim.core.configs import differing_keys, short_names
from fedsim.core.record import PHASES
from fedsim.core.text import printable, printable_lines
from fedsim.results.reading import FINISHED, window_of

UNWRITABLE = (OSError, ValueError, AttributeError)
"""Errors of a standard output that cannot be written, is closed, or is missing (`fedsim >&-`)."""


class Output:
    """A text stream that writes to the present `sys.stdout` and raises no error.

    After an error, all output is discarded. A line on stderr then gives the reason, unless the
    reader of a pipe has gone, as in `fedsim | head -1`.
    """

    def __init__(self) -> None:
        self._has_failed = False

    @property
    def _stream(self) -> IO[str]:
        """The standard output itself, also while a progress bar of rich replaces `sys.stdout`."""
        return cast(IO[str], getattr(sys.stdout, "rich_proxied_file", sys.stdout))

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        encodable = text.encode(self.encoding, "replace").decode(self.encoding)
        with self._without_errors() as stream:
            stream.write(encodable)
        return len(text)

    def flush(self) -> None:
        with self._without_errors() as stream:
            stream.flush()

    def isatty(self) -> bool:
        with suppress(*UNWRITABLE):
            return self._stream.isatty()
        return False

    def fileno(self) -> int:
        return self._stream.fileno()

    @contextmanager
    def _without_errors(self) -> Iterator[IO[str]]:
        """Provide the stream. After an error of it in this context, discard all later output."""
        stream = self._stream
        try:
            yield stream
        except UNWRITABLE as error:
            is_pipe = isinstance(error, BrokenPipeError)
            if isinstance(error, OSError) and not is_pipe and not self._has_failed:
                self._has_failed = True
                reason = f"cannot write to the standard output ({error.strerror or error})"
                with suppress(OSError):
                    sys.stderr.write(f"fedsim: {reason}; continuing without it\n")
            # From now on the stream writes to /dev/null, also what Python still writes at its exit.
            with suppress(*UNWRITABLE):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)


SLOW_SECONDS = 2.0
"""After this time, `print_if_slow` tells the user what fedsim waits for."""

CONSOLE = Console(highlight=False, file=cast(IO[str], Output()))
"""The rich console through which fedsim prints everything."""


def print_line(text: str) -> None:
    """Print a line as it is: rich neither wraps it nor reads it as markup."""
    CONSOLE.print(printable_lines(text), soft_wrap=True, markup=False)


@contextmanager
def print_if_slow(text: str) -> Iterator[None]:
    """Print a line if this context takes more than `SLOW_SECONDS`."""
    timer = threading.Timer(SLOW_SECONDS, print_line, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def closing_table(summary: Mapping[str, Any]) -> Table:
    """Return a table of a run's final accuracy, participation, time, bytes and samples."""
    table = Table(show_header=False, box=None, padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()

    def share(name: str) -> str:
        return show_share(summary.get(name))

    totals = summary["totals"]
    window = min(window_of(summary), summary["rounds"])
    table.add_row(
        "final accuracy",
        f"[bold]{share('final_accuracy')}[/]  {final_rounds([window])}\n"
        f"last accuracy {share('last_accuracy')}, best {share('best_accuracy')}, "
        f"before round 1 {share('initial_accuracy')}",
    )
    by_client = _client_accuracies(summary.get("client_accuracy") or {})
    if by_client:
        table.add_row("by client", by_client)
    ratio = share("mean_participation_ratio")
    table.add_row("participation", f"{ratio} of clients a round, {share('coverage')} covered")
    if summary.get("epsilon") is not None:
        epsilon = f"epsilon {summary['epsilon']:.4g} of each client, at aggregator.delta"
        table.add_row("privacy", epsilon)
    phases = [f"{phase} {show_seconds(totals[f'seconds_{phase}'])}" for phase in PHASES]
    table.add_row("wall time", f"{show_seconds(summary['wall_seconds'])} ({', '.join(phases)})")
    if summary.get("simulated_seconds") is not None:
        seconds = show_seconds(summary["simulated_seconds"])
        late = summary.get("late_updates")
        too_late = f", {late:,} updates too late" if late else ""
        table.add_row("simulated time", seconds + too_late)
    down = show_bytes(totals["bytes_down"])
    table.add_row("bytes", f"{down} down, {show_bytes(totals['bytes_up'])} up")
    trained = f"{totals['train_samples']:,} trained on"
    table.add_row("samples", f"{trained}, {totals['forward_samples']:,} more passed forward")
    if summary.get("engine"):
        table.add_row("engine", _escaped(str(summary["engine"])))
    return table


def _client_accuracies(accuracies: Mapping[str, Any]) -> str:
    """Return the accuracies of the clients in words, as far as they are known."""
    names = {
        "mean": "mean",
        "worst_tenth": "worst tenth",
        "std": "standard deviation",
        "never_selected": "never selected",
    }
    texts = []
    for key, name in names.items():
        if accuracies.get(key) is not None:
            texts.append(f"{name} {show_share(accuracies[key])}")
    return ", ".join(texts)


CURVE_LINES = 8
"""The height of the curve of the accuracy."""
BLOCKS = " ▁▂▃▄▅▆▇█"
"""A column of a line, filled from 0 to 8 eighths."""


def accuracy_curve(accuracies: Mapping[int, float], width: int) -> str:
    """Return test accuracies by round as lines of blocks, at most `width` wide.

    Neighbours are averaged if there are many.
    """
    # 1. The mean accuracy of each column. Labels take 10 characters of a line.
    rounds = list(accuracies)
    values = list(accuracies.values())
    num_columns = min(max(width, 30) - 10, 8 * len(values))
    starts = [column * len(values) // num_columns for column in range(num_columns + 1)]
    means = []
    for start, end in pairwise(starts):
        means.append(statistics.fmean(values[start : max(end, start + 1)]))
    # 2. Its height in eighths of a line.
    low = min(values)
    high = max(values)
    spread = (high - low) or 1
    heights = [1 + round((8 * CURVE_LINES - 1) * (mean - low) / spread) for mean in means]
    # 3. The lines, from the top, with labels at both ends. Line 0 is the lowest.
    labels = [""] * CURVE_LINES
    labels[0] = show_share(low)
    labels[-1] = show_share(high)
    lines = []
    for row in reversed(range(CURVE_LINES)):
        blocks = [BLOCKS[min(max(height - 8 * row, 0), 8)] for height in heights]
        lines.append(f"{labels[row]:>8}  {''.join(blocks)}")
    first = str(rounds[0])
    lines.append(f"   round  {first}{rounds[-1]:>{num_columns - len(first)}}")
    return "\n".join(lines)


Job = Mapping[str, Any]
"""A job of a sweep. It has `labels` (keys and values of the command line except the seed), the
`seed`, the `status`, and the `summary`."""
Line = tuple[Sequence[str], Mapping[str, str]]
"""A line of a table: the choices of its jobs, and the texts of all other columns by their names."""
LEFT_OUT_FIRST = ("part.", "up", "down", "time", "last")
"""The columns that a narrow terminal does without, in this order, before names are broken."""
CAPTION = "final: final accuracy, the {}; last: last accuracy"


def final_rounds(windows: Sequence[int]) -> str:
    """Return in words over which last rounds a final accuracy is the mean."""
    if list(windows) == [1]:
        return "value of the last round"
    return f"mean of the last {' or '.join(map(str, windows))} rounds"


def sweep_table(jobs: Sequence[Job], console: Console | None = None) -> None:
    """Print a table of all jobs, and a table of means if there are several seeds.

    Both have a column for each key in whose choices jobs differ, under its short name. There is a
    column of rounds if jobs ended after different numbers of them.
    """
    console = console or CONSOLE
    lengths = {job["summary"]["rounds"] for job in jobs if "rounds" in job["summary"]}
    has_rounds = len(lengths) > 1
    differing = differing_keys([job["labels"] for job in jobs])
    heads = list(short_names(differing).values())
    groups: dict[tuple[str, ...], list[Job]] = {}  # by choices
    lines: list[Line] = []
    for job in jobs:
        choices = tuple(str(job["labels"].get(key, "-")) for key in differing)
        groups.setdefault(choices, []).append(job)
        lines.append((choices, _job_cells(job, has_rounds=has_rounds)))
    console.print("1 job" if len(jobs) == 1 else f"{len(jobs)} jobs", style="italic")
    left_out = _print_table(heads, lines, console)
    windows = dict.fromkeys(window_of(job["summary"]) for job in jobs)
    console.print(CAPTION.format(final_rounds(list(windows))) + left_out, style="dim")
    if len(groups) == len(jobs):
        return
    lines = []
    for choices, group in groups.items():
        lines.append((choices, _mean_cells(group, has_rounds=has_rounds)))
    console.print("mean [95 % interval] over the seeds that are done", style="italic")
    left_out = _print_table(heads, lines, console)
    if left_out:
        console.print(left_out.removeprefix("; "), style="dim")


def _print_table(heads: Sequence[str], lines: Sequence[Line], console: Console) -> str:
    """Print a table of the `lines`. `heads` are the heads of the columns of their choices.

    If the table is too wide, it has fewer columns (`LEFT_OUT_FIRST`). If it is still too wide, the
    choices share a column. Returns a text on the columns left out, which begins with "; ".
    """
    _, cells_of_first = lines[0]
    columns = [name for name in cells_of_first if any(cells[name] for _, cells in lines)]
    candidates = [name for name in LEFT_OUT_FIRST if name in columns]
    unlimited = console.options.update(max_width=10_000)
    # Take the first form that fits, otherwise the last one.
    for is_joint, num_left_out in product((False, True), range(len(candidates) + 1)):
        left_out = candidates[:num_left_out]
        shown = [name for name in columns if name not in left_out]
        # Joint choices may be broken between two of them, but not within one.
        unbroken = _table(heads, lines, shown, "\n" if is_joint else None)
        if console.measure(unbroken, options=unlimited).maximum <= console.width:
            break
    console.print(_table(heads, lines, shown, " " if is_joint else None))
    return f"; left out at this width: {', '.join(left_out)}" if left_out else ""


def _table(
    heads: Sequence[str], lines: Sequence[Line], columns: Sequence[str], between: str | None
) -> Table:
    """Return a table of the choices and of `columns`. `heads` are the heads of the choices.

    Each choice has a column, if `between` is None. Otherwise they share one, with `between` them.
    """

    def choice_cells(texts: Sequence[str]) -> list[str]:
        escaped = [_escaped(text) for text in texts]
        return escaped if between is None else [between.join(escaped)]

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for head in choice_cells(heads):
        table.add_column(head, overflow="fold")
    for column in columns:
        justify: Any = "left" if column == "status" else "right"
        table.add_column(column, justify=justify, no_wrap=True)
    for choices, cells in lines:
        table.add_row(*choice_cells(choices), *(cells[name] for name in columns))
    return table


def _job_cells(job: Job, *, has_rounds: bool) -> dict[str, str]:
    """Return the texts of a job by column. A job without results has "-" for them."""
    summary = job["summary"]
    style = "green" if job["status"] in FINISHED else "red"
    cells = {"seed": str(job["seed"]), "status": f"[{style}]{_escaped(job['status'])}[/]"}
    if has_rounds:
        cells["rounds"] = str(summary.get("rounds", "-"))
    cells |= dict.fromkeys(("final", "last", "part.", "time", "down", "up"), "-")
    if "totals" in summary:
        totals = summary["totals"]
        cells["final"] = show_share(summary.get("final_accuracy"))
        cells["last"] = show_share(summary["last_accuracy"])
        cells["part."] = show_share(summary["mean_participation_ratio"])
        cells["time"] = show_seconds(summary["wall_seconds"])
        cells["down"] = show_bytes(totals["bytes_down"])
        cells["up"] = show_bytes(totals["bytes_up"])
    return cells


def _mean_cells(jobs: Sequence[Job], *, has_rounds: bool) -> dict[str, str]:
    """Return the means over the seeds of some jobs as texts, by column. Empty columns are not
    shown."""
    done = [job["summary"] for job in jobs if job["status"] in FINISHED]
    diverged = sum(job["status"] == "diverged" for job in jobs)
    rounds = f"{statistics.fmean(summary['rounds'] for summary in done):.4g}" if done else "-"
    return {
        "seeds": str(len(done)) if len(done) == len(jobs) else f"{len(done)}/{len(jobs)}",
        "rounds": rounds if has_rounds else "",
        "final": _mean_and_interval([summary.get("final_accuracy") for summary in done]),
        "last": _mean_and_interval([summary.get("last_accuracy") for summary in done]),
        "diverged": f"{diverged}/{len(jobs)}" if diverged else "",
    }


def _mean_and_interval(accuracies: Sequence[float | None]) -> str:
    from fedsim.results.statistics import UNIT, estimate  # here: it imports scipy

    mean = estimate([value for value in accuracies if value is not None], UNIT)
    return "-" if mean is None else str(mean)


def show_share(value: float | None) -> str:
    """Return an accuracy or another share with four decimals; `-` for None."""
    return "-" if value is None else f"{value:.4f}"


def show_seconds(value: float) -> str:
    """Return a duration in milliseconds, seconds, minutes or hours, as suits it."""
    if value < 1:
        return f"{1000 * value:.0f} ms"
    if value < 100:
        return f"{value:.1f} s"
    return f"{value / 60:.1f} min" if value < 6000 else f"{value / 3600:.1f} h"


def show_bytes(value: float) -> str:
    """Return a number of bytes with three digits and the unit that suits it."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def _escaped(text: str) -> str:
    return escape(printable(text))
