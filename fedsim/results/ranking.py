"""Methods over several settings: ranks, verdicts against random selection, wins, shares of the possible gain, costs.

Ranks, Friedman's test and Nemenyi's critical difference are those of Demsar (2006); probability of improvement and
performance profiles those of Agarwal et al. (2021), with percentile intervals of a bootstrap that resamples the seeds
of each setting by themselves, the same for all methods.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from fedsim.results.asks import class_of
from fedsim.results.groups import CEILING, REFERENCE, Group, Panel
from fedsim.results.measures import finals, mean_final, measured, spent_to, total_cost
from fedsim.results.runs import Floats, Seeds
from fedsim.results.statistics import (
    LEVEL,
    MIN_SEEDS,
    Difference,
    Ratio,
    holm,
    paired_values,
    pooled,
    pooled_values,
    ratio,
)

EQUAL = 0.005
"""Methods whose final accuracies differ by less are equal."""
ALPHA = round(1 - LEVEL, 10)
RESAMPLES = 2_000
FEW_BLOCKS = 10
"""With fewer settings the distribution of Friedman's statistic is not yet that of chi squared."""
LEAST_SETTINGS, LEAST_METHODS = 2, 3


@dataclass(frozen=True)
class Verdict:
    """A method against random selection: the difference of final accuracy, pooled over settings at equal seeds, and
    p-values by Holm's correction over all methods: that there is none, and that it is beyond `EQUAL`."""

    difference: Difference | None
    p_value: float
    p_equal: float

    @property
    def word(self) -> str:
        if self.difference is None or self.difference.num < MIN_SEEDS:
            return "too few seeds"
        if self.p_value < ALPHA:
            return "better" if self.difference.mean > 0 else "worse"
        return f"equal within {EQUAL:.3f}".replace("0.", ".") if self.p_equal < ALPHA else "not decided"


@dataclass(frozen=True, eq=False)
class Comparison:
    """`methods`: the lines that are finished in all `panels`, the `reference` (random selection) among them, without
    the `ceiling`: what the best choices could have bought, which is no method."""

    panels: Sequence[Panel]
    methods: Sequence[str]
    reference: str
    ceiling: str | None = None

    def groups(self, line: str) -> list[Group]:
        """Of a line, setting by setting."""
        return [panel.lines[line] for panel in self.panels]

    @cached_property
    def finals(self) -> Mapping[str, list[dict[Seeds, float]]]:
        """Of each line the final accuracies by seed, setting by setting."""
        lines = [*self.methods, *([self.ceiling] if self.ceiling else [])]
        return {line: [finals(group) for group in self.groups(line)] for line in lines}

    @cached_property
    def blocks(self) -> list[Floats]:
        """The methods' final accuracies at the seeds that all of them have, [M, S] for each setting."""
        found = []
        for values in zip(*(self.finals[method] for method in self.methods), strict=True):
            common = sorted(set.intersection(*map(set, values)))
            found.append(np.array([[own[seeds] for seeds in common] for own in values]))
        return found

    @cached_property
    def means(self) -> Floats:
        """The methods' mean final accuracies, [settings, M]."""
        return np.stack([block.mean(1) for block in self.blocks])

    @cached_property
    def classes(self) -> Mapping[str, str]:
        return {method: class_of(self.groups(method)) for method in self.methods}

    @cached_property
    def ranks(self) -> Mapping[str, float]:
        """Mean ranks, best first."""
        return self._ranks(self.methods)

    @cached_property
    def class_ranks(self) -> Mapping[str, float]:
        """Mean ranks among the methods of the same class, the best class first."""
        found: dict[str, float] = {}
        for name in dict.fromkeys(self.classes[method] for method in self.ranks):
            found |= self._ranks([method for method in self.methods if self.classes[method] == name])
        return found

    def _ranks(self, methods: Sequence[str]) -> dict[str, float]:
        found = mean_ranks(self.means[:, [self.methods.index(method) for method in methods]])
        return dict(sorted(zip(methods, found.tolist(), strict=True), key=lambda one: one[1]))

    @cached_property
    def verdicts(self) -> Mapping[str, Verdict]:
        """Of all methods but the reference."""
        others = [method for method in self.methods if method != self.reference]
        leads = [pooled(self.gains(method)) for method in others]
        p_values = holm([math.nan if one is None else one.p_value for one in leads])
        p_equal = holm([math.nan if one is None else one.p_equivalent(EQUAL) for one in leads])
        return dict(zip(others, map(Verdict, leads, p_values, p_equal), strict=True))

    @property
    def better(self) -> list[str]:
        """The methods that are better than random selection beyond chance, by rank."""
        return [name for name in self.ranks if name != self.reference and self.verdicts[name].word == "better"]

    def gains(self, line: str) -> list[dict[Seeds, float]]:
        """Its final accuracy minus that of random selection at equal seeds, setting by setting."""
        return list(map(paired_values, self.finals[line], self.finals[self.reference]))

    def possible(self, method: str, setting: int | None = None) -> Ratio | None:
        """The share of the ceiling's gain over random selection that a method has, paired at equal seeds: in one
        setting, or of the means over all. None without a ceiling, or two seeds that all three have."""
        if self.ceiling is None:
            return None
        chosen = slice(None) if setting is None else slice(setting, setting + 1)
        own, whole = (pooled_values(self.gains(line)[chosen]) for line in (method, self.ceiling))
        return ratio([own[seeds] for seeds in own if seeds in whole], [whole[seeds] for seeds in own if seeds in whole])

    def spent(self, line: str, names: Sequence[str], above: float = 0.0) -> list[float | None]:
        """Of each run in each setting: the sum of quantities until the test accuracy first reaches the mean final
        accuracy of random selection and `above`, as a share of what random selection spends in all; None if never."""
        found: list[float | None] = []
        for group, reference in zip(self.groups(line), self.groups(self.reference), strict=True):
            target, whole = (mean_final(reference) or 0.0) + above, mean_cost(reference, names)
            (values,) = measured(group, [partial(spent_to, target=target, names=names)])
            found += [None if value is None or not whole else value / whole for value in values]
        return found

    def mean_over_settings(self, of: Callable[[Group, Group], float]) -> Mapping[str, float]:
        """The mean of a function of a line's group and the reference's, for each method."""
        pairs = {method: zip(self.groups(method), self.groups(self.reference), strict=True) for method in self.methods}
        return {method: float(np.mean([of(*pair) for pair in found])) for method, found in pairs.items()}

    def imperfect(self) -> "Comparison | None":
        """The settings in which some clients are imperfect; None if there are none."""
        runs = [(panel, panel.lines[self.reference].complete[0]) for panel in self.panels]
        found = [panel for panel, run in runs if run.imperfect is not None and len(run.imperfect)]
        return replace(self, panels=found) if found else None


