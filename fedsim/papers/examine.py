"""The evidence of our runs about each printed number and claim, by the claim's form.

`evidence` has the tests, and `protocol` says which runs may be judged.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

import pandas as pd

from fedsim.papers.evidence import (
    Evidence,
    gain_evidence,
    level_evidence,
    majority_evidence,
    margin_evidence,
    median_evidence,
    number_evidence,
    trend_evidence,
)
from fedsim.papers.protocol import Cases, UnjudgedError
from fedsim.papers.published import Claim, Number
from fedsim.results.frames import measured
from fedsim.results.measures import COUNT_MEASURES, FIRST_ROUND_MEASURES, base_name, bounds_of
from fedsim.results.runs import Run
from fedsim.results.statistics import (
    Estimate,
    Median,
    Share,
    estimate,
    paired,
    pooled,
)

OTHER_SIZE = "another size than the paper's"
"""Reason why a number or an absolute value is not judged."""
BY_SIGN = "by its sign alone at this size"
"""Remark on a printed gain that is judged by runs of another size than the paper's."""


def examine_number(number: Number, cases: Cases) -> Evidence:
    """Return the evidence about a printed number. Raises `UnjudgedError`."""
    runs = cases.usable(number.about)
    if cases.scale != "full":
        raise UnjudgedError(OTHER_SIZE)
    return number_evidence(number.value, estimated(runs, number.measure), number.margin)


def examine_claim(claim: Claim, cases: Cases) -> Evidence:
    """Return the evidence about a claim, by its form. Raises `UnjudgedError`."""
    if claim.grows_with is not None:
        return _trend(claim, cases)
    if claim.others:
        return _compare(claim, cases)
    runs = cases.usable(claim.about)
    if cases.scale != "full" and not claim.any_size:
        raise UnjudgedError(OTHER_SIZE)
    return _bound(claim, runs) if claim.is_bound else _about(claim, runs)


def estimated(runs: pd.DataFrame, measure: str) -> Estimate | None:
    """Return the mean over seeds of a measure; None if no run has it."""
    return estimate(measured(runs, measure).dropna(), bounds_of(measure))


def _compare(claim: Claim, cases: Cases) -> Evidence:
    """Test a claim that compares a method with others. Raises `UnjudgedError`."""
    # 1. The difference to each rival, pooled over settings if the claim is about several.
    strata: list[dict[str, str]] = [{}]
    if claim.pooled_over:
        strata = [{claim.pooled_over: value} for value in claim.values]
    by_stratum = [_differences(claim, {**claim.about, **stratum}, cases) for stratum in strata]
    rivals = {}
    for name in by_stratum[0]:
        difference = pooled([stratum[name] for stratum in by_stratum])
        if difference is None:
            raise UnjudgedError(f"fewer than two seeds in common with {name}")
        rivals[name] = difference
    # 2. The test of the claim's form.
    if claim.level_with is not None:
        return level_evidence(rivals, claim.level_with)
    if claim.not_worse_by is not None:
        return margin_evidence(rivals, claim.not_worse_by)
    assert claim.gain is not None
    # 3. A printed gain. At another size than the paper's, only its sign can be compared.
    if cases.scale == "full" or claim.any_size or not claim.gain:
        return gain_evidence(rivals, claim.gain, claim.tolerance)
    evidence = gain_evidence(rivals)
    detail = f"{evidence.detail}; {BY_SIGN}" if evidence.detail else BY_SIGN
    return replace(evidence, detail=detail, size_holds=False)


def _differences(claim: Claim, about: Mapping[str, str], cases: Cases) -> dict[str, pd.Series]:
    """Return the differences by seed of the claim's method to each of the others, by their names.

    With `all_pairs`, return the differences of any two of all these methods.
    """
    choices = {name: {**about, claim.among: name} for name in claim.others}
    missing = [name for name in claim.others if not cases.nearest(choices[name])]
    if missing:
        raise UnjudgedError(f"no runs of {', '.join(missing)}")
    of_method = measured(cases.usable(about), claim.measure)
    of_others = {}
    for name in claim.others:
        of_others[name] = measured(cases.usable(choices[name]), claim.measure)
    compared = {name: paired(of_method, values) for name, values in of_others.items()}
    if claim.all_pairs:
        for first, second in itertools.combinations(claim.others, 2):
            compared[f"{first} to {second}"] = paired(of_others[first], of_others[second])
    return compared


