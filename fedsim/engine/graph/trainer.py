"""Training of a cohort of fixed capacity by replaying recorded steps."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.engine.graph.optimizers import FlatOptimizer
from fedsim.engine.graph.program import StepProgram
from fedsim.engine.graph.recorder import Body, Recorder
from fedsim.engine.graph.state import State
from fedsim.engine.graph.tables import Tables
from fedsim.engine.schedule import Schedule
from fedsim.types import Params

MOST_STEPS = 64
"""Local steps in one recording."""
MOST_LAUNCHES = 5_000
"""Kernels in one recording: a node of a graph takes memory on the device and time when the graph is made."""


@dataclass(frozen=True)
class Trained:
    """What K clients came to, on the device: changes of all tensors that travel and the momentum buffers, if there are
    any, as rows that `State.named` takes, and the samples' losses [S, K, B], which the next training overwrites."""

    changes: Tensor
    losses: Tensor
    momentum: Tensor | None


class Track:
    """A program, and what was recorded of it so far."""

    def __init__(self, program: StepProgram, number: int) -> None:
        self.program, self.number = program, number
        self._recorded: dict[tuple[int, bool], Body] = {}
        self._longest = longest_recording(program.launches)

    def bodies(self, counts: NDArray[np.int64], tables: Tables, recorder: Recorder) -> list[Body]:
        """Recordings that make up the steps of clients with these `counts` [R, S]; those not made yet are made."""
        if not self.program.two_forms:
            forms = [False] * int(np.count_nonzero(counts.any(0)))
        else:
            forms = [bool((column == tables.batch).all()) for column in counts.T if column.any()]
        return [self._body(steps, full, tables, recorder) for steps, full in recordings(forms, self._longest)]

    def _body(self, steps: int, full: bool, tables: Tables, recorder: Recorder) -> Body:
        def step() -> None:
            self.program.step(full=full)
            self.program.tables.advance()

        if (steps, full) not in self._recorded:
            self._recorded[steps, full] = recorder.record(step, steps, tables.clear, self.number)
        return self._recorded[steps, full]


class Trainer:
    """Buffers for R clients, S steps and batches of B, and the programs on them: one for all clients, or one for each
    (`one_each`)."""

    def __init__(self, tables: Tables, state: State, optimizer: FlatOptimizer, programs: Sequence[StepProgram]) -> None:
        self.tables, self.state, self.optimizer = tables, state, optimizer
        self._tracks = [Track(program, number) for number, program in enumerate(programs)]
        self._one_each = len(programs[0].state) == 1

    @torch.no_grad()
    def train(self, start: Sequence[Params], schedule: Schedule, recorder: Recorder) -> Trained:
        """Train K <= R clients by a schedule with batches of B, each from its model. Does not wait for the device."""
        replays = [
            track.bodies(counts, self.tables, recorder)
            for track, counts in zip(self._tracks, self._counts(schedule), strict=False)
        ]
        models = list({id(model): model for model in start}.values())
        number = {id(model): owner for owner, model in enumerate(models)}
        scalars = self.optimizer.scalars(schedule.lr, schedule.counts.shape[1])
        self.tables.fill(schedule, scalars, [number[id(model)] for model in start])
        self.state.load(models, self.tables.owner)
        self.optimizer.reset()
        with recorder.side_by_side(len(replays)):
            for replay in _in_turns(replays):
                replay()
        return self._trained(len(schedule), schedule.counts.shape[1])

    def _counts(self, schedule: Schedule) -> list[NDArray[np.int64]]:
        """Those of each track's clients [., S]."""
        counts = schedule.counts
        return [counts[row : row + 1] for row in range(len(counts))] if self._one_each else [counts]

    def _trained(self, count: int, steps: int) -> Trained:
        momentum = self.optimizer.momentum
        return Trained(
            self.state.changes(count),
            self.tables.losses[:steps, :count],
            None if momentum is None else self.state.packed(momentum[:count]),
        )


def _in_turns(lists: Sequence[list[Body]]) -> Iterator[Body]:
    """The first of each list, the second of each, and so on: all tracks start at once."""
    for some in zip_longest(*lists):
        yield from (body for body in some if body is not None)


def longest_recording(launches: int) -> int:
    """The largest power of two of steps, each of so many kernels, that goes into one recording."""
    most = max(1, min(MOST_STEPS, MOST_LAUNCHES // max(launches, 1)))
    return 1 << (most.bit_length() - 1)


def recordings(forms: Sequence[bool], longest: int) -> list[tuple[int, bool]]:
    """Recordings, each of a power of two of steps of one form and at most `longest`, that make up these steps.

    Powers of two, so that a few recordings do for any number of steps, and no step is replayed in vain.
    """
    found: list[tuple[int, bool]] = []
    for form, run in groupby(forms):
        left = len(list(run))
        while left:
            size = min(longest, 1 << (left.bit_length() - 1))
            found.append((size, form))
            left -= size
    return found
