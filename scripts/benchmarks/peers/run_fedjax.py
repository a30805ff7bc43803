"""FedJAX: its federated averaging (`for_each_client` on its jit backend) with a haiku network."""

import jax
import jax.numpy as jnp
import numpy as np

jax.tree_map = jax.tree_util.tree_map  # jax 0.6 removed it, and FedJAX 0.0.17 calls it

import fedjax  # noqa: E402
import haiku as hk  # noqa: E402

from scripts.benchmarks.peers.jax_networks import channels_last, from_torch, prepare  # noqa: E402
from scripts.benchmarks.peers.stopwatch import Stopwatch, parse_case  # noqa: E402
from scripts.benchmarks.peers.workloads import (  # noqa: E402
    EVALUATION_BATCH,
    Convolution,
    Dropout,
    Linear,
    Workload,
    read_arrays,
)


def as_examples(x: np.ndarray, y: np.ndarray) -> dict[str, np.ndarray]:
    """Return samples as FedJAX wants them, images with channels last."""
    return {"x": channels_last(x), "y": y.astype(np.int32)}


def forward(workload: Workload, x: jax.Array, trains: bool) -> jax.Array:
    """Return logits. Layers with weights are named by their position."""
    for position, layer in enumerate(workload.layers):
        name = f"layer_{position:02}"
        match layer:
            case Convolution(_, outputs, kernel, _):
                x = hk.Conv2D(outputs, kernel, padding="VALID", name=name)(x)
            case Linear(_, outputs):
                x = hk.Linear(outputs, name=name)(x)
            case Dropout(rate):
                x = hk.dropout(hk.next_rng_key(), rate, x) if trains else x
            case "pool":
                x = hk.MaxPool(2, 2, "VALID")(x)
            case "relu":
                x = jax.nn.relu(x)
            case "flatten":
                x = x.reshape(len(x), -1)
    return x


def initial_params(workload: Workload, initial: list[np.ndarray]) -> dict[str, dict]:
    """Return the written initial model by the names of haiku."""
    weights, _ = from_torch(initial)
    tensors = iter(weights)
    params = {}
    for position, layer in enumerate(workload.layers):
        if isinstance(layer, Convolution | Linear):
            params[f"layer_{position:02}"] = {"w": next(tensors), "b": next(tensors)}
    return params


def model_of(workload: Workload, sample: dict[str, np.ndarray]) -> fedjax.Model:
    def loss(batch, output):
        return -jnp.take_along_axis(jax.nn.log_softmax(output), batch["y"][:, None], 1)[:, 0]

    def apply(batch, trains=False):
        return forward(workload, batch["x"], trains)

    metrics = {"accuracy": fedjax.metrics.Accuracy()}
    return fedjax.create_model_from_haiku(
        hk.transform(apply), sample, loss, metrics, train_kwargs={"trains": True}
    )


def algorithm_of(workload: Workload, model: fedjax.Model) -> fedjax.FederatedAlgorithm:
    """Return federated averaging with as many epochs as the others train.

    `num_steps` alone would end after one epoch, the default of `num_epochs`. FedJAX cuts full
    batches across the borders of epochs: on W1 29 steps with 1,856 samples, not 30 with 1,800.
    """

    def penalty(params):  # its gradient is the weight decay of SGD
        squares = sum(jnp.sum(p * p) for p in jax.tree_util.tree_leaves(params))
        return 0.5 * workload.weight_decay * squares

    return fedjax.algorithms.fed_avg.federated_averaging(
        fedjax.model_grad(model, penalty),
        fedjax.optimizers.sgd(workload.lr),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(
            batch_size=workload.batch_size, num_epochs=workload.epochs
        ),
    )


def main() -> None:
    case = parse_case()
    prepare(case)
    workload, arrays = case.workload, read_arrays(case.data, case.workload)
    fedjax.set_for_each_client_backend("jit")
    examples = {i: as_examples(arrays.x[i], arrays.y[i]) for i in range(workload.num_clients)}
    clients = fedjax.InMemoryFederatedData(examples)
    model = model_of(workload, {name: values[:1] for name, values in examples[0].items()})
    test_set = fedjax.ClientDataset(as_examples(arrays.x_test, arrays.y_test))
    batches = fedjax.padded_batch_client_datasets([test_set], batch_size=EVALUATION_BATCH)
    test_batches = list(batches)
    algorithm = algorithm_of(workload, model)
    watch = Stopwatch(case)
    state = algorithm.init(initial_params(workload, arrays.initial))
    enough = False
    while not enough:
        key = jax.random.PRNGKey(watch.round)
        cohort = [int(client) for client in arrays.cohort(watch.round)]
        keys = jax.random.split(key, len(cohort))
        pairs = zip(clients.get_clients(cohort), keys, strict=True)
        state, _ = algorithm.apply(state, [(*pair, key) for pair, key in pairs])
        jax.block_until_ready(state.params)
        accuracy = None
        if watch.evaluates:
            metrics = fedjax.evaluate_model(model, state.params, test_batches)
            accuracy = float(metrics["accuracy"])
        enough = watch.end_round(accuracy)
    watch.report(["fedjax", "jax"])


if __name__ == "__main__":
    main()
