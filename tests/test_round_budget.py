"""What the host does in a round on a GPU, counted on a pretended one: launches of kernels and
graphs, and waits."""

import time

import pytest
import torch

from fedsim.clients.phase_timer import PhaseTimer
from fedsim.engine.device import activation_bytes, samples_that_fit
from fedsim.engine.torch_backend import EVALUATION_BATCH
from tests.card_runs import RESNET20, W1, W2, counts_of_a_round, made_up
from tests.pretended_cuda import PretendedCard

CUDA = torch.device("cuda")
RAGGED = ("partition.min_size=1", "local.batch_size=8")
BUDGETS = {
    "W1": ((*W1, "engine=graph"), 80),
    "W2, eight steps": ((*W2, "engine=graph", "local.steps=8", "eval_every=2"), 60),
    "W2": ((*W2, "engine=graph", "eval_every=2"), 120),
    "ResNet-20, ragged": ((*RESNET20, "engine=graph", *RAGGED), 200),
}
"""The workload, and the most launches of a round. Of waits, it is three."""
WAITS = 3
LONG = ("W2", "ResNet-20, ragged")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in LONG else ()) for n in BUDGETS]
)
def test_a_round_with_an_evaluation_keeps_its_budget(name: str) -> None:
    words, launches = BUDGETS[name]
    counts = counts_of_a_round(words, 2, 200)
    assert counts.replayed.total() > 500
    assert any("engine/engine.py" in where for where, _ in counts.launches)
    assert counts.launches.total() <= launches, counts.table("launches")
    assert counts.waits.total() <= WAITS, counts.table("waits")


def test_borders_of_phases_do_not_wait_and_the_times_are_the_hosts() -> None:
    with PretendedCard() as card:
        began, clock = time.perf_counter(), PhaseTimer(CUDA)
        with clock("select"), clock("ask"):
            time.sleep(0.02)
        with clock("train"):
            time.sleep(0.04)
        assert card.counts.waits.total() == 0
        with clock("evaluate"):
            torch.ones(1, device=CUDA).item()
            time.sleep(0.01)
        seconds, whole = clock.seconds, time.perf_counter() - began
        assert card.counts.waits.total() == 1
    assert (seconds["ask"] >= 0.02, seconds["train"] >= 0.04, seconds["evaluate"] >= 0.01) == (
        True,
        True,
        True,
    )
    assert seconds["aggregate"] == 0
    assert 0.07 <= sum(seconds.values()) <= whole
    assert clock.seconds == seconds
    with PretendedCard() as card:
        with PhaseTimer(CUDA, now=lambda: 0.0)(
            "train"
        ):  # a clock of one's own waits at every border
            pass
        assert card.counts.waits.total() == 2


@pytest.mark.parametrize(("memory", "passes"), [(80 * 10**9, 1), (10**6, 3)])
def test_the_test_set_passes_in_as_large_batches_as_fit(memory: int, passes: int) -> None:
    with PretendedCard(memory=memory) as card:
        made = made_up((*W1, "engine=batched"), 300, 2500)
        card.counts.reset()
        made.evaluate()
        assert card.counts.waits.total() == 1
        assert (
            sum(n for (where, name), n in card.counts.launches.items() if name == "addmm")
            == 3 * passes
        )


def test_activations_of_a_sample_are_those_of_all_layers() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(8, 3))
    x = torch.zeros(5, 1, 4, 4)
    assert activation_bytes(model, x) == 4 * (16 + 8 + 8 + 3)
    assert activation_bytes(model, x[:0]) == 0
    assert samples_that_fit(10**12, torch.device("cpu"), EVALUATION_BATCH) == EVALUATION_BATCH
