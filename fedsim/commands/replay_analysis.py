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
from fedsim.results.statistics import MIN_SEEDS, UNBOUNDED, Estimate

MIN_METHODS = 4
"""Minimum number of methods with ordinary runs for a verdict."""
RESAMPLES = 1000
"""Number of resamples of the bootstrap over methods."""
REGRET = (
    "Regret: (L - best) / (worst - best) of a round's random cohorts, L the validation loss of the "
    "model that the\nchoice makes, with its own weights. Percentile: how many of them are better. "
    "Seconds of selecting, and bytes of\nquestions. Means over rounds."
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
MEASURED = ("loss", "percentile", "clients", "seconds_select", "bytes_asked")
"""Columns of choices.jsonl whose means over rounds are in the table of choices."""


class Choices:
    """The results of a replay about its methods.

    The Jaccard index of two choices is (clients in both) / (clients in any of the two).

    - `measured`: the means over rounds of the regret and of the columns `MEASURED`, by name.
    - `preferences`: the rank correlations between how often a client is chosen and each of its
      properties, by the name of the property.
    - `distances`: 1 - the mean Jaccard index of the choices of each pair of methods, in the order
      of `scipy.spatial.distance.pdist`.
    - `chance`: the mean Jaccard index of random choices.
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

        # 1. The measures. The regret is 0 if all random cohorts of a round have the same loss.
        best = column("best")
        spread = column("worst") - best
        regret = np.divide(
            column("loss") - best, spread, out=np.zeros(spread.shape), where=spread > 0
        )
        self.methods = methods
        self.measured = {"regret": regret.mean(1)}
        for name in MEASURED:
            self.measured[name] = column(name).mean(1)
        self.order = [int(method) for method in np.argsort(regret.mean((0, 1)), kind="stable")]

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
        self.chance = float(np.mean(random_indices))

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
        sentence = verdict(self.measured["regret"].mean(0)[known], accuracies[known])
        measures = self.measured | {"real accuracy": accuracies[None]}
        similarity = 1 - squareform(self.distances)
        agreement = {self.methods[method]: similarity[None, :, method] for method in self.order}
        signs = dict.fromkeys(self.preferences, (-1.0, 1.0))
        chance = f"Two random choices: {self.chance:.3f}."
        return [
            self._table("choices", "Choices", measures, f"{REGRET}\n{sentence}", BOUNDS),
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
        header = [key.split("_")[0] for key in columns]  # "seconds_select" is headed "seconds"
        frame = make_frame(["method", *header], rows)
        return Table(name, title, frame, dict.fromkeys(header, ".4g"), note)

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
        largest = max([2 * self.chance, *(1 - self.distances)])
        correlations = [array.mean(0)[self.order] for array in self.preferences.values()]
        preferences = np.array(correlations).T  # [methods, properties]
        regrets = [Estimate(tuple(values)) for values in self.measured["regret"][:, self.order].T]
        has_intervals = regrets[0].num >= MIN_SEEDS

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
            ax.errorbar(
                [regret.mean for regret in regrets],
                range(len(regrets)),
                xerr=[regret.half_width for regret in regrets] if has_intervals else None,
                fmt="o",
                capsize=2,
            )
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


def verdict(regrets: Floats, accuracies: Floats) -> str:
    """Return a sentence on whether regret ranks methods as their real accuracy does.

    `regrets` and `accuracies` [m] are those of methods with ordinary runs. The measure is Kendall's
    tau between the ranks by regret, the lowest first, and by accuracy, the highest first. Its 95 %
    interval is by the percentile bootstrap over methods. Regret is said to rank methods if the
    interval lies above 0.
    """
    num_methods = len(regrets)
    if num_methods < MIN_METHODS:
        need = f"{MIN_METHODS} methods with runs are needed, not {num_methods}"
        return f"Whether regret predicts real accuracy is open: {need}."
    rng = np.random.default_rng(0)
    resamples = rng.integers(num_methods, size=(RESAMPLES, num_methods))
    tau = kendalltau(-regrets, accuracies).statistic
    taus = []
    for methods in resamples:
        taus.append(kendalltau(-regrets[methods], accuracies[methods]).statistic)
    # A resample of one method only has no tau (nan).
    low, high = np.nanquantile(taus, [0.025, 0.975])
    text = "does not predict the ranks by real accuracy"
    if low > 0:
        text = "ranks methods as real accuracy does"
    interval = f"[{low:.2f}, {high:.2f}]"
    return f"Regret {text}: Kendall's tau {tau:.2f} {interval} over {num_methods} methods."


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
