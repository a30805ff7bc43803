"""The two workloads of the speed race, and what they cost. Known to every peer, so nothing here but
numpy.

A round's floating-point operations are those of its matrix products and convolutions; a
multiplication with its addition counts two. With m = positions * fan-in * fan-out of a layer,

    forward  = 2 sum(m)                          of a sample
    training = 3 forward - 2 m of the first layer      (each layer once forward and twice backward, for its weights and
                                                  its input; the first layer's input needs no gradient)
    round    = K * epochs * n * training + test samples * forward / eval_every

Biases, activations, pooling, softmax, the optimiser's step and the average are left out: under 2%
of either workload.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

TEST_SAMPLES = 10_000
EVALUATION_BATCH = 1000


class Product(NamedTuple):
    """A layer as matrix products: `positions` of its output times `fan_in` times `fan_out`."""

    positions: int
    fan_in: int
    fan_out: int


@dataclass(frozen=True)
class Workload:
    """FedAvg by SGD on `num_clients` clients of `samples` each; the test set is passed every
    `eval_every` rounds.

    `warmup_rounds` are not counted; a multiple of `eval_every`.
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
    def batches_per_epoch(self) -> int:
        return -(-self.samples // self.batch_size)

    @property
    def epochs(self) -> int:
        """The passes over a client's data that make `steps`."""
        assert self.steps % self.batches_per_epoch == 0
        return self.steps // self.batches_per_epoch

    @property
    def forward_flops(self) -> int:
        """Of one sample."""
        return 2 * sum(p.positions * p.fan_in * p.fan_out for p in self.layers)

    @property
    def training_flops(self) -> int:
        """Of one sample in one step: forward and backward."""
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
    """`x` [N, n, ...] float32 (W1: flat pixels, W2: channels first), `y` [N, n] int64, and the test
    set."""

    x: NDArray[np.float32]
    y: NDArray[np.int64]
    x_test: NDArray[np.float32]
    y_test: NDArray[np.int64]


ARRAYS = Arrays._fields
"""The names of their files."""


def read_arrays(folder: Path, workload: Workload) -> Arrays:
    """What `benchmark.py` wrote there."""
    return Arrays(**{name: np.load(folder / workload.name / f"{name}.npy") for name in ARRAYS})


def write_arrays(folder: Path, workload: Workload, arrays: Arrays) -> None:
    (folder / workload.name).mkdir(parents=True, exist_ok=True)
    for name in ARRAYS:
        np.save(folder / workload.name / f"{name}.npy", getattr(arrays, name))


def is_written(folder: Path, workload: Workload) -> bool:
    return all((folder / workload.name / f"{name}.npy").is_file() for name in ARRAYS)
