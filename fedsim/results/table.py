"""Tables: cells of text that know the number they show, for a terminal and as Markdown, LaTeX and CSV."""

import csv
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import rich.table
from rich.box import SIMPLE_HEAD
from rich.markup import escape

from fedsim.core.errors import printable, printable_lines
from fedsim.results.groups import Group
from fedsim.results.measures import Measure
from fedsim.results.statistics import UNBOUNDED, Difference, Estimate, Median, Share, estimate


class Cell(str):
    """A cell's text, and the number by which rows are sorted."""

    value: float

    def __new__(cls, text: str, value: float) -> "Cell":
        cell = super().__new__(cls, text)
        cell.value = value
        return cell


def number(value: float | None, form: str | Callable[[float], str] = "") -> str:
    """The cell of a number in a format, which may be a function; '-' for None."""
    if value is None:
        return "-"
    return Cell(format(value, form) if isinstance(form, str) else form(value), value)


def show_estimate(value: Estimate | Difference | None) -> str:
    if value is None:
        return "-"
    digits = 4 if abs(value.mean) < 10 else 1  # shares have four digits; rounds and numbers of selections have one
    interval = f" [{value.low:.{digits}f}, {value.high:.{digits}f}]" if value.num > 1 else ""
    return Cell(f"{value.mean:.{digits}f}{interval}", value.mean)


def show_result(value: Estimate | Difference | Share | Median | None) -> str:
    """A result with its 95 % interval: differences with signs, shares as counts, medians with what is never reached."""
    if isinstance(value, Difference):
        settings = f" (mean of {value.strata} settings)" if value.strata > 1 else ""
        return Cell(" ".join(show_interval(value)) + settings, value.mean)
    if isinstance(value, Share):
        low, high = value.interval
        return f"holds for {value.count} of {value.num} seeds [{low:.2f}, {high:.2f}]"
    if isinstance(value, Median):
        shown = [_show_reached(one, value.beyond) for one in (value.median, *value.interval)]
        return f"median {shown[0]} [{shown[1]}, {shown[2]}]"
    return show_estimate(value)


def _show_reached(value: float, beyond: float) -> str:
    if math.isinf(value):
        return f"> {beyond:.0f}" if value > 0 else "0"
    return f"{value:.0f}"


def show_interval(value: Difference) -> list[str]:
    """Two cells: the mean, and the 95 % interval, with signs."""
    return [number(value.mean, "+.4f"), f"[{value.low:+.4f}, {value.high:+.4f}]"]


def show_p(value: float) -> str:
    """A p-value with three digits; empty for nan."""
    if math.isnan(value):
        return ""
    return Cell("< .001" if value < 0.001 else f"{value:.3f}", value)


def show_both(p_for: float, p_against: float) -> str:
    """Two p-values, for and against a claim; empty if nothing was tested."""
    text = f"{show_p(p_for)} / {show_p(p_against)}".strip(" /")
    return Cell(text, p_for) if text else ""


def show_median_reached(group: Group, measure: Measure, show: Callable[[float], str] = "{:.0f}".format) -> str:
    """The `median_reached` as text. If not all runs reach it, the number of those that do is added."""
    values, count = _sorted_values(group, measure), len(group.complete)
    if not count:
        return "-"
    median = _lower_median(values, count)
    text = "never" if median is None else show(median)
    reaching = "" if len(values) == count else f" ({len(values)}/{count})"
    return Cell(text + reaching, math.inf if median is None else median)


def median_reached(group: Group, measure: Measure) -> float | None:
    """The lower median of `measure` over finished runs, of which those that never get there count as the largest.

    None if more than half never do, or there is no run.
    """
    return _lower_median(_sorted_values(group, measure), len(group.complete))


def _sorted_values(group: Group, measure: Measure) -> list[float]:
    return sorted(value for run in group.complete if (value := measure(run)) is not None)


