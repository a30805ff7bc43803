"""Measure how the time and memory of selection grow with the number of clients.

    uv run python scripts/benchmark.py selection            # all selectors, N = 100, 1000, 10000
    uv run python scripts/benchmark.py selection pncs divfl --clients 100 1000
    uv run python scripts/benchmark.py selection "pncs selector/sketch=coord"

Clients are synthetic: their updates, of the CNN's 122,570 parameters, are random numbers. The time
to draw them does not count. The time of `select` and `observe` does, with K = 10. Each case runs in
a process of its own. Its peak memory includes N updates if the selector asks all clients for one.
"growth" is the exponent of N between the two largest sizes.
"""

import argparse
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from fedsim.clients.context import LabelledSamples
from fedsim.clients.server import ServerData
from fedsim.config.build import instantiate
from fedsim.config.compose import compose_jobs, search_path
from fedsim.core.arrays import Floats, Ints
from fedsim.core.rng import Streams
from fedsim.core.types import Cohort, Evaluation, Ids, Params, Population
from fedsim.engine.backend import Backend, Workload
from fedsim.engine.data import ClientData
from fedsim.engine.engine import Engine
from fedsim.engine.model import initial
from fedsim.engine.optimizers import SGD, Constant
from fedsim.engine.schedule import LocalWork
from fedsim.models.cnn import CNN
from fedsim.rounds.aggregators import FedAvg
from fedsim.rounds.availability import Always
from fedsim.rounds.loop import Components, Simulation
from fedsim.selectors.base import Selector
from scripts.benchmarks.processes import (
    ROOT,
    growth_exponent,
    measure_in_process,
    print_result,
    table,
    write_json,
)

COHORT_SIZE = 10
NUM_ROUNDS = 8
NUM_CLASSES = 10
PUBLIC_SAMPLES = 500
SAMPLES = 2
"""Samples of a client."""
IMAGE = (3, 32, 32)
PATIENCE = 60.0
"""Seconds of selection after which two rounds are enough."""
SHORTER = {"warmup": 2, "interval": 2, "cover_rounds": 2, "warmup_rounds": 2}
"""Warm-ups are cut, so that every kind of round is among the eight."""
P = ParamSpec("P")
T = TypeVar("T")
Result = dict[str, Any]


class SyntheticEngine(Engine):
    """An engine that draws updates, gradients, losses and predictions at random.

    `seconds` is the time that this takes.
    """

    def __init__(self, num_clients: int) -> None:
        num_samples = SAMPLES * num_clients
        positions = np.split(np.arange(num_samples), num_clients)
        labels = torch.arange(num_samples) % NUM_CLASSES
        images = torch.zeros(1, *IMAGE).expand(num_samples, *IMAGE)
        data = ClientData(images, labels, positions, positions, NUM_CLASSES)
        sgd = SGD(lr=0.1, momentum=0.0, nesterov=False, weight_decay=0.0, schedule=Constant())
        self.model = CNN(IMAGE, NUM_CLASSES)
        workload = Workload(self.model, data, sgd)
        super().__init__(cast(Backend, None), workload, LocalWork(1, None, 1), Streams(0))
        self.shapes = {name: p.shape for name, p in initial(self.model).items()}
        self.lengths = [shape.numel() for shape in self.shapes.values()]
        self.generator = torch.Generator().manual_seed(0)
        self.pool = torch.randn(2 * sum(self.lengths), generator=self.generator)
        self.seconds = 0.0

    def _timed(self, draw: Callable[[], T]) -> T:
        start = time.perf_counter()
        values = draw()
        self.seconds += time.perf_counter() - start
        return values

    def _vector(self) -> Tensor:
        """Return a scaled random window of the pool, which is cheap and differs every time."""
        length = sum(self.lengths)
        start = int(torch.randint(length, (1,), generator=self.generator))
        return self.pool[start : start + length] * (1 + start / length)

    def train(
        self,
        params: Params,
        ids: Ids,
        round: int,
        lr: float,
        start: Any = None,
        correction: Any = None,
    ) -> Cohort:
        def draw() -> Cohort:
            delta = {name: torch.empty(len(ids), *shape) for name, shape in self.shapes.items()}
            for row in range(len(ids)):
                parts = self._vector().split(self.lengths)
                for (name, shape), part in zip(self.shapes.items(), parts, strict=True):
                    delta[name][row] = part.view(shape)
            ones = np.ones(len(ids), np.int64)
            losses = np.random.default_rng(round).random(len(ids))
            return Cohort(
                ids,
                ones,
                params,
                delta,
                trained=self.trained,
                loss=losses,
                rms_loss=1 + losses,
                steps=ones,
                samples=ones,
            )

        return self._timed(draw)

    def losses(self, params: Params, positions: Sequence[Ints]) -> Floats:
        return np.random.default_rng(len(positions)).random(len(positions))

    def client_gradients(
        self, params: Params, positions: Sequence[Ints], names: Sequence[str] | None = None
    ) -> Iterator[Tensor]:
        for _ in positions:
            yield self._timed(self._vector)

    def predict(self, params: Params, x: Tensor) -> Tensor:
        def draw() -> Tensor:
            logits = torch.randn(len(x), NUM_CLASSES, generator=self.generator)
            return logits.double().log_softmax(1)

        return self._timed(draw)

    def evaluate(self, params: Params, x: Tensor, y: Tensor) -> Evaluation:
        value = float(torch.rand(1, generator=self.generator))
        return Evaluation(value, -value)


