"""Local training of one client in plain PyTorch: torch.optim's optimisers and torch's layers on real batches."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.engine.engine import ClientData
from fedsim.engine.model.adapt import for_sequential, keyed_dropouts
from fedsim.engine.model.parameters import buffer_names, trained_names
from fedsim.engine.precision import Precision, autocast
from fedsim.engine.schedule import ClientBatches
from fedsim.optimizers.base import LocalOptimizer
from fedsim.types import Params


@dataclass(frozen=True)
class TrainedClient:
    """w_k - w; the mean over steps of the mean loss and the mean square of the samples' losses, nan without a step; the
    optimiser's momentum buffers, empty for one without."""

    delta: Params
    loss: float
    mean_square: float
    momentum: Params


class ClientTrainer:
    """A copy of the model that trains one client after another. Not for two threads at once."""

    def __init__(
        self,
        model: nn.Module,
        data: ClientData,
        layout: torch.memory_format,
        optimizer: LocalOptimizer,
        precision: Precision,
    ) -> None:
        self.model = for_sequential(model).to(data.x.device)
        self.data, self.layout, self.optimizer, self.precision = data, layout, optimizer, precision
        self.dropouts = [layer for _, layer in keyed_dropouts(self.model)]
        named = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        self.tensors = {name: named[name] for name in (*trained_names(self.model), *buffer_names(self.model))}

    def train(self, params: Params, batches: ClientBatches, keys: Tensor, lr: float) -> TrainedClient:
        """From `params`, over `batches`; `keys` [steps] are those of dropout, if the model has any."""
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                tensor.copy_(params[name])
        optimizer = self.optimizer.torch_optimizer([p for p in self.model.parameters() if p.requires_grad], lr)
        loss, mean_square = self._steps(batches, keys, optimizer)
        delta = {name: tensor.detach() - params[name] for name, tensor in self.tensors.items()}
        return TrainedClient(delta, loss, mean_square, self._momentum(optimizer))

    def _steps(self, batches: ClientBatches, keys: Tensor, optimizer: torch.optim.Optimizer) -> tuple[float, float]:
        if not len(batches):
            return float("nan"), float("nan")
        positions = torch.as_tensor(batches.positions, device=self.data.x.device)
        means, squares = [], []
        for step, count in enumerate(batches.counts):
            for layer in self.dropouts:
                layer.key.copy_(keys[step])
                layer.calls = 0
            each = self._losses(positions[step, : int(count)])
            mean = each.mean()
            optimizer.zero_grad(set_to_none=True)
            mean.backward()
            optimizer.step()
            means.append(mean.detach())
            squares.append(each.detach().square().sum())
        mean_square = float(torch.stack(squares).double().sum()) / float(batches.counts.sum())
        return float(torch.stack(means).double().mean()), mean_square

    def _losses(self, chosen: Tensor) -> Tensor:
        """Cross-entropies of the samples at these positions."""
        x = self.data.x.index_select(0, chosen).contiguous(memory_format=self.layout)
        with autocast(self.precision, x.device):
            output = self.model(x)
        return F.cross_entropy(output.to(x.dtype), self.data.y[chosen], reduction="none")

    def _momentum(self, optimizer: torch.optim.Optimizer) -> Params:
        """SGD's momentum buffers, zero before a first step."""
        if not optimizer.defaults.get("momentum"):
            return {}
        trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        buffers = {n: optimizer.state[p].get("momentum_buffer") for n, p in trained.items()}
        return {n: torch.zeros_like(trained[n]) if b is None else b for n, b in buffers.items()}
