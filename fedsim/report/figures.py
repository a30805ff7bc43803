"""The figures of a report: accuracy, participation and coverage, accuracies and data of clients,
selections, times.

They are of `drawn_lines`: all have finished runs.
"""

import gc
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import yaml
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator
from PIL import Image

from fedsim.core.arrays import Floats, Ints
from fedsim.core.disk import write_files
from fedsim.core.record import FINAL_WINDOW, PHASES
from fedsim.report.page import Look, make_looks
from fedsim.results.curves import (
    AXES,
    AccuracyCurve,
    accuracy_curve,
    is_recorded,
    spent_until,
    stack_series,
)
from fedsim.results.groups import Group, Panel, show_labels
from fedsim.results.measures import PHASE_SECONDS, measured, preferences
from fedsim.results.runs import Run
from fedsim.results.table import Values, show_median_reached

COLUMN, PAGE = 3.5, 7.16
"""Widths in inches of a column and of the text of a two-column page (IEEE)."""
SMALL = 7.0
"""Size of text in points, as printed, but for titles and labels of axes."""
DPI, PREVIEW_DPI = 300, 110
LARGE = 1000
"""Pixels of height from which a figure leaves so much memory in circles (up to 600 MB) that these
are collected."""
HEIGHT = 2.3
"""Of a panel with lines, in inches."""


ASSETS = Path(__file__).parent / "assets"
CAPTIONS: Mapping[str, str] = yaml.safe_load((ASSETS / "figures.yaml").read_text("utf-8"))


def style() -> AbstractContextManager[None]:
    """The context in which figures are drawn and saved."""
    return matplotlib.rc_context(fname=ASSETS / "figures.mplstyle")


@dataclass(frozen=True)
class Plot:
    """A figure, the name of its files, and its caption."""

    name: str
    caption: str
    figure: Figure


def save(plots: Sequence[Plot], folder: Path) -> list[tuple[str, bytes]]:
    """Write the figures as PNG and PDF to `folder`, which empties them; returns captions and
    smaller PNGs, for a page on the screen."""
    files: dict[str, bytes] = {}
    pictures = []
    for plot in plots:
        png, pdf, preview = io.BytesIO(), io.BytesIO(), io.BytesIO()
        plot.figure.set_dpi(DPI)
        screen = FigureCanvasAgg(plot.figure)
        with style():  # not by savefig, which draws each of them twice
            screen.print_png(png)
            plot.figure.set_layout_engine("none")  # as it is laid out by now
            FigureCanvasPdf(plot.figure).print_pdf(pdf, metadata={"CreationDate": None})
        picture = Image.fromarray(np.asarray(screen.buffer_rgba())).convert("RGB")
        width, height = (round(side * PREVIEW_DPI / DPI) for side in picture.size)
        picture.resize((width, height), Image.Resampling.LANCZOS).save(preview, "png")
        files |= {f"{plot.name}.png": png.getvalue(), f"{plot.name}.pdf": pdf.getvalue()}
        pictures.append((plot.caption, preview.getvalue()))
        plot.figure.clear()
        if picture.height > LARGE:
            gc.collect()
    write_files(folder, files)
    return pictures


LEGEND_ROW = 0.15
"""Inches of a row of a legend."""


