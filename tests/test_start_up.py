"""How long a selector's start-up lasts: what it costs once is not scaled by reports."""

import pytest

from tests.test_selector_contract import KINDS, simulation

EQUAL = [2] * 10


def bytes_by_round(choice: str) -> tuple[int, list[int]]:
    """The selector's start-up, and the bytes both ways of each of twelve rounds."""
    run = simulation(choice, EQUAL, 3)
    return run.components.selector.start_up_rounds, [r.bytes_down + r.bytes_up for r in run]


@pytest.mark.parametrize("choice", KINDS)
def test_a_first_round_that_costs_most_belongs_to_the_start_up(choice: str) -> None:
    start_up, spent = bytes_by_round(choice)
    assert 0 <= start_up < len(spent)
    assert start_up > 0 or spent[0] <= max(spent[1:])


@pytest.mark.parametrize(
    "choice",
    [
        "gpfl",
        "afl",
        "top_loss",
        "fedabc",
        "lefl",
        "divfl_no_overhead",
        "fedcbs",
        "fedgs",
        "flips",
        "fedlecc",
    ],
)
def test_methods_that_ask_everybody_once_start_up_in_one_round(choice: str) -> None:
    start_up, (first, second, *_) = bytes_by_round(choice)
    assert start_up == 1
    assert first != second


def test_longer_start_ups() -> None:
    start_up, spent = bytes_by_round(
        "fedcor"
    )  # warm-up of rounds 0 to 3 here, virtual rounds every other one
    assert start_up == 5
    assert len(set(spent[:5])) == 1
    assert min(spent[5:]) < spent[0] < max(spent[5:])
    start_up, spent = bytes_by_round("adapow_d")  # which changes at half time
    assert (start_up, len(set(spent[:6])), len(set(spent[6:]))) == (6, 1, 1)
    assert spent[6] < spent[5]
