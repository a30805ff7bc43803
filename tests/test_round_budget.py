"""The host's work in a round on a GPU keeps a budget of launches and waits, counted on a pretended
GPU."""

import time

import pytest
import torch

from fedsim.clients.phase_timer import PhaseTimer
from fedsim.engine.device import activation_bytes, samples_that_fit
from fedsim.engine.torch_backend import EVALUATION_BATCH
from tests.card_runs import RESNET20, W1, W2, counts_of_round_2, on_generated_samples
from tests.pretended_cuda import CUDA, PretendedCard

MAX_WAITS = 3
MAX_LAUNCHES = {
    W1: 80,
    (*W2, "local.steps=8", "eval_every=2"): 60,
    (*W2, "eval_every=2"): 120,
    (*RESNET20, "partition.min_size=1", "local.batch_size=8"): 200,
}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("words", "max_launches"),
    [
        pytest.param(words, launches, marks=SLOW if launches > 80 else ())
        for words, launches in MAX_LAUNCHES.items()
    ],
    ids=["W1", "W2, eight steps", "W2", "ResNet-20, ragged"],
)
def test_a_round_with_an_evaluation_keeps_its_budget(
    words: tuple[str, ...], max_launches: int
) -> None:
    counts = counts_of_round_2((*words, "engine=graph"), 200)
    assert counts.in_graphs.total() > 500
    assert counts.launches.total() <= max_launches, counts
    assert counts.waits.total() <= MAX_WAITS, counts


def test_a_timer_does_not_wait_for_the_device_between_phases() -> None:
    with PretendedCard() as card:
        began, timer = time.perf_counter(), PhaseTimer(CUDA)
        with timer("select"), timer("ask"):
            time.sleep(0.02)
        with timer("train"):
            time.sleep(0.04)
        assert card.counts.waits.total() == 0
        with timer("evaluate"):
            torch.ones(1, device=CUDA).item()  # This waits, and so ends the phases before it.
            time.sleep(0.01)
        seconds, whole = timer.seconds, time.perf_counter() - began
        assert card.counts.waits.total() == 1
    assert seconds["ask"] >= 0.02
    assert seconds["train"] >= 0.04
    assert seconds["evaluate"] >= 0.01
    assert seconds["aggregate"] == 0
    assert 0.07 <= sum(seconds.values()) <= whole
    assert timer.seconds == seconds


def test_a_timer_with_another_clock_waits_at_both_ends_of_a_phase() -> None:
    with PretendedCard() as card:
        with PhaseTimer(CUDA, now=lambda: 0.0)("train"):
            pass
        assert card.counts.waits.total() == 2


@pytest.mark.parametrize(("memory", "passes"), [(80 * 10**9, 1), (10**6, 3)])
def test_the_test_set_passes_in_as_large_batches_as_fit(memory: int, passes: int) -> None:
    with PretendedCard(memory=memory) as card:
        simulation = on_generated_samples((*W1, "engine=batched"), num_train=300, num_test=2500)
        card.counts.reset()
        simulation.evaluate()
    layers = 3
    assert card.counts.launches["addmm"] == layers * passes
    assert card.counts.waits.total() == 1


def test_activation_bytes_count_the_sample_and_the_outputs_of_all_layers() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(8, 3))
    x = torch.zeros(5, 1, 4, 4)
    assert activation_bytes(model, x) == 4 * (16 + 8 + 8 + 3)
    assert activation_bytes(model, x[:0]) == 0


def test_a_pass_has_at_least_the_minimum_of_samples() -> None:
    samples = samples_that_fit(10**12, torch.device("cpu"), EVALUATION_BATCH)
    assert samples == EVALUATION_BATCH
