"""All local steps of a cohort as a few launches: recorded on static buffers once, replayed in every round."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import groupby, zip_longest
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.core.errors import check, rule
from fedsim.core.flat import real_dtype
from fedsim.core.types import Params
from fedsim.engine.backend import TrainingResult, Workload
from fedsim.engine.device import Precision, tell
from fedsim.engine.engine import fetched
from fedsim.engine.graph import triton_chain
from fedsim.engine.graph.buffers import State, Tables
from fedsim.engine.graph.optimizers import FlatOptimizer, flat_optimizer
from fedsim.engine.graph.recorder import Body, Eager, NotRecordedError, Recorder, recorder_for
from fedsim.engine.graph.steps import LinearProgram, OneByOne, Passes, StepProgram
from fedsim.engine.model import refuse_hidden_randomness
from fedsim.engine.schedule import Schedule
from fedsim.engine.torch_backend import TorchBackend, joined


class ProgramKind(Enum):
    """What takes the steps of a model; values are for the summary."""

    TRITON = "Triton kernels"
    LINEAR = "linear layers"
    ONE_BY_ONE = "one client a stream"

    @property
    def least_rows(self) -> int:
        """Rows that are trained at least: torch multiplies one pair of matrices in another order of additions than
        several."""
        return 2 if self is ProgramKind.LINEAR else 1


def choose_program(workload: Workload, precision: Precision, wanted: Literal["auto", "torch", "triton"]) -> ProgramKind:
    """What takes the steps where `engine.program` is `wanted`. Raises `ConfigError` for `triton` where it cannot."""
    problem = "engine.precision is bf16" if precision == "bf16" else triton_chain.unfit(workload)
    check(
        rule(wanted != "triton" or problem is None, "program", wanted, f"Triton: {problem}", "program=auto falls back")
    )
    if wanted != "torch" and problem is None:
        return ProgramKind.TRITON
    chain = workload.chain
    linear = chain is not None and chain.is_linear and precision != "bf16"
    return ProgramKind.LINEAR if linear else ProgramKind.ONE_BY_ONE


def new_programs(
    kind: ProgramKind,
    workload: Workload,
    tables: Tables,
    state: State,
    optimizer: FlatOptimizer,
    passes: Passes | None,
    precision: Precision,
) -> list[StepProgram]:
    """One program on these buffers, or one for each client; `passes` is for the latter."""
    if kind is ProgramKind.TRITON:
        products: triton_chain.Products = "tf32" if precision == "tf32" else "tf32x3"
        return [triton_chain.TritonChain(workload, tables, state, optimizer, products=products)]
    if kind is ProgramKind.LINEAR:
        return [LinearProgram(workload, tables, state, optimizer)]
    assert passes is not None
    return [
        OneByOne(workload, tables.part(row), state.part(rows), optimizer.part(rows), passes)
        for row in range(len(state))
        for rows in [slice(row, row + 1)]
    ]


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
        used = counts.T[counts.any(0)]
        forms = [self.program.two_forms and bool((column == tables.batch).all()) for column in used]
        found = recordings(forms, self._longest)
        for steps, full in found:
            if (steps, full) not in self._recorded:
                step = partial(self._step, full)
                self._recorded[steps, full] = recorder.record(step, steps, tables.clear, self.number)
        return [self._recorded[key] for key in found]

    def _step(self, full: bool) -> None:
        self.program.step(full=full)
        self.program.tables.advance()


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
        counts, (count, steps) = schedule.counts, schedule.counts.shape
        each = [counts[row : row + 1] for row in range(count)] if self._one_each else [counts]
        replays = [track.bodies(own, self.tables, recorder) for track, own in zip(self._tracks, each, strict=False)]
        models = list({id(model): model for model in start}.values())
        number = {id(model): owner for owner, model in enumerate(models)}
        scalars = self.optimizer.scalars(schedule.lr, steps)
        self.tables.fill(schedule, scalars, [number[id(model)] for model in start])
        self.state.load(models, self.tables.owner)
        self.optimizer.reset()
        with recorder.side_by_side(len(replays)):
            for turn in zip_longest(*replays):  # the first of each, the second of each: all tracks start at once
                for replay in turn:
                    if replay is not None:
                        replay()
        momentum = self.optimizer.momentum
        return Trained(
            self.state.changes(count),
            self.tables.losses[:steps, :count],
            None if momentum is None else self.state.packed(momentum[:count]),
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


MOST_TRAINERS = 8
"""Sizes of cohorts and batches that are kept recorded."""


class GraphBackend(TorchBackend):
    """CUDA graphs of the local steps, whose batches, models, dropout keys and learning rate are read from static
    buffers. Clients with fewer samples or steps are masked. On a CPU, the same step by step.

    `program`: what takes the steps of a chain of linear layers in float32, Triton's kernels or torch's
    products (`auto`: Triton on a GPU, where it can); other models take those of torch.
    """

    fewest_clients = 2

    def __init__(
        self,
        workload: Workload,
        *,
        precision: Precision,
        chunk_size: int | Literal["auto"],
        program: Literal["auto", "torch", "triton"],
        deterministic: bool | None = None,
    ) -> None:
        super().__init__(workload, precision, deterministic, chunk_size)
        x, self.workload = self.data.x, workload
        self.kind: ProgramKind = choose_program(workload, precision, program)
        self.recorder = recorder_for(x.device, of_libraries=self.kind is not ProgramKind.TRITON)
        flat_optimizer(workload.optimizer, x.new_empty(0, 0, dtype=real_dtype(x)))  # refuses one that it does not know
        self._passes = Passes(workload, precision, self.layout) if self.kind is ProgramKind.ONE_BY_ONE else None
        if len(x):
            refuse_hidden_randomness(workload.model, x)
            if self._passes is not None:
                self._passes.try_out(x)
        self._trainers: OrderedDict[tuple[int, int], Trainer] = OrderedDict()

    @property
    def description(self) -> str:
        return f"graph, {self.kind.value}, {self.recorder.description}"

    def joint_key(self, schedule: Schedule) -> Hashable:
        """Batches are padded to the widest of the call, and products of one shape are the same for any number of
        clients from two on, which is the fewest that are ever trained. (On a CPU; a library of a GPU may choose another
        product for another number of matrices.)"""
        return schedule.lr, schedule.positions.shape[2]

    def train(self, start: Sequence[Params], schedule: Schedule) -> TrainingResult:
        """The host waits once, for the losses."""
        parts: list[Trained] = []
        first = 0
        while first < len(schedule):
            rows = slice(first, first + self._clients_that_fit(schedule))
            part = self._train_chunk(start[rows], schedule.rows(rows, padded=True))
            if part is None:
                continue
            first += len(part.changes)
            more = first < len(schedule)  # and the next chunk overwrites the losses of this one
            parts.append(replace(part, losses=part.losses.clone()) if more else part)
        return self._result(parts, schedule)

    def _train_chunk(self, start: Sequence[Params], schedule: Schedule) -> Trained | None:
        """None where memory ran out or a step cannot be recorded: after that, chunks are smaller, or steps are taken
        one by one. Raises for one client."""
        try:
            return self._if_it_fits(
                lambda: self._trainer(schedule).train(start, schedule, self.recorder), len(schedule)
            )
        except NotRecordedError as error:
            tell(f"engine=graph: not recorded, which is slower and else the same: {error}")
            self.recorder = Eager(str(error))
        self._free_memory()
        return None

    def _free_memory(self) -> None:
        self._trainers.clear()
        super()._free_memory()

    def _trainer(self, schedule: Schedule) -> Trainer:
        """One with room for the schedule; those used longest ago are let go."""
        count, steps, batch = schedule.positions.shape
        rows = min(capacity(max(count, self.kind.least_rows)), max(count, self.chunk_size, self.kind.least_rows))
        if self.kind is ProgramKind.ONE_BY_ONE:  # rows that are not used cost nothing
            rows = min((r for r, b in self._trainers if b == batch and r >= rows), default=rows)
        trainer = self._trainers.pop((rows, batch), None)
        if trainer is None or trainer.tables.steps < steps:
            trainer = self._new_trainer(rows, capacity(steps), batch)
        self._trainers[rows, batch] = trainer
        if len(self._trainers) > MOST_TRAINERS:
            self._trainers.popitem(last=False)
        return trainer

    def _new_trainer(self, rows: int, steps: int, batch: int) -> Trainer:
        like = self.data.x.new_empty(0, dtype=real_dtype(self.data.x))
        last = self.layout is torch.channels_last and self.kind is ProgramKind.ONE_BY_ONE
        state = State.of(self.model, rows, like, channels_last=last)
        optimizer = flat_optimizer(self.workload.optimizer, state.flat)
        tables = Tables(steps, rows, batch, optimizer.num_scalars, like)
        programs = new_programs(self.kind, self.workload, tables, state, optimizer, self._passes, self.precision)
        return Trainer(tables, state, optimizer, programs)

    def _result(self, parts: Sequence[Trained], schedule: Schedule) -> TrainingResult:
        state = next(reversed(self._trainers.values())).state
        momenta = [part.momentum for part in parts if part.momentum is not None]
        delta = state.named(joined([part.changes for part in parts]))
        losses, finite = fetched(_whole([part.losses for part in parts], schedule.positions.shape), delta)
        momentum = state.named(joined(momenta)) if momenta else None
        return TrainingResult(delta, losses.transpose(1, 0, 2), momentum, finite)


def capacity(count: int) -> int:
    """`count` rounded up to four significant binary digits: few sizes, and at most an eighth of each unused."""
    unit = 1 << max(count.bit_length() - 4, 0)
    return -(-count // unit) * unit


def _whole(parts: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    """Losses [S_i, K_i, B] of chunks as a tensor [S, K, B] for the `shape` (K, S, B)."""
    if len(parts) == 1 and len(parts[0]) == shape[1]:
        return parts[0] if parts[0].is_cuda else parts[0].clone()  # from a GPU, it is copied anyway
    whole = parts[0].new_zeros(shape[1], shape[0], shape[2])
    first = 0
    for part in parts:
        whole[: len(part), first : first + part.shape[1]] = part
        first += part.shape[1]
    return whole
