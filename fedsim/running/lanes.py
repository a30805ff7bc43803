"""The runs of a sweep side by side in one process: coroutines (greenlets), suspended where they
train, in common batches. The clock of each counts its own work and, in proportion to its samples,
its share of the common training."""

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
    """The arguments of `Backend.train`, and the backend that they are for. One backend trains calls
    of one `kind`."""

    backend: Backend
    start: Sequence[Params]
    schedule: Schedule
    kind: Hashable = None


class Lane:
    """One run as a coroutine: it works between `resume` and its next `call` for training, and is
    suspended else."""

    def __init__(self, work: Callable[["Lane"], object]) -> None:
        self._coroutine = greenlet(lambda: work(self))
        self._seconds, self._since = 0.0, 0.0
        self._simulation: Simulation | None = None
        self.call: Any = None

    def join(self, simulation: Simulation, model: nn.Module) -> None:
        """Let the simulation's training go through this run, and give it the run's clock. `model`
        holds what its backend does not train: runs in which that or their labels differ are not
        trained by one backend."""
        self._simulation = simulation
        sent, engine = traveling(model), simulation.components.engine
        frozen = [(name, value) for name, value in model.state_dict().items() if name not in sent]
        digest = hashlib.sha256(engine.data.y.cpu().numpy().tobytes())
        digest.update(
            b"".join(name.encode() + value.cpu().numpy().tobytes() for name, value in frozen)
        )
        engine.backend = cast(Backend, LaneBackend(engine.backend, self, digest.hexdigest()))
        simulation.components = replace(simulation.components, now=self.now)

    def train(self, call: TrainingCall) -> TrainingResult:
        """Suspend the run until somebody has answered `call`. Raises what answering it raised."""
        self.call = call
        assert self._coroutine.parent is not None
        with torch.enable_grad():  # a selector's no_grad is not for the others
            result: TrainingResult = self._coroutine.parent.switch()
        return result

    def now(self) -> float:
        """Seconds that this run has worked, with its share of the common training."""
        return self._seconds + time.perf_counter() - self._since

    @property
    def round(self) -> int:
        """The one that it is in (from 1); 0 before its first."""
        return 0 if self._simulation is None else self._simulation.round + 1

    def resume(
        self, result: TrainingResult | BaseException | None = None, seconds: float = 0.0
    ) -> bool:
        """Let it work with the result of its call, whose training took so long, or the error that
        it raised. Returns whether it calls again; else it has ended."""
        self._seconds += seconds
        self._since = time.perf_counter()
        if isinstance(result, BaseException):
            self._coroutine.throw(result)
        else:
            self._coroutine.switch(*([result] if self.call else []))
        self._seconds += time.perf_counter() - self._since
        return not self._coroutine.dead


class LaneBackend:
    """A backend of one run that leaves training to the scheduler of all runs, and does the rest
    itself."""

    def __init__(self, backend: Backend, run: Lane, frozen_digest: str) -> None:
        self._backend, self._run, self._frozen_digest = backend, run, frozen_digest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def train(self, start: Sequence[Params], schedule: Schedule) -> TrainingResult:
        kind = self._backend.description, self._backend.buffer_size, self._frozen_digest
        return self._run.train(TrainingCall(self._backend, start, schedule, kind))


def run_in_lanes(
    works: Sequence[Callable[[Lane], object]], on_progress: Callable[[int, int], None]
) -> None:
    """Run all of `works` side by side, to their end. `on_progress` is told how many are left, and
    the latest round, whenever some train. What a run raises, as on Ctrl-C, interrupts all others,
    and is raised."""
    waiting: deque[Lane] = deque()
    answers: Sequence[TrainingResult | BaseException]
    try:
        waiting.extend(run for run in map(Lane, works) if run.resume())
        while waiting:
            batch: list[Lane] = []
            space = waiting[0].call.backend.max_joint_clients
            for (
                run
            ) in waiting:  # those that have waited longest, as many as are worth training at once
                space -= len(run.call.schedule)
                if batch and space < 0:
                    break
                batch.append(run)
            on_progress(len(waiting), batch[-1].round)
            start, samples = (
                time.perf_counter(),
                [float(run.call.schedule.samples.sum()) for run in batch],
            )
            try:
                answers = train_jointly([run.call for run in batch])
            except (Exception, SystemExit) as error:  # of a user's model: each run ends as failed
                answers = [error] * len(batch)
            seconds = time.perf_counter() - start
            for run, answer, count in zip(batch, answers, samples, strict=True):
                waiting.popleft()
                if run.resume(answer, seconds * count / max(sum(samples), 1.0)):
                    waiting.append(run)
    except BaseException:
        for run in waiting:
            with suppress(KeyboardInterrupt):
                run.resume(KeyboardInterrupt())
        raise


def train_jointly(calls: Sequence[TrainingCall]) -> list[TrainingResult]:
    """The result of each call, to the last bit what it would be alone; those that agree in their
    kind and in `Backend.joint_key`, and whose samples find room together, are trained at once, by
    the backend of the first."""
    groups: dict[Hashable, list[int]] = {}
    for number, call in enumerate(calls):
        groups.setdefault((call.kind, call.backend.joint_key(call.schedule)), []).append(number)
    results: dict[int, TrainingResult] = {}
    for numbers in groups.values():
        found = _trained_at_once([calls[number] for number in numbers])
        results |= dict(zip(numbers, found, strict=True))
    return [results[number] for number in range(len(calls))]


def _trained_at_once(calls: Sequence[TrainingCall]) -> list[TrainingResult]:
    """In two halves where the samples do not find room together: a backend would cut them elsewhere
    than each alone."""
    backend = calls[0].backend
    needed = sum(np.unique(call.schedule.positions).size for call in calls)
    if backend.buffer_size is not None and needed > backend.buffer_size and len(calls) > 1:
        half = len(calls) // 2
        return [*_trained_at_once(calls[:half]), *_trained_at_once(calls[half:])]
    start = [model for call in calls for model in call.start]
    joint = backend.train(start, concatenate_schedules([call.schedule for call in calls]))
    results, first = [], 0
    for call in calls:
        count, steps, width = call.schedule.positions.shape
        own = joint.rows(slice(first, first + count))
        results.append(replace(own, losses=own.losses[:, :steps, :width]))
        first += count
    return results
