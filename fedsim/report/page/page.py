"""The report as one self-contained HTML page."""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from fedsim.report.groups import Group
from fedsim.report.looks import Look
from fedsim.report.page.curves_data import curves_data
from fedsim.report.page.facts import config_differences, folder_links, header_facts, runs_table, shared_config
from fedsim.report.page.sorting import sort_value
from fedsim.report.panels import Panel
from fedsim.report.tables.table import Table
from fedsim.report.verdicts.published import Publication
from fedsim.report.verdicts.rules import RULES, VERDICTS

LONG = 60
"""Texts of more characters may be broken into lines."""
HERE = Path(__file__).parent
CLASSES: Mapping[str, str] = {
    **dict.fromkeys(VERDICTS, "undecided"),
    "reproduced": "reproduced",
    "not reproduced": "not",
}
"""The style of a cell with a verdict."""


@dataclass(frozen=True)
class Picture:
    """A figure as a PNG file's content, and its caption."""

    caption: str
    png: bytes


@dataclass(frozen=True)
class Content:
    """What the page shows. `panels`: those with finished runs; none of them, none of the curves."""

    title: str
    groups: Sequence[Group]
    panels: Sequence[Panel]
    looks: Mapping[str, Look]
    tables: Sequence[Table]
    pictures: Sequence[Picture]
    publications: Sequence[Publication]


def html_page(content: Content, folder: Path) -> str:
    """The HTML text of the page that will lie in `folder`, from which it links to the runs' folders."""
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(HERE), autoescape=True, trim_blocks=True)
    return environment.get_template("page.html.j2").render(
        title=content.title,
        facts=header_facts([run for group in content.groups for run in group.runs]),
        tables=[_cells(table.without_empty_columns()) for table in content.tables],
        configs=_cells(config_differences(content.groups).without_empty_columns()),
        shared=shared_config(content.groups),
        runs=_cells(runs_table(content.groups)),
        links=folder_links(content.groups, folder),
        sources=[f"{p.title}: {p.source}" for p in content.publications],
        rules=RULES.values(),
        pictures=[{"caption": p.caption, "data": base64.b64encode(p.png).decode("ascii")} for p in content.pictures],
        css=(HERE / "page.css").read_text(encoding="utf-8"),
        js=(HERE / "page.js").read_text(encoding="utf-8"),
        plotly=_plotly() if content.panels else "",
        curves=_as_script(curves_data(content.panels, content.looks)) if content.panels else "",
    )


def _cells(table: Table) -> dict[str, Any]:
    """A table for the template: each cell with its text, the number it is sorted by, and its class if it has one."""
    sorts = [[sort_value(text) for text in row] for row in table.rows]
    of_text = [all(value is None for value in column) for column in zip(*sorts, strict=True)]
    rows = [
        [
            {"text": text, "sort": value, "kind": CLASSES.get(text, _kind(text, left))}
            for text, value, left in zip(row, values, of_text, strict=True)
        ]
        for row, values in zip(table.rows, sorts, strict=True)
    ]
    header = [{"text": text or "setting", "left": left} for text, left in zip(table.header, of_text, strict=True)]
    return {"name": table.name, "title": table.title, "header": header, "rows": rows, "note": table.note}


def _kind(text: str, left: bool) -> str:
    if not left:
        return ""
    return "long" if len(text) > LONG else "text"


def _plotly() -> str:
    """The library plotly.js, which draws the curves."""
    from plotly.offline import get_plotlyjs  # 0.3 s, which a report without curves does not pay

    return str(get_plotlyjs())


def _as_script(data: Mapping[str, Any]) -> str:
    """The data as JSON that can stand in a script element, whatever texts are in it."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
