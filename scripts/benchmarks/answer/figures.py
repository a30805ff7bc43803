"""The figures of docs/benchmark.md: mean gains at equal cost, gains by regime, and gains over
rounds."""

import io
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image

from fedsim.benchmark.rules import CONTROLS
from fedsim.report.looks import CLASS_COLOURS, Look, make_looks
from fedsim.results.statistics import ALPHA
from scripts.benchmarks.answer.answer import BUDGETS, Answer
from scripts.benchmarks.answer.scores import NO_METHODS
from scripts.benchmarks.answer.tables import REGIMES

WIDTH, ROW, DPI = 7.2, 0.165, 170
"""Inches of a figure and of a row, and dots per inch."""
OVERVIEW_ENDS = (-8, 6)
"""Ends of the axis of mean gains."""
GREY = "0.55"
SETTLED = 0.25
"""Share from which on curves must fit their panels."""


def overview(answer: Answer) -> Figure:
    """Draw each method's mean gain over regimes with its interval: a row for each method, a panel
    for each budget.

    Methods stand under what they ask for, in bold. The references are at the end.
    """
    groups = _groups(answer)
    labels: list[str] = []
    for title, names in groups.items():
        labels.extend([title, *names])
    heights = {label: -number for number, label in enumerate(labels)}
    figure = Figure(figsize=(WIDTH, ROW * len(labels) + 0.75))
    panels = figure.subplots(1, len(answer.overall_at), sharey=True, sharex=True)
    for axes, (budget, rows) in zip(panels, answer.overall_at.items(), strict=True):
        axes.set_title(f"at {budget}")
        axes.axvline(0, color="0.4", linewidth=0.7)
        if budget == "equal rounds":
            rows = pd.concat([rows, answer.overall_references])
        for name, row in rows.iterrows():
            colour = GREY if name in CONTROLS else "black"
            _draw_mean(axes, heights[str(name)], row, colour)
        axes.grid(axis="y", color="0.85")
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
    first = panels[0]
    first.set(xlim=OVERVIEW_ENDS, ylim=(-len(labels) + 0.3, 0.7))
    first.set_xticks([-6, -3, 0, 3, 6])
    first.set_yticks([-number for number in range(len(labels))], labels)
    for text in first.get_yticklabels():
        if text.get_text() in groups:
            text.set_fontweight("bold")
    figure.supxlabel(
        "mean gain over random selection in percentage points, with 95 % interval",
        fontsize="medium",
    )
    return figure


def _groups(answer: Answer) -> dict[str, list[str]]:
    """Return what methods ask for, with the methods that ask for it, the best one first."""
    groups: dict[str, list[str]] = {}
    for name in answer.methods:
        if name not in (*CONTROLS, *NO_METHODS):
            groups.setdefault(answer.classes[name], []).append(name)
    groups["random selection again"] = [name for name in CONTROLS if name in answer.methods]
    selectors = [name for name in NO_METHODS if name in answer.methods]
    groups["references"] = [*selectors, *answer.overall_references.index]
    return groups


def _draw_mean(axes: Axes, height: float, row: pd.Series, colour: str) -> None:
    """Draw a mean gain with its interval, or its number at the edge if it lies beyond."""
    low, _ = OVERVIEW_ENDS
    gain, half = row["gain"], row["half"]
    if gain < low:
        text = f"◂ {gain:.0f}" if np.isnan(half) else f"◂ {gain:.0f} ± {half:.0f}"
        axes.text(low, height, text, color=colour, ha="left", va="center", fontsize=7)
        return
    xerr = None if np.isnan(half) else half
    axes.errorbar(gain, height, xerr=xerr, color=colour, marker="D", markersize=2.8, elinewidth=0.9)


