"""Ticks of horizontal axes whose labels do not overlap, at any width."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import Locator, LogLocator, MaxNLocator, NullFormatter

from fedsim.report.layout import text_width

ENOUGH = 5
"""Number of ticks from which on no rarer ones are added."""
GAP = 0.06
"""Smallest distance in inches between the labels of two ticks."""
DECADES = range(-9, 16)
"""Powers of ten of the ticks of logarithmic axes."""
MANTISSAS = ((1.0,), (2.0, 5.0), (3.0, 4.0, 6.0, 7.0, 8.0, 9.0, 1.5))
"""Digits of the ticks of logarithmic axes. Later ones are drawn if there are few ticks."""


class FittingTicks(Locator):
    """Ticks of an x axis, of which those are drawn whose labels have room.

    `tiers` are values; earlier ones have precedence. A tier is left out if there are `ENOUGH` ticks
    of earlier ones.
    """

    def __init__(self, tiers: Sequence[Sequence[float]]) -> None:
        self.tiers = tiers

    def __call__(self) -> list[float]:
        """Return the values of the ticks."""
        lowest, highest = sorted(self.axis.get_view_interval())  # type: ignore[union-attr]
        drawn: dict[float, tuple[float, float]] = {}
        for tier in self.tiers:
            if len(drawn) >= ENOUGH:
                break
            for value in tier:
                if lowest <= value <= highest:
                    start, end = _label_ends(self.axis, value)
                    if all(end <= left or start >= right for left, right in drawn.values()):
                        drawn[value] = start, end
        return sorted(drawn)

    def tick_values(self, vmin: float, vmax: float) -> list[float]:
        """Return all values, as matplotlib's other users of locators expect."""
        return sorted(value for tier in self.tiers for value in tier)


class FittingSteps(MaxNLocator):
    """Ticks of an x axis at equal steps: at most `ENOUGH` steps, and fewer if labels would
    overlap."""

    def __call__(self) -> Any:
        """Return the values of the ticks."""
        lowest, highest = sorted(self.axis.get_view_interval())  # type: ignore[union-attr]
        for num_steps in range(ENOUGH, 0, -1):
            self.set_params(nbins=num_steps)
            values = super().__call__()
            shown = [value for value in values if lowest <= value <= highest]
            ends = [_label_ends(self.axis, value) for value in shown]
            if all(end <= start for (_, end), (start, _) in pairwise(ends)):
                break
        return values


def _label_ends(axis: Any, value: float) -> tuple[float, float]:
    """Return where the label of a tick begins and ends, with half of `GAP` on both sides, in inches
    from the left of the figure."""
    axes = axis.axes
    pixel, _ = axes.transData.transform((value, axes.get_ylim()[0]))
    middle = float(pixel) / axes.figure.dpi
    # A figure may be drawn outside of the style in which it was made.
    size = axis.get_major_ticks(1)[0].label1.get_fontsize()
    half = (text_width(axis.get_major_formatter()(value), size) + GAP) / 2
    return middle - half, middle + half


def set_log_scale(axes: Axes, *, is_whole: bool = False) -> None:
    """Make the x axis of `axes` logarithmic. Small ticks between its labels show that it is.

    With `is_whole` only whole numbers have labels.
    """
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_major_locator(FittingTicks(log_ticks(is_whole=is_whole)))
    axes.xaxis.set_minor_locator(LogLocator(subs=range(1, 10), numticks=100))
    axes.xaxis.set_minor_formatter(NullFormatter())


def log_ticks(*, is_whole: bool) -> list[list[float]]:
    """Return the tiers of ticks of a logarithmic axis, with `is_whole` only whole numbers."""
    tiers = []
    for digits in MANTISSAS:
        values = [float(f"{digit}e{decade}") for decade in DECADES for digit in digits]
        tiers.append([value for value in values if value.is_integer() or not is_whole])
    return tiers