def _trend(claim: Claim, cases: Cases) -> Evidence:
    """Test a trend of the measure, or of its difference to the method in `minus`.

    If the values of the parameter are not numbers, their positions are 0, 1, ...
    """
    columns = []
    for value in claim.values:
        choices = {**claim.about, str(claim.grows_with): str(value)}
        column = measured(cases.usable(choices), claim.measure)
        if claim.minus is not None:
            less = measured(cases.usable({**choices, **claim.minus}), claim.measure)
            column = paired(column, less)
        columns.append(column.dropna())
    by_seed = pd.concat(columns, axis=1, join="inner")
    try:
        at = [float(value) for value in claim.values]
    except ValueError:
        at = [float(position) for position in range(len(claim.values))]
    return trend_evidence(at, by_seed.to_numpy().tolist(), falls=claim.falls)


def _about(claim: Claim, runs: pd.DataFrame) -> Evidence:
    """Test a claim that a measure is about a value. Raises `UnjudgedError` if runs are too short to
    tell."""
    assert claim.value is not None
    if base_name(claim.measure) not in FIRST_ROUND_MEASURES:
        ours = estimated(runs, claim.measure)
        return number_evidence(claim.value, ours, claim.tolerance, claim.tolerance)
    num_rounds = min(run.num_rounds for run in runs["run"])
    if num_rounds < claim.value + claim.tolerance:
        limit = claim.value + claim.tolerance
        raise UnjudgedError(f"runs end at round {num_rounds}, before {limit:g}")
    values = measured(runs, claim.measure).fillna(math.inf)
    return median_evidence(claim.value, Median(tuple(values), num_rounds), claim.tolerance)


def _bound(claim: Claim, runs: pd.DataFrame) -> Evidence:
    """Test a claim that each run is within a bound. Raises `UnjudgedError` if no run can tell."""
    values = measured(runs, claim.measure)
    outcomes = []
    for run, value in zip(runs["run"], values, strict=True):
        outcomes.append(_is_within(claim, run, value))
    known = [outcome for outcome in outcomes if outcome is not None]
    if not known:
        num_rounds = runs["run"].iloc[0].num_rounds
        raise UnjudgedError(f"all runs end at round {num_rounds}, before the bound")
    too_short = len(outcomes) - len(known)
    detail = f"{too_short} end before the bound" if too_short else ""
    return majority_evidence(Share(sum(known), len(known)), detail)


def _is_within(claim: Claim, run: Run, value: float) -> bool | None:
    """Return whether a run is within the bound of a claim; None if it ended too early to tell, or
    has no value."""
    name = base_name(claim.measure)
    if math.isnan(value):  # it did not happen in the run, or the run has no such number
        if name not in FIRST_ROUND_MEASURES:
            return None
        # What did not happen in T rounds happens in round T + 1 at the earliest.
        return _is_within_after(claim, run.num_rounds + 1)
    if name in COUNT_MEASURES and not _is_long_enough(claim, run.num_rounds):
        return None
    if claim.at_most is not None:
        return value <= claim.at_most
    assert claim.at_least is not None
    return value >= claim.at_least


def _is_within_after(claim: Claim, earliest: int) -> bool | None:
    """Return whether a round that is `earliest` or later is within a bound; None if that depends on
    the round."""
    if claim.at_most is not None:
        return False if claim.at_most < earliest else None
    assert claim.at_least is not None
    return True if claim.at_least <= earliest else None


def _is_long_enough(claim: Claim, num_rounds: int) -> bool:
    """Return whether a count of rounds can be on either side of a bound in so many rounds."""
    if claim.at_most is not None:
        return num_rounds > claim.at_most
    assert claim.at_least is not None
    return num_rounds >= claim.at_least
