"""Losses and gradients of many clients at once: by torch.func's vmap, or, for chains of linear
layers, with both passes written out over models stacked on a client axis."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, vmap
from torch.nn import functional as F

from fedsim.core.arrays import Floats, Ints
from fedsim.core.flat import real_dtype, to_device
from fedsim.core.types import Correction, Params, Stack
from fedsim.engine.chain import LayerChain
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
from fedsim.engine.optimizers import SGD, LocalOptimizer
from fedsim.engine.schedule import Schedule, mean_weights


@dataclass(frozen=True)
class StackedBatch:
    """One step's samples of R clients: `x` [R, B, ...], `y` [R, B], and `keys` [R] of dropout, if
    the model has any.

    `weights` [R, B] is 1 / count for valid samples and 0 for padding, None where nothing is padded.
    `repeats_last`: only the first row is a client's that still trains, and the second row repeats
    its samples.
    """

    x: Tensor
    y: Tensor
    weights: Tensor | None
    keys: Tensor | None
    repeats_last: bool = False


def stacked_batches(data: ClientData, schedule: Schedule) -> Iterator[StackedBatch]:
    """One step after another of clients that are ordered by falling number of steps; who has
    finished is left out.

    torch multiplies one pair of matrices in another order of additions than several, so where a
    single client is left of several, its batch comes twice.
    """
    device = data.x.device
    positions = to_device(torch.as_tensor(schedule.positions), device)
    keys = None if schedule.keys is None else to_device(torch.as_tensor(schedule.keys), device)
    labels = data.y[positions]
    for step, width in enumerate(schedule.widths):
        counts = schedule.counts[:, step]
        count = int(np.count_nonzero(counts))
        where, y = positions[:count, step, :width], labels[:count, step, :width]
        own = None if keys is None else keys[:count, step]
        valid, repeats_last = counts[:count], count == 1 < len(schedule)
        if repeats_last:
            valid, where, y = valid.repeat(2), where.expand(2, -1), y.expand(2, -1)
            own = None if own is None else own.expand(2)
        weights: Tensor | None = None
        if valid.min() < width:
            weights = to_device(
                torch.as_tensor(mean_weights(valid, width), dtype=real_dtype(data.x)), device
            )
        yield StackedBatch(samples_at(data.x, where), y, weights, own, repeats_last)


def samples_at(x: Tensor, where: Tensor) -> Tensor:
    return x.index_select(0, where.reshape(-1)).view(*where.shape, *x.shape[1:])


class Functional:
    """An adapted module whose tensors are passed in, keys of dropout and masks of BatchNorm among
    them."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.dropouts, self.masks = (
            module,
            keyed_dropouts(module),
            masked_norms(module),
        )

    def side_inputs(self, batch: StackedBatch) -> Stack:
        """Keys and masks for each row."""
        side = {} if batch.keys is None else dict.fromkeys(self.dropouts, batch.keys)
        if self.masks:
            dtype = real_dtype(batch.x)
            valid = (
                batch.x.new_ones(batch.x.shape[:2], dtype=dtype)
                if batch.weights is None
                else batch.weights > 0
            )
            side |= dict.fromkeys(self.masks, valid.to(dtype))
        return side

    def __call__(self, tensors: Params, x: Tensor) -> Tensor:
        """Running statistics are updated in place, or replaced in `tensors`."""
        for layer in self.dropouts.values():
            layer.calls = 0
        return functional_call(self.module, tensors, (x,))


