"""Robust aggregators, and MIFA, against independent computations."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import torch

from fedsim.core.arrays import Floats
from fedsim.core.types import Cohort
from fedsim.rounds.aggregators import MIFA, Aggregator, FedAdam, FedAvg, FedAvgM
from fedsim.rounds.robust import DPFedAvg, GeometricMedian, Krum, NormClipping, TrimmedMean
from fedsim.selectors.random import Random
from tests.run_toys import Run, refused
from tests.toys import toy_cohort, toy_population

START = {"w": torch.tensor([1.0, -2.0, 0.5])}
NO_BUFFERS = frozenset[str]()


def random_cohort(num: int, seed: int = 0) -> tuple[Cohort, Floats]:
    """Return a cohort of clients with 1, 2, ... `num` samples, and its updates [num, 3]."""
    rows = np.random.default_rng(seed).normal(size=(num, 3)).astype(np.float32)
    return toy_cohort(range(num), range(1, num + 1), rows.tolist()), rows.astype(np.float64)


def step(aggregator: Aggregator, cohort: Cohort, weights: Any = None) -> Floats:
    """Return what the aggregator adds to the model."""
    return (aggregator.aggregate(dict(START), cohort, weights)["w"] - START["w"]).numpy()


@pytest.mark.parametrize("share", [0.0, 0.2, 0.25, 0.4])
@pytest.mark.parametrize("num", [1, 2, 5, 8])
def test_a_trimmed_mean_is_scipys(num: int, share: float) -> None:
    cohort, updates = random_cohort(num)
    expected = scipy.stats.trim_mean(updates, share, axis=0)
    assert step(TrimmedMean(NO_BUFFERS, share=share), cohort) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("num", [1, 2, 5, 8])
def test_a_share_of_a_half_is_the_median_whatever_the_weights(num: int) -> None:
    cohort, updates = random_cohort(num)
    median = step(TrimmedMean(NO_BUFFERS, share=0.5), cohort, np.arange(num) + 1.0)
    assert median == pytest.approx(np.median(updates, axis=0), abs=1e-6)


KRUM_CASES = [(5, 1, 1, 1), (9, 2, 3, 2), (9, 3, None, 3), (6, 3, 2, 1)]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("num", "f", "m", "f_that_fits"), KRUM_CASES)
def test_krum_averages_the_updates_of_lowest_score(
    num: int, f: int, m: int | None, f_that_fits: int, seed: int
) -> None:
    cohort, updates = random_cohort(num, seed)
    num_near = num - f_that_fits - 2
    squares = ((updates[:, None] - updates) ** 2).sum(axis=2)
    scores = np.sort(squares, axis=1)[:, 1 : num_near + 1].sum(axis=1)  # without itself
    used = np.argsort(scores)[: m or num_near]
    expected = updates[used].mean(axis=0)
    assert step(Krum(NO_BUFFERS, f=f, m=m), cohort) == pytest.approx(expected, abs=1e-6)


SQUARE = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [-1.0, 0.0, 0.0], [0.0, -1.0, 0.0]]


def test_krum_breaks_ties_by_the_lower_id_and_averages_buffers_of_the_same_clients() -> None:
    """All scores are equal, so clients 2 and 3 are used: (1, 1, 0) / 2, and (1 + 2) / 2."""
    cohort = toy_cohort([2, 3, 5, 7], [1] * 4, SQUARE)
    cohort.delta["v"] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    start = START | {"v": torch.zeros(())}
    result = Krum(frozenset({"v"}), f=0, m=2).aggregate(start, cohort, None)
    assert (result["w"] - START["w"]).tolist() == [0.5, 0.5, 0.0]
    assert result["v"].item() == 1.5


def test_krum_of_two_updates_is_the_first() -> None:
    cohort = toy_cohort([2, 3], [1, 1], SQUARE[:2])
    assert step(Krum(NO_BUFFERS, f=1, m=1), cohort).tolist() == SQUARE[0]


@pytest.mark.parametrize("selector_weights", [None, [1.0, 2.0, 3.0, 1.0, 1.0, 2.0, 4.0]])
def test_the_geometric_median_has_the_least_sum_of_distances(
    selector_weights: list[float] | None,
) -> None:
    cohort, updates = random_cohort(7)
    by_size = np.arange(1.0, 8.0)
    weights = None if selector_weights is None else np.array(selector_weights)
    used = by_size if weights is None else weights

    def sum_of_distances(point: Floats) -> float:
        return float(used @ np.linalg.norm(updates - point, axis=1))

    best = scipy.optimize.minimize(sum_of_distances, updates.mean(axis=0), tol=1e-12)
    aggregator = GeometricMedian(NO_BUFFERS, weighting="by_size", iterations=300, smoothing=1e-6)
    assert step(aggregator, cohort, weights) == pytest.approx(best.x, abs=1e-4)


def test_updates_and_running_statistics_are_clipped_apart() -> None:
    """(3, 4, 0) of length 5 becomes (1.2, 1.6, 0) of length 2; the statistic -8 becomes -2. The
    weights 1 and 3 sum updates, and average statistics."""
    cohort = toy_cohort([0, 1], [1, 3], [[3.0, 4.0, 0.0], [0.0, 1.0, 0.0]])
    cohort.delta["v"] = torch.tensor([-8.0, 1.0])
    aggregator = NormClipping(frozenset({"v"}), weighting="by_size", norm=2.0)
    start = START | {"v": torch.zeros(())}
    result = aggregator.aggregate(start, cohort, np.array([1.0, 3.0]))
    assert (result["w"] - START["w"]).tolist() == pytest.approx([1.2, 1.6 + 3 * 1, 0.0])
    assert result["v"].item() == pytest.approx((-2 + 3 * 1) / 4)


ROBUST = [
    TrimmedMean(NO_BUFFERS, share=0.5),
    TrimmedMean(NO_BUFFERS, share=0.2),
    Krum(NO_BUFFERS, f=1, m=1),
    Krum(NO_BUFFERS, f=1, m=None),
    GeometricMedian(NO_BUFFERS, weighting="uniform", iterations=20, smoothing=1e-6),
    NormClipping(NO_BUFFERS, weighting="uniform", norm=2.0),
]


@pytest.mark.parametrize("aggregator", ROBUST, ids=lambda aggregator: type(aggregator).__name__)
def test_a_hostile_update_moves_the_mean_but_not_a_robust_aggregator(
    aggregator: Aggregator,
) -> None:
    cohort, _ = random_cohort(7)
    cohort.delta["w"][3] = 1e6
    mean = FedAvg(NO_BUFFERS, weighting="uniform")
    assert np.abs(step(mean, cohort)).min() > 1e5
    assert np.abs(step(aggregator, cohort)).max() < 3


def test_which_aggregators_are_means() -> None:
    for cls in (FedAvg, FedAvgM, FedAdam):
        assert cls.is_mean
    for robust_cls in (TrimmedMean, Krum, GeometricMedian, NormClipping, DPFedAvg, MIFA):
        assert not robust_cls.is_mean


SIZES = [1, 1, 2, 4]
ROUNDS = [([0, 2], [4.0, 8.0], 1.0), ([0], [2.0], 1.0), ([3], [6.0], 0.5)]
"""Clients, their updates and the learning rate of three rounds. The latest updates at the present
rate are (4, -, 8, -), then (2, -, 8, -), then (2 / 2, -, 8 / 2, 6)."""


MIFA_MEANS = [
    ("uniform", [(4 + 8) / 2, (2 + 8) / 2, (1 + 4 + 6) / 3]),
    ("by_size", [(4 + 2 * 8) / 3, (2 + 2 * 8) / 3, (1 + 2 * 4 + 4 * 6) / 7]),
]


@pytest.mark.parametrize(("weighting", "expected"), MIFA_MEANS)
def test_mifa_averages_the_latest_update_of_each_client(
    weighting: Any, expected: list[float]
) -> None:
    server = MIFA(frozenset({"v"}), weighting=weighting)
    server.begin(Random(toy_population(SIZES, 2), mode="uniform"), START)
    assert "MIFA keeps the latest update of each of 4 clients, 0.0 MB" in server.warning
    for (ids, values, lr), mean in zip(ROUNDS, expected, strict=True):
        cohort = toy_cohort(ids, [SIZES[i] for i in ids], [[x] * 3 for x in values])
        cohort.delta["v"] = torch.tensor(values)
        server.begin_round(SimpleNamespace(lr=lr), cohort.ids)  # type: ignore[arg-type]
        ignored_weights = np.full(len(ids), 9.0)
        start = START | {"v": torch.zeros(())}
        result = server.aggregate(start, cohort, ignored_weights)
        assert (result["w"] - START["w"]).tolist() == pytest.approx([mean] * 3, abs=1e-6)
        # buffers: the average over this round's updates only
        weights = cohort.sizes if weighting == "by_size" else None
        assert result["v"].item() == pytest.approx(np.average(values, weights=weights))


REJECTED = [
    (
        "aggregator=krum cohort_size=4",
        "aggregator.f=1: needs 2 f + 3 = 5 updates a round, and there are 4 (cohort_size)\n"
        "    set cohort_size=5 or more, or aggregator.f=0",
    ),
    (
        "aggregator=krum cohort_size=4 system=tiers system.over_selection=1.5",
        "and there are 4",
    ),
    (
        "aggregator=krum aggregator.f=4 selector=full system=tiers system.over_selection=1.5",
        "aggregator.f=4: needs 2 f + 3 = 11 updates a round, and there are 5",
    ),
    (
        "aggregator=multi_krum aggregator.m=6",
        "aggregator.m=6: must be at most 5, the updates of a round (cohort_size)",
    ),
    (
        "aggregator=trimmed_mean cohort_size=4",
        "aggregator.share=0.2: must be at least 1 / 4, or it trims none",
    ),
    (
        "aggregator=trimmed_mean aggregator.weighting=by_size",
        "aggregator.weighting: is not a known key",
    ),
]


@pytest.mark.parametrize(("words", "message"), REJECTED)
def test_a_config_that_does_not_fit_is_rejected_before_the_run(
    fedsim: Run, tmp_path: Path, words: str, message: str
) -> None:
    assert message in refused(fedsim, tmp_path, *words.split())
