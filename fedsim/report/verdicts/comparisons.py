"""Rules about differences between methods at equal seeds: gains, levelness, trends.

Claims about several rivals are claims about the smallest (gains) or the largest (levelness) of the true differences.
The test for such a claim is an intersection-union test (Berger, 1982): every rival is tested at the full level, and the
largest p-value counts. The test against it is a union-intersection test: the smallest p-value counts, multiplied by the
number of rivals (Bonferroni). No rival is picked by the data.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from fedsim.report.statistics import Difference, differences
from fedsim.report.verdicts.evidence import Evidence, clipped
from fedsim.report.verdicts.rules import ALPHA


def exceeds(rivals: Mapping[str, Difference], gain: float = 0.0, tolerance: float = 0.0) -> Evidence:
    """Test that a method exceeds each of its rivals, by `gain` +- `tolerance` if that is printed (> 0).

    `rivals` are the differences to them. All p-values are two-sided, those of 95 % intervals.
    """
    weakest = max(rivals, key=lambda name: rivals[name].p_above(0.0))
    p_for = 2 * rivals[weakest].p_above(0.0)
    below_printed = 2 * len(rivals) * min(d.p_below(gain - tolerance) for d in rivals.values())
    above_printed = 2 * max(d.p_above(gain + tolerance) for d in rivals.values())
    return Evidence(
        ours=rivals[weakest],
        p_for=clipped(p_for),
        p_against=clipped(below_printed),
        size_holds=min(below_printed, above_printed) >= ALPHA if gain else None,
        detail=f"weakest against {weakest}" if len(rivals) > 1 else "",
    )


def is_not_worse(rivals: Mapping[str, Difference], margin: float) -> Evidence:
    """Test that a method is not worse than any rival by `margin` or more (non-inferiority)."""
    weakest = max(rivals, key=lambda name: rivals[name].p_above(-margin))
    p_against = 2 * len(rivals) * min(d.p_below(-margin) for d in rivals.values())
    detail = f"weakest against {weakest}" if len(rivals) > 1 else ""
    return Evidence(rivals[weakest], clipped(2 * rivals[weakest].p_above(-margin)), clipped(p_against), detail)


def is_level(rivals: Mapping[str, Difference], margin: float) -> Evidence:
    """Test that a method differs from each rival by at most `margin`: two one-sided tests (Schuirmann, 1987)."""
    inside = {name: d.p_equivalent(margin) for name, d in rivals.items()}
    outside = min(min(d.p_above(margin), d.p_below(-margin)) for d in rivals.values())
    furthest = max(inside, key=lambda name: inside[name])
    detail = f"furthest from {furthest}" if len(rivals) > 1 else ""
    return Evidence(rivals[furthest], inside[furthest], clipped(2 * outside * len(rivals)), detail)


def rises(at: Sequence[float], by_seed: Sequence[Sequence[float]], *, falls: bool = False) -> Evidence:
    """Test that values rise (or fall) along the positions `at`: a t test on the least-squares slope of each seed."""
    slopes = differences([float(np.polyfit(at, values, 1)[0]) for values in by_seed])
    if slopes is None:
        return Evidence(None)
    sides = clipped(2 * slopes.p_above(0.0)), clipped(2 * slopes.p_below(0.0))
    p_for, p_against = sides[::-1] if falls else sides
    return Evidence(slopes, p_for, p_against, detail="slope")
