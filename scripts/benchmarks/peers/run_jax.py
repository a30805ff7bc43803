"""Hand-written JAX.

On W1 the whole round is one compiled function: `vmap` over the cohort and `scan` over local steps.
XLA on a CPU has a slow path for convolutions inside a loop, or with weights of their own for each
client. So on W2 one step is compiled and called client by client, which is the fastest.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from scripts.benchmarks.peers.stopwatch import Stopwatch, parse_case
from scripts.benchmarks.peers.workloads import EVALUATION_BATCH, Workload, read_arrays

Layer = dict[str, jax.Array]
Params = list[Layer]
Round = Callable[[Params, jax.Array, jax.Array], Params]
"""Computes the next parameters from the last ones, the cohort and a random key."""


def initial_params(workload: Workload, key: jax.Array) -> Params:
    """Initialise as torch does: uniform within 1 / sqrt(fan-in)."""
    params = []
    for layer in workload.layers:
        key, weight_key, bias_key = jax.random.split(key, 3)
        bound = layer.fan_in**-0.5
        shape = (layer.fan_in, layer.fan_out)
        if layer.positions > 1:  # a convolution
            shape = (3, 3, layer.fan_in // 9, layer.fan_out)
        weight = jax.random.uniform(weight_key, shape, minval=-bound, maxval=bound)
        bias = jax.random.uniform(bias_key, (layer.fan_out,), minval=-bound, maxval=bound)
        params.append({"w": weight, "b": bias})
    return params


def logits(params: Params, x: jax.Array) -> jax.Array:
    """Return logits of x [b, 784], or [b, 32, 32, 3] for the network with three convolutions."""
    if x.ndim == 4:
        x = jax.nn.relu(_pooled(_convolved(params[0], x)))
        x = jax.nn.relu(_pooled(_convolved(params[1], x)))
        x = jax.nn.relu(_convolved(params[2], x))
        x = x.reshape(len(x), -1)
        params = params[3:]
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def _convolved(layer: Layer, x: jax.Array) -> jax.Array:
    layout = ("NHWC", "HWIO", "NHWC")
    w, b = layer["w"], layer["b"]
    return jax.lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=layout) + b


def _pooled(x: jax.Array) -> jax.Array:
    """Return the maxima of 2x2 cells.

    The gradient of `lax.reduce_window` takes twice as long as all the rest.
    """
    height, width = x.shape[1] // 2, x.shape[2] // 2
    cells = x[:, : 2 * height, : 2 * width].reshape(len(x), height, 2, width, 2, -1)
    return cells.max((2, 4))


def cross_entropy(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits(params, x)), y[:, None], 1).mean()


def sgd_step(workload: Workload, params: Params, x: jax.Array, y: jax.Array) -> Params:
    gradient = jax.grad(cross_entropy)(params, x, y)

    def updated(p: jax.Array, g: jax.Array) -> jax.Array:
        return p - workload.lr * (g + workload.weight_decay * p)

    return jax.tree.map(updated, params, gradient)


def compiled_round(workload: Workload, x: jax.Array, y: jax.Array) -> Round:
    """Return the whole round as one compiled function."""
    full = workload.samples // workload.batch_size
    cut = full * workload.batch_size

    def client(params: Params, x: jax.Array, y: jax.Array, key: jax.Array) -> Params:
        def step(params: Params, batch: jax.Array) -> tuple[Params, None]:
            return sgd_step(workload, params, x[batch], y[batch]), None

        def epoch(params: Params, key: jax.Array) -> tuple[Params, None]:
            order = jax.random.permutation(key, workload.samples)
            params, _ = jax.lax.scan(step, params, order[:cut].reshape(full, -1))
            return step(params, order[cut:]) if cut < workload.samples else (params, None)

        return jax.lax.scan(epoch, params, jax.random.split(key, workload.epochs))[0]

    @jax.jit
    def run(
        params: Params, x: jax.Array, y: jax.Array, cohort: jax.Array, key: jax.Array
    ) -> Params:
        keys = jax.random.split(key, len(cohort))
        trained = jax.vmap(client, (None, 0, 0, 0))(params, x[cohort], y[cohort], keys)
        return jax.tree.map(lambda p: p.mean(0), trained)

    return lambda params, cohort, key: run(params, x, y, cohort, key)


def stepwise_round(workload: Workload, x: jax.Array, y: jax.Array) -> Round:
    """Return a round client by client and step by step, with one compiled step."""

    @jax.jit
    def orders(key: jax.Array) -> jax.Array:
        keys = jax.random.split(key, workload.epochs)
        return jax.vmap(lambda k: jax.random.permutation(k, workload.samples))(keys)

    @jax.jit
    def step(params: Params, x: jax.Array, y: jax.Array, batch: jax.Array) -> Params:
        return sgd_step(workload, params, x[batch], y[batch])

    @jax.jit
    def mean(trained: Sequence[Params]) -> Params:
        return jax.tree.map(lambda *p: jnp.stack(p).mean(0), *trained)

    def client(params: Params, x: jax.Array, y: jax.Array, key: jax.Array) -> Params:
        for order in np.asarray(orders(key)):
            for start in range(0, workload.samples, workload.batch_size):
                params = step(params, x, y, order[start : start + workload.batch_size])
        return params

    def run(params: Params, cohort: jax.Array, key: jax.Array) -> Params:
        keys = jax.random.split(key, len(cohort))
        return mean([client(params, x[i], y[i], k) for i, k in zip(cohort, keys, strict=True)])

    return run


@jax.jit
def accuracy(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    hits = 0
    for start in range(0, len(x), EVALUATION_BATCH):
        batch = slice(start, start + EVALUATION_BATCH)
        hits += (logits(params, x[batch]).argmax(-1) == y[batch]).sum()
    return hits / len(x)


def as_jax(array: NDArray[Any]) -> jax.Array:
    """Return a JAX array, images with channels last."""
    return jnp.asarray(np.moveaxis(array, -3, -1) if array.ndim > 3 else array)


def main() -> None:
    case = parse_case()
    workload = case.workload
    x, y, x_test, y_test = map(as_jax, read_arrays(case.data, workload))
    make_round = compiled_round if workload.name == "W1" else stepwise_round
    run = make_round(workload, x, y)
    params = initial_params(workload, jax.random.key(0))
    key = jax.random.key(1)
    rng = np.random.default_rng(0)
    watch = Stopwatch(case)
    enough = False
    while not enough:
        cohort = rng.choice(workload.num_clients, workload.cohort_size, replace=False)
        params = run(params, jnp.asarray(cohort), jax.random.fold_in(key, watch.round))
        params = jax.block_until_ready(params)
        value = float(accuracy(params, x_test, y_test)) if watch.evaluates else None
        enough = watch.end_round(value)
    watch.report(["jax"])


if __name__ == "__main__":
    main()
