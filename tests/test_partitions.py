import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.config.build import instantiate
from fedsim.errors import ConfigError, DataError
from fedsim.partitions.apportion import largest_remainder
from fedsim.partitions.base import Labelled, Partition
from fedsim.partitions.dirichlet_qp import DirichletQP, _assign_samples, solve_sizes

FOLDER = Path(__file__).parents[1] / "conf" / "partition"
CHOICES = sorted(p.stem for p in FOLDER.glob("*.yaml"))


def build(choice: str, **values: Any) -> Partition:
    node = yaml.safe_load((FOLDER / f"{choice}.yaml").read_text())
    return instantiate({**node, **values}, Partition, "partition")


def balanced(per_class: int, num_classes: int = 10) -> Labelled:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(num_classes), per_class))
    owners = np.random.default_rng(1).integers(60, size=len(labels))
    return Labelled(labels, num_classes, owners)


def split(choice: str, data: Labelled, num_clients: int, seed: int = 0, **values: Any) -> list[np.ndarray]:
    return build(choice, **values).split(data, num_clients, np.random.default_rng(seed))


def histograms(data: Labelled, parts: list[np.ndarray]) -> np.ndarray:
    return np.stack([np.bincount(data.labels[p], minlength=data.num_classes) for p in parts])


def skew(data: Labelled, parts: list[np.ndarray]) -> float:
    """Mean total-variation distance between a client's label distribution and that of all."""
    counts = histograms(data, parts)
    overall = counts.sum(0) / counts.sum()
    return float(np.mean([abs(c / c.sum() - overall).sum() / 2 for c in counts if c.sum()]))


SMALL: dict[str, dict[str, Any]] = {"dirichlet_class": {"min_size": 1}, "natural": {"min_samples": 1}}


@pytest.mark.parametrize("choice", CHOICES)
def test_parts_are_disjoint_seeded_and_within_the_data(choice: str) -> None:
    data = balanced(120)
    one, again, other = (split(choice, data, 50, seed, **SMALL.get(choice, {})) for seed in (0, 0, 1))
    everything = np.concatenate(one)
    assert len(one) == 50
    assert len(np.unique(everything)) == len(everything)
    assert everything.min() >= 0
    assert everything.max() < len(data.labels)
    assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("choice", [c for c in CHOICES if not c.startswith(("shards", "natural"))])
