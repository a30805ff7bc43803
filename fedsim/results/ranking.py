"""Methods over several settings: ranks, verdicts against random selection, wins, shares of the
possible gain, costs.

Ranks, Friedman's test and the critical difference are those of Demsar (2006), probability of
improvement and performance profiles those of Agarwal et al. (2021). Their intervals are percentiles
of a bootstrap that draws the seeds of each setting anew, the same ones for all methods.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np

from fedsim.core.arrays import Floats
from fedsim.results.groups import CEILING, CONTROL, NEW_GROUPS, REFERENCE, Group, Panel, class_of
from fedsim.results.measures import finals, mean_final, measured, spent_to, total_cost
from fedsim.results.runs import Seeds
from fedsim.results.statistics import (
    LEVEL,
    MIN_SEEDS,
    Difference,
    holm,
    paired_values,
    pooled,
    pooled_values,
    ratio,
)

EQUAL = 0.005
"""Methods whose final accuracies differ by less are equal."""
ALPHA, RESAMPLES = round(1 - LEVEL, 10), 2_000
WHOLE = 10
"""With fewer seeds a verdict is preliminary."""
LEAST_SETTINGS, LEAST_METHODS = 2, 3


@dataclass(frozen=True)
class Verdict:
    """A method against random selection: the difference of final accuracy at equal seeds, pooled
    over settings. By Holm's correction over all methods, each in its family: p of no difference,
    and of one beyond `EQUAL`."""

    difference: Difference | None
    p_value: float
    p_equal: float

    @property
    def word(self) -> str:
        if self.difference is None or self.difference.num < MIN_SEEDS:
            return "too few seeds"
        if self.p_value < ALPHA:
            return "better" if self.difference.mean > 0 else "worse"
        return f"equal within {EQUAL:g}" if self.p_equal < ALPHA else "not decided"

    def __str__(self) -> str:
        is_told = self.difference is not None and MIN_SEEDS <= self.difference.num < WHOLE
        return f"{self.word}, preliminary" if is_told else self.word


@dataclass(frozen=True, eq=False)
class Comparison:
    """`methods`: the lines that are finished in all `panels`, the `reference` (random selection)
    among them, and `controls`; `ceiling`: the line of what the best choices could have bought,
    which is no method, if there is one; `left_out`: in how many of the panels other lines are
    finished."""

    panels: Sequence[Panel]
    methods: Sequence[str]
    reference: str
    ceiling: Sequence[str] = ()
    controls: Sequence[str] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def finals(self) -> Mapping[str, list[dict[Seeds, float]]]:
        """Of each line the final accuracies by seed, setting by setting."""
        return {
            line: [finals(panel.lines[line]) for panel in self.panels]
            for line in (*self.methods, *self.ceiling)
        }

    @cached_property
    def blocks(self) -> list[Floats]:
        """The methods' final accuracies at the seeds that all of them have, [M, S] for each
        setting."""
        found = []
        for values in zip(*(self.finals[method] for method in self.methods), strict=True):
            common = sorted(set.intersection(*map(set, values)))
            found.append(np.array([[own[seeds] for seeds in common] for own in values]))
        return found

    @cached_property
    def means(self) -> Floats:
        """Mean final accuracies [settings, M]: that of random selection, and beside it the mean
        gain of each method at the seeds that both have."""
        level = [np.mean([*own.values()]) for own in self.finals[self.reference]]
        gains = [
            [np.mean([*own.values()]) for own in self.gains(method)] for method in self.methods
        ]
        return (np.array(level)[:, None] + np.array(gains).T).round(12)

    @cached_property
    def by_gain(self) -> list[str]:
        """The ceiling, and the methods and random selection by their mean gain, the largest
        first."""
        means = dict(zip(self.methods, self.means.mean(0), strict=True))
        return [*self.ceiling, *sorted(means, key=lambda name: (-means[name], name))]

    @cached_property
    def classes(self) -> Mapping[str, str]:
        return {
            method: class_of([panel.lines[method] for panel in self.panels])
            for method in self.methods
        }

    @cached_property
    def ranks(self) -> Mapping[str, tuple[float, float]]:
        """Mean ranks among all methods, and among those of the same class; the best method
        first."""
        found, overall = {}, mean_ranks(self.means).tolist()
        for at, method in enumerate(self.methods):
            same = [
                i
                for i, other in enumerate(self.methods)
                if self.classes[other] == self.classes[method]
            ]
            found[method] = overall[at], float(mean_ranks(self.means[:, same])[same.index(at)])
        return dict(sorted(found.items(), key=lambda one: one[1]))

    @cached_property
    def best(self) -> Mapping[str, str]:
        """The method with the best rank of each class, controls apart."""
        return {
            self.classes[method]: method
            for method in [*self.ranks][::-1]
            if method not in self.controls
        }

    @cached_property
    def verdicts(self) -> Mapping[str, Verdict]:
        """Of all methods but the reference."""
        leads = {
            method: pooled(self.gains(method)) for method in self.ranks if method != self.reference
        }
        p_values = holm([math.nan if one is None else one.p_value for one in leads.values()])
        p_equal = holm(
            [math.nan if one is None else one.p_equivalent(EQUAL) for one in leads.values()]
        )
        return dict(zip(leads, map(Verdict, leads.values(), p_values, p_equal), strict=True))

    @property
    def better(self) -> list[str]:
        """The methods that are better than random selection beyond chance, controls apart, the best
        rank first."""
        return [
            one
            for one, verdict in self.verdicts.items()
            if verdict.word == "better" and one not in self.controls
        ]

    def pairs(self, line: str) -> list[tuple[Group, Group]]:
        """The groups of a line and of random selection, setting by setting."""
        return [(panel.lines[line], panel.lines[self.reference]) for panel in self.panels]

    def gains(self, line: str) -> list[dict[Seeds, float]]:
        """Final accuracy minus that of random selection by seed, setting by setting."""
        return list(map(paired_values, self.finals[line], self.finals[self.reference]))

    def possible(
        self, method: str, settings: slice = slice(None)
    ) -> tuple[float, float, float] | None:
        """The `ratio` of a method's gain to that of the ceiling, of means over settings at seeds
        that both have."""
        own, *whole = (
            pooled_values(self.gains(line)[settings]) for line in (method, *self.ceiling)
        )
        common = [seeds for seeds in own if whole and seeds in whole[0]]
        return ratio([own[seeds] for seeds in common], [whole[0][seeds] for seeds in common])

    def spent(self, method: str, names: Sequence[str], above: float = 0.0) -> list[float | None]:
        """Of each run: the sum of quantities until the test accuracy first reaches the mean final
        accuracy of random selection in its setting and `above`, as a share of what random selection
        spends in all; None if never. Without the runs of settings in which they were not
        recorded."""
        found: list[float | None] = []
        for own, reference in self.pairs(method):
            target, whole = (mean_final(reference) or 0.0) + above, mean_cost(reference, names)
            (values,) = measured(own, [partial(spent_to, target=target, names=names)])
            found += [
                None if value is None else value / whole
                for value in values
                if not math.isnan(whole)
            ]
        return found

    def share(self, line: str, names: Sequence[str]) -> float:
        """What a run spends in all, as a multiple of what one of random selection does: the mean
        over settings."""
        return float(
            np.mean(
                [
                    mean_cost(own, names) / mean_cost(reference, names)
                    for own, reference in self.pairs(line)
                ]
            )
        )

    def front(self, costs: Mapping[str, float]) -> list[str]:
        """The methods, controls apart, than which none other is as accurate for less of these
        costs, or more accurate for as much; to two digits behind the point."""
        accuracy = dict(zip(self.methods, self.means.mean(0), strict=True))
        places = {
            name: (round(costs[name], 2), -accuracy[name])
            for name in self.methods
            if name not in self.controls
        }
        return [
            name
            for name, (cost, loss) in places.items()
            if not any(
                x <= cost and y <= loss and (x, y) != (cost, loss) for x, y in places.values()
            )
        ]

    def imperfect(self) -> list["Comparison"]:
        """The comparison in settings in which some clients are imperfect, if there are any."""
        found = [
            panel
            for panel in self.panels
            if panel.lines[self.reference].complete[0].imperfect is not None
        ]
        return [replace(self, panels=found)] if found else []


def compare(panels: Sequence[Panel]) -> Comparison | None:
    """In the settings in which random selection is finished; None unless these are `LEAST_SETTINGS`
    or more, and `LEAST_METHODS` methods or more, it among them, are finished in all of them, at
    seeds that it has."""
    names = dict.fromkeys(name for panel in panels for name in panel.lines)
    choices = {
        name: next(panel.lines[name].choices for panel in panels if name in panel.lines)
        for name in names
    }
    chosen = {name: own.get("selector") for name, own in choices.items()}
    places = {
        n: [p for p in panels if n in p.lines and finals(p.lines[n])]
        for n in names
        if chosen[n] == REFERENCE
    }
    beside = {
        name: sum(choices[name].get(k, v) != v for k, v in NEW_GROUPS.items()) for name in places
    }
    reference = min(
        places, key=lambda name: (-len(places[name]), beside[name]), default=""
    )  # the plainest
    settings = places.get(reference, [])

    def is_paired(name: str, lines: Mapping[str, Group]) -> bool:
        return name in lines and bool(paired_values(finals(lines[name]), finals(lines[reference])))

    counts = {name: sum(is_paired(name, panel.lines) for panel in settings) for name in names}
    everywhere = [name for name, count in counts.items() if count == len(settings)]
    methods = [name for name in everywhere if chosen[name] != CEILING]
    if len(settings) < LEAST_SETTINGS or len(methods) < LEAST_METHODS:
        return None
    ceiling = [name for name in everywhere if chosen[name] == CEILING]
    controls = [name for name in methods if chosen[name] == CONTROL]
    left_out = {name: count for name, count in counts.items() if count < len(settings)}
    return Comparison(settings, methods, reference, ceiling[:1], controls, left_out)


def mean_cost(group: Group, names: Sequence[str]) -> float:
    """The mean over seeds of a sum of quantities; nan where a run does not have them."""
    (values,) = measured(group, [partial(total_cost, names=names)])
    return float(np.mean([math.nan if value is None else value for value in values]))


def mean_ranks(values: Floats) -> Floats:
    """Mean ranks over blocks, [B, M] to [M]: 1 is the highest value; equal ones share the mean of
    theirs."""
    from scipy.stats import rankdata  # here and below: it takes half a second to import

    return np.asarray(rankdata(-values, axis=1)).mean(0)


def rank_tests(values: Floats) -> tuple[float, float]:
    """Of [B, M]: p-value of Friedman's test, nan where all are equal in all blocks; and the
    critical difference: mean ranks that differ by less cannot be told apart at 5 % over all pairs
    (Nemenyi, 1963)."""
    from scipy.stats import friedmanchisquare, studentized_range

    p_value = float(friedmanchisquare(*values.T).pvalue) if np.ptp(values, 1).any() else math.nan
    blocks, num = values.shape
    return p_value, float(studentized_range.ppf(LEVEL, num, np.inf)) * math.sqrt(
        num * (num + 1) / (12 * blocks)
    )


def _weights(num: int, setting: int) -> Floats:
    """The weights of the seeds of a setting: the data's own, then those of the resamples, [1 + R,
    S]."""
    drawn = np.random.default_rng(setting).multinomial(num, np.full(num, 1 / num), RESAMPLES)
    return np.vstack([np.ones(num), drawn]) / num


def _estimates(values: Floats) -> Floats:
    """Of values of the data and of the resamples, [1 + R, ...]: the estimate and its interval, [3,
    ...]."""
    return np.stack(
        [values[0], *np.quantile(values[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)]
    )


def wins(blocks: Sequence[Floats]) -> tuple[Floats, Floats]:
    """Of [M, S] for each setting: the share of settings in which the row's mean is above the
    column's [M, M], and the mean over settings of P(row > column) over all pairs of seeds, with its
    interval [3, M, M]. Equal ones count 1/2."""
    means = np.stack([block.mean(1).round(12) for block in blocks])
    chances = np.zeros((1 + RESAMPLES, means.shape[1], means.shape[1]))
    for setting, block in enumerate(blocks):
        weights = _weights(block.shape[1], setting)
        for number, row in enumerate(block):
            above = (1 + np.sign(row[:, None] - block[number:, None])) / 2  # [M - number, S, S]
            part = ((weights @ above) * weights).sum(-1).T / len(blocks)
            chances[:, number, number:] += part
            chances[:, number + 1 :, number] += 1 / len(blocks) - part[:, 1:]
    return (1 + np.sign(means[:, :, None] - means[:, None])).mean(0) / 2, _estimates(chances)


def profile(gains: Sequence[Floats], levels: Floats) -> Floats:
    """The share of all runs whose gain is at least each of the levels [T], with a pointwise band,
    [3, T]. `gains`: one a seed for each setting."""
    parts = [
        len(own) * _weights(len(own), at) @ (own[:, None] >= levels) for at, own in enumerate(gains)
    ]
    return _estimates(np.sum(parts, 0) / sum(map(len, gains)))
