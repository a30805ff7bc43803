"""What each selector's round costs, against the cost table of the methods (K models down and up are the base)."""

from typing import Any

import numpy as np
import pytest

from fedsim.config.build import instantiate
from fedsim.core.record import Record
from fedsim.rounds.loop import Simulation
from fedsim.selectors.base import Selector
from tests.test_selector_contract import composed
from tests.toys import ToyEngine, toy_components, toy_params, toy_population

SIZES = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8])
N, K, D, T = len(SIZES), 3, 7, 6
B = 2 * 4  # bytes of the toy model
NUMBER = 4  # bytes of a reported number
BATCH = 4
PUBLIC = 5


def rounds(choice: str, d: int | None = D, sketch: str | None = None, **values: Any) -> list[Record]:
    population = toy_population(SIZES, K, T)
    node = {**composed(choice, *([f"selector/sketch={sketch}"] if sketch else [])), **values}
    if "num_candidates" in node:
        node["num_candidates"] = d
    selector = instantiate(node, Selector, "selector", population)
    engine = ToyEngine(SIZES, batch_size=BATCH)
    parts = toy_components(engine, population, selector, validation=True, num_public=PUBLIC)
    records = list(Simulation(parts, toy_params()))
    assert len(records) == T
    return records


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


# --- methods of the papers: they ask everybody, or only now and then


def test_top_loss_asks_everybody_but_in_its_first_full_round() -> None:
    first, *later = rounds("top_loss")
    assert costs(first) == (N * B, N * B, 0)
    for r in later:
        assert costs(r) == (N * B, K * B + N * NUMBER, SIZES.sum())


def test_afl_asks_everybody_once_and_then_the_selected() -> None:
    first, *later = rounds("afl")
    assert costs(first) == (N * B, K * B + N * NUMBER, SIZES.sum())  # the losses of the selected are among those of all
    for r in later:
        assert costs(r) == (K * B, K * B + K * NUMBER, SIZES[r.selected].sum())


def test_gpfl_trains_everybody_once_and_validates_every_round() -> None:
    first, *later = rounds("gpfl")
    assert costs(first) == (N * B, N * B, 0)
    assert first.trained == first.uploaded == N
    for r in later:
        assert costs(r) == (K * B, K * B, 0)
        assert r.server_forward_samples == 1


@pytest.mark.parametrize("choice", ["pncs", "divfl"])
def test_gradients_of_everybody_cost_a_model_up_each_and_updates_come_on_top(choice: str) -> None:
    for r in rounds(choice, **({"grad": "full"} if choice == "pncs" else {})):
        assert costs(r) == (N * B, N * B + K * B, 0)
        assert r.train_samples == trained_on(r) + SIZES.sum()
        assert (r.trained, r.uploaded) == (K, K)


def test_pncs_by_updates_sends_each_update_once_and_the_selected_alone_take_part() -> None:
    for r in rounds("pncs"):
        assert costs(r) == (N * B, N * B, 0)
        assert r.train_samples == 2 * SIZES.sum()
        assert (r.contacted, r.trained, r.uploaded) == (N, N, K)
        assert r.participation_ratio == K / N


def test_divfl_without_overhead_asks_everybody_once_and_then_the_selected() -> None:
    first, *later = rounds("divfl_no_overhead")
    assert costs(first) == (N * B, N * B + K * B, 0)
    for r in later:
        assert costs(r) == (K * B, 2 * K * B, 0)
        assert r.train_samples == trained_on(r) + SIZES[r.selected].sum()


def test_fedabc_asks_everybody_and_predicts_once_per_new_model() -> None:
    first, *later = rounds("fedabc")
    assert costs(first) == (N * B, N * B, 0)
    for r in later:
        assert costs(r) == (N * B, r.uploaded * B + N * NUMBER, SIZES.sum())
        assert r.server_forward_samples == r.uploaded * PUBLIC


# --- methods that users expect beside those of the papers


@pytest.mark.parametrize("choice", ["clustered1", "clustered2"])
def test_clustered_sampling_asks_nothing(choice: str) -> None:
    for r in rounds(choice):
        num = len(r.selected)
        assert costs(r) == (num * B, num * B, 0)


def test_hics_asks_nothing() -> None:
    for r in rounds("hics"):
        assert costs(r) == (K * B, K * B, 0)
        assert r.train_samples == trained_on(r)


