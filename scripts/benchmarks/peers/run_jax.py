"""Hand-written JAX.

W1: the whole round is one compiled function, `vmap` over the cohort and `scan` over local steps.
W2: XLA on a CPU runs convolutions inside a loop, or with a weight a client, on a slow path; there
one step is compiled and called client by client, step by step, which is the fastest of the three.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scripts.benchmarks.peers.stopwatch import Stopwatch, parse_case
from scripts.benchmarks.peers.workloads import EVALUATION_BATCH, Arrays, Workload, read_arrays

Layer = dict[str, jax.Array]
Params = list[Layer]
Round = Callable[[Params, jax.Array, jax.Array], Params]
"""The next parameters from the last ones, the cohort and a random key."""


def initial_params(workload: Workload, key: jax.Array) -> Params:
    """torch's initialisation: uniform within 1 / sqrt(fan-in)."""
    params = []
    for layer, layer_key in zip(
        workload.layers, jax.random.split(key, len(workload.layers)), strict=True
    ):
        bound, keys = layer.fan_in**-0.5, jax.random.split(layer_key)
        convolution = layer.positions > 1
        shape = (
            (3, 3, layer.fan_in // 9, layer.fan_out)
            if convolution
            else (layer.fan_in, layer.fan_out)
        )
        params.append(
            {
                "w": jax.random.uniform(keys[0], shape, minval=-bound, maxval=bound),
                "b": jax.random.uniform(keys[1], (layer.fan_out,), minval=-bound, maxval=bound),
            }
        )
    return params


def logits(params: Params, x: jax.Array) -> jax.Array:
    """x [b, 784], or [b, 32, 32, 3] for the network with three convolutions."""
    if x.ndim == 4:
        for layer, pools in zip(params[:3], (True, True, False), strict=True):
            x = jax.nn.relu(_pooled(_convolved(layer, x)) if pools else _convolved(layer, x))
        x, params = x.reshape(len(x), -1), params[3:]
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def _convolved(layer: Layer, x: jax.Array) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    return (
        jax.lax.conv_general_dilated(x, layer["w"], (1, 1), "VALID", dimension_numbers=numbers)
        + layer["b"]
    )


def _pooled(x: jax.Array) -> jax.Array:
    """The maxima of 2x2 cells. `lax.reduce_window` has a gradient that takes twice as long as all
    the rest."""
    height, width = x.shape[1] // 2, x.shape[2] // 2
    cells = x[:, : 2 * height, : 2 * width].reshape(len(x), height, 2, width, 2, -1)
    return cells.max((2, 4))


def cross_entropy(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits(params, x)), y[:, None], 1).mean()


def sgd_step(workload: Workload, params: Params, x: jax.Array, y: jax.Array) -> Params:
    gradient = jax.grad(cross_entropy)(params, x, y)
    return jax.tree.map(
        lambda p, g: p - workload.lr * (g + workload.weight_decay * p), params, gradient
    )


def compiled_round(workload: Workload, x: jax.Array, y: jax.Array) -> Round:
    """The whole round as one compiled function."""
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
    """Client by client and step by step, with one compiled step."""

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


def accuracy_of(x: jax.Array, y: jax.Array) -> Callable[[Params], jax.Array]:
    @jax.jit
    def accuracy(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        starts = range(0, len(x), EVALUATION_BATCH)
        hits = [
            logits(params, x[s : s + EVALUATION_BATCH]).argmax(-1) == y[s : s + EVALUATION_BATCH]
            for s in starts
        ]
        return jnp.concatenate(hits).mean()

    return lambda params: accuracy(
        params, x, y
    )  # arguments: as constants they would be compiled in


def placed(arrays: Arrays) -> list[jax.Array]:
    """As JAX arrays, images with channels last."""
    moved: list[Any] = [np.moveaxis(a, -3, -1) if a.ndim > 3 else a for a in arrays]
    return [jnp.asarray(a) for a in moved]


def main() -> None:
    case = parse_case()
    workload = case.workload
    x, y, x_test, y_test = placed(read_arrays(case.data, workload))
    run = (compiled_round if workload.name == "W1" else stepwise_round)(workload, x, y)
    params, accuracy = initial_params(workload, jax.random.key(0)), accuracy_of(x_test, y_test)
    watch, rng, key = Stopwatch(case), np.random.default_rng(0), jax.random.key(1)
    enough = False
    while not enough:
        cohort = rng.choice(workload.num_clients, workload.cohort_size, replace=False)
        params = jax.block_until_ready(
            run(params, jnp.asarray(cohort), jax.random.fold_in(key, watch.round))
        )
        enough = watch.end_round(float(accuracy(params)) if watch.evaluates else None)
    watch.report(["jax"])


if __name__ == "__main__":
    main()
