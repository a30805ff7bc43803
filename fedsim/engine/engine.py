"""What local training came to, client by client: put together in one place, whichever backend trained.

Local training, losses, gradients and evaluation of the clients of one run, on top of a backend.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.core.errors import Problem, check
from fedsim.core.exact import log_softmax, row_sums
from fedsim.core.flat import flat_rows, to_device
from fedsim.core.rng import Streams
from fedsim.core.types import Evaluation, Ids, Params, Stack
from fedsim.engine.backend import Backend, TrainingResult, Workload
from fedsim.engine.model import has_dropout, trained_names
from fedsim.engine.schedule import LocalWork, Schedule, make_schedule


@dataclass(frozen=True)
class ClientUpdates:
    """Results of the local training of K clients.

    `delta` and `momentum` [K, ...] are on the device: w_k - w of all tensors that travel, and the optimiser's last
    momentum buffers (None where it has none). Per client [K]: `loss`, the mean over local steps of the batch's mean
    training loss; `rms_loss`, the root mean square of the losses of all samples passed (both nan without a step);
    `steps`, optimiser steps; `samples`, samples passed forward and backward; `finite`, as in `TrainingResult`.
    """

    delta: Stack
    loss: NDArray[np.float64]
    rms_loss: NDArray[np.float64]
    steps: NDArray[np.int64]
    samples: NDArray[np.int64]
    momentum: Stack | None = None
    finite: NDArray[np.bool_] | None = None

    def rows(self, rows: NDArray[np.int64]) -> "ClientUpdates":
        """Those of the clients at `rows`, in this order."""
        index = to_device(torch.as_tensor(rows), next(iter(self.delta.values())).device)
        delta, momentum = ({n: v[index] for n, v in (s or {}).items()} for s in (self.delta, self.momentum))
        return ClientUpdates(
            delta,
            self.loss[rows],
            self.rms_loss[rows],
            self.steps[rows],
            self.samples[rows],
            momentum or None,
            None if self.finite is None else self.finite[rows],
        )


def client_updates(result: TrainingResult, schedule: Schedule) -> ClientUpdates:
    """The updates of the clients of `schedule`, with statistics of their losses."""
    losses = np.where(schedule.mask, result.losses, 0.0).astype(np.float64)
    counts, steps, samples = schedule.counts, schedule.steps, schedule.samples
    with np.errstate(invalid="ignore"):
        loss = _sum(_sum(losses) / np.maximum(counts, 1)) / steps
        rms_loss = np.sqrt(_sum(_sum(losses**2)) / samples)
    return ClientUpdates(result.delta, loss, rms_loss, steps, samples, result.momentum, result.finite)


def fetched(losses: Tensor, delta: Stack) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
    """The `losses` and `finite` of a `TrainingResult`, from a GPU in one copy, which the host waits for once."""
    if not losses.is_cuda:
        return losses.numpy(), None
    sums = flat_rows(delta).sum(1)  # finite exactly where all entries are, or they are so large that it is not
    values = torch.cat([losses.flatten(), sums.to(losses.dtype)]).cpu().numpy()
    return values[: losses.numel()].reshape(losses.shape), np.isfinite(values[losses.numel() :])


def _sum(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Over the last axis, one term after another: zeros at its end, which stand for padding, change no bit."""
    return values.cumsum(-1)[..., -1] if values.shape[-1] else np.zeros(values.shape[:-1])


def concatenate_updates(parts: Sequence[ClientUpdates]) -> ClientUpdates:
    """All clients of `parts` in order."""
    if len(parts) == 1:
        return parts[0]
    momenta = [p.momentum for p in parts if p.momentum is not None]
    return ClientUpdates(
        delta=concatenate_stacks([p.delta for p in parts]),
        loss=np.concatenate([p.loss for p in parts]),
        rms_loss=np.concatenate([p.rms_loss for p in parts]),
        steps=np.concatenate([p.steps for p in parts]),
        samples=np.concatenate([p.samples for p in parts]),
        momentum=concatenate_stacks(momenta) if momenta else None,
        finite=concatenate_flags([p.finite for p in parts]),
    )


def concatenate_results(parts: Sequence[TrainingResult], schedule: Schedule) -> TrainingResult:
    """Consecutive parts of a schedule, each of which was trained without the steps that none of its clients makes."""
    losses = np.zeros(schedule.positions.shape, parts[0].losses.dtype)
    first = 0
    for part in parts:
        rows, steps, width = part.losses.shape
        losses[first : first + rows, :steps, :width] = part.losses
        first += rows
    momenta = [part.momentum for part in parts if part.momentum is not None]
    return TrainingResult(
        concatenate_stacks([part.delta for part in parts]),
        losses,
        concatenate_stacks(momenta) if momenta else None,
        concatenate_flags([part.finite for part in parts]),
    )


def concatenate_flags(flags: Sequence[NDArray[np.bool_] | None]) -> NDArray[np.bool_] | None:
    """`finite` of all parts in order; None where a part does not know it."""
    known = [part for part in flags if part is not None]
    return np.concatenate(known) if len(known) == len(flags) else None


def concatenate_stacks(stacks: Sequence[Stack]) -> Stack:
    """All models of `stacks` in order."""
    return {name: torch.cat([s[name] for s in stacks]) for name in stacks[0]}


