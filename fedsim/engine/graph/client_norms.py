"""BatchNorm of R clients in one call: of R * C channels instead of C.

torch's own rule for vmap applies the clients' weights and biases in passes of their own. That takes
as long as the normalisation itself.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.engine.graph.client_convolutions import with_clients
from fedsim.engine.training_layers import LenientBatchNorm

Normalised = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Outputs, means and inverse standard deviations of the batch, and new running statistics."""


def use_client_norms(module: nn.Module) -> nn.Module:
    """Replace the BatchNorms of a training copy by `for_sequential`, and return it."""
    for layer in module.modules():
        if isinstance(layer, LenientBatchNorm):
            layer.num_batches_tracked = None  # Nothing reads it if there is a momentum.
            if layer.affine:
                layer.__class__ = ClientBatchNorm
    return module


class ClientBatchNorm(LenientBatchNorm):
    """BatchNorm with weights whose clients are computed by `ClientNormalisation` under vmap."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or x[:, 0].numel() <= 1:
            return super().forward(x)
        y, _, _, mean, var = ClientNormalisation.apply(
            *(x, self.weight, self.bias, self.running_mean, self.running_var),
            *(self.momentum, self.eps),
        )
        self.running_mean, self.running_var = mean.detach(), var.detach()
        return y


class ClientNormalisation(torch.autograd.Function):
    """F.batch_norm in training that returns new running statistics, with a rule for vmap."""

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        momentum: float,
        eps: float,
    ) -> Normalised:
        return _normalised([x, weight, bias, running_mean, running_var], momentum, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Normalised) -> None:
        x, weight, *_, ctx.eps = inputs
        _, mean, inverse_deviation, *running = output
        ctx.mark_non_differentiable(mean, inverse_deviation, *running)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, mean, inverse_deviation)

    @staticmethod
    def backward(ctx: Any, slope: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        gradients = NormalisationGradients.apply(slope, *ctx.saved_tensors, ctx.eps)
        return *gradients, None, None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: Sequence[int | None], *arguments: Any
    ) -> tuple[Normalised, tuple[int, ...]]:
        flat = _flat(info.batch_size, in_dims[:5], arguments[:5])
        results = _normalised(flat, *arguments[5:])
        return _unflattened(info.batch_size, results), (1, 0, 0, 0, 0)


class NormalisationGradients(torch.autograd.Function):
    """The gradients of input, weight and bias, with a rule for vmap. Has no gradients itself."""

    @staticmethod
    def forward(
        slope: Tensor,
        x: Tensor,
        weight: Tensor,
        mean: Tensor,
        inverse_deviation: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _gradients(slope, [x, weight, mean, inverse_deviation], eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep nothing."""

    @staticmethod
    def vmap(
        info: Any, in_dims: Sequence[int | None], *arguments: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        [slope] = _flat(info.batch_size, in_dims[:1], arguments[:1])
        flat = _flat(info.batch_size, in_dims[1:5], arguments[1:5])
        results = _gradients(slope, flat, arguments[5])
        return _unflattened(info.batch_size, results), (1, 0, 0)


def _flat(num_clients: int, dims: Sequence[int | None], values: Sequence[Tensor]) -> list[Tensor]:
    """Return images [B, R * C, ...], and after them vectors [R * C]."""
    image = with_clients(values[0], dims[0], num_clients, axis=1).flatten(1, 2)
    vectors = []
    for value, dim in zip(values[1:], dims[1:], strict=True):
        vectors.append(with_clients(value, dim, num_clients, axis=0).flatten())
    return [image, *vectors]


def _unflattened(num_clients: int, values: Sequence[Tensor]) -> Any:
    """Return images [B, R, C, ...], and after them vectors [R, C]."""
    image, *vectors = values
    return (
        image.unflatten(1, (num_clients, -1)),
        *(vector.unflatten(0, (num_clients, -1)) for vector in vectors),
    )


def _normalised(tensors: Sequence[Tensor], momentum: float, eps: float) -> Normalised:
    """Normalise the first tensor. The others are weight, bias and running statistics."""
    results: Normalised = torch.ops.aten._native_batch_norm_legit_functional(
        *tensors, True, momentum, eps
    )
    return results


def _gradients(slope: Tensor, saved: Sequence[Tensor], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of input, weight and bias, from what `ClientNormalisation` saves."""
    x, weight, mean, inverse_deviation = saved
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.native_batch_norm_backward(
        slope, x, weight, None, None, mean, inverse_deviation, True, eps, [True, True, True]
    )
    return gradients
