"""Lanes: several runs in one process that train together in common batches.

A lane is a coroutine (greenlet) in which one run works. It is suspended where the run calls the
backend to train. `run_in_lanes`, which `fedsim.jobs.sweep.Lanes` calls, collects the calls of
several suspended lanes, trains them at once, and resumes each lane with its own result. The results
are the same to the last bit as those of each run alone.

A lane has its own clock. It counts the time in which the run works, and a share of the common
training in proportion to the run's samples. It stands still while other lanes work.
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

    `kind` is equal for calls that any of their backends could train: their models, data and
    settings of training are the same.
    """

    backend: Backend
    start: Sequence[Params]
    schedule: Schedule
    kind: Hashable = None


class Lane:
    """One run as a coroutine. `work` is called with the lane, and runs the whole run.

    `run_in_lanes` calls `resume`, and the run works until it needs training (`train`) or ends.
    `call` is the `TrainingCall` for which it is suspended, None before the first. The run itself
    calls `join` as soon as its simulation is built.
    """

    def __init__(self, work: Callable[["Lane"], object]) -> None:
        self._coroutine = greenlet(lambda: work(self))
        self._seconds_before = 0.0  # on the lane's clock when the run was last resumed
        self._resumed_at = 0.0  # by `time.perf_counter()`
        self._simulation: Simulation | None = None
        self.call: Any = None  # Any, because callers know that it is set

    def join(self, simulation: Simulation, model: nn.Module) -> None:
        """Make the simulation train through this lane, and give it the lane's clock.

        A digest stands for what a common call of the backend could not have for each run: the
        labels, and the part of `model` that does not travel between server and clients. Runs with
        different digests are not trained together.
        """
        self._simulation = simulation
        engine = simulation.components.engine
        traveling_names = traveling(model)
        digest = hashlib.sha256(engine.data.y.cpu().numpy().tobytes())
        for name, value in model.state_dict().items():
            if name not in traveling_names:
                digest.update(name.encode() + value.cpu().numpy().tobytes())
        lane_backend = LaneBackend(engine.backend, self, digest.hexdigest())
        engine.backend = cast(Backend, lane_backend)  # it has a backend's methods by __getattr__
        simulation.components = replace(simulation.components, now=self.now)

    def train(self, call: TrainingCall) -> TrainingResult:
        """Suspend the run until `call` is trained, and return its result.

        The lane's run calls this. Raises what the training raised.
        """
        self.call = call
        assert self._coroutine.parent is not None
        # torch's grad mode belongs to the thread, and so to all lanes. A selector may train within
        # no_grad, which must not reach the other lanes.
        with torch.enable_grad():
            result: TrainingResult = self._coroutine.parent.switch()
        return result

    def now(self) -> float:
        """Return the seconds that this run has worked, with its share of the common training."""
        return self._seconds_before + time.perf_counter() - self._resumed_at

    @property
    def round(self) -> int:
        """The round that the run is in, from 1; 0 before it has begun."""
        return 0 if self._simulation is None else self._simulation.round + 1

    def resume(
        self, result: TrainingResult | BaseException | None = None, seconds: float = 0.0
    ) -> bool:
        """Let the run work until it needs training again, or ends.

        `result` is the result of its call, or the error that the call raised. The first time there
        is none. `seconds` is the run's share of the common training. Returns True if the run waits
        for training, and False if it has ended.
        """
        self._seconds_before += seconds
        self._resumed_at = time.perf_counter()
        if isinstance(result, BaseException):
            self._coroutine.throw(result)
        elif self.call is None:
            self._coroutine.switch()  # starts it: its function takes no argument
        else:
            self._coroutine.switch(result)  # makes `switch` in `train` return the result
        self._seconds_before += time.perf_counter() - self._resumed_at
        return not self._coroutine.dead


class LaneBackend:
    """A run's backend that trains through the run's lane.

    All other methods and attributes are those of the run's own `backend`. `digest` stands for the
    run's labels and the part of its model that is not sent (`Lane.join`).
    """

    def __init__(self, backend: Backend, lane: Lane, digest: str) -> None:
        self._backend = backend
        self._lane = lane
        self._digest = digest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def train(self, start: Sequence[Params], schedule: Schedule) -> TrainingResult:
        """Train the clients, together with those of other runs. See `Backend.train`."""
        kind = (self._backend.description, self._backend.buffer_size, self._digest)
        return self._lane.train(TrainingCall(self._backend, start, schedule, kind))