class Engine:
    """Knows which client holds which samples, and the random streams of their batches; the backend computes."""

    def __init__(self, backend: Backend, workload: Workload, work: LocalWork, streams: Streams) -> None:
        self.backend = backend
        self.workload = workload
        self.data = workload.data
        self.work = work
        self._streams = streams
        self.trained = trained_names(workload.model)
        """Names of the parameters that local training changes."""
        self._dropout = has_dropout(workload.model)

    @property
    def description(self) -> str:
        """The backend, and why it was chosen, for the summary."""
        reason = self.backend.reason
        return self.backend.description + (f" (auto: {reason})" if reason else "")

    def train(
        self, params: Params, ids: Ids, round: int, lr: float, start: Sequence[Params] | None = None
    ) -> ClientUpdates:
        """Train clients `ids` from `params` (not modified) in `round` (1-based) with learning rate `lr`.

        `start`: a model for each of them in place of `params`; updates are differences to `params` all the same.
        """
        schedule = make_schedule(self.data.train, self.work, self._streams, round, ids, lr, dropout=self._dropout)
        if start is None:
            return client_updates(self.backend.train([params] * len(ids), schedule), schedule)
        updates = client_updates(self.backend.train(start, schedule), schedule)
        moved = {name: torch.stack([model[name] for model in start]) - value for name, value in params.items()}
        return replace(updates, delta={name: change + moved[name] for name, change in updates.delta.items()})

    def losses(self, params: Params, positions: Sequence[NDArray[np.int64]]) -> NDArray[np.float64]:
        """Mean cross-entropy of `params` in eval mode over each list of positions in `data` [len(positions)].

        All lists pass through the model together. An empty list gives nan.
        """
        return _means(positions, lambda chosen: self._losses(params, chosen))

    def accuracies(self, params: Params, positions: Sequence[NDArray[np.int64]]) -> NDArray[np.float64]:
        """Accuracy of `params` in eval mode over each list of positions in `data` [len(positions)]; of none, nan."""
        return _means(positions, lambda chosen: self.hits(params, chosen))

    def _losses(self, params: Params, chosen: NDArray[np.int64]) -> NDArray[np.float64]:
        logits = self.backend.forward(params, self.data.x, chosen)
        return self.backend.cross_entropies(logits, self._labels(chosen)).cpu().numpy()

    def _labels(self, positions: NDArray[np.int64]) -> Tensor:
        return self.data.y[to_device(torch.as_tensor(positions), self.data.y.device)]

    def client_gradients(
        self, params: Params, positions: Sequence[NDArray[np.int64]], names: Sequence[str] | None = None
    ) -> Iterator[Tensor]:
        """For each list of positions in `data`, the gradient of its mean cross-entropy in eval mode, flat [D].

        `names` picks parameters (None: all that are trained), in their order. An empty list gives zeros.
        """
        return self.backend.gradients(params, positions, self.trained if names is None else names)

    def evaluate(self, params: Params, x: Tensor, y: Tensor) -> Evaluation:
        """Accuracy and mean cross-entropy of `params` in eval mode over a labelled set on the device."""
        return self.evaluate_samples(params, x, y)[0]

    def evaluate_samples(self, params: Params, x: Tensor, y: Tensor) -> tuple[Evaluation, Tensor]:
        """As `evaluate`, and which of the samples are classified correctly [n], on the device. Raises `ConfigError` for
        a model whose output is not logits."""
        output = self.backend.forward(params, x)
        check(self._output_problem(output, len(x)))
        hits = output.argmax(1) == y
        correct = hits.sum()
        losses = self.backend.cross_entropies(output, y)
        loss = row_sums(losses[None])[0] if self.backend.exact else losses.sum()
        found = torch.stack([correct.double(), loss]).tolist()  # one copy from a GPU
        return Evaluation(found[0] / len(y), found[1] / len(y)), hits

    def _output_problem(self, output: Tensor, count: int) -> Problem | None:
        classes, shape = self.data.num_classes, list(output.shape)
        if len(shape) == 2 and shape[0] == count and shape[1] >= classes:
            return None
        rule = f"must return logits [batch, num_classes={classes}], not {shape} for {count} samples"
        return Problem("model", type(self.workload.model).__name__, rule)

    def hits(self, params: Params, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of the samples at these positions in `data` are classified correctly by `params` in eval mode."""
        return (self.backend.forward(params, self.data.x, positions).argmax(1) == self._labels(positions)).cpu().numpy()

    def predict(self, params: Params, x: Tensor) -> Tensor:
        """Log-probabilities of `params` in eval mode, float64 [len(x), C]."""
        return log_softmax(self.backend.forward(params, x))


def _means(
    positions: Sequence[NDArray[np.int64]], values_at: Callable[[NDArray[np.int64]], NDArray[Any]]
) -> NDArray[np.float64]:
    """Of the values at each list of positions; of none, nan."""
    sizes = np.array([len(own) for own in positions], dtype=np.int64)
    if not sizes.sum():
        return np.full(len(sizes), np.nan)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    totals = np.bincount(owner, values_at(np.concatenate(positions)), minlength=len(sizes))
    with np.errstate(invalid="ignore"):
        return totals / sizes
