"""Whose time it is when runs train together."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedsim.engine.backend import TrainingResult
from fedsim.engine.schedule import Schedule
from fedsim.running import interleaving
from fedsim.running.interleaving import InterleavedRun, TrainingCall, run_interleaved


def schedule_of(samples: int) -> Schedule:
    """One client's single step."""
    return Schedule(np.zeros((1, 1, samples), np.int64), np.full((1, 1), samples), None, 0.1)


def backend_that_takes(seconds: float, now: list[float]) -> Any:
    """Trains clients of several runs at once, in one call."""

    def train(start: Any, schedule: Schedule) -> TrainingResult:
        now[0] += seconds
        return TrainingResult({}, np.zeros(schedule.positions.shape), None)

    return SimpleNamespace(max_joint_clients=10, room=None, joint_key=lambda schedule: 0, train=train)


def test_runs_pay_for_their_samples_of_the_common_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs that work 1 and 2 seconds, train 30 and 10 samples together in 8 s, and work 3 and 4 seconds more."""
    now = [100.0]
    monkeypatch.setattr(interleaving, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    times: dict[str, list[float]] = {"a": [], "b": []}
    backend = backend_that_takes(8, now)

    def work(name: str, before: float, samples: int, after: float) -> Any:
        def run(own: InterleavedRun) -> None:
            start = own.now()
            now[0] += before
            times[name].append(own.now() - start)
            result = own.train(TrainingCall(backend, [{}], schedule_of(samples)))
            assert result.losses.shape == (1, 1, samples)
            times[name].append(own.now() - start)
            now[0] += after
            times[name].append(own.now() - start)

        return run

    run_interleaved([work("a", 1, 30, 3), work("b", 2, 10, 4)], lambda *_: None)
    assert times == {"a": [1, 1 + 6, 1 + 6 + 3], "b": [2, 2 + 2, 2 + 2 + 4]}


def test_time_until_the_second_training_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    now, seen = [0.0], []
    monkeypatch.setattr(interleaving, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    backend = backend_that_takes(5, now)

    def work(own: InterleavedRun) -> None:
        for _ in range(3):
            now[0] += 1
            own.train(TrainingCall(backend, [{}], schedule_of(4)))
            seen.append(own.now())

    run_interleaved([work], lambda *_: None)
    assert seen == [6, 12, 18]
