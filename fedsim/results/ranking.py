"""Comparisons of methods over several settings: ranks, verdicts against random selection, wins,
shares of the possible gain, costs.

A setting is one combination of data set, partition, model, and so on (`fedsim.results.frames`). The
reference is random selection. The gain of a method is its final accuracy minus that of the
reference in the same setting at the same seed. A control is random selection by other draws, which
must come out equal to the reference. The ceiling is clairvoyant selection: it is no method, and
shows what the best choices could gain.

Ranks, Friedman's test and the critical difference are those of Demsar (2006); the probability of
improvement and performance profiles are those of Agarwal et al. (2021). Their intervals are
percentiles of a bootstrap that resamples the seeds of each setting. All methods of a setting have
the same resampled seeds.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import numpy as np
import pandas as pd

from fedsim.core.arrays import Floats
from fedsim.core.declared_signals import declared_signals
from fedsim.core.disk import conf_dir
from fedsim.core.server_data import server_data, server_sees
from fedsim.results.frames import (
    by,
    by_setting,
    finished_rows,
    first_run,
    selector_of,
    without_target,
)
from fedsim.results.labels import CEILING, CONTROL, NEW_GROUPS, REFERENCE
from fedsim.results.measures import cost_until, total_cost
from fedsim.results.runs import Run
from fedsim.results.statistics import (
    ALPHA,
    LEVEL,
    MIN_SEEDS,
    Difference,
    corrected_alike,
    holm,
    paired,
    pooled,
    pooled_values,
    ratio,
)

EQUAL = 0.005
"""Methods whose final accuracies differ by less are equal."""
RESAMPLES = 2_000
"""Number of bootstrap resamples."""
WHOLE = 10
"""With fewer seeds a verdict is preliminary."""
MIN_SETTINGS = 2
MIN_METHODS = 3
"""With fewer settings or methods (the reference is one of them) there is no comparison."""
ASKED: Mapping[str, str] = {
    "updates": r"gradient|update of|soft labels|(^|; )training(;|$)",
    "label counts": r"label.counts",
    "losses": r"loss|accurac",
    "speeds": r"seconds|timed|resources|response",
    "nothing": r"^nothing",
}
"""The kinds of requests to clients, each with a pattern that finds it in the text of a selector's
`asks`. Accuracies count as losses, because clients pass their data forward for both."""
AT_SERVER = "; server: "
"""Text in the class of a method between what it asks of clients and what it needs at the server."""
DIGITS = 12
"""Mean accuracies are rounded to this many digits, so that equal ones are ties."""


@dataclass(frozen=True)
class Lead:
    """Final accuracy of a method minus that of random selection, paired by seed, averaged over
    settings.

    `difference` is None with fewer than two common seeds. `p_value` tests the hypothesis that there
    is no difference, and `p_equal` the hypothesis that the difference is `EQUAL` or more. Both are
    corrected by Holm's method over all methods, and nan without a difference. `corrected` is the
    interval of the difference that is corrected as `p_value` is.
    """

    difference: Difference | None
    p_value: float
    p_equal: float
    corrected: tuple[float, float] = (math.nan, math.nan)

    @property
    def verdict(self) -> str:
        """The conclusion in words: better, worse, equal within `EQUAL`, not decided, or too few
        seeds."""
        if self.difference is None or self.difference.num < MIN_SEEDS:
            return "too few seeds"
        if self.p_value < ALPHA:
            return "better" if self.difference.mean > 0 else "worse"
        return f"equal within {EQUAL:g}" if self.p_equal < ALPHA else "not decided"

    def __str__(self) -> str:
        """Return the verdict, and whether it is preliminary."""
        num = self.difference.num if self.difference else 0
        return f"{self.verdict}, preliminary" if MIN_SEEDS <= num < WHOLE else self.verdict


@dataclass(frozen=True, eq=False)
class Comparison:
    """Methods that are compared over settings.

    `settings` has the finished runs of each setting by method (frames of `fedsim.results.frames`).
    `methods` are the M methods that are finished in all settings; the `reference` and the
    `controls` are among them. `ceiling` holds the name of the ceiling, or nothing. `left_out` maps
    each method that is not finished everywhere to the number of settings in which it is.

    The order of settings and methods is the same in all lists and arrays.
    """

    settings: Mapping[str, Mapping[str, pd.DataFrame]]
    methods: Sequence[str]
    reference: str
    ceiling: Sequence[str] = ()
    controls: Sequence[str] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)

    def accuracies(self, method: str) -> list[pd.Series]:
        """Return the final accuracies of a method by seed, one series for each setting."""
        return [lines[method]["final_accuracy"].dropna() for lines in self.settings.values()]

    @cached_property
    def _gains(self) -> dict[str, list[pd.Series]]:
        """The `gains` of all methods and of the ceiling."""
        reference = self.accuracies(self.reference)
        gains = {}
        for method in (*self.methods, *self.ceiling):
            gains[method] = list(map(paired, self.accuracies(method), reference))
        return gains

    def gains(self, method: str) -> list[pd.Series]:
        """Return final accuracy minus that of random selection by seed, one series for each
        setting."""
        return self._gains[method]

    @cached_property
    def blocks(self) -> list[Floats]:
        """Final accuracies [M, S] of each setting, at the S seeds that all methods have there."""
        by_method = [self.accuracies(method) for method in self.methods]
        blocks = []
        for accuracies in zip(*by_method, strict=True):
            common = pd.concat(accuracies, axis=1, join="inner")
            blocks.append(common.to_numpy().T)
        return blocks

    @cached_property
    def means(self) -> Floats:
        """Mean final accuracies [settings, M].

        Each is the mean of random selection plus the mean gain of the method, so that a method
        with fewer seeds is not ranked by the luck of its seeds. Values are rounded, so that equal
        accuracies are ties of ranks.
        """
        of_reference = [series.mean() for series in self.accuracies(self.reference)]
        gains = []  # of each method, in each setting
        for method in self.methods:
            gains.append([series.mean() for series in self.gains(method)])
        return (np.array(of_reference)[:, None] + np.array(gains).T).round(DIGITS)

    @cached_property
    def mean_accuracies(self) -> dict[str, float]:
        """The mean over settings of each method's mean final accuracy."""
        return dict(zip(self.methods, self.means.mean(0).tolist(), strict=True))

    @cached_property
    def by_gain(self) -> list[str]:
        """The ceiling, then all methods from the largest mean gain to the smallest.

        The order by mean gain is the order by mean accuracy: both differ by a constant.
        """
        means = self.mean_accuracies
        return [*self.ceiling, *sorted(means, key=lambda name: (-means[name], name))]

    @cached_property
    def classes(self) -> Mapping[str, str]:
        """The class of each method, by what it asks of clients and needs at the server
        (`class_of`)."""
        return {
            method: class_of([lines[method] for lines in self.settings.values()])
            for method in self.methods
        }

    @cached_property
    def ranks(self) -> Mapping[str, tuple[float, float]]:
        """Two mean ranks of each method, 1 the best: among all methods, and among the methods of
        its class. The best method comes first."""
        overall = mean_ranks(self.means).tolist()
        ranks = {}
        for column, method in enumerate(self.methods):
            same_class = []  # columns of the methods of this class
            for other_column, other_method in enumerate(self.methods):
                if self.classes[other_method] == self.classes[method]:
                    same_class.append(other_column)
            in_class = mean_ranks(self.means[:, same_class])
            ranks[method] = overall[column], float(in_class[same_class.index(column)])
        return dict(sorted(ranks.items(), key=lambda item: item[1]))

    @cached_property
    def best(self) -> Mapping[str, str]:
        """The method with the best rank in each class; controls do not count."""
        best: dict[str, str] = {}
        for method in reversed(list(self.ranks)):  # better methods overwrite worse ones
            if method not in self.controls:
                best[self.classes[method]] = method
        return best

    @cached_property
    def leads(self) -> Mapping[str, Lead]:
        """The lead of each method over the reference, without the reference, the best rank
        first."""
        methods = [method for method in self.ranks if method != self.reference]
        pooled_gains = [pooled(self.gains(method)) for method in methods]
        corrections = corrected_alike(pooled_gains)
        p_equivalent = []
        for gain in pooled_gains:
            p_equivalent.append(math.nan if gain is None else gain.p_equivalent(EQUAL))
        p_equal = holm(p_equivalent)
        leads = {}
        for number, method in enumerate(methods):
            p_value, interval = corrections[number]
            leads[method] = Lead(pooled_gains[number], p_value, p_equal[number], interval)
        return leads

    @property
    def better(self) -> list[str]:
        """The methods with the verdict "better", without controls, the best rank first."""
        return [
            method
            for method, lead in self.leads.items()
            if lead.verdict == "better" and method not in self.controls
        ]

    def possible(
        self, method: str, settings: slice = slice(None)
    ) -> tuple[float, float, float] | None:
        """Return the share of the possible gain, and the ends of its 95 % interval (`ratio`).

        It is the method's gain divided by that of the ceiling. Both gains are means over a slice
        of the settings, paired by seed. None without a ceiling, or with fewer than two common
        seeds.
        """
        if not self.ceiling:
            return None
        (ceiling,) = self.ceiling
        gains = [pooled_values(self.gains(name)[settings]) for name in (method, ceiling)]
        gain, possible_gain = pd.concat(gains, axis=1, join="inner").to_numpy().T
        return ratio(gain, possible_gain)

    def spent(self, method: str, names: Sequence[str], above: float = 0.0) -> list[float]:
        """Return the cost of reaching a target accuracy, one multiple for each run of a method.

        The target is the mean final accuracy of random selection in the setting, plus `above`. The
        cost is the sum of the recorded quantities `names` until the mean of a window reaches the
        target (`rounds_until`), divided by the mean cost of a whole run of random selection. It is
        inf if a run never reaches the target. Settings in which random selection did not record
        the quantities, or spent nothing, are skipped.
        """
        multiples: list[float] = []
        for lines in self.settings.values():
            reference = lines[self.reference]
            target = float(reference["final_accuracy"].mean()) + above
            whole_cost = mean_cost(reference, names)
            if not whole_cost > 0:  # also if it is nan
                continue
            for run in lines[method]["run"]:
                multiple = cost_until(run, target, names) / whole_cost
                multiples.append(math.inf if math.isnan(multiple) else multiple)
        return multiples

    def share(self, method: str, names: Sequence[str]) -> float:
        """Return the cost of a whole run, divided by that of a run of random selection.

        The cost is the sum of the recorded quantities `names`, as a mean over seeds. The result is
        the mean of the settings' multiples; nan if one of them is (`cost_multiple`).
        """
        multiples = [
            cost_multiple(lines[method], lines[self.reference], names)
            for lines in self.settings.values()
        ]
        return float(np.mean(multiples))

    def front(self, costs: Mapping[str, float]) -> list[str]:
        """Return the Pareto front of mean accuracy against `costs`, without controls.

        A method is on it if no other method is as accurate at a lower cost, or more accurate at
        the same cost. Costs are rounded to two decimals.
        """
        points = {}  # cost and accuracy of each method
        for method, accuracy in self.mean_accuracies.items():
            if method not in self.controls:
                points[method] = (round(costs[method], 2), accuracy)

        def is_beaten(point: tuple[float, float]) -> bool:
            cost, accuracy = point
            for other_point in points.values():
                other_cost, other_accuracy = other_point
                if other_point != point and other_cost <= cost and other_accuracy >= accuracy:
                    return True
            return False

        return [method for method, point in points.items() if not is_beaten(point)]

    def imperfect(self) -> "Comparison | None":
        """Return this comparison in the settings with imperfect clients alone; None if there is no
        such setting."""
        settings = {
            title: lines
            for title, lines in self.settings.items()
            if first_run(lines[self.reference]).imperfect is not None
        }
        return replace(self, settings=settings) if settings else None


