"""Tables of a report: a data frame of values, and how its columns are written as text.

The same table is printed on the terminal, and written as Markdown, LaTeX, CSV and on the page.
"""

import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import pandas as pd
import rich.table
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.text import Text

from fedsim.core.text import printable, printable_lines
from fedsim.results.statistics import Difference, Mean, Median, Share

MISSING = "-"
"""The text of a value that is not known."""
INTERVAL_WORDS = ("± half width of the 95 % interval", "[95 % interval]")
"""Words in titles and notes for the intervals that follow means, with the format `HALF_WIDTH` and
with others."""
SD_WORDS = "± standard deviation"
"""Words for standard deviations that follow means, with any format."""
HALF_WIDTH = "±"
"""The format of estimates in narrow columns: what follows the mean is half of the interval."""
Format = Any
"""How a value is written: a format specification for numbers, or a function that returns a text."""
LONG_CELL = 30
"""On a terminal, cells of more characters may be broken into lines, between words."""
COLUMN_GAP = 2
"""Number of spaces between two columns on a terminal."""
LATEX = str.maketrans(
    {
        **{character: f"\\{character}" for character in "&%$#_{}"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\^{}",
        "±": r"$\pm$",
        "≈": r"$\approx$",
        # LaTeX's usual encoding of fonts has other characters in place of these three.
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
    }
)
"""How LaTeX writes characters that it would take for commands, or does not have."""
SHRUNK = "\\resizebox{\\ifdim\\width>\\linewidth\\linewidth\\else\\width\\fi}{!}{%\n"
"""The beginning of a box that is as wide as its content, or as a line if that is narrower."""


class Bold(str):
    """A text that is set in bold."""


@dataclass(frozen=True)
class Table:
    """A table of a report.

    - `name`: the name of its files, without suffix; `title`: its heading.
    - `values`: a frame of texts, numbers and statistics, with None for values that are not known.
    - `formats`: the formats of columns by their names.
    - `note`: the text below the table, and `meanings`: what columns mean, which is added for those
      that are shown. A key names a column or several, with commas between them.
    - `rules`: rules of verdicts. They follow the note, except on the page, where all rules stand at
      the end.
    - `styles`: the CSS classes that cells have on the page, by the texts of the cells.
    - `best`: the places of the cells in bold by column (`best_places`).
    - `spread`: what follows the mean of an estimate: its 95 % `interval`, or the `sd` over seeds.
      `with_spread` changes it.
    - `num_names`: the number of first columns that may name the rows.
    """

    name: str
    title: str
    values: pd.DataFrame
    formats: Mapping[str, Format] = field(default_factory=dict)
    note: str = ""
    meanings: Mapping[str, str] = field(default_factory=dict)
    rules: str = ""
    styles: Mapping[str, str] = field(default_factory=dict)
    best: Mapping[str, Sequence[int]] = field(default_factory=dict)
    spread: str = "interval"
    num_names: int = 2

    @cached_property
    def texts(self) -> pd.DataFrame:
        """All cells as texts."""
        columns = {}
        for name in self.values:
            form = self.formats.get(name, "")
            texts = [show(value, form, self.spread) for value in self.values[name]]
            for place in self.best.get(name, ()):
                texts[place] = Bold(texts[place])
            columns[name] = texts
        return pd.DataFrame(columns, dtype=object)

    @cached_property
    def shown(self) -> pd.DataFrame:
        """The texts without columns whose cells are all empty or `MISSING`."""
        says_nothing = self.texts.isin(["", MISSING]).all()
        return self.texts.loc[:, ~says_nothing] if len(self.texts) else self.texts

    def is_text(self, name: str) -> bool:
        """Return whether no cell of a column holds a number."""
        return all(number_in(value) is None for value in self.values[name])

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table for a terminal, between its title and its note."""
        parts, widths = self._parts(options.max_width)
        yield Text(printable_lines(self.title), style="italic")
        for part in parts:
            yield ""
            yield self._part(part, widths)
        yield ""
        if note := self.full_note:
            yield Text(printable_lines(note) + "\n", style="dim italic")

    def _parts(self, max_width: int) -> tuple[list[list[str]], dict[str, int]]:
        """Return the columns of each part of the table on a terminal of `max_width` characters.

        A table that fits has one part. A wider one comes in parts, one below the other. Each part
        has the first columns, which name the rows, and as many others as fit without breaking a
        word. Their widths are the second value; it is empty for a table that fits.
        """
        names = list(self.shown)
        full_widths = [max(map(len, [name, *self.shown[name]])) for name in names]
        if _table_width(full_widths) <= max_width:
            return [names], {}
        widths = {name: _least_width(name, self.shown[name]) for name in names}
        naming = [name for name in names[: self.num_names] if self.is_text(name)]
        parts = []
        part = naming
        for name in names:
            if name in naming:
                continue
            longer_part = [*part, name]
            is_too_wide = _table_width([widths[column] for column in longer_part]) > max_width
            if is_too_wide and part != naming:
                parts.append(part)
                longer_part = [*naming, name]
            part = longer_part
        return [*parts, part], widths

    def _part(self, names: list[str], widths: Mapping[str, int]) -> rich.table.Table:
        """Return some columns for a terminal. Columns that name rows are flush left.

        Columns of short cells have these `widths`, so that only their heads may be broken.
        """
        table = rich.table.Table(
            box=SIMPLE_HEAD, padding=(0, COLUMN_GAP - 1, 0, 0), pad_edge=False, show_edge=False
        )
        names_of_rows = list(self.shown)[: self.num_names]
        for name in names:
            justify: Any = "left" if name in names_of_rows else "right"
            has_short_cells = self.shown[name].map(len).max() <= LONG_CELL
            width = widths.get(name) if has_short_cells else None
            table.add_column(_on_screen(name), justify=justify, overflow="fold", width=width)
        for row in self.shown[names].to_numpy():
            table.add_row(*map(_on_screen, row))
        return table

    def markdown(self) -> str:
        """Return the table as Markdown."""
        header = list(self.shown)
        lines = [f"### {_escape_markdown(self.title)}", ""]
        for row in (header, ["---"] * len(header), *self.shown.to_numpy()):
            lines.append(f"| {' | '.join(map(_escape_markdown, row))} |")
        lines.append("")
        if note := self.full_note:
            lines += [*map(_escape_markdown, note.splitlines()), ""]
        return "\n".join(lines)

    def latex(self) -> str:
        """Return a `table` with the rules of the package booktabs, whose caption is the title and
        the note. LaTeX shrinks it if it is wider than the text."""
        num_texts = min(self.num_names, len(self.shown.columns))  # numbers follow
        num_numbers = len(self.shown.columns) - num_texts
        note = self.full_note  # may begin with the name of a column, in lower case
        stop = ";" if note[:1].islower() else "."
        escaped = self.shown.rename(columns=_escape_latex).map(_escape_latex)
        text = escaped.style.hide(axis="index").to_latex(
            hrules=True,
            column_format="l" * num_texts + "r" * num_numbers,
            position_float="centering",
            caption=_escape_latex(f"{self.title.removesuffix('?')}{stop} {note}".strip()),
            label=f"tab:{self.name}",
        )
        # Braces and backslashes of the cells are escaped: these are the table's own commands.
        text = text.replace(r"\begin{tabular}", SHRUNK + r"\begin{tabular}")
        return text.replace(r"\end{tabular}", r"\end{tabular}}")

    def csv(self) -> str:
        """Return all columns as CSV, also the empty ones."""
        return csv_text(self.texts)

    def with_spread(self, spread: str) -> "Table":
        """Return the table with another spread.

        In the title, the note and the meanings, the words for intervals are replaced
        (`INTERVAL_WORDS`). A table with `sd` cannot be turned back.
        """
        if spread == self.spread:
            return self
        title, note, meanings = self.title, self.note, dict(self.meanings)
        for words in INTERVAL_WORDS:
            title, note = title.replace(words, SD_WORDS), note.replace(words, SD_WORDS)
            meanings = {names: text.replace(words, SD_WORDS) for names, text in meanings.items()}
        return replace(self, title=title, note=note, meanings=meanings, spread=spread)

    @property
    def shown_note(self) -> str:
        """The note, and the meanings of the columns that are shown.

        A name also stands for a column that has words in brackets after it, such as
        `final accuracy (last 11)`.
        """
        sentences = [self.note]
        for names, meaning in self.meanings.items():
            shown = []
            for name in names.split(", "):
                if any(head == name or head.startswith(f"{name} (last") for head in self.shown):
                    shown.append(name)
            if shown:
                sentences.append(f"{', '.join(shown)}: {meaning}.")
        return " ".join(filter(None, sentences))

    @property
    def full_note(self) -> str:
        """The note and the rules."""
        return f"{self.shown_note} {self.rules}".strip()


def make_frame(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> pd.DataFrame:
    """Return the values of a table from its rows; numbers keep their types."""
    return pd.DataFrame(list(rows), columns=list(header), dtype=object)


def csv_text(frame: pd.DataFrame) -> str:
    """Return a frame as CSV. Texts that a spreadsheet would take for formulas are escaped."""
    safe = frame.rename(columns=_no_formula)
    for name in safe.select_dtypes(exclude="number"):
        texts = {text: _no_formula(text) for text in set(safe[name]) if isinstance(text, str)}
        safe[name] = [texts.get(value, value) for value in safe[name]]
    return safe.to_csv(index=False, float_format="%.6g", lineterminator="\n")


def best_places(
    values: Iterable[Any], settings: Sequence[Hashable], *, lowest: bool = False
) -> list[int]:
    """Return the places of the highest value of each setting, or of its `lowest` value.

    `settings` has the setting of each value. Values whose setting is None are not compared, and a
    setting with a single value has no best one. A target that was never reached (inf) is no value.
    """
    numbers = pd.Series([number_in(value) for value in values], dtype=float)
    known = numbers.replace([math.inf, -math.inf], math.nan)
    by_setting = known.groupby(pd.Series(settings, dtype=object))
    best = by_setting.transform("min" if lowest else "max")
    is_best = (known == best) & (by_setting.transform("count") > 1)
    return known.index[is_best].tolist()


def show(value: Any, form: Format = "", spread: str = "interval") -> str:
    """Return a value as text. Texts stay, whatever the format. `spread` is as in `Table`."""
    if isinstance(value, str):
        return value
    if callable(form):
        return form(value)
    if value is None or value != value:  # None or nan
        return MISSING
    if form == HALF_WIDTH and spread == "interval":
        return f"{value.mean:.4f} ± {value.half_width:.4f}" if value.num > 1 else str(value)
    if isinstance(value, Mean | Share | Median):
        return show_result(value, spread)
    return format(value, form)


def number_in(value: Any) -> float | None:
    """Return the number for which a cell stands; None for texts and nan.

    It is the first item of a tuple, and the mean or median of a statistic. The page sorts by it,
    and `best_places` compares it.
    """
    if isinstance(value, tuple):
        value = value[0]
    if isinstance(value, Mean):
        value = value.mean
    if isinstance(value, Median):
        value = value.median
    is_number = isinstance(value, int | float) and not math.isnan(value)
    return value if is_number else None


def show_result(value: Mean | Share | Median, spread: str = "interval") -> str:
    """Return a result with its 95 % interval as text, or an estimate with another `spread`.

    Differences have signs, and shares are shown as counts. Medians and ends that are not reached
    within the run are shown as "> 500".
    """
    low, high = value.interval
    if isinstance(value, Share):
        return f"holds for {value.count} of {value.num} seeds [{low:.2f}, {high:.2f}]"
    if isinstance(value, Median):
        ends = [_show_rounds(number, value.beyond) for number in (value.median, low, high)]
        return "median {} [{}, {}]".format(*ends)
    if isinstance(value, Difference):
        settings = f" (mean of {value.strata} settings)" if value.strata > 1 else ""
        return f"{value.mean:+.4f} {show_interval(value.interval)}{settings}"
    if spread == "sd" and value.num > 1:
        return f"{value.mean:.4f} ± {value.sd:.4f}"
    return str(value)


def _show_rounds(number: float, beyond: float) -> str:
    """Return a number of rounds; inf is greater than `beyond`. With few seeds an interval begins at
    -inf, but rounds begin at 0."""
    return f"> {beyond:.0f}" if number == math.inf else f"{max(number, 0):.0f}"


def show_interval(ends: tuple[float, float]) -> str:
    """Return the interval of a difference as text."""
    return "[{:+.4f}, {:+.4f}]".format(*ends)


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
    """Return, as text, the median over runs of what it takes to reach something.

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


def _table_width(widths: Sequence[int]) -> int:
    """Return the width of a table on a terminal whose columns have these `widths`."""
    return sum(widths) + COLUMN_GAP * (len(widths) - 1)


def _least_width(name: str, cells: pd.Series) -> int:
    """Return the width that a column needs on a terminal so that no word of it is broken. Long
    cells may be broken between words, into lines of `LONG_CELL` characters."""
    pieces = name.split()
    for cell in cells:
        pieces += [*cell.split(), cell[:LONG_CELL]] if len(cell) > LONG_CELL else [cell]
    return max(map(len, pieces), default=1)


def _on_screen(text: str) -> str:
    """Return `text` with the markup of rich."""
    shown = escape(printable_lines(text))
    return f"[bold]{shown}[/]" if isinstance(text, Bold) else shown


def _escape_markdown(text: str) -> str:
    """Return `text` in one line. Characters that would begin a column, a tag, a link or a picture
    are escaped."""
    shown = re.sub(r"[\\|]", r"\\\g<0>", printable(text))
    shown = re.sub(r"<(?=[A-Za-z/!?])", "&lt;", shown)
    shown = re.sub(r"\](?=[(\[:])", r"\\]", shown)
    return f"**{shown}**" if isinstance(text, Bold) else shown


def _escape_latex(text: str) -> str:
    """Return `text` in one line, in which LaTeX finds no commands of its own."""
    shown = printable(text).translate(LATEX)
    # At the beginning of a row, these two would be arguments of the command before it.
    shown = re.sub(r"^ *[\[*]", r"{\g<0>}", shown)
    return f"\\textbf{{{shown}}}" if isinstance(text, Bold) else shown


def _no_formula(cell: str) -> str:
    """Return `cell` in one line, after an apostrophe if a spreadsheet would compute it. Signed
    numbers stay."""
    text = printable(cell)
    is_number = re.fullmatch(r"[+-][-\d.,eE+±\s\[\]%]*", text) is not None
    may_be_formula = text.lstrip()[:1] in ("=", "@", "+", "-") and not is_number
    return f"'{text}" if may_be_formula else text
