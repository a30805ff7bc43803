"""What recorded steps may not do, what is recorded for a round, and what happens where recording fails."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsim.core.errors import ConfigError
from fedsim.core.rng import Streams
from fedsim.engine.graph import steps as linear
from fedsim.engine.graph.backend import MOST_STEPS, MOST_TRAINERS, GraphBackend, capacity, longest_recording, recordings
from fedsim.engine.graph.recorder import Body, NotRecordedError, Recorder
from fedsim.engine.graph.steps import OneByOne
from fedsim.engine.model import initial
from fedsim.engine.optimizers import SGD
from fedsim.engine.schedule import LocalWork
from tests.engines import graph
from tests.tape import Tape, TapeRecorder
from tests.test_engine import OPTIMIZERS, SIZES, WORKS, assert_equal, model_of, problem
from tests.test_engine_graph import backend_of, chain, pair

Build = Callable[[], nn.Module]


class Waiting(nn.Module):
    """A model that looks at its batch, as a recorded step may not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x.flatten(1))
        return output if output.abs().max().item() < 1e9 else output / 2


def test_a_model_that_waits_for_the_device_is_not_recorded() -> None:
    one, _ = pair(Waiting(), problem([4, 4]), WORKS["epochs"], OPTIMIZERS["sgd"])
    with pytest.raises(RuntimeError, match="_local_scalar_dense: operation not permitted when stream is capturing"):
        one.train(initial(one.workload.model), np.arange(2), 1, 0.1)


def test_a_step_that_waits_for_the_device_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def waiting(workload: Any, row: Any) -> Any:
        assert row.counts.max().item() >= 0
        return gathered(workload, row)

    gathered = linear.gathered
    monkeypatch.setattr(linear, "gathered", waiting)
    one, _ = pair(chain(), problem([4, 4]), WORKS["epochs"], OPTIMIZERS["sgd"])
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        one.train(initial(one.workload.model), np.arange(2), 1, 0.1)


def test_a_learning_rate_that_is_a_number_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tape keeps Python's numbers, as a CUDA graph does: with them the comparison of replays would fail."""

    def step(self: SGD, values: Tensor, grads: Tensor, buffers: Any, live: Tensor, scalars: Tensor) -> None:
        torch.where(live, values - lr * grads, values, out=values)

    monkeypatch.setattr(SGD, "recorded_step", step)
    one, other = pair(chain(), problem([4, 4]), WORKS["epochs"], OPTIMIZERS["sgd"])
    for lr in (0.1, 0.05):
        results = [e.train(initial(one.workload.model), np.arange(2), 1, lr) for e in (one, other)]
        close = torch.allclose(results[0].delta["1.weight"], results[1].delta["1.weight"], rtol=1e-10, atol=1e-12)
        assert close == (lr == 0.1)


def test_a_tape_replays_on_the_same_tensors_and_keeps_numbers() -> None:
    x, factor = torch.ones(2), 2.0
    with Tape() as tape:
        y = x * factor + 1
        x.add_(1)
    factor = 3.0
    x.fill_(5)
    tape.replay()
    assert (y.tolist(), x.tolist()) == ([11.0, 11.0], [6.0, 6.0])
    with pytest.raises(RuntimeError, match="not permitted"), Tape():
        x[x > 0].sum()


def test_a_round_is_made_of_recordings_of_powers_of_two() -> None:
    assert recordings([False] * 30, 64) == [(16, False), (8, False), (4, False), (2, False)]
    assert recordings([False] * 150, 64) == [(64, False), (64, False), (16, False), (4, False), (2, False)]
    assert recordings([True] * 3 + [False] + [True] * 4, 2) == [
        *[(2, True), (1, True)],
        (1, False),
        *[(2, True), (2, True)],
    ]
    assert recordings([], 64) == []
    assert [longest_recording(n) for n in (0, 10, 1_000, 10**6)] == [MOST_STEPS, MOST_STEPS, 4, 1]


def test_the_room_for_clients_is_one_of_few_numbers_and_little_is_unused() -> None:
    rooms = [capacity(n) for n in range(1, 1000)]
    assert all(n <= room <= n * 9 / 8 for n, room in enumerate(rooms, 1))
    assert len(set(rooms)) < 70
    assert [capacity(n) for n in (0, 5, 10, 15, 17, 100)] == [0, 5, 10, 15, 18, 104]


def test_cohorts_of_many_sizes_keep_few_recordings_and_equal_the_reference() -> None:
    one, other = pair(chain(), problem([4] * 24), WORKS["steps"], OPTIMIZERS["momentum"])
    for count in (3, 1, 2, 24, 5, 7, 9, 11, 13, 15, 3):
        assert_equal(one, other, np.arange(count))
    assert len(backend_of(one)._trainers) == MOST_TRAINERS


