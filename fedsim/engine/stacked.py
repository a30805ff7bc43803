"""Losses and gradients of many clients at once: by torch.func's vmap, or, for chains of linear layers, with both
passes written out over models stacked on a client axis."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, vmap
from torch.nn import functional as F

from fedsim.core.flat import real_dtype, to_device
from fedsim.core.types import Params, Stack
from fedsim.engine.chain import Chain, Link
from fedsim.engine.data import ClientData
from fedsim.engine.device import Compiled, Precision, autocast
from fedsim.engine.model import (
    buffer_names,
    dropout_mask,
    for_batched,
    initial,
    keyed_dropouts,
    masked_norms,
    refuse_mixed_samples,
    refused_if_it_fails,
    trained_names,
)
from fedsim.engine.schedule import Schedule, mean_weights


@dataclass(frozen=True)
class StackedBatch:
    """One step's samples of R clients: `x` [R, B, ...], `y` [R, B], and `keys` [R] of dropout, if the model has any.

    `weights` [R, B] is 1 / count for valid samples and 0 for padding, None where nothing is padded. `repeats_last`:
    only the first row is a client's that still trains, and the second row repeats its samples.
    """

    x: Tensor
    y: Tensor
    weights: Tensor | None
    keys: Tensor | None
    repeats_last: bool = False


def stacked_batches(data: ClientData, schedule: Schedule) -> Iterator[StackedBatch]:
    """One step after another of clients that are ordered by falling number of steps; who has finished is left out.

    torch multiplies one pair of matrices in another order of additions than several, so where a single client is
    left of several, its batch comes twice: what it computes does not depend on who trained beside it before.
    """
    device = data.x.device
    positions = to_device(torch.as_tensor(schedule.positions), device)
    keys = None if schedule.keys is None else to_device(torch.as_tensor(schedule.keys), device)
    labels = data.y[positions]
    for step, width in enumerate(schedule.widths):
        counts = schedule.counts[:, step]
        rows = np.arange(np.count_nonzero(counts))
        repeats_last = len(rows) == 1 < len(schedule)
        valid = counts[rows if not repeats_last else np.zeros(2, np.int64)]
        weights: Tensor | None = None
        if valid.min() < width:
            weights = to_device(torch.as_tensor(mean_weights(valid, width), dtype=real_dtype(data.x)), device)
        where = _first(positions[:, step, :width], len(rows), repeats_last)
        yield StackedBatch(
            data.samples(where),
            _first(labels[:, step, :width], len(rows), repeats_last),
            weights,
            None if keys is None else _first(keys[:, step], len(rows), repeats_last),
            repeats_last,
        )


def _first(values: Tensor, count: int, repeats: bool) -> Tensor:
    return values[:1].expand(2, *values.shape[1:]) if repeats else values[:count]


def side_inputs(keys: Sequence[str], masks: Sequence[str], batch: StackedBatch) -> Stack:
    """Buffers of these names that are not part of the model, for each row: dropout keys and BatchNorm's masks."""
    side = {} if batch.keys is None else dict.fromkeys(keys, batch.keys)
    if masks:
        dtype = real_dtype(batch.x)
        valid = batch.x.new_ones(batch.x.shape[:2], dtype=dtype) if batch.weights is None else batch.weights > 0
        side |= dict.fromkeys(masks, valid.to(dtype))
    return side


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
        rest = {name: stack[name] for name in self.buffers} | side_inputs(self.keys, self.masks, batch)
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


