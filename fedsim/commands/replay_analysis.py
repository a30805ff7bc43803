"""Analyse a replay: how good the methods' choices are, which clients they prefer, and how alike
they are.

Arrays are [S, M] for S seeds and M methods unless a comment says otherwise.
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
"""Resamples of the bootstrap over methods."""
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
BOUNDS: dict[str, Bounds] = {
    "regret": UNBOUNDED,
    "loss": UNBOUNDED,
    "percentile": (0.0, 100.0),
}
"""The bounds of the measures that get an interval."""
MEASURED = ("loss", "percentile", "clients", "seconds_select", "bytes_asked")


class Choices:
    """The results of a replay about its methods.

    `measured` and `preferences` are arrays by name. `distances` are 1 - the mean Jaccard index of
    the choices of each pair of methods, in the order of `pdist`. `chance` is that index of random
    choices. `order` has the methods' numbers by their mean regret.
    """

    def __init__(
        self, methods: Sequence[str], rows: Sequence[Any], clients: Sequence[Mapping[str, Floats]]
    ) -> None:
        """Take the rows of choices.jsonl by seed, round and method, and the clients' properties.

        `clients` has for each seed the properties of the N clients by name, each [N].
        """
        num_seeds, num_methods = len(clients), len(methods)
        num_clients = len(clients[0]["size"])

        def column(name: str) -> Floats:
            values = np.array([row[name] for row in rows])
            return values.reshape(num_seeds, -1, num_methods)  # [seeds, rounds, methods]

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

        counts = np.zeros((num_seeds, num_methods, num_clients))
        rows_of_seed = len(rows) // num_seeds
        distances = []
        indices = []
        for start in range(0, len(rows), num_methods):
            is_chosen = np.zeros((num_methods, num_clients), np.bool_)
            for method in range(num_methods):
                is_chosen[method, rows[start + method]["chosen"]] = True
            counts[start // rows_of_seed] += is_chosen
            distances.append(pdist(is_chosen, "jaccard"))
            if rows[start]["drawn"]:
                indices.append(expected_jaccard(rows[start]["available"], rows[start]["drawn"]))
        self.distances = np.mean(distances, axis=0)
        self.chance = float(np.mean(indices))

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

        `real` has the final accuracies of ordinary runs by method, of the methods that have some.
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
        rows = []
        for method in self.order:
            cells = [shown(values[:, method], bounds.get(key)) for key, values in columns.items()]
            rows.append([self.methods[method], *cells])
        header = [key.split("_")[0] for key in columns]
        frame = make_frame(["method", *header], rows)
        return Table(name, title, frame, dict.fromkeys(header, ".4g"), note)

    def plots(self) -> list[Any]:
        """Return the plots (`fedsim.report.figures.Plot`) of agreement, preferences and regret.

        In the plot of agreement, methods are in the order of average linkage.
        """
        from matplotlib.figure import Figure

        from fedsim.report.figures import COLUMN, Plot, style

        names = [self.methods[method] for method in self.order]
        by_similarity = [0]
        if len(self.methods) > 1:
            by_similarity = list(leaves_list(linkage(self.distances, "average")))
        similar_names = [self.methods[method] for method in by_similarity]
        similarity = 1 - squareform(self.distances)[np.ix_(by_similarity, by_similarity)]
        largest = max([2 * self.chance, *(1 - self.distances)])
        preferences = np.array([v.mean(0)[self.order] for v in self.preferences.values()]).T
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
    """Draw `values` with the names of their rows and columns; return the bar of colours."""
    ax = figure.subplots()
    image = ax.imshow(values, aspect="auto")
    ax.set_yticks(range(len(rows)), rows)
    ax.set_xticks(range(len(columns)), columns, rotation=90)
    return figure.colorbar(image, ax=ax)


def expected_jaccard(num_available: int, size: int) -> float:
    """Return the expected Jaccard index of two random cohorts of `size` available clients."""
    common = hypergeom(num_available, size, size)
    return float(common.expect(lambda n: n / (2 * size - n)))


def verdict(regrets: Floats, accuracies: Floats) -> str:
    """Return a sentence on whether regret ranks methods as their real accuracy does.

    The measure is Kendall's tau between the ranks by regret, the lowest first, and by accuracy, the
    highest first. Its 95 % interval is by the percentile bootstrap over methods.
    """
    num = len(regrets)
    if num < MIN_METHODS:
        need = f"{MIN_METHODS} methods with runs are needed, not {num}"
        return f"Whether regret predicts real accuracy is open: {need}."
    draws = np.random.default_rng(0).integers(num, size=(RESAMPLES, num))
    tau = kendalltau(-regrets, accuracies).statistic
    taus = [kendalltau(-regrets[draw], accuracies[draw]).statistic for draw in draws]
    low, high = np.nanquantile(taus, [0.025, 0.975])
    text = "does not predict the ranks by real accuracy"
    if low > 0:
        text = "ranks methods as real accuracy does"
    return f"Regret {text}: Kendall's tau {tau:.2f} [{low:.2f}, {high:.2f}] over {num} methods."


def rank_correlation(first: Floats, second: Floats) -> float:
    """Return Spearman's correlation over what is known of both; nan if one of them is constant."""
    known = np.isfinite(first) & np.isfinite(second)
    first, second = first[known], second[known]
    if not known.any() or np.ptp(first) == 0 or np.ptp(second) == 0:
        return float("nan")
    return float(spearmanr(first, second).statistic)


def shown(values: Floats, bounds: Bounds | None) -> Estimate | float | None:
    """Return the mean over seeds, with its interval if there are bounds and enough seeds."""
    known = tuple(map(float, values[np.isfinite(values)]))
    if bounds and len(known) >= MIN_SEEDS:
        return Estimate(known, bounds)
    return float(np.mean(known)) if known else None
