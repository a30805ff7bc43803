"""Cells of the generated tables: numbers with their intervals, and tables as Markdown."""

import math
from collections.abc import Iterable, Sequence

from fedsim.report.table import show_p
from fedsim.results.statistics import Difference, Estimate


def short(estimate: Estimate) -> str:
    """Return a mean with its interval and the number of seeds."""
    low, high = estimate.interval
    interval = "" if math.isnan(low) else f" [{three(low)}, {three(high)}]"
    return f"{three(estimate.mean)}{interval} ({estimate.num})"


def signed(difference: Difference) -> str:
    low, high = difference.interval
    return f"{difference.mean:+.3f} [{low:+.3f}, {high:+.3f}]"


def tested(difference: Difference, corrected: float) -> str:
    """Return a difference with its own p-value, and the one that is corrected over its table."""
    p_values = f"p {show_p(difference.p_value)}, Holm {show_p(corrected)}"
    return f"{signed(difference)}, {p_values}"


def three(value: float) -> str:
    """Return a number with three decimals if it is small, and without any otherwise."""
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.0f}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
