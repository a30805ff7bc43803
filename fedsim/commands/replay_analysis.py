"""Analyse a replay: how good the methods' choices are, which clients they prefer, and how alike
they are.

In a replay (`fedsim.running.replay`), several methods choose a cohort of clients in every round on
the models of one run, the lead. `fedsim replay` makes a `ReplayAnalysis` of all rounds so far after
each seed. It has the statistics and the tables; `fedsim.commands.replay_plots` draws them. Arrays
are [S, M] for S seeds and M methods unless a comment says otherwise.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.spatial.distance import pdist, squareform
from scipy.stats import hypergeom, kendalltau, spearmanr

from fedsim.core.arrays import Floats
from fedsim.report.table import Table, make_frame
from fedsim.results.statistics import ALPHA, MIN_SEEDS, UNBOUNDED, Estimate

MIN_METHODS = 4
"""Minimum number of methods with ordinary runs for a verdict. With fewer, no order of methods has a
p-value below 0.2."""
REGRET = (
    "Regret: (L - best) / (worst - best) of a round's random cohorts, L the validation loss of the "
    "model that the\nchoice makes, with its own weights. Percentile: how many of them are better. "
    "Seconds of selecting, and bytes of\nquestions. Means over rounds"
)
PREFERENCES = (
    "Spearman's rank correlation with how often a client is chosen. Loss: at the lead's models, "
    "the mean\nover rounds. Imperfect: 1 for these clients. Speed: samples a second."
)
Bounds = tuple[float, float]
"""The lowest and the highest value that a measure can have."""
BOUNDS: dict[str, Bounds] = {
    "regret": UNBOUNDED,
    "loss": UNBOUNDED,
    "percentile": (0.0, 100.0),
}
"""The bounds of the measures that are shown with a confidence interval."""
CORRELATION_BOUNDS = (-1.0, 1.0)
MEASURED = {
    "loss": "loss",
    "clients": "clients",
    "seconds_select": "seconds",
    "bytes_asked": "bytes",
}
"""Columns of choices.jsonl whose means over rounds are in the table of choices, and their heads."""


class ReplayAnalysis:
    """Statistics about the methods of a replay.

    The Jaccard index of two choices is (clients in both) / (clients in any of the two).

    - `measured`: the means over rounds of the regret, the percentile and the columns `MEASURED`, by
      their heads. Regret and percentile are nan in rounds in which all random cohorts have the same
      loss, for example because a single client is available. Means are over the other rounds.
    - `num_undefined`, `num_rounds`: the number of such rounds, and of all rounds, in all seeds.
    - `preferences`: the rank correlations between how often a client is chosen and each of its
      properties, by the name of the property.
    - `distances`: 1 - the mean Jaccard index of the choices of each pair of methods, in the order
      of `scipy.spatial.distance.pdist`.
    - `chance`: the mean Jaccard index of random choices; nan if no round had available clients.
    - `order`: the positions of the methods in `methods`, that of the lowest mean regret first.
    """

    def __init__(
        self, methods: Sequence[str], rows: Sequence[Any], clients: Sequence[Mapping[str, Floats]]
    ) -> None:
        """Take the rows of choices.jsonl (`Replay.play`), in the order of seeds, then of rounds,
        then of methods, and the clients' properties.

        `clients` has for each seed the properties of the N clients by name, each [N].
        """
        num_seeds = len(clients)
        num_clients = len(clients[0]["size"])
        grid = np.array(rows, dtype=object).reshape(num_seeds, -1, len(methods))  # of rows

        def column(name: str) -> Floats:
            values = np.array([row[name] for row in rows])
            return values.reshape(grid.shape)  # [seeds, rounds, methods]

        # 1. The measures.
        best = column("best")
        spread = column("worst") - best
        spread[spread <= 0] = np.nan
        regret = mean_of_known((column("loss") - best) / spread)
        percentile = np.where(np.isnan(spread), np.nan, column("percentile"))
        self.methods = methods
        self.num_undefined = int(np.isnan(spread[..., 0]).sum())
        self.num_rounds = spread[..., 0].size
        self.measured = {"regret": regret, "percentile": mean_of_known(percentile)}
        for name, head in MEASURED.items():
            self.measured[head] = column(name).mean(1)
        mean_regrets = mean_of_known(regret.T)
        self.order = [int(method) for method in np.argsort(mean_regrets, kind="stable")]

        # 2. How often each method chooses each client, and how alike the choices of a round are.
        counts = np.zeros((num_seeds, len(methods), num_clients))
        distances = []
        random_indices = []
        for seed, round in np.ndindex(grid.shape[:2]):
            rows_of_round = grid[seed, round]
            is_chosen = np.zeros((len(methods), num_clients), np.bool_)
            for method, row in enumerate(rows_of_round):
                is_chosen[method, row["chosen"]] = True
            counts[seed] += is_chosen
            distances.append(pdist(is_chosen, "jaccard"))
            num_available = rows_of_round[0]["available"]
            if num_available:
                cohort_size = rows_of_round[0]["drawn"]
                random_indices.append(expected_jaccard(num_available, cohort_size))
        self.distances = np.mean(distances, axis=0)
        self.chance = float(np.mean(random_indices)) if random_indices else float("nan")

        # 3. Whom the methods prefer.
        self.preferences: dict[str, Floats] = {}
        for name in clients[0]:
            correlations = np.empty((num_seeds, len(methods)))
            for seed, method in np.ndindex(correlations.shape):
                correlations[seed, method] = rank_correlation(
                    counts[seed, method], clients[seed][name]
                )
            self.preferences[name] = correlations

    @property
    def names(self) -> list[str]:
        """The names of the methods, the lowest mean regret first."""
        return [self.methods[method] for method in self.order]

    def tables(self, real: Mapping[str, Sequence[float]]) -> list[Table]:
        """Return the tables of a replay, with the `verdict`.

        `real` has the final accuracies of ordinary runs by method: `{"gpfl": [0.91, 0.93]}` for two
        seeds. It lacks methods without such runs, whose accuracy is nan below.
        """
        accuracies = np.array([np.mean(real.get(name, np.nan)) for name in self.methods])
        known = np.isfinite(accuracies)
        mean_regrets = mean_of_known(self.measured["regret"].T)
        sentence = verdict(mean_regrets[known], accuracies[known])
        rounds = "."
        if self.num_undefined:
            rounds = (
                f"; regret and\npercentile without {self.num_undefined} of {self.num_rounds} "
                "rounds, in which random cohorts do not differ."
            )
        measures = self.measured | {"real accuracy": accuracies[None]}
        similarity = 1 - squareform(self.distances)
        agreement = {self.methods[method]: similarity[None, :, method] for method in self.order}
        bounds = dict.fromkeys(self.preferences, CORRELATION_BOUNDS)
        chance = f"Two random choices: {self.chance:.3f}."
        return [
            self._table("choices", "Choices", measures, f"{REGRET}{rounds}\n{sentence}", BOUNDS),
            self._table("preferences", "Whom they prefer", self.preferences, PREFERENCES, bounds),
            self._table("agreement", "Mean Jaccard index", agreement, chance, {}),
        ]

    def _table(
        self,
        name: str,
        title: str,
        columns: Mapping[str, Floats],
        note: str,
        bounds: Mapping[str, Bounds],
    ) -> Table:
        """Return a table with a row for each method, the lowest regret first.

        `columns` has arrays by the columns' names. Those with `bounds` get a confidence interval.
        """
        rows = []
        for method in self.order:
            row: list[Any] = [self.methods[method]]
            for column, values in columns.items():
                row.append(mean_over_seeds(values[:, method], bounds.get(column)))
            rows.append(row)
        frame = make_frame(["method", *columns], rows)
        return Table(name, title, frame, dict.fromkeys(columns, ".4g"), note)


def expected_jaccard(num_available: int, size: int) -> float:
    """Return the expected Jaccard index of two random cohorts of `size` clients, out of
    `num_available`."""
    common = hypergeom(num_available, size, size)  # the number n of clients in both
    return float(common.expect(lambda n: n / (2 * size - n)))


def mean_of_known(values: Floats) -> Floats:
    """Return the mean of `values` [S, R, ...] over R, without those that are nan: [S, ...].

    It is nan where all are nan.
    """
    num_known = np.isfinite(values).sum(1)
    return np.where(num_known > 0, np.nansum(values, 1) / np.maximum(num_known, 1), np.nan)


def verdict(regrets: Floats, accuracies: Floats) -> str:
    """Return a sentence on whether regret ranks methods as their real accuracy does.

    `regrets` and `accuracies` [m] are those of methods with ordinary runs. The measure is Kendall's
    tau between the ranks by regret, the lowest first, and by accuracy, the highest first. Its
    two-sided p-value is exact if there are no ties. Methods without a regret (nan) do not count.
    """
    known = np.isfinite(regrets)
    num_methods = int(known.sum())
    if num_methods < MIN_METHODS:
        need = f"{MIN_METHODS} methods with runs are needed, not {num_methods}"
        return f"Whether regret predicts real accuracy is open: {need}."
    for measure, values in (("regret", regrets), ("real accuracy", accuracies)):
        if np.ptp(values[known]) == 0:
            return (
                f"Whether regret predicts real accuracy is open: all methods have equal {measure}."
            )
    test = kendalltau(-regrets[known], accuracies[known])
    text = "is not shown to rank methods as real accuracy does"
    if test.pvalue < ALPHA and test.statistic > 0:
        text = "ranks methods as real accuracy does"
    p = f"p = {test.pvalue:.2g}"
    return f"Regret {text}: Kendall's tau {test.statistic:.2f} ({p}) over {num_methods} methods."


def rank_correlation(first: Floats, second: Floats) -> float:
    """Return Spearman's correlation over positions where both are finite.

    It is nan if there is no such position, or if one of the two is constant there.
    """
    known = np.isfinite(first) & np.isfinite(second)
    first = first[known]
    second = second[known]
    if not known.any() or np.ptp(first) == 0 or np.ptp(second) == 0:
        return float("nan")
    return float(spearmanr(first, second).statistic)


def mean_over_seeds(values: Floats, bounds: Bounds | None) -> Estimate | float | None:
    """Return the mean of `values` [S]: with its confidence interval if `bounds` are given and there
    are enough seeds.

    Seeds with nan do not count. Returns None if no seed is left.
    """
    known = tuple(map(float, values[np.isfinite(values)]))
    if bounds and len(known) >= MIN_SEEDS:
        return Estimate(known, bounds)
    return float(np.mean(known)) if known else None
