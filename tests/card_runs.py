"""Short runs of whole experiments, for comparisons of devices: configs, data and results."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from torch import Tensor

from fedsim.config.compose import Composed, compose_jobs, search_path
from fedsim.config.plan import make_plan
from fedsim.core import exact as losses
from fedsim.core import exact as products
from fedsim.core import exact as sums
from fedsim.core.record import Record
from fedsim.rounds.loop import Simulation
from fedsim.running.assembly import build
from fedsim.selectors import similarity as inner_products
from tests.goldens import fitted
from tests.pretended_cuda import PretendedCard, held

COMMON = (
    "num_rounds=3",
    "num_clients=6",
    "cohort_size=3",
    "local.epochs=1",
    "local.batch_size=32",
    "server.validation_fraction=0.05",
    "server.public_samples=20",
    "optimizer.lr=0.05",
    "tracker=files_only",
)
BATCHED = ("engine=batched", "engine.compile=false")


@dataclass(frozen=True)
class Run:
    """The records of all rounds, the last model on the CPU, and the simulation."""

    records: Sequence[Record]
    params: dict[str, Tensor]
    simulation: Simulation


@cache
def composed(*words: str) -> Composed:
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
    """Sums and products on a CPU are torch's own, as they are on a GPU, not those in a fixed order."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (sums, products, losses, inner_products):
            patch.setattr(module, "has_order", lambda values: False)
        yield


def run(words: Sequence[str], device: str) -> Run:
    with order_of_torch():
        made = simulation(words, device)
        records = list(made)
    return Run(records, {name: held(value).clone() for name, value in made.params.items()}, made)


def run_on_card(words: Sequence[str], card: PretendedCard | None = None) -> Run:
    with card or PretendedCard():
        return run(words, "cuda")
