"""The workloads of the speed race, and the number of operations of a round.

Every peer imports this file in its own environment, so it needs nothing but numpy.

The floating-point operations of a round are those of its matrix products and convolutions. A
multiplication with its addition counts as two. With m = positions * fan-in * fan-out of a layer:

    forward  = 2 sum(m)                              for one sample
    training = 3 forward - 2 m of the first layer    for one sample
    round    = K * trained samples * training + test samples * forward / eval_every

In training each layer computes once forward and twice backward, for its weights and for its input.
The first layer's input needs no gradient. Biases, normalisation, activations, pooling, softmax, the
optimiser's step and the average are left out: less than 2 % of W1 and W2.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

EVALUATION_BATCH = 1000
NUM_COHORTS = 1000
"""Number of rounds whose cohorts are written down. Later rounds begin again with the first."""


class Convolution(NamedTuple):
    """A convolution with square kernels. `side` is the height and width of its output."""

    inputs: int
    outputs: int
    kernel: int
    side: int

    @property
    def products(self) -> int:
        """Number of multiplications in the forward pass of one sample."""
        return self.side**2 * self.inputs * self.kernel**2 * self.outputs


class Linear(NamedTuple):
    """A linear layer."""

    inputs: int
    outputs: int

    @property
    def products(self) -> int:
        """Number of multiplications in the forward pass of one sample."""
        return self.inputs * self.outputs


class Dropout(NamedTuple):
    """Dropout with the probability `rate`."""

    rate: float


Layer = Convolution | Linear | Dropout | Literal["pool", "relu", "flatten"]
"""A layer. `pool` takes the maximum of 2 x 2 pixels."""


class Residual(NamedTuple):
    """A residual network of basic blocks, two in each of `stages` or three.

    The stem is a convolution of `stem_kernel` and `stem_stride`, with a 3 x 3 pooling of stride 2
    after it if `pools`. A block that changes the shape has a 1 x 1 convolution on its shortcut if
    it `projects`. Otherwise the shortcut subsamples and adds zero channels.
    """

    widths: tuple[int, ...]
    blocks: int
    stem_kernel: int = 3
    stem_stride: int = 1
    pools: bool = False
    projects: bool = False

    def strides(self) -> Iterator[tuple[int, int, int]]:
        """Yield the input channels, output channels and stride of each block."""
        channels = self.widths[0]
        for stage, width in enumerate(self.widths):
            for block in range(self.blocks):
                yield channels, width, 2 if stage and not block else 1
                channels = width

    def layers(self, classes: int = 10) -> list[Layer]:
        """Return the layers that multiply, for images of 3 x 32 x 32."""
        side = 32 // self.stem_stride
        layers: list[Layer] = [Convolution(3, self.widths[0], self.stem_kernel, side)]
        side //= 2 if self.pools else 1
        for channels, width, stride in self.strides():
            side //= stride
            layers.append(Convolution(channels, width, 3, side))
            layers.append(Convolution(width, width, 3, side))
            if self.projects and (channels, stride) != (width, 1):
                layers.append(Convolution(channels, width, 1, side))
        return [*layers, Linear(self.widths[-1], classes)]


@dataclass(frozen=True)
class Workload:
    """FedAvg on `num_clients` clients with `samples` each.

    Clients train `steps` local steps on batches of their samples in a random order, which is drawn
    anew in each epoch. The last batch of an epoch may be smaller. The test set is passed every
    `eval_every` rounds. `warmup_rounds`, a multiple of `eval_every`, are not measured. `fedsim` are
    overrides of fedsim that name the data, the partition and the model.
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
    network: tuple[Layer, ...] | Residual
    fedsim: tuple[str, ...]
    optimizer: Literal["sgd", "adam"] = "sgd"
    test_samples: int = 10_000

    @property
    def is_chain(self) -> bool:
        """True if the network is a chain of layers."""
        return not isinstance(self.network, Residual)

    @property
    def layers(self) -> Sequence[Layer]:
        """The layers of the network, or those that multiply if it is no chain."""
        return self.network.layers() if isinstance(self.network, Residual) else self.network

    @property
    def batches_per_epoch(self) -> int:
        return math.ceil(self.samples / self.batch_size)

    @property
    def epochs(self) -> int:
        """The epochs that `steps` begin."""
        return math.ceil(self.steps / self.batches_per_epoch)

    @property
    def trained_samples(self) -> int:
        """The samples that a client trains in a round, each as often as it is used."""
        epochs, steps = divmod(self.steps, self.batches_per_epoch)
        return epochs * self.samples + min(steps * self.batch_size, self.samples)

    @property
    def forward_flops(self) -> int:
        """Operations of a forward pass of one sample."""
        return 2 * sum(_products(self.layers))

    @property
    def training_flops(self) -> int:
        """Operations of forward and backward of one sample in one step."""
        return 3 * self.forward_flops - 2 * _products(self.layers)[0]

    @property
    def round_flops(self) -> float:
        training = self.cohort_size * self.trained_samples * self.training_flops
        return training + self.test_samples * self.forward_flops / self.eval_every

    def tiny(self) -> "Workload":
        """Return a small form, to try the race without measuring: two clients, and one epoch."""
        steps = min(self.steps, self.batches_per_epoch)
        return replace(
            self, cohort_size=2, steps=steps, eval_every=1, warmup_rounds=1, test_samples=500
        )


