"""All local steps of a cohort as a few launches: recorded on static buffers once, replayed in every
round."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from functools import partial
from itertools import groupby, zip_longest
from typing import Literal

import torch

from fedsim.core.arrays import Ints
from fedsim.core.errors import ConfigError, Problem
from fedsim.core.flat import real_dtype
from fedsim.core.types import Params
from fedsim.engine.backend import TrainingResult, Workload, fetched
from fedsim.engine.device import Precision, tell
from fedsim.engine.graph.buffers import State, Tables
from fedsim.engine.graph.recorder import Body, NotRecordedError, Recorder, recorder_for
from fedsim.engine.graph.steps import LinearProgram, OneByOne, Passes, StepProgram
from fedsim.engine.model import refuse_hidden_randomness
from fedsim.engine.optimizers import SGD, Adam
from fedsim.engine.schedule import Schedule
from fedsim.engine.torch_backend import TorchBackend

MOST_STEPS = 64
"""Local steps in one recording."""
MOST_LAUNCHES = 5_000
"""Kernels in one recording: a node of a graph takes memory on the device and time when the graph is
made."""
MOST_TRAINERS = 8
"""Sizes of cohorts and batches that are kept recorded."""


class Trainer:
    """Buffers for R clients, S steps and batches of B, the programs on them, and what was recorded
    so far."""

    def __init__(
        self,
        tables: Tables,
        state: State,
        optimizer: SGD | Adam,
        programs: Sequence[StepProgram],
        longest: int,
    ) -> None:
        self.tables, self.state, self.optimizer, self.programs = tables, state, optimizer, programs
        self._longest = longest
        self._recorded: dict[tuple[int, int, bool], Body] = {}

    @torch.no_grad()
    def train(
        self, start: Sequence[Params], schedule: Schedule, recorder: Recorder
    ) -> TrainingResult:
        """Train K <= R clients by a schedule with batches of B, each from its model. The host waits
        once."""
        count, steps = schedule.counts.shape
        replays = [
            self._bodies(number, schedule.counts[program.rows], recorder)
            for number, program in enumerate(self.programs)
            if program.rows.start < count
        ]
        self.tables.fill(schedule, self.optimizer.scalars(schedule.lr, steps))
        self.state.load(start, schedule.correction.shift)
        with recorder.side_by_side(len(replays)):
            for turn in zip_longest(
                *replays
            ):  # the first of each, the second of each: all tracks start at once
                for replay in turn:
                    if replay is not None:
                        replay()
        delta = self.state.changes(count)
        kept = self.tables.losses[:steps, :count]  # which the next training overwrites
        losses, finite = fetched(kept if kept.is_cuda else kept.clone(), delta)
        has_momentum = isinstance(self.optimizer, SGD) and self.optimizer.momentum
        momentum = self.state.trained(self.state.buffers[0][:count]) if has_momentum else None
        return TrainingResult(delta, losses.transpose(1, 0, 2), momentum, finite)

    def _bodies(self, number: int, counts: Ints, recorder: Recorder) -> list[Body]:
        """Recordings of that program which make up the steps of clients with these `counts` [R,
        S]."""
        program, used = self.programs[number], counts.T[counts.any(0)]
        forms = [program.two_forms and bool((column == self.tables.batch).all()) for column in used]
        keys = [(number, steps, full) for steps, full in recordings(forms, self._longest)]
        for key in keys:
            if key not in self._recorded:
                step = partial(program.step, full=key[2])
                self._recorded[key] = recorder.record(step, key[1], self.tables.clear, number)
        return [self._recorded[key] for key in keys]


def longest_recording(launches: int) -> int:
    """The largest power of two of steps, each of so many kernels, that goes into one recording."""
    most = max(1, min(MOST_STEPS, MOST_LAUNCHES // max(launches, 1)))
    return 1 << (most.bit_length() - 1)


def recordings(forms: Sequence[bool], longest: int) -> list[tuple[int, bool]]:
    """Recordings that make up these steps: of powers of two, so that few do, of one form, and at
    most `longest`."""
    found: list[tuple[int, bool]] = []
    for form, run in groupby(forms):
        left = len(list(run))
        while left:
            size = min(longest, 1 << (left.bit_length() - 1))
            found.append((size, form))
            left -= size
    return found


class GraphBackend(TorchBackend):
    """CUDA graphs of the local steps, whose batches, models, dropout keys and learning rate are
    read from static buffers. Clients with fewer samples or steps are masked. On a CPU, the same
    step by step.

    Of a chain of linear layers in float32, all clients' matrices are multiplied at once, and at
    least two clients trained (torch multiplies one pair of matrices in another order of additions
    than several); other models train client by client, side by side.
    """

    fewest_clients = 2

    def __init__(
        self,
        workload: Workload,
        *,
        precision: Precision,
        chunk_size: int | Literal["auto"],
        deterministic: bool | None = None,
    ) -> None:
        super().__init__(workload, precision, deterministic, chunk_size)
        x, rule = self.data.x, workload.optimizer
        if type(rule) not in (SGD, Adam):
            text = f"cannot record the steps of {type(rule).__name__}, only those of SGD and Adam"
            raise ConfigError([Problem("", ..., text, "engine=batched runs it")])
        self.chain, self.recorder = workload.linear_chain(precision), recorder_for(x.device)
        self._passes = None if self.chain is not None else Passes(workload, precision, self.layout)
        if len(x):
            refuse_hidden_randomness(workload.model, x)
            if self._passes is not None:
                self._passes.try_out(x)
        self._trainers: OrderedDict[tuple[int, int, bool], Trainer] = OrderedDict()

    @property
    def description(self) -> str:
        kind = "one client a stream" if self.chain is None else "linear layers"
        return f"graph, {kind}, {self.recorder.description}"

    def joint_key(self, schedule: Schedule) -> Hashable:
        """Batches are padded to the widest of the call, and products of one shape are the same for
        any number of clients from two on, the fewest that are ever trained (on a CPU)."""
        return schedule.lr, schedule.positions.shape[2], schedule.correction.kind

    def _train_chunk(self, start: Sequence[Params], schedule: Schedule) -> TrainingResult:
        try:
            return self._trainer(schedule).train(start, schedule, self.recorder)
        except NotRecordedError as error:
            tell(f"engine=graph: not recorded, which is slower and else the same: {error}")
            self.recorder = Recorder(str(error))
        self._free_memory()
        return self._train_chunk(start, schedule)

    def _free_memory(self) -> None:
        self._trainers.clear()
        super()._free_memory()

    def _trainer(self, schedule: Schedule) -> Trainer:
        (count, steps, batch), corrected = schedule.positions.shape, bool(schedule.correction)
        least = count if self.chain is None else max(count, 2)
        rows = min(capacity(least), max(least, self.chunk_size))
        if self.chain is None:  # rows that are not used cost nothing
            kept = [r for r, *kind in self._trainers if kind == [batch, corrected]]
            rows = min((r for r in kept if r >= rows), default=rows)
        trainer = self._trainers.pop((rows, batch, corrected), None)
        if trainer is None or trainer.tables.steps < steps:
            trainer = self._new_trainer(rows, capacity(steps), batch, corrected)
        self._trainers[rows, batch, corrected] = trainer
        if len(self._trainers) > MOST_TRAINERS:
            self._trainers.popitem(last=False)
        return trainer

    def _new_trainer(self, rows: int, steps: int, batch: int, corrected: bool) -> Trainer:
        data, rule, like = (
            self.data,
            self.optimizer,
            self.data.x.new_empty(0, dtype=real_dtype(self.data.x)),
        )
        assert isinstance(rule, SGD | Adam)
        state = State(self.model, rows, like, rule.num_buffers, corrected)
        tables = Tables(steps, rows, batch, rule.scalars(0.0, 1).shape[1], like)
        programs: list[StepProgram]
        if self.chain is not None:
            programs = [LinearProgram(data, tables, state, rule, slice(0, rows), self.chain)]
        else:
            assert self._passes is not None
            each = [slice(row, row + 1) for row in range(rows)]
            programs = [OneByOne(data, tables, state, rule, own, self._passes) for own in each]
        launches = 20 + 8 * sum(not list(layer.children()) for layer in self.model.modules())
        return Trainer(tables, state, rule, programs, longest_recording(launches))


def capacity(count: int) -> int:
    """`count` rounded up to four significant binary digits: few sizes, and at most an eighth of
    each unused."""
    unit = 1 << max(count.bit_length() - 4, 0)
    return -(-count // unit) * unit
