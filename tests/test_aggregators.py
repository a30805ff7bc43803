from dataclasses import replace

import numpy as np
import pytest
import torch

from fedsim.core.errors import ConfigError
from fedsim.rounds.aggregators import FedAdam, FedAvg, FedAvgM, weighting_warning
from fedsim.selectors.random import Random
from tests.toys import toy_cohort, toy_population

PARAMS = {"w": torch.tensor([1.0, 1.0])}
COHORT = toy_cohort([0, 3], [1, 3], [[2.0, 0.0], [4.0, 8.0]])


def test_averages_by_hand_and_weights_of_the_selector_replace_the_aggregators() -> None:
    by_size = FedAvg(frozenset(), weighting="by_size")
    uniform = FedAvg(frozenset(), weighting="uniform").aggregate(PARAMS, COHORT, None)
    assert uniform["w"].tolist() == [4.0, 5.0]
    assert by_size.aggregate(PARAMS, COHORT, None)["w"].tolist() == [4.5, 7.0]
    assert by_size.aggregate(PARAMS, COHORT, np.array([1.0, 0.5]))["w"].tolist() == [5.0, 5.0]


def test_server_momentum_accumulates_by_hand() -> None:
    server = FedAvgM(frozenset(), weighting="uniform", lr=0.5, momentum=0.5)
    first = server.aggregate(PARAMS, COHORT, None)  # v = (3, 4)
    assert first["w"].tolist() == [2.5, 3.0]
    second = server.aggregate(first, COHORT, None)  # v = (4.5, 6)
    assert second["w"].tolist() == [4.75, 6.0]


def test_fedadam_first_step_by_hand() -> None:
    server = FedAdam(frozenset(), weighting="uniform", lr=1.0, beta1=0.5, beta2=0.75, tau=1.0)
    result = server.aggregate(PARAMS, COHORT, None)  # m = (1.5, 2), v = .75 + .25 d^2 = (3, 4.75)
    expected = [1 + 1.5 / (3**0.5 + 1), 1 + 2 / (4.75**0.5 + 1)]
    assert result["w"].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("weights", [[1.5, 1.5], [1.0, 3.0], [0.5, 0.5], [0.0, 0.0], [2.0, -1.0]])
def test_buffers_are_averaged_where_a_selectors_weights_do_not_sum_to_one(
    weights: list[float],
) -> None:
    """Importance weights would take a variance of 1, of which all clients have seen .1, below
    zero."""
    delta = {"w": torch.ones(2, 1), "v": torch.full((2, 1), -0.9)}
    start = {"w": torch.ones(1), "v": torch.ones(1)}
    cohort, buffers = replace(COHORT, start=start, delta=delta), frozenset({"v"})
    momentum = FedAvgM(buffers, weighting="uniform", lr=1.0, momentum=0.0)
    for server in (FedAvg(buffers, weighting="by_size"), momentum):
        result = server.aggregate(start, cohort, np.array(weights))
        assert (result["v"].item(), result["w"].item()) == pytest.approx((0.1, 1 + sum(weights)))


def test_buffers_are_weighted_in_proportion_to_a_selectors_weights() -> None:
    cohort = replace(COHORT, delta={"w": torch.tensor([[4.0, 0.0], [0.0, 8.0]])})
    result = FedAvg(frozenset({"w"}), weighting="uniform").aggregate(
        PARAMS, cohort, np.array([0.5, 1.5])
    )
    assert result["w"].tolist() == [2.0, 7.0]
    own = FedAvg(frozenset({"w"}), weighting="by_size").aggregate(
        PARAMS, cohort, np.array([0.0, 0.0])
    )
    assert own["w"].tolist() == [2.0, 7.0]  # 1 and 3 samples
    for server in (
        FedAvgM(frozenset({"w"}), weighting="uniform", lr=0.1, momentum=0.9),
        FedAdam(frozenset({"w"}), weighting="uniform", lr=0.1, beta1=0.9, beta2=0.9, tau=1.0),
    ):
        assert server.aggregate(PARAMS, COHORT, None)["w"].tolist() == [
            4.0,
            5.0,
        ]  # and never stepped on
        assert not any(server.state_dict().values())


def test_server_optimiser_continues_from_its_state_dict() -> None:
    values = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "tau": 0.1}
    one, other = (FedAdam(frozenset(), weighting="uniform", **values) for _ in range(2))
    after = one.aggregate(PARAMS, COHORT, None)
    other.load_state_dict(one.state_dict())
    assert torch.equal(
        one.aggregate(after, COHORT, None)["w"], other.aggregate(after, COHORT, None)["w"]
    )


@pytest.mark.parametrize(
    ("mode", "sizes", "weighting", "warns"),
    [
        ("size", [1, 3], "by_size", True),
        ("size", [1, 3], "uniform", False),
        ("size", [2, 2], "by_size", False),
        ("uniform", [1, 3], "by_size", False),
    ],
)
def test_a_warning_where_sizes_count_in_the_draw_and_in_the_average(
    mode: str, sizes: list[int], weighting: str, warns: bool
) -> None:
    selector = Random(toy_population(sizes, 1), mode=mode)  # type: ignore[arg-type]
    warning = weighting_warning(selector, FedAvg(frozenset(), weighting=weighting))  # type: ignore[arg-type]
    assert bool(warning) == warns
    assert not warns or "aggregator=uniform" in str(warning)


def test_bad_values_are_told_together() -> None:
    with pytest.raises(ConfigError, match=r"lr=0(.|\n)*beta1=1(.|\n)*tau=-1"):
        FedAdam(frozenset(), weighting="uniform", lr=0, beta1=1, beta2=0.9, tau=-1)