def compare(runs: pd.DataFrame) -> Comparison | None:
    """Return the comparison in the settings in which random selection is finished.

    A method takes part if in each of these settings it is finished at a seed that random selection
    has, too. Runs that end at an accuracy are skipped. None with fewer than `MIN_SETTINGS` settings
    or `MIN_METHODS` methods.
    """
    rows_by_setting = by_setting(without_target(runs))
    if len(rows_by_setting) < MIN_SETTINGS:
        return None
    finished = {title: by(finished_rows(rows), "method") for title, rows in rows_by_setting.items()}
    methods = by(pd.concat(rows_by_setting.values()), "method")
    selectors = {name: selector_of(rows) for name, rows in methods.items()}
    reference = _plainest_reference(methods, finished)
    if reference is None:
        return None
    settings = {title: lines for title, lines in finished.items() if reference in lines}
    # Methods that share a seed with the reference in all of its settings take part.
    taking_part = []
    left_out = {}
    for name in methods:
        num_paired = sum(_is_paired(lines, name, reference) for lines in settings.values())
        if num_paired == len(settings):
            taking_part.append(name)
        else:
            left_out[name] = num_paired
    compared = [name for name in taking_part if selectors[name] != CEILING]
    if len(settings) < MIN_SETTINGS or len(compared) < MIN_METHODS:
        return None
    ceilings = [name for name in taking_part if selectors[name] == CEILING]
    controls = [name for name in compared if selectors[name] == CONTROL]
    return Comparison(settings, compared, reference, ceilings[:1], controls, left_out)


