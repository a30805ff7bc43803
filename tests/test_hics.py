from typing import Any

import numpy as np
import pytest
import torch
from sklearn.cluster import AgglomerativeClustering

from fedsim.core.errors import FedsimError
from fedsim.core.types import Cohort
from fedsim.selectors.base import softmax
from fedsim.selectors.hics import HiCS, class_updates, entropy, output_layer
from tests.toys import selection_of, toy_population

SERVER: Any = None


def hics(n: int = 6, k: int = 2, num_rounds: int = 100, **more: Any) -> HiCS:
    values: dict[str, Any] = {
        **{"source": "bias", "temperature": 0.0025, "entropy_weight": 10.0, "gamma": 4.0, "num_clusters": None},
        **{"ward_on": "distances", "kept_update": "latest", "fallback": "never", "fallback_variance": 0.1},
    }
    return HiCS(toy_population([1] * n, k, num_rounds), **(values | more))


def cohort(biases: list[list[float]]) -> Cohort:
    num = len(biases)
    delta = {"hidden.weight": torch.zeros(num, 3, 2), "out.weight": torch.zeros(num, 2, 3)}
    delta["out.weight"][:] = torch.tensor(biases)[:, :, None] * torch.tensor([1.0, 2, 3])
    delta["out.bias"] = torch.tensor(biases)
    ones = np.ones(num)
    start = {name: d[0] * 0 for name, d in delta.items()}
    return Cohort(np.arange(num), ones.astype(np.int64), start, delta, ones, ones, ones.astype(np.int64), list(delta))


def test_entropies_by_hand_and_of_a_first_update_for_good_if_so_wished() -> None:
    assert entropy(softmax(np.zeros(10))) == pytest.approx(np.log(10))
    assert entropy(np.array([1.0, 0.0])) == 0
    selector = hics(2)
    selector.observe(1, cohort([[0.001, 0.001], [0.1, -0.1]]), SERVER)
    assert selector.entropy == pytest.approx([np.log(2), 0], abs=1e-9)
    for kept, expected in (("latest", 0.0), ("first", np.log(2))):
        selector = hics(2, 1, kept_update=kept)
        selector.observe(1, cohort([[0.001, 0.001]]), SERVER)
        before = selector.state_dict()["updates"]
        selector.observe(2, cohort([[0.1, -0.1], [0.2, 0.1]]), SERVER)
        assert selector.entropy[0] == pytest.approx(expected, abs=1e-9)
        assert selector.updates is not None
        assert torch.equal(selector.updates[0], before[0]) == (kept == "first")
        assert selector.seen.all()
        assert selector.updates[1].any()


def test_the_output_layer_and_both_sources() -> None:
    both = cohort([[1.0, -1.0]])
    assert output_layer(both) == ["out.weight", "out.bias"]
    assert class_updates(both, output_layer(both), "bias").tolist() == [[1, -1]]
    assert class_updates(both, output_layer(both), "weight").tolist() == [[2, -2]]
    with pytest.raises(FedsimError, match=r"selector\.source=bias: the model's output layer has no bias; use weight"):
        class_updates(both, ["out.weight"], "bias")


@pytest.mark.parametrize(("gamma", "t", "expected"), [(0.0, 2, 0.0), (4.0, 1, 4.0), (4.0, 2, 2.0)])
def test_balanced_clusters_come_first_by_gamma_which_falls_but_is_still_there_in_the_last_round(
    gamma: float, t: int, expected: float
) -> None:
    """T = 2: gamma_1 = 4, gamma_2 = 2; entropies ln 2 and about 0, one cluster each."""
    selector = hics(6, 2, num_rounds=2, temperature=0.1, gamma=gamma)
    selector.observe(1, cohort([[1, -1]] * 5 + [[0, 0]]), SERVER)
    gap = np.log(2) - selector.entropy[0]
    drawn = [5 in selector._draw_clients(np.arange(6), 1, t, np.random.default_rng(s)) for s in range(2000)]
    assert np.mean(drawn) == pytest.approx(1 / (1 + np.exp(-expected * gap)), abs=0.03)


def test_picks_are_different_clients_and_begin_with_the_most_balanced_whatever_the_preference() -> None:
    """e^(-2000 ln 2) is 0: one balanced client, and then the others, whose weights are 0 beside it."""
    for gamma in (4.0, 2000.0):
        selector = hics(6, 4, gamma=gamma, temperature=0.1)
        selector.observe(1, cohort([[1, -1]] * 5 + [[0.01, 0.01]]), SERVER)
        for s in range(30):
            picks = selector._draw_clients(np.arange(6), 4, 1, np.random.default_rng(s))
            assert len(set(picks)) == 4
            assert picks[0] == 5 or gamma == 4.0


def test_clusters_may_be_more_or_fewer_than_k() -> None:
    for num_clusters, expected in ((None, 2), (1, 1), (3, 3)):
        selector = hics(6, 2, num_clusters=num_clusters)
        selector.observe(1, cohort([[1, -1], [1, -0.9], [-1, 1], [-1, 0.9], [0, 0.1], [0, 0.2]]), SERVER)
        assert len(set(selector._clusters(np.arange(6)))) == expected


@pytest.mark.filterwarnings("ignore:The symmetric non-negative hollow observation matrix")
def test_ward_on_rows_builds_another_tree() -> None:
    """Equal directions, entropies 0, 6, 10, 13, 20 and 21: the distances of a line."""
    clusters = {}
    for ward_on in ("distances", "rows"):
        selector = hics(6, 2, num_clusters=3, ward_on=ward_on, entropy_weight=1.0)
        selector.observe(1, cohort([[1, 1]] * 6), SERVER)
        selector.entropy[:] = [0, 6, 10, 13, 20, 21]
        labels = selector._clusters(np.arange(6))
        clusters[ward_on] = {tuple(np.flatnonzero(labels == c)) for c in set(labels)}
    assert clusters["distances"] != clusters["rows"]
    points = np.array([0, 6, 10, 13, 20, 21])
    table = np.abs(points[:, None] - points[None]).astype(float)
    labels = AgglomerativeClustering(3, linkage="ward").fit_predict(table)  # which the published code uses
    assert clusters["rows"] == {tuple(np.flatnonzero(labels == c)) for c in range(3)}


@pytest.mark.parametrize(
    ("fallback", "variance", "falls"),
    [("never", 0.1, False), ("below", 0.1, False), ("above", 0.1, True), ("below", 0.2, True), ("above", 0.2, False)],
)
def test_the_fallback_draws_one_client_from_each_half(fallback: str, variance: float, falls: bool) -> None:
    """Entropies ln 2 and about 0, half of the clients each: variance .12. HiCS prefers the balanced half e^69 to 1."""
    selector = hics(6, 2, gamma=100.0, temperature=0.1, fallback=fallback, fallback_variance=variance)
    selector.observe(1, cohort([[1, -1]] * 3 + [[0.001, 0.001]] * 3), SERVER)
    assert selector.entropy.var() == pytest.approx(0.12, abs=0.001)
    assert selector.adaptive == (fallback != "never")
    for s in range(20):
        selection = selection_of(selector, 2, s)
        balanced = int((selection.ids >= 3).sum())
        assert balanced == (1 if falls else 2)
        assert (selection.weights is None) != falls
        assert selection.weights is None or selection.weights.tolist() == [0.5, 0.5]
