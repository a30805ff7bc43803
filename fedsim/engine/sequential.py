"""One client after another in plain PyTorch: the oracle of the batched engine, and the faster one for convolutions on
a CPU."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.cohort import Ids, Params
from fedsim.engine.adapt import for_sequential, keyed_dropouts, refuse_hidden_randomness
from fedsim.engine.base import ClientData, Engine, LocalWork, Trained
from fedsim.engine.batches import ClientBatches, round_batches
from fedsim.engine.keys import step_keys
from fedsim.engine.params import buffer_names, trained_names
from fedsim.optimizers.base import LocalOptimizer
from fedsim.streams import Streams


class SequentialEngine(Engine):
    """torch.optim optimisers and torch's own layers on real, unpadded batches; only dropout's masks are keyed."""

    def __init__(
        self, model: nn.Module, data: ClientData, work: LocalWork, optimizer: LocalOptimizer, streams: Streams
    ) -> None:
        super().__init__(model, data, work, optimizer, streams)
        self.worker = for_sequential(model).to(data.x.device)
        self.dropouts = [layer for _, layer in keyed_dropouts(self.worker)]
        named = dict(self.worker.named_parameters()) | dict(self.worker.named_buffers())
        self.tensors = {name: named[name] for name in (*trained_names(self.worker), *buffer_names(self.worker))}
        if len(data.x):
            refuse_hidden_randomness(model, data.x)

    @property
    def description(self) -> str:
        return "sequential"

    def train(self, params: Params, ids: Ids, round: int, lr: float) -> Trained:
        batches = round_batches(self.data, self.work, self.streams, round, ids)
        num_keys = max((len(b) for b in batches), default=0) if self.dropouts else 0
        keys = torch.as_tensor(step_keys(self.streams, round, ids, num_keys), device=self.data.x.device)
        delta = {name: value.new_empty((len(ids), *value.shape)) for name, value in params.items()}
        losses = np.full(len(ids), np.nan)
        for row, work in enumerate(batches):
            losses[row] = self._train_client(params, work, keys[:, row], lr)
            for name, tensor in self.tensors.items():
                torch.sub(tensor.detach(), params[name], out=delta[name][row])
        return Trained(
            delta=delta,
            loss=losses,
            steps=np.array([len(b) for b in batches], dtype=np.int64),
            samples=np.array([b.counts.sum() for b in batches], dtype=np.int64),
        )

    def _train_client(self, params: Params, batches: ClientBatches, keys: Tensor, lr: float) -> float:
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                tensor.copy_(params[name])
        if not len(batches):
            return float("nan")
        optimizer = self.optimizer.torch_optimizer([p for p in self.worker.parameters() if p.requires_grad], lr)
        positions = torch.as_tensor(batches.positions, device=self.data.x.device)
        losses = []
        for step, count in enumerate(batches.counts):
            for layer in self.dropouts:
                layer.key.copy_(keys[step])
                layer.calls = 0
            chosen = positions[step, : int(count)]
            optimizer.zero_grad(set_to_none=True)
            x = self.data.x.index_select(0, chosen).contiguous(memory_format=self.layout)
            loss = F.cross_entropy(self.worker(x), self.data.y[chosen])
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return float(torch.stack(losses).double().mean())
