"""The figures of a report: accuracy, participation and coverage, accuracies and data of clients, selections, times."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator
from numpy.typing import NDArray

from fedsim.core.record import FINAL_WINDOW, PHASES
from fedsim.report.plot import (
    COLUMN,
    PAGE,
    SMALL,
    End,
    Look,
    Plot,
    label_ends,
    legend,
    legend_height,
    line_style,
    make_axes,
    name_rows,
    named_at_ends,
    style,
    write_beside_rows,
)
from fedsim.results import measures
from fedsim.results.curves import (
    AXES,
    AccuracyCurve,
    accuracy_curve,
    is_recorded,
    smoothing_window,
    spent_until,
    stack_series,
)
from fedsim.results.groups import Group, Panel, show_labels
from fedsim.results.runs import Floats, Run
from fedsim.results.table import show_median_reached

HEIGHT = 2.3
MARKS = 8
"""About so many markers on a line."""
CAPTIONS = {
    "rounds": "Test accuracy against rounds",
    "bytes": "Test accuracy against bytes sent, both ways",
    "samples": "Test accuracy against samples that clients trained on or passed forward",
    "seconds": "Test accuracy against the simulation's computing time, which means something only if runs did not share"
    " their machine",
    "simulated": "Test accuracy against the simulated clock of clients' devices",
}


def accuracy_plots(panels: Sequence[Panel], looks: Mapping[str, Look]) -> list[Plot]:
    """A figure for each axis of which all runs have records."""
    runs = [run for panel in panels for group in panel.lines.values() for run in group.complete]
    axes = [axis for axis in AXES if is_recorded(runs, AXES[axis].needs)]
    return [accuracy_plot(panels, looks, axis) for axis in axes]


def accuracy_plot(panels: Sequence[Panel], looks: Mapping[str, Look], axis: str) -> Plot:
    """Test accuracy against `axis`, one of `curves.AXES`: one panel per setting, one line per method."""
    names = list(looks)
    direct = all(named_at_ends(list(panel.lines)) or len(panel.lines) == 1 for panel in panels) and len(names) > 1
    extra = 0.0 if direct or len(names) < 2 else legend_height(len(panels), names)
    figure, all_axes = make_axes(len(panels), HEIGHT, extra)
    ends = []
    for panel, ax in zip(panels, all_axes, strict=True):
        ends.append([_draw(ax, group, name, looks, axis) for name, group in panel.lines.items()])
        ax.set(title=panel.title, xlabel=AXES[axis].label, ylabel="test accuracy")
        ax.grid()
        if axis == "rounds":
            ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        if (unit := AXES[axis].unit) is not None:
            ax.xaxis.set_major_locator(MaxNLocator(5))
            ax.xaxis.set_major_formatter(EngFormatter(unit))
    if direct:
        figure.draw_without_rendering()
        for ax, ends_of_panel in zip(all_axes, ends, strict=True):
            label_ends(ax, ends_of_panel)
    if extra:
        legend(figure, looks, len(panels))
    longest = max(group.complete[0].num_rounds for panel in panels for group in panel.lines.values())
    return Plot(f"accuracy_{axis}", f"{CAPTIONS[axis]}: {_drawn(longest)}, with the range of seeds.", figure)


def _drawn(num_rounds: int) -> str:
    if smoothing_window(num_rounds) == 1:
        return "means over seeds"
    return f"means over seeds of the last {FINAL_WINDOW} rounds, those of single rounds faintly behind"


def _draw(ax: Axes, group: Group, name: str, looks: Mapping[str, Look], axis: str) -> End:
    """Draw one line; returns its end."""
    curve, style = accuracy_curve(group.complete), line_style(looks[name])
    x = spent_until(group.complete, axis)[curve.rounds - 1]
    if smoothing_window(group.complete[0].num_rounds) > 1:
        ax.plot(x, curve.raw, color=style["color"], linewidth=0.5, alpha=0.22, zorder=1)
    if len(group.complete) > 1:
        _draw_range(ax, x, curve, style["color"])
    marked = list(looks).index(name) % MARKS / MARKS  # markers of different lines do not lie on each other
    step = max(1, len(x) // MARKS)
    ax.plot(x, curve.smoothed, markevery=(int(marked * step), step), **style)
    return End(float(x[-1]), float(curve.smoothed[-1]), name, style["color"])


def _draw_range(ax: Axes, x: Floats, curve: AccuracyCurve, colour: str) -> None:
    if len(x) > 1:
        ax.fill_between(x, curve.low, curve.high, color=colour, alpha=0.12, linewidth=0)
    else:
        below_and_above = np.stack([curve.smoothed - curve.low, curve.high - curve.smoothed])
        ax.errorbar(x, curve.smoothed, below_and_above, color=colour, linewidth=0.8, capsize=2)


ROW, MARGIN = 0.17, 0.8
"""Inches of a method's strip, and of what is above and below the strips of a panel."""

