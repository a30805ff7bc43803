"""What partitions draw: their distributions, that all is shuffled, and where rounding and borders
lie."""

from typing import Any

import numpy as np
import pytest

from fedsim.core.errors import DataError
from fedsim.partitions import dirichlet
from fedsim.partitions.base import Labelled, largest_remainder, require_samples, shuffled_by_class
from fedsim.partitions.dirichlet import DirichletClass, DirichletClient, _draw_class
from fedsim.partitions.dirichlet_qp import DirichletQP, _assign_samples, _least_squares_counts
from fedsim.partitions.iid import IID, Natural, QuantitySkew
from fedsim.partitions.shards import Shards, _shards_per_class
from tests.partition_toys import balanced, histograms, split


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize(
    ("shares", "total", "expected"),
    [
        (
            [0.45, 0.33, 0.22],
            10,
            [5, 3, 2],
        ),  # quotas 4.5, 3.3, 2.2: the one seat goes to the largest remainder
        ([0.16, 0.27, 0.57], 10, [1, 3, 6]),  # remainders .6, .7, .7
        ([1, 1, 1], 4, [2, 1, 1]),  # ties to the lower index
        ([2.0, 6.0], 3, [1, 2]),
    ],
)
def test_seats_go_by_largest_remainder(
    shares: list[float], total: int, expected: list[int]
) -> None:
    assert largest_remainder(np.array(shares, dtype=float), total).tolist() == expected


def test_enough_samples_is_exactly_so_many_each() -> None:
    require_samples(12, 3, 4, "x")
    with pytest.raises(DataError, match="needs at least 12 training samples and there are 11"):
        require_samples(11, 3, 4, "x")


# --- Dirichlet -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.5, 2.0])
def test_labels_are_drawn_by_dirichlets_of_this_alpha(alpha: float) -> None:
    """Of a class, Dir(alpha 1_N): E sum_k p_k^2 = (alpha + 1) / (N alpha + 1), over 400 classes of
    400 samples. Of a client, E sum_c q_c^2 = (alpha + 1) / (C alpha + 1), with (1 - that) / n from
    drawing n samples; classes hardly run out where they are many clients' together."""
    data = Labelled(np.repeat(np.arange(400), 400), 400)
    counts = histograms(
        data, split("dirichlet_class", data, 8, alpha=alpha, min_size=0, max_tries=1)
    )
    assert ((counts / 400) ** 2).sum(0).mean() == pytest.approx(
        (alpha + 1) / (8 * alpha + 1), rel=0.06
    )
    data = balanced(4000, 5)
    counts = histograms(data, split("dirichlet_client", data, 400, alpha=alpha))
    even = (alpha + 1) / (5 * alpha + 1)
    assert ((counts / 50) ** 2).sum(1).mean() == pytest.approx(even + (1 - even) / 50, rel=0.06)
    assert set(counts.sum(1)) == {50}


class Given:
    """A generator some of whose methods are replaced."""

    def __init__(self, **methods: Any) -> None:
        self.rng = rng()
        vars(self).update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rng, name)


def test_cuts_lie_at_rounded_cumulative_proportions() -> None:
    """Proportions (.26, .48, .26) of ten samples: cuts at 2.6 and 7.4, that is, 3 and 7."""
    data, asked = Labelled(np.zeros(10, np.int64), 1), []
    for shares, sizes in (([0.26, 0.48, 0.26], [3, 4, 3]), ([1.0 + 1e-9, 0.2, -0.2], [10, 0, 0])):
        given: Any = Given(
            dirichlet=lambda alphas, shares=shares: asked.append(alphas) or np.array(shares)
        )
        parts = DirichletClass(alpha=0.7, min_size=0, max_tries=1, balanced=False).split(
            data, 3, given
        )
        assert [len(p) for p in parts] == sizes
    assert np.array_equal(asked, np.full((2, 3), 0.7))


def test_draws_are_repeated_until_the_smallest_has_exactly_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    smallest = iter([2, 3, 4, 2, 3, 4])
    monkeypatch.setattr(
        DirichletClass, "_draw", lambda *_: [np.arange(next(smallest)), np.arange(9)]
    )
    data = Labelled(np.zeros(20, np.int64), 1)
    parts = DirichletClass(alpha=1.0, balanced=False, min_size=4, max_tries=3).split(data, 2, rng())
    assert len(parts[0]) == 4
    with pytest.raises(DataError, match=r"partition\.max_tries=2 .*smallest client has 3"):
        DirichletClass(alpha=1.0, balanced=False, min_size=4, max_tries=2).split(data, 2, rng())


