"""Runs over nodes of Flower in this process, and the same runs in the simulator."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import RecordDict

from fedsim.core.record import Record
from fedsim.core.types import Params
from fedsim.flower import ANSWERS, Example, Selecting, client_app
from fedsim.flower.messages import unpacked
from fedsim.results.reading import read_metrics
from tests.flower_grid import LocalGrid

NUM_CLIENTS = 6
RUN = (
    f"num_clients={NUM_CLIENTS}",
    "cohort_size=2",
    "num_rounds=6",
    "tracker=files_only",
    "engine=sequential",
    "device=cpu",
    "local.epochs=1",
)


@dataclass
class Run:
    """A run over nodes: its records, its final model and its strategy."""

    records: list[dict[str, Any]]
    model: Params
    strategy: Selecting


def grid_of(example: Example, answers: Iterable[str] = tuple(ANSWERS)) -> LocalGrid:
    """A Grid with a node for each client, which has the samples of the client in the simulator."""

    def load(context: Any) -> Any:
        return example.samples(context.node_config["partition-id"])

    app = client_app(example.model, load, answers=set(answers))
    return LocalGrid(app, range(len(example.experiment.division.sizes)))


def on_nodes(example: Example, grid: LocalGrid, *words: str, **server: Any) -> Run:
    """Run what `words` describe on the nodes of a Grid."""
    samples = server or {"server": example.server()}
    strategy = Selecting(*words, model=example.model(), **samples)
    result = strategy.start(grid, timeout=1)
    model = unpacked(RecordDict({"model": result.arrays}), "model", torch.device("cpu"))
    return Run(read_metrics(strategy.plan.folder), model, strategy)


def simulated(example: Example) -> tuple[list[Record], Params]:
    """Run the example in the simulator."""
    simulation = example.experiment.simulation
    return list(simulation), simulation.params