def _products(layers: Sequence[Layer]) -> list[int]:
    return [layer.products for layer in layers if isinstance(layer, Convolution | Linear)]


RESNET_20 = Residual(widths=(16, 32, 64), blocks=3)
RESNET_18 = Residual(
    (64, 128, 256, 512), 2, stem_kernel=7, stem_stride=2, pools=True, projects=True
)
SHARDS = ("partition=shards", "partition.shards_per_client=2")
CIFAR = "dataset=cifar10"
"""Also stands for CIFAR-10 as parquet files (see run_fedsim.py)."""
CENTRED = (CIFAR, "dataset.mean=[0.5,0.5,0.5]", "dataset.std=[0.5,0.5,0.5]")
"""CIFAR-10 scaled to [-1, 1]."""
STANDARDISED = (CIFAR, "dataset.mean=[0.4914,0.4822,0.4465]", "dataset.std=[0.247,0.2435,0.2616]")

_ALL = [
    Workload(
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
        network=(Linear(784, 64), "relu", Linear(64, 30), "relu", Linear(30, 10)),
        fedsim=("dataset=fashion_mnist", *SHARDS, "model=mlp"),
    ),
    Workload(
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
        network=(
            Convolution(3, 32, 3, 30),
            "pool",  # before ReLU, as in fedsim: the same function, with less work for everybody
            "relu",
            Convolution(32, 64, 3, 13),
            "pool",
            "relu",
            Convolution(64, 64, 3, 4),
            "relu",
            "flatten",
            Linear(1024, 64),
            "relu",
            Linear(64, 10),
        ),
        fedsim=(CIFAR, *SHARDS, "model=cnn"),
    ),
    Workload(  # the benchmark that pfl publishes, with cohorts drawn without replacement
        name="pfl",
        title="CIFAR-10, CNN 32-64+128 with dropout, N=1000, K=50, 5 steps of 10, accuracy every "
        "10 rounds",
        num_clients=1000,
        samples=50,
        cohort_size=50,
        steps=5,
        batch_size=10,
        lr=0.1,
        weight_decay=0.0,
        eval_every=10,
        warmup_rounds=10,
        network=(
            Convolution(3, 32, 3, 30),
            "relu",
            Convolution(32, 64, 3, 28),
            "relu",
            "pool",
            Dropout(0.25),
            "flatten",
            Linear(12_544, 128),
            "relu",
            Dropout(0.5),
            Linear(128, 10),
        ),
        fedsim=(*STANDARDISED, "partition=iid", "model=femnist_cnn", "model.dropout=0.5"),
    ),
    Workload(  # the benchmark that BlazeFL publishes, without its augmentation
        name="blazefl",
        title="CIFAR-10, LeNet 6-16+120-84, N=K=100, 50 steps of 50, accuracy every round",
        num_clients=100,
        samples=500,
        cohort_size=100,
        steps=50,
        batch_size=50,
        lr=0.1,
        weight_decay=0.0,
        eval_every=1,
        warmup_rounds=1,
        network=(
            Convolution(3, 6, 5, 28),
            "pool",
            "relu",
            Convolution(6, 16, 5, 10),
            "pool",
            "relu",
            "flatten",
            Linear(400, 120),
            "relu",
            Linear(120, 84),
            "relu",
            Linear(84, 10),
        ),
        fedsim=(*CENTRED, *SHARDS, "model=lenet"),
    ),
    Workload(
        name="ResNet-20",
        title="CIFAR-10, ResNet-20, N=50, K=10, 10 steps of 64 with Adam, accuracy every 5 rounds",
        num_clients=50,
        samples=1000,
        cohort_size=10,
        steps=10,
        batch_size=64,
        lr=1e-3,
        weight_decay=0.0,
        eval_every=5,
        warmup_rounds=5,
        network=RESNET_20,
        fedsim=(CIFAR, "partition=iid", "model=resnet20"),
        optimizer="adam",
    ),
    Workload(
        name="blazefl-resnet18",
        title="CIFAR-10, torchvision's ResNet-18, N=K=100, 50 steps of 50, accuracy every round",
        num_clients=100,
        samples=500,
        cohort_size=100,
        steps=50,
        batch_size=50,
        lr=0.1,
        weight_decay=0.0,
        eval_every=1,
        warmup_rounds=1,
        network=RESNET_18,
        fedsim=(*CENTRED, *SHARDS, "model=torchvision", "model.network=resnet18"),
    ),
]
WORKLOADS = {workload.name: workload for workload in _ALL}


