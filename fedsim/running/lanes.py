"""Lanes: several runs in one process that train together in common batches.

Each lane is a coroutine (greenlet) that is suspended where its run trains. Its clock counts its own
work, and its share of the common training in proportion to its samples.
"""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from greenlet import greenlet
from torch import nn

from fedsim.core.types import Params
from fedsim.engine.backend import Backend, TrainingResult
from fedsim.engine.model import traveling
from fedsim.engine.schedule import Schedule, concatenate_schedules
from fedsim.rounds.loop import Simulation


@dataclass(frozen=True)
class TrainingCall:
    """A call of `Backend.train`: the backend and its arguments.

    One backend can train all calls of one `kind`.
    """

    backend: Backend
    start: Sequence[Params]
    schedule: Schedule
    kind: Hashable = None


class Lane:
    """One run as a coroutine.

    It works from `resume` to its next `call` for training, and is suspended otherwise.
    """

    def __init__(self, work: Callable[["Lane"], object]) -> None:
        self._coroutine = greenlet(lambda: work(self))
        self._seconds = 0.0
        self._since = 0.0
        self._simulation: Simulation | None = None
        self.call: Any = None

    def join(self, simulation: Simulation, model: nn.Module) -> None:
        """Make the simulation train through this lane, and give it the lane's clock.

        Runs are not trained together if their labels differ, or what the backend does not train of
        their `model`.
        """
        self._simulation = simulation
        engine = simulation.components.engine
        sent = traveling(model)
        digest = hashlib.sha256(engine.data.y.cpu().numpy().tobytes())
        for name, value in model.state_dict().items():
            if name not in sent:
                digest.update(name.encode() + value.cpu().numpy().tobytes())
        backend = LaneBackend(engine.backend, self, digest.hexdigest())
        engine.backend = cast(Backend, backend)
        simulation.components = replace(simulation.components, now=self.now)

    def train(self, call: TrainingCall) -> TrainingResult:
        """Suspend the run until `call` is answered. Raises what the training raised."""
        self.call = call
        assert self._coroutine.parent is not None
        with torch.enable_grad():  # a selector's no_grad must not reach the other lanes
            result: TrainingResult = self._coroutine.parent.switch()
        return result

    def now(self) -> float:
        """Return the seconds that this run has worked, with its share of the common training."""
        return self._seconds + time.perf_counter() - self._since

    @property
    def round(self) -> int:
        """The round that the run is in, from 1; 0 before it has begun."""
        return 0 if self._simulation is None else self._simulation.round + 1

    def resume(
        self, result: TrainingResult | BaseException | None = None, seconds: float = 0.0
    ) -> bool:
        """Let the run work with the result of its call, or with the error that it raised.

        `seconds` is its share of the training. Returns whether it calls again; otherwise it has
        ended.
        """
        self._seconds += seconds
        self._since = time.perf_counter()
        if isinstance(result, BaseException):
            self._coroutine.throw(result)
        elif self.call is None:
            self._coroutine.switch()
        else:
            self._coroutine.switch(result)
        self._seconds += time.perf_counter() - self._since
        return not self._coroutine.dead


class LaneBackend:
    """A run's backend that leaves training to the lane, and does everything else itself."""

    def __init__(self, backend: Backend, lane: Lane, frozen_digest: str) -> None:
        self._backend = backend
        self._lane = lane
        self._frozen_digest = frozen_digest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def train(self, start: Sequence[Params], schedule: Schedule) -> TrainingResult:
        kind = (self._backend.description, self._backend.buffer_size, self._frozen_digest)
        return self._lane.train(TrainingCall(self._backend, start, schedule, kind))


def run_in_lanes(
    works: Sequence[Callable[[Lane], object]], on_progress: Callable[[int, int], None]
) -> None:
    """Run all of `works` in lanes until they have ended.

    `on_progress` is called with the number of runs left and the latest round whenever some train.
    What a run raises, such as KeyboardInterrupt, interrupts all others and is raised again.
    """
    waiting: deque[Lane] = deque()
    try:
        # 1. Every run works until it trains for the first time.
        for work in works:
            lane = Lane(work)
            if lane.resume():
                waiting.append(lane)
        while waiting:
            # 2. Train the calls that have waited longest, as many as are worth training together.
            batch = _next_batch(waiting)
            on_progress(len(waiting), batch[-1].round)
            samples = [float(lane.call.schedule.samples.sum()) for lane in batch]
            start = time.perf_counter()
            answers: Sequence[TrainingResult | BaseException]
            try:
                answers = train_jointly([lane.call for lane in batch])
            except (Exception, SystemExit) as error:  # of a user's model: each run fails with it
                answers = [error] * len(batch)
            seconds = time.perf_counter() - start
            # 3. Their runs work until they train again.
            for lane, answer, count in zip(batch, answers, samples, strict=True):
                waiting.popleft()
                if lane.resume(answer, seconds * count / max(sum(samples), 1.0)):
                    waiting.append(lane)
    except BaseException:
        for lane in waiting:
            with suppress(KeyboardInterrupt):
                lane.resume(KeyboardInterrupt())
        raise


def _next_batch(waiting: Sequence[Lane]) -> list[Lane]:
    """Return the first lanes whose clients the first one's backend can train at once."""
    free = waiting[0].call.backend.max_joint_clients
    batch: list[Lane] = []
    for lane in waiting:
        free -= len(lane.call.schedule)
        if batch and free < 0:
            break
        batch.append(lane)
    return batch


def train_jointly(calls: Sequence[TrainingCall]) -> list[TrainingResult]:
    """Return the result of each call, to the last bit what it would be alone.

    Calls that agree in their kind and in `Backend.joint_key`, and whose samples fit in memory
    together, are trained at once by the backend of the first.
    """
    groups: dict[Hashable, list[int]] = {}
    for number, call in enumerate(calls):
        key = (call.kind, call.backend.joint_key(call.schedule))
        groups.setdefault(key, []).append(number)
    results: dict[int, TrainingResult] = {}
    for numbers in groups.values():
        group_results = _train_group([calls[number] for number in numbers])
        results |= zip(numbers, group_results, strict=True)
    return [results[number] for number in range(len(calls))]


def _train_group(calls: Sequence[TrainingCall]) -> list[TrainingResult]:
    """Train calls at once, or in two halves if their samples do not fit in memory together.

    A backend itself would cut them at other places than it cuts each call.
    """
    backend = calls[0].backend
    needed = sum(np.unique(call.schedule.positions).size for call in calls)
    if backend.buffer_size is not None and needed > backend.buffer_size and len(calls) > 1:
        half = len(calls) // 2
        return _train_group(calls[:half]) + _train_group(calls[half:])
    start: list[Params] = []
    for call in calls:
        start.extend(call.start)
    joint = backend.train(start, concatenate_schedules([call.schedule for call in calls]))
    results = []
    first = 0
    for call in calls:
        num_clients, num_steps, width = call.schedule.positions.shape
        rows = joint.rows(slice(first, first + num_clients))
        results.append(replace(rows, losses=rows.losses[:, :num_steps, :width]))
        first += num_clients
    return results
