"""Who was selected: clients by rounds, and the distribution of the clients' numbers of selections."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from fedsim.report.figures.frames import make_axes, name_rows, write_beside_rows
from fedsim.report.figures.plot import COLUMN, PAGE, SMALL, Plot
from fedsim.report.groups import Group
from fedsim.report.looks import Look
from fedsim.report.panels import Panel
from fedsim.report.runs import Floats, Run

BINS = 30
"""Largest number of bars of a histogram."""
MAX_COLUMNS = 125
"""Columns of a map of selections; more rounds are put together, so that each can be seen in print."""
ROW, MARGIN = 0.3, 0.7


def histogram_plot(panels: Sequence[Panel], looks: Mapping[str, Look]) -> Plot:
    """How often clients were selected, a row per method."""
    figure, axes = make_axes(len(panels), ROW * max(len(panel.lines) for panel in panels) + MARGIN)
    for panel, ax in zip(panels, axes, strict=True):
        counts = {name: np.stack([run.selections for run in group.complete]) for name, group in panel.lines.items()}
        highest = max(int(values.max()) for values in counts.values())
        edges = histogram_edges(highest)
        for row, (name, values) in enumerate(counts.items()):
            heights, _ = np.histogram(values, edges)
            bottom = row + 0.45
            ax.stairs(
                bottom - 0.85 * heights / heights.max(), edges, baseline=bottom, fill=True, color=looks[name].colour
            )
        name_rows(ax, list(panel.lines))
        write_beside_rows(ax, [f"{(values == 0).sum(1).mean():.3g} never" for values in counts.values()])
        ax.set(xlabel="selections of a client", title=panel.title)
    caption = (
        "How often clients were selected: distribution over the clients of all seeds, each row to its own height;"
        " right: clients that were never selected, mean over seeds."
    )
    return Plot("selections", caption, figure)


def histogram_edges(highest: int) -> Floats:
    """Edges of at most `BINS` bars that each cover as many of the numbers from 0 to `highest`.

    Bars of a fractional width would cover now one number, now two.
    """
    width = -(-(highest + 1) // BINS)
    bars = -(-(highest + 1) // width)
    return np.arange(bars + 1, dtype=np.float64) * width - 0.5


def round_plots(panels: Sequence[Panel]) -> Iterator[Plot]:
    """Which client was selected in which round, at the first seed: a figure per panel, a map per method."""
    for number, panel in enumerate(panels, 1):
        title = f" ({panel.title})" if panel.title else ""
        caption = f"Clients selected in each round at the first seed{title}: share of the rounds in a column."
        name = "selections_rounds" if len(panels) == 1 else f"selections_rounds_{number}"
        yield Plot(name, caption, _maps(panel))


def _maps(panel: Panel) -> Figure:
    shown = [(name, _selected_by_round(group.complete[0]), _rounds(group)) for name, group in panel.lines.items()]
    columns = min(len(shown), 4)
    rows = -(-len(shown) // columns)
    width = COLUMN if columns <= 2 else PAGE
    figure = Figure(figsize=(width, 1.5 * rows + 0.4))
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    axes = list(grid.flat)[: len(shown)]
    highest = max(values.max() for _, values, _ in shown)
    for ax, (name, values, rounds) in zip(axes, shown, strict=True):
        extent = (0.5, rounds + 0.5, len(values) - 0.5, -0.5)
        image = ax.imshow(values, cmap="Greys", vmin=0, vmax=highest, aspect="auto", extent=extent, rasterized=True)
        ax.set_title(name, fontsize=SMALL)
    for unused in grid.flat[len(shown) :]:
        unused.remove()
    for ax in grid[:, 0]:
        ax.set_ylabel("client")
    figure.supxlabel("round", fontsize=SMALL)
    if panel.title:
        figure.suptitle(panel.title, fontsize=SMALL)
    figure.colorbar(image, ax=axes, label="share of rounds", fraction=0.03)
    return figure


def _rounds(group: Group) -> int:
    return len(group.complete[0].records)


def _selected_by_round(run: Run) -> Floats:
    """The share of the rounds of each column in which each client was selected, [N, columns]."""
    rounds = len(run.records)
    columns = min(rounds, MAX_COLUMNS)
    counts = np.zeros((run.num_clients, columns))
    for number, record in enumerate(run.records):
        counts[record["selected"], number * columns // rounds] += 1
    return counts / np.bincount(np.arange(rounds) * columns // rounds, minlength=columns)
