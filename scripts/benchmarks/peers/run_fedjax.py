"""FedJAX: its federated averaging (`for_each_client` on its jit backend) with a haiku network."""

import jax
import jax.numpy as jnp
import numpy as np

jax.tree_map = jax.tree_util.tree_map  # jax 0.6 removed it, and FedJAX 0.0.17 calls it

import fedjax  # noqa: E402
import haiku as hk  # noqa: E402

from scripts.benchmarks.peers.stopwatch import Stopwatch, parse_case  # noqa: E402
from scripts.benchmarks.peers.workloads import EVALUATION_BATCH, Workload, read_arrays  # noqa: E402

INITIAL = hk.initializers.VarianceScaling(1 / 3, "fan_in", "uniform")


def as_examples(x: np.ndarray, y: np.ndarray) -> dict[str, np.ndarray]:
    """Return samples as FedJAX wants them, images with channels last."""
    return {"x": np.moveaxis(x, -3, -1) if x.ndim == 4 else x, "y": y.astype(np.int32)}


def linear(width: int) -> hk.Linear:
    return hk.Linear(width, w_init=INITIAL)


def convolution(width: int) -> hk.Conv2D:
    return hk.Conv2D(width, 3, padding="VALID", w_init=INITIAL)


def layers(workload: Workload) -> list:
    pool, relu = hk.MaxPool(2, 2, "VALID"), jax.nn.relu
    if workload.name == "W1":
        return [linear(64), relu, linear(30), relu, linear(10)]
    convolutions = [convolution(32), pool, relu, convolution(64), pool, relu, convolution(64), relu]
    return [*convolutions, hk.Flatten(), linear(64), relu, linear(10)]


def model_of(workload: Workload, sample: dict[str, np.ndarray]) -> fedjax.Model:
    def loss(batch, output):
        return -jnp.take_along_axis(jax.nn.log_softmax(output), batch["y"][:, None], 1)[:, 0]

    forward = hk.transform(lambda batch: hk.Sequential(layers(workload))(batch["x"]))
    metrics = {"accuracy": fedjax.metrics.Accuracy()}
    return fedjax.create_model_from_haiku(forward, sample, loss, metrics)


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
    workload, arrays = case.workload, read_arrays(case.data, case.workload)
    fedjax.set_for_each_client_backend("jit")
    examples = {i: as_examples(arrays.x[i], arrays.y[i]) for i in range(workload.num_clients)}
    clients = fedjax.InMemoryFederatedData(examples)
    sampler = fedjax.client_samplers.UniformGetClientSampler(clients, workload.cohort_size, seed=0)
    model = model_of(workload, {name: values[:1] for name, values in examples[0].items()})
    test_set = fedjax.ClientDataset(as_examples(arrays.x_test, arrays.y_test))
    batches = fedjax.padded_batch_client_datasets([test_set], batch_size=EVALUATION_BATCH)
    test_batches = list(batches)
    algorithm = algorithm_of(workload, model)
    watch = Stopwatch(case)
    state = algorithm.init(model.init(jax.random.PRNGKey(0)))
    enough = False
    while not enough:
        sampler.set_round_num(watch.round)
        state, _ = algorithm.apply(state, sampler.sample())
        jax.block_until_ready(state.params)
        accuracy = None
        if watch.evaluates:
            metrics = fedjax.evaluate_model(model, state.params, test_batches)
            accuracy = float(metrics["accuracy"])
        enough = watch.end_round(accuracy)
    watch.report(["fedjax", "jax"])


if __name__ == "__main__":
    main()
