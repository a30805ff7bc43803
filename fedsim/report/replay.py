"""Tables and figures of a replay: how far selectors agree, which clients each prefers, how good their choices are."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform
from scipy.stats import hypergeom, kendalltau, spearmanr

from fedsim.report.figures import COLUMN, DPI, style
from fedsim.results.runs import Floats
from fedsim.results.statistics import MIN_SEEDS, Estimate
from fedsim.results.table import Table, number, show_estimate

MIN_METHODS = 4
"""With fewer nothing is said of how well a replay ranks methods."""
RESAMPLES = 1000
MOST_NUMBERS = 900
"""Of a heat map that are written in it."""
REGRET = (
    "Regret: (L - best) / (worst - best) of that round's random cohorts, L the validation loss of the model made of the "
    "choice, weights of its own and all. Percentile: how many of them are better. Means over rounds."
)
PREFERENCES = (
    "Spearman's rank correlation with how often a client is chosen. Loss: at the lead's models, the mean over rounds. "
    "Imperfect: 1 for these clients. Speed: samples a second."
)


@dataclass(frozen=True)
class Choices:
    """The `rows` of a replay (fedsim.running.replay) by seed, round and method; what the clients are like [N], seed by
    seed; and the final accuracies of `real` runs, by method, of those that there are of."""

    methods: Sequence[str]
    cohort_size: int
    rows: Sequence[Mapping[str, Any]]
    clients: Sequence[Mapping[str, Floats]]
    real: Mapping[str, Sequence[float]]

    def column(self, name: str) -> Floats:
        """Numbers [seeds, rounds, methods]; nan where there are none."""
        values = [row.get(name, np.nan) for row in self.rows]
        return np.array(values, np.float64).reshape(len(self.clients), -1, len(self.methods))

    @cached_property
    def regret(self) -> Floats:
        """Mean over the rounds whose cohorts differ [seeds, methods]."""
        loss, best, worst = map(self.column, ("loss", "best", "worst"))
        return _mean(np.divide(loss - best, worst - best, out=np.full_like(loss, np.nan), where=worst > best), 1)

    @cached_property
    def agreement(self) -> Floats:
        """Mean Jaccard index of two methods' choices, over rounds in which one of them chose [methods, methods]."""
        num, shared = len(self.methods), []
        for start in range(0, len(self.rows), num):
            chosen = [row["chosen"] for row in self.rows[start : start + num]]
            ids = np.unique(np.concatenate(chosen))
            is_in = np.array([np.isin(ids, own) for own in chosen], np.float64)
            both, sizes = is_in @ is_in.T, is_in.sum(1)
            union = sizes[:, None] + sizes - both
            shared.append(np.divide(both, union, out=np.full_like(both, np.nan), where=union > 0))
        return _mean(np.array(shared), 0)

    @cached_property
    def chance(self) -> float:
        """The expected Jaccard index of two cohorts drawn at random."""
        found = []
        for there in self.column("available")[..., 0].astype(int).flat:
            size = min(self.cohort_size, there)
            common = np.arange(size + 1)
            found.append(hypergeom(there, size, size).pmf(common) @ (common / np.maximum(2 * size - common, 1)))
        return float(np.mean(found))

    @cached_property
    def preferences(self) -> dict[str, Floats]:
        """The rank correlation of how often each client was chosen with what it is like, by name [seeds, methods]."""
        counts = np.zeros((len(self.clients), len(self.methods), len(self.clients[0]["size"])))
        for place, row in enumerate(self.rows):
            counts[place * len(self.clients) // len(self.rows), place % len(self.methods)][row["chosen"]] += 1
        of_seeds = list(zip(counts, self.clients, strict=True))
        return {
            name: np.array([[rank_correlation(one, own[name]) for one in each] for each, own in of_seeds])
            for name in self.clients[0]
        }

    @cached_property
    def prediction(self) -> tuple[float, float, float] | None:
        """Kendall's tau between the ranks of methods by regret, the least first, and by real accuracy, the highest
        first, with its 95 % interval by the percentile bootstrap over methods; None with too few of them."""
        regrets = zip(self.methods, _mean(self.regret, 0), strict=True)
        pairs = np.array([(-regret, np.mean(self.real[name])) for name, regret in regrets if name in self.real])
        if len(pairs) < MIN_METHODS or not np.isfinite(pairs).all():
            return None
        draws = np.random.default_rng(0).integers(len(pairs), size=(RESAMPLES, len(pairs)))
        taus = [kendalltau(*pairs[draw].T).statistic for draw in draws]
        low, high = np.nanquantile(taus, [0.025, 0.975])
        return float(kendalltau(*pairs.T).statistic), float(low), float(high)

    @property
    def verdict(self) -> str:
        """A sentence on the `prediction`."""
        if self.prediction is None:
            told = (
                f"there are finished runs of {len(self.real)} of these methods, and regrets of {MIN_METHODS} are needed"
            )
            return f"How well the regret predicts real accuracy is not known: {told}."
        tau, low, high = self.prediction
        told = f"Kendall's tau {tau:.2f} [{low:.2f}, {high:.2f}] over {len(self.real)} methods"
        does = "ranks these methods as real accuracy does, beyond chance" if low > 0 else "does not predict"
        return f"The regret {does}{'' if low > 0 else ' how real accuracy ranks these methods'}: {told}."

    @cached_property
    def order(self) -> list[int]:
        """Methods by regret, the least first."""
        return [int(at) for at in np.argsort(np.nan_to_num(_mean(self.regret, 0), nan=np.inf), kind="stable")]

    def tables(self) -> list[Table]:
        names = [self.methods[at] for at in self.order]
        columns = {"regret": self.regret}
        for title in ("percentile", "loss", "clients", "seconds_select", "bytes_asked"):
            columns[title.replace("_", " ")] = _mean(self.column(title), 1)
        real = [number(np.mean(self.real[name]), ".4f") if name in self.real else "-" for name in names]
        choices = [[*row, one] for row, one in zip(self._rows(columns), real, strict=True)]
        agree = [
            [self.methods[at], *(number(one, ".3f") for one in self.agreement[at, self.order])] for at in self.order
        ]
        told = f"Two random choices: {self.chance:.3f}."
        return [
            Table("methods", "Choices", ["method", *columns, "real accuracy"], choices, f"{REGRET}\n{self.verdict}"),
            Table(
                *("preferences", "Whom they prefer"),
                ["method", *self.preferences],
                self._rows(self.preferences),
                PREFERENCES,
            ),
            Table("agreement", "Mean Jaccard index of two choices", ["method", *names], agree, told),
        ]

    def _rows(self, columns: Mapping[str, Floats]) -> list[list[str]]:
        return [[self.methods[at], *(_shown(values[:, at]) for values in columns.values())] for at in self.order]

    def pictures(self) -> dict[str, bytes]:
        """PNGs by the names of files."""
        names = [self.methods[at] for at in self.order]
        with style():
            prefers = np.array([_mean(values, 0)[self.order] for values in self.preferences.values()]).T
            told = "rank correlation with how often a client is chosen"
            figures = {"preferences": heat_map(prefers, names, list(self.preferences), told, (-1, 1), "RdBu_r")}
            figures["agreement"] = self._draw_agreement()
            if np.isfinite(self.regret).any():
                figures["regret"] = self._draw_regret(names)
            if self.prediction is not None:
                figures["prediction"] = self._draw_prediction()
            return {f"{name}.png": _png(figure) for name, figure in figures.items()}

    def _draw_agreement(self) -> Figure:
        """Rows and columns in the order of average linkage by 1 - Jaccard."""
        apart = 1 - self.agreement
        several = len(apart) > 1
        order = leaves_list(linkage(squareform(apart, checks=False), "average")) if several else np.zeros(1, int)
        names = [self.methods[at] for at in order]
        most = float(self.agreement[~np.eye(len(apart), dtype=bool)].max(initial=2 * self.chance))
        told = f"mean Jaccard index (line: two random choices, {self.chance:.3f})"
        figure = heat_map(self.agreement[np.ix_(order, order)], names, names, told, (0, most), "viridis")
        figure.axes[1].axhline(self.chance, color="red")
        return figure

    def _draw_regret(self, names: Sequence[str]) -> Figure:
        figure = Figure(figsize=(COLUMN, 0.8 + 0.17 * len(names)))
        ax, percentiles = figure.subplots(), _mean(self.column("percentile"), 1)
        for row, (name, at) in enumerate(zip(names, self.order, strict=True)):
            values = Estimate(tuple(self.regret[:, at]))
            reach = [[values.half_width]] if values.num >= MIN_SEEDS else None
            ax.errorbar(values.mean, row, xerr=reach, marker="o", color="C0", capsize=2)
            told = f"{np.mean(percentiles[:, at]):.0f} %"
            ax.annotate(told, (1.02, row), xycoords=("axes fraction", "data"), va="center")
        ax.set_yticks(range(len(names)), names)
        ax.set(ylim=(len(names) - 0.5, -0.5), xlabel="regret: 0 best, 1 worst random cohort; right: percentile")
        ax.grid(axis="x")
        return figure

    def _draw_prediction(self) -> Figure:
        figure = Figure(figsize=(COLUMN, COLUMN))
        ax, regrets = figure.subplots(), dict(zip(self.methods, _mean(self.regret, 0), strict=True))
        for name, accuracies in self.real.items():
            ax.plot(regrets[name], np.mean(accuracies), "o", color="C0")
            ax.annotate(name, (regrets[name], np.mean(accuracies)), xytext=(3, 3), textcoords="offset points")
        tau, low, high = self.prediction or (np.nan,) * 3
        told = f"Kendall's tau {tau:.2f} [{low:.2f}, {high:.2f}]"
        ax.set(xlabel="mean regret in the replay", ylabel="final accuracy of real runs", title=told)
        return figure


def rank_correlation(one: Floats, other: Floats) -> float:
    """Spearman's, over those of which both are known; nan where one of them is the same for all."""
    known = np.isfinite(one) & np.isfinite(other)
    if not known.any() or not np.ptp(one[known]) or not np.ptp(other[known]):
        return float("nan")
    return float(spearmanr(one[known], other[known]).statistic)


def heat_map(
    values: Floats, rows: Sequence[str], columns: Sequence[str], label: str, ends: tuple[float, float], cmap: str
) -> Figure:
    """`values` [rows, columns] as colours from one of the `ends` to the other, and as numbers where there is room."""
    figure = Figure(figsize=(1.9 + 0.3 * len(columns), 1.3 + 0.17 * max(len(rows), 8)))
    ax = figure.subplots()
    image = ax.imshow(values, cmap, vmin=ends[0], vmax=ends[1], aspect="auto")
    for row, column in np.ndindex(values.shape if values.size <= MOST_NUMBERS else (0, 0)):
        shade = np.mean(image.to_rgba(values[row, column])[:3])
        told = f"{values[row, column]:.2f}".replace("nan", "-")
        ax.text(column, row, told, ha="center", va="center", fontsize=5, color="black" if shade > 0.5 else "white")
    ax.set_xticks(range(len(columns)), columns, rotation=90)
    ax.set_yticks(range(len(rows)), rows)
    figure.colorbar(image, ax=ax, label=label)
    return figure


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.set_dpi(DPI)
    FigureCanvasAgg(figure).print_png(file)
    return file.getvalue()


def _mean(values: Floats, axis: int) -> Floats:
    """Of those that are not nan; nan where all are."""
    known = np.isfinite(values)
    total, count = np.where(known, values, 0.0).sum(axis), known.sum(axis)
    return np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)


def _shown(values: Floats) -> str:
    """The mean over seeds, with its interval where there are enough."""
    known = values[np.isfinite(values)]
    if len(known) >= MIN_SEEDS:
        return show_estimate(Estimate(tuple(known)))
    return number(float(known.mean()), ".4g") if len(known) else "-"
