"""What optimal client sampling weighs updates by, and what its exchanges cost."""

import numpy as np
import pytest

from fedsim.clients.ledger import Ledger
from fedsim.selectors.optimal_sampling import OptimalSampling, aggregated_probabilities
from tests.toys import toy_clients, toy_population

SIZES = [1, 1, 3]


def test_chances_grow_with_the_share_of_data_times_the_norm_of_the_update() -> None:
    """Updates of clients 1 and 2 are as 1 to 2, their shares 1/4 and 3/4: chances 1/7 and 6/7, weights p / chance."""
    selector = OptimalSampling(toy_population(SIZES, 1), probabilities="exact", iterations=1)
    found: dict[int, set[float]] = {1: set(), 2: set()}
    for seed in range(40):
        clients = toy_clients(SIZES, selector.needs, available=[1, 2])
        selection = selector.select(1, clients, np.random.default_rng(seed))
        assert selection.weights is not None
        for client, weight in zip(selection.ids, selection.weights, strict=True):
            found[int(client)].add(round(float(weight), 6))
    assert found == {1: {1.75}, 2: {0.875}}


@pytest.mark.parametrize("count", [1, 2])
def test_an_exchange_is_two_numbers_of_everybody(count: int) -> None:
    sizes, ledger = [1, 1, 3, 1, 40], Ledger()
    selector = OptimalSampling(toy_population(sizes, count), probabilities="aggregated", iterations=4)
    clients = toy_clients(sizes, selector.needs, ledger=ledger)
    selector.select(1, clients, np.random.default_rng(0))
    shares, norms = np.array(sizes) / sum(sizes), np.arange(5) / np.sqrt(2)
    _, exchanges = aggregated_probabilities(shares * norms, count, 4)
    assert exchanges >= 1
    assert ledger.bytes_up == 5 * 4 * (1 + 2 * exchanges)


@pytest.mark.parametrize(
    ("iterations", "expected", "exchanges"), [(1, [1, 0.5, 0.5], 1), (2, [1, 0.5, 0.5], 2), (9, [1, 0.5, 0.5], 2)]
)
def test_one_exchange_spreads_what_the_capped_leave_once(
    iterations: int, expected: list[float], exchanges: int
) -> None:
    """Scores 10, 1, 1 and K = 2: 2 u / sum u is capped at 1 for the first; the others share what is left of 2. A
    second exchange finds nothing more to do."""
    chances, asked = aggregated_probabilities(np.array([10.0, 1, 1]), 2, iterations)
    assert chances == pytest.approx(expected)
    assert asked == exchanges
