"""What each selector's round costs, against the cost table of the methods (K models down and up are the base)."""

import numpy as np
import pytest
import torch
import yaml

from fedsim.aggregators import FedAvg
from fedsim.availability import Always
from fedsim.make import make
from fedsim.selectors.base import Selector
from fedsim.server import Held, Holdings
from fedsim.simulation import Federation, Record, Simulation
from tests.test_selector_contract import FOLDER
from tests.toys import ToyEngine, toy_params, toy_population

SIZES = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8])
N, K, D, T = len(SIZES), 3, 7, 6
B = 2 * 4  # bytes of the toy model
NUMBER = 4  # bytes of a reported number
BATCH = 4


def rounds(choice: str, d: int | None = D) -> list[Record]:
    population = toy_population(SIZES, K, T)
    node = yaml.safe_load((FOLDER / f"{choice}.yaml").read_text())
    if "num_candidates" in node:
        node["num_candidates"] = d
    selector = make(node, Selector, "selector", population)
    test = Held(torch.zeros(1, 1), torch.zeros(1, dtype=torch.long))
    engine = ToyEngine(SIZES, batch_size=BATCH)
    aggregator = FedAvg(frozenset(), weighting="uniform")
    parts = Federation(engine, population, selector, aggregator, Always(), Holdings(test), 1)
    return list(Simulation(parts, toy_params()))


def costs(r: Record) -> tuple[int, int, int]:
    return r.bytes_down, r.bytes_up, r.forward_samples


def trained_on(r: Record) -> int:
    return int(2 * SIZES[r.selected].sum())  # two epochs


@pytest.mark.parametrize("choice", ["random", "round_robin"])
def test_nothing_is_asked(choice: str) -> None:
    for r in rounds(choice):
        assert costs(r) == (K * B, K * B, 0)
        assert (r.contacted, r.trained, r.uploaded, r.train_samples) == (K, K, K, trained_on(r))
        assert r.participation_ratio == K / N


def test_md_pays_for_the_different_clients_only() -> None:
    records = rounds("md")
    assert {len(r.selected) for r in records} != {K}
    for r in records:
        assert costs(r) == (len(r.selected) * B, len(r.selected) * B, 0)


def test_full_pays_for_everybody() -> None:
    for r in rounds("full"):
        assert costs(r) == (N * B, N * B, 0)
        assert (r.train_samples, r.participation_ratio) == (2 * SIZES.sum(), 1.0)


@pytest.mark.parametrize("choice", ["power_of_choice", "power_of_choice_d10"])
def test_power_of_choice_pays_d_downloads_d_numbers_and_a_pass_over_the_candidates(choice: str) -> None:
    records = rounds(choice)
    for r in records:
        assert (r.bytes_down, r.bytes_up) == (K * B + (D - K) * B, K * B + D * NUMBER)
        assert (r.contacted, r.trained, r.uploaded) == (D, K, K)
        assert r.forward_samples >= SIZES[r.selected].sum()
    asked_all = rounds(choice, d=N)
    assert {r.forward_samples for r in asked_all} == {int(SIZES.sum())}


def test_cpow_d_passes_one_batch_a_candidate() -> None:
    for r in rounds("cpow_d", d=N):
        assert (r.bytes_down, r.bytes_up) == (N * B, K * B + N * NUMBER)
        assert r.forward_samples == np.minimum(SIZES, BATCH).sum()


def test_rpow_d_adds_one_number_to_each_upload() -> None:
    for r in rounds("rpow_d"):
        assert costs(r) == (K * B, K * B + K * NUMBER, 0)
        assert r.contacted == K


def test_adapow_d_asks_everybody_and_then_nobody() -> None:
    records = rounds("adapow_d", d=None)
    for r in records[: T // 2]:
        assert costs(r) == (N * B, K * B + N * NUMBER, SIZES.sum())
    for r in records[T // 2 :]:
        assert costs(r) == (K * B, K * B, 0)