@pytest.mark.parametrize(
    "partition",
    [
        DirichletClass(alpha=1.0, balanced=False, min_size=1, max_tries=1000),
        DirichletQP(alpha=5.0, solver="CLARABEL", retries=5, fallback="nnls"),
    ],
)
def test_a_clients_samples_are_not_sorted_by_label(partition: DirichletClass | DirichletQP) -> None:
    """The first batches of an unshuffled reader would see one class only."""
    data = balanced(600, 4)
    parts = [data.labels[p] for p in partition.split(data, 10, rng())]
    mixed = [
        own
        for own in parts
        if len(own) > 50 and np.bincount(own, minlength=4).max() < 0.9 * len(own)
    ]
    assert len(mixed) >= 5
    assert all((np.diff(labels) < 0).any() for labels in mixed)


def test_a_class_is_drawn_at_its_quantile_among_those_left() -> None:
    """Class 0 has no samples left, class 2 no probability; 1 and 3 share the rest. Then classes
    that have all run out, or are all but impossible."""
    shares, left = np.array([0.6, 0.2, 0.0, 0.2]), np.array([0, 5, 5, 5])
    assert [_draw_class(shares, left, u) for u in (0.0, 0.49, 0.5, 0.99)] == [1, 1, 3, 3]
    assert [_draw_class(np.array([1.0, 0, 0]), np.array([0, 3, 3]), u) for u in (0.1, 0.9)] == [
        1,
        2,
    ]
    probabilities = np.array(
        [0.5, 5e-324, 0.0]
    )  # 0.9 times the smallest number is the smallest number
    assert _draw_class(probabilities, np.array([0, 1, 1]), 0.9) == 1


