"""The cost of a round of each selector, against the cost table of the methods.

The base is a plain round: K models down, K updates up, and two passes over the cohort's samples.
"""

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
N, K = len(SIZES), 3
CANDIDATES = 7
NUM_ROUNDS = 6
BATCH = 4
PUBLIC = 5
ALL_SAMPLES = int(SIZES.sum())
MODEL = 2 * 4  # bytes of the toy model
NUMBER = 4  # bytes of a reported number

# bytes down, bytes up, samples passed forward, samples trained on, samples of the server
Costs = tuple[int, int, int, int, int]


def rounds(
    choice: str, d: int | None = CANDIDATES, sketch: str | None = None, **values: Any
) -> list[Record]:
    """Run a selector with changed `values` for all rounds; `d` is its number of candidates, if it
    has any."""
    words = [] if sketch is None else [f"selector/sketch={sketch}"]
    node = composed(choice, *words) | values
    if "num_candidates" in node:
        node["num_candidates"] = d
    population = toy_population(SIZES, K, NUM_ROUNDS)
    selector = instantiate(node, Selector, "selector", population)
    engine = ToyEngine(SIZES, batch_size=BATCH)
    components = toy_components(engine, population, selector, validation=True, num_public=PUBLIC)
    records = list(Simulation(components, toy_params()))
    assert len(records) == NUM_ROUNDS
    return records


def costs(record: Record) -> Costs:
    return (
        record.bytes_down,
        record.bytes_up,
        record.forward_samples,
        record.train_samples,
        record.server_forward_samples,
    )


def samples_of_cohort(record: Record) -> int:
    return int(SIZES[record.selected].sum())


def base(
    record: Record, down: int = 0, up: int = 0, forward: int = 0, train: int = 0, server: int = 0
) -> Costs:
    """Return the cost of a plain round and the given additional cost."""
    models = len(record.selected) * MODEL
    return models + down, models + up, forward, 2 * samples_of_cohort(record) + train, server


def with_losses_of_all(record: Record) -> Costs:
    """All clients report a loss before the cohort trains."""
    return base(record, down=(N - K) * MODEL, up=N * NUMBER, forward=ALL_SAMPLES)


def with_batch_losses_of_all(record: Record) -> Costs:
    forward = int(np.minimum(SIZES, BATCH).sum())
    return base(record, down=(N - K) * MODEL, up=N * NUMBER, forward=forward)


def with_losses_of_cohort(record: Record) -> Costs:
    """The cohort reports losses that it has computed anyway."""
    return base(record, up=K * NUMBER)


def with_numbers_of_all_gradients(count: int) -> Any:
    """All clients send `count` numbers computed from their full gradients."""

    def expected(record: Record) -> Costs:
        up = N * count * NUMBER
        return base(record, down=(N - K) * MODEL, up=up, train=ALL_SAMPLES)

    return expected


def all_clients_train(up: int, forward: int = 0, server: int = 0) -> Any:
    """All clients download the model and train, and `up` bytes are sent in addition."""

    def expected(record: Record) -> Costs:
        num = len(record.selected)
        train = 2 * (ALL_SAMPLES - samples_of_cohort(record))
        return base(record, (N - num) * MODEL, up, forward, train, server)

    return expected


LABEL_COUNTS = N * 3 * NUMBER


def with_losses_and_label_counts_of_all(record: Record) -> Costs:
    up = N * NUMBER + LABEL_COUNTS
    return base(record, down=(N - K) * MODEL, up=up, forward=ALL_SAMPLES)