def _lower_median(values: Sequence[float], count: int) -> float | None:
    """Of `count` values, of which those that are not in the sorted `values` are larger."""
    middle = (count - 1) // 2
    return values[middle] if 0 <= middle < len(values) else None


def estimate_measure(group: Group, measure: Measure, bounds: tuple[float, float] = UNBOUNDED) -> Estimate | None:
    return estimate([value for run in group.complete if (value := measure(run)) is not None], bounds)


def show_seeds(group: Group) -> str:
    diverged = f", {group.num_diverged} diverged" if group.num_diverged else ""
    return Cell(f"{len(group.complete)}{diverged}", len(group.complete))


EMPTY = ("", "-")


@dataclass(frozen=True)
class Table:
    """A table of text cells. `name` is the name of its files; `note` is printed below it."""

    name: str
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def without_empty_columns(self) -> "Table":
        """The table without columns that say nothing: whose cells are all empty or `-`."""
        kept = [at for at in range(len(self.header)) if not all(row[at] in EMPTY for row in self.rows)]
        rows = [[row[at] for at in kept] for row in self.rows]
        return replace(self, header=[self.header[at] for at in kept], rows=rows) if self.rows else self

    def rich(self) -> rich.table.Table:
        shown = self.without_empty_columns()
        table = rich.table.Table(
            title=_on_screen(self.title),
            title_justify="left",
            caption_justify="left",
            box=SIMPLE_HEAD,
            caption=_on_screen(self.note) or None,
        )
        for number, name in enumerate(shown.header):
            table.add_column(_on_screen(name), justify="left" if number < 2 else "right", overflow="fold")
        for row in shown.rows:
            table.add_row(*map(_on_screen, row))
        return table

    def markdown(self) -> str:
        shown = self.without_empty_columns()
        lines = [
            f"### {_escape_markdown(self.title)}",
            "",
            _markdown_row(shown.header),
            _markdown_row(["---"] * len(shown.header)),
        ]
        lines += [_markdown_row(row) for row in shown.rows]
        return "\n".join([*lines, "", *([*map(_escape_markdown, self.note.splitlines()), ""] if self.note else [])])

    def latex(self) -> str:
        """A `tabular` environment with the rules of the package booktabs."""
        shown = self.without_empty_columns()
        body = [" & ".join(map(_escape_latex, row)) + r" \\" for row in shown.rows]
        columns = "l" * min(2, len(shown.header)) + "r" * max(len(shown.header) - 2, 0)
        head = " & ".join(map(_escape_latex, shown.header)) + r" \\"
        rules = [f"\\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule", *body, r"\bottomrule"]
        return "\n".join([f"% {printable(self.title)}", *rules, r"\end{tabular}", ""])

    def csv(self) -> str:
        """All columns, the empty ones, too: programs read it. No cell is a formula for a spreadsheet."""
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([*map(_no_formula, row)] for row in [self.header, *self.rows])
        return out.getvalue()


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_escape_markdown, cells))} |"


def _on_screen(text: str) -> str:
    return escape(printable_lines(text))


def _escape_markdown(text: str) -> str:
    """In one line, without columns, tags, links and pictures of its own."""
    text = re.sub(r"[\\|]", r"\\\g<0>", printable(text))
    return re.sub(r"\](?=[(\[:])", r"\\]", re.sub(r"<(?=[A-Za-z/!?])", "&lt;", text))


LATEX = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\^{}",
    "±": r"$\pm$",
}


def _escape_latex(text: str) -> str:
    return "".join(LATEX.get(c, c) for c in printable(text))


def _no_formula(cell: str) -> str:
    """`cell` in one line; one that a spreadsheet would compute begins with an apostrophe. Signed numbers stay."""
    text = printable(cell)
    signed = re.fullmatch(r"[+-][-\d.,eE+±\s\[\]%]*", text) is not None
    return f"'{text}" if text.lstrip()[:1] in ("=", "@", "+", "-") and not signed else text
