"""What trains and evaluates clients. One client's mathematics never depends on how many run at once."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedsim.data.base import check_labels
from fedsim.engine.model.adapt import layout_for
from fedsim.engine.model.chain import linear_chain
from fedsim.engine.model.parameters import trained_names
from fedsim.engine.precision import Precision, autocast
from fedsim.optimizers.base import LocalOptimizer
from fedsim.rng import Streams
from fedsim.types import Evaluation, Ids, Params, Stack

EVALUATION_BATCH = 1000
"""Samples in one forward pass of an evaluation."""
MOST = 0.7
"""A share of all samples, from which on it is faster to pass all of them than to gather some."""


@dataclass(frozen=True)
class ClientData:
    """All clients' samples on the device: `x` [n, ...] float32, `y` [n] int64; positions in them per client [N].

    `train` are the positions a client trains on, `evaluate` those its loss is reported on. Raises `DataError` where a
    label is not the index of a class: compiled kernels take it for one unchecked.
    """

    x: Tensor
    y: Tensor
    train: Sequence[NDArray[np.int64]]
    evaluate: Sequence[NDArray[np.int64]]
    num_classes: int

    def __post_init__(self) -> None:
        check_labels(self.y, self.num_classes, "training")


@dataclass(frozen=True)
class LocalWork:
    """Local training: `steps` optimiser steps, or, where `steps` is None, `epochs` passes; batches of `batch_size`.

    Batches come from consecutive seeded epochs; the last batch of an epoch is short where the size does not divide, so
    `steps = epochs * ceil(n_k / batch_size)` is the same work as `epochs`. `num_rounds` of the whole run is for what
    pays only in long ones.
    """

    epochs: int | None
    steps: int | None
    batch_size: int
    num_rounds: int = 0

    def total_steps(self, positions: Sequence[NDArray[np.int64]]) -> int:
        """Steps of a client of middling size in a run of `num_rounds` rounds, as if it took part in all of them."""
        return self.num_rounds * self.num_steps(int(np.median([len(p) for p in positions]))) if len(positions) else 0

    def num_steps(self, size: int) -> int:
        """Optimiser steps of a client with `size` samples."""
        if size == 0:
            return 0
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return self.epochs * -(-size // self.batch_size)


@dataclass(frozen=True)
class Trained:
    """Result of local training, on the device: `delta` = w_k - w [K, ...]; per client [K]: mean training loss over
    local steps, root mean square of the losses of all samples passed, optimiser steps, samples passed forward and
    backward. `momentum` [K, ...] holds the optimiser's last momentum buffers, None where it has none."""

    delta: Stack
    loss: NDArray[np.float64]
    rms_loss: NDArray[np.float64]
    steps: NDArray[np.int64]
    samples: NDArray[np.int64]
    momentum: Stack | None = None

    def split(self, sizes: Sequence[int]) -> list["Trained"]:
        """Consecutive parts of so many rows each, without a copy."""
        if len(sizes) == 1:
            return [self]
        ends = np.cumsum(sizes)
        return [self._slice(slice(int(end) - size, int(end))) for size, end in zip(sizes, ends, strict=True)]

    def _slice(self, rows: slice) -> "Trained":
        delta, momentum = ({n: v[rows] for n, v in (s or {}).items()} for s in (self.delta, self.momentum))
        return Trained(
            delta, self.loss[rows], self.rms_loss[rows], self.steps[rows], self.samples[rows], momentum or None
        )

    def rows(self, rows: NDArray[np.int64]) -> "Trained":
        """Those `rows`, in this order."""
        index = torch.as_tensor(rows)
        delta, momentum = (
            {n: v[index.to(v.device)] for n, v in (s or {}).items()} for s in (self.delta, self.momentum)
        )
        return Trained(
            delta=delta,
            loss=self.loss[rows],
            rms_loss=self.rms_loss[rows],
            steps=self.steps[rows],
            samples=self.samples[rows],
            momentum=momentum or None,
        )


@dataclass(frozen=True)
class Request:
    """Clients `ids` of `engine` to be trained from `params` in `round` with learning rate `lr`."""

    engine: "Engine"
    params: Params
    ids: Ids
    round: int
    lr: float

    def cut(self, size: int) -> list["Request"]:
        """The same for at most `size` clients at a time."""
        return [replace(self, ids=self.ids[start : start + size]) for start in range(0, len(self.ids), size)]


def concatenate(parts: Sequence[Trained]) -> Trained:
    """All rows of `parts` in order."""
    if len(parts) == 1:
        return parts[0]
    momenta = [p.momentum for p in parts if p.momentum is not None]
    return Trained(
        delta=_joined([p.delta for p in parts]),
        loss=np.concatenate([p.loss for p in parts]),
        rms_loss=np.concatenate([p.rms_loss for p in parts]),
        steps=np.concatenate([p.steps for p in parts]),
        samples=np.concatenate([p.samples for p in parts]),
        momentum=_joined(momenta) if momenta else None,
    )


def _joined(stacks: Sequence[Stack]) -> Stack:
    return {name: torch.cat([s[name] for s in stacks]) for name in stacks[0]}