def test_clients_take_turns_in_a_new_random_order_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By draw number: who has his first, second and third sample when. Clients' own mixes tell them
    apart."""
    turns: list[int] = []
    draw = dirichlet._draw_class

    def watched(probabilities: np.ndarray, left: np.ndarray, u: float) -> int:
        turns.append(int(probabilities.argmax()))
        return draw(probabilities, left, u)

    monkeypatch.setattr(dirichlet, "_draw_class", watched)
    given: Any = Given(dirichlet=lambda alphas, count: np.eye(4))
    DirichletClient(alpha=1.0).split(balanced(20, 4), 4, given)
    orders = [tuple(turns[start : start + 4]) for start in range(0, 80, 4)]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    assert len(set(orders)) > 5


# --- the quadratic program -----------------------------------------------------------------------------------------


def test_mixes_have_the_frequencies_as_their_mean_and_alpha_as_their_total() -> None:
    """Of Dir(alpha p): E q_c = p_c and Var q_c = p_c (1 - p_c) / (alpha + 1)."""
    partition = DirichletQP(alpha=2.0, solver="CLARABEL", retries=0, fallback="error")
    p = np.array([0.5, 0.3, 0.2])
    q = partition._label_mixes(1000 * np.array([0.5, 0, 0.3, 0.2]), 20_000, rng())
    assert (q[1] == 0).all()
    assert q[[0, 2, 3]].mean(1) == pytest.approx(p, abs=0.01)
    assert q[[0, 2, 3]].var(1) == pytest.approx(p * (1 - p) / 3, rel=0.06)
    given: Any = Given(dirichlet=lambda alphas, count: np.full((count, len(alphas)), np.nan))
    q = partition._label_mixes(
        np.array([80.0, 0.0, 20.0]), 4000, given
    )  # where every gamma draw underflows
    assert np.isin(q, [0, 1]).all()
    assert q.mean(1) == pytest.approx([0.8, 0.0, 0.2], abs=0.03)


def test_quotas_are_rounded_down_but_for_rounding_errors() -> None:
    last: Any = Given(integers=lambda count, size: np.full(size, count - 1))
    parts = _assign_samples(
        np.array([[2.9, 3.9999999999, 3.1]]), Labelled(np.zeros(10, np.int64), 1), last
    )
    assert [len(p) for p in parts] == [2, 4, 4]


# --- sizes and owners ----------------------------------------------------------------------------------------------


def test_iid_parts_are_random() -> None:
    data = Labelled(np.zeros(100, np.int64), 1)
    for partition in (IID(), QuantitySkew(law="lognormal", skew=0.5, min_size=1)):
        parts = partition.split(data, 4, rng())
        assert any(sorted(p) != list(range(min(p), max(p) + 1)) for p in parts)


@pytest.mark.parametrize(
    ("law", "skew"), [("lognormal", 0.5), ("lognormal", 1.5), ("powerlaw", 2.0), ("powerlaw", 4.0)]
)
def test_sizes_have_this_deviation_of_their_logarithm_or_this_tail(law: str, skew: float) -> None:
    """Of a power law ln(size / smallest) is exponential with mean 1 / skew."""
    data = Labelled(np.zeros(4_000_000, np.int64), 1)
    partition = QuantitySkew(law=law, skew=skew, min_size=1)  # type: ignore[arg-type]
    logs = np.log([len(p) for p in partition.split(data, 1000, rng())])
    if law == "lognormal":
        assert logs.std() == pytest.approx(skew, rel=0.08)
    else:
        assert (logs - logs.min()).mean() == pytest.approx(1 / skew, rel=0.1)


def owned(counts: list[int]) -> Labelled:
    owners = np.repeat(np.arange(len(counts)), counts)
    return Labelled(np.zeros(len(owners), np.int64), 1, owners)


def test_owners_with_exactly_enough_samples_are_drawn_by_seed_and_stand_in_order() -> None:
    data = owned([5, 4, 5, 6, 3, 5])
    assert data.owners is not None
    chosen = set()
    for seed in range(30):
        parts = Natural(min_samples=5, cap=None, keep="random").split(data, 2, rng(seed))
        ids = [int(data.owners[p[0]]) for p in parts]
        assert ids == sorted(ids)
        assert all(len(np.unique(data.owners[p])) == 1 for p in parts)
        chosen |= set(ids)
    assert chosen == {0, 2, 3, 5}
    assert len(Natural(min_samples=5, cap=None, keep="random").split(data, 4, rng())) == 4
    with pytest.raises(DataError, match="only 4 of 6 owners have"):
        Natural(min_samples=5, cap=None, keep="random").split(data, 5, rng())
    capped = Natural(min_samples=1, cap=2, keep="random")
    assert len({int(i) for s in range(30) for i in capped.split(owned([20]), 1, rng(s))[0]}) > 10


# --- shards --------------------------------------------------------------------------------------------------------


def test_spread_leftovers_go_to_the_first_shards_one_each() -> None:
    partition = Shards(shards_per_client=1, pure=False, leftover="spread")
    found = [[len(s) for s in partition._cut(np.arange(n), 4)] for n in (9, 10, 11)]
    assert found == [[3, 2, 2, 2], [3, 3, 2, 2], [3, 3, 3, 2]]
    dropped = Shards(shards_per_client=1, pure=False, leftover="drop")._cut(np.arange(11), 4)
    assert [s.tolist() for s in dropped] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_pure_shards_are_as_many_as_classes_and_dealt_at_random() -> None:
    data = Labelled(np.repeat(np.arange(10), 10), 10)
    partition = Shards(shards_per_client=1, pure=True, leftover="drop")
    dealt = [partition.split(data, 10, rng(seed)) for seed in range(5)]
    assert all(((histograms(data, parts) > 0).sum(1) == 1).all() for parts in dealt)
    assert len({tuple(data.labels[p[0]] for p in parts) for parts in dealt}) > 1


def test_pure_shards_are_taken_from_the_class_whose_shards_are_smallest() -> None:
    """Sizes 100, 3, 3 into 4 shards: quotas 3.77, .11, .11, so 4 + 1 + 1 are two too many; only
    class 0 has more than one. Sizes 50, 46, 4 into 3: 1, 1, 1 after largest remainder gives 2, 1,
    0."""
    assert _shards_per_class(np.array([100.0, 3.0, 3.0]), 4).tolist() == [2, 1, 1]
    assert _shards_per_class(np.array([50.0, 46.0, 4.0]), 3).tolist() == [1, 1, 1]
    assert _shards_per_class(np.array([60.0, 30.0, 1.0]), 6).tolist() == [3, 2, 1]


def test_the_samples_of_a_class_are_in_random_order() -> None:
    labels = np.arange(60) % 2
    for of, positions in enumerate(shuffled_by_class(labels, 2, np.random.default_rng(0))):
        assert sorted(positions) == np.flatnonzero(labels == of).tolist() != positions.tolist()


def test_the_counts_of_a_fallback_add_up_to_those_of_the_classes() -> None:
    counts = _least_squares_counts(np.array([[0.7, 0.2], [0.3, 0.8]]), np.array([10.0, 30.0]))
    assert counts.sum(1) == pytest.approx([10, 30])
