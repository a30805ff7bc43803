"""The graph backend: all local steps of a cohort as a few launches.

A launch is the host's call that starts work on the GPU. A CUDA graph is a recorded sequence of such
calls, which one launch replays. The steps are recorded once on buffers at fixed addresses
(buffers.py), and replayed in every round.
"""

import time
import zlib
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby, zip_longest
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from fedsim.core.arrays import Ints
from fedsim.core.errors import ConfigError, Problem
from fedsim.core.flat import real_dtype
from fedsim.core.types import Params
from fedsim.engine.backend import TrainingResult, Workload, fetched
from fedsim.engine.device import Precision, can_run_triton, tell, worth_compiling
from fedsim.engine.graph.buffers import ModelBuffers, ScheduleTable, round_up_to
from fedsim.engine.graph.choices import fastest
from fedsim.engine.graph.recorder import Body, NotRecordedError, Recorder, recorder_for
from fedsim.engine.graph.stacked_steps import MIN_SHARE, StackedPasses, StackedSteps
from fedsim.engine.graph.steps import (
    RecordableLinearSteps,
    RecordableSteps,
    SingleClientSteps,
    TrainingPasses,
)
from fedsim.engine.model import initial
from fedsim.engine.optimizers import SGD, Adam
from fedsim.engine.schedule import Schedule
from fedsim.engine.stacked import StackedBatch
from fedsim.engine.torch_backend import ChunkedBackend
from fedsim.engine.training_copies import reject_hidden_randomness, reject_hidden_state
from fedsim.engine.trial import agree, trial_schedule

if TYPE_CHECKING:
    from fedsim.engine.graph.convolution_steps import Network

MAX_STEPS = 64
"""Maximum number of local steps in one recording."""
MAX_KERNELS = 5_000
"""Maximum number of kernels in one recording. A node of a graph takes memory on the device, and
time when the graph is made."""
KERNELS_WORTH_STEPS = 2_000
"""Number of a client's local steps in a run from which Triton pays. It compiles for some seconds,
once per machine."""
STACKING_DEVICES = ("cuda",)
"""Types of devices on which models other than chains may train all clients at once."""
MAX_TRAINERS = 8
"""Maximum number of sizes of cohorts and batches whose recordings are kept."""


