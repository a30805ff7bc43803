"""The figures of a report: accuracy, participation and coverage, accuracies and data of clients,
selections, times.

They show finished runs: a panel for each setting, and in it a line, bar or row for each method. A
look is the colour, dash and marker of a method, the same in all figures. Figures are made and saved
within `style`. They are returned as `Plot`s, and `save` writes them.
"""

import gc
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.style
import numpy as np
import pandas as pd
import yaml
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter
from PIL import Image

from fedsim.core.arrays import Floats, Ints
from fedsim.core.configs import YAML_LOADER
from fedsim.core.disk import write_files
from fedsim.core.record import PHASES
from fedsim.report.contrasts import Preference, preferences
from fedsim.report.curves import AXES, AccuracyCurve, accuracy_curve, spent_until, stack_series
from fedsim.report.looks import COLOURS, ON_DARK, Look, colour_on_page
from fedsim.report.sections import ASSETS
from fedsim.report.table import csv_text, median_reached, show_reached
from fedsim.results.frames import by, by_setting, first_run, measured, show_labels
from fedsim.results.measures import PHASE_SECONDS, is_recorded
from fedsim.results.runs import Run

COLUMN, PAGE = 3.5, 7.16
"""Widths in inches of a column and of the text of a two-column page (IEEE)."""
PAPER_TEXT = 8.0
"""Size of text on paper in points. Heights below are meant for it: they grow with the text."""
SHEETS: Mapping[str, Sequence[str | Path]] = {
    "paper": [ASSETS / "paper.mplstyle"],
    "slides": [ASSETS / "paper.mplstyle", ASSETS / "slides.mplstyle"],
    "dark": [
        "dark_background",
        ASSETS / "paper.mplstyle",
        ASSETS / "slides.mplstyle",
        ASSETS / "dark.mplstyle",
    ],
}
"""matplotlib's style sheets of each style, of which later ones win."""
WIDTH: ContextVar[float | None] = ContextVar("width", default=None)
"""The width of all figures in inches, inside of `style`. None: that of a column or of a page,
depending on the number of panels."""
DPI, PREVIEW_DPI = 300, 110
"""Dots per inch of PNG files, and of the smaller pictures on the page."""
LARGE = 1000
"""Height in pixels from which garbage is collected after a figure is saved: such figures leave up
to 600 MB in reference cycles."""
HEIGHT = 2.3
"""Height of a panel with lines, in inches."""
LEGEND_ROW = 0.17
"""Height of a row of a legend, in inches."""
LOG_RATIO = 10
"""Costs are drawn on a logarithmic axis if a line's total is so many times as much as another's."""
MAX_BEHIND, MAX_RANGES = 3, 9
"""Largest numbers of lines in a panel that are drawn with their single rounds, and with the ranges
of their seeds."""
MARKS = 8
"""Approximate number of markers on a line."""
BINS = 30
"""Largest number of bars of a histogram."""
MAX_COLUMNS = 125
"""Largest number of columns of a map of selections, so that each can be seen in print. A column of
a longer run stands for several rounds."""
DIVISION = ("cell", "dataset", "partition")
"""Config groups whose choices and values define how the data are divided."""
SIMULATED = ("ask", "train")
"""Phases that take time on the simulated clock of the clients' devices."""
CAPTIONS: Mapping[str, str] = yaml.load((ASSETS / "figures.yaml").read_text("utf-8"), YAML_LOADER)
Lines = Mapping[str, Sequence[Run]]
"""The finished runs of a setting by method, each list sorted by seed."""


@dataclass(frozen=True)
class Plot:
    """A figure, the name of its files, its caption, and the `data` that it shows.

    The data are mappings of columns (docs/figures.md has them), for example one for each line.
    """

    name: str
    caption: str
    figure: Figure
    data: Sequence[Mapping[str, Any]] = ()