def test_oort_adds_one_number_to_each_upload() -> None:
    for r in rounds("oort"):
        assert costs(r) == (K * B, K * B + K * NUMBER, 0)
        assert r.train_samples == trained_on(r)


def test_gpfl_official_only_tests() -> None:
    for r in rounds("gpfl_official"):
        num = len(r.selected)
        assert costs(r) == (num * B, num * B, 0)
        assert r.server_forward_samples == 1


def test_ocs_trains_everybody_and_few_upload() -> None:
    for r in rounds("ocs"):
        num = len(r.selected)
        assert costs(r) == (N * B, num * B + N * NUMBER, 0)
        assert (r.trained, r.uploaded, r.train_samples) == (N, num, 2 * SIZES.sum())


def test_aocs_exchanges_two_more_numbers_a_client_each_time() -> None:
    for r in rounds("aocs"):
        extra = (r.bytes_up - len(r.selected) * B) / (N * NUMBER)
        assert extra in (3, 5, 7, 9)
        assert r.bytes_down == N * B


def test_gradient_norms_cost_one_number_and_one_pass_each() -> None:
    for r in rounds("grad_norm"):
        assert costs(r) == (N * B, K * B + N * NUMBER, 0)
        assert r.train_samples == trained_on(r) + SIZES.sum()


@pytest.mark.parametrize("choice", ["s_fedavg", "greedy_shapley", "ucb_shapley"])
def test_shapley_values_cost_the_server_two_to_the_k_passes(choice: str) -> None:
    for r in rounds(choice):
        assert costs(r) == (K * B, K * B, 0)
        assert r.server_forward_samples == 2**K


@pytest.mark.parametrize("choice", ["fedcbs", "entropy_greedy"])
def test_label_counts_are_sent_once(choice: str) -> None:
    first, *later = rounds(choice)
    num_classes = 3
    assert costs(first) == (K * B, K * B + N * num_classes * NUMBER, 0)
    for r in later:
        assert costs(r) == (K * B, K * B, 0)


def test_lefl_trains_everybody_once_for_soft_labels() -> None:
    first, *later = rounds("lefl")
    assert costs(first) == (N * B, K * B + N * PUBLIC * 3 * NUMBER, N * PUBLIC)
    assert first.train_samples == 2 * SIZES.sum()
    for r in later:
        assert costs(r) == (K * B, K * B, 0)


def test_delta_passes_once_more_over_the_selected_and_adds_one_number() -> None:
    for r in rounds("delta"):
        num = len(r.selected)
        assert costs(r) == (num * B, num * B + num * NUMBER, 0)
        assert r.train_samples == trained_on(r) + SIZES[r.selected].sum()


def test_fedcor_pays_while_it_warms_up_and_for_its_virtual_rounds() -> None:
    records = rounds("fedcor", warmup=1, interval=3)
    asked = (N * B, K * B + N * NUMBER, SIZES.sum())
    assert [costs(r) for r in records[:3]] == [asked] * 3  # before rounds 0 and 1, and after round 1
    assert costs(records[3]) == (K * B, K * B, 0)
    virtual = records[4]  # after round e = 3
    assert (virtual.bytes_down, virtual.forward_samples) == (2 * N * B, 2 * SIZES.sum())
    assert virtual.bytes_up == virtual.uploaded * B + 2 * N * NUMBER
    assert virtual.trained == virtual.uploaded


def test_power_of_choice_by_training_pays_for_all_candidates() -> None:
    for r in rounds("power_of_choice_trained"):
        assert costs(r) == (D * B, D * B + D * NUMBER, 0)
        assert (r.trained, r.uploaded, len(r.selected)) == (D, D, K)


@pytest.mark.parametrize(("sketch", "numbers"), [("coord", 4), ("countsketch", 4), ("int8", 1)])
def test_a_sketch_costs_its_own_size(sketch: str, numbers: int) -> None:
    for r in rounds("pncs", sketch=sketch):
        assert costs(r) == (N * B, K * B + N * 2 * numbers, 0)


def test_the_largest_entries_cost_no_more_than_all_of_them() -> None:
    """Two entries with their indices would be 16 bytes, the whole vector is 8."""
    for r in rounds("pncs", sketch="topk"):
        assert costs(r) == (N * B, K * B + N * B, 0)