def test_all_samples_are_used(choice: str) -> None:
    data = balanced(117)
    assert len(np.concatenate(split(choice, data, 51, **SMALL.get(choice, {})))) == 1170


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(1, 4), st.booleans(), st.sampled_from(["drop", "spread"]), st.integers(0, 99))
def test_shards_of_any_shape(num_clients: int, s: int, pure: bool, leftover: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.integers(4, size=int(rng.integers(50, 200)))
    data = Labelled(labels, 4)
    if pure and num_clients * s < 4:
        with pytest.raises(DataError, match=r"partition\.pure=true"):
            split("shards", data, num_clients, seed, shards_per_client=s, pure=pure, leftover=leftover)
        return
    parts = split("shards", data, num_clients, seed, shards_per_client=s, pure=pure, leftover=leftover)
    everything = np.concatenate(parts)
    assert len(np.unique(everything)) == len(everything)
    if leftover == "spread":
        assert len(everything) == len(labels)
    if pure:
        assert all(len(np.unique(labels[p])) <= s for p in parts)
    elif leftover == "drop":
        assert {len(p) for p in parts} == {len(labels) // (num_clients * s) * s}


def test_one_shard_per_client_gives_one_label_each_and_n_over_10_clients_per_label() -> None:
    data = balanced(600)
    parts = split("shards", data, 100, shards_per_client=1)
    counts = histograms(data, parts)
    assert {len(p) for p in parts} == {60}
    assert ((counts > 0).sum(1) == 1).all()
    assert ((counts > 0).sum(0) == 10).all()


@pytest.mark.parametrize(("per_class", "size"), [(6000, 600), (5000, 500)])
@pytest.mark.parametrize("choice", ["shards_1", "shards_2"])
def test_shards_of_the_papers_have_their_sizes_and_labels(choice: str, per_class: int, size: int) -> None:
    """selectors.md 4.1: FMNIST 600 per client, CIFAR-10 500, as one shard or as two halves."""
    data = balanced(per_class)
    parts = split(choice, data, 100)
    assert {len(p) for p in parts} == {size}
    assert len(np.unique(np.concatenate(parts))) == 10 * per_class
    counts = histograms(data, parts)
    shards = int(choice[-1])
    assert set(counts.ravel()) == {0, size // shards, size}
    assert (counts > 0).sum(1).max() == shards


@given(st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_one_pure_shard_is_one_label_even_where_classes_are_uneven(seed: int) -> None:
    """As they are once the server has drawn its validation samples: plain shards then mix labels at the borders."""
    even = balanced(120)
    data = Labelled(even.labels[np.random.default_rng(seed).random(1200) < 0.95], 10)
    assert ((histograms(data, split("shards_1", data, 50, seed)) > 0).sum(1) == 1).all()
    assert ((histograms(data, split("shards", data, 50, seed, shards_per_client=1)) > 0).sum(1) > 1).any()


def test_two_shards_per_client_give_two_labels_or_rarely_one() -> None:
    """Both shards carry one label with probability 19 / 199 for 200 shards of 10 labels."""
    data = balanced(600)
    single = [(histograms(data, split("shards", data, 100, seed)) > 0).sum(1) == 1 for seed in range(30)]
    assert abs(np.mean(single) - 19 / 199) < 4 * np.sqrt(0.0955 * 0.9045 / 3000)


def test_a_shards_samples_are_in_random_order_inside_a_label() -> None:
    data = Labelled(np.zeros(100, np.int64), 1)
    parts = split("shards", data, 2, shards_per_client=1)
    assert not np.array_equal(np.sort(parts[0]), np.arange(50))
    assert not np.array_equal(np.sort(parts[0]), np.arange(50, 100))


def test_pure_shards_follow_the_class_sizes() -> None:
    data = Labelled(np.repeat([0, 1], [300, 100]), 2)
    counts = histograms(data, split("shards", data, 8, shards_per_client=1, pure=True))
    assert ((counts > 0).sum(0) == [6, 2]).all()
    assert set(counts.sum(1)) == {50}


def test_the_two_client_program_by_hand() -> None:
    """Q = I: every client is its own class, so x = b."""
    assert solve_sizes(np.eye(2), np.array([3.0, 5.0]), "CLARABEL") == pytest.approx([3, 5], abs=1e-4)


def test_sizes_scale_with_the_data() -> None:
    q = np.random.default_rng(0).dirichlet(np.full(3, 0.5), 12).T
    b = np.array([30.0, 40.0, 50.0])
    once, twice = solve_sizes(q, b, "CLARABEL"), solve_sizes(q, 2 * b, "CLARABEL")
    assert once is not None
    assert twice is not None
    np.testing.assert_allclose(twice, 2 * once, rtol=1e-9)


def dual_newton(q: np.ndarray, b: np.ndarray) -> np.ndarray:
    """An independent solution: x = max(0, Q^T dual), the dual from Newton's method."""
    dual = np.linalg.lstsq(q @ q.T, b, rcond=None)[0]
    for _ in range(100):
        x = np.maximum(q.T @ dual, 0)
        gradient = b - q @ x
        if np.abs(gradient).max() < 1e-9 * b.max():
            break
        step = np.linalg.solve((q * (x > 0)) @ q.T + 1e-9 * np.eye(len(b)), gradient)
        value = b @ dual - x @ x / 2
        t = 1.0
        while b @ (dual + t * step) - (np.maximum(q.T @ (dual + t * step), 0) ** 2).sum() / 2 < value and t > 1e-6:
            t /= 2
        dual = dual + t * step
    return np.maximum(q.T @ dual, 0)


def test_the_solver_agrees_with_an_independent_method() -> None:
    q = np.random.default_rng(0).dirichlet(np.full(10, 0.02), 100).T
    b = np.full(10, 600.0)
    sizes = solve_sizes(q, b, "CLARABEL")
    np.testing.assert_allclose(sizes, dual_newton(q, b), atol=0.01)


def test_the_program_is_feasible_for_a_hundred_clients_and_not_for_ten() -> None:
    b = np.full(10, 500.0)
    for num_clients, feasible in ((100, 5), (10, 0)):
        found = [
            solve_sizes(np.random.default_rng(s).dirichlet(np.full(10, 0.02), num_clients).T, b, "CLARABEL")
            for s in range(5)
        ]
        assert sum(x is not None for x in found) == feasible


def test_an_infeasible_division_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(DataError, match=r"partition\.alpha=0\.2: .*in 4 draws.*num_clients=10; raise num_clients"):
        split("dirichlet_qp", balanced(100), 10, retries=3)


def test_a_draw_without_solution_is_repeated_as_often_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    mixes: list[np.ndarray] = []

    def unsolvable(q: np.ndarray, b: np.ndarray, solver: str) -> None:
        mixes.append(q)

    monkeypatch.setattr("fedsim.partitions.dirichlet_qp.solve_sizes", unsolvable)
    with pytest.raises(DataError, match="in 4 draws"):
        split("dirichlet_qp", balanced(20), 10, retries=3)
    assert len(mixes) == 4
    assert not any(np.array_equal(a, b) for a, b in itertools.combinations(mixes, 2))


def test_what_rounding_leaves_goes_to_clients_uniformly() -> None:
    data = Labelled(np.zeros(5000, np.int64), 1)
    sizes = [len(p) for p in _assign_samples(np.array([[0.9, 0.1, 0.5, 0.0, 0.0]]), data, np.random.default_rng(0))]
    assert sum(sizes) == 5000
    assert all(abs(n - 1000) < 4 * np.sqrt(5000 * 0.2 * 0.8) for n in sizes)


def test_the_nnls_fallback_uses_every_sample() -> None:
    parts = split("dirichlet_qp", balanced(100), 10, retries=1, fallback="nnls")
    assert len(np.unique(np.concatenate(parts))) == 1000


def test_dirichlet_qp_has_the_published_sizes_and_a_dominant_class() -> None:
    """selectors.md 4.2: at N = 100 and n = 50,000 sizes have a standard deviation of about 173; .9 is one class."""
    data = balanced(5000)
    counts = [histograms(data, split("dirichlet_qp", data, 100, seed)) for seed in range(4)]
    assert all((c.sum(0) == 5000).all() for c in counts)
    assert np.mean([c.sum(1).std() for c in counts]) == pytest.approx(173, abs=40)
    assert np.mean([c.sum(1).max() for c in counts]) == pytest.approx(1100, rel=0.25)
    assert np.mean([c.sum(1).min() for c in counts]) == pytest.approx(300, rel=0.25)
    assert np.mean([(c.max(1) / c.sum(1)).mean() for c in counts]) == pytest.approx(0.9, abs=0.03)


@pytest.mark.parametrize("solver", ["GUROBY", "clarabel", "SCIPY"])
def test_a_solver_that_cannot_serve_is_refused_with_those_that_can(solver: str) -> None:
    """SCIPY is installed but only for linear programs: it must not look like a hundred infeasible draws."""
    with pytest.raises(ConfigError, match=rf"partition\.solver='{solver}': must be .* one of .*CLARABEL") as caught:
        build("dirichlet_qp", solver=solver)
    assert "SCIPY" not in str(caught.value).replace(f"'{solver}'", "")


def test_another_installed_solver_finds_the_same_sizes() -> None:
    q = np.random.default_rng(0).dirichlet(np.full(10, 0.02), 100).T
    assert build("dirichlet_qp", solver="OSQP") is not None
    np.testing.assert_allclose(
        solve_sizes(q, np.full(10, 600.0), "OSQP"), solve_sizes(q, np.full(10, 600.0), "CLARABEL"), atol=0.01
    )


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 400), min_size=3, max_size=6), st.integers(60, 90), st.integers(0, 99))
def test_dirichlet_qp_deals_the_floor_of_every_quota_and_all_samples(
    totals: list[int], num_clients: int, seed: int
) -> None:
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(totals)), totals))
    data = Labelled(labels, len(totals))
    if len(labels) < num_clients:
        return
    partition = build("dirichlet_qp", alpha=1.0, fallback="nnls")
    assert isinstance(partition, DirichletQP)
    q = partition._label_mixes(np.array(totals, dtype=float), num_clients, np.random.default_rng(seed))
    np.testing.assert_allclose(q.sum(0), 1)
    sizes = solve_sizes(q, np.array(totals, dtype=float), "CLARABEL")
    parts = partition.split(data, num_clients, np.random.default_rng(seed))
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    if sizes is not None:  # the first draw, which the partition then used
        assert (histograms(data, parts) >= np.floor(q * sizes).T).all()
        left = np.array(totals) - np.floor(q * sizes + 1e-6).sum(1)
        assert ((left >= 0) & (left < num_clients)).all()


