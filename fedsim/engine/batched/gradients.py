"""Losses and gradients of many clients' models at once: torch.func's vmap over models stacked on a client axis."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional as F

from fedsim.engine.batched.compiled import Compiled
from fedsim.engine.batched.steps import StackedBatch
from fedsim.engine.model.adapt import (
    for_batched,
    keyed_dropouts,
    masked_norms,
    refuse_mixed_samples,
    refused_if_it_fails,
)
from fedsim.engine.model.parameters import buffer_names, initial, trained_names
from fedsim.engine.precision import Precision, autocast
from fedsim.flat import real_dtype
from fedsim.types import Params, Stack


class StackedGradients:
    """Calling it gives gradients of R models, and their samples' losses [R, width].

    Running statistics in the stack are updated in place.
    """

    def __init__(self, model: nn.Module, device: torch.device, precision: Precision) -> None:
        """Raises `ConfigError` naming a layer that cannot run batched."""
        self.precision, self.device = precision, device
        self.template = for_batched(model).to(device)
        self.trained = trained_names(self.template)
        self.buffers = buffer_names(self.template)
        dropouts = dict(keyed_dropouts(self.template))
        self.keys, self.dropouts = list(dropouts), list(dropouts.values())
        self.masks = masked_norms(self.template)
        self._full, self._padded = self._transforms()
        self.compiled: tuple[Compiled, ...] = ()

    def __call__(self, stack: Stack, batch: StackedBatch) -> tuple[Stack, Tensor]:
        for layer in self.dropouts:
            layer.calls = 0
        trained = {name: stack[name] for name in self.trained}
        rest = {name: stack[name] for name in self.buffers} | self._side_inputs(batch)
        if batch.weights is None:
            grads, (_, (losses, statistics)) = self._full(trained, rest, batch.x, batch.y)
        else:
            grads, (_, (losses, statistics)) = self._padded(trained, rest, batch.x, batch.y, batch.weights)
        for name in self.buffers:
            stack[name].copy_(statistics[name])
        return grads, losses

    def compile(self) -> None:
        """Compile at the next call, once for each kind of batch."""
        self._full, self._padded = self.compiled = (Compiled(self._full), Compiled(self._padded))

    def try_out(self, x: Tensor, y: Tensor) -> None:
        """One gradient of two models on two samples, for what vmap finds out only then, and to load what it needs.

        Raises `ConfigError` where the model cannot run batched (data-dependent control flow, an operation that vmap
        does not know), or gives another loss for a sample with another one as padding beside it.
        """
        stack = {name: torch.stack([value, value]) for name, value in initial(self.template).items()}
        pair = torch.zeros(2, dtype=torch.int64, device=x.device)
        weights = torch.zeros((2, len(x[:2])), dtype=real_dtype(x), device=x.device)
        weights[:, 0] = 1
        twice = torch.cat([x[:1]] * len(x[:2]))
        batch = StackedBatch(torch.stack([x[:2], twice]), torch.stack([y[:2], y[:2]]), weights, pair)
        with refused_if_it_fails(self.template, "cannot run for several clients at once"):
            _, losses = self(stack, batch)
        refuse_mixed_samples(self.template, losses[0, 0], losses[1, 0])

    def _side_inputs(self, batch: StackedBatch) -> Stack:
        """Per-row buffers that are not part of the model: dropout keys and BatchNorm's masks."""
        side: Stack = {}
        if batch.keys is not None:
            side |= dict.fromkeys(self.keys, batch.keys)
        if self.masks:
            shape, dtype = batch.x.shape[:2], real_dtype(batch.x)
            mask = batch.x.new_ones(shape, dtype=dtype) if batch.weights is None else (batch.weights > 0).to(dtype)
            side |= dict.fromkeys(self.masks, mask)
        return side

    def _transforms(self) -> tuple[Callable[..., tuple[Stack, tuple[Tensor, tuple[Tensor, Stack]]]], ...]:
        def loss(
            trained: Params, rest: Params, x: Tensor, y: Tensor, weights: Tensor | None
        ) -> tuple[Tensor, tuple[Tensor, Params]]:
            everything = {**trained, **rest}
            with autocast(self.precision, self.device):
                output = functional_call(self.template, everything, (x,)).to(real_dtype(x))
            statistics = {name: everything[name] for name in self.buffers}
            each = F.cross_entropy(output, y, reduction="none")
            total = each.mean() if weights is None else (each * weights).sum()
            return total, (each.detach(), statistics)

        per_row = grad_and_value(loss, has_aux=True)
        return vmap(lambda trained, rest, x, y: per_row(trained, rest, x, y, None)), vmap(per_row)
