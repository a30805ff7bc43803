"""How the time and memory of selection grow with the number of clients.

    uv run python scripts/benchmark.py selection                      # all, N = 100, 1000, 10000 uv
    run python scripts/benchmark.py selection pncs divfl --clients 100 1000 uv run python
    scripts/benchmark.py selection "pncs selector/sketch=coord selector.sketch.size=10000"

Clients are synthetic: their updates, of the cnn's 122,570 parameters, are random numbers and cost
nothing here. What is timed is what the selector itself does in a round, in `select` and `observe`,
with K = 10. Each case runs in a process of its own; its peak memory includes the N updates where a
selector asks for them all. "growth" is the exponent of N between the two largest sizes. Writes a
table and, with --json, a file.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fedsim.clients.context import LabelledSamples
from fedsim.clients.server import ServerData
from fedsim.config.build import instantiate
from fedsim.config.compose import compose_jobs, search_path
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

FOLDER = Path(__file__).parents[2] / "conf" / "selector"
COHORT_SIZE, NUM_ROUNDS, NUM_CLASSES, PUBLIC, SAMPLES = 10, 8, 10, 500, 2
PATIENCE = 60.0
"""Seconds of selection after which a case has shown enough (two rounds at least)."""
SHORTER = {"warmup": 2, "interval": 2, "cover_rounds": 2, "warmup_rounds": 2}
"""Warm-ups cut so that every kind of round is among the eight."""


class SyntheticEngine(Engine):
    """Random updates, gradients, losses and predictions; the time they take is kept apart."""

    def __init__(self, num_clients: int) -> None:
        positions = np.split(np.arange(SAMPLES * num_clients), num_clients)
        labels = torch.arange(SAMPLES * num_clients) % NUM_CLASSES
        images = torch.zeros(1, 3, 32, 32).expand(len(labels), 3, 32, 32)
        data = ClientData(images, labels, positions, positions, NUM_CLASSES)
        sgd = SGD(lr=0.1, momentum=0.0, nesterov=False, weight_decay=0.0, schedule=Constant())
        self.model = CNN((3, 32, 32), NUM_CLASSES)
        workload = Workload(self.model, data, sgd)
        super().__init__(cast(Backend, None), workload, LocalWork(1, None, 1), Streams(0))
        self.shapes = {name: p.shape for name, p in initial(self.model).items()}
        self.length = sum(s.numel() for s in self.shapes.values())
        self.generator = torch.Generator().manual_seed(0)
        self.pool = torch.randn(2 * self.length, generator=self.generator)
        self.seconds = 0.0

    def _timed(self, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = work()
        self.seconds += time.perf_counter() - start
        return result

    def _vector(self) -> Tensor:
        """A random window of the pool, scaled: cheap, and different every time."""
        start = int(torch.randint(self.length, (1,), generator=self.generator))
        return self.pool[start : start + self.length] * (1 + start / self.length)

    def train(
        self,
        params: Params,
        ids: Ids,
        round: int,
        lr: float,
        start: Any = None,
        correction: Any = None,
    ) -> Cohort:
        def work() -> Cohort:
            delta = {name: torch.empty(len(ids), *shape) for name, shape in self.shapes.items()}
            for row in range(len(ids)):
                parts = self._vector().split([s.numel() for s in self.shapes.values()])
                for (name, shape), part in zip(self.shapes.items(), parts, strict=True):
                    delta[name][row] = part.view(shape)
            ones, losses = (
                np.ones(len(ids), np.int64),
                np.random.default_rng(round).random(len(ids)),
            )
            known = {"loss": losses, "rms_loss": 1 + losses, "steps": ones, "samples": ones}
            return Cohort(ids, ones, params, delta, trained=self.trained, **known)

        return self._timed(work)  # type: ignore[no-any-return]

    def losses(self, params: Params, positions: Sequence[NDArray[np.int64]]) -> NDArray[np.float64]:
        return np.random.default_rng(len(positions)).random(len(positions))

    def client_gradients(
        self,
        params: Params,
        positions: Sequence[NDArray[np.int64]],
        names: Sequence[str] | None = None,
    ) -> Iterator[Tensor]:
        for _ in positions:
            yield self._timed(self._vector)

    def predict(self, params: Params, x: Tensor) -> Tensor:
        def logits() -> Tensor:
            drawn = torch.randn(len(x), NUM_CLASSES, generator=self.generator)
            return drawn.double().log_softmax(1)

        return self._timed(logits)  # type: ignore[no-any-return]

    def evaluate(self, params: Params, x: Tensor, y: Tensor) -> Evaluation:
        value = float(torch.rand(1, generator=self.generator))
        return Evaluation(value, -value)


def measure(choice: str, num_clients: int) -> dict[str, Any]:
    """Run a few rounds of one case in this process."""
    with search_path():
        (job,) = compose_jobs(f"selector={choice}".split(), multirun=False)
    node = dict(job.config["selector"])
    node |= {name: value for name, value in SHORTER.items() if name in node}
    population = Population(np.full(num_clients, SAMPLES), COHORT_SIZE, NUM_ROUNDS)
    selector, engine = (
        instantiate(node, Selector, "selector", population),
        SyntheticEngine(num_clients),
    )
    watch = Stopwatch(selector, engine)
    samples = LabelledSamples(torch.zeros(1, 1), torch.zeros(1, dtype=torch.long))
    parts = Components(
        engine=engine,
        population=population,
        selector=selector,
        aggregator=FedAvg(frozenset(), weighting="uniform"),
        availability=Always(),
        server_data=ServerData(samples, samples, torch.zeros(PUBLIC, 1)),
        streams=Streams(0),
        learning_rate=lambda t: 0.1,
        eval_every=99,
    )
    for _ in Simulation(parts, initial(engine.model)):
        watch.close_round()
        if len(watch.rounds) > 1 and sum(watch.rounds) > PATIENCE:
            break
    return {
        "selector": choice,
        "clients": num_clients,
        "first_seconds": watch.rounds[0],
        "median_seconds": float(np.median(watch.rounds[1:])),
        "worst_seconds": max(watch.rounds),
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


class Stopwatch:
    """Seconds of `select` and `observe` by round, without what the engine took."""

    def __init__(self, selector: Selector, engine: SyntheticEngine) -> None:
        self.rounds: list[float] = []
        self.current = 0.0
        self.engine = engine
        for name in ("select", "observe"):
            setattr(selector, name, self._wrapped(getattr(selector, name)))

    def _wrapped(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start, engine = time.perf_counter(), self.engine.seconds
            result = method(*args)
            self.current += time.perf_counter() - start - (self.engine.seconds - engine)
            return result

        return timed

    def close_round(self) -> None:
        self.rounds.append(self.current)
        self.current = 0.0


def measure_apart(choice: str, num_clients: int) -> dict[str, Any]:
    """`measure` in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "scripts.benchmarks.selection",
        choice,
        "--clients",
        str(num_clients),
        "--here",
    ]
    environment = {"GOMP_SPINCOUNT": "1000", **os.environ}  # as `fedsim` sets it
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        return {
            "selector": choice,
            "clients": num_clients,
            "error": done.stderr.strip().splitlines()[-1:],
        }
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def table_of(results: list[dict[str, Any]], sizes: list[int]) -> Table:
    """One line a selector: first / median seconds at each size, growth of the median, peak memory
    at the largest."""
    table = Table(
        title=f"Seconds of selection a round (first / median of the others), K = {COHORT_SIZE}, cnn's updates"
    )
    table.add_column("selector")
    for size in sizes:
        table.add_column(f"N = {size:,}", justify="right")
    table.add_column("growth", justify="right")
    table.add_column("peak GiB", justify="right")
    choices = dict.fromkeys(r["selector"] for r in results)
    by_choice = {
        choice: {r["clients"]: r for r in results if r["selector"] == choice} for choice in choices
    }
    for choice, found in by_choice.items():
        cells = [_seconds(found.get(size)) for size in sizes]
        last = found.get(sizes[-1], {})
        peak = f"{last['peak_gib']:.1f}" if "peak_gib" in last else "-"
        table.add_row(choice, *cells, _growth(found, sizes), peak)
    return table


def _seconds(result: dict[str, Any] | None) -> str:
    if result is None or "error" in result:
        return "-" if result is None else f"failed: {result['error']}"
    return f"{result['first_seconds']:.3g} / {result['median_seconds']:.3g}"


def _growth(found: dict[int, dict[str, Any]], sizes: list[int]) -> str:
    if len(sizes) < 2 or any("median_seconds" not in found.get(s, {}) for s in sizes[-2:]):
        return "-"
    small, large = (found[s]["median_seconds"] for s in sizes[-2:])
    if large < 1e-3:
        return "< 1 ms"
    return f"N^{np.log(large / small) / np.log(sizes[-1] / sizes[-2]):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "selectors", nargs="*", default=sorted(p.stem for p in FOLDER.glob("*.yaml"))
    )
    parser.add_argument("--clients", nargs="+", type=int, default=[100, 1000, 10_000])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure(options.selectors[0], options.clients[0])))
        return
    console, results = Console(), []
    for choice in options.selectors:
        for size in sorted(options.clients):
            results.append(measure_apart(choice, size))
            console.print(results[-1], highlight=False)
    console.print(table_of(results, sorted(options.clients)))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