@pytest.mark.parametrize(
    ("choice", "alphas"),
    [
        ("dirichlet_class", (0.05, 0.5, 5.0, 500.0)),
        ("dirichlet_client", (0.05, 0.5, 5.0, 500.0)),
        ("dirichlet_qp", (0.2, 2.0, 20.0, 2000.0)),
    ],
)
def test_heterogeneity_falls_as_alpha_grows(choice: str, alphas: tuple[float, ...]) -> None:
    data = balanced(200)
    extra = {"min_size": 0} if choice == "dirichlet_class" else {}
    skews = [
        np.mean([skew(data, split(choice, data, 40, seed, alpha=a, **extra)) for seed in range(3)]) for a in alphas
    ]
    assert all(a > b + 0.02 for a, b in itertools.pairwise(skews)), skews


def test_dirichlet_client_has_equal_sizes_and_dirichlet_class_respects_its_minimum() -> None:
    data = balanced(100)
    assert {len(p) for p in split("dirichlet_client", data, 30)} == {33, 34}
    assert min(len(p) for p in split("dirichlet_class", data, 10, alpha=0.1, min_size=20)) >= 20
    with pytest.raises(DataError, match=r"partition\.min_size=90: not reached .* alpha=0\.1"):
        split("dirichlet_class", data, 10, alpha=0.1, min_size=90, max_tries=3)


