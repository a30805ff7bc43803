"""Whose time it is when runs train together."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedsim.engine.engine import Request, Trained
from fedsim.running import interleaving as lanes
from fedsim.running.interleaving import Lane, run_lanes


def test_lanes_pay_for_their_samples_of_the_common_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two lanes that work 1 and 2 seconds, train 30 and 10 samples together in 8 s, and work 3 and 4 seconds more."""
    now = [100.0]
    monkeypatch.setattr(lanes, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    times: dict[str, list[float]] = {"a": [], "b": []}

    def train_all(requests: list[Request]) -> list[Trained]:
        now[0] += 8
        return [Trained({}, *[np.zeros(1)] * 3, np.array([r.lr])) for r in requests]  # type: ignore[arg-type]

    engine: Any = SimpleNamespace(common_clients=10, description="", train_all=train_all)

    def work(name: str, before: float, samples: float, after: float) -> Any:
        def run(lane: Lane) -> None:
            start = lane.now()
            now[0] += before
            times[name].append(lane.now() - start)
            trained = lane.train(Request(engine, {}, np.zeros(1, np.int64), 1, samples))
            assert trained.samples.tolist() == [samples]
            times[name].append(lane.now() - start)
            now[0] += after
            times[name].append(lane.now() - start)

        return run

    run_lanes([work("a", 1, 30, 3), work("b", 2, 10, 4)], lambda *_: None)
    assert times == {"a": [1, 1 + 6, 1 + 6 + 3], "b": [2, 2 + 2, 2 + 2 + 4]}


def test_time_until_the_second_training_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    now, seen = [0.0], []
    monkeypatch.setattr(lanes, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def train_all(requests: list[Request]) -> list[Trained]:
        now[0] += 5
        return [Trained({}, *[np.zeros(1)] * 3, np.array([4])) for _ in requests]  # type: ignore[arg-type]

    engine: Any = SimpleNamespace(common_clients=1, description="", train_all=train_all)

    def run(lane: Lane) -> None:
        for _ in range(3):
            now[0] += 1
            lane.train(Request(engine, {}, np.zeros(1, np.int64), 1, 0.1))
            seen.append(lane.now())

    run_lanes([run], lambda *_: None)
    assert seen == [6, 12, 18]