@dataclass(frozen=True)
class JointGradients:
    """Gradients of one model in eval mode on the samples of many clients at once, for a GPU. At most `most_samples` of
    each list of positions in `data` pass at once."""

    model: nn.Module
    data: ClientData
    precision: Precision
    most_samples: int

    def __call__(self, params: Params, positions: Sequence[NDArray[np.int64]], names: Sequence[str]) -> Tensor:
        """The gradients of the mean cross-entropy over each list of positions, in the parameters `names` [K, D]; zeros
        for an empty list."""
        wanted = {name: params[name] for name in names}
        rest = {name: value for name, value in params.items() if name not in wanted}

        def loss(wanted: Params, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
            with autocast(self.precision, self.data.x.device):
                output = functional_call(self.model, {**wanted, **rest}, (x,)).to(real_dtype(x))
            return (F.cross_entropy(output, y, reduction="none") * weights).sum()

        gradients = vmap(grad(loss), in_dims=(None, 0, 0, 0))
        x, y, device = self.data.x, self.data.y, self.data.x.device
        where, weights = padded(positions)
        total: Tensor | None = None
        for part, shares in zip(
            to_device(torch.as_tensor(where), device).split(self.most_samples, dim=1),
            to_device(torch.as_tensor(weights, dtype=real_dtype(x)), device).split(self.most_samples, dim=1),
            strict=True,
        ):
            found = gradients(wanted, self.data.samples(part), y[part], shares)
            flat = torch.cat([found[name].flatten(1) for name in names], dim=1)
            total = flat if total is None else total.add_(flat)
        assert total is not None
        filled = np.array([len(own) > 0 for own in positions])
        if filled.all():
            return total
        return torch.where(to_device(torch.as_tensor(filled), device).unsqueeze(1), total, 0)


def padded(positions: Sequence[NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The lists as rows [K, W], W >= 1, and weights [K, W]: 1 / length within a list, 0 behind its end, where its own
    first position is repeated, so that a sample that is not finite stays with its list."""
    lengths = np.array([len(own) for own in positions])
    where = np.zeros((len(positions), max(int(lengths.max()), 1)), np.int64)
    for row, own in zip(where, positions, strict=True):
        row[: len(own)] = own
        row[len(own) :] = own[0] if len(own) else 0
    return where, mean_weights(lengths, where.shape[1])


@dataclass
class StackedLayer:
    """Weight [R, in, out] and bias [R, 1, out] of R clients."""

    weight: Tensor
    bias: Tensor | None

    def rows(self, count: int) -> "StackedLayer":
        """The first `count` clients; shares memory."""
        if count == len(self.weight):
            return self
        return StackedLayer(self.weight[:count], None if self.bias is None else self.bias[:count])

    def copy(self) -> "StackedLayer":
        weight = self.weight.clone(memory_format=torch.contiguous_format)
        bias = self.bias
        return StackedLayer(weight, None if bias is None else bias.clone(memory_format=torch.contiguous_format))

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return torch.bmm(x, self.weight)
        return torch.baddbmm(self.bias, x, self.weight)


Update = Callable[[int, StackedLayer, Tensor, Tensor], None]
"""Called with a layer's number, the layer, its input [R, B, in] and the gradient at its output [R, B, out]."""


class StackedChain:
    """R models of a chain of linear layers, which are trained in place.

    The same mathematics as automatic differentiation, in fewer and larger operations. Weights are stored transposed
    [R, in, out], so that no product needs a transposed weight.
    """

    def __init__(self, chain: Chain, layers: list[StackedLayer]) -> None:
        self.chain, self.layers = chain, layers
        self.minus_one = -torch.ones_like(self.layers[0].weight[:1, :1, :1])

    @torch.no_grad()
    def step(self, batch: StackedBatch, update: Update) -> Tensor:
        """Forward and backward of the batch's leading rows; `update` is called from the last layer to the first, each
        time after the layer's weights were needed for the last time. Returns the samples' losses [rows, width]."""
        layers = [layer.rows(len(batch.x)) for layer in self.layers]
        inputs = [batch.x.flatten(2)]
        for layer, link in zip(layers[:-1], self.chain.links, strict=False):
            inputs.append(_activate(layer.forward(inputs[-1]), link, batch.keys))
        losses, grad = self._cross_entropy(layers[-1].forward(inputs[-1]), batch)
        for number in range(len(layers) - 1, -1, -1):
            layer, given = layers[number], inputs[number]
            below = self._below(number, layer, given, grad)
            update(number, layer, given, grad)
            grad = below
        return losses

    def _cross_entropy(self, output: Tensor, batch: StackedBatch) -> tuple[Tensor, Tensor]:
        """The samples' losses [rows, width], and the gradient of their weighted sum at the logits [rows, width, C].
        Overwrites `output`.

        Written out, because torch's softmax over a short last axis takes twice as long.
        """
        index = batch.y.unsqueeze(2)
        output.sub_(output.amax(2, keepdim=True))
        chosen = output.gather(2, index)
        powers = output.exp_()
        total = powers.sum(2, keepdim=True)
        grad = powers.div_(total).scatter_add_(2, index, self.minus_one.expand(index.shape))
        grad.mul_(1 / batch.y.shape[1] if batch.weights is None else batch.weights.unsqueeze(2))
        return total.log_().sub_(chosen).squeeze(2), grad

    def _below(self, number: int, layer: StackedLayer, given: Tensor, grad: Tensor) -> Tensor:
        """The gradient at the output of the layer below; where an input is positive, its dropout has kept and scaled
        it."""
        if not number:
            return grad
        below: Tensor = torch.ops.aten.threshold_backward(torch.bmm(grad, layer.weight.transpose(1, 2)), given, 0)
        link = self.chain.links[number - 1]
        return below.mul_(link.scale) if link.rate else below

    def named(self, values: list[StackedLayer]) -> Stack:
        """Values that lie as `layers` do, by name and in the layout of `torch.nn.Linear`."""
        result: Stack = {}
        for link, layer in zip(self.chain.links, values, strict=True):
            result[link.weight] = layer.weight.transpose(1, 2)
            if link.bias is not None and layer.bias is not None:
                result[link.bias] = layer.bias.squeeze(1)
        return result


def layers_of(chain: Chain, stack: Stack) -> list[StackedLayer]:
    """The chain's layers as views of `stack`."""
    return [
        StackedLayer(stack[k.weight].transpose(1, 2), None if k.bias is None else stack[k.bias].unsqueeze(1))
        for k in chain.links
    ]


def sgd_update(lr: float, decay: float) -> Update:
    """Plain SGD in place: w <- (1 - lr decay) w - lr gradient, in one product, so that no gradient is stored."""
    keep = 1 - lr * decay

    def update(number: int, layer: StackedLayer, x: Tensor, grad: Tensor) -> None:
        layer.weight.baddbmm_(x.transpose(1, 2), grad, beta=keep, alpha=-lr)
        if layer.bias is not None:
            layer.bias.mul_(keep).sub_(grad.sum(1, keepdim=True), alpha=lr)

    return update


def gradients_into(found: Stack) -> Update:
    """Gradients by the numbers of their layers, laid out as the layers are."""

    def update(number: int, layer: StackedLayer, x: Tensor, grad: Tensor) -> None:
        found[f"{number}.weight"] = torch.bmm(x.transpose(1, 2), grad)
        if layer.bias is not None:
            found[f"{number}.bias"] = grad.sum(1, keepdim=True)

    return update


def _activate(x: Tensor, link: Link, keys: Tensor | None) -> Tensor:
    if link.rate and keys is not None:
        x.mul_(dropout_mask(keys, link.dropout, 0, x.shape[1:], link.rate).to(x.dtype)).mul_(link.scale)
    return x.relu_()
