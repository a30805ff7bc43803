"""The table type: text cells, with output for a terminal and as Markdown, LaTeX and CSV."""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import rich.table
from rich.box import SIMPLE_HEAD
from rich.markup import escape

from fedsim.printable import printable, printable_lines

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
