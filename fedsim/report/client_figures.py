"""Figures of clients: their accuracies, and the labels that they hold."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from fedsim.core.arrays import Floats, Ints
from fedsim.report.drawing import CAPTIONS, Plot
from fedsim.report.layout import (
    MARKS,
    MAX_RANGES,
    Lines,
    fit_text,
    line_axes,
    make_axes,
    num_columns_of,
    text_scale,
)
from fedsim.report.looks import Look
from fedsim.results.frames import by, by_setting, first_run
from fedsim.results.labels import show_labels
from fedsim.results.runs import Run

MAX_LABELS = 20
"""A map of labels with more labels sorts them by frequency, and has a logarithmic scale of
colours."""
MAX_NUMBERED = 10
"""Maximum number of labels of which each has its number next to the map."""
LABELS_HEIGHT = 2.7
"""Height in inches of a map of labels with the bars above it. `MAX_NUMBERED` numbers have room."""
BARS_TO_MAP = (2, 5)
"""Ratio of the height of these bars to that of the map."""
BESIDE_LABELS = 1.0
"""Width in inches of the ticks, the label and the bar of colours next to a map of labels."""
DIVISION = ("cell", "dataset", "partition", "num_clients", "server", "local.holdout_fraction")
"""Config groups and config keys that define how the data are divided."""


def clients_plot(panels: Mapping[str, Lines], looks: Mapping[str, Look]) -> Plot | None:
    """Return a figure with a line for each method: its accuracies on the clients, from the worst
    client to the best.

    Return None if no run measured the accuracy on its clients.
    """
    accuracies: dict[str, dict[str, Floats]] = {}  # by setting and method, [runs, clients]
    for title, lines in panels.items():
        for method, runs in lines.items():
            values = sorted_accuracies(runs)
            if values is not None:
                accuracies.setdefault(title, {})[method] = values
    if not accuracies:
        return None
    figure, all_axes = line_axes(list(accuracies), looks, "clients, sorted by accuracy [%]")
    data = []
    for (title, by_method), axes in zip(accuracies.items(), all_axes, strict=True):
        for number, method in enumerate(panels[title]):
            if method not in by_method:
                continue
            values = by_method[method]
            num_clients = values.shape[1]
            percent = 100 * (np.arange(num_clients) + 0.5) / num_clients
            mean, low, high = values.mean(0), values.min(0), values.max(0)
            look = looks[method]
            step = max(1, num_clients // MARKS)
            first = number * step // len(panels[title])  # so that markers do not cover each other
            axes.plot(percent, mean, markevery=(first, step), **look)
            if len(values) > 1 and len(by_method) <= MAX_RANGES:
                axes.fill_between(percent, low, high, color=look["color"], alpha=0.12, linewidth=0)
            data.append(
                {
                    "setting": title,
                    "method": method,
                    "percent_of_clients": percent,
                    "accuracy": mean,
                    "lowest": low,
                    "highest": high,
                }
            )
        axes.set_ylabel("accuracy on the client")
    return Plot("clients", CAPTIONS["clients"], figure, data)


def sorted_accuracies(runs: Sequence[Run]) -> Floats | None:
    """Return the sorted accuracies on the clients of each run, [runs, clients]; None if no run has
    them.

    Clients without an accuracy do not count. If runs have different numbers of clients that count,
    all runs are interpolated to the smallest of these numbers.
    """
    by_run = []
    for run in runs:
        if run.client_accuracies is not None:
            accuracies = run.client_accuracies[np.isfinite(run.client_accuracies)]
            if len(accuracies):
                by_run.append(np.sort(accuracies))
    if not by_run:
        return None
    ranks = _ranks(min(map(len, by_run)))
    return np.stack([np.interp(ranks, _ranks(len(values)), values) for values in by_run])


def _ranks(num: int) -> Floats:
    """Return the relative ranks of `num` sorted clients, between 0 and 1."""
    return (np.arange(num) + 0.5) / num


def partitions_plot(runs: pd.DataFrame) -> Plot | None:
    """Return a figure of how the data are divided among clients, with a panel for each division.

    It shows the divisions at the first seed of a group. Return None if no run saved its division.
    """
    divisions: dict[str, Ints] = {}
    for rows in by_setting(runs).values():
        for members in by(rows, "group").values():
            histograms = first_run(members).histograms
            if histograms is not None:
                labels = {}
                for key, text in members["labels"].iloc[0].items():
                    if key in DIVISION or key.partition(".")[0] in DIVISION:
                        labels[key] = text
                divisions.setdefault(show_labels(labels), histograms)
    return labels_plot(divisions) if divisions else None


def labels_plot(divisions: Mapping[str, Ints]) -> Plot:
    """Return a figure of who holds which labels, with a map for each division.

    `divisions` has the training samples of each client by label, [N, C], by the title of the map.
    Bars above the map show all samples of a client. Of more than `MAX_LABELS` labels, the most
    frequent are at the top, and the scale of colours is logarithmic: few labels and clients have
    most samples of a text.
    """
    figure, panels = make_axes(len(divisions), LABELS_HEIGHT)
    data = []
    for (title, histograms), panel in zip(divisions.items(), panels, strict=True):
        width = figure.get_figwidth() / num_columns_of(panel) - text_scale() * BESIDE_LABELS
        map_axes, bar_axes = _split(figure, panel)
        counts = _sorted_counts(histograms)
        _draw_map(figure, map_axes, counts)
        map_axes.set_xlabel(fit_text("clients, sorted by their most frequent label", width))
        edges = np.arange(len(counts) + 1) - 0.5
        bar_axes.stairs(counts.sum(1), edges, fill=True, color="grey")
        bar_axes.tick_params(axis="x", labelbottom=False, length=0)
        bar_axes.set(title=fit_text(title, width), ylabel="samples")
        clients, labels = np.nonzero(histograms)
        samples = histograms[clients, labels]
        data.append({"division": title, "client": clients, "label": labels, "samples": samples})
    return Plot("partitions", CAPTIONS["partitions"], figure, data)


def _split(figure: Figure, panel: Axes) -> tuple[Axes, Axes]:
    """Replace a panel of `make_axes` by a map and bars above it, and return both."""
    spec = panel.get_subplotspec()
    assert spec is not None  # `make_axes` has placed it in a grid
    panel.remove()
    grid = spec.subgridspec(2, 1, height_ratios=BARS_TO_MAP, hspace=0)
    map_axes = figure.add_subplot(grid[1])
    return map_axes, figure.add_subplot(grid[0], sharex=map_axes)


def _sorted_counts(histograms: Ints) -> Ints:
    """Return the samples of each client by label, [N, C], in the order in which a map shows them.

    Clients are sorted by their most frequent label, and by their number of its samples. More than
    `MAX_LABELS` labels are sorted by their number of samples.
    """
    counts = histograms
    if counts.shape[1] > MAX_LABELS:
        labels = np.argsort(-counts.sum(0), kind="stable")
        counts = counts[:, labels]
    clients = np.lexsort((-counts.max(1), counts.argmax(1)))  # the last key counts first
    return counts[clients]


def _draw_map(figure: Figure, axes: Axes, counts: Ints) -> None:
    """Draw a map of the samples of each client by label, [N, C], and its bar of colours."""
    num_labels = counts.shape[1]
    has_many = num_labels > MAX_LABELS
    norm = (LogNorm if has_many else Normalize)(1, max(2, counts.max()))
    held = np.where(counts > 0, counts, np.nan).T  # cells without samples stay empty
    image = axes.imshow(held, norm=norm, aspect="auto", interpolation="none", rasterized=True)
    scale = " (log scale)" if has_many else ""
    bar = figure.colorbar(image, ax=axes, label=f"samples of a label{scale}", pad=0.02)
    bar.ax.yaxis.set_major_formatter("{x:g}")
    bar.ax.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("label, most frequent first" if has_many else "label")
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    if num_labels <= MAX_NUMBERED:
        axes.set_yticks(range(num_labels))
