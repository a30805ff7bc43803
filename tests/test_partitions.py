from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.errors import ConfigError, DataError
from fedsim.make import make
from fedsim.partitions.apportion import largest_remainder
from fedsim.partitions.base import Labelled, Partition
from fedsim.partitions.dirichlet_qp import solve_sizes
from fedsim.partitions.division import Division, ServerSplit, divide
from fedsim.streams import Streams

FOLDER = Path(__file__).parents[1] / "conf" / "partition"
CHOICES = sorted(p.stem for p in FOLDER.glob("*.yaml"))
NOTHING = ServerSplit(validation_fraction=0.0, public_samples=0, public_stratified=False)


def build(choice: str, **values: Any) -> Partition:
    node = yaml.safe_load((FOLDER / f"{choice}.yaml").read_text())
    return make({**node, **values}, Partition, "partition")


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


@pytest.mark.parametrize("choice", [c for c in CHOICES if c not in ("shards", "natural")])
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
        with pytest.raises(DataError, match="partition.pure=true"):
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
    np.testing.assert_allclose(twice, 2 * once, rtol=1e-3, atol=1e-3)


def dual_newton(q: np.ndarray, b: np.ndarray) -> np.ndarray:
    """An independent solution: x = max(0, Q^T l) with l from Newton's method on the dual."""
    l = np.linalg.lstsq(q @ q.T, b, rcond=None)[0]
    for _ in range(100):
        x = np.maximum(q.T @ l, 0)
        gradient = b - q @ x
        if np.abs(gradient).max() < 1e-9 * b.max():
            break
        step = np.linalg.solve((q * (x > 0)) @ q.T + 1e-9 * np.eye(len(b)), gradient)
        value = b @ l - x @ x / 2
        t = 1.0
        while b @ (l + t * step) - (np.maximum(q.T @ (l + t * step), 0) ** 2).sum() / 2 < value and t > 1e-6:
            t /= 2
        l = l + t * step
    return np.maximum(q.T @ l, 0)


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


def test_the_nnls_fallback_uses_every_sample() -> None:
    parts = split("dirichlet_qp", balanced(100), 10, retries=1, fallback="nnls")
    assert len(np.unique(np.concatenate(parts))) == 1000


def test_dirichlet_qp_has_the_published_sizes_and_a_dominant_class() -> None:
    """selectors.md 4.2: at N = 100 and n = 50,000 sizes have a standard deviation of about 173; .9 is one class."""
    data = balanced(5000)
    counts = [histograms(data, split("dirichlet_qp", data, 100, seed)) for seed in range(4)]
    assert all((c.sum(0) == 5000).all() for c in counts)
    assert np.mean([c.sum(1).std() for c in counts]) == pytest.approx(173, abs=40)
    assert np.mean([(c.max(1) / c.sum(1)).mean() for c in counts]) == pytest.approx(0.9, abs=0.03)


def test_a_solver_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(DataError, match=r"partition\.solver=GUROBI: not installed; installed: .*CLARABEL"):
        split("dirichlet_qp", balanced(10), 5, solver="GUROBI")


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
    assert all(a > b + 0.02 for a, b in zip(skews, skews[1:], strict=False)), skews


def test_dirichlet_client_has_equal_sizes_and_dirichlet_class_respects_its_minimum() -> None:
    data = balanced(100)
    assert {len(p) for p in split("dirichlet_client", data, 30)} == {33, 34}
    assert min(len(p) for p in split("dirichlet_class", data, 10, alpha=0.1, min_size=20)) >= 20
    with pytest.raises(DataError, match=r"partition\.min_size=90: not reached .* alpha=0\.1"):
        split("dirichlet_class", data, 10, alpha=0.1, min_size=90, max_tries=3)


def test_quantity_skew_keeps_labels_and_varies_sizes() -> None:
    data = balanced(1000)
    even, uneven = (split("quantity_skew", data, 20, skew=s) for s in (0.01, 1.5))
    assert np.std([len(p) for p in even]) < 10 < 200 < np.std([len(p) for p in uneven])
    heavy, light = (
        np.max([len(p) for p in split("quantity_skew", data, 20, law="powerlaw", skew=s)]) for s in (1.0, 100.0)
    )
    assert heavy > 2 * light


