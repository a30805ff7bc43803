"""Ablations: the final accuracy by one or two numbers of the config in which runs differ, all else
equal.

They are found in the configs: three values of a number make a line, three by three of two numbers a
map.
"""

import math
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

from fedsim.core.configs import leaves
from fedsim.results.groups import SYMBOLS, Group, Panel, compared_config, split_labels
from fedsim.results.measures import final_lead, finals
from fedsim.results.statistics import LEVEL, MIN_SEEDS, UNIT, Estimate, Mean, holm
from fedsim.results.table import Cell, Table

MIN_VALUES = 3
"""Of a number that is an ablation's."""
FILLED = 0.75
"""Share of the cells of a map that runs must have; others are lines."""
NOTE = (
    "Means and half their 95 % intervals over seeds (Student's t). Bold: the best of a line or map. ≈: not told apart "
    f"from it at equal seeds, {MIN_SEEDS} at least (paired t-tests, Holm's correction)."
)
Values = tuple[float, ...]
"""One of each number."""


class Point(NamedTuple):
    """The final accuracy at some values. `p_value`: of its difference to the best of its line or
    map, at equal seeds, by Holm's correction over these; nan for the best, and with fewer seeds
    than `MIN_SEEDS`."""

    values: Values
    group: Group
    mean: Mean
    best: bool
    p_value: float

    @property
    def level(self) -> bool:
        """Whether it cannot be told apart from the best."""
        return not (self.best or self.p_value < 1 - LEVEL)


@dataclass(frozen=True)
class Ablation:
    """The keys of one or two numbers; by setting and method the points of a line or map, their
    values ascending."""

    keys: tuple[str, ...]
    lines: dict[tuple[str, str], list[Point]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of its files."""
        return re.sub(r"\W+", "_", f"ablation_{'_'.join(self.keys)}")

    @property
    def panels(self) -> list[Panel]:
        """One a setting, with a group of each line."""
        first = {line: points[0].group for line, points in self.lines.items()}
        settings = dict.fromkeys(setting for setting, _ in first)
        return [
            Panel(one, {name: group for (of, name), group in first.items() if of == one})
            for one in settings
        ]

    def axis(self, at: int) -> list[float]:
        """All values of a number, ascending."""
        return sorted({point.values[at] for points in self.lines.values() for point in points})

    def table(self) -> Table:
        """A column a value of the last number, a row a line, or of a map a row a value of its first
        number."""
        columns = self.axis(-1)
        rows: dict[tuple[str, ...], list[str]] = {}
        for line, points in self.lines.items():
            for point in points:
                first = [Cell(f"{value:g}", value) for value in point.values[:-1]]
                row = rows.setdefault((*line, *first), ["-"] * len(columns))
                reach = f" ± {point.mean.half_width:.4f}" if point.mean.df else ""
                shown = f"{point.mean.mean:.4f}{reach}{' ≈' * point.level}"
                row[columns.index(point.values[-1])] = Cell(shown, point.mean.mean, bold=point.best)
        header = [
            "",
            "run",
            *self.keys[:-1],
            *(f"{self.keys[-1].rpartition('.')[2]}={value:g}" for value in columns),
        ]
        title = f"Final accuracy by {' and '.join(self.keys)}"
        return Table(self.name, title, header, [[*key, *row] for key, row in rows.items()], NOTE)


def find_ablations(groups: Sequence[Group]) -> list[Ablation]:
    """Of all groups with finished runs."""
    families: dict[Hashable, list[tuple[dict[str, float], Group]]] = {}
    for group in groups:
        values = leaves(compared_config(group.runs[0]))
        numbers = {
            key: value
            for key, value in values
            if type(value) in (int, float) and math.isfinite(value)
        }
        others = frozenset((key, str(value)) for key, value in values if key not in numbers)
        if finals(group):
            families.setdefault((others, frozenset(numbers)), []).append((numbers, group))
    found: dict[tuple[str, ...], Ablation] = {}
    for family in families.values():
        for keys, (setting, method), points in _lines(family):
            lines = found.setdefault(
                keys, Ablation(tuple(SYMBOLS.get(key, key) for key in keys))
            ).lines
            named = (
                setting,
                method,
            ) not in lines  # as where one choice sets several values, of which this is one
            lines[setting, method if named else f"{method} ({points[0].group.name})"] = points
    return list(found.values())


def _lines(
    family: Sequence[tuple[Mapping[str, float], Group]],
) -> Iterator[tuple[tuple[str, ...], tuple[str, str], list[Point]]]:
    """Keys, setting, method and points of all maps and lines of groups that differ in numbers
    alone."""
    varied: dict[tuple[int, ...], str] = {}  # of numbers that change together the first
    for key in sorted(family[0][0], key=lambda key: key.count(".")):
        column = [numbers[key] for numbers, _ in family]
        if len(set(column)) > 1:
            varied.setdefault(tuple(map(column.index, column)), key)
    mapped: set[str] = set()
    for keys in [*combinations(varied.values(), 2), *combinations(varied.values(), 1)]:
        if len(keys) == 1 and keys[0] in mapped:
            continue
        lines: dict[tuple[tuple[str, str], ...], dict[Values, Group]] = {}
        for numbers, group in family:
            rest = tuple((key, str(numbers[key])) for key in varied.values() if key not in keys)
            lines.setdefault(rest, {})[tuple(numbers[key] for key in keys)] = group
        for rest, points in lines.items():
            sizes = [len(set(axis)) for axis in zip(*points, strict=True)]
            if min(sizes) >= MIN_VALUES and len(points) >= FILLED * math.prod(sizes):
                mapped.update(keys)
                yield keys, _name(list(points.values()), dict(rest)), _points(points)


def _name(groups: Sequence[Group], rest: dict[str, str]) -> tuple[str, str]:
    """Setting and method of a line, by the labels that its groups share and by the other numbers
    that vary."""
    shared = set.intersection(*(set(group.labels.items()) for group in groups))
    labels = {key: text for key, text in groups[0].labels.items() if (key, text) in shared}
    setting, method = split_labels(labels | rest)
    return setting, method or groups[0].choices.get("selector", "run")


def _points(groups: Mapping[Values, Group]) -> list[Point]:
    means = {
        values: Estimate(tuple(finals(group).values()), UNIT)
        for values, group in sorted(groups.items())
    }
    best = max(means, key=lambda values: means[values].mean)
    leads = {values: final_lead(groups[best], groups[values]) for values in means if values != best}
    tested = [
        math.nan if lead is None or lead.num < MIN_SEEDS else lead.p_value
        for lead in leads.values()
    ]
    p_values = {best: math.nan, **dict(zip(leads, holm(tested), strict=True))}
    return [
        Point(values, groups[values], mean, values == best, p_values[values])
        for values, mean in means.items()
    ]
