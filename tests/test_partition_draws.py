"""Partitions draw from the right distributions, in random order, with exact rounding."""

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.random import default_rng

from fedsim.core.errors import DataError
from fedsim.partitions import dirichlet
from fedsim.partitions.base import Labelled, largest_remainder, require_samples, shuffled_by_class
from fedsim.partitions.dirichlet import DirichletClass, _draw_class
from fedsim.partitions.dirichlet_qp import DirichletQP, _assign_samples, _least_squares_counts
from fedsim.partitions.shards import Shards, _shards_per_class
from tests.partition_toys import balanced, build, histograms, labelled, lists, sizes, split


def generator(**methods: Any) -> Any:
    """Return a random generator, some of whose methods are replaced."""
    return Mock(wraps=default_rng(0), **methods)


# --- rounding ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shares", "total", "seats"),
    [
        # Quotas 4.5, 3.3, 2.2: the one seat that is left goes to the remainder 0.5.
        ([0.45, 0.33, 0.22], 10, [5, 3, 2]),
        # Quotas 1.6, 2.7, 5.7: the two seats that are left go to the remainders 0.7.
        ([0.16, 0.27, 0.57], 10, [1, 3, 6]),
        # Of equal remainders the first gets the seat.
        ([1.0, 1.0, 1.0], 4, [2, 1, 1]),
        # Quotas 0.75, 2.25: shares need not sum to 1.
        ([2.0, 6.0], 3, [1, 2]),
    ],
)
def test_seats_go_to_the_largest_remainders(
    shares: list[float], total: int, seats: list[int]
) -> None:
    assert largest_remainder(np.array(shares), total).tolist() == seats


def test_the_required_number_of_samples_is_exact() -> None:
    require_samples(12, 3, 4, "x")
    with pytest.raises(DataError, match="needs at least 12 training samples and there are 11"):
        require_samples(11, 3, 4, "x")


# --- Dirichlet -----------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.5, 2.0])
def test_a_class_is_spread_over_clients_by_a_dirichlet_draw(alpha: float) -> None:
    """Shares p by Dir(alpha 1_N) have E sum_k p_k^2 = (alpha + 1) / (N alpha + 1); here N = 8."""
    data = labelled(*[400] * 400)
    parts = split("dirichlet_class", data, 8, alpha=alpha, min_size=0, max_tries=1)
    shares = histograms(data, parts) / 400
    expected = (alpha + 1) / (8 * alpha + 1)
    assert (shares**2).sum(0).mean() == pytest.approx(expected, rel=0.06)


@pytest.mark.parametrize("alpha", [0.5, 2.0])
def test_a_client_has_a_dirichlet_mix_of_labels(alpha: float) -> None:
    """Mixes q by Dir(alpha 1_C) have E sum_c q_c^2 = (alpha + 1) / (C alpha + 1); here C = 5.

    Drawing n = 50 samples by q adds (1 - that) / n. With 400 clients classes hardly run out.
    """
    data = balanced(4000, 5)
    counts = histograms(data, split("dirichlet_client", data, 400, alpha=alpha))
    assert set(counts.sum(1)) == {50}
    of_mixes = (alpha + 1) / (5 * alpha + 1)
    expected = of_mixes + (1 - of_mixes) / 50
    assert ((counts / 50) ** 2).sum(1).mean() == pytest.approx(expected, rel=0.06)


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        # Cuts of ten samples at 2.6 and 7.4, which are rounded to 3 and 7.
        ([0.26, 0.48, 0.26], [3, 4, 3]),
        # Rounding errors put no cut after the last sample.
        ([1.0 + 1e-9, 0.2, -0.2], [10, 0, 0]),
    ],
)
def test_cuts_lie_at_rounded_cumulative_shares(shares: list[float], expected: list[int]) -> None:
    rng = generator(dirichlet=Mock(return_value=np.array(shares)))
    partition = build("dirichlet_class", alpha=0.7, min_size=0, max_tries=1)
    assert sizes(partition.split(labelled(10), 3, rng)) == expected
    (alphas,) = rng.dirichlet.call_args.args
    assert alphas.tolist() == [0.7, 0.7, 0.7]


def test_draws_are_repeated_until_the_smallest_client_has_enough_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    smallest = iter([2, 3, 4, 2, 3])
    monkeypatch.setattr(
        DirichletClass, "_draw", lambda *_: [np.arange(next(smallest)), np.arange(9)]
    )
    parts = split("dirichlet_class", labelled(20), 2, min_size=4, max_tries=3)
    assert sizes(parts) == [4, 9]
    rule = r"partition\.min_size=4: not reached .*partition\.max_tries=2 .*smallest client has 3"
    with pytest.raises(DataError, match=rule):
        split("dirichlet_class", labelled(20), 2, min_size=4, max_tries=2)


