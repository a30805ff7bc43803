"""Tables of a report: a data frame of values, and how its columns are written as text.

The same table is printed on the terminal, and written as Markdown, LaTeX, CSV and on the page.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pandas as pd
import rich.table
from rich.box import SIMPLE_HEAD
from rich.markup import escape

from fedsim.core.text import printable, printable_lines
from fedsim.results.statistics import Difference, Mean, Median, Share

MISSING = "-"
"""The text of a value that is not known."""
Format = Any
"""How a value is written: a format specification for numbers, or a function that returns a text."""


class Bold(str):
    """A text that is set in bold."""


@dataclass(frozen=True)
class Table:
    """A table of a report.

    - `name`: the name of its files, without suffix; `title`: its heading.
    - `values`: a frame of texts, numbers and statistics, with None for values that are not known.
    - `formats`: the formats of columns by their names.
    - `note`: the text below the table.
    - `rules`: rules of verdicts. They follow the note, except on the page, where all rules stand at
      the end.
    - `styles`: the CSS classes, on the page, of cells by their texts.
    """

    name: str
    title: str
    values: pd.DataFrame
    formats: Mapping[str, Format] = field(default_factory=dict)
    note: str = ""
    rules: str = ""
    styles: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def texts(self) -> pd.DataFrame:
        """All cells as texts."""
        columns = {
            name: [show(value, self.formats.get(name, "")) for value in self.values[name]]
            for name in self.values
        }
        return pd.DataFrame(columns, dtype=object)

    @cached_property
    def shown(self) -> pd.DataFrame:
        """The texts without columns whose cells are all empty or `MISSING`."""
        says_nothing = self.texts.isin(["", MISSING]).all()
        return self.texts.loc[:, ~says_nothing] if len(self.texts) else self.texts

    def rich(self) -> rich.table.Table:
        """Return the table for a terminal."""
        table = rich.table.Table(
            title=_on_screen(self.title),
            title_justify="left",
            caption=_on_screen(self._full_note) or None,
            caption_justify="left",
            box=SIMPLE_HEAD,
        )
        for number, name in enumerate(self.shown):
            column = rich.table.Column(_on_screen(name), overflow="fold")
            column.justify = "left" if number < 2 else "right"
            table.columns.append(column)
        for row in self.shown.to_numpy():
            table.add_row(*map(_on_screen, row))
        return table

    def markdown(self) -> str:
        """Return the table as Markdown."""
        header = list(self.shown)
        lines = [f"### {_escape_markdown(self.title)}", ""]
        for row in (header, ["---"] * len(header), *self.shown.to_numpy()):
            lines.append(f"| {' | '.join(map(_escape_markdown, row))} |")
        lines.append("")
        if self._full_note:
            lines += [*map(_escape_markdown, self._full_note.splitlines()), ""]
        return "\n".join(lines)

    def latex(self) -> str:
        """Return a `tabular` environment with the rules of the package booktabs."""
        header = list(self.shown)
        rows = [
            " & ".join(map(_escape_latex, row)) + r" \\" for row in (header, *self.shown.to_numpy())
        ]
        columns = "ll".ljust(len(header), "r")[: len(header)]  # two of text, the others of numbers
        return "\n".join(
            [
                f"% {printable(self.title)}",
                f"\\begin{{tabular}}{{{columns}}}",
                r"\toprule",
                rows[0],
                r"\midrule",
                *rows[1:],
                r"\bottomrule",
                r"\end{tabular}",
                "",
            ]
        )

    def csv(self) -> str:
        """Return all columns as CSV, also the empty ones. Cells that a spreadsheet would take for
        formulas are escaped."""
        texts = self.texts.map(_no_formula).rename(columns=_no_formula)
        return texts.to_csv(index=False, lineterminator="\n")

    @property
    def _full_note(self) -> str:
        return f"{self.note} {self.rules}".strip()


def make_frame(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> pd.DataFrame:
    """Return the values of a table from its rows; numbers keep their types."""
    return pd.DataFrame(list(rows), columns=list(header), dtype=object)


def show(value: Any, form: Format = "") -> str:
    """Return a value as text. Texts stay, whatever the format."""
    if isinstance(value, str):
        return value
    if callable(form):
        return form(value)
    if value is None or value != value:  # None or nan
        return MISSING
    if isinstance(value, Mean | Share | Median):
        return show_result(value)
    return format(value, form)


def number_in(value: Any) -> float | None:
    """Return the number by which the page sorts a cell; None for texts and nan.

    It is the first item of a tuple, and the mean or median of a statistic.
    """
    if isinstance(value, tuple):
        value = value[0]
    if isinstance(value, Mean):
        value = value.mean
    if isinstance(value, Median):
        value = value.median
    is_number = isinstance(value, int | float) and not math.isnan(value)
    return value if is_number else None


def show_result(value: Mean | Share | Median) -> str:
    """Return a result with its 95 % interval as text.

    Differences have signs, and shares are shown as counts. Medians and ends that are not reached
    within the run are shown as "> 500".
    """
    low, high = value.interval
    if isinstance(value, Share):
        return f"holds for {value.count} of {value.num} seeds [{low:.2f}, {high:.2f}]"
    if isinstance(value, Median):
        median, low_text, high_text = (
            # The lower end is -inf with few seeds; rounds begin at 0.
            f"> {value.beyond:.0f}" if end == math.inf else f"{max(end, 0):.0f}"
            for end in (value.median, low, high)
        )
        return f"median {median} [{low_text}, {high_text}]"
    if isinstance(value, Difference):
        settings = f" (mean of {value.strata} settings)" if value.strata > 1 else ""
        return f"{value.mean:+.4f} {show_interval(value)}{settings}"
    digits = 4 if abs(value.mean) < 10 else 1  # shares, or rounds and numbers of selections
    interval = f" [{low:.{digits}f}, {high:.{digits}f}]" if value.num > 1 else ""
    return f"{value.mean:.{digits}f}{interval}"


def show_interval(value: Difference) -> str:
    """Return the 95 % interval of a difference."""
    low, high = value.interval
    return f"[{low:+.4f}, {high:+.4f}]"


def show_p(value: float) -> str:
    """Return a p-value; empty for nan."""
    if math.isnan(value):
        return ""
    return "< .001" if value < 0.001 else f"{value:.3f}"


def show_both(p_values: tuple[float, float]) -> str:
    """Return the p-values for and against a claim; empty if both are nan."""
    return " / ".join(map(show_p, p_values)).strip(" /")


def show_reached(
    reached: Median | None, show_number: Callable[[float], str] = "{:.0f}".format
) -> str:
    """Return the median over runs of what it takes to reach something.

    The number of runs that reach it is added unless all do: "120 (3/5)".
    """
    if reached is None:
        return MISSING
    num_reaching = sum(map(math.isfinite, reached.values))
    text = "never" if math.isinf(reached.median) else show_number(reached.median)
    return text if num_reaching == reached.num else f"{text} ({num_reaching}/{reached.num})"


def median_reached(values: Sequence[float]) -> Median | None:
    """Return the median of values, with nan (never reached) as the largest; None without values."""
    beyond = [math.inf if math.isnan(value) else float(value) for value in values]
    return Median(tuple(beyond)) if beyond else None


def table_files(tables: Sequence[Table]) -> dict[str, bytes]:
    """Return the contents of files by name: all tables in tables.md, and each as .tex and .csv."""
    files = {"tables.md": "\n".join(table.markdown() for table in tables)}
    for table in tables:
        files[f"{table.name}.tex"] = table.latex()
        files[f"{table.name}.csv"] = table.csv()
    return {name: text.encode() for name, text in files.items()}


def _on_screen(text: str) -> str:
    shown = escape(printable_lines(text))
    return f"[bold]{shown}[/]" if isinstance(text, Bold) else shown


def _escape_markdown(text: str) -> str:
    """Return `text` in one line, without columns, tags, links and pictures of its own."""
    shown = re.sub(r"[\\|]", r"\\\g<0>", printable(text))
    shown = re.sub(r"<(?=[A-Za-z/!?])", "&lt;", shown)
    shown = re.sub(r"\](?=[(\[:])", r"\\]", shown)
    return f"**{shown}**" if isinstance(text, Bold) else shown


LATEX = str.maketrans(
    {
        **{character: f"\\{character}" for character in "&%$#_{}"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\^{}",
        "±": r"$\pm$",
        "≈": r"$\approx$",
    }
)


def _escape_latex(text: str) -> str:
    shown = printable(text).translate(LATEX)
    return f"\\textbf{{{shown}}}" if isinstance(text, Bold) else shown


def _no_formula(cell: str) -> str:
    """Return `cell` in one line, after an apostrophe if a spreadsheet would compute it. Signed
    numbers stay."""
    text = printable(cell)
    is_number = re.fullmatch(r"[+-][-\d.,eE+±\s\[\]%]*", text) is not None
    may_be_formula = text.lstrip()[:1] in ("=", "@", "+", "-") and not is_number
    return f"'{text}" if may_be_formula else text
