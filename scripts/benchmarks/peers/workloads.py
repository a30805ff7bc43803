"""The two workloads of the speed race, and the number of operations of a round.

Every peer imports this file in its own environment, so it needs nothing but numpy.

The floating-point operations of a round are those of its matrix products and convolutions. A
multiplication with its addition counts as two. With m = positions * fan-in * fan-out of a layer:

    forward  = 2 sum(m)                              for one sample
    training = 3 forward - 2 m of the first layer    for one sample
    round    = K * epochs * n * training + test samples * forward / eval_every

In training each layer computes once forward and twice backward, for its weights and for its input.
The first layer's input needs no gradient. Biases, activations, pooling, softmax, the optimiser's
step and the average are left out: less than 2 % of either workload.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

TEST_SAMPLES = 10_000
EVALUATION_BATCH = 1000


class Product(NamedTuple):
    """A layer as a matrix product: `positions` of its output, `fan_in` and `fan_out`."""

    positions: int
    fan_in: int
    fan_out: int


@dataclass(frozen=True)
class Workload:
    """FedAvg by SGD on `num_clients` clients with `samples` each.

    The test set is passed every `eval_every` rounds. `warmup_rounds`, a multiple of `eval_every`,
    are not measured.
    """

    name: str
    title: str
    num_clients: int
    samples: int
    cohort_size: int
    steps: int
    batch_size: int
    lr: float
    weight_decay: float
    eval_every: int
    warmup_rounds: int
    layers: tuple[Product, ...]

    @property
    def epochs(self) -> int:
        """The passes over a client's data that make `steps`."""
        batches_per_epoch = math.ceil(self.samples / self.batch_size)
        assert self.steps % batches_per_epoch == 0
        return self.steps // batches_per_epoch

    @property
    def forward_flops(self) -> int:
        """Operations of a forward pass of one sample."""
        return 2 * sum(p.positions * p.fan_in * p.fan_out for p in self.layers)

    @property
    def training_flops(self) -> int:
        """Operations of forward and backward of one sample in one step."""
        first = self.layers[0]
        return 3 * self.forward_flops - 2 * first.positions * first.fan_in * first.fan_out

    @property
    def round_flops(self) -> float:
        trained = self.cohort_size * self.epochs * self.samples
        return trained * self.training_flops + TEST_SAMPLES * self.forward_flops / self.eval_every


WORKLOADS = {
    "W1": Workload(
        name="W1",
        title="Fashion-MNIST, MLP 784-64-30-10, N=100, K=10, 30 steps of 64, accuracy every round",
        num_clients=100,
        samples=600,
        cohort_size=10,
        steps=30,
        batch_size=64,
        lr=0.005,
        weight_decay=1e-4,
        eval_every=1,
        warmup_rounds=5,
        layers=(Product(1, 784, 64), Product(1, 64, 30), Product(1, 30, 10)),
    ),
    "W2": Workload(
        name="W2",
        title="CIFAR-10, CNN 32-64-64+64, N=100, K=5, 40 steps of 50, accuracy every 5 rounds",
        num_clients=100,
        samples=500,
        cohort_size=5,
        steps=40,
        batch_size=50,
        lr=0.01,
        weight_decay=3e-4,
        eval_every=5,
        warmup_rounds=5,
        layers=(
            Product(30 * 30, 3 * 9, 32),
            Product(13 * 13, 32 * 9, 64),
            Product(4 * 4, 64 * 9, 64),
            Product(1, 1024, 64),
            Product(1, 64, 10),
        ),
    ),
}


class Arrays(NamedTuple):
    """The clients' samples and the test set.

    `x` is [N, n, ...] float32 (W1: flat pixels, W2: channels first), and `y` [N, n] int64.
    """

    x: NDArray[np.float32]
    y: NDArray[np.int64]
    x_test: NDArray[np.float32]
    y_test: NDArray[np.int64]


def arrays_file(folder: Path, workload: Workload) -> Path:
    """Return the file with the arrays of a workload, which write_data.py writes."""
    return folder / f"{workload.name}.npz"


def read_arrays(folder: Path, workload: Workload) -> Arrays:
    with np.load(arrays_file(folder, workload)) as file:
        return Arrays(**file)