@pytest.mark.parametrize(
    ("choice", "values"),
    [
        ("dirichlet_class", {"alpha": 1.0, "min_size": 1}),
        ("dirichlet_qp", {"alpha": 5.0, "fallback": "nnls"}),
    ],
)
def test_samples_of_a_client_are_not_sorted_by_label(choice: str, values: dict[str, Any]) -> None:
    """Otherwise the first batches of a reader that does not shuffle would hold one class."""
    data = balanced(600, 4)
    mixed = 0
    for part in split(choice, data, 10, **values):
        labels = data.labels[part]
        if len(labels) > 50 and np.bincount(labels).max() < 0.9 * len(labels):
            assert (np.diff(labels) < 0).any()
            mixed += 1
    assert mixed >= 5


@pytest.mark.parametrize(
    ("shares", "left", "classes"),
    [
        # Class 0 has no samples left and class 2 no share: classes 1 and 3 get a half each.
        ([0.6, 0.2, 0.0, 0.2], [0, 5, 5, 5], {0.0: 1, 0.49: 1, 0.5: 3, 0.99: 3}),
        # The only class with a share has run out: the others are equally likely.
        ([1.0, 0.0, 0.0], [0, 3, 3], {0.1: 1, 0.9: 2}),
        # 5e-324 is the smallest number; 0.9 times it is rounded to itself.
        ([0.5, 5e-324, 0.0], [0, 1, 1], {0.9: 1}),
    ],
)
def test_a_class_is_drawn_at_a_quantile_among_the_classes_that_are_left(
    shares: list[float], left: list[int], classes: dict[float, int]
) -> None:
    for quantile, label in classes.items():
        assert _draw_class(np.array(shares), np.array(left), quantile) == label