def all_plots(
    runs: pd.DataFrame, looks: Mapping[str, Look], log_x: bool | None = None
) -> list[Plot]:
    """Return all figures for which the finished runs (at least one) have data.

    `looks` has those of all methods. `log_x` is as in `accuracy_plots`.
    """
    panels = {}
    for setting, rows in by_setting(runs).items():
        panels[setting] = {method: list(line["run"]) for method, line in by(rows, "method").items()}
    all_runs = list(runs["run"])
    clock = [f"simulated_seconds_{phase}" for phase in SIMULATED]
    plots = [imperfect_plot(runs, looks), *accuracy_plots(panels, looks, log_x)]
    plots += [coverage_plot(runs), participation_plot(runs), histogram_plot(panels, looks)]
    plots += [*round_plots(panels), clients_plot(panels, looks)]
    if is_recorded(all_runs, PHASE_SECONDS):
        label = "seconds of a run"
        plots.append(phases_plot("phases", panels, PHASES, "seconds_", label))
    if is_recorded(all_runs, clock):
        label = "simulated seconds of a run"
        prefix = "simulated_seconds_"
        plots.append(phases_plot("simulated_phases", panels, SIMULATED, prefix, label))
    plots.append(partitions_plot(runs))
    return [plot for plot in plots if plot is not None]


@contextmanager
def style(name: str = "paper", width: float | None = None) -> Iterator[None]:
    """Enter the context in which figures are drawn and saved: a style of `SHEETS`, and `WIDTH`."""
    palette = cycler(color=ON_DARK if name == "dark" else COLOURS)
    token = WIDTH.set(width)
    try:
        with matplotlib.style.context([*SHEETS[name], {"axes.prop_cycle": palette}]):
            yield
    finally:
        WIDTH.reset(token)


def save(plots: Sequence[Plot], folder: Path) -> list[tuple[str, bytes]]:
    """Write the figures as PNG, PDF and SVG to `folder`, and their data as CSV. Return their
    captions and smaller PNGs for the page.

    The figures are cleared to free memory, and cannot be used again.
    """
    files: dict[str, bytes] = {}
    pictures = []
    for plot in plots:
        png, pdf, svg, preview = io.BytesIO(), io.BytesIO(), io.BytesIO(), io.BytesIO()
        plot.figure.set_dpi(DPI)
        screen = FigureCanvasAgg(plot.figure)
        screen.print_png(png)  # not by savefig, which would draw each figure twice
        plot.figure.set_layout_engine("none")  # it is laid out by now
        FigureCanvasPdf(plot.figure).print_pdf(pdf, metadata={"CreationDate": None})
        FigureCanvasSVG(plot.figure).print_svg(svg, metadata={"Date": None})
        picture = Image.fromarray(np.asarray(screen.buffer_rgba())).convert("RGB")
        width, height = (round(side * PREVIEW_DPI / DPI) for side in picture.size)
        picture.resize((width, height), Image.Resampling.LANCZOS).save(preview, "png")
        files[f"{plot.name}.png"] = png.getvalue()
        files[f"{plot.name}.pdf"] = pdf.getvalue()
        files[f"{plot.name}.svg"] = svg.getvalue()
        if plot.data:
            data = pd.concat([pd.DataFrame(columns) for columns in plot.data])
            files[f"{plot.name}.csv"] = csv_text(data).encode()
        pictures.append((plot.caption, preview.getvalue()))
        plot.figure.clear()
        if picture.height > LARGE:
            gc.collect()
    write_files(folder, files)
    return pictures


def new_figure(height: float, *, is_wide: bool = True) -> Figure:
    """Return a figure that is `height` inches high on paper.

    It is as wide as the page, or as a column of the page, unless `WIDTH` is set.
    """
    scale = matplotlib.rcParams["font.size"] / PAPER_TEXT
    width = WIDTH.get() or scale * (PAGE if is_wide else COLUMN)
    return Figure(figsize=(width, scale * height))


