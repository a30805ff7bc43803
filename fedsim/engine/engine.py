"""The engine of one run: local training, losses, gradients and evaluation of its clients.

The engine knows which client holds which samples, and makes the schedule of each round. A backend
(`fedsim.engine.backend`) computes.
"""

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


class Engine:
    """Trains and evaluates the clients of one run by means of a backend."""

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
        """The backend and why it was chosen, for the summary."""
        description = self.backend.description
        if self.backend.reason:
            description += f" (auto: {self.backend.reason})"
        return description

    @property
    def warning(self) -> str | None:
        """A warning about clients that train batch norm on a batch of one sample, or None."""
        sizes = self._sizes[self._sizes > 0]
        batch_size = self.work.batch_size
        count = np.count_nonzero((sizes - 1) % batch_size == 0)
        if count == 0 or not has_batch_norm(self.workload.model):
            return None
        return (
            f"local.batch_size={batch_size}: {count} of {len(sizes)} clients have a "
            "batch of one sample, in which batch norm sees no variance; another size, or a model "
            "without batch norm, avoids it"
        )

    def train(
        self,
        params: Params,
        ids: Ids,
        round: int,
        lr: float,
        start: Sequence[Params] | None = None,
        correction: Correction | None = None,
    ) -> Cohort:
        """Train clients `ids` from `params`, which do not change, in a `round` (1-based).

        `start` has a model for each client, from which it starts instead. The updates are
        differences to `params` in any case. `correction` is added to the gradients; the losses do
        not contain it. Raises `FedsimError` if its shift does not fit the trained parameters.
        """
        schedule = make_schedule(
            self.data.train,
            self.work,
            self._streams,
            round,
            ids,
            lr,
            dropout=self._dropout,
            augmented=self.data.augment is not None,
        )
        if correction:
            if correction.shift is not None:
                self._check_shift(correction.shift, params, len(ids))
            schedule = replace(schedule, correction=correction)
        if start is None:
            result = self.backend.train([params] * len(ids), schedule)
            delta = result.delta
        else:
            result = self.backend.train(start, schedule)
            delta = {}
            for name, value in params.items():
                moved = torch.stack([model[name] for model in start]) - value
                delta[name] = result.delta[name] + moved
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

    def _check_shift(self, shift: Stack, params: Params, count: int) -> None:
        """Raise `FedsimError` unless `shift` has a fitting tensor for each trained parameter."""
        expected = {}
        for name in self.trained:
            value = params[name]
            expected[name] = f"{[count, *value.shape]} {value.dtype} {value.device}"
        actual = {n: f"{[*v.shape]} {v.dtype} {v.device}" for n, v in shift.items()}
        for name in expected | actual:
            is_, must_be = actual.get(name, "missing"), expected.get(name, "missing")
            if is_ != must_be:
                raise FedsimError(f"the shift of a correction: {name} is {is_}; must be {must_be}")

    def losses(self, params: Params, positions: Sequence[Ints]) -> Floats:
        """Return the mean cross-entropy of `params` in eval mode over each list of positions.

        The shape is [len(positions)]; an empty list gives nan. All lists pass through the model
        together.
        """
        return self._means(params, positions, self.backend.cross_entropies)

    def accuracies(self, params: Params, positions: Sequence[Ints]) -> Floats:
        """Return the accuracy of `params` in eval mode over each list of positions.

        The shape is [len(positions)]; an empty list gives nan.
        """
        return self._means(params, positions, self.backend.hits)

    def _means(
        self,
        params: Params,
        positions: Sequence[Ints],
        measure: Callable[[Tensor, Tensor], Tensor],
    ) -> Floats:
        """Return the mean of `measure(logits, labels)` over each list of positions."""
        lists = ClientPositions.of(positions)
        count = len(lists)
        if not len(lists.flat):
            return np.full(count, np.nan)
        logits = self.backend.forward(params, self.data.x, lists.flat)
        labels = self._at(self.data.y, lists.flat)
        values = measure(logits, labels).cpu().numpy()
        list_numbers = np.repeat(np.arange(count), lists.sizes)
        totals = np.bincount(list_numbers, values, minlength=count)
        with np.errstate(invalid="ignore"):
            return totals / lists.sizes

    def _at(self, labels: Tensor, positions: Ints) -> Tensor:
        return labels[to_device(torch.as_tensor(positions), labels.device)]

    def client_gradients(
        self,
        params: Params,
        positions: Sequence[Ints],
        names: Sequence[str] | None = None,
    ) -> Iterator[Tensor]:
        """Yield the gradient of the mean cross-entropy in eval mode for each list of positions.

        A gradient is flat [D], in the parameters `names` (None: all that are trained). An empty
        list gives zeros.
        """
        return self.backend.gradients(params, positions, self.trained if names is None else names)

    def evaluate(self, params: Params, x: Tensor, y: Tensor) -> Evaluation:
        """Return accuracy and mean cross-entropy of `params` in eval mode over a labelled set."""
        return self.evaluate_samples(params, x, y)[0]

    def evaluate_samples(self, params: Params, x: Tensor, y: Tensor) -> tuple[Evaluation, Tensor]:
        """Evaluate `params` on a labelled set, and return which samples are classified correctly
        [n].

        Raises `ConfigError` if the model's output is not logits.
        """
        output = self.backend.forward(params, x)
        classes = self.data.num_classes
        if output.dim() != 2 or len(output) != len(x) or output.shape[1] < classes:
            text = (
                f"must return logits [batch, num_classes={classes}], not {list(output.shape)} for "
                f"{len(x)} samples"
            )
            raise ConfigError([Problem("model", type(self.workload.model).__name__, text)])
        hits = self.backend.hits(output, y)
        losses = self.backend.cross_entropies(output, y)
        loss = row_sums(losses[None])[0] if self.backend.exact else losses.sum()
        # One copy from a GPU, because the host waits for each.
        num_hits, total_loss = torch.stack([hits.sum().double(), loss]).tolist()
        return Evaluation(num_hits / len(y), total_loss / len(y)), hits

    def hits(self, params: Params, positions: Ints) -> Bools:
        """Return which samples at `positions` are classified correctly, by their true labels."""
        true_labels = self.data.y if self.data.true_y is None else self.data.true_y
        logits = self.backend.forward(params, self.data.x, positions)
        return self.backend.hits(logits, self._at(true_labels, positions)).cpu().numpy()

    def predict(self, params: Params, x: Tensor) -> Tensor:
        """Return log-probabilities of `params` in eval mode, float64 [len(x), C]."""
        return log_softmax(self.backend.forward(params, x))


def mean_losses(losses: NDArray[Any], schedule: Schedule) -> tuple[Floats, Floats]:
    """Return `loss` and `rms_loss` [K] of a `Cohort` from the `losses` [K, S, B] of all samples.

    Clients without a step get nan.
    """
    losses = np.where(schedule.mask, losses, 0.0).astype(np.float64)
    with np.errstate(invalid="ignore"):
        batch_means = _sum(losses) / np.maximum(schedule.counts, 1)
        loss = _sum(batch_means) / schedule.steps
        rms_loss = np.sqrt(_sum(_sum(losses**2)) / schedule.samples)
    return loss, rms_loss


def _sum(values: Floats) -> Floats:
    """Sum over the last axis, one term after another.

    Zeros at its end, which stand for padding, then change no bit.
    """
    return values.cumsum(-1)[..., -1] if values.shape[-1] else np.zeros(values.shape[:-1])
