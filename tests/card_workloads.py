"""The workloads of docs/performance.md on made-up samples, for counts of what the host does in a round on a GPU.

The counts do not depend on the samples, nor, as the whole test set fits into one pass, on their number.
"""

from collections.abc import Sequence
from unittest import mock

import torch

from fedsim.clients.server import LabelledSamples
from fedsim.config.plan import Plan
from fedsim.rounds.loop import Simulation
from fedsim.running import assembly as prepared_data
from fedsim.running.assembly import PreparedData
from tests.card_runs import simulation
from tests.pretended_cuda import Counts, PretendedCard

_ALL = ("num_rounds=1000000", "server.validation_fraction=0", "server.public_samples=0", "selector=random")
W1 = (
    *_ALL, "dataset=fashion_mnist", "model=mlp", "partition=shards_2", "optimizer.lr=0.005",
    "optimizer.weight_decay=1e-4", "num_clients=100", "cohort_size=10", "local.steps=30", "local.batch_size=64",
)  # fmt: skip
W2 = (
    *_ALL, "dataset=cifar10", "model=cnn", "partition=shards_2", "optimizer.lr=0.01",
    "optimizer.weight_decay=3e-4", "num_clients=100", "cohort_size=5", "local.steps=40", "local.batch_size=50",
    "eval_every=5",
)  # fmt: skip
RESNET20 = (
    *_ALL, "dataset=cifar10", "model=resnet20", "partition=dirichlet_class", "partition.alpha=0.5", "optimizer=adam",
    "optimizer.lr=0.001", "num_clients=10", "cohort_size=10", "local.epochs=1", "local.batch_size=64",
)  # fmt: skip
SHAPES = {"fashion_mnist": (1, 28, 28), "cifar10": (3, 32, 32)}


def made_up(words: Sequence[str], num_train: int = 2000, num_test: int = 1500, device: str = "cuda") -> Simulation:
    """A simulation of the workload, by default on the pretended card that is entered."""
    shape = SHAPES[next(word.removeprefix("dataset=") for word in words if word.startswith("dataset="))]

    def load(plan: Plan, device: torch.device) -> PreparedData:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(num_train + num_test, *shape, generator=generator).to(device)
        y = (torch.arange(len(x)) % 10).to(device)
        test = LabelledSamples(x[num_train:], y[num_train:])
        return PreparedData(x[:num_train], y[:num_train], test, 10, shape, None, {})

    prepared_data._latest.clear()
    with mock.patch.object(prepared_data, "_load", load):
        made = simulation(words, device)
    prepared_data._latest.clear()
    return made


def counts_of_a_round(words: Sequence[str], round: int, num_train: int = 2000) -> Counts:
    """What the host does in that round (1-based)."""
    with PretendedCard() as card:
        rounds = iter(made_up(words, num_train))
        for _ in range(round - 1):
            next(rounds)
        card.counts.reset()
        next(rounds)
    return card.counts