def make_axes(
    num_panels: int, height: float, extra: float = 0.0, max_columns: int = 2
) -> tuple[Figure, list[Axes]]:
    """Return a figure with `num_panels` panels.

    A row has at most `max_columns` panels, and as many as fit if half of them fit into a column of
    the page. A panel is `height` inches high on paper. `extra` inches are added for what is below
    the panels. With `max_columns` above 2 all panels share their y axis.
    """
    figure = new_figure(0, is_wide=num_panels > max_columns // 2)
    scale = matplotlib.rcParams["font.size"] / PAPER_TEXT
    fitting = round(figure.get_figwidth() / (scale * PAGE) * max_columns)
    columns = min(num_panels, max_columns, max(fitting, 1))
    rows = math.ceil(num_panels / columns)
    figure.set_figheight(scale * (height * rows + extra))
    axes = list(figure.subplots(rows, columns, squeeze=False, sharey=max_columns > 2).flat)
    for unused in axes[num_panels:]:
        unused.remove()
    return figure, axes[:num_panels]


def line_axes(titles: Sequence[str], looks: Mapping[str, Look]) -> tuple[Figure, list[Axes]]:
    """Return axes with these titles for lines with these looks.

    Several lines have one legend, below all panels.
    """
    figure, all_axes = make_axes(len(titles), HEIGHT)
    if len(looks) > 1:
        size = matplotlib.rcParams["font.size"]
        columns = _legend_columns(list(looks), 72 * figure.get_figwidth() / size)
        legend = LEGEND_ROW * math.ceil(len(looks) / columns) + 0.1
        figure.set_figheight(figure.get_figheight() + legend * size / PAPER_TEXT)
        handles = [Line2D([], [], label=name, **look) for name, look in looks.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=columns)
    for title, axes in zip(titles, all_axes, strict=True):
        axes.set_title(title)
        axes.grid()
    return figure, all_axes


def _legend_columns(names: Sequence[str], width: float) -> int:
    """Return the largest number of columns of a legend with these names.

    `width` is that of the figure as a multiple of the text size. On average a character takes 0.6
    of this size, and the line of an entry with the gaps around it takes 4.2.
    """
    lengths = [len(name) for name in names]
    for columns in range(len(names), 1, -1):
        longest = [max(part) for part in np.array_split(lengths, columns)]
        if 0.6 * sum(longest) + 4.2 * columns <= width:
            return columns
    return 1


def row_axes(
    panels: Mapping[str, Sequence[str]], row: float, margin: float, extra: float = 0.0
) -> tuple[Figure, list[Axes]]:
    """Return axes with a row for each method, from the top down.

    `panels` has the methods of each panel by its title. A row is `row` inches high, and each panel
    has a `margin` in inches around its rows. `extra` is as in `make_axes`.
    """
    num_rows = max(map(len, panels.values()))
    figure, all_axes = make_axes(len(panels), row * num_rows + margin, extra)
    for (title, methods), axes in zip(panels.items(), all_axes, strict=True):
        axes.set_title(title)
        axes.set_yticks(range(len(methods)), list(methods))
        axes.set_ylim(len(methods) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
    return figure, all_axes


def write_beside_rows(axes: Axes, texts: Sequence[str]) -> None:
    """Write the texts to the right of the rows of `row_axes`, one beside each row."""
    for number, text in enumerate(texts):
        place = (1.02, number)
        axes.annotate(text, place, xycoords=("axes fraction", "data"), va="center")


def accuracy_plots(
    panels: Mapping[str, Lines], looks: Mapping[str, Look], log_x: bool | None = None
) -> list[Plot]:
    """Return a figure of test accuracy against each of `AXES` whose quantities all runs recorded.

    `log_x` says whether the axes are logarithmic. None: those of costs are, if the totals of the
    lines of a panel differ by more than `LOG_RATIO`.
    """
    curves = {}
    all_runs: list[Run] = []
    for title, lines in panels.items():
        for method, runs in lines.items():
            curves[title, method] = accuracy_curve(runs)
            all_runs += runs
    plots = []
    for axis_name, axis in AXES.items():
        if not is_recorded(all_runs, axis.names):
            continue
        spent = {}
        for (title, method), curve in curves.items():
            x = spent_until(panels[title][method], axis_name)
            spent[title, method] = x[curve.rounds - 1]
        is_log = log_x if log_x is not None else _differ_much(spent)
        figure, all_axes = line_axes(list(panels), looks)
        data = []
        for (title, lines), axes in zip(panels.items(), all_axes, strict=True):
            axes.set_xscale("log" if is_log else "linear")
            for method, runs in lines.items():
                x, curve = spent[title, method], curves[title, method]
                number = list(looks).index(method)
                _draw_curve(axes, x, curve, looks[method], number, len(runs), len(lines))
                data.append(
                    {
                        "setting": title,
                        "method": method,
                        "seeds": len(runs),
                        axis_name: x,
                        "accuracy": curve.smoothed,
                        "lowest": curve.low,
                        "highest": curve.high,
                        "single_rounds": curve.raw,
                    }
                )
            _label_axes(axes, axis_name, is_log)
        name = f"accuracy_{axis_name}"
        drawn = _drawn(panels, curves)
        plots.append(Plot(name, CAPTIONS[name].format(drawn=drawn), figure, data))
    return plots


def draw_accuracy(
    lines: Lines, looks: Mapping[str, Look], axis_name: str, axes: Axes | None = None
) -> Axes:
    """Draw the test accuracy of the lines against one of `AXES`, in the caller's style.

    The `axes` are the caller's, or those of a new figure of pyplot. They are returned. `lines` may
    have unfinished runs, which need at least one round.
    """
    if axes is None:
        from matplotlib import pyplot  # here: it may open a window

        axes = pyplot.figure(layout="constrained").subplots()
    for number, (method, runs) in enumerate(lines.items()):
        curve = accuracy_curve(runs)
        x = spent_until(runs, axis_name)[curve.rounds - 1]
        colour = colour_on_page(looks[method])  # C0 would be a colour of the caller's palette
        look = {**looks[method], "color": colour, "label": method, "markerfacecolor": "white"}
        _draw_curve(axes, x, curve, look, number, len(runs), len(lines))
    _label_axes(axes, axis_name, is_log=False)
    axes.grid(alpha=0.3)
    axes.legend()
    return axes


def _label_axes(axes: Axes, axis_name: str, is_log: bool) -> None:
    """Set labels and ticks of test accuracy against one of `AXES`."""
    axis = AXES[axis_name]
    axes.set(xlabel=f"{axis.label} (log scale)" if is_log else axis.label)
    axes.set_ylabel("test accuracy")
    if is_log:
        axes.xaxis.set_major_locator(LogLocator(numticks=6))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    elif axis_name == "rounds" or axis.unit is not None:
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=axis_name == "rounds"))
    if axis.unit is not None:
        axes.xaxis.set_major_formatter(EngFormatter(axis.unit))


