"""A model, an engine and rounds that are small enough to compute by hand."""

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import yaml
from torch import Tensor, nn

from fedsim.clients.clients import Clients
from fedsim.clients.context import LabelledSamples, RoundContext, Signal
from fedsim.clients.ledger import Ledger
from fedsim.clients.phase_timer import PhaseTimer
from fedsim.clients.server import ServerData
from fedsim.clients.system import RoundClock, SimulatedClock
from fedsim.core.arrays import Bools, Floats, Ints
from fedsim.core.rng import Streams
from fedsim.core.types import (
    Cohort,
    Correction,
    Evaluation,
    Ids,
    Params,
    Population,
    Selection,
)
from fedsim.engine.backend import Backend, Workload
from fedsim.engine.data import ClientData
from fedsim.engine.engine import Engine
from fedsim.engine.optimizers import SGD, Constant
from fedsim.engine.schedule import LocalWork
from fedsim.rounds.aggregators import FedAvg
from fedsim.rounds.availability import Always, Availability
from fedsim.rounds.loop import Components, Simulation
from fedsim.selectors.base import Selector


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))


class ToyEngine(Engine):
    """An engine whose training, losses and gradients can be computed by hand.

    Client i moves the model's two numbers halfway to (i, -i). Its training loss is i, and its RMS
    loss i + 1. The samples of all clients are numbered one after another, two training passes each;
    the loss of the model on samples is the mean of their numbers m, and its gradient is
    (m + 1, -m^2 / 7). Clients in `broken` have nan for all of these.
    """

    def __init__(self, sizes: Sequence[int], *, seed: int = 0, batch_size: int = 4) -> None:
        num_samples = sum(sizes)
        positions = np.split(np.arange(num_samples), np.cumsum(sizes)[:-1])
        labels = torch.arange(num_samples) % 3
        data = ClientData(torch.zeros(num_samples, 1), labels, positions, positions, 3)
        optimizer = SGD(lr=1.0, schedule=Constant(), momentum=0.0, nesterov=False, weight_decay=0.0)
        work = LocalWork(epochs=2, steps=None, batch_size=batch_size)
        workload = Workload(ToyModel(), data, optimizer)
        super().__init__(cast(Backend, None), workload, work, Streams(seed))
        self.streams = Streams(seed)
        self.broken: set[int] = set()
        self.owner = np.repeat(np.arange(len(sizes)), sizes)

    def train(
        self,
        params: Params,
        ids: Ids,
        round: int,
        lr: float,
        start: Sequence[Params] | None = None,
        correction: Correction | None = None,
    ) -> Cohort:
        targets = torch.as_tensor(np.stack([ids, -ids], 1), dtype=torch.float32)
        models = torch.stack([model["w"] for model in start or [params] * len(ids)])
        delta = (targets - models) / 2 + (models - params["w"])
        loss = ids.astype(np.float64)
        is_broken = np.isin(ids, list(self.broken))
        delta[torch.as_tensor(is_broken)] = torch.nan
        loss[is_broken] = np.nan
        sizes = np.array([len(self.data.train[i]) for i in ids])
        return Cohort(
            ids=ids,
            sizes=sizes,
            start=params,
            delta={"w": delta},
            loss=loss,
            rms_loss=loss + 1,
            steps=np.array([self.work.num_steps(int(size)) for size in sizes]),
            trained=self.trained,
            samples=2 * sizes,
            momentum={"w": delta * 10},
        )

    def losses(self, params: Params, positions: Sequence[Ints]) -> Floats:
        return np.array([self._mean(samples) for samples in positions])

    def accuracies(self, params: Params, positions: Sequence[Ints]) -> Floats:
        return 1 / (1 + self.losses(params, positions))

    def client_gradients(
        self, params: Params, positions: Sequence[Ints], names: Sequence[str] | None = None
    ) -> Iterator[Tensor]:
        for samples in positions:
            mean = self._mean(samples) if len(samples) else 0.0
            yield torch.tensor([mean + 1, -mean * mean / 7])

    def _mean(self, samples: Ints) -> float:
        if not len(samples) or int(self.owner[samples[0]]) in self.broken:
            return np.nan
        return float(samples.mean())

    def predict(self, params: Params, x: Tensor) -> Tensor:
        logits = torch.stack([params["w"][0] * x[:, 0] + 0.3, params["w"][1] + x[:, 0]], 1)
        return torch.log_softmax(logits.double(), 1)

    def evaluate(self, params: Params, x: Tensor, y: Tensor) -> Evaluation:
        return Evaluation(accuracy=float(params["w"][0]), loss=float(params["w"][1]))


class NobodyIn(Availability):
    """All clients are available, except in the given rounds."""

    def __init__(self, rounds: set[int]) -> None:
        self.rounds = rounds

    def available(self, round: int, num_clients: int, rng: np.random.Generator) -> Bools:
        return np.full(num_clients, round not in self.rounds)


