"""Analyse a replay: how good the methods' choices are, which clients they prefer, and how alike
they are.

In a replay (`fedsim.running.replay`), several methods choose a cohort of clients in every round on
the models of one run, the lead. `fedsim replay` makes a `Choices` after each seed, for its tables
and plots. Arrays are [S, M] for S seeds and M methods unless a comment says otherwise.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.cluster.hierarchy import leaves_list, linkage
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
MEASURED = {
    "loss": "loss",
    "clients": "clients",
    "seconds_select": "seconds",
    "bytes_asked": "bytes",
}
"""Columns of choices.jsonl whose means over rounds are in the table of choices, and their heads."""


class Choices:
    """The results of a replay about its methods.

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
    - `order`: the numbers of the methods, the lowest mean regret first.
    """

    def __init__(
        self, methods: Sequence[str], rows: Sequence[Any], clients: Sequence[Mapping[str, Floats]]
    ) -> None:
        """Take the rows of choices.jsonl by seed, round and method, and the clients' properties.

        `clients` has for each seed the properties of the N clients by name, each [N].
        """
        num_seeds = len(clients)
        num_methods = len(methods)
        num_clients = len(clients[0]["size"])

        def column(name: str) -> Floats:
            values = np.array([row[name] for row in rows])
            return values.reshape(num_seeds, -1, num_methods)  # [seeds, rounds, methods]

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
        #    The rows of a round are one for each method.
        counts = np.zeros((num_seeds, num_methods, num_clients))
        rows_of_seed = len(rows) // num_seeds
        distances = []
        random_indices = []
        for start in range(0, len(rows), num_methods):
            is_chosen = np.zeros((num_methods, num_clients), np.bool_)
            for method in range(num_methods):
                is_chosen[method, rows[start + method]["chosen"]] = True
            counts[start // rows_of_seed] += is_chosen
            distances.append(pdist(is_chosen, "jaccard"))
            size = rows[start]["drawn"]  # of random cohorts; 0 in a round without clients
            if size:
                random_indices.append(expected_jaccard(rows[start]["available"], size))
        self.distances = np.mean(distances, axis=0)
        self.chance = float(np.mean(random_indices)) if random_indices else float("nan")

        # 3. Whom the methods prefer.
        self.preferences: dict[str, Floats] = {}
        for name in clients[0]:
            correlations = np.empty((num_seeds, num_methods))
            for seed, method in np.ndindex(correlations.shape):
                correlations[seed, method] = rank_correlation(
                    counts[seed, method], clients[seed][name]
                )
            self.preferences[name] = correlations

    def tables(self, real: Mapping[str, Sequence[float]]) -> list[Table]:
        """Return the tables of a replay, with the `verdict`.

        `real` has the final accuracies of ordinary runs by method. A method without such runs is
        missing there, and has nan below.
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
        signs = dict.fromkeys(self.preferences, (-1.0, 1.0))
        chance = f"Two random choices: {self.chance:.3f}."
        return [
            self._table("choices", "Choices", measures, f"{REGRET}{rounds}\n{sentence}", BOUNDS),
            self._table("preferences", "Whom they prefer", self.preferences, PREFERENCES, signs),
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

        `columns` are arrays by name. Those with `bounds` get a confidence interval.
        """
        rows = []
        for method in self.order:
            cells = [shown(values[:, method], bounds.get(key)) for key, values in columns.items()]
            rows.append([self.methods[method], *cells])
        frame = make_frame(["method", *columns], rows)
        return Table(name, title, frame, dict.fromkeys(columns, ".4g"), note)

    def plots(self) -> list[Any]:
        """Return the plots (`fedsim.report.drawing.Plot`) of agreement, preferences and regret.

        In the plot of agreement, methods are in the order of average linkage.
        """
        from matplotlib.figure import Figure

        from fedsim.report.drawing import Plot, style
        from fedsim.report.layout import COLUMN

        names = [self.methods[method] for method in self.order]
        by_similarity = [0]
        if len(self.methods) > 1:
            by_similarity = list(leaves_list(linkage(self.distances, "average")))
        similar_names = [self.methods[method] for method in by_similarity]
        similarity = 1 - squareform(self.distances)[np.ix_(by_similarity, by_similarity)]
        largest = max([2 * np.nan_to_num(self.chance), *(1 - self.distances)])
        correlations = [array.mean(0)[self.order] for array in self.preferences.values()]
        preferences = np.array(correlations).T  # [methods, properties]
        regrets = [shown(values, UNBOUNDED) for values in self.measured["regret"][:, self.order].T]

        with style():
            size = (COLUMN + 0.1 * len(names), 1.6 + 0.17 * len(names))
            figures = {
                name: Figure(figsize=size) for name in ("agreement", "preferences", "regret")
            }
            bar = _heat_map(figures["agreement"], similarity, similar_names, similar_names)
            bar.mappable.set(cmap="viridis", clim=(0, largest))
            bar.set_label("mean Jaccard index (red: by chance)")
            bar.ax.axhline(self.chance, color="red")
            bar = _heat_map(figures["preferences"], preferences, names, list(self.preferences))
            bar.mappable.set(cmap="RdBu_r", clim=(-1, 1))
            bar.set_label("rank correlation")
            ax = figures["regret"].subplots()
            for place, regret in enumerate(regrets):
                if isinstance(regret, Estimate):
                    ax.errorbar(regret.mean, place, xerr=regret.half_width, fmt="C0o", capsize=2)
                elif regret is not None:
                    ax.plot(regret, place, "C0o")
            ax.set_yticks(range(len(names)), names)
            ax.set(ylim=(len(names) - 0.5, -0.5), xlabel="regret (0 best, 1 worst random cohort)")
        return [Plot(name, "", figure) for name, figure in figures.items()]


def _heat_map(figure: Any, values: Floats, rows: Sequence[str], columns: Sequence[str]) -> Any:
    """Plot `values` with the names of their rows and columns. Return the bar of colours."""
    ax = figure.subplots()
    image = ax.imshow(values, aspect="auto")
    ax.set_yticks(range(len(rows)), rows)
    ax.set_xticks(range(len(columns)), columns, rotation=90)
    return figure.colorbar(image, ax=ax)


def expected_jaccard(num_available: int, size: int) -> float:
    """Return the expected Jaccard index of two random cohorts of `size` available clients."""
    common = hypergeom(num_available, size, size)  # the number n of clients in both
    return float(common.expect(lambda n: n / (2 * size - n)))


def mean_of_known(values: Floats) -> Floats:
    """Return the mean over the second axis without nan [S, ...] of `values` [S, R, ...]; nan where
    all are nan."""
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


def shown(values: Floats, bounds: Bounds | None) -> Estimate | float | None:
    """Return the mean over seeds, with its interval if there are bounds and enough seeds.

    Seeds with nan do not count. Returns None if no seed is left.
    """
    known = tuple(map(float, values[np.isfinite(values)]))
    if bounds and len(known) >= MIN_SEEDS:
        return Estimate(known, bounds)
    return float(np.mean(known)) if known else None
