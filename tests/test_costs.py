"""What each selector's round costs, against the cost table of the methods (K models down and up are
the base)."""

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


def rounds(
    choice: str, d: int | None = D, sketch: str | None = None, **values: Any
) -> list[Record]:
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


Costs = tuple[int, int, int, int, int]


def costs(r: Record) -> Costs:
    return r.bytes_down, r.bytes_up, r.forward_samples, r.train_samples, r.server_forward_samples


def base(
    r: Record, down: int = 0, up: int = 0, forward: int = 0, train: int = 0, server: int = 0
) -> Costs:
    """The selected download a model, pass their samples twice and upload; and so much more."""
    num = len(r.selected)
    return num * B + down, num * B + up, forward, int(2 * SIZES[r.selected].sum()) + train, server


ALL = int(SIZES.sum())


def asked(r: Record) -> Costs:
    """All clients report a loss before the selected train."""
    return base(r, down=(N - K) * B, up=N * NUMBER, forward=ALL)


def graded(r: Record, numbers: int) -> Costs:
    """All clients send so many numbers made of their full gradients."""
    return base(r, down=(N - K) * B, up=N * numbers * NUMBER, train=ALL)


def all_train(r: Record, up: int) -> Costs:
    num = len(r.selected)
    return base(r, down=(N - num) * B, up=up, train=2 * int(ALL - SIZES[r.selected].sum()))


def of_selected(r: Record) -> int:
    return int(SIZES[r.selected].sum())


@pytest.mark.parametrize(
    ("choice", "values", "later", "first"),
    [
        *(
            (choice, {}, base, None)
            for choice in (
                "random",
                "round_robin",
                "md",
                "full",
                "clustered1",
                "clustered2",
                "hics",
                "refl",
                "f3ast",
            )
        ),
        (
            "cpow_d",
            {"d": N},
            lambda r: base(r, (N - K) * B, N * NUMBER, int(np.minimum(SIZES, BATCH).sum())),
            None,
        ),
        ("rpow_d", {}, lambda r: base(r, up=K * NUMBER), None),
        *((choice, {}, lambda r: base(r, up=K * NUMBER), None) for choice in ("oort", "linucb")),
        ("power_of_choice", {"d": N}, asked, None),
        ("top_loss", {}, asked, base),  # the first round is full
        ("afl", {}, lambda r: base(r, up=K * NUMBER, forward=of_selected(r)), asked),
        ("gpfl", {}, lambda r: base(r, server=1), lambda r: (*all_train(r, (N - K) * B)[:4], 2)),
        ("gpfl_official", {}, lambda r: base(r, server=1), None),
        ("pncs", {"grad": "full"}, lambda r: graded(r, 2), None),
        ("divfl", {}, lambda r: graded(r, 2), None),
        ("grad_norm", {}, lambda r: graded(r, 1), None),
        ("pncs", {}, lambda r: all_train(r, (N - K) * B), None),  # each update is sent once
        ("fl_dp3s", {}, base, lambda r: graded(r, 2)),
        (
            "divfl_no_overhead",
            {},
            lambda r: base(r, up=K * B, train=of_selected(r)),
            lambda r: graded(r, 2),
        ),
        ("ocs", {}, lambda r: all_train(r, N * NUMBER), None),
        *(
            (choice, {}, lambda r: base(r, server=2**K), None)
            for choice in ("s_fedavg", "greedy_shapley", "ucb_shapley")
        ),
        *(
            (choice, {}, base, lambda r: base(r, up=N * 3 * NUMBER))
            for choice in ("fedcbs", "entropy_greedy", "fedgs")
        ),
        (
            "lefl",
            {},
            base,
            lambda r: (*all_train(r, N * PUBLIC * 3 * NUMBER)[:2], N * PUBLIC, 2 * ALL, 0),
        ),
        ("delta", {}, lambda r: base(r, up=len(r.selected) * NUMBER, train=of_selected(r)), None),
        ("pncs", {"sketch": "coord"}, lambda r: all_train(r, N * 2 * 4), None),
        ("pncs", {"sketch": "countsketch"}, lambda r: all_train(r, N * 2 * 4), None),
        ("pncs", {"sketch": "int8"}, lambda r: all_train(r, N * 2 * 1), None),
        (
            "pncs",
            {"sketch": "topk"},
            lambda r: all_train(r, N * B),
            None,
        ),  # no more than the whole vector
    ],
)
def test_a_round_costs_what_its_method_asks_for(
    choice: str, values: dict[str, Any], later: Any, first: Any
) -> None:
    records = rounds(choice, **values)
    assert costs(records[0]) == (first or later)(records[0])
    for r in records[1:]:
        assert costs(r) == later(r)
        assert r.participation_ratio == r.uploaded / N
        assert r.uploaded == len(r.selected) <= r.trained <= r.contacted


def test_power_of_choice_asks_its_candidates_alone() -> None:
    for r in rounds("power_of_choice"):
        assert costs(r)[:2] == (D * B, K * B + D * NUMBER)
        assert (r.contacted, r.trained, r.uploaded) == (D, K, K)
        assert r.forward_samples >= of_selected(r)
    for r in rounds("power_of_choice_trained"):
        assert costs(r)[:3] == (D * B, D * B + D * NUMBER, 0)
        assert (r.trained, r.uploaded, len(r.selected)) == (D, D, K)
    for r in rounds("adapow_d", d=None):
        assert costs(r) == (asked(r) if r.round <= T // 2 else base(r))


def test_fedabc_asks_everybody_and_predicts_once_per_new_model() -> None:
    first, *later = rounds("fedabc")
    assert costs(first)[:3] == (N * B, N * B, 0)
    for r in later:
        assert costs(r)[:3] == (N * B, r.uploaded * B + N * NUMBER, ALL)
        assert r.server_forward_samples == r.uploaded * PUBLIC


def test_aocs_exchanges_two_more_numbers_a_client_each_time() -> None:
    for r in rounds("aocs"):
        extra = (r.bytes_up - len(r.selected) * B) / (N * NUMBER)
        assert extra in (3, 5, 7, 9)
        assert r.bytes_down == N * B


def test_fedcor_pays_while_it_warms_up_and_for_its_virtual_rounds() -> None:
    records = rounds("fedcor", warmup=1, interval=3)
    assert [costs(r) for r in records[:3]] == [
        asked(r) for r in records[:3]
    ]  # before rounds 0, 1, and after round 1
    assert costs(records[3]) == base(records[3])
    virtual = records[4]  # after round e = 3
    assert (virtual.bytes_down, virtual.forward_samples) == (2 * N * B, 2 * ALL)
    assert virtual.bytes_up == virtual.uploaded * B + 2 * N * NUMBER
    assert virtual.trained == virtual.uploaded