def toy_params() -> Params:
    return {"w": torch.zeros(2)}


def toy_population(sizes: Sequence[int], cohort_size: int, num_rounds: int = 10) -> Population:
    return Population(np.asarray(sizes, np.int64), cohort_size, num_rounds)


def shipped(choice: str, population: Population, **changes: Any) -> Any:
    """Return the selector of conf/selector/`choice`.yaml with `changes` of its values.

    Choices that build on another file, and values that are objects, must be among the changes.
    """
    path = Path(__file__).parents[1] / "conf" / "selector" / f"{choice}.yaml"
    values = yaml.safe_load(path.read_text(encoding="utf-8")) | changes
    values.pop("defaults", None)
    module, _, name = values.pop("_target_").rpartition(".")
    return getattr(import_module(module), name)(population, **values)


def toy_components(
    engine: ToyEngine,
    population: Population,
    selector: Selector,
    *,
    availability: Availability | None = None,
    validation: bool = False,
    num_public: int = 0,
    learning_rate: Callable[[int], float] = lambda t: 1.0,
    eval_every: int = 1,
    simulated_clock: SimulatedClock | None = None,
) -> Components:
    """Return the components of a simulation around a toy engine: uniform averages, and one test
    sample."""
    test = LabelledSamples(torch.zeros(1, 1), torch.zeros(1, dtype=torch.long))
    public = torch.zeros(num_public, 1) if num_public else None
    return Components(
        engine=engine,
        population=population,
        selector=selector,
        aggregator=FedAvg(frozenset(), weighting="uniform"),
        availability=availability or Always(),
        server_data=ServerData(test, test if validation else None, public),
        streams=engine.streams,
        learning_rate=learning_rate,
        eval_every=eval_every,
        simulated_clock=simulated_clock,
    )


def toy_run(selector: Selector, engine: ToyEngine | None = None, **more: Any) -> Simulation:
    """Return a simulation of the selector's population; `more` is for `toy_components`."""
    engine = engine or ToyEngine(selector.population.sizes.tolist())
    return Simulation(toy_components(engine, selector.population, selector, **more), toy_params())


def toy_clients(
    sizes: Sequence[int],
    needs: frozenset[Signal],
    *,
    round: int = 1,
    available: Sequence[int] | None = None,
    ledger: Ledger | None = None,
    engine: Engine | None = None,
    cohort_size: int = 2,
    timer: PhaseTimer | None = None,
    params: Params | None = None,
    round_clock: RoundClock | None = None,
) -> Clients:
    """Return the clients of a round; `available` None: all clients with data."""
    ids = np.flatnonzero(np.asarray(sizes) > 0)
    if available is not None:
        ids = np.asarray(available, np.int64)
    context = RoundContext(
        round,
        lr=1.0,
        available=ids,
        needs=needs,
        streams=Streams(0),
        is_first=round == 1,
        ledger=Ledger() if ledger is None else ledger,
        timer=timer or PhaseTimer(torch.device("cpu")),
        public=torch.arange(3.0)[:, None],
        validation=LabelledSamples(torch.zeros(1, 1), torch.zeros(1, dtype=torch.long)),
        round_clock=round_clock,
    )
    return Clients(engine or ToyEngine(sizes), context, toy_params() if params is None else params)


def selection_of(selector: Selector, round: int = 1, seed: int = 0, **more: Any) -> Selection:
    """Return what the selector selects; `more` is for `toy_clients`."""
    clients = toy_clients(selector.population.sizes.tolist(), selector.needs, round=round, **more)
    return selector.select(round, clients, np.random.default_rng(seed))


def picked(selector: Selector, round: int = 1, seed: int = 0, **more: Any) -> list[int]:
    """Return the clients that the selector selects."""
    return selection_of(selector, round, seed, **more).ids.tolist()


def chances(selector: Selector, num: int = 2000, round: int = 1, **more: Any) -> Floats:
    """Return how often the selector selects each client over `num` seeds, as a share [N]."""
    counts = np.zeros(selector.population.num_clients)
    for seed in range(num):
        counts[picked(selector, round, seed, **more)] += 1
    return counts / num


def toy_cohort(
    ids: Sequence[int], sizes: Sequence[int], delta: Sequence[Sequence[float]], **more: Any
) -> Cohort:
    """Return clients with updates `delta`, whose losses are 1 and who made one step."""
    values = {
        "loss": np.ones(len(ids)),
        "rms_loss": np.ones(len(ids)),
        "steps": np.ones(len(ids), np.int64),
        "trained": ["w"],
    }
    stack = {"w": torch.tensor(delta, dtype=torch.float32)}
    values |= more
    return Cohort(np.asarray(ids, np.int64), np.asarray(sizes), toy_params(), stack, **values)