class Scripted:
    """A generator that shuffles nothing and whose Dirichlet draws are given."""

    def __init__(self, *draws: list[float]) -> None:
        self.draws = iter(draws)

    def permutation(self, x: np.ndarray) -> np.ndarray:
        return x

    def dirichlet(self, alpha: np.ndarray) -> np.ndarray:
        return np.array(next(self.draws))


@pytest.mark.parametrize(
    ("balanced", "expected"), [(False, [[4, 2, 4], [0, 1, 0], [0, 1, 0]]), (True, [[4, 0, 0], [0, 2, 2], [0, 2, 2]])]
)
def test_balancing_gives_a_full_client_no_more_by_hand(balanced: bool, expected: list[list[int]]) -> None:
    """12 samples of 3 clients: after the first class client 0 holds 4 of 4. The last draw leaves the others nothing."""
    data = Labelled(np.repeat([0, 1, 2], 4), 3, None)
    rng: Any = Scripted([1.0, 0.0, 0.0], [0.5, 0.25, 0.25], [1.0, 0.0, 0.0])
    parts = build("dirichlet_class", balanced=balanced, min_size=0).split(data, 3, rng)
    assert histograms(data, parts).tolist() == expected


@pytest.mark.parametrize("seed", range(5))
def test_balanced_clients_had_room_before_the_last_class_they_got(seed: int) -> None:
    data, n = balanced(100), 20
    for on in (True, False):
        counts = histograms(data, split("dirichlet_class", data, n, seed, alpha=0.3, balanced=on, min_size=1))
        assert counts.sum() == len(data.labels)
        last = [np.flatnonzero(c)[-1] for c in counts]
        before = np.array([c[:i].sum() for c, i in zip(counts, last, strict=True)])
        assert (before < len(data.labels) / n).all() == on


