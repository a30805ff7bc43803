"""Chains of layers in compiled C: each client's whole local training is one call, on a core of its own."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.engine.engine import EVALUATION_BATCH, ClientData, Engine, LocalWork, Request, Trained
from fedsim.engine.model.chain import Chain, any_chain
from fedsim.engine.model.parameters import initial
from fedsim.engine.native.calls import ChainCalls, Work
from fedsim.engine.native.library import NotCompiledError
from fedsim.engine.native.round import Round
from fedsim.errors import ConfigError, Problem, check, rule
from fedsim.optimizers.base import LocalOptimizer
from fedsim.optimizers.sgd import SGD
from fedsim.rng import Streams
from fedsim.types import Params

WIDTH = 120
"""Samples in one product of an evaluation, so that their activations stay in the cache."""
AHEAD = 16
"""Clients of several requests that are worth training at once, for each worker."""


class NativeEngine(Engine):
    """Clients side by side, `workers` at a time (`auto`: as many as torch has threads). Equal to the other engines up
    to rounding; what one client gets is the same to the last bit whoever trains beside it.

    For chains (`fedsim.engine.model.chain.any_chain`) under SGD in float32 on a CPU. Raises `ConfigError` for anything
    else, and where the C code cannot be compiled.
    """

    layers: Chain
    optimizer: SGD

    def __init__(
        self,
        model: nn.Module,
        data: ClientData,
        work: LocalWork,
        optimizer: LocalOptimizer,
        streams: Streams,
        *,
        workers: int | Literal["auto"],
    ) -> None:
        check(
            rule(workers == "auto" or workers >= 1, "workers", workers, "must be auto or >= 1"),
            unfit(model, optimizer, data),
        )
        super().__init__(model, replace(data, x=data.x.contiguous()), work, optimizer, streams)
        found = any_chain(model)
        assert found is not None
        self.layers = found
        try:
            self._calls(initial(self.model))
        except (NotCompiledError, ValueError) as error:
            text = f"cannot be compiled: {error}" if isinstance(error, NotCompiledError) else str(error)
            raise ConfigError([Problem("", ..., text, "engine=batched runs without C")]) from error
        self.workers = torch.get_num_threads() if workers == "auto" else workers
        self._pool = ThreadPoolExecutor(self.workers)

    @property
    def description(self) -> str:
        return f"native, {self.workers} clients at a time" if self.workers > 1 else "native"

    @property
    def common_clients(self) -> int:
        return AHEAD * self.workers

    def train_all(self, requests: Sequence[Request]) -> list[Trained]:
        """The clients of all requests in one queue; they do not touch each other. Those who would leave cores without
        work at the end share all of them."""
        rounds = [Round(self.layers, self.optimizer, self.data, request) for request in requests]
        jobs = [(r, row) for r in rounds for row in range(len(r.batches))]
        alone = len(jobs) - len(jobs) % self.workers
        threads = self.workers // max(len(jobs) - alone, 1)
        list(self._pool.map(lambda job: job[0].train(job[1]), jobs[:alone]))
        list(self._pool.map(lambda job: job[0].train(job[1], threads), jobs[alone:]))
        return [r.trained() for r in rounds]

    def client_gradients(
        self, params: Params, positions: Sequence[NDArray[np.int64]], names: Sequence[str] | None
    ) -> Iterator[Tensor]:
        names = self.trained if names is None else names
        calls = self._calls(params)
        for start in range(0, len(positions), self.workers):
            some = positions[start : start + self.workers]
            yield from self._pool.map(lambda chosen: self._mean_gradient(calls, chosen, names), some)

    def _mean_gradient(self, calls: ChainCalls, chosen: NDArray[np.int64], names: Sequence[str]) -> Tensor:
        found = {name: torch.zeros_like(value) for name, value in calls.params.items()}
        calls.gradient(self._work(self.data.x, chosen, self.data.y), found)
        return torch.cat([found[name].flatten() for name in names]).div_(max(len(chosen), 1))

    def _calls(self, params: Params) -> ChainCalls:
        return ChainCalls(self.layers, params, self.data.x.shape[1:])

    def _outputs(self, params: Params, x: Tensor) -> Tensor:
        return self._logits(params, x.contiguous(), np.arange(len(x)))

    def _cross_entropies(self, params: Params, chosen: Tensor) -> Tensor:
        logits = self._logits(params, self.data.x, chosen.numpy())
        return F.cross_entropy(logits, self.data.y[chosen], reduction="none")

    def _logits(self, params: Params, x: Tensor, chosen: NDArray[np.int64]) -> Tensor:
        """Of the samples at these positions in `x`."""
        calls, outputs = self._calls(params), len(params[self.layers.links[-1].weight])
        result = x.new_empty(len(chosen), outputs)
        rounds = -(-len(chosen) // (EVALUATION_BATCH * self.workers))
        size = -(-len(chosen) // max(rounds * self.workers, 1))
        parts = [slice(start, start + size) for start in range(0, len(chosen), size or 1)]
        list(self._pool.map(lambda part: calls.outputs(self._work(x, chosen[part]), result[part]), parts))
        return result

    def _work(self, x: Tensor, chosen: NDArray[np.int64], y: Tensor | None = None) -> Work:
        """Samples in batches of `WIDTH`."""
        steps = -(-len(chosen) // WIDTH)
        positions = np.zeros((steps, WIDTH), np.int64)
        positions.reshape(-1)[: len(chosen)] = chosen
        counts = np.minimum(WIDTH, len(chosen) - WIDTH * np.arange(steps))
        losses: NDArray[Any] = np.empty(positions.shape, x.numpy().dtype)
        return Work(x, y, positions, counts, losses)


def unfit(model: nn.Module, optimizer: LocalOptimizer, data: ClientData) -> Problem | None:
    """Why this engine cannot train this model in this way on these data, if so."""
    remedy, chain, device = "engine=auto takes what fits", any_chain(model), data.x.device
    if chain is None:
        kinds = "plain convolutions, 2 x 2 max poolings and linear layers with ReLU between them"
        return Problem("", ..., f"runs chains of {kinds} alone", remedy)
    if type(optimizer) is not SGD:
        return Problem("", ..., f"knows optimizer=sgd alone, not {type(optimizer).__name__}", remedy)
    outputs = len(initial(model)[chain.links[-1].weight])
    if outputs < data.num_classes:
        return Problem("", ..., f"needs an output for each of {data.num_classes} classes, not {outputs}", remedy)
    return None if device.type == "cpu" else Problem("", ..., f"runs on a CPU alone, not on {device}", remedy)
