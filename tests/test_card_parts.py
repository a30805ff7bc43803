"""Parts of a round on a pretended GPU: the ledger's clock, and passes of the test set."""

import time

import pytest
import torch

from fedsim.clients.ledger import Clock
from fedsim.engine.device import activation_bytes, samples_that_fit
from fedsim.engine.torch_backend import EVALUATION_BATCH
from tests.card_workloads import W1, made_up
from tests.pretended_cuda import PretendedCard

DEVICE = torch.device("cuda")


def test_borders_of_phases_do_not_wait_and_the_times_are_the_hosts() -> None:
    with PretendedCard() as card:
        began, clock = time.perf_counter(), Clock(DEVICE)
        with clock("select"), clock("ask"):
            time.sleep(0.02)
        with clock("train"):
            time.sleep(0.04)
        assert card.counts.waits.total() == 0
        with clock("evaluate"):
            torch.ones(1, device=DEVICE).item()
            time.sleep(0.01)
        seconds, whole = clock.seconds, time.perf_counter() - began
        assert card.counts.waits.total() == 1
    assert (seconds["ask"] >= 0.02, seconds["train"] >= 0.04, seconds["evaluate"] >= 0.01) == (True, True, True)
    assert seconds["aggregate"] == 0
    assert 0.07 <= sum(seconds.values()) <= whole
    assert clock.seconds == seconds
    with PretendedCard() as card:
        with Clock(DEVICE, now=lambda: 0.0)("train"):  # a clock of one's own waits at every border
            pass
        assert card.counts.waits.total() == 2


@pytest.mark.parametrize(("memory", "passes"), [(80 * 10**9, 1), (10**6, 3)])
def test_the_test_set_passes_in_as_large_batches_as_fit(memory: int, passes: int) -> None:
    with PretendedCard(memory=memory) as card:
        made = made_up((*W1, "engine=batched"), 300, 2500)
        card.counts.reset()
        made.evaluate()
        assert card.counts.waits.total() == 1
        assert sum(n for (where, name), n in card.counts.launches.items() if name == "addmm") == 3 * passes


def test_activations_of_a_sample_are_those_of_all_layers() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(8, 3))
    x = torch.zeros(5, 1, 4, 4)
    assert activation_bytes(model, x) == 4 * (16 + 8 + 8 + 3)
    assert activation_bytes(model, x[:0]) == 0
    assert samples_that_fit(10**12, torch.device("cpu"), EVALUATION_BATCH) == EVALUATION_BATCH