def test_writers_with_too_few_samples_are_left_out() -> None:
    owners = np.repeat([7, 3, 5], [4, 9, 10])
    data = Labelled(np.zeros(23, np.int64), 1, owners)
    parts = split("natural", data, 2, min_samples=9)
    assert [owners[p].tolist() for p in parts] == [[3] * 9, [5] * 10]
    with pytest.raises(DataError, match=r"num_clients=3: only 2 of 3 owners have partition\.min_samples=9"):
        split("natural", data, 3, min_samples=9)


def test_quantity_skew_keeps_labels_and_varies_sizes() -> None:
    data = balanced(1000)
    even, uneven = (split("quantity_skew", data, 20, skew=s) for s in (0.01, 1.5))
    assert np.std([len(p) for p in even]) < 10 < 200 < np.std([len(p) for p in uneven])
    heavy, light = (
        np.max([len(p) for p in split("quantity_skew", data, 20, law="powerlaw", skew=s)]) for s in (1.0, 100.0)
    )
    assert heavy > 2 * light


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["lognormal", "powerlaw"]), st.sampled_from([0.001, 0.1, 1.0, 30.0, 1000.0]), st.integers(1, 20))
def test_quantity_skew_of_any_strength_uses_all_samples_and_keeps_the_minimum(
    law: str, strength: float, min_size: int
) -> None:
    parts = split("quantity_skew", balanced(50), 20, law=law, skew=strength, min_size=min_size)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(500))
    assert min(map(len, parts)) >= min_size


def test_an_extreme_skew_leaves_nearly_all_to_one_client() -> None:
    for law, strength in (("lognormal", 1000.0), ("powerlaw", 0.001)):
        sizes = sorted(len(p) for p in split("quantity_skew", balanced(50), 20, law=law, skew=strength))
        assert sizes == [1] * 19 + [481]


def test_natural_clients_are_owners() -> None:
    data = balanced(60)
    parts = split("natural", data, 40, min_samples=1)
    assert data.owners is not None
    owners = [np.unique(data.owners[p]) for p in parts]
    assert all(len(o) == 1 for o in owners)
    assert all(len(p) == (data.owners == o[0]).sum() for p, o in zip(parts, owners, strict=True))
    assert {len(p) for p in split("natural", data, 40, min_samples=5, cap=3)} == {3}
    first = split("natural", data, 40, min_samples=5, cap=3, keep="first")
    assert all(sorted(p) == np.flatnonzero(data.owners == data.owners[p[0]])[:3].tolist() for p in first)
    with pytest.raises(DataError, match="num_clients=70: only 60 of 60 owners"):
        split("natural", data, 70, min_samples=1)
    with pytest.raises(DataError, match=r"dataset\.client_column"):
        split("natural", Labelled(data.labels, 10), 3)


@pytest.mark.parametrize("choice", [c for c in CHOICES if c != "natural"])
def test_more_clients_than_samples_is_an_error(choice: str) -> None:
    with pytest.raises(DataError, match=r"num_clients=30: .* and there are 20; lower num_clients"):
        split(choice, balanced(2), 30)


@pytest.mark.parametrize(
    ("choice", "values"),
    [
        ("shards", {"shards_per_client": 0}),
        ("dirichlet_qp", {"alpha": 0.0}),
        ("dirichlet_class", {"alpha": -1.0}),
        ("dirichlet_client", {"alpha": float("inf")}),
        ("dirichlet_qp", {"retries": -1}),
        ("dirichlet_class", {"max_tries": 0}),
        ("quantity_skew", {"skew": 0.0}),
        ("quantity_skew", {"min_size": 0}),
        ("natural", {"min_samples": 0}),
        ("natural", {"cap": 0}),
    ],
)
def test_values_out_of_range_are_refused_with_their_key(choice: str, values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"partition\.{next(iter(values))}=.* must (be|lie)"):
        build(choice, **values)


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=20), st.integers(0, 1000))
def test_largest_remainder_sums_and_stays_within_one_of_the_quota(shares: list[float], total: int) -> None:
    counts = largest_remainder(np.array(shares), total)
    assert counts.sum() == total
    assert (abs(counts - np.array(shares) / sum(shares) * total) < 1 + 1e-6).all()
