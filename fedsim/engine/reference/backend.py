"""Every client by itself in plain PyTorch: the oracle of the batched engine, and the faster one for convolutions on a
CPU."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import nn

from fedsim.engine.engine import ClientData, Engine, LocalWork, Request, Trained
from fedsim.engine.keys import step_keys
from fedsim.engine.model.adapt import refuse_hidden_randomness
from fedsim.engine.precision import Precision
from fedsim.engine.reference.client import ClientTrainer
from fedsim.engine.reference.workers import Crew
from fedsim.engine.schedule import round_batches
from fedsim.errors import check, rule
from fedsim.optimizers.base import LocalOptimizer
from fedsim.rng import Streams
from fedsim.types import Params, Stack


class SequentialEngine(Engine):
    """Clients one after another, or, on a CPU, `workers` at a time on one core each (`auto`: as many as torch has
    threads; one on a GPU)."""

    def __init__(
        self,
        model: nn.Module,
        data: ClientData,
        work: LocalWork,
        optimizer: LocalOptimizer,
        streams: Streams,
        *,
        precision: Precision,
        workers: int | Literal["auto"],
    ) -> None:
        check(rule(workers == "auto" or workers >= 1, "workers", workers, "must be auto or >= 1"))
        super().__init__(model, data, work, optimizer, streams, precision)
        num = (1 if data.x.is_cuda else torch.get_num_threads()) if workers == "auto" else workers
        self.crew = Crew([ClientTrainer(model, data, self.layout, optimizer, precision) for _ in range(num)])
        if len(data.x):
            refuse_hidden_randomness(model, data.x)

    @property
    def description(self) -> str:
        return "sequential" if len(self.crew.tools) == 1 else f"sequential, {len(self.crew.tools)} clients at a time"

    def train_all(self, requests: Sequence[Request]) -> list[Trained]:
        """One request after another, so that each finds the threads that it would find alone."""
        return [self._train_one(request) for request in requests]

    def _train_one(self, request: Request) -> Trained:
        params, lr, batches = request.params, request.lr, round_batches(request)
        num_keys = max((len(b) for b in batches), default=0) if self.crew.tools[0].dropouts else 0
        keys = torch.as_tensor(
            step_keys(request.engine.streams, request.round, request.ids, num_keys), device=self.data.x.device
        )
        jobs = list(range(len(batches)))
        done = self.crew.map(lambda trainer, row: trainer.train(params, batches[row], keys[:, row], lr), jobs)
        return Trained(
            delta=_stacked([d.delta for d in done]) or {n: v.new_empty((0, *v.shape)) for n, v in params.items()},
            loss=np.array([d.loss for d in done]),
            rms_loss=np.sqrt([d.mean_square for d in done]),
            steps=np.array([len(b) for b in batches], dtype=np.int64),
            samples=np.array([b.counts.sum() for b in batches], dtype=np.int64),
            momentum=_stacked([d.momentum for d in done]),
        )


def _stacked(models: list[Params]) -> Stack | None:
    """One tensor per name [K, ...]; None where there is none."""
    if not models or not models[0]:
        return None
    return {name: torch.stack([m[name] for m in models]) for name in models[0]}