class StackedGradients:
    """Calling it gives gradients of R models, and their samples' losses [R, width].

    Running statistics in the stack are updated in place.
    """

    def __init__(self, model: nn.Module, device: torch.device, precision: Precision) -> None:
        """Raises `ConfigError` naming a layer that cannot run batched."""
        self.precision, self.device = precision, device
        module = for_batched(model).to(device)
        self.template, self.trained, self.buffers = (
            Functional(module),
            trained_names(module),
            buffer_names(module),
        )
        self._full, self._padded = self._transforms()
        self.compiled: tuple[Compiled, ...] = ()

    def __call__(self, stack: Stack, batch: StackedBatch) -> tuple[Stack, Tensor]:
        trained = {name: stack[name] for name in self.trained}
        rest = {name: stack[name] for name in self.buffers} | self.template.side_inputs(batch)
        if batch.weights is None:
            grads, (_, (losses, statistics)) = self._full(trained, rest, batch.x, batch.y)
        else:
            grads, (_, (losses, statistics)) = self._padded(
                trained, rest, batch.x, batch.y, batch.weights
            )
        for name in self.buffers:
            stack[name].copy_(statistics[name])
        return grads, losses

    def compile(self) -> None:
        """Compile at the next call, once for each kind of batch."""
        self._full, self._padded = self.compiled = (Compiled(self._full), Compiled(self._padded))

    def try_out(self, x: Tensor, y: Tensor) -> None:
        """One gradient of two models on two samples. Raises `ConfigError` where the model cannot
        run batched (data-dependent control flow, an operation that vmap does not know), or gives
        another loss for a sample with another one as padding beside it."""
        stack = {
            name: torch.stack([value, value])
            for name, value in initial(self.template.module).items()
        }
        pair = torch.zeros(2, dtype=torch.int64, device=x.device)
        weights = torch.zeros((2, len(x[:2])), dtype=real_dtype(x), device=x.device)
        weights[:, 0] = 1
        twice = torch.cat([x[:1]] * len(x[:2]))
        batch = StackedBatch(
            torch.stack([x[:2], twice]), torch.stack([y[:2], y[:2]]), weights, pair
        )
        with refused_if_it_fails(self.template.module, "cannot run for several clients at once"):
            _, losses = self(stack, batch)
        refuse_mixed_samples(self.template.module, losses[0, 0], losses[1, 0])

    def _transforms(
        self,
    ) -> tuple[Callable[..., tuple[Stack, tuple[Tensor, tuple[Tensor, Stack]]]], ...]:
        def loss(
            trained: Params, rest: Params, x: Tensor, y: Tensor, weights: Tensor | None
        ) -> tuple[Tensor, tuple[Tensor, Params]]:
            everything = {**trained, **rest}
            with autocast(self.precision, self.device):
                output = self.template(everything, x).to(real_dtype(x))
            statistics = {name: everything[name] for name in self.buffers}
            each = F.cross_entropy(output, y, reduction="none")
            total = each.mean() if weights is None else (each * weights).sum()
            return total, (each.detach(), statistics)

        per_row = grad_and_value(loss, has_aux=True)
        return vmap(lambda trained, rest, x, y: per_row(trained, rest, x, y, None)), vmap(per_row)


