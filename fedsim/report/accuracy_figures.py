"""Figures of test accuracy against rounds and costs."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.ticker import EngFormatter

from fedsim.core.arrays import Floats
from fedsim.report.curves import AXES, AccuracyCurve, accuracy_curve, spent_until
from fedsim.report.drawing import CAPTIONS, LABELS, Plot
from fedsim.report.end_labels import fit_end_names, label_ends, make_room
from fedsim.report.layout import (
    MARKS,
    MAX_BEHIND,
    MAX_RANGES,
    NAMES_SHARE,
    Lines,
    line_axes,
    num_columns_of,
)
from fedsim.report.looks import Look, colour_on_page
from fedsim.report.ticks import FittingSteps, set_log_scale
from fedsim.results.measures import is_recorded
from fedsim.results.runs import Run

LOG_RATIO = 10
"""An axis is logarithmic if a line's total is more than this many times another's."""


class CostCurve(NamedTuple):
    """The accuracy of a line of a panel, against what its runs spent."""

    spent: Floats
    """The total of the axis that was spent until each round of the curve [T]."""
    accuracy: AccuracyCurve
    num_seeds: int


Panel = Mapping[str, CostCurve]
"""The lines of a panel, by method."""


def accuracy_plots(
    panels: Mapping[str, Lines], looks: Mapping[str, Look], log_x: bool | None = None
) -> list[Plot]:
    """Return a figure of test accuracy against each of `AXES` whose quantities all runs recorded.

    `panels` has the runs of each panel by its title, and `looks` those of all methods in the order
    of the legend. `log_x` says whether the axes are logarithmic. If it is None, those of a figure
    are where the totals of the lines of one of its panels differ by more than `LOG_RATIO`.
    """
    all_runs: list[Run] = []
    for lines in panels.values():
        for runs in lines.values():
            all_runs += runs
    plots = []
    for axis_name, axis in AXES.items():
        if is_recorded(all_runs, axis.names):
            curves = {title: _cost_curves(lines, axis_name) for title, lines in panels.items()}
            plots.append(_accuracy_plot(curves, looks, axis_name, log_x))
    return plots


def _accuracy_plot(
    panels: Mapping[str, Panel], looks: Mapping[str, Look], axis_name: str, log_x: bool | None
) -> Plot:
    """Return the figure of test accuracy against one of `AXES`. Arguments are as in
    `accuracy_plots`."""
    is_log = log_x if log_x is not None else _differ_much(panels.values())
    has_ends = LABELS.get() == "ends" and len(looks) > 1
    label = _axis_label(axis_name, is_log)
    num_lines = max(map(len, panels.values()))
    figure, all_axes = line_axes(list(panels), looks, label, has_legend=not has_ends)
    max_width = NAMES_SHARE * figure.get_figwidth() / num_columns_of(all_axes[0])
    if has_ends:
        names = [fit_end_names(list(panel), max_width) for panel in panels.values()]
        make_room(figure, all_axes, names, label)
    data: list[dict[str, Any]] = []
    for (title, panel), axes in zip(panels.items(), all_axes, strict=True):
        for method, curve in panel.items():
            number = list(looks).index(method)
            _draw_curve(axes, curve, looks[method], number=number, num_lines=num_lines)
            data.append(
                {
                    "setting": title,
                    "method": method,
                    "seeds": curve.num_seeds,
                    axis_name: curve.spent,
                    "accuracy": curve.accuracy.smoothed,
                    "lowest": curve.accuracy.low,
                    "highest": curve.accuracy.high,
                    "single_rounds": curve.accuracy.raw,
                }
            )
        _set_ticks(axes, axis_name, is_log)
        if has_ends:
            label_ends(axes, _ends(panel), looks, max_width)
    name = f"accuracy_{axis_name}"
    return Plot(name, CAPTIONS[name].format(drawn=_drawn_in_words(panels, num_lines)), figure, data)


def draw_accuracy(
    lines: Lines,
    looks: Mapping[str, Look],
    axis_name: str,
    axes: Axes,
    log_x: bool | None = None,
    labels: str = "legend",
) -> None:
    """Draw the test accuracy of the lines against one of `AXES` into axes of the caller.

    `lines` may have unfinished runs, which need at least one round. `log_x` is as in
    `accuracy_plots`, `labels` as in `fedsim.report.drawing.LABELS`.
    """
    panel = _cost_curves(lines, axis_name)
    is_log = log_x if log_x is not None else _differ_much([panel])
    background = axes.get_facecolor()
    is_dark = sum(to_rgb(background)) < 1
    looks_on_page = {}
    for number, (method, curve) in enumerate(panel.items()):
        look = dict(looks[method], label=method, markerfacecolor=background)
        # A colour such as C0 would be one of the caller's palette.
        look["color"] = colour_on_page(looks[method], is_dark=is_dark)
        looks_on_page[method] = look
        _draw_curve(axes, curve, look, number=number, num_lines=len(panel))
    axes.set_xlabel(_axis_label(axis_name, is_log))
    _set_ticks(axes, axis_name, is_log)
    axes.grid(alpha=0.3)
    if labels == "ends":
        label_ends(axes, _ends(panel), looks_on_page)
    else:
        axes.legend()


def _cost_curves(lines: Lines, axis_name: str) -> Panel:
    """Return the curve of each method against one of `AXES`."""
    curves = {}
    for method, runs in lines.items():
        accuracy = accuracy_curve(runs)
        spent = spent_until(runs, axis_name)[accuracy.rounds - 1]
        curves[method] = CostCurve(spent, accuracy, len(runs))
    return curves


def _ends(panel: Panel) -> dict[str, tuple[float, float]]:
    """Return the end of each line: what it spent, and its final accuracy."""
    ends = {}
    for method, curve in panel.items():
        ends[method] = curve.spent[-1], curve.accuracy.smoothed[-1]
    return ends


def _axis_label(axis_name: str, is_log: bool) -> str:
    label = AXES[axis_name].label
    return f"{label} (log scale)" if is_log else label


def _set_ticks(axes: Axes, axis_name: str, is_log: bool) -> None:
    """Set the scale and ticks of test accuracy against one of `AXES`."""
    axis = AXES[axis_name]
    axes.set_ylabel("test accuracy")
    if is_log:
        set_log_scale(axes, is_whole=axis_name == "rounds")
    elif axis_name == "rounds" or axis.unit is not None:
        axes.xaxis.set_major_locator(FittingSteps(integer=axis_name == "rounds"))
    if axis.unit is not None:
        axes.xaxis.set_major_formatter(EngFormatter(axis.unit))


def _differ_much(panels: Iterable[Panel]) -> bool:
    """Return whether the totals of the lines of a panel differ by more than `LOG_RATIO`.

    They do not if any total is 0, which has no place on a logarithmic axis.
    """
    ratios = []
    for panel in panels:
        totals = [curve.spent[-1] for curve in panel.values()]
        if min(totals) <= 0:
            return False
        ratios.append(max(totals) / min(totals))
    return max(ratios) > LOG_RATIO


def _drawn_in_words(panels: Mapping[str, Panel], num_lines: int) -> str:
    """Return the words of a caption on what is drawn of accuracy (`_draw_curve`)."""
    window = max(curve.accuracy.window for panel in panels.values() for curve in panel.values())
    text = "means over seeds"
    if window > 1:
        text += f" of the last {window} rounds"
        if num_lines <= MAX_BEHIND:
            text += ", those of single rounds faintly behind"
    if num_lines <= MAX_RANGES:
        text += ", with the range of seeds"
    return text


def _draw_curve(axes: Axes, curve: CostCurve, look: Look, *, number: int, num_lines: int) -> None:
    """Draw a curve with the range of its seeds, and faintly its unsmoothed accuracies.

    `number` is that of the line in the legend, from 0. `num_lines` is the number of lines of the
    largest panel of the figure. If there are many, only the curves are drawn.
    """
    x, accuracy = curve.spent, curve.accuracy
    has_range = curve.num_seeds > 1
    colour = look["color"]
    if accuracy.window > 1 and num_lines <= MAX_BEHIND:
        axes.plot(x, accuracy.raw, color=colour, linewidth=0.5, alpha=0.25, zorder=1)
    if has_range and len(x) == 1:
        range_ends = np.array([accuracy.low, accuracy.high])
        # The mean of equal values may be outside of their range by its rounding.
        reach = np.abs(range_ends - accuracy.smoothed)
        axes.errorbar(x, accuracy.smoothed, reach, color=colour, linewidth=0.8, capsize=2)
    elif has_range and num_lines <= MAX_RANGES:
        axes.fill_between(x, accuracy.low, accuracy.high, color=colour, alpha=0.12, linewidth=0)
    # The first marker depends on the line, so that markers of lines do not cover each other.
    step = max(1, len(x) // MARKS)
    first = int((number % MARKS) / MARKS * step)
    axes.plot(x, accuracy.smoothed, markevery=(first, step), **look)
