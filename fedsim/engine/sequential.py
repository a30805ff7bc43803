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
        losses, squares = np.full(len(ids), np.nan), np.full(len(ids), np.nan)
        momenta: list[Params] = []
        for row, work in enumerate(batches):
            optimizer = self._start(params, lr)
            losses[row], squares[row] = self._train_client(work, keys[:, row], optimizer)
            for name, tensor in self.tensors.items():
                torch.sub(tensor.detach(), params[name], out=delta[name][row])
            momenta.append(self._momentum(optimizer))
        return Trained(
            delta=delta,
            loss=losses,
            rms_loss=np.sqrt(squares),
            steps=np.array([len(b) for b in batches], dtype=np.int64),
            samples=np.array([b.counts.sum() for b in batches], dtype=np.int64),
            momentum={n: torch.stack([m[n] for m in momenta]) for n in momenta[0]} if momenta and momenta[0] else None,
        )

    @torch.no_grad()
    def _start(self, params: Params, lr: float) -> torch.optim.Optimizer:
        for name, tensor in self.tensors.items():
            tensor.copy_(params[name])
        return self.optimizer.torch_optimizer([p for p in self.worker.parameters() if p.requires_grad], lr)

    def _momentum(self, optimizer: torch.optim.Optimizer) -> Params:
        """The momentum buffers of SGD, zero before a first step; empty for an optimiser without."""
        if not optimizer.defaults.get("momentum"):
            return {}
        trained = {n: p for n, p in self.worker.named_parameters() if p.requires_grad}
        return {n: optimizer.state[p].get("momentum_buffer", torch.zeros_like(p)) for n, p in trained.items()}

    def _train_client(
        self, batches: ClientBatches, keys: Tensor, optimizer: torch.optim.Optimizer
    ) -> tuple[float, float]:
        """Mean over steps of the mean loss, and mean square of all samples' losses; nan without a step."""
        if not len(batches):
            return float("nan"), float("nan")
        positions = torch.as_tensor(batches.positions, device=self.data.x.device)
        losses, squares = [], []
        for step, count in enumerate(batches.counts):
            for layer in self.dropouts:
                layer.key.copy_(keys[step])
                layer.calls = 0
            chosen = positions[step, : int(count)]
            optimizer.zero_grad(set_to_none=True)
            x = self.data.x.index_select(0, chosen).contiguous(memory_format=self.layout)
            each = F.cross_entropy(self.worker(x), self.data.y[chosen], reduction="none")
            loss = each.mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            squares.append(each.detach().square().sum())
        mean_square = float(torch.stack(squares).double().sum()) / float(batches.counts.sum())
        return float(torch.stack(losses).double().mean()), mean_square