def _plainest_reference(
    methods: Mapping[str, pd.DataFrame], finished: Mapping[str, Mapping[str, pd.DataFrame]]
) -> str | None:
    """Return the method that is the reference, given the runs of each method, and the finished runs
    of each setting by method.

    Several methods may be random selection, with different local training for example. The
    reference is the one that is finished in the most settings; of several, the one with the fewest
    unusual choices. None if no method is random selection.
    """

    def key(name: str) -> tuple[int, int]:
        num_settings = sum(name in lines for lines in finished.values())
        return -num_settings, _num_unusual(first_run(methods[name]))

    candidates = [name for name, rows in methods.items() if selector_of(rows) == REFERENCE]
    return min(candidates, key=key, default=None)


def _num_unusual(run: Run) -> int:
    """Return how many of a run's choices in `NEW_GROUPS` are not the usual ones."""
    return sum(run.choices.get(group, usual) != usual for group, usual in NEW_GROUPS.items())


def _is_paired(lines: Mapping[str, pd.DataFrame], name: str, reference: str) -> bool:
    """Return whether a method and the reference are finished at a common seed in a setting."""
    return name in lines and bool(lines[name].index.isin(lines[reference].index).any())


def class_of(frames: Sequence[pd.DataFrame]) -> str:
    """Return the class of a method, such as "label counts, losses; server: the test set".

    It names all that the method asks of clients (keys of `ASKED`), and the data that it needs at
    the server. `frames` has the method's finished runs, one frame for each setting. The class is
    "everybody trains" if all clients take part in all rounds of a setting. Otherwise summary.json
    says what is asked (`asks`) and needed (`server_data`). Earlier versions did not write these
    keys. Then the file of the shipped selector and its class say it. "unknown" stands for requests
    that match no pattern.
    """
    for rows in frames:
        ratios = np.concatenate([run.columns["participation_ratio"] for run in rows["run"]])
        if (ratios == 1).all():  # one setting is enough: in others clients may be unavailable
            return "everybody trains"
    run = first_run(frames[0])
    text = str(run.summary.get("asks") or _asked(run.choices.get("selector", "")))
    kinds = [kind for kind, pattern in ASKED.items() if re.search(pattern, text)]
    asked = ", ".join(kinds) or "unknown"
    signals = declared_signals(run.config.get("selector"))
    data_at_server = str(run.summary.get("server_data") or server_data(signals))
    return asked if data_at_server == "nothing" else f"{asked}{AT_SERVER}{data_at_server}"


