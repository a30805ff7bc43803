"""Figures of test accuracy against rounds and costs."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.ticker import EngFormatter

from fedsim.core.arrays import Floats
from fedsim.report.curves import AXES, AccuracyCurve, accuracy_curve, spent_until
from fedsim.report.drawing import CAPTIONS, LABELS, Plot
from fedsim.report.end_labels import label_ends
from fedsim.report.layout import MARKS, MAX_BEHIND, MAX_RANGES, Lines, line_axes
from fedsim.report.looks import Look, colour_on_page
from fedsim.report.ticks import FittingSteps, set_log_scale
from fedsim.results.measures import is_recorded
from fedsim.results.runs import Run

LOG_RATIO = 10
"""Costs are drawn on a logarithmic axis if a line's total is so many times as much as another's."""


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
        label = f"{axis.label} (log scale)" if is_log else axis.label
        has_ends = LABELS.get() == "ends"
        figure, all_axes = line_axes(list(panels), looks, label, has_legend=not has_ends)
        data = []
        for (title, lines), axes in zip(panels.items(), all_axes, strict=True):
            ends = {}
            for method, runs in lines.items():
                x, curve = spent[title, method], curves[title, method]
                ends[method] = x[-1], curve.smoothed[-1]
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
            _set_ticks(axes, axis_name, is_log)
            if has_ends and len(looks) > 1:
                label_ends(axes, ends, looks)
        name = f"accuracy_{axis_name}"
        drawn = _drawn(panels, curves)
        plots.append(Plot(name, CAPTIONS[name].format(drawn=drawn), figure, data))
    return plots


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
    curves = {method: accuracy_curve(runs) for method, runs in lines.items()}
    spent = {}
    for method, runs in lines.items():
        spent["", method] = spent_until(runs, axis_name)[curves[method].rounds - 1]
    is_log = log_x if log_x is not None else _differ_much(spent)
    ends = {}
    own_looks = {}
    background = axes.get_facecolor()
    for number, (method, curve) in enumerate(curves.items()):
        # C0 would be a colour of the caller's palette.
        colour = colour_on_page(looks[method], is_dark=sum(to_rgb(background)) < 1)
        look = {**looks[method], "color": colour, "label": method, "markerfacecolor": background}
        own_looks[method] = look
        x = spent["", method]
        ends[method] = x[-1], curve.smoothed[-1]
        _draw_curve(axes, x, curve, look, number, len(lines[method]), len(lines))
    label = AXES[axis_name].label
    axes.set_xlabel(f"{label} (log scale)" if is_log else label)
    _set_ticks(axes, axis_name, is_log)
    axes.grid(alpha=0.3)
    if labels == "ends":
        label_ends(axes, ends, own_looks)
    else:
        axes.legend()


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