def compare(panels: Sequence[Panel]) -> Comparison | None:
    """None unless `LEAST_METHODS` or more, random selection among them, are finished in all of `LEAST_SETTINGS` or more
    settings, with a seed in each that all of them have."""
    first = panels[0].lines if panels else {}
    lines = [name for name in first if all(name in panel.lines and finals(panel.lines[name]) for panel in panels)]
    chosen = {name: first[name].choices.get("selector") for name in lines}
    methods = [name for name in lines if chosen[name] != CEILING]
    reference, ceiling = (next((n for n in lines if chosen[n] == one), None) for one in (REFERENCE, CEILING))
    if len(panels) < LEAST_SETTINGS or len(methods) < LEAST_METHODS or reference is None:
        return None
    found = Comparison(panels, methods, reference, ceiling)
    return found if all(block.shape[1] for block in found.blocks) else None


def mean_cost(group: Group, names: Sequence[str]) -> float:
    """The mean over seeds of what whole runs cost; nan where it was not recorded."""
    return float(np.mean([math.nan if (cost := total_cost(run, names)) is None else cost for run in group.complete]))


def mean_ranks(values: Floats) -> Floats:
    """Mean over blocks of the ranks in them, [B, M] to [M]: 1 is the highest; equal ones share the mean of theirs."""
    from scipy.stats import rankdata  # here and below: it takes half a second to import

    return np.asarray(rankdata(-values.round(12), axis=1)).mean(0)


def friedman(values: Floats) -> float:
    """p-value of Friedman's test of all methods being equal, [blocks, M]; nan where all are equal in all blocks."""
    from scipy.stats import friedmanchisquare

    values = values.round(12)
    return math.nan if not np.ptp(values, 1).any() else float(friedmanchisquare(*values.T).pvalue)


def critical_difference(methods: int, blocks: int) -> float:
    """Mean ranks that differ by less cannot be told apart at 5 % over all pairs (Nemenyi, 1963)."""
    from scipy.stats import studentized_range

    quantile = float(studentized_range.ppf(LEVEL, methods, np.inf)) / math.sqrt(2)
    return quantile * math.sqrt(methods * (methods + 1) / (6 * blocks))


def _weights(sizes: Sequence[int]) -> list[Floats]:
    """For each setting the weights of its seeds: the data's own, then those of the resamples, [1 + R, S]."""
    rng = np.random.default_rng(0)
    return [np.vstack([np.ones(n), rng.multinomial(n, np.full(n, 1 / n), RESAMPLES)]) / n for n in sizes]


def _estimates(values: Floats) -> Floats:
    """The estimate and its interval, [3, ...], of those of the data and of the resamples, [1 + R, ...]."""
    outside = (1 - LEVEL) / 2
    return np.stack([values[0], *np.quantile(values[1:], [outside, 1 - outside], axis=0)])


def wins(blocks: Sequence[Floats]) -> tuple[Floats, Floats]:
    """Of [M, S] for each setting: the share of settings in which the row's mean is above the column's [M, M], and the
    mean over settings of P(row > column) over all pairs of seeds, with its interval [3, M, M]. Equal ones count 1/2."""

    def above(row: Floats, column: Floats) -> Floats:
        return (row > column) + 0.5 * (row == column)

    means = np.stack([block.mean(1).round(12) for block in blocks])
    found = np.zeros((1 + RESAMPLES, len(blocks[0]), len(blocks[0])))
    for block, weights in zip(blocks, _weights([block.shape[1] for block in blocks]), strict=True):
        for number, row in enumerate(block):
            pairs = above(row[:, None], block[:, None, :])  # [M, S, S]
            found[:, number] += ((weights @ pairs) * weights).sum(-1).T / len(blocks)
    return above(means[:, :, None], means[:, None, :]).mean(0), _estimates(found)


def profile(gains: Sequence[Floats], levels: Floats) -> Floats:
    """The share of all runs whose gain is at least each of the levels [T], with a pointwise band, [3, T]. `gains`: one
    a seed for each setting."""
    sizes = [len(one) for one in gains]
    parts = [n * w @ (one[:, None] >= levels) for n, w, one in zip(sizes, _weights(sizes), gains, strict=True)]
    return _estimates(np.sum(parts, 0) / sum(sizes))
