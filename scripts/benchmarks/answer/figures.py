"""The figures of docs/benchmark.md: mean gains at equal cost, gains by regime, and gains over
rounds."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from fedsim.benchmark.rules import CONTROLS
from fedsim.report.looks import Look, make_looks
from fedsim.results.statistics import ALPHA
from scripts.benchmarks.answer.answer import BUDGETS, Answer
from scripts.benchmarks.answer.scores import NO_METHODS
from scripts.benchmarks.answer.wording import REGIMES

WIDTH, ROW, DPI = 7.2, 0.165, 170
"""Inches of a figure and of a row, and dots per inch."""
GREY = "0.55"
Ends = tuple[float, float]
"""The lowest and the highest gain of an axis."""
CURVE_ENDS: Ends = (-8, 6)


def overview(answer: Answer) -> Figure:
    """Draw each method's mean gain over regimes with its interval: a panel for each budget.

    The mark is filled if the mean gain is significant.
    """
    panels: dict[str, pd.DataFrame] = {}
    for budget, rows in answer.overall_at.items():
        if not panels:  # equal rounds; the references are no runs that spend bytes and time
            rows = pd.concat([rows, answer.overall_references])
        panels[f"at {budget}"] = rows
    label = "mean gain over random selection in percentage points, with 95 % interval"
    return _forest(answer, panels, label, (-8, 6))


def by_regime(answer: Answer) -> Figure:
    """Draw each method's gain with its interval: a panel for each regime.

    The mark is filled if the gain is significant.
    """
    all_rows = pd.concat([answer.intervals, answer.references])
    panels = {}
    for schedule, num_rounds in REGIMES:
        rows = all_rows.xs((schedule, num_rounds), level=("schedule", "num_rounds"))
        panels[f"{schedule}\n{num_rounds} rounds"] = rows
    label = "gain over random selection in percentage points, with 95 % interval"
    return _forest(answer, panels, label, (-6, 6))


def _forest(answer: Answer, panels: Mapping[str, pd.DataFrame], label: str, ends: Ends) -> Figure:
    """Draw gains with their intervals: a row for each method, a panel for each table of gains.

    Methods stand under what they ask for, in bold. The references are at the end. `panels` has the
    rows of methods by the title of the panel, and `label` is that of the axis.
    """
    groups = _groups(answer)
    untested = {*CONTROLS, *groups["references"]}
    labels: list[str] = []
    for title, names in groups.items():
        labels.extend([title, *names])
    heights = {name: -number for number, name in enumerate(labels)}
    figure = Figure(figsize=(WIDTH, ROW * len(labels) + 0.9))
    all_axes = figure.subplots(1, len(panels), sharey=True, sharex=True)
    for axes, (title, rows) in zip(all_axes, panels.items(), strict=True):
        axes.set_title(title)
        axes.axvline(0, color="0.4", linewidth=0.7)
        for name in labels:
            if name not in rows.index:
                continue
            row = rows.loc[name]
            colour = GREY if name in untested else "black"
            _draw_gain(axes, heights[name], row, colour, ends)
        axes.grid(axis="y", color="0.85")
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
    first = all_axes[0]
    first.set(xlim=ends, ylim=(-len(labels) + 0.3, 0.7))
    ticks = [tick for tick in (-6, -3, 0, 3, 6) if ends[0] < tick < ends[1]]
    first.set_xticks(ticks, [f"{tick:+d}" if tick else "0" for tick in ticks])
    first.set_yticks([-number for number in range(len(labels))], labels)
    for text in first.get_yticklabels():
        if text.get_text() in groups:
            text.set_fontweight("bold")
    figure.supxlabel(label, fontsize="medium")
    return figure


def _groups(answer: Answer) -> dict[str, list[str]]:
    """Return the methods under what they ask for, the best one first. Controls and references
    follow."""
    groups: dict[str, list[str]] = {}
    for name in answer.methods:
        if name not in (*CONTROLS, *NO_METHODS):
            groups.setdefault(f"asks for {answer.class_of(name)}", []).append(name)
    groups["random selection again"] = [name for name in CONTROLS if name in answer.methods]
    selectors = [name for name in NO_METHODS if name in answer.methods]
    groups["references"] = [*selectors, *answer.overall_references.index]
    return groups


def _draw_gain(axes: Axes, height: float, row: pd.Series, colour: str, ends: Ends) -> None:
    """Draw a gain with its interval, or its number at the edge if it lies beyond."""
    low, high = ends
    gain, half = row["gain"], row["half"]
    if not 0.95 * low < gain < 0.95 * high:  # a marker closer to the edge would be cut
        edge, align = (low, "left") if gain < 0 else (high, "right")
        number = f"{gain:+.0f}" if np.isnan(half) else f"{gain:+.0f} ± {half:.0f}"
        if row.get("p_holm", np.nan) < ALPHA:
            text = f"◂ {number}" if gain < 0 else f"{number} ▸"
        else:
            text = f"◃ {number}" if gain < 0 else f"{number} ▹"
        axes.text(edge, height, text, color=colour, ha=align, va="center", fontsize=7)
        return
    is_beyond = row.get("p_holm", np.nan) < ALPHA
    axes.errorbar(
        gain,
        height,
        xerr=None if np.isnan(half) else half,
        color=colour,
        marker="o",
        markersize=3.6,
        markerfacecolor=colour if is_beyond else "white",
        elinewidth=0.9,
    )
    if gain - half < low:  # the interval is cut
        axes.plot(low, height, "<", color=colour, markersize=2.5, clip_on=False)
    if gain + half > high:
        axes.plot(high, height, ">", color=colour, markersize=2.5, clip_on=False)


def curves(answer: Answer) -> Figure:
    """Draw gains against shares of what random selection has in all: a row of panels for each
    regime, a column for rounds, bytes and simulated time.

    The interval of the first method is shaded.
    """
    methods = answer.drawn
    looks = _looks_of_curves(methods)
    figure = Figure(figsize=(WIDTH, 1.05 * len(REGIMES) + 0.7))
    panels = figure.subplots(len(REGIMES), len(BUDGETS), sharex=True, sharey=True)
    for row_of_panels, (schedule, num_rounds) in zip(panels, REGIMES, strict=True):
        row_of_panels[0].set_ylabel(f"{schedule}\n{num_rounds} rounds")
        for axes, budget in zip(row_of_panels, BUDGETS, strict=True):
            rows = answer.curves.set_index(["budget", "schedule", "num_rounds"]).sort_index()
            rows = rows.loc[(budget, schedule, num_rounds)]
            axes.axhline(0, color="0.4", linewidth=0.7)
            for name in reversed(methods):
                _draw_curve(axes, rows[rows["method"] == name], looks[name], name, methods[0])
    for axes, label in zip(panels[-1], ("rounds", "bytes", "simulated time"), strict=True):
        axes.set_xlabel(f"share of {label}")
    panels[0, 0].set(xlim=(0, 1), ylim=CURVE_ENDS)
    figure.supylabel("gain over random selection in percentage points", fontsize="medium")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside upper center", ncols=len(methods))
    return figure


def _draw_curve(axes: Axes, rows: pd.DataFrame, look: Look, name: str, shaded: str) -> None:
    """Draw the gain of one method over shares, with its interval if it is the `shaded` one."""
    axes.plot(rows["share"], rows["gain"], **look, markevery=4, label=name)
    if name == shaded:
        low, high = rows["gain"] - rows["half"], rows["gain"] + rows["half"]
        axes.fill_between(rows["share"], low, high, color=look["color"], alpha=0.15, linewidth=0)


def _looks_of_curves(methods: Sequence[str]) -> dict[str, Look]:
    """Return the looks of curves. They have the dashes and markers of all figures, but colours of
    their own, because two methods may have the same colour elsewhere. Controls are grey."""
    looks = make_looks({name: _selector(name) for name in methods})
    looks_of_curves: dict[str, Look] = {}
    for number, (name, look) in enumerate(looks.items(), 1):
        colour = GREY if name in CONTROLS else f"C{number}"
        looks_of_curves[name] = {**look, "color": colour}
    return looks_of_curves


def _selector(method: str) -> str:
    return "random_control" if method in CONTROLS else method


def save(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG file of few colours, which is small."""
    picture = io.BytesIO()
    figure.savefig(picture, dpi=DPI)
    Image.open(picture).convert("RGB").quantize(64).save(path, optimize=True)