def test_clients_take_turns_in_a_new_random_order_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Client i draws class i only, so the probable class of a draw tells whose turn it is."""
    turns: list[int] = []

    def watched(probabilities: np.ndarray, left: np.ndarray, quantile: float) -> int:
        turns.append(int(probabilities.argmax()))
        return _draw_class(probabilities, left, quantile)

    monkeypatch.setattr(dirichlet, "_draw_class", watched)
    rng = generator(dirichlet=lambda alphas, count: np.eye(4))
    build("dirichlet_client").split(balanced(20, 4), 4, rng)
    orders = np.reshape(turns, (20, 4))
    assert (np.sort(orders) == np.arange(4)).all()
    assert len(np.unique(orders, axis=0)) > 5


# --- the quadratic program -----------------------------------------------------------------------

QP = DirichletQP(alpha=2.0, solver="CLARABEL", retries=0, fallback="error")


def test_label_mixes_have_the_class_frequencies_as_their_mean() -> None:
    """Dir(alpha p) has E q_c = p_c and Var q_c = p_c (1 - p_c) / (alpha + 1), with alpha = 2."""
    class_sizes = np.array([500.0, 0.0, 300.0, 200.0])
    frequencies = class_sizes / 1000
    mixes = QP._label_mixes(class_sizes, 20_000, default_rng(0))
    assert (mixes[1] == 0).all()
    assert mixes.mean(1) == pytest.approx(frequencies, abs=0.01)
    assert mixes.var(1) == pytest.approx(frequencies * (1 - frequencies) / 3, rel=0.06)


def test_a_mix_whose_gamma_draws_all_underflow_is_one_class() -> None:
    rng = generator(dirichlet=lambda alphas, count: np.full((count, len(alphas)), np.nan))
    mixes = QP._label_mixes(np.array([80.0, 0.0, 20.0]), 4000, rng)
    assert np.isin(mixes, [0, 1]).all()
    assert mixes.mean(1) == pytest.approx([0.8, 0.0, 0.2], abs=0.03)


def test_quotas_are_rounded_down_except_for_rounding_errors() -> None:
    """Quotas become 2, 4 and 3; the tenth sample goes to a random client, here the last."""
    rng = generator(integers=lambda count, size: np.full(size, count - 1))
    parts = _assign_samples(np.array([[2.9, 3.9999999999, 3.1]]), labelled(10), rng)
    assert sizes(parts) == [2, 4, 4]


def test_the_counts_of_a_fallback_add_up_to_the_class_sizes() -> None:
    mixes = np.array([[0.7, 0.2], [0.3, 0.8]])
    counts = _least_squares_counts(mixes, np.array([10.0, 30.0]))
    assert counts.sum(1) == pytest.approx([10, 30])


# --- sizes and owners ----------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["iid", "quantity_skew"])
def test_parts_are_no_blocks_of_consecutive_samples(choice: str) -> None:
    parts = split(choice, labelled(100), 4)
    assert any(np.ptp(part) >= len(part) for part in parts)


LARGE = labelled(4_000_000)


@pytest.mark.parametrize("skew", [0.5, 1.5])
def test_logarithms_of_log_normal_sizes_have_the_skew_as_their_deviation(skew: float) -> None:
    parts = split("quantity_skew", LARGE, 1000, law="lognormal", skew=skew, min_size=1)
    assert np.log(sizes(parts)).std() == pytest.approx(skew, rel=0.08)


@pytest.mark.parametrize("skew", [2.0, 4.0])
def test_sizes_by_a_power_law_have_a_tail_of_this_index(skew: float) -> None:
    """The logarithm of size / smallest size is exponential with mean 1 / skew."""
    parts = split("quantity_skew", LARGE, 1000, law="powerlaw", skew=skew, min_size=1)
    logs = np.log(sizes(parts))
    assert (logs - logs.min()).mean() == pytest.approx(1 / skew, rel=0.1)


def owned(*counts: int) -> Labelled:
    """Return data in which owner i has counts[i] samples, which follow each other."""
    owners = labelled(*counts).labels
    return Labelled(owners, len(counts), owners)


def test_owners_with_enough_samples_are_drawn_by_seed_and_ordered() -> None:
    data = owned(5, 4, 5, 6, 3, 5)
    drawn = set()
    for seed in range(30):
        parts = split("natural", data, 2, seed, min_samples=5)
        owners = [set(data.labels[part]) for part in parts]
        (first,), (second,) = owners
        assert first < second
        drawn |= {first, second}
    assert drawn == {0, 2, 3, 5}


def test_all_owners_with_enough_samples_may_be_clients() -> None:
    data = owned(5, 4, 5, 6, 3, 5)
    assert len(split("natural", data, 4, min_samples=5)) == 4
    with pytest.raises(DataError, match=r"num_clients=5: only 4 of 6 owners have .* lower one of"):
        split("natural", data, 5, min_samples=5)
    with pytest.raises(DataError, match=r"only 6 of 6 owners .* at most num_clients=6"):
        split("natural", data, 7, min_samples=1)


def test_a_capped_owner_keeps_random_samples() -> None:
    positions = set()
    for seed in range(30):
        (part,) = split("natural", owned(20), 1, seed, min_samples=1, cap=2)
        positions |= set(part)
    assert len(positions) > 10


# --- shards --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_samples", "expected"), [(9, [3, 2, 2, 2]), (10, [3, 3, 2, 2]), (11, [3, 3, 3, 2])]
)
def test_leftovers_are_spread_over_the_first_shards(num_samples: int, expected: list[int]) -> None:
    partition = Shards(shards_per_client=1, pure=False, leftover="spread")
    assert sizes(partition._cut(np.arange(num_samples), 4)) == expected


def test_leftovers_are_dropped_from_the_end() -> None:
    partition = Shards(shards_per_client=1, pure=False, leftover="drop")
    assert lists(partition._cut(np.arange(11), 4)) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_pure_shards_are_dealt_at_random() -> None:
    data = labelled(*[10] * 10)
    orders = set()
    for seed in range(5):
        parts = split("shards_1", data, 10, seed)
        orders.add(tuple(data.labels[part[0]] for part in parts))
    assert len(orders) > 1


@pytest.mark.parametrize(
    ("class_sizes", "num_shards", "counts"),
    [
        # Quotas 3.77, 0.11, 0.11 give 4 + 1 + 1 shards, two too many; only class 0 can spare them.
        ([100.0, 3.0, 3.0], 4, [2, 1, 1]),
        # Largest remainders give 2, 1, 0; class 2 takes a shard from class 0.
        ([50.0, 46.0, 4.0], 3, [1, 1, 1]),
        # Quotas 3.96, 1.98, 0.07 give 4 + 2 + 1 shards, one too many; those of class 0 and class 1
        # have 15 samples each, and the first class spares one.
        ([60.0, 30.0, 1.0], 6, [3, 2, 1]),
    ],
)
def test_every_class_has_a_pure_shard_and_the_smallest_shards_are_given_up(
    class_sizes: list[float], num_shards: int, counts: list[int]
) -> None:
    assert _shards_per_class(np.array(class_sizes), num_shards).tolist() == counts


def test_the_samples_of_a_class_are_in_random_order() -> None:
    labels = np.arange(60) % 2
    for label, positions in enumerate(shuffled_by_class(labels, 2, default_rng(0))):
        in_order = np.flatnonzero(labels == label).tolist()
        assert sorted(positions) == in_order != positions.tolist()
