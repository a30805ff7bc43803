"""All printed numbers of a table at once: are they, together, draws from the distributions of our runs?"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from fedsim.report.statistics import Estimate
from fedsim.report.verdicts.judge import Judged
from fedsim.report.verdicts.published import Number


@dataclass(frozen=True)
class Omnibus:
    """The standardised errors of `num` printed numbers: standard normal, if each is one more run of ours.

    `p_value`: that of the sum of their squares (chi squared with `num` degrees of freedom). It takes the numbers as
    independent, while those of one run at several rounds are not: it is a description rather than a test.
    """

    num: int
    mean: float
    sd: float
    p_value: float


def omnibus(errors: Sequence[float]) -> Omnibus | None:
    """The omnibus check of standardised errors; None of fewer than two. Those that are nan are left out."""
    z = np.array([error for error in errors if math.isfinite(error)])
    if len(z) < 2:
        return None
    return Omnibus(len(z), float(z.mean()), float(z.std(ddof=1)), float(special.chdtrc(len(z), float((z**2).sum()))))


def standardised_errors(judged: Sequence[Judged]) -> dict[tuple[str, str], list[float]]:
    """The standardised errors of the numbers that were judged, by (table, row), and by (table, "") for all its rows.

    Rows that were added after runs had been seen count by themselves alone.
    """
    errors: dict[tuple[str, str], list[float]] = {}
    for one in judged:
        if not isinstance(one.printed, Number) or one.evidence is None or not isinstance(one.evidence.ours, Estimate):
            continue
        table, row, _ = one.printed.id.split("/", 2)
        error = one.evidence.ours.standardised_error(one.printed.value)
        errors.setdefault((table, row), []).append(error)
        if not one.printed.added_after_runs:
            errors.setdefault((table, ""), []).append(error)
    return errors
