"""The table type: text cells, with output for a terminal and as Markdown, LaTeX and CSV."""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

import rich.table
from rich.box import SIMPLE_HEAD


@dataclass(frozen=True)
class Table:
    """A table of text cells. `name` is the name of its files; `note` is printed below it."""

    name: str
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def rich(self) -> rich.table.Table:
        table = rich.table.Table(
            title=self.title, title_justify="left", caption_justify="left", box=SIMPLE_HEAD, caption=self.note or None
        )
        for number, name in enumerate(self.header):
            table.add_column(name, justify="left" if number < 2 else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        lines = [f"### {self.title}", "", _markdown_row(self.header), _markdown_row(["---"] * len(self.header))]
        lines += [_markdown_row(row) for row in self.rows]
        return "\n".join([*lines, "", *([self.note, ""] if self.note else [])])

    def latex(self) -> str:
        """A `tabular` environment with the rules of the package booktabs."""
        body = [" & ".join(map(_escape_latex, row)) + r" \\" for row in self.rows]
        columns = "l" * min(2, len(self.header)) + "r" * max(len(self.header) - 2, 0)
        head = " & ".join(map(_escape_latex, self.header)) + r" \\"
        rules = [f"\\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule", *body, r"\bottomrule"]
        return "\n".join([f"% {self.title}", *rules, r"\end{tabular}", ""])

    def csv(self) -> str:
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([self.header, *self.rows])
        return out.getvalue()


def _markdown_row(cells: Sequence[str]) -> str:
    escaped = [cell.replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def _escape_latex(text: str) -> str:
    text = re.sub(r"([&%$#_{}])", r"\\\1", text)
    return text.replace("±", r"$\pm$").replace("^", r"\^{}")