class Engine(ABC):
    """Local training of many clients, and evaluation. Subclasses take switches keyword-only, annotated, no defaults."""

    meeting: Callable[["Request"], Trained] | None = None
    """Who trains for this engine together with others (`fedsim.running.interleaving`); None: it does by itself."""

    def __init__(
        self,
        model: nn.Module,
        data: ClientData,
        work: LocalWork,
        optimizer: LocalOptimizer,
        streams: Streams,
        precision: Precision = "float32",
    ) -> None:
        self.model = copy.deepcopy(model).to(data.x.device).eval()
        self.layout = layout_for(self.model, data.x)
        self.data = data
        self.work = work
        self.optimizer = optimizer
        self.streams = streams
        self.precision = precision
        self.chain = linear_chain(model) if precision == "float32" else None

    @property
    def trained(self) -> list[str]:
        """Names of the parameters that local training changes."""
        return trained_names(self.model)

    @property
    def common_clients(self) -> int:
        """Clients of several requests that are worth training at once (1: none)."""
        return 1

    @property
    def description(self) -> str:
        """What runs, in a few words, for the summary (an engine that chooses says what it chose and why)."""
        return type(self).__name__

    def train(self, params: Params, ids: Ids, round: int, lr: float) -> Trained:
        """Train `ids` from `params` (not modified) with learning rate `lr`. Batch order: (TRAIN, round, client)."""
        request = Request(self, params, ids, round, lr)
        return self.train_all([request])[0] if self.meeting is None else self.meeting(request)

    @abstractmethod
    def train_all(self, requests: Sequence["Request"]) -> list[Trained]:
        """What each request asks for, to the last bit what it would get alone.

        They come from engines alike in everything but who holds which samples and the seeds.
        """

    def losses(self, params: Params, positions: Sequence[NDArray[np.int64]]) -> NDArray[np.float64]:
        """Mean cross-entropy of `params` in eval mode over each list of positions in `data` [len(positions)].

        All lists pass through the model together, in batches that know nothing of whose samples they hold. An empty
        list gives nan.
        """
        sizes = np.array([len(p) for p in positions], dtype=np.int64)
        if not sizes.sum():
            return np.full(len(sizes), np.nan)
        chosen = torch.as_tensor(np.concatenate(positions), device=self.data.x.device)
        values = self._cross_entropies(params, chosen)
        owner = np.repeat(np.arange(len(sizes)), sizes)
        totals = np.bincount(owner, values.double().cpu().numpy(), minlength=len(sizes))
        with np.errstate(invalid="ignore"):
            means: NDArray[np.float64] = totals / sizes
        return means

    def evaluate(self, params: Params, x: Tensor, y: Tensor) -> Evaluation:
        """Accuracy and mean cross-entropy of `params` in eval mode over a labelled set on the device."""
        output = self._outputs(params, x)
        correct = int((output.argmax(1) == y).sum())
        precise = output.double()
        loss = float((precise.logsumexp(1) - precise.gather(1, y.unsqueeze(1)).squeeze(1)).sum())
        return Evaluation(correct / len(y), loss / len(y))

    def client_gradients(
        self, params: Params, positions: Sequence[NDArray[np.int64]], names: Sequence[str] | None
    ) -> Iterator[Tensor]:
        """For each list of positions in `data`, the gradient of its mean cross-entropy in eval mode, flat [D].

        `names` picks parameters (None: all that are trained), concatenated in their order. One list at a time, so that
        nobody needs room for all of them. An empty list gives zeros.
        """
        names = self.trained if names is None else names
        for chosen in positions:
            total = [torch.zeros_like(params[name]) for name in names]
            for part in torch.as_tensor(chosen, device=self.data.x.device).split(EVALUATION_BATCH):
                torch._foreach_add_(total, self._gradients(params, part, names))
            torch._foreach_div_(total, max(len(chosen), 1))
            yield torch.cat([t.flatten() for t in total])

    def _gradients(self, params: Params, chosen: Tensor, names: Sequence[str]) -> list[Tensor]:
        """Of the sum of the cross-entropies of the samples at these positions, for each of `names`."""
        x, y = self.data.x.index_select(0, chosen), self.data.y[chosen]
        if self.chain is not None:
            found = self.chain.gradient(params, x, y)
            return [found[name] for name in names]
        leaves = {name: params[name].detach().requires_grad_() for name in names}
        with autocast(self.precision, x.device):
            output = functional_call(self.model, {**params, **leaves}, (x.contiguous(memory_format=self.layout),))
        loss = F.cross_entropy(output.to(x.dtype), y, reduction="sum")
        return list(torch.autograd.grad(loss, list(leaves.values())))

    def predict(self, params: Params, x: Tensor) -> Tensor:
        """Log-probabilities of `params` in eval mode, float64 [len(x), C]."""
        return F.log_softmax(self._outputs(params, x).double(), dim=1)

    def _cross_entropies(self, params: Params, chosen: Tensor) -> Tensor:
        """Of the samples at these positions. Where that is most of all samples, all pass in their order, uncopied."""
        x, y = self.data.x, self.data.y
        if len(chosen) < MOST * len(x):
            parts = chosen.split(EVALUATION_BATCH)
            values = [F.cross_entropy(self._output(params, x[p]), y[p], reduction="none") for p in parts]
            return torch.cat(values)
        pairs = zip(x.split(EVALUATION_BATCH), y.split(EVALUATION_BATCH), strict=True)
        everything = [F.cross_entropy(self._output(params, a), b, reduction="none") for a, b in pairs]
        return torch.cat(everything)[chosen]

    def _outputs(self, params: Params, x: Tensor) -> Tensor:
        return torch.cat([self._output(params, part) for part in x.split(EVALUATION_BATCH)])

    @torch.no_grad()
    def _output(self, params: Params, x: Tensor) -> Tensor:
        if self.chain is not None:
            return self.chain.output(params, x)
        with autocast(self.precision, x.device):
            output: Tensor = functional_call(self.model, params, (x.contiguous(memory_format=self.layout),))
        return output.to(x.dtype)
