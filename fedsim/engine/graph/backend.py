"""The graph backend: all local steps of a cohort as a few launches.

The steps are recorded once on static buffers, and replayed in every round.
"""

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
from fedsim.engine.graph.buffers import ModelBuffers, ScheduleTable
from fedsim.engine.graph.recorder import Body, NotRecordedError, Recorder, recorder_for
from fedsim.engine.graph.steps import (
    RecordableLinearSteps,
    RecordableSteps,
    SingleClientSteps,
    TrainingPasses,
)
from fedsim.engine.optimizers import SGD, Adam
from fedsim.engine.schedule import Schedule
from fedsim.engine.torch_backend import TorchBackend
from fedsim.engine.training_copies import reject_hidden_randomness

MAX_STEPS = 64
"""Maximum number of local steps in one recording."""
MAX_KERNELS = 5_000
"""Maximum number of kernels in one recording. A node of a graph takes memory on the device, and
time when the graph is made."""
MAX_TRAINERS = 8
"""Maximum number of sizes of cohorts and batches whose recordings are kept."""


class GraphBackend(TorchBackend):
    """Replays CUDA graphs of the local steps. On a CPU, it makes the same steps one by one.

    The steps read batches, models, dropout keys and learning rates from static buffers. Clients
    with fewer samples or steps are masked. For a chain of linear layers in float32, the products of
    all clients are computed at once, and at least two clients train: torch multiplies a single pair
    of matrices in another order of additions than several pairs. Other models train client by
    client, side by side.
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
        x, optimizer = self.data.x, workload.optimizer
        # A subclass may have another rule.
        if type(optimizer) not in (SGD, Adam):
            name = type(optimizer).__name__
            text = f"cannot record the steps of {name}, only those of SGD and Adam"
            raise ConfigError([Problem("", ..., text, "engine=batched runs it")])
        self.chain = workload.linear_chain(precision)
        self.recorder = recorder_for(x.device)
        self._passes: TrainingPasses | None = None
        if self.chain is None:
            self._passes = TrainingPasses(workload, precision, self.layout)
        if len(x):
            reject_hidden_randomness(workload.model, x)
            if self._passes is not None:
                self._passes.try_out(x)
        self._trainers: OrderedDict[tuple[int, int, bool], RecordedTrainer] = OrderedDict()
        """Trainers by clients, batch size and whether there is a correction; the last is the
        latest."""

    @property
    def description(self) -> str:
        kind = "one client a stream" if self.chain is None else "linear layers"
        return f"graph, {kind}, {self.recorder.description}"

    def joint_key(self, schedule: Schedule) -> Hashable:
        """Return a key that contains the batch size, to which all batches of a call are padded.

        On a CPU, products of one shape give the same bits for any number of clients from two on.
        """
        return schedule.lr, schedule.positions.shape[2], schedule.correction.kind

    def _train_chunk(self, start: Sequence[Params], schedule: Schedule) -> TrainingResult:
        try:
            return self._trainer(schedule).train(start, schedule, self.recorder)
        except NotRecordedError as error:
            tell(f"engine=graph: not recorded (slower, same results): {error}")
            self.recorder = Recorder(str(error))
        self._free_memory()
        return self._train_chunk(start, schedule)

    def _free_memory(self) -> None:
        self._trainers.clear()
        super()._free_memory()

    def _trainer(self, schedule: Schedule) -> "RecordedTrainer":
        """Return a trainer that fits the `schedule`, with recordings of earlier rounds if
        possible."""
        count, steps, batch = schedule.positions.shape
        corrected = bool(schedule.correction)
        min_rows = count if self.chain is None else max(count, 2)
        rows = min(round_up(min_rows), max(min_rows, self.chunk_size))
        if self.chain is None:
            # Unused rows cost nothing, so a trainer for more clients serves as well.
            of_kind = [r for r, *kind in self._trainers if kind == [batch, corrected]]
            rows = min((r for r in of_kind if r >= rows), default=rows)
        trainer = self._trainers.pop((rows, batch, corrected), None)
        if trainer is None or trainer.table.num_steps < steps:
            trainer = self._new_trainer(rows, round_up(steps), batch, corrected)
        self._trainers[rows, batch, corrected] = trainer
        if len(self._trainers) > MAX_TRAINERS:
            self._trainers.popitem(last=False)
        return trainer

    def _new_trainer(self, rows: int, steps: int, batch: int, corrected: bool) -> "RecordedTrainer":
        data, optimizer = self.data, self.optimizer
        assert isinstance(optimizer, SGD | Adam)
        like = data.x.new_empty(0, dtype=real_dtype(data.x))
        models = ModelBuffers(self.model, rows, like, optimizer.num_buffers, corrected)
        num_scalars = optimizer.scalars(0.0, 1).shape[1]
        table = ScheduleTable(steps, rows, batch, num_scalars, like)
        programs: list[RecordableSteps] = []
        if self.chain is not None:
            programs.append(
                RecordableLinearSteps(data, table, models, optimizer, slice(0, rows), self.chain)
            )
        else:
            assert self._passes is not None
            for row in range(rows):
                client = slice(row, row + 1)
                programs.append(
                    SingleClientSteps(data, table, models, optimizer, client, self._passes)
                )
        num_layers = sum(not list(layer.children()) for layer in self.model.modules())
        max_steps = longest_recording(launches=20 + 8 * num_layers)
        return RecordedTrainer(table, models, optimizer, programs, max_steps)


class RecordedTrainer:
    """Buffers for R clients, S steps and batches of B, the programs on them, and their
    recordings."""

    def __init__(
        self,
        table: ScheduleTable,
        models: ModelBuffers,
        optimizer: SGD | Adam,
        programs: Sequence[RecordableSteps],
        max_steps: int,
    ) -> None:
        self.table = table
        self.models = models
        self.optimizer = optimizer
        self.programs = programs
        self._max_steps = max_steps
        self._recorded: dict[tuple[int, int, bool], Body] = {}

    @torch.no_grad()
    def train(
        self, start: Sequence[Params], schedule: Schedule, recorder: Recorder
    ) -> TrainingResult:
        """Train at most R clients, each from its model. The host waits once."""
        count, steps = schedule.counts.shape
        replays = []
        for number, program in enumerate(self.programs):
            if program.clients.start < count:
                replays.append(self._recordings(number, schedule.counts[program.clients], recorder))
        self.table.fill(schedule, self.optimizer.scalars(schedule.lr, steps))
        self.models.load(start, schedule.correction.shift)
        with recorder.side_by_side(len(replays)):
            # The first recording of each program, then the second of each, so that all start early.
            for turn in zip_longest(*replays):
                for replay in turn:
                    if replay is not None:
                        replay()
        delta = self.models.changes(count)
        losses = self.table.losses[:steps, :count]
        if not losses.is_cuda:
            losses = losses.clone()  # The next training overwrites the table.
        values, finite = fetched(losses, delta)
        has_momentum = isinstance(self.optimizer, SGD) and self.optimizer.momentum
        momentum = self.models.momentum(count) if has_momentum else None
        return TrainingResult(delta, values.transpose(1, 0, 2), momentum, finite)

    def _recordings(self, number: int, counts: Ints, recorder: Recorder) -> list[Body]:
        """Return recordings of a program that make the steps of clients with `counts` [R, S]."""
        program = self.programs[number]
        full_steps = []
        for step_counts in counts.T:
            if step_counts.any():
                full = bool((step_counts == self.table.batch).all())
                full_steps.append(full and program.has_full_form)
        bodies = []
        for steps, full in split_into_recordings(full_steps, self._max_steps):
            key = (number, steps, full)
            if key not in self._recorded:
                step = partial(program.step, full=full)
                self._recorded[key] = recorder.record(step, steps, self.table.clear, track=number)
            bodies.append(self._recorded[key])
        return bodies


def longest_recording(launches: int) -> int:
    """Return the largest power of two of steps, with `launches` kernels each, in one recording."""
    max_steps = max(1, min(MAX_STEPS, MAX_KERNELS // max(launches, 1)))
    return 1 << (max_steps.bit_length() - 1)


def split_into_recordings(full_steps: Sequence[bool], max_steps: int) -> list[tuple[int, bool]]:
    """Split a sequence of steps into recordings: number of steps, and whether these are full.

    A recording has steps of one form. Numbers are powers of two up to `max_steps`, so that few
    recordings serve all rounds.
    """
    recordings: list[tuple[int, bool]] = []
    for full, group in groupby(full_steps):
        remaining = len(list(group))
        while remaining:
            size = min(max_steps, 1 << (remaining.bit_length() - 1))
            recordings.append((size, full))
            remaining -= size
    return recordings


def round_up(count: int) -> int:
    """Round up to four significant binary digits: few sizes, and at most an eighth of each
    unused."""
    unit = 1 << max(count.bit_length() - 4, 0)
    return -(-count // unit) * unit
