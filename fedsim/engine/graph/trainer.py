"""Training of a cohort of fixed capacity by replaying recorded steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
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
MOST_LAUNCHES = 20_000
"""Kernels in one recording: a node of a graph takes memory on the device and time when the graph is made."""


@dataclass(frozen=True)
class Trained:
    """What K clients came to, on the device and in the layout of `State`: changes of the parameters [K, P] and of the
    statistics [K, Q], the samples' losses [S, K, B], and the momentum buffers [K, P] if there are any. `losses` is
    overwritten by the next training."""

    parameters: Tensor
    statistics: Tensor
    losses: Tensor
    momentum: Tensor | None


class Trainer:
    """A program, its buffers for R clients, S steps and batches of B, and what was recorded of it so far."""

    def __init__(self, tables: Tables, state: State, optimizer: FlatOptimizer, program: StepProgram) -> None:
        self.tables, self.state, self.optimizer, self.program = tables, state, optimizer, program
        self._recorded: dict[tuple[int, bool], Body] = {}
        self._longest = longest_recording(program.launches)

    @torch.no_grad()
    def train(self, start: Sequence[Params], schedule: Schedule, recorder: Recorder) -> Trained:
        """Train K <= R clients by a schedule that fits, each from its model. Does not wait for the device."""
        steps = int(np.count_nonzero(schedule.counts.any(0)))
        blocks = recordings(self._forms(schedule, steps), self._longest)
        for block in blocks:
            if block not in self._recorded:
                self._recorded[block] = self._record(*block, recorder)
        models = list({id(model): model for model in start}.values())
        number = {id(model): owner for owner, model in enumerate(models)}
        scalars = self.optimizer.scalars(schedule.lr, steps)
        self.tables.fill(schedule, scalars, [number[id(model)] for model in start])
        self.state.load(models, self.tables.owner)
        self.program.reset()
        for block in blocks:
            self._recorded[block]()
        return self._trained(len(schedule), steps)

    def _forms(self, schedule: Schedule, steps: int) -> list[bool]:
        """Of each step, whether it is one of full batches, where the program makes a difference."""
        if not self.program.two_forms:
            return [False] * steps
        counts = schedule.counts[:, :steps]
        forms: list[bool] = ((counts == self.tables.batch) | (counts == 0)).all(0).tolist()
        return forms

    def _record(self, steps: int, full: bool, recorder: Recorder) -> Body:
        def body() -> None:
            for _ in range(steps):
                self.program.step(full=full)
                self.tables.advance()

        return recorder.record(body, self.tables.clear)

    def _trained(self, count: int, steps: int) -> Trained:
        parameters, statistics = self.state.changes(count)
        momentum = self.program.momentum()
        return Trained(
            parameters,
            statistics,
            self.tables.losses[:steps, :count],
            None if momentum is None else momentum[:count].clone(),
        )


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