class GraphBackend(ChunkedBackend):
    """Replays CUDA graphs of the local steps. On a CPU, it makes the same steps one by one.

    The steps read batches, models, dropout keys and learning rates from the buffers. Clients with
    fewer samples or steps are masked. For a chain of linear layers in float32, the products of all
    clients are computed at once. Two clients or more then train, with an unused row if need be:
    torch multiplies a single pair of matrices in another order of additions than several pairs.
    On a GPU, convolutional chains train all clients at once by kernels of their own. Other models
    do by torch.func, if most clients make most of the steps and the card is faster so. Otherwise
    each client has recordings of its own, and these are replayed side by side.
    """

    fewest_clients = 2
    min_share = MIN_SHARE

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
        dtype = real_dtype(x)
        others = {tensor.dtype for tensor in initial(workload.model).values()} - {dtype}
        if others:
            text = f"has one buffer for all of the model, in {dtype}, and the model has {others}"
            raise ConfigError([Problem("", ..., text, "engine=batched runs it")])
        self.chain = workload.linear_chain(precision)
        self.recorder = recorder_for(x.device)
        self._passes: TrainingPasses | None = None
        self._stacked: StackedPasses | None = None
        if self.chain is None:
            self._passes = TrainingPasses(workload, precision, self.layout)
        if len(x):
            reject_hidden_randomness(workload.model, x)
            if self._passes is not None:
                self._passes.try_out(x)
                reject_hidden_state(workload.model, x)
        if self.chain is None and x.device.type in STACKING_DEVICES:
            with suppress(ConfigError):  # The model then trains one client a stream.
                self._stacked = StackedPasses(workload, precision)
        self._use_kernels = self._kernels_pay(workload)
        self._trainers: OrderedDict[tuple[int, int, bool, bool], RecordedTrainer] = OrderedDict()
        """Trainers by clients, batch size, whether there is a correction and whether the clients
        train together; the last is the latest."""
        self._network: Network | None = None
        if self.chain is None:
            self._network = self._working_network(workload)

    def _working_network(self, workload: Workload) -> "Network | None":
        """Return the network for Triton's kernels, or None.

        Kernels that fail on this machine, or whose results differ from PyTorch's, are not used.
        """
        x = self.data.x
        if workload.chain is None or not len(x) or not can_run_triton(x.device):
            return None
        if not worth_compiling("auto", workload.total_steps, KERNELS_WORTH_STEPS):
            return None
        problem = "differ from PyTorch on this machine"
        try:
            from fedsim.engine.graph.convolution_steps import find_network

            self._network = network = find_network(workload, self.precision)
            if network is None:
                return None
            schedule = trial_schedule(workload)
            start = [initial(self.model)] * len(schedule)
            with self.precision_context:
                actual, expected = (
                    self._new_trainer(2, 2, 4, False, together=together).train(
                        start, schedule, Recorder("a trial")
                    )
                    for together in (True, False)
                )
            if agree(actual, expected, schedule, self.precision):
                return network
        except Exception as error:  # Triton, a compiler or a driver may fail in any way.
            problem = f"fail: {str(error).strip().partition(chr(10))[0][:200]}"
        tell(f"engine=graph: no Triton kernels (slower, same results), because they {problem}")
        return None

    @property
    def description(self) -> str:
        if self.chain is not None:
            kind = "linear layers in Triton" if self._use_kernels else "linear layers"
        elif self._network is not None:
            kind = "convolutions in Triton"
        elif self._stacked is not None:
            kind = "stacked clients"
        else:
            kind = "one client a stream"
        return f"graph, {kind}, {self.recorder.description}"

    def joint_key(self, schedule: Schedule) -> Hashable:
        """Return a key: schedules with equal keys may be trained in one call with the same bits.

        All batches of a call are padded to one size, so the key contains it. On a CPU, products of
        one shape give the same bits for any number of clients from two on.
        """
        return schedule.lr, schedule.positions.shape[2], schedule.correction.kind

    def _train_chunk(self, start: Sequence[Params], schedule: Schedule) -> TrainingResult:
        try:
            together = self._train_together(start, schedule)
            return self._trainer(schedule, together).train(start, schedule, self.recorder)
        except NotRecordedError as error:
            tell(f"engine=graph: not recorded (slower, same results): {error}")
            self.recorder = Recorder(str(error))
        self._free_memory()
        return self._train_chunk(start, schedule)

    def _free_memory(self) -> None:
        self._trainers.clear()
        super()._free_memory()

    def _trainer(self, schedule: Schedule, together: bool) -> "RecordedTrainer":
        """Return a trainer that fits the `schedule`, with recordings of earlier rounds if possible.

        `together` says that one program makes the steps of all clients.
        """
        num_clients, num_steps, batch = schedule.positions.shape
        corrected = bool(schedule.correction)
        # 1. The rows of its buffers. Cohorts of almost the same size share a trainer.
        fewest_rows = max(num_clients, self.fewest_clients) if together else num_clients
        num_rows = min(round_up(fewest_rows), max(fewest_rows, self.chunk_size))
        if not together:
            # Unused rows cost no time here, so a trainer with more rows serves as well.
            fitting = []
            for rows, *others in self._trainers:
                if rows >= num_rows and others == [batch, corrected, together]:
                    fitting.append(rows)
            num_rows = min(fitting, default=num_rows)

        # 2. Take the trainer, or make one, and put it last: the first is the least recently used.
        key = (num_rows, batch, corrected, together)
        trainer = self._trainers.pop(key, None)
        if trainer is None or trainer.table.num_steps < num_steps:
            trainer = self._new_trainer(num_rows, round_up(num_steps), batch, corrected, together)
        self._trainers[key] = trainer
        if len(self._trainers) > MAX_TRAINERS:
            self._trainers.popitem(last=False)
        return trainer

    def _kernels_pay(self, workload: Workload) -> bool:
        """Return whether to compute a chain in Triton: if its kernels work here, and the run is so
        long that it pays to compile them."""
        x, y = self.data.x, self.data.y
        chain = self.chain
        if chain is None or len(x) < 2 or not can_run_triton(x.device):
            return False
        if not worth_compiling("auto", workload.total_steps, KERNELS_WORTH_STEPS):
            return False
        from fedsim.engine.graph.linear_kernels import MAX_CLASSES, LinearKernels

        params = {name: value.unsqueeze(0) for name, value in initial(self.model).items()}
        if params[chain.layers[-1].weight].shape[1] > MAX_CLASSES:
            return False
        grads = {name: torch.empty_like(value) for name, value in params.items()}
        weights = x.new_full((1, 2), 0.5)
        keys = torch.zeros(1, dtype=torch.int64, device=x.device)
        try:
            passes = LinearKernels(chain, params, grads, self.precision)
            passes(StackedBatch(x[None, :2], y[None, :2], weights, keys))
        except Exception as error:  # A driver or a compiler may fail in any way.
            reason = str(error).strip().partition("\n")[0][:200]
            tell(f"engine=graph: not in Triton (slower, same results): {reason}")
            return False
        return True

    def _train_together(self, start: Sequence[Params], schedule: Schedule) -> bool:
        """Return whether one program makes the steps of all clients."""
        if self.chain is not None or self._network is not None:
            return True
        if self._stacked is None or len(schedule) < self.fewest_clients:
            return False
        num_steps = np.count_nonzero(schedule.counts)
        if num_steps < self.min_share * schedule.counts.size:
            return False
        # For two clients, as in a trial, either way is fast.
        return len(schedule) <= self.fewest_clients or self._faster_together(start, schedule)

    def _faster_together(self, start: Sequence[Params], schedule: Schedule) -> bool:
        """Return whether these clients train faster together than side by side on this card."""
        num_clients, _, batch = schedule.positions.shape
        shapes = str([tuple(value.shape) for value in self._tensors.values()])
        model = f"{type(self.model).__name__} {zlib.crc32(shapes.encode()):08x}"
        what = f"{model} {self.precision} {round_up(num_clients)} clients, batches of {batch}"
        times = {}
        for name, together in {"together": True, "side by side": False}.items():
            times[name] = partial(self._seconds, start, schedule, together)
        return fastest(self.data.x.device, what, times) == "together"

    def _seconds(self, start: Sequence[Params], schedule: Schedule, together: bool) -> float:
        """Return the time of a round's training, without that of recording it."""
        trainer = self._trainer(schedule, together)
        seconds = []
        for _ in range(3):
            begin = time.perf_counter()
            trainer.train(start, schedule, self.recorder)  # The host waits for its results.
            seconds.append(time.perf_counter() - begin)
        return min(seconds)

    def _new_trainer(
        self, num_rows: int, num_steps: int, batch: int, corrected: bool, together: bool
    ) -> "RecordedTrainer":
        data, optimizer = self.data, self.optimizer
        assert isinstance(optimizer, SGD | Adam)
        like = data.x.new_empty(0, dtype=real_dtype(data.x))
        network = self._network if together else None
        storage = None if network is None else network.storage
        models = ModelBuffers(self.model, num_rows, like, optimizer.num_buffers, corrected, storage)
        num_scalars = optimizer.scalars(0.0, 1).shape[1]
        augmented = data.augment is not None
        table = ScheduleTable(num_steps, num_rows, batch, num_scalars, like, augmented=augmented)
        programs: list[RecordableSteps] = []
        all_clients = slice(0, num_rows)
        if self.chain is not None:
            programs.append(
                RecordableLinearSteps(
                    data,
                    table,
                    models,
                    optimizer,
                    all_clients,
                    self.chain,
                    precision=self.precision,
                    use_kernels=self._use_kernels,
                )
            )
        elif network is not None:
            from fedsim.engine.graph.convolution_steps import ConvolutionSteps

            programs.append(ConvolutionSteps(data, table, models, optimizer, all_clients, network))
        elif together:
            assert self._stacked is not None
            programs.append(
                StackedSteps(data, table, models, optimizer, all_clients, self._stacked)
            )
        else:
            assert self._passes is not None
            for row in range(num_rows):
                client = slice(row, row + 1)
                programs.append(
                    SingleClientSteps(data, table, models, optimizer, client, self._passes)
                )
        # About 8 kernels for each layer without layers of its own, and 20 for the rest of a step.
        num_layers = sum(not list(layer.children()) for layer in self.model.modules())
        max_steps = longest_recording(kernels_per_step=20 + 8 * num_layers)
        return RecordedTrainer(table, models, optimizer, programs, max_steps)


