"""Figures of methods over several settings: critical differences, accuracy against bytes, performance profiles."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedsim.report.figures import CAPTIONS, PAGE, SMALL, Plot, line_axes, style
from fedsim.report.page import make_looks
from fedsim.report.settings import bytes_of_random
from fedsim.results.groups import Panel
from fedsim.results.measures import mean_final
from fedsim.results.ranking import Comparison, critical_difference, profile

MOST_PROFILES = 8
LEVELS = 200
"""Points of a profile."""


def settings_plots(found: Comparison) -> list[Plot]:
    with style():
        return [ranks_plot(found), bytes_plot(found), profiles_plot(found)]


def ranks_plot(found: Comparison) -> Plot:
    """Demsar's diagram: mean ranks on an axis, the better half labelled on its left; bars join those that cannot be
    told apart."""
    names, ranks = list(found.ranks), list(found.ranks.values())
    difference, half = critical_difference(len(ranks), len(found.panels)), -(-len(ranks) // 2)
    bars = cliques(ranks, difference)
    top = 1.2 + 0.4 * len(bars)  # of the labels, in rows below the axis
    figure = Figure(figsize=(PAGE, 0.15 * (top + half + 4)))
    ax = figure.subplots()
    ax.set(xlim=(0.5, len(ranks) + 0.5), ylim=(top + half, -2.5))
    ax.axis("off")
    _draw_axis(ax, len(ranks), difference)
    for row, (first, last) in enumerate(bars):
        ax.plot([ranks[first] - 0.05, ranks[last] + 0.05], [0.8 + 0.4 * row] * 2, color="#D55E00", linewidth=2)
    for at, (name, rank) in enumerate(zip(names, ranks, strict=True)):
        left = at < half
        y, end = top + (at if left else len(ranks) - 1 - at), 0.45 if left else len(ranks) + 0.55
        ax.plot([rank, rank, end], [0, y, y], color="black", linewidth=0.6, clip_on=False)
        text = f"{name}  {rank:.2f}" if left else f"{rank:.2f}  {name}"
        place = {"xytext": (-3 if left else 3, 0), "textcoords": "offset points", "va": "center", "fontsize": SMALL}
        ax.annotate(text, (end, y), ha="right" if left else "left", annotation_clip=False, **place)
    return Plot("settings_ranks", CAPTIONS["settings_ranks"].format(settings=len(found.panels)), figure)


def _draw_axis(ax: Axes, count: int, difference: float) -> None:
    """The axis of ranks, and above it the critical difference to scale, as far as there is room."""
    ax.plot([1, count], [0, 0], color="black", linewidth=0.8)
    for tick in range(1, count + 1, -(-count // 20)):
        ax.plot([tick] * 2, [0, -0.3], color="black", linewidth=0.8)
        ax.text(tick, -0.4, str(tick), ha="center", va="bottom", fontsize=SMALL)
    ax.plot([1, min(1 + difference, count)], [-1.9] * 2, color="#D55E00", linewidth=2)
    beyond = "" if 1 + difference <= count else ": more than all ranks"
    ax.text(1, -2.1, f"critical difference {difference:.2f}{beyond}", va="bottom", fontsize=SMALL)


def cliques(ranks: Sequence[float], difference: float) -> list[tuple[int, int]]:
    """First and last of each longest run of sorted ranks that lie within the difference; of two or more."""
    found: list[tuple[int, int]] = []
    for first, rank in enumerate(ranks):
        last = int(np.searchsorted(ranks, rank + difference, side="right")) - 1
        if last > first and (not found or last > found[-1][1]):
            found.append((first, last))
    return found


def bytes_plot(found: Comparison) -> Plot:
    """Means over settings of final accuracy and of bytes as multiples of those of random selection."""
    looks = make_looks([Panel("", {name: found.groups(name)[0] for name in found.methods})])
    figure, (ax,) = line_axes([Panel("", found.panels[0].lines)], looks)
    points = dict(zip(found.methods, found.means.mean(0).tolist(), strict=True))
    x = bytes_of_random(found)
    for name, y in points.items():
        ax.plot(x[name], y, **{**looks[name], "linestyle": "none"})
    front = pareto([(x[name], y) for name, y in points.items()])
    best = [list(points)[at] for at in front]
    ax.step([x[n] for n in best], [points[n] for n in best], where="post", color="grey", linewidth=0.8, zorder=0)
    for name in best:
        ax.annotate(name, (x[name], points[name]), (3, 4), textcoords="offset points", fontsize=SMALL)
    if found.ceiling is not None:
        ceiling = np.mean([mean_final(group) for group in found.groups(found.ceiling)])
        ax.axhline(ceiling, color="black", linestyle="--", linewidth=0.8)
        ax.annotate(
            found.ceiling, (1, ceiling), (-2, -2), ("axes fraction", "data"), "offset points", ha="right", va="top"
        )
    ax.set(xscale="log", xlabel="bytes sent, both ways (random selection: 1)", ylabel="final test accuracy")
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter("{x:g}")
    ax.margins(0.15)
    return Plot("settings_bytes", CAPTIONS["settings_bytes"], figure)


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which points have no other with as few bytes and as high an accuracy, by bytes."""
    front: list[int] = []
    for at in sorted(range(len(points)), key=lambda at: (points[at][0], -points[at][1])):
        if not front or points[at][1] > points[front[-1]][1]:
            front.append(at)
    return front


def profiles_plot(found: Comparison) -> Plot:
    best: dict[str, str] = {}
    for method in found.ranks:
        best.setdefault(found.classes[method], method)
    kept = dict.fromkeys([found.reference, *([found.ceiling] if found.ceiling else []), *best.values(), *found.ranks])
    names = list(kept)[: min(MOST_PROFILES, 2 + len(best))]
    gains = {name: [np.array([*one.values()]) for one in found.gains(name)] for name in names}
    ends = [end for own in gains.values() for one in own for end in (one.min(), one.max())]
    levels = np.linspace(min(ends) - 0.01, max(ends) + 0.01, LEVELS)
    panel = Panel("", {name: found.panels[0].lines[name] for name in names})
    looks = make_looks([panel])
    figure, (ax,) = line_axes([panel], looks)
    for at, (name, own) in enumerate(gains.items()):
        share, low, high = profile(own, levels)
        ax.fill_between(levels, low, high, color=looks[name]["color"], alpha=0.12, linewidth=0)
        ax.plot(levels, share, markevery=(at * 5, LEVELS // 5), **looks[name])
    ax.set(xlabel="gain over random selection at the same seed", ylabel="share of runs with at least it")
    return Plot("settings_profiles", CAPTIONS["settings_profiles"], figure)