def make_axes(
    num_panels: int, height: float, extra: float = 0.0, most: int = 2
) -> tuple[Figure, list[Axes]]:
    """A figure of the width of a page with at most so many panels side by side, of a column for
    half of them.

    `height`: of a panel, in inches; `extra`: of what is below them.
    """
    columns = min(num_panels, most)
    rows = -(-num_panels // columns)
    figure = Figure(figsize=(COLUMN if columns <= most // 2 else PAGE, height * rows + extra))
    axes = list(figure.subplots(rows, columns, squeeze=False, sharey=most > 2).flat)
    for unused in axes[num_panels:]:
        unused.remove()
    return figure, axes[:num_panels]


def line_axes(panels: Sequence[Panel], looks: Mapping[str, Look]) -> tuple[Figure, list[Axes]]:
    """Axes for lines of these looks, with one legend for all panels below them, if there are
    several lines."""
    width = (COLUMN if len(panels) == 1 else PAGE) * 72
    columns = max(1, min(len(looks), int(width / (0.6 * SMALL * max(map(len, looks)) + 30))))
    several = len(looks) > 1
    figure, axes = make_axes(
        len(panels), HEIGHT, LEGEND_ROW * -(-len(looks) // columns) + 0.1 if several else 0.0
    )
    if several:
        handles = [Line2D([], [], label=name, **look) for name, look in looks.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=columns)
    for panel, ax in zip(panels, axes, strict=True):
        ax.set_title(panel.title)
        ax.grid()
    return figure, axes


def row_axes(
    panels: Sequence[Panel], row: float, margin: float, extra: float = 0.0
) -> tuple[Figure, list[Axes]]:
    """Axes with a row for each line of a panel, from the top down, of `row` inches and a `margin`
    around them."""
    figure, axes = make_axes(
        len(panels), row * max(len(panel.lines) for panel in panels) + margin, extra
    )
    for panel, ax in zip(panels, axes, strict=True):
        ax.set_title(panel.title)
        ax.set_yticks(range(len(panel.lines)), list(panel.lines))
        ax.set_ylim(len(panel.lines) - 0.5, -0.5)
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
    return figure, axes


def write_beside_rows(ax: Axes, texts: Sequence[str]) -> None:
    """Write a text to the right of each row."""
    for number, text in enumerate(texts):
        ax.annotate(
            text, (1.02, number), xycoords=("axes fraction", "data"), fontsize=SMALL, va="center"
        )


MARKS = 8
"""About so many markers on a line."""


def runs_of(panels: Sequence[Panel]) -> list[Run]:
    return [run for panel in panels for group in panel.lines.values() for run in group.complete]


def accuracy_plots(panels: Sequence[Panel], looks: Mapping[str, Look]) -> list[Plot]:
    """Test accuracy against each axis of which all runs have records: a panel per setting, a line
    per method."""
    curves = {
        group: accuracy_curve(group.complete) for panel in panels for group in panel.lines.values()
    }
    drawn = "means over seeds"
    if any(curve.window > 1 for curve in curves.values()):
        drawn += f" of the last {FINAL_WINDOW} rounds, those of single rounds faintly behind"
    plots = []
    for axis, about in AXES.items():
        if not is_recorded(runs_of(panels), about.names):
            continue
        figure, all_axes = line_axes(panels, looks)
        for panel, ax in zip(panels, all_axes, strict=True):
            for name, group in panel.lines.items():
                x = spent_until(group.complete, axis)[curves[group].rounds - 1]
                _draw(
                    ax, x, curves[group], looks[name], list(looks).index(name), len(group.complete)
                )
            ax.set(xlabel=about.label, ylabel="test accuracy")
            if axis == "rounds" or about.unit is not None:
                ax.xaxis.set_major_locator(MaxNLocator(5, integer=axis == "rounds"))
            if about.unit is not None:
                ax.xaxis.set_major_formatter(EngFormatter(about.unit))
        name = f"accuracy_{axis}"
        plots.append(Plot(name, CAPTIONS[name].format(drawn=drawn), figure))
    return plots


def _draw(ax: Axes, x: Floats, curve: AccuracyCurve, look: Look, number: int, seeds: int) -> None:
    if curve.window > 1:
        ax.plot(x, curve.raw, color=look["color"], linewidth=0.5, alpha=0.22, zorder=1)
    if seeds > 1 and len(x) > 1:
        ax.fill_between(x, curve.low, curve.high, color=look["color"], alpha=0.12, linewidth=0)
    elif seeds > 1:
        below_and_above = np.abs(
            [curve.low, curve.high] - curve.smoothed
        )  # a mean of equal numbers may be above them
        ax.errorbar(
            x, curve.smoothed, below_and_above, color=look["color"], linewidth=0.8, capsize=2
        )
    step = max(1, len(x) // MARKS)
    first = int(
        number % MARKS / MARKS * step
    )  # markers of different lines do not lie on each other
    ax.plot(x, curve.smoothed, markevery=(first, step), **look)


def coverage_plot(panels: Sequence[Panel]) -> Plot:
    """The share of clients that have been selected at least once."""
    return _strips(
        panels, "coverage", "coverage", 1.0, "log", "rounds_to_cover", show_median_reached
    )


def participation_plot(panels: Sequence[Panel]) -> Plot:
    """The share of clients that upload in a round."""
    name, groups = (
        "participation_ratio",
        [group for panel in panels for group in panel.lines.values()],
    )
    highest = max(float(stack_series(group.complete, name).mean(0).max()) for group in groups)
    return _strips(
        panels, "participation", name, highest, "linear", "participation", _show_mean_percent
    )


def _show_mean_percent(values: Values) -> str:
    known = [value for value in values if value is not None]
    return f"{100 * np.mean(known):.3g} %" if known else "-"


def _strips(
    panels: Sequence[Panel],
    name: str,
    key: str,
    vmax: float,
    scale: str,
    measure: str,
    show: Callable[[Values], str],
) -> Plot:
    """A strip per method: the mean over seeds of the series `key` by colour, and a measure to the
    right of it."""
    figure, axes = row_axes(panels, 0.17, 0.8)
    for panel, ax in zip(panels, axes, strict=True):
        for number, group in enumerate(panel.lines.values()):
            values = stack_series(group.complete, key).mean(0)
            x, y = np.arange(len(values) + 1) + 0.5, [number - 0.4, number + 0.4]
            mesh = ax.pcolormesh(
                x, y, values[None], vmin=0, vmax=vmax, cmap="viridis", rasterized=True
            )
        write_beside_rows(
            ax, [show(measured(group, [measure])[0]) for group in panel.lines.values()]
        )
        ax.set(xlabel="round", xscale=scale)
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter("")
    figure.colorbar(
        mesh, ax=axes, label=name, fraction=0.05, aspect=30 * axes[0].get_position().height
    )
    return Plot(name, CAPTIONS[name], figure)


def clients_plot(panels: Sequence[Panel], looks: Mapping[str, Look]) -> Plot | None:
    """A line per method from its worst client to its best; None if no run measured the accuracy of
    its clients."""
    shown = [
        panel
        for panel in panels
        if any(sorted_accuracies(g) is not None for g in panel.lines.values())
    ]
    if not shown:
        return None
    figure, axes = line_axes(shown, looks)
    for panel, ax in zip(shown, axes, strict=True):
        for number, (name, group) in enumerate(panel.lines.items()):
            if (values := sorted_accuracies(group)) is None:
                continue
            share = 100 * (np.arange(values.shape[1]) + 0.5) / values.shape[1]
            step = max(1, len(share) // MARKS)
            ax.plot(
                share,
                values.mean(0),
                markevery=(number * step // len(panel.lines), step),
                **looks[name],
            )
            if len(values) > 1:
                low, high = values.min(0), values.max(0)
                ax.fill_between(
                    share, low, high, color=looks[name]["color"], alpha=0.12, linewidth=0
                )
        ax.set(xlabel="clients, sorted by accuracy [%]", ylabel="accuracy on the client")
    return Plot("clients", CAPTIONS["clients"], figure)


def sorted_accuracies(group: Group) -> Floats | None:
    """The sorted accuracies of the clients of each run [runs, clients], interpolated at the ranks
    of the run in which the fewest clients have one; None if no run has them."""
    measured = [
        run.client_accuracies for run in group.complete if run.client_accuracies is not None
    ]
    runs = [known for values in measured if len(known := np.sort(values[np.isfinite(values)]))]
    if not runs:
        return None
    count = min(map(len, runs))
    ranks = (np.arange(count) + 0.5) / count
    return np.stack([np.interp(ranks, (np.arange(len(own)) + 0.5) / len(own), own) for own in runs])


DIVISION = ("cell", "dataset", "partition")
"""Config groups whose choices and values define a division, among those that panels differ in."""


def partitions_plot(panels: Sequence[Panel]) -> Plot | None:
    """The divisions at the first seed; None if none was saved. Panels with the same division share
    its map."""
    shown: dict[str, Ints] = {}
    for group in (group for panel in panels for group in panel.lines.values()):
        if (histograms := group.complete[0].histograms) is not None:
            labels = {
                key: text for key, text in group.labels.items() if key.partition(".")[0] in DIVISION
            }
            shown.setdefault(show_labels(labels), histograms)
    if not shown:
        return None
    figure, axes = make_axes(len(shown), 1.6)
    for (title, histograms), ax in zip(shown.items(), axes, strict=True):
        image = ax.imshow(
            histograms.T, cmap="viridis", aspect="auto", interpolation="none", rasterized=True
        )
        figure.colorbar(image, ax=ax, label="samples", pad=0.02)
        ax.set(xlabel="client", ylabel="label", title=title)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        if histograms.shape[1] <= 10:
            ax.set_yticks(range(histograms.shape[1]))
    return Plot("partitions", CAPTIONS["partitions"], figure)


BINS = 30
"""Largest number of bars of a histogram."""
MAX_COLUMNS = 125
"""Columns of a map of selections; more rounds are put together, so that each can be seen in
print."""


def histogram_plot(panels: Sequence[Panel], looks: Mapping[str, Look]) -> Plot:
    """How often clients were selected, a row per method."""
    figure, axes = row_axes(panels, 0.3, 0.7)
    for panel, ax in zip(panels, axes, strict=True):
        counts = {
            name: np.stack([run.selections for run in group.complete])
            for name, group in panel.lines.items()
        }
        edges = histogram_edges(max(int(values.max()) for values in counts.values()))
        for row, (name, values) in enumerate(counts.items()):
            heights, _ = np.histogram(values, edges)
            bottom = row + 0.45
            tops = bottom - 0.85 * heights / heights.max()
            ax.stairs(tops, edges, baseline=bottom, fill=True, color=looks[name]["color"])
        write_beside_rows(
            ax, [f"{(values == 0).sum(1).mean():.3g} never" for values in counts.values()]
        )
        ax.set(xlabel="selections of a client")
    return Plot("selections", CAPTIONS["selections"], figure)


def histogram_edges(highest: int) -> Floats:
    """Edges of at most `BINS` bars that each cover as many of the whole numbers from 0 to
    `highest`."""
    width = -(-(highest + 1) // BINS)
    bars = -(-(highest + 1) // width)
    return np.arange(bars + 1, dtype=np.float64) * width - 0.5


def imperfect_plot(panels: Sequence[Panel], looks: Mapping[str, Look]) -> Plot | None:
    """The share of its choices that a method gave to imperfect clients, a row per method; None if
    all are honest."""
    found = {(one.setting, one.line): one for one in preferences(panels)}
    chosen = [
        Panel(p.title, {n: g for n, g in p.lines.items() if (p.title, n) in found}) for p in panels
    ]
    if not (shown := [panel for panel in chosen if panel.lines]):
        return None
    figure, axes = row_axes(shown, 0.2, 0.8)
    for panel, ax in zip(shown, axes, strict=True):
        for row, name in enumerate(panel.lines):
            choices, clients, look = *found[panel.title, name][2:4], looks[name]
            reach = [[abs(end - choices.mean)] for end in choices.interval]
            ax.plot(
                [clients] * 2, [row - 0.5, row + 0.5], color="black", linestyle="--", linewidth=0.8
            )
            ax.plot(
                choices.values,
                [row] * choices.num,
                ".",
                color=look["color"],
                alpha=0.5,
                markersize=3,
            )
            ax.errorbar(choices.mean, row, xerr=reach, elinewidth=0.8, capsize=2, **look)
        ax.set(xlabel="share of its choices that are imperfect clients", xlim=(0, None))
    return Plot("imperfect", CAPTIONS["imperfect"], figure)


def round_plots(panels: Sequence[Panel]) -> Iterator[Plot]:
    """Which client was selected in which round, at the first seed: a figure per panel, a map per
    method."""
    for number, panel in enumerate(panels, 1):
        title = f" ({panel.title})" if panel.title else ""
        name = "selections_rounds" if len(panels) == 1 else f"selections_rounds_{number}"
        yield Plot(name, CAPTIONS["selections_rounds"].format(title=title), _maps(panel))


def _maps(panel: Panel) -> Figure:
    first = [group.complete[0] for group in panel.lines.values()]
    shown = [_selected_by_round(run) for run in first]
    figure, axes = make_axes(len(shown), 1.5, 0.4, most=4)
    highest = max(values.max() for values in shown)
    for ax, name, values, run in zip(axes, panel.lines, shown, first, strict=True):
        extent = (0.5, run.rounds.num + 0.5, len(values) - 0.5, -0.5)
        image = ax.imshow(
            values,
            cmap="Greys",
            vmin=0,
            vmax=highest,
            aspect="auto",
            extent=extent,
            rasterized=True,
        )
        ax.set_title(name, fontsize=SMALL)
    for ax in axes[::4]:
        ax.set_ylabel("client")
    figure.supxlabel("round", fontsize=SMALL)
    if panel.title:
        figure.suptitle(panel.title, fontsize=SMALL)
    figure.colorbar(image, ax=axes, label="share of rounds", fraction=0.03)
    return figure


def _selected_by_round(run: Run) -> Floats:
    """The share of the rounds of each column in which each client was selected, [N, columns]."""
    rounds = run.rounds.num
    columns = min(rounds, MAX_COLUMNS)
    counts = np.zeros((run.num_clients, columns))
    at, clients = run.rounds.chosen
    np.add.at(counts, (clients, at * columns // rounds), 1)
    return counts / np.bincount(np.arange(rounds) * columns // rounds, minlength=columns)


SIMULATED = ("ask", "train")
"""Phases on the simulated clock."""


def _bars(
    name: str, panels: Sequence[Panel], prefix: str, phases: Sequence[str], label: str
) -> Plot:
    """A bar per method, in parts: what the server selects for, what clients are asked, training,
    and so on."""
    figure, axes = row_axes(panels, 0.2, 0.7, 0.25)
    colours = matplotlib.colormaps["cividis"](np.linspace(0, 1, len(phases)))
    for panel, ax in zip(panels, axes, strict=True):
        left = np.zeros(len(panel.lines))
        for phase, colour in zip(phases, colours, strict=True):
            key = f"{prefix}{phase}"
            spent = [
                np.mean([run.columns[key].sum() for run in g.complete])
                for g in panel.lines.values()
            ]
            ax.barh(range(len(left)), spent, left=left, color=colour, height=0.7, label=phase)
            left += spent
        ax.set(xlabel=label)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=len(phases),
        columnspacing=1,
        handlelength=1,
    )
    return Plot(name, CAPTIONS[name], figure)


def all_plots(panels: Sequence[Panel]) -> list[Plot]:
    """All figures for which the panels, one at least, have data."""
    looks = make_looks(panels)
    with style():
        plots: list[Plot | None] = [imperfect_plot(panels, looks), *accuracy_plots(panels, looks)]
        plots += [coverage_plot(panels), participation_plot(panels)]
        plots += [histogram_plot(panels, looks), *round_plots(panels), clients_plot(panels, looks)]
        if is_recorded(runs_of(panels), PHASE_SECONDS):
            plots.append(_bars("phases", panels, "seconds_", PHASES, "seconds of a run"))
        if is_recorded(runs_of(panels), [f"simulated_seconds_{phase}" for phase in SIMULATED]):
            label = "simulated seconds of a run"
            plots.append(_bars("simulated_phases", panels, "simulated_seconds_", SIMULATED, label))
        plots.append(partitions_plot(panels))
        return [plot for plot in plots if plot is not None]