class RecordedTrainer:
    """Buffers for R clients, S steps and batches of B, the step programs that work on them, and
    recordings of these programs."""

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
        num_clients, num_steps = schedule.counts.shape
        # 1. Record what is not recorded yet. Trial steps overwrite the buffers, so they come first.
        recordings = []
        for number, program in enumerate(self.programs):
            if program.clients.start < num_clients:
                counts = schedule.counts[program.clients]
                recordings.append(self._recordings(number, counts, recorder))

        # 2. Load the round, and replay: the first recording of each program, then the second of
        # each, so that all programs start early.
        self.table.fill(schedule, self.optimizer.scalars(schedule.lr, num_steps))
        self.models.load(start, schedule.correction.shift)
        with recorder.side_by_side(len(recordings)):
            for turn in zip_longest(*recordings):
                for replay in turn:
                    if replay is not None:
                        replay()

        # 3. Fetch the results.
        delta = self.models.changes(num_clients)
        losses = self.table.losses[:num_steps, :num_clients]
        if not losses.is_cuda:
            losses = losses.clone()  # The next training overwrites the table.
        values, finite = fetched(losses, delta)
        has_momentum = isinstance(self.optimizer, SGD) and self.optimizer.momentum
        momentum = self.models.momentum(num_clients) if has_momentum else None
        return TrainingResult(delta, values.transpose(1, 0, 2), momentum, finite)

    def _recordings(self, number: int, counts: Ints, recorder: Recorder) -> list[Body]:
        """Return recordings that, one after another, make the steps of a program's clients.

        `counts` [n, S] are the numbers of samples of its n clients. Clients with fewer steps than
        others make their first steps: a step in which no client has samples ends the sequence.
        """
        program = self.programs[number]
        full_steps = []  # whether each step has the form for full batches
        for step_counts in counts.T:
            if step_counts.any():
                all_full = bool((step_counts == self.table.batch).all())
                full_steps.append(all_full and program.has_full_form)
        bodies = []
        for num_steps, full in split_into_recordings(full_steps, self._max_steps):
            key = (number, num_steps, full)
            if key not in self._recorded:
                step = partial(program.step, full=full)
                self._recorded[key] = recorder.record(
                    step, num_steps, prepare=self.table.clear, track=number
                )
            bodies.append(self._recorded[key])
        return bodies


