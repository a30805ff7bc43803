"""Gradients of many clients at once by torch.func's vmap, for any model that it can run.

`StackedGradients` serves training: it has one model and one batch for each client. In
`joint_gradients`, all clients have the same model, in eval mode, and lists of samples.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, vmap
from torch.nn import functional as F

from fedsim.core.arrays import Floats, Ints
from fedsim.core.flat import real_dtype, to_device
from fedsim.core.types import Params, Stack
from fedsim.engine.data import ClientData, samples_at
from fedsim.engine.device import Compiled, Precision, autocast
from fedsim.engine.model import buffer_names, initial, trained_names
from fedsim.engine.schedule import mean_weights
from fedsim.engine.stacked import StackedBatch
from fedsim.engine.training_copies import reject_if_it_fails, reject_mixed_samples
from fedsim.engine.training_layers import keyed_dropouts, masked_norms

GradientFunction = Callable[..., tuple[Stack, Tensor, Stack]]
"""A function that returns gradients, the samples' losses, and the new running statistics."""


class FunctionalModule:
    """A training copy of a model, whose tensors are passed in at each call.

    They include the buffers of its layers: dropout keys, BatchNorm masks and running statistics.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.dropouts = keyed_dropouts(module)
        self.masks = masked_norms(module)

    def side_inputs(self, batch: StackedBatch) -> Stack:
        """Return dropout keys and BatchNorm masks for each row of the batch."""
        inputs: Stack = {}
        if batch.keys is not None:
            inputs |= dict.fromkeys(self.dropouts, batch.keys)
        if self.masks:
            dtype = real_dtype(batch.x)
            if batch.weights is None:
                mask = batch.x.new_ones(batch.x.shape[:2], dtype=dtype)
            else:
                mask = (batch.weights > 0).to(dtype)
            inputs |= dict.fromkeys(self.masks, mask)
        return inputs

    def __call__(self, tensors: Params, x: Tensor) -> Tensor:
        """Return the output for `x`, and leave the new running statistics in `tensors`.

        torch's BatchNorm updates them in place. `MaskedBatchNorm` makes new tensors, which
        `functional_call` puts into `tensors`.
        """
        for layer in self.dropouts.values():
            layer.calls = 0
        return functional_call(self.module, tensors, (x,))


class StackedGradients:
    """The gradients of R models in training, each on a batch of its own.

    `module` is a training copy of the model.
    """

    def __init__(self, module: nn.Module, device: torch.device, precision: Precision) -> None:
        self.precision = precision
        self.device = device
        self.functional = FunctionalModule(module.to(device))
        self.trained = trained_names(module)
        self.buffers = buffer_names(module)
        self._on_full_batches, self._on_padded_batches = self._gradient_functions()
        self.compiled: tuple[Compiled, ...] = ()

    def __call__(self, stack: Stack, batch: StackedBatch) -> tuple[Stack, Tensor]:
        """Return the gradients [R, ...] of the models `stack`, and the samples' losses [R, B].

        The running statistics in `stack` are updated in place.
        """
        trained = {name: stack[name] for name in self.trained}
        fixed = {name: stack[name] for name in self.buffers}
        fixed |= self.functional.side_inputs(batch)
        if batch.weights is None:
            result = self._on_full_batches(trained, fixed, batch.x, batch.y)
        else:
            result = self._on_padded_batches(trained, fixed, batch.x, batch.y, batch.weights)
        grads, losses, statistics = result
        if self.buffers:
            targets = [stack[name] for name in self.buffers]
            torch._foreach_copy_(targets, [statistics[name] for name in self.buffers])
        return grads, losses

    def compile(self) -> None:
        """Compile at the next call, once for each kind of batch."""
        self.compiled = (Compiled(self._on_full_batches), Compiled(self._on_padded_batches))
        self._on_full_batches, self._on_padded_batches = self.compiled

    def try_out(self, x: Tensor, y: Tensor) -> None:
        """Compute one gradient of two models on two samples, of which the second is padding.

        The models are equal, and so are their first samples, but not the padding. Raises
        `ConfigError` if the model cannot run batched (data-dependent control flow, an operation
        that vmap does not know), or if the padding changes the first sample's loss. The latter does
        not show if `x` has a single sample.
        """
        module = self.functional.module
        stack = {name: torch.stack([value, value]) for name, value in initial(module).items()}
        pair, labels = x[:2], y[:2]
        twice_the_first = torch.cat([x[:1]] * len(pair))
        weights = torch.zeros((2, len(pair)), dtype=real_dtype(x), device=x.device)
        weights[:, 0] = 1
        keys = torch.zeros(2, dtype=torch.int64, device=x.device)
        batch = StackedBatch(
            torch.stack([pair, twice_the_first]), torch.stack([labels, labels]), weights, keys
        )
        with reject_if_it_fails(module, "cannot run for several clients at once"):
            _, losses = self(stack, batch)
        reject_mixed_samples(module, losses[0, 0], losses[1, 0])

    def _gradient_functions(self) -> tuple[GradientFunction, GradientFunction]:
        """Return the gradient functions of full and of padded batches."""

        def mean_loss(
            trained: Params, fixed: Params, x: Tensor, y: Tensor, weights: Tensor | None
        ) -> tuple[Tensor, tuple[Tensor, Params]]:
            tensors = trained | fixed
            with autocast(self.precision, self.device):
                output = self.functional(tensors, x).to(real_dtype(x))
            statistics = {name: tensors[name] for name in self.buffers}
            losses = F.cross_entropy(output, y, reduction="none")
            mean = losses.mean() if weights is None else (losses * weights).sum()
            return mean, (losses.detach(), statistics)

        gradient_and_loss = grad_and_value(mean_loss, has_aux=True)

        def gradients(
            trained: Params, fixed: Params, x: Tensor, y: Tensor, weights: Tensor | None = None
        ) -> tuple[Params, Tensor, Params]:
            grads, (_, (losses, statistics)) = gradient_and_loss(trained, fixed, x, y, weights)
            return grads, losses, statistics

        return vmap(gradients), vmap(gradients)


@torch.no_grad()
def joint_gradients(
    model: nn.Module,
    data: ClientData,
    precision: Precision,
    params: Params,
    positions: Sequence[Ints],
    names: Sequence[str],
    max_samples: int,
) -> Tensor:
    """Return the gradient of the mean cross-entropy over each of K lists of samples [K, D].

    `positions` holds the samples' positions in `data`. The `model` is in eval mode and has the
    tensors `params`. A gradient is flat, in the parameters `names` in their order; an empty list
    has zeros. At most `max_samples` of each list pass at once.
    """
    x, device = data.x, data.x.device
    trained = {name: params[name] for name in names}
    fixed = {name: value for name, value in params.items() if name not in trained}

    def mean_loss(trained: Params, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        with autocast(precision, device):
            output = functional_call(model, trained | fixed, (x,)).to(real_dtype(x))
        return (F.cross_entropy(output, y, reduction="none") * weights).sum()

    gradients = vmap(grad(mean_loss), in_dims=(None, 0, 0, 0))
    padded_positions, padded_weights = padded(positions)
    index = to_device(torch.as_tensor(padded_positions), device)
    weights = to_device(torch.as_tensor(padded_weights, dtype=real_dtype(x)), device)
    total: Tensor | None = None
    for first in range(0, index.shape[1], max_samples):
        columns = slice(first, first + max_samples)
        part = index[:, columns]
        grads = gradients(trained, samples_at(x, part), data.y[part], weights[:, columns])
        flat = torch.cat([grads[name].flatten(1) for name in names], dim=1)
        total = flat if total is None else total.add_(flat)
    assert total is not None
    has_samples = torch.as_tensor([[len(client_positions) > 0] for client_positions in positions])
    return torch.where(to_device(has_samples, device), total, 0)


def padded(positions: Sequence[Ints]) -> tuple[Ints, Floats]:
    """Return K lists as rows [K, W], W >= 1, and weights [K, W]: 1 / length, and 0 for padding.

    Padding repeats the list's own first position. A sample that is not finite then stays with its
    list.
    """
    lengths = np.array([len(client_positions) for client_positions in positions])
    width = max(int(lengths.max()), 1)
    rows = np.zeros((len(positions), width), np.int64)
    for row, client_positions in zip(rows, positions, strict=True):
        if len(client_positions):
            row[:] = client_positions[0]
            row[: len(client_positions)] = client_positions
    return rows, mean_weights(lengths, width)