def test_fewer_clients_replay_what_was_recorded_for_more() -> None:
    """Where each client has recordings of its own."""
    one, other = pair(model_of("conv"), problem([4] * 5), WORKS["steps"], OPTIMIZERS["momentum"])
    recorder = backend_of(one).recorder
    assert isinstance(recorder, TapeRecorder)
    assert_equal(one, other, np.arange(5))
    recorded = len(recorder.tapes)
    for count in (2, 1, 4):
        assert_equal(one, other, np.arange(count))
    assert len(recorder.tapes) == recorded
    assert len(backend_of(one)._trainers) == 1


def test_batches_that_are_full_take_the_ordinary_batch_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where other clients have short batches."""
    forms: list[bool] = []
    step = OneByOne.step

    def watched(self: OneByOne, *, full: bool) -> None:
        forms.append(full)
        step(self, full=full)

    monkeypatch.setattr(OneByOne, "step", watched)
    engine = graph(model_of("batch norm 2d"), problem([8, 13, 3]), LocalWork(1, None, 4), OPTIMIZERS["sgd"], Streams(3))
    engine.train(initial(engine.workload.model), np.arange(3), 1, 0.1)
    assert sorted(forms) == 2 * [False] + 5 * [True]


class Failing(Recorder):
    """Cannot record."""

    description = "failing"

    def record(self, step: Body, times: int, prepare: Body, track: int) -> Body:
        raise NotRecordedError("operation not permitted")


def test_where_recording_fails_steps_are_taken_one_by_one_and_that_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    one, other = pair(chain(), problem(SIZES["ragged"]), WORKS["epochs"], OPTIMIZERS["adam"])
    backend_of(one).recorder = Failing()
    assert_equal(one, other, np.arange(5))
    assert one.description == "graph, linear layers, step by step (operation not permitted)"
    said = capfd.readouterr().err
    assert said.splitlines() == [
        "engine=graph: not recorded, which is slower and else the same: operation not permitted"
    ]


class Scarce(TapeRecorder):
    """Runs out of memory once more than two clients are to be recorded."""

    def __init__(self, backend: GraphBackend) -> None:
        super().__init__()
        self.backend = backend

    def record(self, step: Body, times: int, prepare: Body, track: int) -> Body:
        if any(rows > 2 for rows, _ in self.backend._trainers):
            raise torch.OutOfMemoryError
        return super().record(step, times, prepare, track)


def test_running_out_of_memory_halves_the_chunk_says_so_and_loses_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    one, other = pair(chain(), problem(SIZES["ragged"]), WORKS["epochs"], OPTIMIZERS["sgd"])
    backend_of(one).recorder = Scarce(backend_of(one))
    assert_equal(one, other, np.arange(5))
    assert backend_of(one).chunk_size == 2
    assert capfd.readouterr().err == ("engine.chunk_size: out of memory with 5 clients at once; going on with 2\n")


def test_one_client_too_large_for_the_memory_is_an_error() -> None:
    one, _ = pair(chain(), problem([4]), WORKS["epochs"], OPTIMIZERS["sgd"])

    class Never(Failing):
        def record(self, step: Body, times: int, prepare: Body, track: int) -> Body:
            raise torch.OutOfMemoryError

    backend_of(one).recorder = Never()
    with pytest.raises(torch.OutOfMemoryError):
        one.train(initial(one.workload.model), np.arange(1), 1, 0.1)


def test_on_a_cpu_the_backend_says_that_it_records_nothing() -> None:
    one = graph(chain(), problem([4]), WORKS["epochs"], OPTIMIZERS["sgd"], Streams(3))
    assert one.description == "graph, linear layers, step by step (no CUDA graphs on device cpu)"


class OwnRule(SGD):
    """A user's optimiser."""


def test_an_optimiser_of_a_users_own_is_refused() -> None:
    rule = OPTIMIZERS["sgd"]
    own = OwnRule(lr=0.1, momentum=0.0, nesterov=False, weight_decay=0.0, schedule=rule.schedule)
    with pytest.raises(ConfigError, match="cannot record the steps of OwnRule") as caught:
        graph(chain(), problem([4]), WORKS["epochs"], own, Streams(3))
    assert "engine=batched" in caught.value.problems[0].remedy


def test_a_layer_that_mixes_samples_is_refused() -> None:
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16, track_running_stats=False), nn.Linear(16, 3)).double()
    with pytest.raises(ConfigError, match="BatchNorm1d"):
        graph(model, problem([4]), WORKS["epochs"], OPTIMIZERS["sgd"], Streams(3))