def _differ_much(spent: Mapping[tuple[str, str], Floats]) -> bool:
    """Return whether the totals of the lines of a panel differ by more than `LOG_RATIO`.

    `spent` has the costs of each line until its rounds, by panel and method.
    """
    totals: dict[str, list[float]] = {}
    for (title, _), x in spent.items():
        totals.setdefault(title, []).append(x[-1])
    return any(max(values) > LOG_RATIO * min(values) for values in totals.values())


def _drawn(panels: Mapping[str, Lines], curves: Mapping[tuple[str, str], AccuracyCurve]) -> str:
    """Return the words of a caption on what the lines of accuracy are."""
    text = "means over seeds"
    num_lines = max(map(len, panels.values()))
    window = max(curve.window for curve in curves.values())
    if window > 1:
        text += f" of the last {window} rounds"
        if num_lines <= MAX_BEHIND:
            text += ", those of single rounds faintly behind"
    return f"{text}, with the range of seeds" if num_lines <= MAX_RANGES else text


def _draw_curve(
    axes: Axes,
    x: Floats,
    curve: AccuracyCurve,
    look: Look,
    number: int,
    num_seeds: int,
    num_lines: int,
) -> None:
    """Draw a curve with the range of its seeds, and faintly its unsmoothed accuracies.

    `number` is the number of the line in the legend, from 0. `num_lines` is the number of lines in
    the panel: of many, the curves alone are drawn.
    """
    colour = look["color"]
    if curve.window > 1 and num_lines <= MAX_BEHIND:
        axes.plot(x, curve.raw, color=colour, linewidth=0.5, alpha=0.25, zorder=1)
    if num_seeds > 1 and len(x) == 1:
        ends = np.array([curve.low, curve.high])
        reach = np.abs(ends - curve.smoothed)  # rounding can put the mean of equal values above
        axes.errorbar(x, curve.smoothed, reach, color=colour, linewidth=0.8, capsize=2)
    elif num_seeds > 1 and num_lines <= MAX_RANGES:
        axes.fill_between(x, curve.low, curve.high, color=colour, alpha=0.12, linewidth=0)
    step = max(1, len(x) // MARKS)
    first = int(number % MARKS / MARKS * step)  # so that markers of lines do not cover each other
    axes.plot(x, curve.smoothed, markevery=(first, step), **look)


def coverage_plot(runs: pd.DataFrame) -> Plot:
    """Return a figure of the share of clients that have been selected so far, round by round."""

    def median(rows: pd.DataFrame) -> str:
        return show_reached(median_reached(measured(rows, "rounds_to_cover")))

    return _strips("coverage", runs, "coverage", "log", median)


def participation_plot(runs: pd.DataFrame) -> Plot:
    """Return a figure of the share of clients that upload, round by round."""

    def percent(rows: pd.DataFrame) -> str:
        mean = measured(rows, "participation").mean()
        return "-" if math.isnan(mean) else f"{100 * mean:.3g} %"

    return _strips("participation", runs, "participation_ratio", "linear", percent)


def _strips(
    name: str, runs: pd.DataFrame, key: str, scale: str, describe: Callable[[pd.DataFrame], str]
) -> Plot:
    """Return a figure with a strip for each method, whose colour shows a value for each round.

    The value is the mean over seeds of the recorded quantity `key`. `describe` returns the text to
    the right of a method's strip. `scale` is that of the axis of rounds.
    """
    panels = {title: by(rows, "method") for title, rows in by_setting(runs).items()}
    means = {}
    for group, rows in by(runs, "group").items():
        means[group] = stack_series(list(rows["run"]), key).mean(0)
    # Coverage, the figure with a logarithmic axis, ends at 1. Participation may stay far below.
    highest = 1.0 if scale == "log" else max(float(values.max()) for values in means.values())
    titles = {title: list(lines) for title, lines in panels.items()}
    figure, all_axes = row_axes(titles, 0.17, 0.8)
    data = []
    for (title, lines), axes in zip(panels.items(), all_axes, strict=True):
        for number, (method, rows) in enumerate(lines.items()):
            values = means[rows["group"].iloc[0]]
            rounds = np.arange(1, len(values) + 1)
            data.append({"setting": title, "method": method, "round": rounds, name: values})
            x = np.arange(len(values) + 1) + 0.5  # edges of cells: a round is in the middle
            y = [number - 0.4, number + 0.4]
            mesh = axes.pcolormesh(x, y, values[None], vmin=0, vmax=highest, rasterized=True)
        write_beside_rows(axes, [describe(rows) for rows in lines.values()])
        axes.set(xlabel="round", xscale=scale)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
    aspect = 30 * all_axes[0].get_position().height
    figure.colorbar(mesh, ax=all_axes, label=name, fraction=0.05, aspect=aspect)
    return Plot(name, CAPTIONS[name], figure, data)


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
    figure, all_axes = line_axes(list(shown), looks)
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
        axes.set(xlabel="clients, sorted by accuracy [%]", ylabel="accuracy on the client")
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
    client.
    """
    figure, places = make_axes(len(divisions), 2.3)
    data = []
    for (title, histograms), place in zip(divisions.items(), places, strict=True):
        spec = place.get_subplotspec()
        assert spec is not None  # `make_axes` has placed it in a grid
        place.remove()
        grid = spec.subgridspec(2, 1, height_ratios=(2, 5), hspace=0)
        axes = figure.add_subplot(grid[1])
        totals = figure.add_subplot(grid[0], sharex=axes)
        order = np.lexsort((-histograms.max(1), histograms.argmax(1)))
        counts = histograms[order]
        num_clients, num_labels = counts.shape
        held = np.where(counts > 0, counts, np.nan).T  # cells without samples stay empty
        image = axes.imshow(held, vmin=0, aspect="auto", interpolation="none", rasterized=True)
        figure.colorbar(image, ax=axes, label="samples of a label", pad=0.02)
        axes.set(xlabel="clients, sorted by their most frequent label", ylabel="label")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if num_labels <= 10:
            axes.set_yticks(range(num_labels))
        edges = np.arange(num_clients + 1) - 0.5
        totals.stairs(counts.sum(1), edges, fill=True, color="grey")
        totals.tick_params(axis="x", labelbottom=False, length=0)
        totals.set(title=title, ylabel="samples")
        clients, labels = np.nonzero(histograms)
        samples = histograms[clients, labels]
        data.append({"division": title, "client": clients, "label": labels, "samples": samples})
    return Plot("partitions", CAPTIONS["partitions"], figure, data)


def histogram_plot(panels: Mapping[str, Lines], looks: Mapping[str, Look]) -> Plot:
    """Return a figure with a histogram for each method: how often clients were selected."""
    figure, all_axes = row_axes({title: list(lines) for title, lines in panels.items()}, 0.3, 0.7)
    data = []
    for (title, lines), axes in zip(panels.items(), all_axes, strict=True):
        counts = {
            method: np.stack([run.selections for run in runs]) for method, runs in lines.items()
        }
        edges = histogram_edges(max(int(values.max()) for values in counts.values()))
        never = []
        for row, (method, values) in enumerate(counts.items()):
            heights, _ = np.histogram(values, edges)
            bottom = row + 0.45  # rows are 1 high and counted downwards, so that tops are smaller
            tops = bottom - 0.85 * heights / heights.max()
            axes.stairs(tops, edges, baseline=bottom, fill=True, color=looks[method]["color"])
            never.append(f"{(values == 0).sum(1).mean():.3g} never")
            data.append(
                {
                    "setting": title,
                    "method": method,
                    "selections_from": edges[:-1] + 0.5,
                    "selections_to": edges[1:] - 0.5,
                    "clients_of_all_seeds": heights,
                }
            )
        write_beside_rows(axes, never)
        axes.set(xlabel="selections of a client")
    return Plot("selections", CAPTIONS["selections"], figure, data)


def histogram_edges(highest: int) -> Floats:
    """Return the edges of at most `BINS` bars of equal width for whole numbers from 0 to
    `highest`."""
    width = math.ceil((highest + 1) / BINS)
    bars = math.ceil((highest + 1) / width)
    return np.arange(bars + 1, dtype=np.float64) * width - 0.5


def imperfect_plot(runs: pd.DataFrame, looks: Mapping[str, Look]) -> Plot | None:
    """Return a figure of how often methods chose imperfect clients, a row for each method; None if
    all clients are honest."""
    by_title: dict[str, dict[str, Preference]] = {}
    for preference in preferences(runs):
        by_title.setdefault(preference.setting, {})[preference.method] = preference
    if not by_title:
        return None
    figure, all_axes = row_axes({title: list(rows) for title, rows in by_title.items()}, 0.2, 0.8)
    data = []
    for rows, axes in zip(by_title.values(), all_axes, strict=True):
        for row, preference in enumerate(rows.values()):
            look = looks[preference.method]
            share = preference.chosen_share
            low, high = share.interval
            data.append(
                {
                    "setting": preference.setting,
                    "method": preference.method,
                    "seeds": [share.num],
                    "share_of_choices": share.mean,
                    "low": low,
                    "high": high,
                    "share_of_clients": preference.client_share,
                }
            )
            reach = [[abs(end - share.mean)] for end in share.interval]
            expected = [preference.client_share] * 2
            ends = [row - 0.5, row + 0.5]
            axes.plot(expected, ends, color="grey", linestyle="--", linewidth=0.8)
            axes.plot(share.values, [row] * share.num, ".", **dots_of(look))
            axes.errorbar(share.mean, row, xerr=reach, elinewidth=0.8, capsize=2, **look)
        axes.set(xlabel="share of its choices that are imperfect clients", xlim=(0, None))
    return Plot("imperfect", CAPTIONS["imperfect"], figure, data)


def dots_of(look: Look) -> dict[str, Any]:
    """Return how the results of single seeds look, as matplotlib's keyword arguments."""
    colour = look["color"]
    return {"color": colour, "markerfacecolor": colour, "alpha": 0.4}


def round_plots(panels: Mapping[str, Lines]) -> list[Plot]:
    """Return a figure for each setting, with a map for each method: which client was selected in
    which round, at the first seed."""
    plots = []
    for number, (title, lines) in enumerate(panels.items(), 1):
        name = "selections_rounds" if len(panels) == 1 else f"selections_rounds_{number}"
        caption = CAPTIONS["selections_rounds"].format(title=f" ({title})" if title else "")
        data = []
        for method, runs in lines.items():
            rounds, clients = runs[0].rounds.chosen
            data.append(
                {"setting": title, "method": method, "round": rounds + 1, "client": clients}
            )
        plots.append(Plot(name, caption, _maps(title, lines), data))
    return plots


def _maps(title: str, lines: Lines) -> Figure:
    """Return the figure of one setting for `round_plots`."""
    maps = {method: _selected_by_round(runs[0]) for method, runs in lines.items()}
    highest = max(values.max() for values in maps.values())
    figure, all_axes = make_axes(len(maps), 1.5, 0.4, max_columns=4)
    for axes, (method, values) in zip(all_axes, maps.items(), strict=True):
        extent = (0.5, lines[method][0].rounds.num + 0.5, len(values) - 0.5, -0.5)
        image = axes.imshow(
            np.where(values > 0, values, np.nan),
            vmin=0,
            vmax=highest,
            aspect="auto",
            interpolation="nearest",
            extent=extent,
            rasterized=True,
        )
        axes.set_title(method)
    for axes in all_axes[::4]:  # the first panel of each row
        axes.set_ylabel("client")
    figure.supxlabel("round", fontsize="medium")
    if title:
        figure.suptitle(title)
    figure.colorbar(image, ax=all_axes, label="share of rounds", fraction=0.03)
    return figure


def _selected_by_round(run: Run) -> Floats:
    """Return the map of a run, [N, columns].

    A column stands for one round or several. Each value is the share of its rounds in which the
    client was selected.
    """
    num_rounds = run.rounds.num
    columns = min(num_rounds, MAX_COLUMNS)
    rounds, clients = run.rounds.chosen
    counts = np.zeros((run.num_clients, columns))
    np.add.at(counts, (clients, rounds * columns // num_rounds), 1)
    column_of_round = np.arange(num_rounds) * columns // num_rounds
    return counts / np.bincount(column_of_round, minlength=columns)


def phases_plot(
    name: str, panels: Mapping[str, Lines], phases: Sequence[str], prefix: str, label: str
) -> Plot:
    """Return a figure with a bar for each method, whose parts are the mean durations of phases.

    `phases` are selection, training, and so on. A duration is the sum over rounds of the recorded
    quantity `prefix` + phase.
    """
    titles = {title: list(lines) for title, lines in panels.items()}
    figure, all_axes = row_axes(titles, 0.2, 0.7, 0.25)
    colours = matplotlib.colormaps["cividis"](np.linspace(0, 1, len(phases)))
    data = []
    for (title, lines), axes in zip(panels.items(), all_axes, strict=True):
        left = np.zeros(len(lines))
        for phase, colour in zip(phases, colours, strict=True):
            key = f"{prefix}{phase}"
            means = [np.mean([run.columns[key].sum() for run in runs]) for runs in lines.values()]
            axes.barh(range(len(left)), means, left=left, color=colour, height=0.7, label=phase)
            left += means
            data.append({"setting": title, "method": list(lines), "phase": phase, "seconds": means})
        axes.set(xlabel=label)
    figure.legend(
        *all_axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=len(phases),
        columnspacing=1,
        handlelength=1,
    )
    return Plot(name, CAPTIONS[name], figure, data)
