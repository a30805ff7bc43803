"""Numbers with their intervals as the cells of generated tables, and the tables as Markdown."""

import math
from collections.abc import Iterable, Sequence

from fedsim.report.table import show_p
from fedsim.results.statistics import Difference, Estimate


def short(found: Estimate) -> str:
    low, high = found.interval
    return f"{three(found.mean)}{'' if math.isnan(low) else f' [{three(low)}, {three(high)}]'} ({found.num})"


def signed(found: Difference) -> str:
    low, high = found.interval
    return f"{found.mean:+.3f} [{low:+.3f}, {high:+.3f}]"


def tested(found: Difference, corrected: float) -> str:
    """A difference with its own interval and p-value, and the p-value that is corrected over its
    table."""
    return f"{signed(found)}, p {show_p(found.p_value)}, Holm {show_p(corrected)}"


def three(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.0f}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
