"""Local training, losses, gradients and evaluation of the clients of one run, on top of a
backend."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.core.arrays import Bools, Floats, Ints
from fedsim.core.errors import ConfigError, FedsimError, Problem
from fedsim.core.exact import log_softmax, row_sums
from fedsim.core.flat import to_device
from fedsim.core.rng import Streams
from fedsim.core.types import (
    ClientPositions,
    Cohort,
    Correction,
    Evaluation,
    Ids,
    Params,
    Stack,
    sizes_of,
)
from fedsim.engine.backend import Backend, Workload
from fedsim.engine.model import has_batch_norm, has_dropout, trained_names
from fedsim.engine.schedule import LocalWork, Schedule, make_schedule


def mean_losses(losses: NDArray[Any], schedule: Schedule) -> tuple[Floats, Floats]:
    """`loss` and `rms_loss` [K] of a `Cohort`, of the `losses` [K, S, B] of all samples; nan
    without a step."""
    losses = np.where(schedule.mask, losses, 0.0).astype(np.float64)
    with np.errstate(invalid="ignore"):
        loss = _sum(_sum(losses) / np.maximum(schedule.counts, 1)) / schedule.steps
        return loss, np.sqrt(_sum(_sum(losses**2)) / schedule.samples)


def _sum(values: Floats) -> Floats:
    """Over the last axis, one term after another: zeros at its end, which stand for padding, change
    no bit."""
    return values.cumsum(-1)[..., -1] if values.shape[-1] else np.zeros(values.shape[:-1])


class Engine:
    """Knows which client holds which samples, and the random streams of their batches; the backend
    computes."""

    def __init__(
        self, backend: Backend, workload: Workload, work: LocalWork, streams: Streams
    ) -> None:
        self.backend = backend
        self.workload = workload
        self.data = workload.data
        self.work = work
        self._streams = streams
        self._sizes = sizes_of(self.data.train)
        self.trained = trained_names(workload.model)
        """Names of the parameters that local training changes."""
        self._dropout = has_dropout(workload.model)

    @property
    def description(self) -> str:
        """The backend, and why it was chosen, for the summary."""
        reason = self.backend.reason
        return self.backend.description + (f" (auto: {reason})" if reason else "")

    @property
    def warning(self) -> str | None:
        """One line about clients that train batch norm on a batch of one sample, or None."""
        sizes = self._sizes[self._sizes > 0]
        num_alone = np.count_nonzero((sizes - 1) % self.work.batch_size == 0)
        if not num_alone or not has_batch_norm(self.workload.model):
            return None
        fault = f"{num_alone} of {len(sizes)} clients have a batch of one sample, in which batch norm sees no variance"
        return f"local.batch_size={self.work.batch_size}: {fault}; another size, or a model without batch norm, avoids it"

    def train(
        self,
        params: Params,
        ids: Ids,
        round: int,
        lr: float,
        start: Sequence[Params] | None = None,
        correction: Correction | None = None,
    ) -> Cohort:
        """Train clients `ids` from `params` (not modified) in `round` (1-based) with learning rate
        `lr`.

        `start`: a model for each of them in place of `params`; updates are differences to `params`
        all the same. `correction`: of their gradients (the losses are those without it). Raises
        `FedsimError` where its shift has not the trained parameters' names, sizes, type and device.
        """
        schedule = make_schedule(
            self.data.train, self.work, self._streams, round, ids, lr, dropout=self._dropout
        )
        if correction:
            self._check_shift(correction.shift, params, len(ids))
            schedule = replace(schedule, correction=correction)
        result = self.backend.train([params] * len(ids) if start is None else start, schedule)
        delta = result.delta
        if start is not None:
            moved = {
                name: torch.stack([model[name] for model in start]) - value
                for name, value in params.items()
            }
            delta = {name: change + moved[name] for name, change in delta.items()}
        loss, rms_loss = mean_losses(result.losses, schedule)
        return Cohort(
            ids=ids,
            sizes=self._sizes[ids],
            start=params,
            delta=delta,
            loss=loss,
            rms_loss=rms_loss,
            steps=schedule.steps,
            trained=self.trained,
            finite=result.finite,
            samples=schedule.samples,
            momentum=result.momentum,
        )

    def _check_shift(self, shift: Stack | None, params: Params, count: int) -> None:
        if shift is None:
            return
        like = {name: params[name].expand(count, *params[name].shape) for name in self.trained}
        found, wanted = (
            {n: f"{list(v.shape)} {v.dtype} {v.device}" for n, v in one.items()}
            for one in (shift, like)
        )
        for name in {**wanted, **found}:
            if (was := found.get(name, "missing")) != (must := wanted.get(name, "missing")):
                raise FedsimError(f"the shift of a correction: {name} is {was}; must be {must}")

    def losses(self, params: Params, positions: Sequence[Ints]) -> Floats:
        """Mean cross-entropy of `params` in eval mode over each list of positions in `data`
        [len(positions)]; of none, nan. All lists pass through the model together."""
        return self._means(params, positions, self.backend.cross_entropies)

    def accuracies(self, params: Params, positions: Sequence[Ints]) -> Floats:
        """Accuracy of `params` in eval mode over each list of positions in `data` [len(positions)];
        of none, nan."""
        return self._means(params, positions, self.backend.hits)

    def _means(
        self,
        params: Params,
        positions: Sequence[Ints],
        values: Callable[[Tensor, Tensor], Tensor],
    ) -> Floats:
        own = ClientPositions.of(positions)
        sizes, chosen = own.sizes, own.flat
        if not len(chosen):
            return np.full(len(sizes), np.nan)
        found = (
            values(self.backend.forward(params, self.data.x, chosen), self._labels(chosen))
            .cpu()
            .numpy()
        )
        totals = np.bincount(np.repeat(np.arange(len(sizes)), sizes), found, minlength=len(sizes))
        with np.errstate(invalid="ignore"):
            return totals / sizes

    def _labels(self, positions: Ints, true: Tensor | None = None) -> Tensor:
        y = self.data.y if true is None else true
        return y[to_device(torch.as_tensor(positions), y.device)]

    def client_gradients(
        self,
        params: Params,
        positions: Sequence[Ints],
        names: Sequence[str] | None = None,
    ) -> Iterator[Tensor]:
        """For each list of positions in `data`, the gradient of its mean cross-entropy in eval
        mode, flat [D], in the parameters `names` (None: all that are trained). An empty list gives
        zeros."""
        return self.backend.gradients(params, positions, self.trained if names is None else names)

    def evaluate(self, params: Params, x: Tensor, y: Tensor) -> Evaluation:
        """Accuracy and mean cross-entropy of `params` in eval mode over a labelled set on the
        device."""
        return self.evaluate_samples(params, x, y)[0]

    def evaluate_samples(self, params: Params, x: Tensor, y: Tensor) -> tuple[Evaluation, Tensor]:
        """As `evaluate`, and which of the samples are classified correctly [n], on the device.
        Raises `ConfigError` for a model whose output is not logits."""
        output = self.backend.forward(params, x)
        classes, shape = self.data.num_classes, list(output.shape)
        if len(shape) != 2 or shape[0] != len(x) or shape[1] < classes:
            text = f"must return logits [batch, num_classes={classes}], not {shape} for {len(x)} samples"
            raise ConfigError([Problem("model", type(self.workload.model).__name__, text)])
        hits = self.backend.hits(output, y)
        correct = hits.sum()
        losses = self.backend.cross_entropies(output, y)
        loss = row_sums(losses[None])[0] if self.backend.exact else losses.sum()
        found = torch.stack([correct.double(), loss]).tolist()  # one copy from a GPU
        return Evaluation(found[0] / len(y), found[1] / len(y)), hits

    def hits(self, params: Params, positions: Ints) -> Bools:
        """Which of the samples at these positions in `data` are classified correctly, by their true
        labels."""
        labels = self._labels(positions, self.data.true_y)
        return (
            self.backend.hits(self.backend.forward(params, self.data.x, positions), labels)
            .cpu()
            .numpy()
        )

    def predict(self, params: Params, x: Tensor) -> Tensor:
        """Log-probabilities of `params` in eval mode, float64 [len(x), C]."""
        return log_softmax(self.backend.forward(params, x))
