"""Tables: cells of text that know the number they show, for a terminal and as Markdown, LaTeX and
CSV."""

import csv
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import rich.table
from rich.box import SIMPLE_HEAD
from rich.markup import escape

from fedsim.core.text import printable, printable_lines
from fedsim.results.statistics import UNIT, Difference, Mean, Median, Share, estimate

Format = str | Callable[[float], str]


class Cell(str):
    """A cell's text, the number by which rows are sorted, and whether it is set in bold."""

    value: float
    bold: bool

    def __new__(cls, text: str, value: float, bold: bool = False) -> "Cell":
        cell = super().__new__(cls, text)
        cell.value, cell.bold = value, bold
        return cell


def is_bold(cell: str) -> bool:
    return isinstance(cell, Cell) and cell.bold


def number(value: float | None, form: Format = "") -> str:
    """The cell of a number; '-' for None."""
    return (
        "-"
        if value is None
        else Cell(format(value, form) if isinstance(form, str) else form(value), value)
    )


def show_estimate(value: Mean | None) -> str:
    if value is None:
        return "-"
    digits = (
        4 if abs(value.mean) < 10 else 1
    )  # shares have four digits; rounds and numbers of selections have one
    low, high = value.interval
    interval = f" [{low:.{digits}f}, {high:.{digits}f}]" if value.num > 1 else ""
    return Cell(f"{value.mean:.{digits}f}{interval}", value.mean)


def show_result(value: Mean | Share | Median | None) -> str:
    """A result with its 95 % interval: differences with signs, shares as counts, medians with what
    is never reached."""
    if isinstance(value, Difference):
        settings = f" (mean of {value.strata} settings)" if value.strata > 1 else ""
        return Cell(" ".join(show_interval(value)) + settings, value.mean)
    if isinstance(value, Share):
        low, high = value.interval
        return f"holds for {value.count} of {value.num} seeds [{low:.2f}, {high:.2f}]"
    if isinstance(value, Median):
        ends = (value.median, *value.interval)
        median, *reach = [
            f"> {value.beyond:.0f}" if end == math.inf else f"{max(end, 0):.0f}" for end in ends
        ]
        return f"median {median} [{', '.join(reach)}]"
    return show_estimate(value)


def show_interval(value: Difference) -> list[str]:
    """Two cells: the mean, and the 95 % interval."""
    low, high = value.interval
    return [number(value.mean, "+.4f"), f"[{low:+.4f}, {high:+.4f}]"]


def show_p(value: float) -> str:
    """Empty for nan."""
    return "" if math.isnan(value) else Cell("< .001" if value < 0.001 else f"{value:.3f}", value)


def show_both(p_for: float, p_against: float) -> str:
    """Two p-values, for and against a claim; empty if both are nan."""
    text = f"{show_p(p_for)} / {show_p(p_against)}".strip(" /")
    return Cell(text, p_for) if text else ""


Values = Sequence[float | None]
"""A measure of several runs; None where a run does not have it."""


def show_values(values: Values, form: Format) -> str:
    """A measure over seeds. `form`: "accuracy" for the mean with its interval, which is cut at 0
    and 1, "reached" for the median of where a run first gets; else the format of the mean, which is
    '-' if a run does not have it."""
    if form == "reached":
        return show_median_reached(values)
    known = [value for value in values if value is not None]
    if form == "accuracy":
        return show_estimate(estimate(known, UNIT))
    return number(float(np.mean(known)) if known and len(known) == len(values) else None, form)


def show_median_reached(values: Values, show: Callable[[float], str] = "{:.0f}".format) -> str:
    """The `median_reached` as text. If not all runs reach it, the number of those that do is
    added."""
    median, reaching = median_reached(values), sum(value is not None for value in values)
    if median is None:
        return "-"
    text = "never" if math.isinf(median) else show(median)
    return Cell(text + ("" if reaching == len(values) else f" ({reaching}/{len(values)})"), median)


