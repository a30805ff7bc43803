"""Ablations: final accuracy by the values of one or two numbers of the config, all else equal.

Ablations are found in the configs of finished runs. Groups that differ in one number with at least
three values make a line. Groups that differ in two numbers with three by three values or more make
a map. A point is one group of a line or map. `keys` are the config keys of the numbers.
"""

import math
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import pandas as pd

from fedsim.core.configs import leaves
from fedsim.results.frames import (
    SYMBOLS,
    by,
    compared_config,
    done,
    first_run,
    selector_of,
    split_labels,
)
from fedsim.results.statistics import ALPHA, MIN_SEEDS, UNIT, Estimate, holm, paired, pooled

MIN_VALUES = 3
"""Smallest number of values of a number in an ablation."""
FILLED = 0.75
"""Share of the cells of a map that runs must have. Otherwise it is shown as lines."""


class Point(NamedTuple):
    """The final accuracy at some values of the `keys`.

    `second_value` is nan on a line. `accuracy` is the mean over seeds. `p_value` is that of the
    difference to the best of the line or map at equal seeds, corrected by Holm's method over the
    line; nan for the best, and below `MIN_SEEDS`.
    """

    keys: tuple[str, ...]
    setting: str
    method: str
    group: str
    value: float
    second_value: float
    accuracy: Estimate
    is_best: bool
    p_value: float

    @property
    def values(self) -> tuple[float, ...]:
        """The values of all keys."""
        return (self.value, self.second_value)[: len(self.keys)]

    @property
    def is_level(self) -> bool:
        """True if the accuracy cannot be told apart from the best."""
        return not (self.is_best or self.p_value < ALPHA)


def find_ablations(runs: pd.DataFrame) -> list[list[Point]]:
    """Return the points of each ablation of finished runs: line by line, values ascending."""
    groups = by(done(runs), "group")
    ablations: dict[tuple[str, ...], list[Point]] = {}
    for numbers in _families(groups):
        for keys, line, rest in _lines(numbers):
            setting, method = _name([groups[name] for name in line.index], rest)
            symbols = tuple(SYMBOLS.get(key, key) for key in keys)
            points = ablations.setdefault(symbols, [])
            if any(point[1:3] == (setting, method) for point in points):
                method = f"{method} ({line.index[0]})"  # one choice sets several values
            points += _points(symbols, setting, method, line[list(keys)], groups)
    return list(ablations.values())


def by_line(points: Sequence[Point]) -> dict[tuple[str, str], list[Point]]:
    """Return the points of an ablation by setting and method."""
    lines: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        lines.setdefault((point.setting, point.method), []).append(point)
    return lines


def file_name(points: Sequence[Point]) -> str:
    """Return the name of the files of an ablation."""
    return re.sub(r"\W+", "_", f"ablation_{'_'.join(points[0].keys)}")


def axis(points: Sequence[Point], at: int) -> list[float]:
    """Return all values of one of the numbers, ascending."""
    return sorted({point.values[at] for point in points})


def _families(groups: Mapping[str, pd.DataFrame]) -> list[pd.DataFrame]:
    """Return families of groups whose configs differ in finite numbers alone.

    Each family is a frame with a row for each group and a column for each number. Groups without a
    final accuracy are skipped.
    """
    families: dict[Hashable, dict[str, dict[str, float]]] = {}
    for name, rows in groups.items():
        numbers = {}
        others = set()
        for key, value in leaves(compared_config(first_run(rows))):
            if type(value) in (int, float) and math.isfinite(value):
                numbers[key] = value
            else:
                others.add((key, str(value)))
        if rows["final_accuracy"].notna().any():
            family = families.setdefault((frozenset(others), frozenset(numbers)), {})
            family[name] = numbers
    return [
        pd.DataFrame(list(family.values()), list(family), dtype=object)
        for family in families.values()
    ]


def _lines(
    numbers: pd.DataFrame,
) -> Iterator[tuple[tuple[str, ...], pd.DataFrame, dict[str, str]]]:
    """Return the keys of each map or line of a family, its rows, and other numbers that vary."""
    # Numbers that vary, by their pattern over the groups. Of numbers that always change together,
    # the one with the shortest path stands for all.
    varied: dict[tuple[int, ...], str] = {}
    for key in sorted(numbers, key=lambda key: key.count(".")):
        codes = tuple(pd.factorize(numbers[key])[0])  # all 0 if the number does not vary
        if any(codes):
            varied.setdefault(codes, key)
    mapped: set[str] = set()  # maps come first: their numbers need no lines
    for keys in [*combinations(varied.values(), 2), *combinations(varied.values(), 1)]:
        if len(keys) == 1 and keys[0] in mapped:
            continue
        rest = [key for key in varied.values() if key not in keys]
        lines = numbers.groupby(rest, sort=False) if rest else [((), numbers)]
        for _, line in lines:
            sizes = [line[key].nunique() for key in keys]
            if min(sizes) >= MIN_VALUES and len(line) >= FILLED * math.prod(sizes):
                mapped.update(keys)
                line = line.sort_values(list(keys))
                yield keys, line, {key: str(line[key].iloc[0]) for key in rest}


def _name(groups: Sequence[pd.DataFrame], rest: dict[str, str]) -> tuple[str, str]:
    """Return setting and method of a line, by the labels that its groups share and by other numbers
    that vary."""
    labels = [rows["labels"].iloc[0] for rows in groups]
    shared = set.intersection(*(set(label.items()) for label in labels))
    common = {key: text for key, text in labels[0].items() if (key, text) in shared}
    setting, method = split_labels(common | rest)
    return setting, method or selector_of(groups[0]) or "run"


def _points(
    keys: tuple[str, ...],
    setting: str,
    method: str,
    values: pd.DataFrame,
    groups: Mapping[str, pd.DataFrame],
) -> list[Point]:
    """Return the points of a line or map. `values` has a row for each group, with its values."""
    places = {}
    for name, first, *second in values.itertuples():
        places[name] = first, second[0] if second else math.nan
    by_seed = {name: groups[name]["final_accuracy"].dropna() for name in places}
    accuracies = {name: Estimate(tuple(by_seed[name]), UNIT) for name in places}
    best = max(places, key=lambda name: accuracies[name].mean)
    others = [name for name in places if name != best]
    tested = []
    for name in others:
        lead = pooled([paired(by_seed[best], by_seed[name])])
        tested.append(math.nan if lead is None or lead.num < MIN_SEEDS else lead.p_value)
    p_values = dict(zip(others, holm(tested), strict=True))
    return [
        Point(
            keys,
            setting,
            method,
            name,
            *places[name],
            accuracies[name],
            name == best,
            p_values.get(name, math.nan),
        )
        for name in places
    ]
