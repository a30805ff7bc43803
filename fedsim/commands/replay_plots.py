"""Draw the figures of a replay: how alike the methods' choices are, which clients they prefer, and
how good their choices are."""

from collections.abc import Sequence

import numpy as np
from matplotlib.colorbar import Colorbar
from matplotlib.figure import Figure
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform

from fedsim.commands.replay_analysis import (
    CORRELATION_BOUNDS,
    ReplayAnalysis,
    mean_of_known,
    mean_over_seeds,
)
from fedsim.core.arrays import Floats
from fedsim.report.drawing import Plot, style
from fedsim.report.layout import COLUMN
from fedsim.results.statistics import UNBOUNDED, Estimate

WIDTH_OF_METHOD = 0.1
"""Inches by which a figure is wider than a column for each method."""
HEIGHT = 1.6
"""Height of a figure without its methods, in inches."""
HEIGHT_OF_METHOD = 0.17
"""Inches that each method adds to the height."""


def plots(analysis: ReplayAnalysis) -> list[Plot]:
    """Return the plots of agreement, preferences and regret."""
    num_methods = len(analysis.methods)
    size = (COLUMN + WIDTH_OF_METHOD * num_methods, HEIGHT + HEIGHT_OF_METHOD * num_methods)
    drawings = {
        "agreement": _draw_agreement,
        "preferences": _draw_preferences,
        "regret": _draw_regret,
    }
    finished = []
    with style():
        for name, draw in drawings.items():
            figure = Figure(figsize=size)
            draw(figure, analysis)
            finished.append(Plot(name, "", figure))
    return finished


def _draw_agreement(figure: Figure, analysis: ReplayAnalysis) -> None:
    """Draw the mean Jaccard index of each pair of methods.

    The order is that of average linkage, so that methods with like choices are neighbours.
    """
    order = [0]
    if len(analysis.methods) > 1:
        order = list(leaves_list(linkage(analysis.distances, "average")))
    names = [analysis.methods[method] for method in order]
    similarity = 1 - squareform(analysis.distances)[np.ix_(order, order)]
    # Colours reach from 0 to the most alike pair, or to twice the index by chance.
    largest = max([2 * np.nan_to_num(analysis.chance), *(1 - analysis.distances)])
    bar = _heat_map(figure, similarity, names, names, "viridis", (0, min(largest, 1)))
    bar.set_label("mean Jaccard index (red: by chance)")
    bar.ax.axhline(analysis.chance, color="red")


def _draw_preferences(figure: Figure, analysis: ReplayAnalysis) -> None:
    """Draw the mean rank correlation of each method with each property of the clients."""
    correlations = []
    for by_seed in analysis.preferences.values():  # [seeds, methods]
        correlations.append(mean_of_known(by_seed.T)[analysis.order])
    preferences = np.array(correlations).T  # [methods, properties]
    properties = list(analysis.preferences)
    bar = _heat_map(figure, preferences, analysis.names, properties, "RdBu_r", CORRELATION_BOUNDS)
    bar.set_label("rank correlation")


def _draw_regret(figure: Figure, analysis: ReplayAnalysis) -> None:
    """Draw the mean regret of each method over seeds, with its interval if there is one."""
    ax = figure.subplots()
    for place, method in enumerate(analysis.order):
        regret = mean_over_seeds(analysis.measured["regret"][:, method], UNBOUNDED)
        if isinstance(regret, Estimate):
            ax.errorbar(regret.mean, place, xerr=regret.half_width, fmt="C0o", capsize=2)
        elif regret is not None:
            ax.plot(regret, place, "C0o")
    num_methods = len(analysis.order)
    ax.set_yticks(range(num_methods), analysis.names)
    ax.set(ylim=(num_methods - 0.5, -0.5), xlabel="regret (random cohorts: best 0, worst 1)")


def _heat_map(
    figure: Figure,
    values: Floats,
    rows: Sequence[str],
    columns: Sequence[str],
    colours: str,
    limits: tuple[float, float],
) -> Colorbar:
    """Draw `values` [rows, columns] with the names of rows and columns. Return the bar of colours.

    `colours` is matplotlib's name of a map of colours, whose ends are at the `limits`.
    """
    ax = figure.subplots()
    image = ax.imshow(values, aspect="auto", cmap=colours, clim=limits)
    ax.set_yticks(range(len(rows)), rows)
    ax.set_xticks(range(len(columns)), columns, rotation=90)
    return figure.colorbar(image, ax=ax)
