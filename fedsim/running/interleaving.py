"""Runs of a sweep side by side: they take turns, and train together in one batch.

Each run is a coroutine, so that nothing of it has to be written for this. Their clocks count what they do themselves
and, by samples, their share of the common training.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from greenlet import greenlet

from fedsim.config.plan import Plan
from fedsim.engine.engine import Request, Trained
from fedsim.errors import at_least, check

if TYPE_CHECKING:
    from fedsim.simulation import Simulation

SHARED = ("dataset", "model", "optimizer", "local", "engine", "device", "data_dir", "cache_dir")
"""Runs that agree in these keys of the config can train together."""


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """conf/hydra/launcher/lanes.yaml."""

    max_lanes: int

    def __post_init__(self) -> None:
        check(at_least("max_lanes", self.max_lanes, 1))

    def groups(self, plans: Sequence[Plan]) -> list[list[Plan]]:
        """Plans that can train together, at most `max_lanes` each; a folder that comes twice is run once."""
        alike: dict[str, list[Plan]] = {}
        for plan in {plan.folder: plan for plan in plans}.values():
            key = json.dumps([plan.config.get(name) for name in SHARED], sort_keys=True, default=str)
            alike.setdefault(key, []).append(plan)
        size = self.max_lanes
        return [group[start : start + size] for group in alike.values() for start in range(0, len(group), size)]


class Lane:
    """One run as a coroutine: it works between `resume` and its next request for training, and rests else."""

    def __init__(self, work: Callable[["Lane"], object]) -> None:
        self._coroutine = greenlet(lambda: work(self))
        self._seconds, self._since = 0.0, 0.0
        self._request: Request | None = None

    # --- for the run itself --------------------------------------------------------------------------------------

    def join(self, simulation: "Simulation") -> None:
        """Let this lane train for the simulation, and give it the lane's time."""
        simulation.parts.engine.meeting = self.train
        simulation.parts = replace(simulation.parts, now=self.now)

    def train(self, request: Request) -> Trained:
        """Rest until the request is answered. Raises what its answering raised."""
        self._request = request
        assert self._coroutine.parent is not None
        with torch.enable_grad():  # a selector's no_grad is not for the others
            trained: Trained = self._coroutine.parent.switch()
        return trained

    def now(self) -> float:
        """Seconds that this lane has worked, with its share of the common training."""
        return self._seconds + time.perf_counter() - self._since

    # --- for whoever conducts ------------------------------------------------------------------------------------

    @property
    def request(self) -> Request:
        """What it waits for."""
        assert self._request is not None
        return self._request

    def resume(self, trained: Trained | None = None, seconds: float = 0.0) -> bool:
        """Let it work with what it asked for, which took so long. True: it asks again, False: it has ended."""
        self._seconds += seconds
        self._since = time.perf_counter()
        self._coroutine.switch(trained) if self._request else self._coroutine.switch()
        self._seconds += time.perf_counter() - self._since
        return not self._coroutine.dead

    def fail(self, error: BaseException) -> bool:
        """As `resume`, with an error in place of what it asked for."""
        self._since = time.perf_counter()
        self._coroutine.throw(error)
        self._seconds += time.perf_counter() - self._since
        return not self._coroutine.dead


def run_lanes(works: Sequence[Callable[[Lane], object]], told: Callable[[int, int], None]) -> None:
    """Run all of `works` in lanes, to their end.

    `told` is called with the number of lanes that are left and the latest round, whenever some train. What a lane
    raises, as on Ctrl-C, interrupts all others, and is raised.
    """
    lanes = [Lane(work) for work in works]
    waiting: deque[Lane] = deque()
    try:
        waiting.extend(lane for lane in lanes if lane.resume())
        while waiting:
            party = _party(waiting)
            told(len(waiting), party[-1].request.round)
            _serve(party, waiting)
    except BaseException:
        for lane in waiting:
            with suppress(KeyboardInterrupt):
                lane.fail(KeyboardInterrupt())
        raise


def _party(waiting: deque[Lane]) -> list[Lane]:
    """Those who have waited longest, as many as are worth training at once; they stay in the queue until served.

    They work on before the others train, so that what they have trained is still in the cache. All of them have chosen
    the same engine, which may depend on the length of a run.
    """
    first = waiting[0].request.engine
    room = first.common_clients
    party: list[Lane] = []
    for lane in waiting:
        room -= len(lane.request.ids)
        if party and (room < 0 or lane.request.engine.description != first.description):
            break
        party.append(lane)
    return party


def _serve(party: Sequence[Lane], waiting: deque[Lane]) -> None:
    """Answer the requests of those in front, and queue them again."""
    requests = [lane.request for lane in party]
    start = time.perf_counter()
    try:
        answers: Sequence[Trained | Exception] = requests[0].engine.train_all(requests)
    except Exception as error:
        answers = [error] * len(party)
    seconds = time.perf_counter() - start
    work = [0.0 if isinstance(a, Exception) else float(a.samples.sum()) for a in answers]
    for lane, answer, samples in zip(party, answers, work, strict=True):
        waiting.popleft()
        share = seconds * samples / max(sum(work), 1.0)
        if lane.fail(answer) if isinstance(answer, Exception) else lane.resume(answer, share):
            waiting.append(lane)