def median_reached(values: Values) -> float | None:
    """The lower median of values of which None is beyond all others, then inf; None if there are no
    values."""
    ordered = sorted(math.inf if value is None else value for value in values)
    return ordered[(len(ordered) - 1) // 2] if ordered else None


@dataclass(frozen=True)
class Table:
    """`name` is the name of its files; `note` is printed below it."""

    name: str
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    @cached_property
    def shown(self) -> "Table":
        """The table without columns that say nothing: whose cells are all empty or `-`."""
        kept = [
            at
            for at in range(len(self.header))
            if not all(row[at] in ("", "-") for row in self.rows)
        ]
        rows = [[row[at] for at in kept] for row in self.rows]
        return (
            replace(self, header=[self.header[at] for at in kept], rows=rows) if self.rows else self
        )

    def rich(self) -> rich.table.Table:
        shown = self.shown
        title, note = _on_screen(self.title), _on_screen(self.note) or None
        table = rich.table.Table(
            title=title, title_justify="left", caption=note, caption_justify="left", box=SIMPLE_HEAD
        )
        for number, name in enumerate(shown.header):
            table.add_column(
                _on_screen(name), justify="left" if number < 2 else "right", overflow="fold"
            )
        for row in shown.rows:
            table.add_row(*map(_on_screen, row))
        return table

    def markdown(self) -> str:
        shown = self.shown
        rows = [shown.header, ["---"] * len(shown.header), *shown.rows]
        lines = [f"| {' | '.join(map(_escape_markdown, row))} |" for row in rows]
        note = [*map(_escape_markdown, self.note.splitlines()), ""] if self.note else []
        return "\n".join([f"### {_escape_markdown(self.title)}", "", *lines, "", *note])

    def latex(self) -> str:
        """A `tabular` environment with the rules of the package booktabs."""
        shown = self.shown
        head, *body = [
            " & ".join(map(_escape_latex, row)) + r" \\" for row in (shown.header, *shown.rows)
        ]
        columns = "ll".ljust(len(shown.header), "r")[: len(shown.header)]
        rules = [
            f"\\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            head,
            r"\midrule",
            *body,
            r"\bottomrule",
        ]
        return "\n".join([f"% {printable(self.title)}", *rules, r"\end{tabular}", ""])

    def csv(self) -> str:
        """All columns, the empty ones, too. No cell is a formula for a spreadsheet."""
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(
            [*map(_no_formula, row)] for row in [self.header, *self.rows]
        )
        return out.getvalue()


def table_files(tables: Sequence[Table]) -> dict[str, bytes]:
    """All tables in tables.md, and each as .tex and .csv: contents by the names of files."""
    files = {"tables.md": "\n".join(table.markdown() for table in tables)}
    for table in tables:
        files |= {f"{table.name}.tex": table.latex(), f"{table.name}.csv": table.csv()}
    return {name: text.encode() for name, text in files.items()}


def _on_screen(text: str) -> str:
    shown = escape(printable_lines(text))
    return f"[bold]{shown}[/]" if is_bold(text) else shown


def _escape_markdown(text: str) -> str:
    """In one line, without columns, tags, links and pictures of its own."""
    shown = re.sub(r"[\\|]", r"\\\g<0>", printable(text))
    shown = re.sub(r"\](?=[(\[:])", r"\\]", re.sub(r"<(?=[A-Za-z/!?])", "&lt;", shown))
    return f"**{shown}**" if is_bold(text) else shown


LATEX = str.maketrans(
    {c: f"\\{c}" for c in "&%$#_{}"}
    | {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\^{}",
        "±": r"$\pm$",
        "≈": r"$\approx$",
    }
)


def _escape_latex(text: str) -> str:
    shown = printable(text).translate(LATEX)
    return f"\\textbf{{{shown}}}" if is_bold(text) else shown


def _no_formula(cell: str) -> str:
    """`cell` in one line; one that a spreadsheet would compute begins with an apostrophe. Signed
    numbers stay."""
    text = printable(cell)
    signed = re.fullmatch(r"[+-][-\d.,eE+±\s\[\]%]*", text) is not None
    return f"'{text}" if text.lstrip()[:1] in ("=", "@", "+", "-") and not signed else text
