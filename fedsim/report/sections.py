"""The sections of a report: functions that take finished runs and return tables and texts.

`assets/sections.yaml` lists them by their dotted paths, in the order in which their tables are
written. A section that has nothing to say returns an empty `Section`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from fedsim.core.configs import YAML_LOADER
from fedsim.report.contrasts import runs_to_show
from fedsim.report.looks import Look
from fedsim.report.presentation import Presentation
from fedsim.report.table import Table
from fedsim.results.ablations import Point, find_ablations
from fedsim.results.ranking import Comparison, compare
from fedsim.results.runs import Run

ASSETS = Path(__file__).parent / "assets"


@dataclass(frozen=True, eq=False)
class Material:
    """The material of sections: all `runs` that were read, and the `frame` with each distinct run
    once (`fedsim.results.frames`).

    `is_full` asks for lines on all settings, and `targets` for the costs until runs reach these
    accuracies. `presentation` has been applied to the frame. `looks` has those of all methods, in
    the order of legends.
    """

    runs: Sequence[Run]
    frame: pd.DataFrame
    is_full: bool = False
    targets: Sequence[float] = ()
    presentation: Presentation = field(default_factory=Presentation)
    looks: Mapping[str, Look] = field(default_factory=dict)

    @cached_property
    def comparison(self) -> Comparison | None:
        """The comparison of methods over settings, if there is one."""
        return compare(self.frame)

    @cached_property
    def ablations(self) -> list[list[Point]]:
        """The points of each ablation, with methods as they are named in this report."""
        rename = self.presentation.rename
        ablations = []
        for points in find_ablations(self.frame):
            ablations.append([point._replace(method=rename(point.method)) for point in points])
        return ablations

    @cached_property
    def shown(self) -> pd.DataFrame:
        """The finished runs that figures and curves show."""
        return runs_to_show(self.frame)

    @cached_property
    def shown_looks(self) -> dict[str, Look]:
        """The looks of the methods that figures and curves show."""
        shown = set(self.shown["method"])
        return {method: look for method, look in self.looks.items() if method in shown}


@dataclass(frozen=True)
class Section:
    """The contributions of a section to a report.

    `brief` are the tables that are printed unless all are asked for, below the `lines`. `plots`
    makes figures (`fedsim.report.drawing.Plot`), which have their `place` on the page. `verdicts`
    by id and further `measures` of runs go to summary.json. `sources` and `rules` end the page.
    """

    tables: Sequence[Table] = ()
    brief: Sequence[Table] = ()
    lines: Sequence[str] = ()
    plots: Callable[[], list[Any]] = list
    place: str = "others"
    verdicts: Mapping[str, str] = field(default_factory=dict)
    measures: Sequence[str] = ()
    sources: Sequence[str] = ()
    rules: Sequence[str] = ()


@cache
def section_makers() -> dict[str, Callable[[Material], Section]]:
    """Return the functions that make sections, by their dotted paths."""
    paths = yaml.load((ASSETS / "sections.yaml").read_text(encoding="utf-8"), YAML_LOADER)
    sections = {}
    for path in paths:
        module, _, name = path.rpartition(".")
        sections[path] = getattr(import_module(module), name)
    return sections


def all_rules() -> list[str]:
    """Return the rules of all sections: the texts in `RULES` of their modules, each once."""
    rules: dict[str, None] = {}
    for make in section_makers().values():
        module = import_module(make.__module__)
        rules.update(dict.fromkeys(getattr(module, "RULES", {}).values()))
    return list(rules)


def make_sections(material: Material) -> list[Section]:
    """Return all sections, without empty tables."""
    sections = []
    for make in section_makers().values():
        section = make(material)
        spread = material.presentation.spread
        tables = [table.with_spread(spread) for table in section.tables if len(table.values)]
        brief = [table.with_spread(spread) for table in section.brief if len(table.values)]
        sections.append(replace(section, tables=tables, brief=brief))
    return sections