class Arrays(NamedTuple):
    """The clients' samples and the test set, the cohorts, and the initial model.

    `x` is [N, n, ...] float32 (W1: flat pixels, others: channels first), and `y` [N, n] int64.
    `cohorts` [NUM_COHORTS, K] has the clients of each round, and `initial` the floating-point
    tensors of the model's state in the layout and order of torch.
    """

    x: NDArray[np.float32]
    y: NDArray[np.int64]
    x_test: NDArray[np.float32]
    y_test: NDArray[np.int64]
    cohorts: NDArray[np.int64]
    initial: list[NDArray[np.float32]]

    @property
    def data(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
        """The four arrays of samples and labels."""
        return self.x, self.y, self.x_test, self.y_test

    def cohort(self, round: int) -> NDArray[np.int64]:
        """Return the clients of a round. Rounds count from 0."""
        return self.cohorts[round % len(self.cohorts)]


def folder_of(folder: Path, workload: Workload) -> Path:
    """Return the folder of the arrays of a workload, which write_data.py writes."""
    return folder / workload.name


def write_arrays(folder: Path, workload: Workload, arrays: Arrays) -> None:
    """Write the arrays of a workload. The folder appears when it is complete."""
    unfinished = folder / f"{workload.name}.part"
    unfinished.mkdir(parents=True, exist_ok=True)
    for name in Arrays._fields[:-1]:
        np.save(unfinished / f"{name}.npy", getattr(arrays, name))
    for i, value in enumerate(arrays.initial):
        np.save(unfinished / f"initial_{i:03}.npy", value)
    unfinished.rename(folder_of(folder, workload))


def read_arrays(folder: Path, workload: Workload) -> Arrays:
    """Return the arrays of a workload, mapped into memory."""
    place = folder_of(folder, workload)
    # copied on writing, because torch warns of arrays that cannot be written
    fields = {name: np.load(place / f"{name}.npy", "c") for name in Arrays._fields[:-1]}
    fields["cohorts"] = fields["cohorts"][:, : workload.cohort_size]
    for name in ("x_test", "y_test"):
        fields[name] = fields[name][: workload.test_samples]
    initial = [np.load(path) for path in sorted(place.glob("initial_*.npy"))]
    return Arrays(**fields, initial=initial)
