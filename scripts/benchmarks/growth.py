"""Measure how the time and memory of a round grow with cohort size, clients, width and steps.

    uv run python scripts/benchmark.py growth                        # all four: some minutes
    uv run python scripts/benchmark.py growth cohort_size --json outputs/growth.json
    uv run python scripts/benchmark.py growth --plot docs/figures/growth.png

Each case runs in a process of its own: random selection, an MLP 784-64-30-10 on random images, 64
samples a client, batches of 64, 30 local steps, K = 10 of N = 100 clients, compiled, without
evaluation. One of these values varies. "us per unit" is the time of a round divided by that value.
It is constant if the cost is linear, and falls if a fixed cost is shared.
"""

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from scripts.benchmarks.processes import measure_in_process, print_result, table, write_json

VALUES = {
    "cohort_size": [1, 2, 5, 10, 20, 50, 100],
    "num_clients": [100, 1_000, 10_000, 100_000],
    "width": [16, 64, 256, 1024],
    "steps": [1, 10, 30, 100],
}
USUAL = {"cohort_size": 10, "num_clients": 100, "width": 64, "steps": 30}
SAMPLES = 64
BATCH_SIZE = 64
PIXELS = 784
NUM_CLASSES = 10
DISTINCT = 20_000
"""Number of samples. More clients share them, so that memory is the simulation's and not the
data's."""
NEVER = 10**9
"""A number of rounds that no case reaches."""
Result = dict[str, Any]


def measure(case: dict[str, int], seconds: float) -> Result:
    """Return the median seconds of a round, and the process's peak memory."""
    from fedsim.running.process import tune

    tune()
    simulation = build(case)
    start = time.perf_counter()
    simulation.step()
    times: list[float] = []
    while time.perf_counter() - start < seconds or len(times) < 3:
        begin = time.perf_counter()
        simulation.step()
        times.append(time.perf_counter() - begin)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return case | {"seconds": float(np.median(times)), "rounds": len(times), "peak_gib": peak}


def build(case: dict[str, int]) -> Any:
    """Return the simulation of a case."""
    import torch

    from fedsim.clients.context import LabelledSamples
    from fedsim.clients.server import ServerData
    from fedsim.core.rng import Streams
    from fedsim.core.types import Population
    from fedsim.engine.backend import Workload
    from fedsim.engine.choose import choose_backend
    from fedsim.engine.data import ClientData
    from fedsim.engine.engine import Engine
    from fedsim.engine.model import initial
    from fedsim.engine.optimizers import SGD, Constant
    from fedsim.engine.schedule import LocalWork
    from fedsim.models.mlp import MLP
    from fedsim.rounds.aggregators import FedAvg
    from fedsim.rounds.availability import Always
    from fedsim.rounds.loop import Components, Simulation
    from fedsim.selectors.random import Random

    num_clients = case["num_clients"]
    x, y = torch.randn(DISTINCT, PIXELS), torch.randint(NUM_CLASSES, (DISTINCT,))
    starts = np.arange(num_clients) * SAMPLES % (DISTINCT - SAMPLES)
    positions = [np.arange(start, start + SAMPLES) for start in starts]
    data = ClientData(x, y, positions, positions, NUM_CLASSES)
    sgd = SGD(lr=0.005, momentum=0.0, nesterov=False, weight_decay=1e-4, schedule=Constant())
    model = MLP((PIXELS,), NUM_CLASSES, hidden=[case["width"], 30], dropout=0.0)
    workload = Workload(model, data, sgd)
    streams = Streams(0)
    backend = choose_backend(workload, precision="float32", compile=True)
    population = Population(np.full(num_clients, SAMPLES), case["cohort_size"], NEVER)
    components = Components(
        engine=Engine(backend, workload, LocalWork(None, case["steps"], BATCH_SIZE), streams),
        population=population,
        selector=Random(population, mode="uniform"),
        aggregator=FedAvg(frozenset(), weighting="uniform"),
        availability=Always(),
        server_data=ServerData(LabelledSamples(x[:1], y[:1])),
        streams=streams,
        learning_rate=lambda round: sgd.lr,
        eval_every=NEVER,
    )
    return Simulation(components, initial(model))


def measure_apart(case: dict[str, int], seconds: float) -> Result:
    """Measure a case in a process of its own."""
    return measure_in_process("growth", "--here", json.dumps(case), "--seconds", str(seconds))


def rows_of(name: str, results: list[Result]) -> list[list[str]]:
    """Return the cells of each result: the value, ms a round, us per unit of the value, GiB."""
    rows = []
    for result in results:
        value, seconds = result[name], result["seconds"]
        times = [f"{1e3 * seconds:.2f}", f"{1e6 * seconds / value:.1f}"]
        rows.append([f"{value:,}", *times, f"{result['peak_gib']:.2f}"])
    return rows


def plot(results: dict[str, list[Result]], path: Path) -> None:
    """Draw time and peak memory against each value, on logarithmic scales."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    size = (3.2 * len(results), 5)
    figure, axes = plt.subplots(2, len(results), figsize=size, squeeze=False, layout="constrained")
    for (name, cases), (time_axis, memory_axis) in zip(results.items(), axes.T, strict=True):
        values = np.array([case[name] for case in cases])
        milliseconds = np.array([1e3 * case["seconds"] for case in cases])
        time_axis.loglog(values, milliseconds, "o-")
        time_axis.loglog(values, milliseconds[-1] * values / values[-1], ":", color="grey")
        memory_axis.semilogx(values, [case["peak_gib"] for case in cases], "o-")
        memory_axis.set(xlabel=name, ylim=(0, None))
    axes[0, 0].set_ylabel("ms a round")
    axes[1, 0].set_ylabel("peak memory, GiB")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(VALUES), help=", ".join(VALUES))
    parser.add_argument("--seconds", type=float, default=3.0, help="of each case")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="a PNG of time and memory")
    parser.add_argument("--here", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print_result(measure(options.here, options.seconds))
        sys.exit()
    results: dict[str, list[Result]] = {}
    for name in options.names:
        cases = [{**USUAL, name: value} for value in VALUES[name]]
        results[name] = [measure_apart(case, options.seconds) for case in cases]
        columns = [name, "ms a round", "us per unit", "peak GiB"]
        Console().print(table(f"growth with {name}", columns, rows_of(name, results[name])))
    if options.json:
        write_json(options.json, results)
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