def seen_by_server(run: Run) -> str:
    """Return what the server must see of single clients in a run, such as "updates, losses".

    Earlier versions did not write that: then the declaration of the selector's class says it.
    "unknown" for other classes than those of fedsim.
    """
    if seen := run.summary.get("server_sees"):
        return str(seen)
    selector = run.config.get("selector", {})
    is_shipped = str(selector.get("_target_")).startswith("fedsim.selectors.")
    return server_sees(declared_signals(selector)) if is_shipped else "unknown"


@cache
def _asked(choice: str) -> str:
    """Return the text after "# asks:" in conf/selector/<choice>.yaml.

    A file without such a line builds on another selector, whose file is read instead. Empty if
    `choice` is no shipped selector.
    """
    path = conf_dir() / "selector" / f"{choice}.yaml"
    if not (re.fullmatch(r"\w+", choice) and path.is_file()):
        return ""
    text = path.read_text(encoding="utf-8")
    if asks := re.search(r"^#\s+asks:\s+(.+)$", text, re.MULTILINE):
        return asks[1]
    base = re.search(r"^\s+- (\w+)$", text, re.MULTILINE)  # an entry of Hydra's defaults list
    return _asked(base[1]) if base else ""


def mean_cost(rows: pd.DataFrame, names: Sequence[str]) -> float:
    """Return the mean over seeds of the sum of some quantities; nan if there is no run, or if one
    did not record them."""
    costs = [total_cost(run, names) for run in rows["run"]]
    return float(np.mean(costs)) if costs else math.nan


