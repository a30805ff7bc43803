"""Formatting of numbers as the text of table cells."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from fedsim.report.groups import Group
from fedsim.report.measures import Measure
from fedsim.report.statistics import UNBOUNDED, UNIT, Difference, Estimate, Median, Share, estimate


def show_estimate(value: Estimate | Difference | None) -> str:
    if value is None:
        return "-"
    digits = 4 if abs(value.mean) < 10 else 1  # shares have four digits; rounds and numbers of selections have one
    interval = f" [{value.low:.{digits}f}, {value.high:.{digits}f}]" if value.num > 1 else ""
    return f"{value.mean:.{digits}f}{interval}"


def show_result(value: Estimate | Difference | Share | Median | None) -> str:
    """A result with its 95 % interval: differences with signs, shares as counts, medians with what is never reached."""
    if isinstance(value, Difference):
        settings = f" (mean of {value.strata} settings)" if value.strata > 1 else ""
        return " ".join(show_interval(value)) + settings
    if isinstance(value, Share):
        low, high = value.interval
        return f"holds for {value.count} of {value.num} seeds [{low:.2f}, {high:.2f}]"
    if isinstance(value, Median):
        shown = [_show_reached(one, value.beyond) for one in (value.median, *value.interval)]
        return f"median {shown[0]} [{shown[1]}, {shown[2]}]"
    return show_estimate(value)


def _show_reached(value: float, beyond: float) -> str:
    if math.isinf(value):
        return f"> {beyond:.0f}" if value > 0 else "0"
    return f"{value:.0f}"


def show_mean(value: Estimate | None) -> str:
    return "-" if value is None else f"{value.mean:.3f}"


def show_interval(value: Difference) -> list[str]:
    """Two cells: the mean, and the 95 % interval, with signs."""
    return [f"{value.mean:+.4f}", f"[{value.low:+.4f}, {value.high:+.4f}]"]


def show_p(value: float) -> str:
    """A p-value with three digits; empty for nan."""
    if math.isnan(value):
        return ""
    return "< .001" if value < 0.001 else f"{value:.3f}"


def show_both(p_for: float, p_against: float) -> str:
    """Two p-values, for and against a claim; empty if nothing was tested."""
    return f"{show_p(p_for)} / {show_p(p_against)}".strip(" /")


def show_median_reached(group: Group, measure: Measure, show: Callable[[float], str]) -> str:
    """The `median_reached` as text. If not all runs reach it, the number of those that do is added."""
    values, count = _sorted_values(group, measure), len(group.complete)
    if not count:
        return "-"
    median = _lower_median(values, count)
    text = "never" if median is None else show(median)
    return text if len(values) == count else f"{text} ({len(values)}/{count})"


def median_reached(group: Group, measure: Measure) -> float | None:
    """The lower median of `measure` over finished runs, of which those that never get there count as the largest.

    None if more than half never do, or there is no run.
    """
    return _lower_median(_sorted_values(group, measure), len(group.complete))


def _sorted_values(group: Group, measure: Measure) -> list[float]:
    return sorted(value for run in group.complete if (value := measure(run)) is not None)


def _lower_median(values: Sequence[float], count: int) -> float | None:
    """Of `count` values, of which those that are not in the sorted `values` are larger."""
    middle = (count - 1) // 2
    return values[middle] if 0 <= middle < len(values) else None


def estimate_measure(group: Group, measure: Measure, bounds: tuple[float, float] = UNBOUNDED) -> Estimate | None:
    return estimate([value for run in group.complete if (value := measure(run)) is not None], bounds)


def show_accuracy(group: Group, measure: Measure) -> str:
    """The mean of a measure between 0 and 1 with its interval, which is cut there."""
    return show_estimate(estimate_measure(group, measure, UNIT))


def mean_total(group: Group, name: str) -> float:
    totals = [float(run.summary["totals"][name]) for run in group.complete]
    return float(np.mean(totals)) if totals else 0.0


def show_seeds(group: Group) -> str:
    diverged = f", {group.num_diverged} diverged" if group.num_diverged else ""
    return f"{len(group.complete)}{diverged}"
