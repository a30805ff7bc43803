"""Find ablations among finished runs: final accuracy by the values of one or two numbers.

An ablation is a sweep over one or two numbers of the config, such as `optimizer.lr`. fedsim finds
ablations in the configs of finished runs; nobody has to declare them. All other config values are
equal within a line or map, with one exception: several numbers may always change together. Their
effects cannot be told apart, so the number with the shortest path (the fewest dots) stands for all.

Terms:
- A group is the set of runs that differ only in their seeds. A point is the result of one group.
- Final accuracy is the mean test accuracy over those of the last rounds (11, or `final_window`)
  that were evaluated.
- A number is a config value that is a finite int or float; true and false are no numbers.
- A line varies one number, with at least three values. A map varies two numbers, with at least
  three values each. A grid is either of them.
- A setting is the data set, partition, model, system and clients. A method is the selector with
  everything else, such as the aggregator. They are named by labels: the choices and values that
  distinguish the groups of a report (see `fedsim.results.frames`).
"""

import math
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import pandas as pd

from fedsim.core.configs import SYMBOLS, leaves
from fedsim.results.frames import by, finished_rows, first_run, selector_of, without_target
from fedsim.results.grouping import compared_config
from fedsim.results.labels import split_labels
from fedsim.results.statistics import ALPHA, MIN_SEEDS, UNIT, Estimate, holm, paired, pooled

MIN_VALUES = 3
"""Minimum number of values that each number of an ablation must have."""
MIN_FILLED = 0.75
"""Minimum share of the cells of a map that must have runs. With fewer there is no map."""


