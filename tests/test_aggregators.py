"""Averages and server optimisers, by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedsim.core.errors import ConfigError
from fedsim.rounds.aggregators import MIFA, FedAdam, FedAvg, FedAvgM, weighting_warning
from fedsim.selectors.random import Random
from tests.toys import toy_cohort, toy_population

PARAMS = {"w": torch.tensor([1.0, 1.0])}
COHORT = toy_cohort([0, 3], [1, 3], [[2.0, 0.0], [4.0, 8.0]])
"""Two clients with 1 and 3 samples; the mean of their updates is (3, 4)."""
NO_BUFFERS = frozenset[str]()


AVERAGES = [
    ("uniform", None, [1 + (2 + 4) / 2, 1 + (0 + 8) / 2]),
    ("by_size", None, [1 + (2 + 3 * 4) / 4, 1 + (0 + 3 * 8) / 4]),
    ("by_size", [1.0, 0.5], [1 + 2 + 4 / 2, 1 + 0 + 8 / 2]),  # the selector's weights
]


@pytest.mark.parametrize(("weighting", "weights", "expected"), AVERAGES)
def test_federated_averaging(weighting: Any, weights: Any, expected: list[float]) -> None:
    server = FedAvg(NO_BUFFERS, weighting=weighting)
    selector_weights = None if weights is None else np.array(weights)
    assert server.aggregate(PARAMS, COHORT, selector_weights)["w"].tolist() == expected


def test_server_momentum_accumulates() -> None:
    server = FedAvgM(NO_BUFFERS, weighting="uniform", lr=0.5, momentum=0.5)
    first = server.aggregate(PARAMS, COHORT, None)  # v = (3, 4)
    assert first["w"].tolist() == [1 + 0.5 * 3, 1 + 0.5 * 4]
    second = server.aggregate(first, COHORT, None)  # v = (3, 4) / 2 + (3, 4)
    assert second["w"].tolist() == [2.5 + 0.5 * 4.5, 3 + 0.5 * 6]


def test_the_first_step_of_fedadam() -> None:
    server = FedAdam(NO_BUFFERS, weighting="uniform", lr=1.0, beta1=0.5, beta2=0.75, tau=1.0)
    result = server.aggregate(PARAMS, COHORT, None)
    # m = (3, 4) / 2, v = 0.75 tau^2 + 0.25 (9, 16) = (3, 4.75)
    expected = [1 + 1.5 / (3**0.5 + 1), 1 + 2 / (4.75**0.5 + 1)]
    assert result["w"].tolist() == pytest.approx(expected)


SERVERS = [
    FedAvg(frozenset({"v"}), weighting="by_size"),
    FedAvgM(frozenset({"v"}), weighting="uniform", lr=1.0, momentum=0.0),
]


@pytest.mark.parametrize("weights", [[1.5, 1.5], [1.0, 3.0], [0.5, 0.5], [0.0, 0.0], [2.0, -1.0]])
@pytest.mark.parametrize(
    "server",
    SERVERS,
    ids=["fedavg", "fedavgm"],
)
def test_buffers_are_averaged_even_if_the_selectors_weights_do_not_sum_to_one(
    server: Any, weights: list[float]
) -> None:
    """All clients have seen a variance of 0.1. Importance weights would take 1 below zero."""
    start = {"w": torch.ones(1), "v": torch.ones(1)}
    delta = {"w": torch.ones(2, 1), "v": torch.full((2, 1), -0.9)}
    cohort = replace(COHORT, start=start, delta=delta)
    result = server.aggregate(start, cohort, np.array(weights))
    assert result["v"].item() == pytest.approx(0.1)
    assert result["w"].item() == pytest.approx(1 + sum(weights))


@pytest.mark.parametrize(
    ("weighting", "weights"), [("uniform", [0.5, 1.5]), ("by_size", [0.0, 0.0])]
)
def test_buffers_are_averaged_in_proportion_to_the_selectors_weights_or_by_size(
    weighting: Any, weights: list[float]
) -> None:
    """Both are in proportion 1 to 3: (1, 1) + (4, 0) / 4 + 3 (0, 8) / 4."""
    cohort = replace(COHORT, delta={"w": torch.tensor([[4.0, 0.0], [0.0, 8.0]])})
    server = FedAvg(frozenset({"w"}), weighting=weighting)
    assert server.aggregate(PARAMS, cohort, np.array(weights))["w"].tolist() == [2.0, 7.0]


OPTIMISERS = [
    FedAvgM(frozenset({"w"}), weighting="uniform", lr=0.1, momentum=0.9),
    FedAdam(frozenset({"w"}), weighting="uniform", lr=0.1, beta1=0.9, beta2=0.9, tau=1.0),
]


@pytest.mark.parametrize(
    "server",
    OPTIMISERS,
    ids=["fedavgm", "fedadam"],
)
def test_a_server_optimiser_takes_no_step_on_buffers(server: Any) -> None:
    assert server.aggregate(PARAMS, COHORT, None)["w"].tolist() == [1 + 3, 1 + 4]
    assert not any(server.state_dict().values())


def test_a_server_optimiser_continues_from_its_state() -> None:
    values = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "tau": 0.1}
    original = FedAdam(NO_BUFFERS, weighting="uniform", **values)
    restored = FedAdam(NO_BUFFERS, weighting="uniform", **values)
    first = original.aggregate(PARAMS, COHORT, None)
    restored.load_state_dict(original.state_dict())
    expected = original.aggregate(first, COHORT, None)["w"]
    assert torch.equal(restored.aggregate(first, COHORT, None)["w"], expected)


WARNINGS = [
    ("size", [1, 3], "by_size", True),
    ("size", [1, 3], "uniform", False),
    ("size", [2, 2], "by_size", False),
    ("uniform", [1, 3], "by_size", False),
]


@pytest.mark.parametrize(("mode", "sizes", "weighting", "warns"), WARNINGS)
def test_a_warning_if_sizes_count_in_the_selection_and_in_the_average(
    mode: Any, sizes: list[int], weighting: Any, warns: bool
) -> None:
    selector = Random(toy_population(sizes, 1), mode=mode)
    warning = weighting_warning(selector, FedAvg(NO_BUFFERS, weighting=weighting))
    assert ("aggregator=uniform" in (warning or "")) == warns
    assert weighting_warning(selector, MIFA(NO_BUFFERS, weighting=weighting)) is None


def test_all_values_out_of_range_are_reported_together() -> None:
    with pytest.raises(ConfigError, match=r"lr=0(.|\n)*beta1=1(.|\n)*tau=-1"):
        FedAdam(NO_BUFFERS, weighting="uniform", lr=0, beta1=1, beta2=0.9, tau=-1)
