"""What stands in the cells of tables."""

import math
from collections.abc import Callable

import numpy as np

from fedsim.report.groups import Group
from fedsim.report.measures import Measure
from fedsim.report.statistics import Difference, Estimate, estimate


def show_estimate(value: Estimate | Difference | None) -> str:
    if value is None:
        return "-"
    digits = 4 if abs(value.mean) < 10 else 1  # shares, or rounds and selections
    interval = f" [{value.low:.{digits}f}, {value.high:.{digits}f}]" if value.num > 1 else ""
    return f"{value.mean:.{digits}f}{interval}"


def show_mean(value: Estimate | None) -> str:
    return "-" if value is None else f"{value.mean:.3f}"


def show_interval(value: Difference) -> list[str]:
    """Mean and 95 % interval, with their signs."""
    return [f"{value.mean:+.4f}", f"[{value.low:+.4f}, {value.high:+.4f}]"]


def show_p(value: float) -> str:
    """Three digits; nothing for nan."""
    if math.isnan(value):
        return ""
    return "< .001" if value < 0.001 else f"{value:.3f}"


def show_sides(p_for: float, p_against: float) -> str:
    """Two one-sided p-values; nothing where nothing was tested."""
    return f"{show_p(p_for)} / {show_p(p_against)}".strip(" /")


def show_reached(group: Group, measure: Measure, show: Callable[[float], str]) -> str:
    """The median over finished runs, counting those that never get there as beyond; how many did if not all."""
    runs = group.complete
    values = sorted(value for run in runs if (value := measure(run)) is not None)
    if not runs:
        return "-"
    middle = (len(runs) - 1) // 2
    median = show(values[middle]) if middle < len(values) else "never"
    return median if len(values) == len(runs) else f"{median} ({len(values)}/{len(runs)})"


def estimate_of(group: Group, measure: Measure) -> Estimate | None:
    return estimate([value for run in group.complete if (value := measure(run)) is not None])


def total_of(group: Group, name: str) -> float:
    totals = [float(run.summary["totals"][name]) for run in group.complete]
    return float(np.mean(totals)) if totals else 0.0


def seeds_of(group: Group) -> str:
    diverged = f", {group.num_diverged} diverged" if group.num_diverged else ""
    return f"{len(group.complete)}{diverged}"