@torch.no_grad()
def joint_gradients(
    model: nn.Module,
    data: ClientData,
    precision: Precision,
    params: Params,
    positions: Sequence[Ints],
    names: Sequence[str],
    most_samples: int,
) -> Tensor:
    """The gradients of the mean cross-entropy of `model` in eval mode over each list of positions,
    in the parameters `names` [K, D]; zeros for an empty list. At most `most_samples` of each list
    pass at once."""
    wanted = {name: params[name] for name in names}
    rest = {name: value for name, value in params.items() if name not in wanted}
    x, device = data.x, data.x.device

    def loss(wanted: Params, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        with autocast(precision, device):
            output = functional_call(model, {**wanted, **rest}, (x,)).to(real_dtype(x))
        return (F.cross_entropy(output, y, reduction="none") * weights).sum()

    gradients = vmap(grad(loss), in_dims=(None, 0, 0, 0))
    where, weights = padded(positions)
    parts = to_device(torch.as_tensor(where), device).split(most_samples, dim=1)
    shares = to_device(torch.as_tensor(weights, dtype=real_dtype(x)), device).split(
        most_samples, dim=1
    )
    total: Tensor | None = None
    for part, share in zip(parts, shares, strict=True):
        found = gradients(wanted, samples_at(x, part), data.y[part], share)
        flat = torch.cat([found[name].flatten(1) for name in names], dim=1)
        total = flat if total is None else total.add_(flat)
    assert total is not None
    filled = torch.as_tensor([[len(own) > 0] for own in positions])
    return torch.where(to_device(filled, device), total, 0)


def padded(positions: Sequence[Ints]) -> tuple[Ints, Floats]:
    """The lists as rows [K, W], W >= 1, and weights [K, W]: 1 / length within a list, 0 behind its
    end, where its own first position is repeated, so that a sample that is not finite stays with
    its list."""
    lengths = np.array([len(own) for own in positions])
    where = np.zeros((len(positions), max(int(lengths.max()), 1)), np.int64)
    for row, own in zip(where, positions, strict=True):
        row[: len(own)] = own
        row[len(own) :] = own[0] if len(own) else 0
    return where, mean_weights(lengths, where.shape[1])


class Program(ABC):
    """Local steps of R clients, from models `start` [R, ...], which are not modified, in those of
    `stack`, with the learning rate and the correction of `schedule`."""

    def __init__(
        self,
        optimizer: LocalOptimizer,
        start: Stack,
        stack: Stack,
        trained: Sequence[str],
        schedule: Schedule,
    ) -> None:
        self.optimizer, self.start, self.stack = optimizer, start, stack
        self.lr, self.correction = schedule.lr, schedule.correction
        self.state = optimizer.init({name: stack[name] for name in trained})

    @abstractmethod
    def step(self, batch: StackedBatch) -> Tensor:
        """One step of the leading rows, as many as the batch has; its samples' losses before the
        step [rows, B]."""

    def row(self, row: int) -> list[Tensor]:
        """The parameters and momentum buffers of one client; share memory with the program's."""
        return [value[row] for value in (*self.stack.values(), *self._buffers().values())]

    def delta(self) -> Stack:
        """w_k - w of all rows; the models are lost."""
        return {
            name: value.sub_(self.start[name]).contiguous() for name, value in self.stack.items()
        }

    def momentum(self) -> Stack | None:
        return {name: value.contiguous() for name, value in self._buffers().items()} or None

    def _buffers(self) -> Stack:
        return self.optimizer.momentum_buffers(self.state) or {}


class Differentiated(Program):
    """Any model and optimiser, through `StackedGradients`."""

    def __init__(
        self,
        gradients: StackedGradients,
        optimizer: LocalOptimizer,
        start: Stack,
        schedule: Schedule,
    ) -> None:
        stack = {
            name: value.clone(memory_format=torch.contiguous_format)
            for name, value in start.items()
        }
        super().__init__(optimizer, start, stack, gradients.trained, schedule)
        self.gradients = gradients

    def step(self, batch: StackedBatch) -> Tensor:
        live = {name: value[: len(batch.x)] for name, value in self.stack.items()}
        grads, losses = self.gradients(live, batch)
        trained = {name: live[name] for name in self.gradients.trained}
        self.correction.add_to(grads, trained)
        self.optimizer.step(trained, grads, self.state, self.lr)
        return losses


Layer = tuple[Tensor, Tensor | None]
"""Weight [R, in, out], so that no product needs a transposed one, and bias [R, 1, out] of R
clients."""


def layers_of(chain: LayerChain, stack: Stack) -> list[Layer]:
    """The chain's layers as views of `stack`."""
    return [
        (stack[k.weight].transpose(1, 2), None if k.bias is None else stack[k.bias].unsqueeze(1))
        for k in chain.links
    ]


@torch.no_grad()
def passes(
    chain: LayerChain, layers: Sequence[Layer], batch: StackedBatch
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Forward and backward pass of as many clients as the batch has, those of `layers`: their
    samples' losses [R, width], and each layer's input [R, width, in] and the gradient at its output
    [R, width, out].

    The same mathematics as automatic differentiation, in fewer and larger operations.
    """
    inputs = [batch.x.flatten(2)]
    for (weight, bias), link in zip(layers, chain.links, strict=True):
        output = (
            torch.bmm(inputs[-1], weight)
            if bias is None
            else torch.baddbmm(bias, inputs[-1], weight)
        )
        if len(inputs) < len(layers):
            if link.rate and batch.keys is not None:
                mask = dropout_mask(batch.keys, link.dropout, 0, output.shape[1:], link.rate)
                output.mul_(mask.to(output.dtype)).mul_(link.scale)
            inputs.append(output.relu_())
    # The cross-entropy written out, because torch's softmax over a short last axis takes twice as
    # long.
    index = batch.y.unsqueeze(2)
    output.sub_(output.amax(2, keepdim=True))
    chosen = output.gather(2, index)
    powers = output.exp_()
    total = powers.sum(2, keepdim=True)
    slope = powers.div_(total).scatter_(2, index, -1.0, reduce="add")
    slope.mul_(1 / batch.y.shape[1] if batch.weights is None else batch.weights.unsqueeze(2))
    slopes = [slope]
    for number in range(len(layers) - 1, 0, -1):
        weight, link = layers[number][0], chain.links[number - 1]
        below = torch.bmm(
            slopes[0], weight.transpose(1, 2)
        )  # where an input is positive, its dropout has kept it
        below = torch.ops.aten.threshold_backward(below, inputs[number], 0)
        slopes.insert(0, below.mul_(link.scale) if link.rate else below)
    return total.log_().sub_(chosen).squeeze(2), inputs, slopes


class LinearChain(Program):
    """A chain of linear layers; the step of plain SGD is part of the matrix products."""

    def __init__(
        self, chain: LayerChain, optimizer: LocalOptimizer, start: Stack, schedule: Schedule
    ) -> None:
        stack = {name: _transposed(value) for name, value in start.items()}
        super().__init__(optimizer, start, stack, list(stack), schedule)
        self.chain, self.layers = chain, layers_of(chain, stack)
        pull, shift = self.correction.pull, self.correction.shift or {}
        shift = {name: _transposed(value) for name, value in shift.items()}
        self.correction = Correction(pull, shift or None)
        self.decay = (
            optimizer.weight_decay + pull
            if type(optimizer) is SGD and not optimizer.momentum
            else None
        )
        self.drift = (
            {}
            if self.decay is None
            else {name: value.mul_(-self.lr) for name, value in shift.items()}
        )

    @torch.no_grad()
    def step(self, batch: StackedBatch) -> Tensor:
        rows = len(batch.x)
        live = [
            (weight[:rows], None if bias is None else bias[:rows]) for weight, bias in self.layers
        ]
        losses, inputs, slopes = passes(self.chain, live, batch)
        if self.decay is None:
            grads: Stack = {}
            for link, x, slope in zip(self.chain.links, inputs, slopes, strict=True):
                grads[link.weight] = torch.bmm(x.transpose(1, 2), slope).transpose(1, 2)
                if link.bias is not None:
                    grads[link.bias] = slope.sum(1)
            trained = {name: self.stack[name][:rows] for name in grads}
            self.correction.add_to(grads, trained)
            self.optimizer.step(trained, grads, self.state, self.lr)
            return losses
        keep = 1 - self.lr * self.decay
        for (weight, bias), x, slope in zip(live, inputs, slopes, strict=True):
            weight.baddbmm_(x.transpose(1, 2), slope, beta=keep, alpha=-self.lr)
            if bias is not None:
                bias.mul_(keep).sub_(slope.sum(1, keepdim=True), alpha=self.lr)
        for name, value in self.drift.items():
            self.stack[name][:rows].add_(value[:rows])
        return losses


def _transposed(value: Tensor) -> Tensor:
    """A copy of weights [R, out, in] or biases [R, out], in which weights lie as [R, in, out]."""
    own = value.mT if value.dim() == 3 else value
    copied = own.clone(memory_format=torch.contiguous_format)
    return copied.mT if value.dim() == 3 else copied


def run_steps(program: Program, data: ClientData, schedule: Schedule) -> Tensor:
    """All steps of clients that are ordered by falling number of steps; their samples' losses [R,
    steps, width]."""
    losses = data.x.new_zeros(schedule.positions.shape, dtype=real_dtype(data.x))
    kept: list[Tensor] = []
    for step, batch in enumerate(stacked_batches(data, schedule)):
        if batch.repeats_last and not kept:
            kept = [value.clone() for value in program.row(1)]
        found = program.step(batch)
        losses[: len(found), step, : found.shape[1]] = found
    for value, result in zip(program.row(1) if kept else [], kept, strict=True):
        value.copy_(result)
    return losses
