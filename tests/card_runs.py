"""Short runs of whole experiments on two devices, and counts of the host's work on a GPU.

The counts are of the workloads of docs/performance.md, on generated samples: they do not depend on
the samples.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from unittest import mock

import pytest
import torch
from torch import Tensor

from fedsim.clients.context import LabelledSamples
from fedsim.config.compose import compose_jobs, make_plan, search_path
from fedsim.config.job import ComposedJob
from fedsim.core import exact, factors
from fedsim.core.record import Record
from fedsim.rounds.loop import Simulation
from fedsim.running import assembly
from fedsim.running.assembly import PreparedData, build
from fedsim.selectors import similarity
from tests.environment import ON_GPU
from tests.goldens import fitted
from tests.pretended_cuda import Counts, PretendedCard, held

COMMON = (
    "num_rounds=3", "num_clients=6", "cohort_size=3", "local.epochs=1", "local.batch_size=96", "optimizer.lr=0.05",
    "server.validation_fraction=0.05", "server.public_samples=20", "tracker=files_only",
)  # fmt: skip
BATCHED = ("engine=batched", "engine.compile=false")
SMALL = ("model.hidden=[16,8]",)


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
    """Build the simulation that `words` describe, on `device`."""
    job = composed(*words)
    config = fitted({**copy.deepcopy(dict(job.config)), "device": device})
    return build(make_plan(config, job.choices)).simulation


@contextmanager
def order_of_torch() -> Iterator[None]:
    """Add in torch's order on a CPU, as on a GPU, and not in fedsim's fixed order."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (exact, factors, similarity):
            patch.setattr(module, "has_fixed_order", lambda values: False)
        yield


def run(words: Sequence[str], device: str) -> Run:
    with order_of_torch():
        built = simulation(words, device)
        records = list(built)
    params = {name: held(value).clone().cpu() for name, value in built.params.items()}
    return Run(records, params, built)


def run_on_card(words: Sequence[str], card: PretendedCard | None = None) -> Run:
    with nullcontext() if ON_GPU else card or PretendedCard():
        return run(words, "cuda")


ALL = ("num_rounds=1000000", "server.validation_fraction=0", "server.public_samples=0", "selector=random")  # fmt: skip
W1 = (
    *ALL, "dataset=fashion_mnist", "model=mlp", "partition=shards_2", "optimizer.lr=0.005",
    "optimizer.weight_decay=1e-4", "num_clients=100", "cohort_size=10", "local.steps=30", "local.batch_size=64",
)  # fmt: skip
W2 = (
    *ALL, "dataset=cifar10", "model=cnn", "partition=shards_2", "optimizer.lr=0.01",
    "optimizer.weight_decay=3e-4", "num_clients=100", "cohort_size=5", "local.steps=40", "local.batch_size=50",
    "eval_every=5",
)  # fmt: skip
RESNET20 = (
    *ALL, "dataset=cifar10", "model=resnet20", "partition=dirichlet_class", "partition.alpha=0.5", "optimizer=adam",
    "optimizer.lr=0.001", "num_clients=10", "cohort_size=10", "local.epochs=1", "local.batch_size=64",
)  # fmt: skip


def on_generated_samples(
    words: Sequence[str], num_train: int = 2000, num_test: int = 1500
) -> Simulation:
    """Build a simulation of a workload on the pretended card, without its data set."""
    shape = (1, 28, 28) if "dataset=fashion_mnist" in words else (3, 32, 32)

    def load(plan: object, model_class: object, device: torch.device) -> PreparedData:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(num_train + num_test, *shape, generator=generator).to(device)
        y = (torch.arange(len(x)) % 10).to(device)
        test = LabelledSamples(x[num_train:], y[num_train:])
        return PreparedData(x[:num_train], y[:num_train], test, 10, shape, None, {})

    assembly._latest.clear()
    with mock.patch.object(assembly, "_load", load):
        built = simulation(words, "cuda")
    assembly._latest.clear()
    return built


def counts_of_round_2(words: Sequence[str], num_train: int) -> Counts:
    """Return what the host does in the second round, in which nothing is recorded any more."""
    with PretendedCard() as card:
        rounds = iter(on_generated_samples(words, num_train))
        next(rounds)
        card.counts.reset()
        next(rounds)
    return card.counts
