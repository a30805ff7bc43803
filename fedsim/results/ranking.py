"""Methods over several settings: ranks, verdicts against random selection, wins, shares of the
possible gain, costs.

Ranks, Friedman's test and the critical difference are those of Demsar (2006); the probability of
improvement and performance profiles are those of Agarwal et al. (2021). Their intervals are
percentiles of a bootstrap that draws the seeds of each setting anew, the same ones for all methods.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import numpy as np
import pandas as pd
from scipy import special

from fedsim.core.arrays import Floats
from fedsim.core.disk import conf_dir
from fedsim.core.server_data import declared_signals, server_data
from fedsim.results.frames import (
    CEILING,
    CONTROL,
    NEW_GROUPS,
    REFERENCE,
    by,
    by_setting,
    done,
    first_run,
    selector_of,
)
from fedsim.results.measures import spent_to, total_cost
from fedsim.results.runs import Run
from fedsim.results.statistics import (
    ALPHA,
    LEVEL,
    MIN_SEEDS,
    ROUNDING,
    Difference,
    holm,
    paired,
    pooled,
    pooled_values,
    ratio,
)

EQUAL = 0.005
"""Methods whose final accuracies differ by less are equal."""
RESAMPLES = 2_000
WHOLE = 10
"""With fewer seeds a verdict is preliminary."""
MIN_SETTINGS = 2
MIN_METHODS = 3
ASKED: Mapping[str, str] = {
    "updates": r"gradient|update of|soft labels|(^|; )training(;|$)",
    "label counts": r"label.counts",
    "losses": r"loss",
    "speeds": r"seconds|timed|resources|response",
    "nothing": r"^nothing",
}
"""What methods ask of clients, and the pattern by which a text says so; the first that matches."""
AT_SERVER = "; server: "
"""Text in the class of a method between what it asks of clients and what it needs at the server."""


@dataclass(frozen=True)
class Lead:
    """The lead of a method over random selection: the difference of final accuracy at equal seeds,
    pooled over settings.

    `p_value` is that of no difference, `p_equal` that of a difference beyond `EQUAL`. Both are
    corrected by Holm's method over all methods.
    """

    difference: Difference | None
    p_value: float
    p_equal: float

    @property
    def verdict(self) -> str:
        if self.difference is None or self.difference.num < MIN_SEEDS:
            return "too few seeds"
        if self.p_value < ALPHA:
            return "better" if self.difference.mean > 0 else "worse"
        return f"equal within {EQUAL:g}" if self.p_equal < ALPHA else "not decided"

    def __str__(self) -> str:
        num = self.difference.num if self.difference else 0
        return f"{self.verdict}, preliminary" if MIN_SEEDS <= num < WHOLE else self.verdict


@dataclass(frozen=True, eq=False)
class Comparison:
    """Methods that are compared over settings.

    `settings` has the finished runs of each setting by method. `methods` are finished in all
    settings; the `reference` (random selection) and `controls` are among them. `ceiling` is the
    line that shows what the best choices could gain, if there is one. `left_out` says in how many
    of the settings further methods are finished.
    """

    settings: Mapping[str, Mapping[str, pd.DataFrame]]
    methods: Sequence[str]
    reference: str
    ceiling: Sequence[str] = ()
    controls: Sequence[str] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)

    def accuracies(self, method: str) -> list[pd.Series]:
        """Return the final accuracies of a method by seed, setting by setting."""
        return [lines[method]["final_accuracy"].dropna() for lines in self.settings.values()]

    @cached_property
    def _gains(self) -> dict[str, list[pd.Series]]:
        reference = self.accuracies(self.reference)
        return {
            method: list(map(paired, self.accuracies(method), reference))
            for method in (*self.methods, *self.ceiling)
        }

    def gains(self, method: str) -> list[pd.Series]:
        """Return final accuracy minus that of random selection by seed, setting by setting."""
        return self._gains[method]

    @cached_property
    def blocks(self) -> list[Floats]:
        """The methods' final accuracies at the seeds that all of them have, [M, S] for each
        setting."""
        by_method = [self.accuracies(method) for method in self.methods]
        blocks = []
        for accuracies in zip(*by_method, strict=True):
            common = pd.concat(accuracies, axis=1, join="inner")
            blocks.append(common.to_numpy().T)
        return blocks

    @cached_property
    def means(self) -> Floats:
        """Mean final accuracies [settings, M]: that of random selection plus the mean gain of each
        method at the seeds that both have."""
        level = [series.mean() for series in self.accuracies(self.reference)]
        gains = [[series.mean() for series in self.gains(method)] for method in self.methods]
        return (np.array(level)[:, None] + np.array(gains).T).round(12)

    @cached_property
    def mean_accuracies(self) -> dict[str, float]:
        """The mean of `means` over settings, by method."""
        return dict(zip(self.methods, self.means.mean(0).tolist(), strict=True))

    @cached_property
    def by_gain(self) -> list[str]:
        """The ceiling, then the methods and random selection by their mean gain, the largest
        first."""
        means = self.mean_accuracies
        return [*self.ceiling, *sorted(means, key=lambda name: (-means[name], name))]

    @cached_property
    def classes(self) -> Mapping[str, str]:
        """The class of each method: its requests to clients and needs at the server (`class_of`)."""
        return {
            method: class_of([lines[method] for lines in self.settings.values()])
            for method in self.methods
        }

    @cached_property
    def ranks(self) -> Mapping[str, tuple[float, float]]:
        """Mean ranks among all methods, and among those of the same class; the best method
        first."""
        overall = mean_ranks(self.means).tolist()
        ranks = {}
        for at, method in enumerate(self.methods):
            kind = self.classes[method]
            same = [i for i, other in enumerate(self.methods) if self.classes[other] == kind]
            in_class = mean_ranks(self.means[:, same])
            ranks[method] = overall[at], float(in_class[same.index(at)])
        return dict(sorted(ranks.items(), key=lambda item: item[1]))

    @cached_property
    def best(self) -> Mapping[str, str]:
        """The method with the best rank of each class, except controls."""
        best: dict[str, str] = {}
        for method in reversed(list(self.ranks)):
            if method not in self.controls:
                best[self.classes[method]] = method
        return best

    @cached_property
    def leads(self) -> Mapping[str, Lead]:
        """The leads of all methods except the reference, by rank."""
        methods = [method for method in self.ranks if method != self.reference]
        pooled_gains = [pooled(self.gains(method)) for method in methods]
        p_values = holm([math.nan if gain is None else gain.p_value for gain in pooled_gains])
        p_equal = holm(
            [math.nan if gain is None else gain.p_equivalent(EQUAL) for gain in pooled_gains]
        )
        return dict(zip(methods, map(Lead, pooled_gains, p_values, p_equal), strict=True))

    @property
    def better(self) -> list[str]:
        """The methods that are better than random selection beyond chance, except controls, the
        best rank first."""
        return [
            method
            for method, lead in self.leads.items()
            if lead.verdict == "better" and method not in self.controls
        ]

    def possible(
        self, method: str, settings: slice = slice(None)
    ) -> tuple[float, float, float] | None:
        """Return the `ratio` of a method's gain to that of the ceiling, of means over settings at
        seeds that both have."""
        if not self.ceiling:
            return None
        both = [pooled_values(self.gains(line)[settings]) for line in (method, *self.ceiling)]
        above, below = pd.concat(both, axis=1, join="inner").to_numpy().T
        return ratio(above, below)

    def spent(self, method: str, names: Sequence[str], above: float = 0.0) -> list[float]:
        """Return what each run spends until its test accuracy first reaches the mean final accuracy
        of random selection in its setting plus `above`, as a share of what random selection spends
        in all.

        inf if a run never reaches it. Runs of settings in which the quantities were not recorded
        are left out.
        """
        shares: list[float] = []
        for lines in self.settings.values():
            reference = lines[self.reference]
            target = float(reference["final_accuracy"].mean()) + above
            whole = mean_cost(reference, names)
            if math.isnan(whole):
                continue
            for run in lines[method]["run"]:
                share = spent_to(run, target, names) / whole
                shares.append(math.inf if math.isnan(share) else share)
        return shares

    def share(self, method: str, names: Sequence[str]) -> float:
        """Return what a run spends in all, as a multiple of what one of random selection does: the
        mean over settings."""
        multiples = [
            mean_cost(lines[method], names) / mean_cost(lines[self.reference], names)
            for lines in self.settings.values()
        ]
        return float(np.mean(multiples))

    def front(self, costs: Mapping[str, float]) -> list[str]:
        """Return the Pareto front, without controls: no other method is as accurate for less of
        these costs, or more accurate for as much. Costs count to two decimals."""
        points = {
            method: (round(costs[method], 2), -accuracy)
            for method, accuracy in self.mean_accuracies.items()
            if method not in self.controls
        }

        def is_beaten(point: tuple[float, float]) -> bool:
            cost, loss = point
            others = [other for other in points.values() if other != point]
            return any(x <= cost and y <= loss for x, y in others)

        return [method for method, point in points.items() if not is_beaten(point)]

    def imperfect(self) -> "Comparison | None":
        """Return the comparison in settings in which some clients are imperfect, if there are
        any."""
        settings = {
            title: lines
            for title, lines in self.settings.items()
            if first_run(lines[self.reference]).imperfect is not None
        }
        return replace(self, settings=settings) if settings else None


def compare(runs: pd.DataFrame) -> Comparison | None:
    """Return the comparison in the settings in which random selection is finished.

    None unless there are `MIN_SETTINGS`, and `MIN_METHODS` methods (random selection is one of
    them) are finished in all of these at seeds that it has.
    """
    panels = by_setting(runs)
    settings = {title: by(done(rows), "method") for title, rows in panels.items()}
    examples = by(pd.concat(panels.values()), "method")
    selectors = {name: selector_of(rows) for name, rows in examples.items()}
    # 1. The reference: random selection that is finished in most settings, the plainest of these.
    counts = {
        name: sum(name in lines for lines in settings.values())
        for name, selector in selectors.items()
        if selector == REFERENCE
    }
    reference = min(
        counts,
        key=lambda name: (-counts[name], _num_unusual(first_run(examples[name]))),
        default="",
    )
    settings = {title: lines for title, lines in settings.items() if reference in lines}
    # 2. The methods that are finished at common seeds in all of its settings.
    num_paired = {
        name: sum(_is_paired(lines, name, reference) for lines in settings.values())
        for name in selectors
    }
    everywhere = [name for name, num in num_paired.items() if num == len(settings)]
    methods = [name for name in everywhere if selectors[name] != CEILING]
    if len(settings) < MIN_SETTINGS or len(methods) < MIN_METHODS:
        return None
    ceilings = [name for name in everywhere if selectors[name] == CEILING]
    controls = [name for name in methods if selectors[name] == CONTROL]
    left_out = {name: num for name, num in num_paired.items() if num < len(settings)}
    return Comparison(settings, methods, reference, ceilings[:1], controls, left_out)


def _num_unusual(run: Run) -> int:
    return sum(run.choices.get(group, usual) != usual for group, usual in NEW_GROUPS.items())


def _is_paired(lines: Mapping[str, pd.DataFrame], name: str, reference: str) -> bool:
    return name in lines and bool(lines[name].index.isin(lines[reference].index).any())


def class_of(settings: Sequence[pd.DataFrame]) -> str:
    """Return what a method asks of clients, one of `ASKED`, and needs at the server: "nothing;
    server: the test set".

    summary.json says both (`asks`, `server_data`). For earlier runs the file of the shipped choice
    and the source of the selector's class do. "everybody trains" if that is so in one of the
    settings; "unknown" if nothing is known.
    """
    for rows in settings:
        ratios = np.concatenate([run.columns["participation_ratio"] for run in rows["run"]])
        if (ratios == 1).all():  # in other settings clients may be away
            return "everybody trains"
    run = first_run(settings[0])
    text = str(run.summary.get("asks") or _asked(run.choices.get("selector", "")))
    asked = "unknown"
    for name, pattern in reversed(list(ASKED.items())):
        if re.search(pattern, text):
            asked = name
    signals = declared_signals(run.config.get("selector"))
    held = str(run.summary.get("server_data") or server_data(signals))
    return asked if held == "nothing" else f"{asked}{AT_SERVER}{held}"


@cache
def _asked(choice: str) -> str:
    """Return what the file of a shipped selector, or of the one that it builds on, says that it
    asks; empty if it is none."""
    path = conf_dir() / "selector" / f"{choice}.yaml"
    if not (re.fullmatch(r"\w+", choice) and path.is_file()):
        return ""
    text = path.read_text(encoding="utf-8")
    if asks := re.search(r"^#\s+asks:\s+(.+)$", text, re.MULTILINE):
        return asks[1]
    base = re.search(r"^\s+- (\w+)$", text, re.MULTILINE)
    return _asked(base[1]) if base else ""


def mean_cost(rows: pd.DataFrame, names: Sequence[str]) -> float:
    """Return the mean over seeds of a sum of quantities; nan if a run does not have them."""
    return float(np.mean([total_cost(run, names) for run in rows["run"]]))


def mean_ranks(values: Floats) -> Floats:
    """Return mean ranks over blocks, [B, M] to [M]: 1 is the highest value; equal values share the
    mean of their ranks."""
    return pd.DataFrame(-values).rank(axis=1).mean().to_numpy()


def rank_tests(values: Floats) -> tuple[float, float]:
    """Return the p-value of Friedman's test on [B, M], and the critical difference.

    The p-value is nan if all methods are equal in all blocks. Mean ranks that differ by less than
    the critical difference cannot be told apart at 5 % over all pairs (Nemenyi, 1963). scipy.stats
    has both, but takes half a second to import.
    """
    blocks, num = values.shape
    sizes = [np.unique(row, return_counts=True)[1] for row in values]
    ties = sum(float((size**3 - size).sum()) for size in sizes)
    without_ties = 1 - ties / (num * (num**2 - 1) * blocks)
    p_value = math.nan
    if without_ties:
        distances = mean_ranks(values) - (num + 1) / 2
        statistic = 12 * blocks / (num * (num + 1)) * float((distances**2).sum()) / without_ties
        p_value = float(special.chdtrc(num - 1, statistic))
    return p_value, range_quantile(num) * math.sqrt(num * (num + 1) / (12 * blocks))


def range_quantile(num: int) -> float:
    """Return the 95 % quantile of the range of `num` standard normal variables."""
    x = np.linspace(-8, 8, 2001)
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    low, high = 0.0, 16.0
    while high - low > ROUNDING:
        middle = (low + high) / 2
        within = (special.ndtr(x + middle) - special.ndtr(x)) ** (num - 1)  # x is the smallest
        is_below = num * np.trapezoid(density * within, x) < LEVEL
        low, high = (middle, high) if is_below else (low, middle)
    return low


def _weights(num: int, setting: int) -> Floats:
    """Return the weights of the seeds of a setting [1 + R, S]: equal ones for the data, then those
    of R resamples."""
    counts = np.random.default_rng(setting).multinomial(num, np.full(num, 1 / num), RESAMPLES)
    return np.vstack([np.ones(num), counts]) / num


def _with_interval(values: Floats) -> Floats:
    """Turn values of the data and of R resamples [1 + R, ...] into an estimate and its interval
    [3, ...]."""
    ends = np.quantile(values[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    return np.concatenate([values[:1], ends])


def wins(blocks: Sequence[Floats]) -> tuple[Floats, Floats]:
    """Return how often methods beat each other, from accuracies [M, S] of each setting.

    The first [M, M] is the share of settings in which the row's mean is above the column's. The
    second [3, M, M] is the mean over settings of P(row > column) over all pairs of seeds, with its
    interval. Ties count 1/2.
    """
    means = np.stack([block.mean(1).round(12) for block in blocks])
    chances = np.zeros((1 + RESAMPLES, means.shape[1], means.shape[1]))
    for setting, block in enumerate(blocks):
        weights = _weights(block.shape[1], setting)
        for number, row in enumerate(block):
            above = (1 + np.sign(row[:, None] - block[number:, None])) / 2  # [M - number, S, S]
            part = ((weights @ above) * weights).sum(-1).T / len(blocks)
            chances[:, number, number:] += part
            chances[:, number + 1 :, number] += 1 / len(blocks) - part[:, 1:]
    shares = (1 + np.sign(means[:, :, None] - means[:, None])).mean(0) / 2
    return shares, _with_interval(chances)


def profile(gains: Sequence[Floats], levels: Floats) -> Floats:
    """Return the share of all runs whose gain is at least each of the levels [T], with a pointwise
    band, [3, T]. `gains` has one value a seed for each setting."""
    parts = []
    for setting, values in enumerate(gains):
        weights = _weights(len(values), setting)
        parts.append(len(values) * weights @ (values[:, None] >= levels))
    return _with_interval(np.sum(parts, 0) / sum(map(len, gains)))