Remark = Callable[[Group], str]


def coverage_plot(panels: Sequence[Panel]) -> Plot:
    """The share of clients that have been selected at least once."""
    figure = _strips(panels, "coverage", 1.0, "coverage", _covered_after, logarithmic=True)
    caption = "Share of clients selected so far, mean over seeds; right: median round by which all had been."
    return Plot("coverage", caption, figure)


def participation_plot(panels: Sequence[Panel]) -> Plot:
    """The share of clients that upload in a round."""
    groups = [group for panel in panels for group in panel.lines.values()]
    highest = max(float(_mean_over_seeds(group, "participation_ratio").max()) for group in groups)
    figure = _strips(panels, "participation_ratio", highest, "participation", _mean_participation)
    caption = "Share of clients that upload in a round, mean over seeds; right: mean over all rounds."
    return Plot("participation", caption, figure)


def _strips(
    panels: Sequence[Panel], name: str, highest: float, label: str, remark: Remark, *, logarithmic: bool = False
) -> Figure:
    """A strip per method: the mean over seeds of the series `name` by colour, and a remark to the right of it."""
    figure, axes = make_axes(len(panels), ROW * max(len(panel.lines) for panel in panels) + MARGIN)
    for panel, ax in zip(panels, axes, strict=True):
        mesh: QuadMesh
        for number, group in enumerate(panel.lines.values()):
            values = _mean_over_seeds(group, name)
            edges = np.arange(len(values) + 1) + 0.5
            mesh = ax.pcolormesh(
                edges, [number - 0.4, number + 0.4], values[None], vmin=0, vmax=highest, cmap="viridis", rasterized=True
            )
        name_rows(ax, list(panel.lines))
        write_beside_rows(ax, [remark(group) for group in panel.lines.values()])
        ax.set(xlabel="round", title=panel.title, xscale="log" if logarithmic else "linear")
        ax.xaxis.set_major_formatter("{x:g}")
    figure.colorbar(mesh, ax=axes, label=label, fraction=0.05, aspect=30 * axes[0].get_position().height)
    return figure


def _covered_after(group: Group) -> str:
    return show_median_reached(group, measures.rounds_to_cover)


def _mean_participation(group: Group) -> str:
    values = [value for run in group.complete if (value := measures.participation(run)) is not None]
    return f"{100 * np.mean(values):.3g} %" if values else "-"


def _mean_over_seeds(group: Group, name: str) -> Floats:
    return stack_series(group.complete, name).mean(0)


CLIENTS_HEIGHT, CLIENTS_MARKS = 2.3, 8


