"""Figures of clients: their accuracies, and the labels that they hold."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm, Normalize
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
"""Largest number of labels in the order of their numbers, with a linear scale of colours."""
LABELS_HEIGHT = 2.7
"""Height in inches of a panel of labels, in which the numbers of ten labels have room."""
BESIDE_LABELS = 1.0
"""Width in inches of what is next to a map of labels: its ticks, label, and bar of colours."""
DIVISION = ("cell", "dataset", "partition")
"""Config groups whose choices and values define how the data are divided."""


def clients_plot(panels: Mapping[str, Lines], looks: Mapping[str, Look]) -> Plot | None:
    """Return a figure with a line for each method, of the accuracies on its clients from the worst
    to the best.

    None if no run measured the accuracy of its clients.
    """
    shown: dict[str, dict[str, Floats]] = {}
    for title, lines in panels.items():
        for method, runs in lines.items():
            values = sorted_accuracies(runs)
            if values is not None:
                shown.setdefault(title, {})[method] = values
    if not shown:
        return None
    figure, all_axes = line_axes(list(shown), looks, "clients, sorted by accuracy [%]")
    data = []
    for (title, accuracies), axes in zip(shown.items(), all_axes, strict=True):
        for method, values in accuracies.items():
            look = looks[method]
            number = list(panels[title]).index(method)
            share = 100 * (np.arange(values.shape[1]) + 0.5) / values.shape[1]
            step = max(1, len(share) // MARKS)
            first = number * step // len(panels[title])
            mean, low, high = values.mean(0), values.min(0), values.max(0)
            axes.plot(share, mean, markevery=(first, step), **look)
            data.append(
                {
                    "setting": title,
                    "method": method,
                    "percent_of_clients": share,
                    "accuracy": mean,
                    "lowest": low,
                    "highest": high,
                }
            )
            if len(values) > 1 and len(accuracies) <= MAX_RANGES:
                axes.fill_between(share, low, high, color=look["color"], alpha=0.12, linewidth=0)
        axes.set_ylabel("accuracy on the client")
    return Plot("clients", CAPTIONS["clients"], figure, data)


def sorted_accuracies(runs: Sequence[Run]) -> Floats | None:
    """Return the sorted accuracies on the clients of each run, [runs, clients]; None if no run has
    them.

    Clients without an accuracy do not count. If their number differs among runs, all runs are
    interpolated to the smallest number of clients.
    """
    by_run = []
    for run in runs:
        if run.client_accuracies is not None:
            finite = run.client_accuracies[np.isfinite(run.client_accuracies)]
            by_run.append(np.sort(finite))
    by_run = [accuracies for accuracies in by_run if len(accuracies)]
    if not by_run:
        return None
    ranks = _ranks(min(map(len, by_run)))
    return np.stack([np.interp(ranks, _ranks(len(values)), values) for values in by_run])


def _ranks(num: int) -> Floats:
    """Return the places of `num` sorted clients between 0 and 1."""
    return (np.arange(num) + 0.5) / num


def partitions_plot(runs: pd.DataFrame) -> Plot | None:
    """Return a figure of how data are divided among clients, at the first seed, each division once.

    None if no run saved its partition.
    """
    divisions: dict[str, Ints] = {}
    for rows in by_setting(runs).values():
        for members in by(rows, "group").values():
            histograms = first_run(members).histograms
            labels = members["labels"].iloc[0]
            if histograms is not None:
                names = {key: labels[key] for key in labels if key.partition(".")[0] in DIVISION}
                divisions.setdefault(show_labels(names), histograms)
    return labels_plot(divisions) if divisions else None


def labels_plot(divisions: Mapping[str, Ints]) -> Plot:
    """Return a figure of who holds which labels, with a panel for each division.

    `divisions` has the training samples of each client by label, [N, C]. Clients are sorted by
    their most frequent label, and by their number of its samples. Bars above show all samples of a
    client. Of more than `MAX_LABELS` labels, the most frequent are at the top, and the scale of
    colours is logarithmic: few labels and clients have most samples of a text.
    """
    figure, places = make_axes(len(divisions), LABELS_HEIGHT)
    data = []
    for (title, histograms), place in zip(divisions.items(), places, strict=True):
        has_many = histograms.shape[1] > MAX_LABELS
        frequencies = histograms.sum(0) if has_many else np.zeros(histograms.shape[1])
        counts = histograms[:, np.argsort(-frequencies, kind="stable")]
        counts = counts[np.lexsort((-counts.max(1), counts.argmax(1)))]
        num_clients, num_labels = counts.shape
        width = figure.get_figwidth() / num_columns_of(place) - text_scale() * BESIDE_LABELS
        spec = place.get_subplotspec()
        assert spec is not None  # `make_axes` has placed it in a grid
        place.remove()
        grid = spec.subgridspec(2, 1, height_ratios=(2, 5), hspace=0)
        axes = figure.add_subplot(grid[1])
        totals = figure.add_subplot(grid[0], sharex=axes)
        held = np.where(counts > 0, counts, np.nan).T  # cells without samples stay empty
        norm = (LogNorm if has_many else Normalize)(1, max(2, counts.max()))
        image = axes.imshow(held, norm=norm, aspect="auto", interpolation="none", rasterized=True)
        scale = " (log scale)" if has_many else ""
        bar = figure.colorbar(image, ax=axes, label=f"samples of a label{scale}", pad=0.02)
        bar.ax.yaxis.set_major_formatter("{x:g}")
        bar.ax.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(fit_text("clients, sorted by their most frequent label", width))
        axes.set_ylabel("label, most frequent first" if has_many else "label")
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        if num_labels <= 10:
            axes.set_yticks(range(num_labels))
        edges = np.arange(num_clients + 1) - 0.5
        totals.stairs(counts.sum(1), edges, fill=True, color="grey")
        totals.tick_params(axis="x", labelbottom=False, length=0)
        totals.set(title=fit_text(title, width), ylabel="samples")
        clients, labels = np.nonzero(histograms)
        samples = histograms[clients, labels]
        data.append({"division": title, "client": clients, "label": labels, "samples": samples})
    return Plot("partitions", CAPTIONS["partitions"], figure, data)