def cost_multiple(rows: pd.DataFrame, reference: pd.DataFrame, names: Sequence[str]) -> float:
    """Return the `mean_cost` of a method as a multiple of that of its reference; nan if a run did
    not record the quantities, or if the reference spent nothing."""
    cost_of_reference = mean_cost(reference, names)
    return mean_cost(rows, names) / cost_of_reference if cost_of_reference else math.nan


def mean_ranks(values: Floats) -> Floats:
    """Return the mean rank [M] of each column over the rows of `values` [settings, M].

    Rank 1 is the highest value of a row. Equal values share the mean of their ranks.
    """
    return pd.DataFrame(-values).rank(axis=1).mean().to_numpy()


def rank_tests(values: Floats) -> tuple[float, float]:
    """Return the p-value of Friedman's test on mean accuracies [settings, M], and the critical
    difference of mean ranks.

    There are at least three methods. The p-value is nan if all are equal in all settings. Mean
    ranks that differ by less than the critical difference cannot be told apart at 5 % over all
    pairs (Nemenyi, 1963).
    """
    from scipy import stats  # here: it takes half a second to import

    num_settings, num = values.shape
    with np.errstate(invalid="ignore"):  # the statistic is 0 / 0 if all are equal
        p_value = stats.friedmanchisquare(*values.T).pvalue
    # Two mean ranks differ with the variance M (M + 1) / (6 settings), as two independent variables
    # of half that variance do.
    quantile = stats.studentized_range.ppf(LEVEL, num, np.inf)
    return float(p_value), float(quantile * math.sqrt(num * (num + 1) / (12 * num_settings)))


def _weights(num: int, setting: int) -> Floats:
    """Return the weights [1 + R, S] of the S = `num` seeds of a setting, which sum to 1 in each
    row.

    The first row has equal weights, for the data as they are. The other rows are R bootstrap
    resamples. `setting` seeds the generator, so that all methods have the same resamples.
    """
    counts = np.random.default_rng(setting).multinomial(num, np.full(num, 1 / num), RESAMPLES)
    return np.vstack([np.ones(num), counts]) / num


def _with_interval(values: Floats) -> Floats:
    """Return estimate, lower end and upper end [3, ...] from values [1 + R, ...].

    The first value is that of the data, the others are those of R resamples (`_weights`).
    """
    ends = np.quantile(values[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    return np.concatenate([values[:1], ends])


def wins(blocks: Sequence[Floats]) -> tuple[Floats, Floats]:
    """Return how often methods beat each other, from accuracies [M, S] of each setting.

    The first array [M, M] is the share of settings in which the row's mean accuracy is above the
    column's. The second [3, M, M] is the probability of improvement with its interval: the mean
    over settings of the share of all pairs of seeds in which the row's run is above the column's.
    Ties count 1/2 in both.
    """
    means = np.stack([block.mean(1).round(DIGITS) for block in blocks])
    chances = np.zeros((1 + RESAMPLES, means.shape[1], means.shape[1]))
    for setting, block in enumerate(blocks):
        weights = _weights(block.shape[1], setting)
        for method, row in enumerate(block):
            # 1, 1/2 or 0 for each later method and pair of seeds [M - method, S, S].
            above = (1 + np.sign(row[:, None] - block[method:, None])) / 2
            # Each pair counts by the weights of both of its seeds, and each setting alike.
            chance = ((weights @ above) * weights).sum(-1).T / len(blocks)  # [1 + R, M - method]
            chances[:, method, method:] += chance
            # P(column > row) = 1 - P(row > column), because ties count 1/2.
            chances[:, method + 1 :, method] += 1 / len(blocks) - chance[:, 1:]
    shares = (1 + np.sign(means[:, :, None] - means[:, None])).mean(0) / 2
    return shares, _with_interval(chances)


def profile(gains: Sequence[Floats], levels: Floats) -> Floats:
    """Return the share of all runs whose gain is at least each of L `levels`, with its pointwise
    interval, [3, L].

    `gains` has an array for each setting, with the gain of one method at each seed.
    """
    num_above = []  # numbers of runs [1 + R, L] of each setting; row 0 is the data as they are
    for setting, values in enumerate(gains):
        weights = _weights(len(values), setting)
        num_above.append(len(values) * weights @ (values[:, None] >= levels))
    return _with_interval(np.sum(num_above, 0) / sum(map(len, gains)))