def test_natural_clients_are_owners() -> None:
    data = balanced(60)
    parts = split("natural", data, 40, min_samples=1)
    assert data.owners is not None
    owners = [np.unique(data.owners[p]) for p in parts]
    assert all(len(o) == 1 for o in owners)
    assert all(len(p) == (data.owners == o[0]).sum() for p, o in zip(parts, owners, strict=True))
    assert {len(p) for p in split("natural", data, 40, min_samples=5, cap=3)} == {3}
    with pytest.raises(DataError, match="num_clients=70: only 60 of 60 owners"):
        split("natural", data, 70, min_samples=1)
    with pytest.raises(DataError, match=r"dataset\.client_column"):
        split("natural", Labelled(data.labels, 10), 3)


@pytest.mark.parametrize("choice", [c for c in CHOICES if c != "natural"])
def test_more_clients_than_samples_is_an_error(choice: str) -> None:
    with pytest.raises(DataError, match="num_clients"):
        split(choice, balanced(2), 30)


@pytest.mark.parametrize(
    ("choice", "values"),
    [
        ("shards", {"shards_per_client": 0}),
        ("dirichlet_qp", {"alpha": 0.0}),
        ("dirichlet_class", {"alpha": -1.0}),
        ("dirichlet_client", {"alpha": float("inf")}),
        ("quantity_skew", {"skew": 0.0}),
        ("natural", {"min_samples": 0}),
    ],
)
def test_values_out_of_range_are_refused_with_their_key(choice: str, values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"partition\.{next(iter(values))}=.* must be"):
        build(choice, **values)


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=20), st.integers(0, 1000))
def test_largest_remainder_sums_and_stays_within_one_of_the_quota(shares: list[float], total: int) -> None:
    counts = largest_remainder(np.array(shares), total)
    assert counts.sum() == total
    assert (abs(counts - np.array(shares) / sum(shares) * total) < 1 + 1e-6).all()


def division(server: ServerSplit = NOTHING, holdout: float = 0.0, seed: int = 0, **values: Any) -> Division:
    return divide(balanced(50), build("iid"), 7, Streams(seed, **values), server, holdout)


def test_server_and_clients_share_no_sample() -> None:
    server = ServerSplit(validation_fraction=0.1, public_samples=60, public_stratified=True)
    d = division(server, holdout=0.2)
    everything = np.concatenate([*d.train, *d.holdout, d.validation, d.public])
    assert np.array_equal(np.sort(everything), np.arange(500))
    assert (len(d.validation), len(d.public)) == (50, 60)
    labels = balanced(50).labels
    per_class = np.bincount(labels[d.public], minlength=10)
    rest = np.bincount(np.delete(labels, d.validation), minlength=10)
    assert (abs(per_class - rest / rest.sum() * 60) < 1).all()
    assert d.histograms.sum() == sum(map(len, d.train))
    assert all(len(h) == round(0.2 * (len(h) + len(t))) for t, h in zip(d.train, d.holdout, strict=True))


def test_another_public_set_leaves_validation_alone_and_seeds_are_their_own() -> None:
    small, large = (
        division(ServerSplit(validation_fraction=0.1, public_samples=p, public_stratified=False)) for p in (0, 90)
    )
    assert np.array_equal(small.validation, large.validation)
    assert division(seed=1, partition_seed=5).hash == division(seed=2, partition_seed=5).hash
    assert division(seed=1).hash != division(seed=2).hash


def test_holding_out_leaves_one_sample_to_train_on() -> None:
    d = divide(balanced(1), build("iid"), 10, Streams(0), NOTHING, 0.9)
    assert [len(t) for t in d.train] == [1] * 10


def test_a_saved_division_comes_back_and_a_changed_one_is_refused(tmp_path: Path) -> None:
    server = ServerSplit(validation_fraction=0.1, public_samples=20, public_stratified=False)
    d = division(server, holdout=0.3)
    path = tmp_path / "partition.npz"
    d.save(path)
    again = Division.load(path)
    assert again.hash == d.hash
    assert all(np.array_equal(a, b) for a, b in zip(d.train, again.train, strict=True))
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    arrays["train"] = arrays["train"][::-1].copy()
    np.savez(path, **arrays)
    with pytest.raises(DataError, match="does not match its hash"):
        Division.load(path)


def test_a_server_that_wants_everything_is_refused() -> None:
    with pytest.raises(DataError, match="what the server keeps"):
        division(ServerSplit(validation_fraction=0.5, public_samples=250, public_stratified=False))
