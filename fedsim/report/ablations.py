"""Figures of ablations (`fedsim.results.ablations`): final accuracy by the values of a number, or a
map by two."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.transforms import ScaledTranslation

from fedsim.report.figures import CAPTIONS, SMALL, Plot, line_axes, make_axes, style
from fedsim.report.page import Look, make_looks
from fedsim.results.ablations import Ablation, Point


def ablation_plots(ablations: Sequence[Ablation]) -> list[Plot]:
    with style():
        return [_map_plot(one) if len(one.keys) > 1 else _line_plot(one) for one in ablations]


def _line_plot(ablation: Ablation) -> Plot:
    (key,), values, looks = ablation.keys, ablation.axis(0), make_looks(ablation.panels)
    figure, axes = line_axes(ablation.panels, looks)
    for panel, ax in zip(ablation.panels, axes, strict=True):
        if is_logarithmic(values):
            ax.set_xscale(
                "symlog", linthresh=min(value for value in values if value > 0), linscale=0.5
            )
        for number, name in enumerate(panel.lines):
            beside = 5.0 * (number - (len(panel.lines) - 1) / 2)  # so that intervals can be seen
            _draw_line(ax, ablation.lines[panel.title, name], looks[name], beside)
        ax.set_xticks(values, [f"{value:g}" for value in values])
        ax.set_xticks([], minor=True)
        ax.set(xlabel=key, ylabel="final test accuracy")
    return Plot(ablation.name, CAPTIONS["ablation"].format(key=key), figure)


def is_logarithmic(values: Sequence[float]) -> bool:
    """Whether the closest of the positive values, ascending, are further apart on a logarithmic
    axis."""
    if values[0] < 0:
        return False
    positive = np.array([value for value in values if value > 0])
    linear, logarithmic = (np.diff(at).min() / np.ptp(at) for at in (positive, np.log(positive)))
    return bool(logarithmic > linear)


def _draw_line(ax: Axes, points: Sequence[Point], look: Look, beside: float) -> None:
    """Means with intervals, the best filled, and the seeds' values, so many points (1/72 inch) to
    the right."""
    place, right = (
        ax.transData + ScaledTranslation(shift / 72, 0, ax.figure.dpi_scale_trans)
        for shift in (beside, beside + 2.5)
    )
    x, means = [point.values[0] for point in points], [point.mean for point in points]
    reach = [[abs(mean.interval[end] - mean.mean) for mean in means] for end in (0, 1)]
    ax.errorbar(
        x, [mean.mean for mean in means], reach, elinewidth=0.8, capsize=2, transform=place, **look
    )
    for at, mean, point in zip(x, means, points, strict=True):
        ax.plot(
            [at] * mean.num,
            mean.values,
            ".",
            color=look["color"],
            alpha=0.5,
            markersize=3,
            transform=right,
        )
        if point.best:
            ax.plot(
                at,
                mean.mean,
                zorder=3,
                transform=place,
                **{**look, "markerfacecolor": look["color"]},
            )
        ax.update_datalim([(at, end) for end in (*mean.interval, *mean.values)])
    ax.autoscale_view()


def _map_plot(ablation: Ablation) -> Plot:
    """A map for each line, all of one scale: rows the first number, columns the second."""
    rows, columns = ablation.axis(0), ablation.axis(1)
    figure, axes = make_axes(len(ablation.lines), 0.36 * len(rows) + 0.7)
    means = [point.mean.mean for points in ablation.lines.values() for point in points]
    for (line, points), ax in zip(ablation.lines.items(), axes, strict=True):
        cells = np.full((len(rows), len(columns)), np.nan)
        for point in points:
            at = rows.index(point.values[0]), columns.index(point.values[1])
            cells[at] = point.mean.mean
            _draw_cell(ax, point, *at)
        image = ax.imshow(
            cells, vmin=min(means), vmax=max(means), cmap="viridis", aspect="auto", origin="lower"
        )
        ax.set_xticks(range(len(columns)), [f"{value:g}" for value in columns])
        ax.set_yticks(range(len(rows)), [f"{value:g}" for value in rows])
        ax.set(xlabel=ablation.keys[1], ylabel=ablation.keys[0], title=" ".join(line).strip())
    figure.colorbar(image, ax=axes, label="final test accuracy", pad=0.02)
    return Plot(
        ablation.name, CAPTIONS["ablation_map"].format(keys=" and ".join(ablation.keys)), figure
    )


def _draw_cell(ax: Axes, point: Point, row: int, column: int) -> None:
    """The mean in its cell; that of the best framed, the cells that cannot be told apart from it
    hatched."""
    if point.level:
        corner = column - 0.5, row - 0.5
        ax.add_patch(
            Rectangle(
                corner, 1, 1, fill=False, hatch="////", edgecolor="white", linewidth=0, alpha=0.5
            )
        )
    box = {
        "facecolor": "white",
        "edgecolor": "#D55E00" if point.best else "none",
        "linewidth": 1.5,
        "pad": 1.5,
    }
    ax.text(column, row, f"{point.mean.mean:.3f}", size=SMALL, ha="center", va="center", bbox=box)
