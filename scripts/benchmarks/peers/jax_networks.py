"""The workloads' networks in JAX, with channels last, for peers that run JAX."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from scripts.benchmarks.peers.stopwatch import Case
from scripts.benchmarks.peers.workloads import Convolution, Dropout, Linear, Residual, Workload

Weights = list[jax.Array]
"""The trained tensors: a kernel and a bias for each layer, in the order of the layers."""
Statistics = list[jax.Array]
"""The running means and variances of BatchNorm, in the order of the layers."""
MOMENTUM, EPSILON = 0.1, 1e-5
"""torch's constants of BatchNorm."""


def prepare(case: Case) -> None:
    """Set the precision on a GPU. JAX's default there is TF32."""
    precision = "tensorfloat32" if case.precision == "tf32" else "float32"
    jax.config.update("jax_default_matmul_precision", precision)


def channels_last(array: NDArray[Any]) -> NDArray[Any]:
    """Return images [..., H, W, C], or flat samples as they are."""
    return np.moveaxis(array, -3, -1) if array.ndim > 3 else array


def from_torch(initial: Sequence[NDArray[np.float32]]) -> tuple[Weights, Statistics]:
    """Return a network's state in the layouts of JAX.

    A BatchNorm has four tensors of one dimension after a convolution without a bias: its scale,
    shift, mean and variance.
    """
    weights: Weights = []
    statistics: Statistics = []
    channels = 0  # of the last convolution
    vectors = 0  # tensors of one dimension since the last kernel
    for array in initial:
        if array.ndim == 1:
            vectors += 1
            (statistics if vectors > 2 else weights).append(jnp.asarray(array))
            continue
        vectors = 0
        if array.ndim == 4:
            channels = len(array)
            kernel = array.transpose(2, 3, 1, 0)
        else:
            kernel = _linear_kernel(array, channels)
            channels = 0
        weights.append(jnp.asarray(kernel))
    return weights, statistics


def _linear_kernel(array: NDArray[np.float32], channels: int) -> NDArray[np.float32]:
    """Return the kernel [in, out]. Its input is a flattened image if `channels` is not 0."""
    outputs, inputs = array.shape
    if not channels:
        return array.T
    side = round((inputs / channels) ** 0.5)
    image = array.reshape(outputs, channels, side, side)
    return image.transpose(2, 3, 1, 0).reshape(inputs, outputs)


def logits(
    workload: Workload,
    weights: Weights,
    statistics: Statistics,
    x: jax.Array,
    key: jax.Array | None = None,
) -> tuple[jax.Array, Statistics]:
    """Return the logits and the next statistics. It trains if there is a `key` for dropout."""
    if isinstance(workload.network, Residual):
        return _residual(workload.network, iter(weights), iter(statistics), x, key is not None)
    tensors = iter(weights)
    for position, layer in enumerate(workload.layers):
        match layer:
            case Convolution():
                x = convolved(next(tensors), x) + next(tensors)
            case Linear():
                x = x @ next(tensors) + next(tensors)
            case Dropout(rate):
                if key is not None:
                    stays = jax.random.bernoulli(
                        jax.random.fold_in(key, position), 1 - rate, x.shape
                    )
                    x = jnp.where(stays, x / (1 - rate), 0)
            case "pool":
                x = pooled(x)
            case "relu":
                x = jax.nn.relu(x)
            case "flatten":
                x = x.reshape(len(x), -1)
    return x, statistics


def convolved(kernel: jax.Array, x: jax.Array, stride: int = 1, padding: int = 0) -> jax.Array:
    pads = [(padding, padding)] * 2
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), pads, dimension_numbers=layout)


def pooled(x: jax.Array) -> jax.Array:
    """Return the maxima of 2x2 cells.

    The gradient of `lax.reduce_window` takes twice as long as all the rest.
    """
    height, width = x.shape[1] // 2, x.shape[2] // 2
    cells = x[:, : 2 * height, : 2 * width].reshape(len(x), height, 2, width, 2, -1)
    return cells.max((2, 4))


def _residual(
    network: Residual,
    weights: Iterator[jax.Array],
    statistics: Iterator[jax.Array],
    x: jax.Array,
    trains: bool,
) -> tuple[jax.Array, Statistics]:
    """Return the logits of ResNet-20 or ResNet-18, and the next statistics."""
    following: Statistics = []

    def normed(x: jax.Array) -> jax.Array:
        scale, shift = next(weights), next(weights)
        mean, variance = next(statistics), next(statistics)
        if trains:
            running_mean, running_variance = mean, variance
            mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
            count = x.shape[0] * x.shape[1] * x.shape[2]
            unbiased = variance * (count / (count - 1))
            following.append(running_mean + MOMENTUM * (mean - running_mean))
            following.append(running_variance + MOMENTUM * (unbiased - running_variance))
        factor = scale * jax.lax.rsqrt(variance + EPSILON)
        return (x - mean) * factor + shift

    def layer(x: jax.Array, stride: int, padding: int) -> jax.Array:
        return normed(convolved(next(weights), x, stride, padding))

    x = jax.nn.relu(layer(x, network.stem_stride, network.stem_kernel // 2))
    if network.pools:
        window, strides = (1, 3, 3, 1), (1, 2, 2, 1)
        pads = [(0, 0), (1, 1), (1, 1), (0, 0)]
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, strides, pads)
    for channels, width, stride in network.strides():
        y = jax.nn.relu(layer(x, stride, 1))
        y = layer(y, 1, 1)
        if (channels, stride) != (width, 1):
            if network.projects:
                x = layer(x, stride, 0)
            else:
                half = (width - channels) // 2
                x = jnp.pad(x[:, ::stride, ::stride], [(0, 0)] * 3 + [(half, half)])
        x = jax.nn.relu(x + y)
    return x.mean((1, 2)) @ next(weights) + next(weights), following


Loss = Callable[..., tuple[jax.Array, Statistics]]


def cross_entropy(workload: Workload) -> Loss:
    """Return the training loss as a function of weights, statistics, samples, labels and key."""

    def loss(
        weights: Weights, statistics: Statistics, x: jax.Array, y: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, Statistics]:
        values, following = logits(workload, weights, statistics, x, key)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(values), y[:, None], 1)
        return -chosen.mean(), following

    return loss