class Point(NamedTuple):
    """The final accuracy of one group in a line or map.

    The best point is chosen by the same runs with which the others are then compared to it. Holm's
    method corrects for the number of comparisons, but not for this choice. So p-values tend to be
    too small, most of all when many points are about equal.

    Attributes:
        keys: The names of the one or two numbers: their symbols (`selector.alpha`), if they have
            any, otherwise their dotted config keys.
        setting: The labels of the setting of the line or map.
        method: The labels of its method.
        group: The name of the group.
        value: The value of the first number.
        second_value: The value of the second number; nan on a line, which has none.
        accuracy: The final accuracies, one for each seed, with their mean and its interval.
        is_best: Whether the mean is the highest of the line or map; of equal means, the first is.
        p_value: The p-value of a paired t-test of the best point against this one at equal seeds,
            corrected by Holm's method over the line or map. nan for the best point itself, and
            with fewer than `MIN_SEEDS` common seeds.
        num_diverged: The number of runs that diverged. They have no final accuracy.
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
    num_diverged: int = 0

    @property
    def values(self) -> tuple[float, ...]:
        """The values of all numbers, in the order of `keys`."""
        return (self.value, self.second_value)[: len(self.keys)]

    @property
    def is_level(self) -> bool:
        """Whether this is not the best point and no test tells it apart from the best.

        Also true if there are too few seeds for a test: `p_value` is then nan, and nan < ALPHA is
        false.
        """
        return not (self.is_best or self.p_value < ALPHA)


def find_ablations(runs: pd.DataFrame) -> list[list[Point]]:
    """Return the points of each ablation among the finished runs.

    `runs` is the frame of `runs_frame`. An ablation has all lines or maps of the same numbers, one
    after another. Within each of them, points are sorted by value, ascending. Runs that end at an
    accuracy (`stop_at`) are skipped: their final accuracies are near it.
    """
    groups = by(finished_rows(without_target(runs)), "group")
    num_diverged = runs.loc[runs["status"] == "diverged", "group"].value_counts()
    ablations: dict[tuple[str, ...], list[Point]] = {}
    for numbers in _families(groups):
        for keys, grid, other_numbers in _grids(numbers):
            rows_of_groups = [groups[name] for name in grid.index]
            setting, method = _name(rows_of_groups, other_numbers)
            symbols = tuple(SYMBOLS.get(key, key) for key in keys)
            points = ablations.setdefault(symbols, [])
            if any((point.setting, point.method) == (setting, method) for point in points):
                # A choice that sets the numbers differs between all groups, so it is no label of
                # the grid. The name of the first group tells the grids apart.
                method = f"{method} ({grid.index[0]})"
            for point in _points(symbols, setting, method, grid[list(keys)], groups):
                diverged = int(num_diverged.get(point.group, 0))
                points.append(point._replace(num_diverged=diverged))
    return list(ablations.values())


def by_grid(points: Sequence[Point]) -> dict[tuple[str, str], list[Point]]:
    """Return the points of an ablation by line or map: by setting and method."""
    grids: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        grids.setdefault((point.setting, point.method), []).append(point)
    return grids


def file_name(points: Sequence[Point]) -> str:
    """Return the name of the table and figure of an ablation, without ending."""
    return re.sub(r"\W+", "_", f"ablation_{'_'.join(points[0].keys)}")


def axis(points: Sequence[Point], index: int) -> list[float]:
    """Return all values of the number at `index` of the keys, ascending, without repetitions."""
    return sorted({point.values[index] for point in points})


def _families(groups: Mapping[str, pd.DataFrame]) -> list[pd.DataFrame]:
    """Return the families: groups whose configs have the same numbers and differ only in them.

    Each family is a frame with a row for each group and a column for each number, by its dotted
    key. Groups without a final accuracy are skipped.
    """
    families: dict[Hashable, dict[str, dict[str, float]]] = {}
    for name, rows in groups.items():
        numbers = {}
        other_values = set()
        for key, value in leaves(compared_config(first_run(rows))):
            # not isinstance: a bool is an int to Python, and no number here
            if type(value) in (int, float) and math.isfinite(value):
                numbers[key] = value
            else:
                other_values.add((key, str(value)))
        if rows["final_accuracy"].notna().any():
            family = families.setdefault((frozenset(other_values), frozenset(numbers)), {})
            family[name] = numbers
    # dtype object keeps each value as it is. Otherwise an int next to floats would become a float,
    # and its label "1" would read "1.0".
    return [
        pd.DataFrame(list(family.values()), list(family), dtype=object)
        for family in families.values()
    ]


def _grids(
    numbers: pd.DataFrame,
) -> Iterator[tuple[tuple[str, ...], pd.DataFrame, dict[str, str]]]:
    """Yield the maps of a family, and then its lines.

    Each comes with the keys of its numbers, its rows of `numbers`, sorted by these, and the values
    as text of all other numbers that vary in the family, by key. A number that has a map anywhere
    in the family has no lines in it, not even for groups outside of the map.
    """
    # 1. The numbers that vary. `factorize` numbers the values of a column by their first occurrence
    #    (0.1, 0.2, 0.1 gives 0, 1, 0), so numbers with equal codes always change together. The key
    #    with the fewest dots comes first, and stands for all of them.
    varied: dict[tuple[int, ...], str] = {}
    for key in sorted(numbers, key=lambda key: key.count(".")):
        codes = tuple(pd.factorize(numbers[key])[0])
        if any(codes):  # all codes are 0 if the number does not vary
            varied.setdefault(codes, key)
    pairs = combinations(varied.values(), 2)
    singles = combinations(varied.values(), 1)
    mapped_keys: set[str] = set()
    for keys in [*pairs, *singles]:  # pairs first, so that `mapped_keys` is complete for the lines
        if len(keys) == 1 and keys[0] in mapped_keys:
            continue
        # 2. The other numbers are equal within a grid.
        other_keys = [key for key in varied.values() if key not in keys]
        grids = numbers.groupby(other_keys, sort=False) if other_keys else [((), numbers)]
        for _, grid in grids:
            # 3. A grid has a row for each of its cells with runs, so a line is always full.
            sizes = [grid[key].nunique() for key in keys]
            if min(sizes) >= MIN_VALUES and len(grid) >= MIN_FILLED * math.prod(sizes):
                mapped_keys.update(keys)
                other_numbers = {key: str(grid[key].iloc[0]) for key in other_keys}
                yield keys, grid.sort_values(list(keys)), other_numbers


def _name(rows_of_groups: Sequence[pd.DataFrame], other_numbers: dict[str, str]) -> tuple[str, str]:
    """Return the setting and the method of a line or map.

    They are named by the labels that all of its groups share, and by `other_numbers`, the values of
    numbers that vary elsewhere in the family. A method without labels is named by its selector.
    """
    labels = [rows["labels"].iloc[0] for rows in rows_of_groups]
    shared = set.intersection(*(set(label.items()) for label in labels))
    common = {key: text for key, text in labels[0].items() if (key, text) in shared}
    setting, method = split_labels(common | other_numbers)
    return setting, method or selector_of(rows_of_groups[0]) or "run"


def _points(
    keys: tuple[str, ...],
    setting: str,
    method: str,
    numbers: pd.DataFrame,
    groups: Mapping[str, pd.DataFrame],
) -> list[Point]:
    """Return the points of a line or map, in the order of `numbers`.

    `numbers` has a row for each group and a column for each of the `keys`. `groups` holds the rows
    of all groups by name.
    """
    # 1. The best group has the highest mean.
    by_seed = {name: groups[name]["final_accuracy"].dropna() for name in numbers.index}
    accuracies = {name: Estimate(tuple(by_seed[name]), UNIT) for name in numbers.index}
    best = max(numbers.index, key=lambda name: accuracies[name].mean)
    # 2. The other groups are compared with it at equal seeds.
    others = [name for name in numbers.index if name != best]
    uncorrected = []
    for name in others:
        difference = pooled([paired(by_seed[best], by_seed[name])])
        if difference is None or difference.num < MIN_SEEDS:  # None: fewer than two common seeds
            uncorrected.append(math.nan)
        else:
            uncorrected.append(difference.p_value)
    p_values = dict(zip(others, holm(uncorrected), strict=True))
    # 3. A point for each group.
    points = []
    for name in numbers.index:
        values = numbers.loc[name].tolist()
        point = Point(
            keys=keys,
            setting=setting,
            method=method,
            group=name,
            value=values[0],
            second_value=values[1] if len(keys) > 1 else math.nan,
            accuracy=accuracies[name],
            is_best=name == best,
            p_value=p_values.get(name, math.nan),
        )
        points.append(point)
    return points
