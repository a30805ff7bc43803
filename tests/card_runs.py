"""Short runs of whole experiments, for comparisons of devices; and the workloads of
docs/performance.md on made-up samples, on which counts of what the host does in a round on a GPU do
not depend."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fedsim.clients.context import LabelledSamples
from fedsim.config.compose import compose_jobs, make_plan, search_path
from fedsim.config.job import ComposedJob
from fedsim.config.plan import Plan
from fedsim.core import exact, factors
from fedsim.core.record import Record
from fedsim.rounds.loop import Simulation
from fedsim.running import assembly as prepared_data
from fedsim.running.assembly import PreparedData, build
from fedsim.selectors import similarity as inner_products
from tests.environment import ON_GPU
from tests.goldens import fitted
from tests.pretended_cuda import Counts, PretendedCard, held

COMMON = (
    *(
        "num_rounds=3",
        "num_clients=6",
        "cohort_size=3",
        "local.epochs=1",
        "local.batch_size=32",
        "optimizer.lr=0.05",
    ),
    *("server.validation_fraction=0.05", "server.public_samples=20", "tracker=files_only"),
)
BATCHED = ("engine=batched", "engine.compile=false")


@dataclass(frozen=True)
class Run:
    """The records of all rounds, the last model on the CPU, and the simulation."""

    records: Sequence[Record]
    params: dict[str, Tensor]
    simulation: Simulation


@cache
def composed(*words: str) -> ComposedJob:
    with search_path():
        (job,) = compose_jobs([*COMMON, *words], multirun=False)
    return job


def simulation(words: Sequence[str], device: str) -> Simulation:
    """That of the config which `words` give, on `device`, not begun."""
    job = composed(*words)
    config: dict[str, Any] = fitted({**copy.deepcopy(dict(job.config)), "device": device})
    return build(make_plan(config, job.choices)).simulation


@contextmanager
def order_of_torch() -> Iterator[None]:
    """Sums and products on a CPU are torch's own, as they are on a GPU, not those in a fixed
    order."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (exact, factors, inner_products):
            patch.setattr(module, "has_order", lambda values: False)
        yield


def run(words: Sequence[str], device: str) -> Run:
    with order_of_torch():
        made = simulation(words, device)
        records = list(made)
    return Run(
        records, {name: held(value).clone().cpu() for name, value in made.params.items()}, made
    )


def run_on_card(words: Sequence[str], card: PretendedCard | None = None) -> Run:
    with nullcontext() if ON_GPU else card or PretendedCard():
        return run(words, "cuda")


_ALL = (
    "num_rounds=1000000",
    "server.validation_fraction=0",
    "server.public_samples=0",
    "selector=random",
)
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


def made_up(
    words: Sequence[str], num_train: int = 2000, num_test: int = 1500, device: str = "cuda"
) -> Simulation:
    """A simulation of the workload, by default on the pretended card that is entered."""
    shape = SHAPES[
        next(word.removeprefix("dataset=") for word in words if word.startswith("dataset="))
    ]

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