def clients_plot(panels: Sequence[Panel], looks: Mapping[str, Look]) -> Plot | None:
    """A line per method from its worst client to its best; None if no run measured the accuracy of its clients."""
    found = [(panel, lines) for panel in panels if (lines := _lines(panel))]
    if not found:
        return None
    figure, axes = make_axes(len(found), CLIENTS_HEIGHT, legend_height(len(found), list(looks)))
    for (panel, lines), ax in zip(found, axes, strict=True):
        for number, (name, values) in enumerate(lines.items()):
            share = 100 * (np.arange(values.shape[1]) + 0.5) / values.shape[1]
            style = line_style(looks[name])
            step = max(1, len(share) // CLIENTS_MARKS)
            ax.plot(share, values.mean(0), markevery=(number * step // max(len(lines), 1), step), **style)
            if len(values) > 1:
                ax.fill_between(share, values.min(0), values.max(0), color=style["color"], alpha=0.12, linewidth=0)
        ax.set(title=panel.title, xlabel="clients, sorted by accuracy [%]", ylabel="accuracy on the client")
        ax.grid()
    legend(figure, looks, len(found))
    caption = (
        "Accuracy of the final model on each client: sorted in each run, then means over seeds rank by rank, with the"
        " range of seeds."
    )
    return Plot("clients", caption, figure)


def _lines(panel: Panel) -> dict[str, Floats]:
    lines = {name: sorted_accuracies(group) for name, group in panel.lines.items()}
    return {name: values for name, values in lines.items() if values is not None}


def sorted_accuracies(group: Group) -> Floats | None:
    """The sorted accuracies of the clients of each run [runs, clients]; None if no run has them.

    Runs in which fewer clients have an accuracy decide how many ranks there are; others are interpolated.
    """
    runs = [values for run in group.complete if len(values := _sorted(run))]
    if not runs:
        return None
    count = min(map(len, runs))
    ranks = (np.arange(count) + 0.5) / count
    return np.stack([np.interp(ranks, (np.arange(len(own)) + 0.5) / len(own), own) for own in runs])


def _sorted(run: Run) -> Floats:
    values = run.client_accuracies
    return np.empty(0) if values is None else np.sort(values[np.isfinite(values)])


PARTITION_HEIGHT = 1.6
DIVISION = ("cell", "dataset", "partition")
"""Config groups whose choices and values define a division, among those that panels differ in."""


def partitions_plot(panels: Sequence[Panel]) -> Plot | None:
    """The divisions at the first seed; None if none was saved. Panels with the same division share its map."""
    shown = _divisions(panels)
    if not shown:
        return None
    figure, axes = make_axes(len(shown), PARTITION_HEIGHT)
    for (title, histograms), ax in zip(shown.items(), axes, strict=True):
        image = ax.imshow(histograms.T, cmap="viridis", aspect="auto", interpolation="none", rasterized=True)
        figure.colorbar(image, ax=ax, label="samples", pad=0.02)
        ax.set(xlabel="client", ylabel="label", title=title)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        if histograms.shape[1] <= 10:
            ax.set_yticks(range(histograms.shape[1]))
    return Plot("partitions", "Training samples of every client by label, at the first seed.", figure)


def _divisions(panels: Sequence[Panel]) -> dict[str, NDArray]:  # type: ignore[type-arg]
    """The first histograms [N, C] of each division, by its title."""
    found: dict[str, NDArray] = {}  # type: ignore[type-arg]
    for panel in panels:
        for group in panel.lines.values():
            histograms = group.complete[0].histograms
            if histograms is not None:
                labels = {key: text for key, text in group.labels.items() if key.partition(".")[0] in DIVISION}
                found.setdefault(show_labels(labels), histograms)
    return found


BINS = 30
"""Largest number of bars of a histogram."""
MAX_COLUMNS = 125
"""Columns of a map of selections; more rounds are put together, so that each can be seen in print."""
SELECTIONS_ROW, SELECTIONS_MARGIN = 0.3, 0.7


def histogram_plot(panels: Sequence[Panel], looks: Mapping[str, Look]) -> Plot:
    """How often clients were selected, a row per method."""
    height = SELECTIONS_ROW * max(len(panel.lines) for panel in panels) + SELECTIONS_MARGIN
    figure, axes = make_axes(len(panels), height)
    for panel, ax in zip(panels, axes, strict=True):
        counts = {name: np.stack([run.selections for run in group.complete]) for name, group in panel.lines.items()}
        highest = max(int(values.max()) for values in counts.values())
        edges = histogram_edges(highest)
        for row, (name, values) in enumerate(counts.items()):
            heights, _ = np.histogram(values, edges)
            bottom = row + 0.45
            tops = bottom - 0.85 * heights / heights.max()
            ax.stairs(tops, edges, baseline=bottom, fill=True, color=looks[name].colour)
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
    first = {name: group.complete[0] for name, group in panel.lines.items()}
    shown = [(name, _selected_by_round(run), len(run.records)) for name, run in first.items()]
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


def _selected_by_round(run: Run) -> Floats:
    """The share of the rounds of each column in which each client was selected, [N, columns]."""
    rounds = len(run.records)
    columns = min(rounds, MAX_COLUMNS)
    counts = np.zeros((run.num_clients, columns))
    for number, record in enumerate(run.records):
        counts[record["selected"], number * columns // rounds] += 1
    return counts / np.bincount(np.arange(rounds) * columns // rounds, minlength=columns)


TIME_ROW, TIME_MARGIN, LEGEND = 0.2, 0.7, 0.25
MEASURED: Mapping[str, str] = {phase: f"seconds_{phase}" for phase in PHASES}
SIMULATED: Mapping[str, str] = {phase: f"simulated_seconds_{phase}" for phase in ("ask", "train")}
"""Recorded quantities by the phase that they are the time of."""


def phases_plot(panels: Sequence[Panel]) -> Plot:
    """A bar per method, in parts: what the server selects for, what clients are asked, training, and so on."""
    caption = (
        "Seconds of whole runs by phase, mean over seeds; they mean something only if runs did not share their machine."
    )
    return _bars(panels, MEASURED, "phases", "seconds of a run", caption)


def simulated_phases_plot(panels: Sequence[Panel]) -> Plot:
    """The same on the simulated clock: questions before the selection, and training."""
    caption = (
        "Simulated seconds of whole runs, mean over seeds: questions to clients before the selection (ask), and the"
        " training of the selected."
    )
    return _bars(panels, SIMULATED, "simulated_phases", "simulated seconds of a run", caption)


def _bars(panels: Sequence[Panel], quantities: Mapping[str, str], name: str, label: str, caption: str) -> Plot:
    height = TIME_ROW * max(len(panel.lines) for panel in panels) + TIME_MARGIN
    figure, axes = make_axes(len(panels), height, LEGEND)
    colours = matplotlib.colormaps["cividis"](np.linspace(0, 1, len(quantities)))
    for panel, ax in zip(panels, axes, strict=True):
        left = np.zeros(len(panel.lines))
        for (phase, quantity), colour in zip(quantities.items(), colours, strict=True):
            spent = np.array([_mean_seconds(group, quantity) for group in panel.lines.values()])
            ax.barh(range(len(left)), spent, left=left, color=colour, height=0.7, label=phase)
            left += spent
        name_rows(ax, list(panel.lines))
        ax.set(xlabel=label, title=panel.title)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(quantities), columnspacing=1, handlelength=1)
    return Plot(name, caption, figure)


def _mean_seconds(group: Group, quantity: str) -> float:
    return float(np.mean([measures.total_cost(run, quantity) for run in group.complete]))


def all_plots(panels: Sequence[Panel], looks: Mapping[str, Look]) -> Iterator[Plot]:
    """All figures for which the panels have data, each as it is asked for. The panels are those of `drawn_panels`."""
    if not panels:
        return
    runs = [run for panel in panels for group in panel.lines.values() for run in group.complete]
    with style():
        yield from accuracy_plots(panels, looks)
        yield coverage_plot(panels)
        yield participation_plot(panels)
        yield histogram_plot(panels, looks)
        yield from round_plots(panels)
        if (of_clients := clients_plot(panels, looks)) is not None:
            yield of_clients
        if is_recorded(runs, [f"seconds_{phase}" for phase in PHASES]):
            yield phases_plot(panels)
        if is_recorded(runs, list(SIMULATED.values())):
            yield simulated_phases_plot(panels)
        if (partitions := partitions_plot(panels)) is not None:
            yield partitions
