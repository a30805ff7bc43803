"""All local steps of a cohort as a few launches: recorded on static buffers once, replayed in every round."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from fedsim.engine.backend import TrainingResult, Workload
from fedsim.engine.batched.backend import CACHED_BYTES
from fedsim.engine.batched.compiled import tell
from fedsim.engine.graph.one_by_one import Passes
from fedsim.engine.graph.optimizers import flat_optimizer
from fedsim.engine.graph.programs import ProgramKind, choose_program, new_programs
from fedsim.engine.graph.recorder import Eager, NotRecordedError, recorder_for
from fedsim.engine.graph.state import State
from fedsim.engine.graph.tables import Tables
from fedsim.engine.graph.trainer import Trained, Trainer
from fedsim.engine.memory import is_out_of_memory, model_bytes, rows_that_fit
from fedsim.engine.model.adapt import refuse_hidden_randomness
from fedsim.engine.precision import Precision, passes_in
from fedsim.engine.results import fetched
from fedsim.engine.schedule import Schedule
from fedsim.engine.torch_backend import TorchBackend
from fedsim.errors import check, rule
from fedsim.flat import real_dtype
from fedsim.types import Params

MOST_TRAINERS = 8
"""Sizes of cohorts and batches that are kept recorded."""


class GraphBackend(TorchBackend):
    """CUDA graphs of the local steps, whose batches, models, dropout keys and learning rate are read from static
    buffers. Clients with fewer samples or steps are masked. On a CPU, the same step by step.

    `chunk_size`: clients trained at once; `auto` takes what fits. On running out of memory it is halved and the chunk
    trained again. `program`: what takes the steps of a chain of linear layers in float32, Triton's kernels or torch's
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
        check(rule(chunk_size == "auto" or chunk_size >= 1, "chunk_size", chunk_size, "must be auto or >= 1"))
        super().__init__(workload, precision, deterministic)
        x = self.data.x
        self.workload = workload
        self.chunk_size = rows_that_fit(self.model, x.device) if chunk_size == "auto" else chunk_size
        self.counts_activations = chunk_size == "auto" and x.is_cuda
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

    @property
    def max_joint_clients(self) -> int:
        """As many as fit into the memory of a GPU, or into the cache of a CPU."""
        if self.data.x.is_cuda:
            return self.chunk_size
        return max(1, min(self.chunk_size, CACHED_BYTES // max(model_bytes(self.model), 1)))

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
            rows = slice(first, first + min(self.chunk_size, self._rows_that_fit(schedule)))
            part = self._train_if_it_fits(start[rows], schedule.rows(rows, padded=True))
            if part is None:
                continue
            first += len(part.changes)
            more = first < len(schedule)  # and the next chunk overwrites the losses of this one
            parts.append(replace(part, losses=part.losses.clone()) if more else part)
        return self._result(parts, schedule)

    def _rows_that_fit(self, schedule: Schedule) -> int:
        """Clients whose batches' activations fit into the memory of a GPU, too."""
        if not self.counts_activations:
            return len(schedule)
        return rows_that_fit(self.model, self.data.x.device, self.activations * schedule.positions.shape[2])

    def _train_if_it_fits(self, start: Sequence[Params], schedule: Schedule) -> Trained | None:
        """None where memory ran out or a step cannot be recorded: after that, chunks are smaller, or steps are taken
        one by one. Raises for one client."""
        try:
            with passes_in(self.precision, self.data.x.device):
                return self._trainer(schedule).train(start, schedule, self.recorder)
        except NotRecordedError as error:
            tell(f"engine=graph: not recorded, which is slower and else the same: {error}")
            self.recorder = Eager(str(error))
        except RuntimeError as error:
            if len(schedule) == 1 or not is_out_of_memory(error):
                raise
            self.chunk_size = half = len(schedule) // 2
            tell(f"engine.chunk_size: out of memory with {len(schedule)} clients at once; going on with {half}")
        self._trainers.clear()
        if self.data.x.is_cuda:  # by now, what the attempt held is free
            torch.cuda.empty_cache()
        return None

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
        delta = state.named(_joined([part.changes for part in parts]))
        losses, finite = fetched(_whole([part.losses for part in parts], schedule.positions.shape), delta)
        momentum = state.named(_joined(momenta)) if momenta else None
        return TrainingResult(delta, losses.transpose(1, 0, 2), momentum, finite)


def capacity(count: int) -> int:
    """`count` rounded up to four significant binary digits: few sizes, and at most an eighth of each unused."""
    unit = 1 << max(count.bit_length() - 4, 0)
    return -(-count // unit) * unit


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


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