UPDATES_OF_OTHERS = (N - K) * MODEL
CASES = [
    *((choice, {}, base, None) for choice in ("random", "round_robin", "md", "full")),
    *(
        (choice, {}, base, None)
        for choice in ("clustered1", "clustered2", "hics", "refl", "f3ast", "kvib")
    ),
    ("rpow_d", {}, with_losses_of_cohort, None),
    ("oort", {}, with_losses_of_cohort, None),
    ("linucb", {}, with_losses_of_cohort, None),
    ("cpow_d", {"d": N}, with_batch_losses_of_all, None),
    ("power_of_choice", {"d": N}, with_losses_of_all, None),
    ("top_loss", {}, with_losses_of_all, base),  # all clients are selected in the first round
    (
        "afl",
        {},
        lambda r: base(r, up=K * NUMBER, forward=samples_of_cohort(r)),
        with_losses_of_all,
    ),
    ("gpfl", {}, lambda r: base(r, server=1), all_clients_train(UPDATES_OF_OTHERS, server=2)),
    ("gpfl_official", {}, lambda r: base(r, server=1), None),
    ("pncs", {"grad": "full"}, with_numbers_of_all_gradients(2), None),
    ("divfl", {}, with_numbers_of_all_gradients(2), None),
    ("grad_norm", {}, with_numbers_of_all_gradients(1), None),
    ("fl_dp3s", {}, base, with_numbers_of_all_gradients(2)),
    (
        "divfl_no_overhead",
        {},
        lambda r: base(r, up=K * MODEL, train=samples_of_cohort(r)),
        with_numbers_of_all_gradients(2),
    ),
    ("ocs", {}, all_clients_train(N * NUMBER), None),
    ("s_fedavg", {}, lambda r: base(r, server=2**K), None),
    ("greedy_shapley", {}, lambda r: base(r, server=2**K), None),
    ("ucb_shapley", {}, lambda r: base(r, server=2**K), None),
    ("fedcbs", {}, base, lambda r: base(r, up=LABEL_COUNTS)),
    ("entropy_greedy", {}, base, lambda r: base(r, up=LABEL_COUNTS)),
    ("flips", {}, base, lambda r: base(r, up=LABEL_COUNTS)),
    ("fedlecc", {}, with_losses_of_all, with_losses_and_label_counts_of_all),
    ("fedgs", {}, base, lambda r: base(r, up=LABEL_COUNTS)),
    ("lefl", {}, base, all_clients_train(N * PUBLIC * 3 * NUMBER, forward=N * PUBLIC)),
    (
        "delta",
        {},
        lambda r: base(r, up=len(r.selected) * NUMBER, train=samples_of_cohort(r)),
        None,
    ),
    ("pncs", {}, all_clients_train(UPDATES_OF_OTHERS), None),  # each update is sent once
    ("pncs", {"sketch": "coord"}, all_clients_train(N * 2 * 4), None),
    ("pncs", {"sketch": "countsketch"}, all_clients_train(N * 2 * 4), None),
    ("pncs", {"sketch": "int8"}, all_clients_train(N * 2 * 1), None),
    ("pncs", {"sketch": "topk"}, all_clients_train(N * MODEL), None),  # never more than all of it
]
"""Selector, its values, the cost of a round, and that of the first round if it differs."""


@pytest.mark.parametrize(("choice", "values", "later", "first"), CASES)
def test_a_round_costs_what_its_method_requests(
    choice: str, values: dict[str, Any], later: Any, first: Any
) -> None:
    first_record, *records = rounds(choice, **values)
    assert costs(first_record) == (first or later)(first_record)
    for record in records:
        assert costs(record) == later(record)
        assert record.participation_ratio == record.uploaded / N
        assert record.uploaded == len(record.selected) <= record.trained <= record.contacted


def test_power_of_choice_asks_only_its_candidates() -> None:
    for record in rounds("power_of_choice"):
        assert record.bytes_down == CANDIDATES * MODEL
        assert record.bytes_up == K * MODEL + CANDIDATES * NUMBER
        assert (record.contacted, record.trained, record.uploaded) == (CANDIDATES, K, K)
        assert record.forward_samples >= samples_of_cohort(record)


def test_power_of_choice_can_train_its_candidates() -> None:
    for record in rounds("power_of_choice_trained"):
        assert record.bytes_down == CANDIDATES * MODEL
        assert record.bytes_up == CANDIDATES * (MODEL + NUMBER)
        assert record.forward_samples == 0
        assert record.trained == record.uploaded == CANDIDATES
        assert len(record.selected) == K


def test_adaptive_power_of_choice_asks_all_clients_in_the_first_half_of_rounds() -> None:
    for record in rounds("adapow_d", d=None):
        expected = with_losses_of_all if record.round <= NUM_ROUNDS // 2 else base
        assert costs(record) == expected(record)


def test_fedabc_asks_everybody_and_predicts_once_for_each_new_model() -> None:
    first, *later = rounds("fedabc")
    assert costs(first)[:3] == (N * MODEL, N * MODEL, 0)
    for record in later:
        assert record.bytes_down == N * MODEL
        assert record.bytes_up == record.uploaded * MODEL + N * NUMBER
        assert record.forward_samples == ALL_SAMPLES
        assert record.server_forward_samples == record.uploaded * PUBLIC


def test_aocs_exchanges_two_more_numbers_for_each_client_each_time() -> None:
    for record in rounds("aocs"):
        num_bytes = record.bytes_up - len(record.selected) * MODEL
        assert num_bytes / (N * NUMBER) in (3, 5, 7, 9)
        assert record.bytes_down == N * MODEL


def test_fedcor_pays_while_it_warms_up_and_for_its_virtual_rounds() -> None:
    records = rounds("fedcor", warmup=1, interval=3)
    for record in records[:3]:  # losses before the rounds e = 0 and 1, and after e = 1
        assert costs(record) == with_losses_of_all(record)
    assert costs(records[3]) == base(records[3])
    virtual = records[4]  # after the round e = 3
    assert (virtual.bytes_down, virtual.forward_samples) == (2 * N * MODEL, 2 * ALL_SAMPLES)
    assert virtual.bytes_up == virtual.uploaded * MODEL + 2 * N * NUMBER
    assert virtual.trained == virtual.uploaded