def run_in_lanes(
    works: Sequence[Callable[[Lane], object]], on_progress: Callable[[int, int], None]
) -> None:
    """Run all of `works` in lanes until they have ended. Each of them runs one run.

    `on_progress` is called before each common training, with the number of runs left and the latest
    round. If a run raises an exception, such as KeyboardInterrupt, all others are interrupted and
    save themselves, and the exception is raised again. Errors of a run are in its outcome instead.
    """
    waiting: deque[Lane] = deque()  # lanes that need training, the one that waits longest first
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
            num_samples = [float(lane.call.schedule.samples.sum()) for lane in batch]
            start = time.perf_counter()
            answers: Sequence[TrainingResult | BaseException]
            try:
                answers = train_jointly([lane.call for lane in batch])
            except (Exception, SystemExit) as error:  # of the user's model: all these runs fail
                answers = [error] * len(batch)
            seconds = time.perf_counter() - start
            # 3. Their runs work until they train again.
            total = max(sum(num_samples), 1.0)  # not 0: clients may train on no sample
            for lane, answer, count in zip(batch, answers, num_samples, strict=True):
                waiting.popleft()  # this lane: the batch is the beginning of `waiting`
                if lane.resume(answer, seconds * count / total):
                    waiting.append(lane)
    except BaseException:
        # Each run writes its summary when it is interrupted, and then raises KeyboardInterrupt.
        for lane in waiting:
            with suppress(KeyboardInterrupt):
                lane.resume(KeyboardInterrupt())
        raise


def _next_batch(waiting: Sequence[Lane]) -> list[Lane]:
    """Return the first lanes, as many as the first one's backend can train at once.

    It is always at least one lane, whatever its number of clients.
    """
    clients_left = waiting[0].call.backend.max_joint_clients
    batch: list[Lane] = []
    for lane in waiting:
        clients_left -= len(lane.call.schedule)
        if batch and clients_left < 0:
            break
        batch.append(lane)
    return batch


def train_jointly(calls: Sequence[TrainingCall]) -> list[TrainingResult]:
    """Return the result of each call, to the last bit what it would be alone.

    Calls that agree in their kind and in `Backend.joint_key`, and whose samples fit in memory
    together, are trained at once by the backend of the first.
    """
    groups: dict[Hashable, list[int]] = {}  # the numbers of calls that can be trained at once
    for number, call in enumerate(calls):
        key = (call.kind, call.backend.joint_key(call.schedule))
        groups.setdefault(key, []).append(number)
    results: dict[int, TrainingResult] = {}
    for numbers in groups.values():
        group_results = _train_group([calls[number] for number in numbers])
        results |= zip(numbers, group_results, strict=True)
    return [results[number] for number in range(len(calls))]


def _train_group(calls: Sequence[TrainingCall]) -> list[TrainingResult]:
    """Train calls of one group, and return the result of each.

    Calls whose samples do not fit in memory together are trained in two halves. The backend would
    otherwise split the common call at other clients than it splits each call alone, which may
    change the last bits.
    """
    backend = calls[0].backend
    # Padding that the join adds counts, too: it repeats the sample at position 0.
    schedule = concatenate_schedules([call.schedule for call in calls])
    num_samples = np.unique(schedule.positions).size
    is_too_large = backend.buffer_size is not None and num_samples > backend.buffer_size
    if is_too_large and len(calls) > 1:
        half = len(calls) // 2
        return _train_group(calls[:half]) + _train_group(calls[half:])
    start: list[Params] = []
    for call in calls:
        start.extend(call.start)
    joint = backend.train(start, schedule)
    # Cut the common result into those of the calls. A schedule may have fewer steps, and narrower
    # batches, than the common one, which was filled up.
    results = []
    first = 0
    for call in calls:
        num_clients, num_steps, width = call.schedule.positions.shape
        rows = joint.rows(slice(first, first + num_clients))
        results.append(replace(rows, losses=rows.losses[:, :num_steps, :width]))
        first += num_clients
    return results