def measure(choice: str, num_clients: int) -> Result:
    """Run a few rounds of one case in this process. Return seconds of selection by round."""
    with search_path():
        [job] = compose_jobs(f"selector={choice}".split(), multirun=False)
    node = dict(job.config["selector"])
    for name in SHORTER.keys() & node.keys():
        node[name] = SHORTER[name]
    population = Population(np.full(num_clients, SAMPLES), COHORT_SIZE, NUM_ROUNDS)
    selector = instantiate(node, Selector, "selector", population)
    engine = SyntheticEngine(num_clients)
    rounds: list[float] = []  # seconds of selection

    def timed(method: Callable[P, T]) -> Callable[P, T]:
        def call(*args: P.args, **named: P.kwargs) -> T:
            start, drawing = time.perf_counter(), engine.seconds
            result = method(*args, **named)
            rounds[-1] += time.perf_counter() - start - (engine.seconds - drawing)
            return result

        return call

    selector.select = timed(selector.select)  # type: ignore[method-assign]
    selector.observe = timed(selector.observe)  # type: ignore[method-assign]
    samples = LabelledSamples(torch.zeros(1, 1), torch.zeros(1, dtype=torch.long))
    components = Components(
        engine=engine,
        population=population,
        selector=selector,
        aggregator=FedAvg(frozenset(), weighting="uniform"),
        availability=Always(),
        server_data=ServerData(samples, samples, torch.zeros(PUBLIC_SAMPLES, 1)),
        streams=Streams(0),
        learning_rate=lambda round: 0.1,
        eval_every=99,
    )
    simulation = Simulation(components, initial(engine.model))
    while len(rounds) < NUM_ROUNDS and (len(rounds) < 2 or sum(rounds) < PATIENCE):
        rounds.append(0.0)
        simulation.step()
    return {
        "selector": choice,
        "clients": num_clients,
        "first_seconds": rounds[0],
        "median_seconds": float(np.median(rounds[1:])),
        "worst_seconds": max(rounds),
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def measure_apart(choice: str, num_clients: int) -> Result:
    """Measure a case in a process of its own."""
    environment = {"GOMP_SPINCOUNT": "1000"}  # as the command `fedsim` sets it
    arguments = [choice, "--clients", str(num_clients), "--here"]
    try:
        return measure_in_process("selection", *arguments, environment=environment)
    except RuntimeError as error:
        return {"selector": choice, "clients": num_clients, "error": str(error)}


def row_of(by_size: Mapping[int, Result], sizes: Sequence[int]) -> list[str]:
    """Return the cells of a selector: seconds at each size, growth, and the largest peak."""
    cells = []
    medians = {}
    for size in sizes:
        result = by_size[size]
        if "error" in result:
            cells.append(f"failed: {result['error']}")
            continue
        medians[size] = result["median_seconds"]
        cells.append(f"{result['first_seconds']:.3g} / {result['median_seconds']:.3g}")
    peak = by_size[sizes[-1]].get("peak_gib")
    return [*cells, growth_exponent(medians, 1e-3), "-" if peak is None else f"{peak:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    choices = sorted(path.stem for path in (ROOT / "conf" / "selector").glob("*.yaml"))
    parser.add_argument("selectors", nargs="*", default=choices)
    parser.add_argument("--clients", nargs="+", type=int, default=[100, 1000, 10_000])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print_result(measure(options.selectors[0], options.clients[0]))
        sys.exit()
    console = Console()
    sizes = sorted(options.clients)
    results: list[Result] = []
    rows = []
    for choice in options.selectors:
        by_size = {}
        for size in sizes:
            by_size[size] = measure_apart(choice, size)
            console.print(by_size[size], highlight=False)
        results += by_size.values()
        rows.append([choice, *row_of(by_size, sizes)])
    columns = ["selector", *(f"N = {size:,}" for size in sizes), "growth", "peak GiB"]
    title = f"seconds of selection (first round / median of the others), K = {COHORT_SIZE}"
    console.print(table(title, columns, rows))
    if options.json:
        write_json(options.json, results)


if __name__ == "__main__":
    main()