def longest_recording(kernels_per_step: int) -> int:
    """Return the largest number of steps in one recording, a power of two."""
    max_steps = max(1, min(MAX_STEPS, MAX_KERNELS // max(kernels_per_step, 1)))
    return power_of_two_up_to(max_steps)


def power_of_two_up_to(count: int) -> int:
    """Return the largest power of two that is at most `count`, which is 1 or more."""
    return 1 << (count.bit_length() - 1)


def split_into_recordings(full_steps: Sequence[bool], max_steps: int) -> list[tuple[int, bool]]:
    """Split a sequence of steps into recordings: number of steps, and whether these are full.

    A recording has steps of one form. Numbers are powers of two up to `max_steps`, so that few
    recordings serve all rounds: 30 steps are 16 + 8 + 4 + 2.
    """
    recordings: list[tuple[int, bool]] = []
    for full, group in groupby(full_steps):
        remaining = len(list(group))
        while remaining:
            num_steps = min(max_steps, power_of_two_up_to(remaining))
            recordings.append((num_steps, full))
            remaining -= num_steps
    return recordings


def round_up(count: int) -> int:
    """Round up to four significant binary digits: 17 (10001) becomes 18 (10010).

    There are then few sizes, and at most an eighth of each is unused.
    """
    unit = 1 << max(count.bit_length() - 4, 0)
    return round_up_to(unit, count)
