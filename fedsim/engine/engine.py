"""Local training, losses, gradients and evaluation of the clients of one run, on top of a backend."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.engine.backend import Backend, Workload
from fedsim.engine.model.adapt import has_dropout
from fedsim.engine.model.parameters import trained_names
from fedsim.engine.results import ClientUpdates, client_updates
from fedsim.engine.schedule import LocalWork, make_schedule
from fedsim.errors import Problem, check
from fedsim.exact.losses import log_softmax
from fedsim.exact.sums import row_sums
from fedsim.flat import to_device
from fedsim.rng import Streams
from fedsim.types import Evaluation, Ids, Params


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
        sizes = np.array([len(p) for p in positions], dtype=np.int64)
        if not sizes.sum():
            return np.full(len(sizes), np.nan)
        chosen = np.concatenate(positions)
        labels = self.data.y[to_device(torch.as_tensor(chosen), self.data.y.device)]
        values = self.backend.cross_entropies(self.backend.forward(params, self.data.x, chosen), labels)
        owner = np.repeat(np.arange(len(sizes)), sizes)
        totals = np.bincount(owner, values.cpu().numpy(), minlength=len(sizes))
        with np.errstate(invalid="ignore"):
            means: NDArray[np.float64] = totals / sizes
        return means

    def accuracies(self, params: Params, positions: Sequence[NDArray[np.int64]]) -> NDArray[np.float64]:
        """Accuracy of `params` in eval mode over each list of positions in `data` [len(positions)]; of none, nan."""
        sizes = np.array([len(p) for p in positions], dtype=np.int64)
        if not sizes.sum():
            return np.full(len(sizes), np.nan)
        chosen = np.concatenate(positions)
        labels = self.data.y[to_device(torch.as_tensor(chosen), self.data.y.device)]
        right = (self.backend.forward(params, self.data.x, chosen).argmax(1) == labels).cpu().numpy()
        totals = np.bincount(np.repeat(np.arange(len(sizes)), sizes), right, minlength=len(sizes))
        with np.errstate(invalid="ignore"):
            shares: NDArray[np.float64] = totals / sizes
        return shares

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
        labels = self.data.y[to_device(torch.as_tensor(positions), self.data.y.device)]
        found: NDArray[np.bool_] = (
            (self.backend.forward(params, self.data.x, positions).argmax(1) == labels).cpu().numpy()
        )
        return found

    def predict(self, params: Params, x: Tensor) -> Tensor:
        """Log-probabilities of `params` in eval mode, float64 [len(x), C]."""
        return log_softmax(self.backend.forward(params, x))
