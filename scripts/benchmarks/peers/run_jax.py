"""Hand-written JAX.

On a GPU, and on a CPU for W1, the whole round is one compiled function: `vmap` over the cohort and
`scan` over local steps. XLA on a CPU has a slow path for convolutions inside a loop, or with
weights of their own for each client. So there one step is compiled and called client by client,
which is the fastest.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scripts.benchmarks.peers.jax_networks import (
    Statistics,
    Weights,
    channels_last,
    cross_entropy,
    from_torch,
    logits,
    prepare,
)
from scripts.benchmarks.peers.stopwatch import Stopwatch, parse_case
from scripts.benchmarks.peers.workloads import EVALUATION_BATCH, Workload, read_arrays

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
"""Adam's constants in torch."""


class Model(NamedTuple):
    """The parameters that clients and server exchange."""

    weights: Weights
    statistics: Statistics


class Local(NamedTuple):
    """A client's state between two steps: its model, and Adam's moments and number of steps."""

    model: Model
    moments: tuple[Weights, Weights]
    step: jax.Array


Round = Callable[[Model, jax.Array, jax.Array], Model]
"""Computes the next model from the last one, the cohort and a random key."""


def begin(workload: Workload, model: Model) -> Local:
    zeros = []
    if workload.optimizer == "adam":
        zeros = [jnp.zeros_like(weight) for weight in model.weights]
    return Local(model, (zeros, zeros), jnp.zeros((), jnp.int32))


def local_step(
    workload: Workload, local: Local, x: jax.Array, y: jax.Array, key: jax.Array
) -> Local:
    """Return a client's state after a step of its optimiser on one batch."""
    (weights, statistics), moments, step = local
    gradient_of = jax.grad(cross_entropy(workload), has_aux=True)
    gradients, statistics = gradient_of(weights, statistics, x, y, key)
    step = step + 1
    pairs = zip(weights, gradients, strict=True)
    gradients = [g + workload.weight_decay * w for w, g in pairs]
    changes = gradients
    if workload.optimizer == "adam":
        first = [BETA1 * m + (1 - BETA1) * g for m, g in zip(moments[0], gradients, strict=True)]
        second = [
            BETA2 * v + (1 - BETA2) * g * g for v, g in zip(moments[1], gradients, strict=True)
        ]
        moments = (first, second)
        mean, variance = 1 - BETA1**step, 1 - BETA2**step
        changes = [
            m / mean / (jnp.sqrt(v / variance) + EPSILON)
            for m, v in zip(first, second, strict=True)
        ]
    weights = [w - workload.lr * change for w, change in zip(weights, changes, strict=True)]
    return Local(Model(weights, statistics), moments, step)


def compiled_round(workload: Workload, x: jax.Array, y: jax.Array) -> Round:
    """Return the whole round as one compiled function."""
    size = workload.batch_size
    full = min(workload.samples // size, workload.steps)
    has_rest = workload.steps > full and workload.samples > full * size

    def client(model: Model, x: jax.Array, y: jax.Array, key: jax.Array) -> Model:
        def step(local: Local, batch: tuple[jax.Array, jax.Array]) -> tuple[Local, None]:
            positions, key = batch
            return local_step(workload, local, x[positions], y[positions], key), None

        def epoch(local: Local, key: jax.Array) -> tuple[Local, None]:
            key, order_key, rest_key = jax.random.split(key, 3)
            order = jax.random.permutation(order_key, workload.samples)
            batches = order[: full * size].reshape(full, size)
            local, _ = jax.lax.scan(step, local, (batches, jax.random.split(key, full)))
            return step(local, (order[full * size :], rest_key)) if has_rest else (local, None)

        keys = jax.random.split(key, workload.epochs)
        return jax.lax.scan(epoch, begin(workload, model), keys)[0].model

    @jax.jit
    def run(model: Model, x: jax.Array, y: jax.Array, cohort: jax.Array, key: jax.Array) -> Model:
        keys = jax.random.split(key, len(cohort))
        trained = jax.vmap(client, (None, 0, 0, 0))(model, x[cohort], y[cohort], keys)
        return jax.tree.map(lambda values: values.mean(0), trained)

    return lambda model, cohort, key: run(model, x, y, cohort, key)


def stepwise_round(workload: Workload, x: jax.Array, y: jax.Array) -> Round:
    """Return a round client by client and step by step, with one compiled step."""

    @jax.jit
    def orders(key: jax.Array) -> jax.Array:
        keys = jax.random.split(key, workload.epochs)
        return jax.vmap(lambda k: jax.random.permutation(k, workload.samples))(keys)

    @jax.jit
    def step(local: Local, x: jax.Array, y: jax.Array, batch: jax.Array, key: jax.Array) -> Local:
        key = jax.random.fold_in(key, local.step)
        return local_step(workload, local, x[batch], y[batch], key)

    @jax.jit
    def mean(trained: Sequence[Model]) -> Model:
        return jax.tree.map(lambda *values: jnp.stack(values).mean(0), *trained)

    def client(model: Model, x: jax.Array, y: jax.Array, key: jax.Array) -> Model:
        local = begin(workload, model)
        steps_left = workload.steps
        for order in np.asarray(orders(key)):
            starts = range(0, workload.samples, workload.batch_size)
            for start in starts[:steps_left]:
                local = step(local, x, y, order[start : start + workload.batch_size], key)
            steps_left -= len(starts)
        return local.model

    def run(model: Model, cohort: jax.Array, key: jax.Array) -> Model:
        keys = jax.random.split(key, len(cohort))
        return mean([client(model, x[i], y[i], k) for i, k in zip(cohort, keys, strict=True)])

    return run


def accuracy_of(workload: Workload) -> Callable[[Model, jax.Array, jax.Array], jax.Array]:
    @jax.jit
    def accuracy(model: Model, x: jax.Array, y: jax.Array) -> jax.Array:
        hits = 0
        for start in range(0, len(x), EVALUATION_BATCH):
            batch = slice(start, start + EVALUATION_BATCH)
            values, _ = logits(workload, model.weights, model.statistics, x[batch])
            hits += (values.argmax(-1) == y[batch]).sum()
        return hits / len(x)

    return accuracy


def main() -> None:
    case = parse_case()
    workload = case.workload
    prepare(case)
    arrays = read_arrays(case.data, workload)
    x, y, x_test, y_test = (jnp.asarray(channels_last(array)) for array in arrays.data)
    compiles = workload.name == "W1" or case.device != "cpu"
    run = (compiled_round if compiles else stepwise_round)(workload, x, y)
    accuracy = accuracy_of(workload)
    model = Model(*from_torch(arrays.initial))
    key = jax.random.key(1)
    watch = Stopwatch(case)
    enough = False
    while not enough:
        cohort = jnp.asarray(arrays.cohort(watch.round))
        model = run(model, cohort, jax.random.fold_in(key, watch.round))
        value = float(accuracy(model, x_test, y_test)) if watch.evaluates else None
        enough = watch.end_round(value)
    watch.report(["jax"])


if __name__ == "__main__":
    main()
