"""FedJAX: its federated averaging (`for_each_client` on its jit backend) with a haiku network and
haiku's pooling."""

import jax
import jax.numpy as jnp
import numpy as np

jax.tree_map = jax.tree_util.tree_map  # gone from jax since 0.6, and FedJAX 0.0.17 calls it

import fedjax  # noqa: E402
import haiku as hk  # noqa: E402

from scripts.benchmarks.peers.stopwatch import Stopwatch, parse_case  # noqa: E402
from scripts.benchmarks.peers.workloads import EVALUATION_BATCH, Arrays, Workload, read_arrays  # noqa: E402


def as_examples(x: np.ndarray, y: np.ndarray) -> dict[str, np.ndarray]:
    """Images with channels last."""
    return {"x": np.moveaxis(x, -3, -1) if x.ndim == 4 else x, "y": y.astype(np.int32)}


def layers(workload: Workload) -> list:
    init = hk.initializers.VarianceScaling(1 / 3, "fan_in", "uniform")
    linear = lambda width: hk.Linear(width, w_init=init)  # noqa: E731
    convolution = lambda width: hk.Conv2D(width, 3, padding="VALID", w_init=init)  # noqa: E731
    pool, relu = hk.MaxPool(2, 2, "VALID"), jax.nn.relu
    if workload.name == "W1":
        return [linear(64), relu, linear(30), relu, linear(10)]
    convolutions = [convolution(32), pool, relu, convolution(64), pool, relu, convolution(64), relu]
    return [*convolutions, hk.Flatten(), linear(64), relu, linear(10)]


def model_of(workload: Workload, sample: dict[str, np.ndarray]) -> fedjax.Model:
    def loss(batch, output):
        return -jnp.take_along_axis(jax.nn.log_softmax(output), batch["y"][:, None], 1)[:, 0]

    forward = hk.transform(lambda batch: hk.Sequential(layers(workload))(batch["x"]))
    return fedjax.create_model_from_haiku(
        forward, sample, loss, {"accuracy": fedjax.metrics.Accuracy()}
    )


def algorithm_of(workload: Workload, model: fedjax.Model) -> fedjax.FederatedAlgorithm:
    def penalty(params):  # whose gradient is the weight decay of SGD
        return (
            0.5
            * workload.weight_decay
            * sum(jnp.sum(p * p) for p in jax.tree_util.tree_leaves(params))
        )

    return fedjax.algorithms.fed_avg.federated_averaging(
        fedjax.model_grad(model, penalty),
        fedjax.optimizers.sgd(workload.lr),
        fedjax.optimizers.sgd(1.0),
        batching_of(workload),
    )


def batching_of(workload: Workload) -> fedjax.ShuffleRepeatBatchHParams:
    """As many epochs as the others train (`num_steps` alone would end after one, the default of
    `num_epochs`).

    FedJAX cuts full batches across the borders of epochs: on W1 29 steps with 1,856 samples in
    place of 30 with 1,800.
    """
    return fedjax.ShuffleRepeatBatchHParams(
        batch_size=workload.batch_size, num_epochs=workload.epochs
    )


def test_batches(arrays: Arrays) -> list:
    dataset = fedjax.ClientDataset(as_examples(arrays.x_test, arrays.y_test))
    return list(fedjax.padded_batch_client_datasets([dataset], batch_size=EVALUATION_BATCH))


def main() -> None:
    case = parse_case()
    workload, arrays = case.workload, read_arrays(case.data, case.workload)
    fedjax.set_for_each_client_backend("jit")
    examples = {i: as_examples(arrays.x[i], arrays.y[i]) for i in range(workload.num_clients)}
    sampler = fedjax.client_samplers.UniformGetClientSampler(
        fedjax.InMemoryFederatedData(examples), workload.cohort_size, seed=0
    )
    model, test = (
        model_of(workload, {k: v[:1] for k, v in examples[0].items()}),
        test_batches(arrays),
    )
    algorithm, watch = algorithm_of(workload, model), Stopwatch(case)
    state = algorithm.init(model.init(jax.random.PRNGKey(0)))
    enough = False
    while not enough:
        sampler.set_round_num(watch.round)
        state, _ = algorithm.apply(state, sampler.sample())
        jax.block_until_ready(state.params)
        measure = watch.evaluates
        enough = watch.end_round(
            float(fedjax.evaluate_model(model, state.params, test)["accuracy"]) if measure else None
        )
    watch.report(["fedjax", "jax"])


if __name__ == "__main__":
    main()
