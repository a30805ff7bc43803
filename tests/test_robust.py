"""Robust aggregators, and MIFA, against independent computations."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import torch

from fedsim.core.types import Cohort
from fedsim.rounds.aggregators import MIFA, Aggregator, FedAdam, FedAvg, FedAvgM
from fedsim.rounds.robust import DPFedAvg, GeometricMedian, Krum, NormClipping, TrimmedMean
from fedsim.selectors.random import Random
from tests.run_toys import Run, refused
from tests.toys import toy_cohort, toy_population

START = {"w": torch.tensor([1.0, -2.0, 0.5])}
NONE = frozenset[str]()
MEAN, MEDIAN, TRIMMED = (
    FedAvg(NONE, weighting="uniform"),
    TrimmedMean(NONE, share=0.5),
    TrimmedMean(NONE, share=0.2),
)
KRUM, CENTRE = (
    Krum(NONE, f=1, m=1),
    GeometricMedian(NONE, weighting="uniform", iterations=20, smoothing=1e-6),
)
CLIPPING = NormClipping(NONE, weighting="uniform", norm=2.0)


def updates(num: int, seed: int = 0, **more: Any) -> Cohort:
    rows = np.random.default_rng(seed).normal(size=(num, 3)).astype(np.float32)
    return toy_cohort(range(num), range(1, num + 1), rows.tolist(), **more)


def step(server: Aggregator, cohort: Cohort, weights: Any = None) -> np.ndarray[Any, Any]:
    """What it adds to the model."""
    return (server.aggregate(dict(START), cohort, weights)["w"] - START["w"]).numpy()


@pytest.mark.parametrize("num", [1, 2, 5, 8])
def test_medians_and_trimmed_means_are_those_of_numpy_and_scipy(num: int) -> None:
    cohort = updates(num)
    rows = cohort.delta["w"].numpy()
    assert step(MEDIAN, cohort, np.arange(num) + 1.0) == pytest.approx(
        np.median(rows, axis=0), abs=1e-6
    )
    for share in (0.0, 0.2, 0.25, 0.4):
        trimmed = step(TrimmedMean(NONE, share=share), cohort)
        assert trimmed == pytest.approx(scipy.stats.trim_mean(rows, share, axis=0), abs=1e-6)


@pytest.mark.parametrize(
    ("num", "f", "m", "fits"), [(5, 1, 1, 1), (9, 2, 3, 2), (9, 3, None, 3), (6, 3, 2, 1)]
)
def test_krum_is_its_definition_and_takes_the_largest_f_that_fits(
    num: int, f: int, m: int | None, fits: int
) -> None:
    for seed in range(20):
        cohort = updates(num, seed)
        rows, near = cohort.delta["w"].double().numpy(), num - fits - 2
        scores = [
            sum(sorted(((a - b) ** 2).sum() for b in np.delete(rows, i, 0))[:near])
            for i, a in enumerate(rows)
        ]
        chosen = sorted(range(num), key=scores.__getitem__)[: m or near]
        assert step(Krum(NONE, f=f, m=m), cohort) == pytest.approx(rows[chosen].mean(0), abs=1e-6)


def test_krum_breaks_ties_by_the_lower_id_and_takes_running_statistics_of_the_chosen() -> None:
    square = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [-1.0, 0.0, 0.0], [0.0, -1.0, 0.0]]
    cohort = toy_cohort([2, 3, 5, 7], [1] * 4, square)
    cohort.delta["v"] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    server = Krum(frozenset({"v"}), f=0, m=2)
    result = server.aggregate(START | {"v": torch.zeros(())}, cohort, None)
    assert (result["w"].tolist(), result["v"].item()) == ([1.5, -1.5, 0.5], 1.5)
    assert (
        step(KRUM, cohort.rows(np.array([0, 1]))).tolist() == square[0]
    )  # of two, there is no other rule


def test_the_geometric_median_has_the_least_sum_of_distances() -> None:
    cohort, weights = updates(7), np.array([1.0, 2.0, 3.0, 1.0, 1.0, 2.0, 4.0])
    rows = cohort.delta["w"].double().numpy()
    for given, used in ((None, np.arange(1.0, 8.0)), (weights, weights)):  # by size; of a selector
        best = scipy.optimize.minimize(
            lambda v, a=used: a @ np.linalg.norm(rows - v, axis=1), rows.mean(0), tol=1e-12
        )
        server = GeometricMedian(NONE, weighting="by_size", iterations=300, smoothing=1e-6)
        assert step(server, cohort, given) == pytest.approx(best.x, abs=1e-4)


def test_updates_are_clipped_and_running_statistics_in_their_own_right() -> None:
    cohort = toy_cohort([0, 1], [1, 3], [[3.0, 4.0, 0.0], [0.0, 1.0, 0.0]])
    cohort.delta["v"] = torch.tensor([-8.0, 1.0])
    server = NormClipping(frozenset({"v"}), weighting="by_size", norm=2.0)
    result = server.aggregate(START | {"v": torch.zeros(())}, cohort, np.array([1.0, 3.0]))
    assert (result["w"] - START["w"]).tolist() == pytest.approx([1.2, 1.6 + 3, 0.0])
    assert result["v"].item() == pytest.approx((-2 + 3 * 1) / 4)


@pytest.mark.parametrize(
    "server", [MEDIAN, TRIMMED, KRUM, Krum(NONE, f=1, m=None), CENTRE, CLIPPING]
)
def test_a_hostile_update_moves_the_mean_and_not_the_others(server: Aggregator) -> None:
    cohort = updates(7)
    cohort.delta["w"][3] = 1e6
    assert np.abs(step(MEAN, cohort)).min() > 1e5
    assert np.abs(step(server, cohort)).max() < 3


def test_which_aggregators_are_means() -> None:
    assert [kind.is_mean for kind in (FedAvg, FedAvgM, FedAdam)] == [True] * 3
    assert not any(
        kind.is_mean for kind in (TrimmedMean, Krum, GeometricMedian, NormClipping, DPFedAvg, MIFA)
    )


@pytest.mark.parametrize("weighting", ["uniform", "by_size"])
def test_mifa_by_hand_over_three_rounds_with_absences(weighting: Any) -> None:
    sizes = [1, 1, 2, 4]
    server = MIFA(frozenset({"v"}), weighting=weighting)
    server.begin(Random(toy_population(sizes, 2), mode="uniform"), START)
    assert "MIFA keeps the latest update of each of 4 clients, 0.0 MB" in server.warning
    deltas = {1: ([0, 2], [4.0, 8.0], 1.0), 2: ([0], [2.0], 1.0), 3: ([3], [6.0], 0.5)}
    # the latest of each at its learning rate: (4, -, 8, -), (2, -, 8, -), (2/2, -, 8/2, 6)
    expected = {
        "uniform": [12 / 2, 10 / 2, 11 / 3],
        "by_size": [20 / 3, 18 / 3, (1 + 2 * 4 + 4 * 6) / 7],
    }
    for t, (ids, values, lr) in deltas.items():
        cohort = toy_cohort(ids, [sizes[i] for i in ids], [[x] * 3 for x in values])
        cohort.delta["v"] = torch.tensor(values)
        server.begin_round(SimpleNamespace(lr=lr), cohort.ids)  # type: ignore[arg-type]
        after = server.aggregate(START | {"v": torch.zeros(())}, cohort, np.full(len(ids), 9.0))
        assert (after["w"] - START["w"]).tolist() == pytest.approx(
            [expected[weighting][t - 1]] * 3, abs=1e-6
        )
        own = np.average(values, weights=cohort.sizes if weighting == "by_size" else None)
        assert after["v"].item() == pytest.approx(own)  # of this round alone


# --- refusals ---------------------------------------------------------------------------------------------------------

REFUSED = {
    "aggregator=krum cohort_size=4": "aggregator.f=1: needs 2 f + 3 = 5 updates a round, and there are 4 (cohort_size)"
    "\n    set cohort_size=5 or more, or aggregator.f=0",
    "aggregator=krum cohort_size=4 system=tiers system.over_selection=1.5": "and there are 4",
    "aggregator=multi_krum aggregator.m=6": "aggregator.m=6: must be at most 5, the updates of a round (cohort_size)",
    "aggregator=trimmed_mean cohort_size=4": "aggregator.share=0.2: must be at least 1 / 4, or it trims none",
    "aggregator=trimmed_mean aggregator.weighting=by_size": "aggregator.weighting: is not a known key",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_does_not_go_together_is_refused_before_the_run(
    fedsim: Run, tmp_path: Path, words: str
) -> None:
    assert REFUSED[words] in refused(fedsim, tmp_path, *words.split())