def by_regime(answer: Answer) -> Figure:
    """Draw each method's gain with its interval: a row for each method, a panel for each regime.

    The colour says what a method asks for. The references are below the methods, in black.
    """
    order = [name for name in answer.methods if name not in NO_METHODS]
    classes = {name: answer.classes[name] for name in order}
    intervals, references = answer.intervals, answer.references
    selectors = [name for name in answer.methods if name in NO_METHODS]
    names = [*order, *selectors, *references.index.unique("method")]
    kinds = list(dict.fromkeys(classes.values()))
    colours = dict(zip(kinds, CLASS_COLOURS, strict=False))
    gap = 1.0  # between methods and references
    heights = {}
    for number, name in enumerate(names):
        heights[name] = -(number + gap * (number >= len(order)))
    limit = _limit(pd.concat([intervals, references]))
    figure = Figure(figsize=(WIDTH, ROW * len(names) + 1.35))
    panels = figure.subplots(1, len(REGIMES), sharey=True, sharex=True)
    for axes, regime in zip(panels, REGIMES, strict=True):
        schedule, num_rounds = regime
        axes.set_title(f"{schedule}\n{num_rounds} rounds")
        axes.axvline(0, color="0.4", linewidth=0.7)
        axes.axhline(heights[names[len(order)]] + 1, color="0.8", linewidth=0.6)
        for name, height in heights.items():
            source = references if name in references.index else intervals
            if (name, *regime) in source.index:
                row = source.loc[(name, *regime)]
                colour = colours[classes[name]] if name in classes else "black"
                colour = GREY if name in CONTROLS else colour
                _draw_gain(axes, height, row, colour, limit)
        axes.grid(axis="y", color="0.85")
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
    first = panels[0]
    first.set(xlim=(-limit, limit), ylim=(min(heights.values()) - 0.7, 0.7))
    first.set_xticks([-limit / 2, 0, limit / 2], [f"{-limit / 2:+g}", "0", f"{limit / 2:+g}"])
    first.set_yticks(list(heights.values()), list(heights))
    figure.supxlabel(
        "gain over random selection in percentage points, with 95 % interval", fontsize="medium"
    )
    handles = [Line2D([], [], marker="o", color=colours[kind], label=kind) for kind in kinds]
    for label, face in (("not beyond chance", "white"), ("beyond chance", "black")):
        handle = Line2D([], [], marker="o", linestyle="", color="black", label=label)
        handle.set_markerfacecolor(face)
        handles.append(handle)
    figure.legend(handles=handles, loc="outside upper center", ncols=3)
    return figure


def _limit(rows: pd.DataFrame) -> float:
    """Return the end of the axis: even, and beyond all gains above 0 up to 6 points."""
    highest = (rows["gain"] + rows["half"].fillna(0).clip(upper=rows["gain"].abs() + 1)).max()
    return float(np.clip(2 * np.ceil(highest / 2), 2, 6))


def _draw_gain(axes: Axes, height: float, row: pd.Series, colour: str, limit: float) -> None:
    """Draw a gain with its interval, or its number at the edge if it lies beyond."""
    gain = row["gain"]
    if abs(gain) > 0.95 * limit:  # a marker closer to the edge would be cut
        side = np.sign(gain)
        align = "left" if side < 0 else "right"
        text = f"◂{gain:.0f}" if side < 0 else f"{gain:+.0f}▸"
        axes.text(side * limit, height, text, color=colour, ha=align, va="center", fontsize=7)
        return
    is_beyond = row.get("p_holm", np.nan) < ALPHA
    axes.errorbar(
        gain,
        height,
        xerr=None if np.isnan(row["half"]) else row["half"],
        color=colour,
        marker="o",
        markersize=3.6,
        markerfacecolor=colour if is_beyond else "white",
        elinewidth=0.9,
    )


def curves(answer: Answer) -> Figure:
    """Draw gains against shares of what random selection has in all: a row of panels for each
    regime, a column for rounds, bytes and simulated time.

    The interval of the first method is shaded.
    """
    methods = answer.drawn
    looks = make_looks({name: _selector(name) for name in methods})
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
    late = answer.curves[answer.curves["share"] >= SETTLED]
    panels[0, 0].set(xlim=(0, 1), ylim=(late["gain"].min() - 0.5, late["gain"].max() + 0.5))
    figure.supylabel("gain over random selection in percentage points", fontsize="medium")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside upper center", ncols=len(methods))
    return figure


def _draw_curve(axes: Axes, rows: pd.DataFrame, look: Look, name: str, shaded: str) -> None:
    """Draw the gain of one method over shares, with its interval if it is the `shaded` one."""
    colour = GREY if name in CONTROLS else look["color"]
    axes.plot(rows["share"], rows["gain"], **{**look, "color": colour}, markevery=4, label=name)
    if name == shaded:
        low, high = rows["gain"] - rows["half"], rows["gain"] + rows["half"]
        axes.fill_between(rows["share"], low, high, color=colour, alpha=0.15, linewidth=0)


def _selector(method: str) -> str:
    return "random_control" if method in CONTROLS else method


def save(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG file of few colours, which is small."""
    picture = io.BytesIO()
    figure.savefig(picture, dpi=DPI)
    Image.open(picture).convert("RGB").quantize(64).save(path, optimize=True)
