"""The round in which a method begins something, counted as its paper counts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fedsim.config.build import instantiate
from fedsim.core.arrays import Ints
from fedsim.selectors import fedcor as fedcor_module
from fedsim.selectors.fedcor import FedCor
from tests.test_fedabc import LOG_P, fedabc
from tests.test_fedcor import fedcor
from tests.test_selectors import FixedLosses
from tests.toys import toy_clients, toy_population


def test_fedabcs_threshold_counts_rounds_from_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's round 0 is full. Its round 1, our round 2, is the first with a threshold:
    tau_1."""
    selector = fedabc()
    counted: list[tuple[int, int]] = []

    def count(shares: Any, t: int, num_rounds: int) -> int:
        counted.append((t, num_rounds))
        return 1

    monkeypatch.setattr(selector.threshold, "count", count)
    selector.predictions = {i: LOG_P[i] for i in range(3)}
    for t in (1, 2, 3, 4):
        engine = FixedLosses([1.0, 2.0, 3.0])
        clients = toy_clients([1] * 3, selector.needs, engine=engine, round=t)
        selector.select(t, clients, np.random.default_rng(0))
    assert counted == [(1, 20), (2, 20), (3, 20)]


def test_fedcor_draws_at_random_in_rounds_0_to_warmup_and_fits_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """warmup = 2: rounds e = 0, 1, 2 are drawn at random. Before round 3 the process is fitted to
    three changes, then after rounds 3 and 6, which the interval divides."""
    selector = fedcor(8, 2)
    by_process: list[int] = []
    fits: list[tuple[int, int, int]] = []

    def greedy(*args: Any, **more: Any) -> Ints:
        by_process.append(e)
        return np.array([0, 1])

    def fit(process: Any, changes: Any, weights: Any, steps: int) -> Any:
        fits.append((e, len(changes), steps))
        return process

    monkeypatch.setattr(fedcor_module, "greedy_selection", greedy)
    monkeypatch.setattr(selector.process, "fit", fit)
    for e in range(9):
        clients = toy_clients([2] * 8, selector.needs, round=e + 1, cohort_size=2)
        selector.select(e + 1, clients, np.random.default_rng(e))
    assert by_process == [3, 4, 5, 6, 7, 8]
    assert fits == [(3, 3, 30), (4, 4, 10), (7, 5, 10)]


@pytest.mark.parametrize(("uniform", "shares"), [(False, [0.25, 0.75]), (True, [1.0, 1.0])])
def test_fedcor_weighs_losses_by_data_or_equally(uniform: bool, shares: list[float]) -> None:
    file = Path(__file__).parents[1] / "conf" / "selector" / "fedcor.yaml"
    node = yaml.safe_load(file.read_text()) | {"uniform_shares": uniform}
    selector = instantiate(node, FedCor, "selector", toy_population([1, 3], 1, 100))
    assert selector.shares.tolist() == shares
