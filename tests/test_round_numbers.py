"""In which round a method begins with what, counted as its paper counts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fedsim.config.build import instantiate
from fedsim.selectors import fedcor as fedcor_module
from fedsim.selectors.fedcor import FedCor
from tests.test_fedabc import LOG_P, fedabc
from tests.test_fedcor import fedcor
from tests.test_selectors import FixedLosses
from tests.toys import toy_clients, toy_population


def test_fedabcs_threshold_counts_rounds_from_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's round 0 is full; its round 1, ours 2, is the first with a threshold, and that is
    tau_1."""
    selector, asked = fedabc(), []
    monkeypatch.setattr(
        selector.threshold, "count", lambda shares, t, rounds: (asked.append((t, rounds)), 1)[1]
    )
    selector.predictions = {i: LOG_P[i] for i in range(3)}
    for t in (1, 2, 3, 4):
        clients = toy_clients([1] * 3, selector.needs, engine=FixedLosses([1.0, 2.0, 3.0]), round=t)
        selector.select(t, clients, np.random.default_rng(0))
    assert asked == [(1, 20), (2, 20), (3, 20)]


def test_fedcor_draws_at_random_in_rounds_0_to_warmup_and_fits_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """warmup = 2: rounds e = 0, 1, 2 are drawn at random; before round 3 the process is fitted to
    three changes."""
    selector, by_process, fits = fedcor(8, 2), [], []

    def greedy(*args: Any, **more: Any) -> np.ndarray:
        by_process.append(now)
        return np.array([0, 1])

    monkeypatch.setattr(fedcor_module, "greedy_selection", greedy)
    monkeypatch.setattr(
        selector.process, "fit", lambda p, r, w, steps: (fits.append((now, len(r), steps)), p)[1]
    )
    for t in range(1, 10):
        now = t - 1
        clients = toy_clients([2] * 8, selector.needs, round=t, cohort_size=2)
        selector.select(t, clients, np.random.default_rng(t))
    assert by_process == [3, 4, 5, 6, 7, 8]
    assert fits == [
        (3, 3, 30),
        (4, 4, 10),
        (7, 5, 10),
    ]  # after round 2, and after 3 and 6, divisible by the interval


@pytest.mark.parametrize(("uniform", "shares"), [(False, [0.25, 0.75]), (True, [1.0, 1.0])])
def test_fedcor_weighs_losses_by_data_or_alike(uniform: bool, shares: list[float]) -> None:
    node = yaml.safe_load(
        (Path(__file__).parents[1] / "conf" / "selector" / "fedcor.yaml").read_text()
    )
    selector = instantiate(
        {**node, "uniform_shares": uniform}, FedCor, "selector", toy_population([1, 3], 1, 100)
    )
    assert selector.shares.tolist() == shares
