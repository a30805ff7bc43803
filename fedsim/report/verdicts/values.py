"""Rules about single values: a printed number, "about" a value, and bounds on every run."""

from fedsim.report.statistics import Estimate, Median, Share
from fedsim.report.verdicts.evidence import Evidence, clipped
from fedsim.report.verdicts.rules import ALPHA, MAJORITY


def is_number(printed: float, ours: Estimate | None, margin: float) -> Evidence:
    """Test a number `printed` for one run: as one draw of ours, and for equivalence with our mean within `margin`."""
    return _near(printed, ours, margin, tolerance=0.0)


def is_about(value: float, ours: Estimate | None, tolerance: float) -> Evidence:
    """Test that a quantity is `value`, give or take `tolerance`: as a number that is printed no more exactly."""
    return _near(value, ours, tolerance, tolerance)


def _near(value: float, ours: Estimate | None, margin: float, tolerance: float) -> Evidence:
    if ours is None or ours.num < 2:
        return Evidence(ours)
    p_next, too_wide = ours.p_next(value, tolerance), ours.next_half_width > margin
    p_for = ours.p_equivalent(value, margin)
    return Evidence(ours, p_for, clipped(p_next), is_draw=p_next >= ALPHA, too_wide=too_wide)


def is_median_about(value: float, ours: Median, tolerance: float) -> Evidence:
    """Test that the median of censored values lies within `tolerance` of `value`, and against it that it does not."""
    low, high = value - tolerance, value + tolerance
    inside = max(ours.p_above(low), ours.p_below(high))
    outside = min(ours.p_below(low), ours.p_above(high))
    return Evidence(ours, inside, clipped(2 * outside))


def holds_for_most(ours: Share) -> Evidence:
    """Test that something holds for more than half of all runs, and against it that it holds for fewer."""
    return Evidence(ours, clipped(2 * ours.p_above(MAJORITY)), clipped(2 * ours.p_below(MAJORITY)))
