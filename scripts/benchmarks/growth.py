"""How the time and memory of a round grow with clients per round, clients, width of the model and
local steps.

    uv run python scripts/benchmark.py growth                        # all four, some minutes uv run
    python scripts/benchmark.py growth cohort_size --json outputs/growth.json --plot
    docs/figures/growth.png

Each case is a process of its own: random selection, an MLP 784-64-30-10 on random images, 64
samples a client, batches of 64, 30 local steps, K = 10, N = 100, no evaluation, compiled, unless it
is the value that varies. "per unit" is the time of a round over that value; where it stays, the
cost is linear, where it falls, a fixed cost is shared.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

VALUES = {
    "cohort_size": [1, 2, 5, 10, 20, 50, 100],
    "num_clients": [100, 1_000, 10_000, 100_000],
    "width": [16, 64, 256, 1024],
    "steps": [1, 10, 30, 100],
}
USUAL = {"cohort_size": 10, "num_clients": 100, "width": 64, "steps": 30}
SAMPLES, BATCH, PIXELS, CLASSES = 64, 64, 784, 10
DISTINCT = 20_000
"""Samples there are; clients beyond share them, so that memory shows the simulation and not the
data."""


def measure(case: dict[str, int], seconds: float) -> dict[str, Any]:
    """Median seconds of a round, and the process's peak memory."""
    from fedsim.running.process import tune

    tune()
    import numpy as np

    simulation, start = build(case), time.perf_counter()
    simulation.step()
    times: list[float] = []
    while time.perf_counter() - start < seconds or len(times) < 3:
        begin = time.perf_counter()
        simulation.step()
        times.append(time.perf_counter() - begin)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {**case, "seconds": float(np.median(times)), "rounds": len(times), "peak_gib": peak}


def build(case: dict[str, int]) -> Any:
    """The simulation of one case."""
    import numpy as np
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

    x, y = torch.randn(DISTINCT, PIXELS), torch.randint(CLASSES, (DISTINCT,))
    starts = np.arange(case["num_clients"]) * SAMPLES % (DISTINCT - SAMPLES)
    positions = [np.arange(s, s + SAMPLES) for s in starts]
    data = ClientData(x, y, positions, positions, CLASSES)
    sgd = SGD(lr=0.005, momentum=0.0, nesterov=False, weight_decay=1e-4, schedule=Constant())
    model = MLP((PIXELS,), CLASSES, hidden=[case["width"], 30], dropout=0.0)
    work = LocalWork(None, case["steps"], BATCH)
    workload, streams = Workload(model, data, sgd), Streams(0)
    engine = Engine(
        choose_backend(workload, precision="float32", compile=True), workload, work, streams
    )
    population = Population(np.full(case["num_clients"], SAMPLES), case["cohort_size"], 10**9)
    test = LabelledSamples(x[:1], y[:1])
    selector = Random(population, mode="uniform")
    parts = Components(
        engine=engine,
        population=population,
        selector=selector,
        aggregator=FedAvg(frozenset(), weighting="uniform"),
        availability=Always(),
        server_data=ServerData(test),
        streams=streams,
        learning_rate=lambda t: sgd.lr,
        eval_every=10**9,
    )
    return Simulation(parts, initial(model))


def measure_apart(case: dict[str, int], seconds: float) -> dict[str, Any]:
    """`measure` in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "scripts.benchmarks.growth",
        "--here",
        json.dumps(case),
        "--seconds",
        str(seconds),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=dict(os.environ)
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def table_of(name: str, results: list[dict[str, Any]]) -> Table:
    table = Table(title=f"Growth with {name}")
    for column in (name, "ms a round", "us per unit", "peak GiB"):
        table.add_column(column, justify="right")
    for r in results:
        per_unit = 1e6 * r["seconds"] / r[name]
        table.add_row(
            f"{r[name]:,}", f"{1e3 * r['seconds']:.2f}", f"{per_unit:.1f}", f"{r['peak_gib']:.2f}"
        )
    return table


def plot(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Time and peak memory against each value, on logarithmic scales."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        2, len(results), figsize=(3.2 * len(results), 5), squeeze=False, layout="constrained"
    )
    for (name, cases), column in zip(results.items(), axes.T, strict=True):
        values = [case[name] for case in cases]
        milliseconds = [1e3 * case["seconds"] for case in cases]
        column[0].loglog(values, milliseconds, "o-")
        column[0].loglog(
            values, [milliseconds[-1] * v / values[-1] for v in values], ":", color="grey"
        )
        column[1].semilogx(values, [case["peak_gib"] for case in cases], "o-")
        column[1].set(xlabel=name, ylim=(0, None))
    axes[0, 0].set_ylabel("ms a round")
    axes[1, 0].set_ylabel("peak memory, GiB")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(VALUES), help=", ".join(VALUES))
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="time of each case after its first round"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="a PNG of time and memory")
    parser.add_argument("--here", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure(options.here, options.seconds)))
        return
    everything: dict[str, list[dict[str, Any]]] = {}
    for name in options.names:
        everything[name] = [
            measure_apart({**USUAL, name: value}, options.seconds) for value in VALUES[name]
        ]
        Console().print(table_of(name, everything[name]))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(everything, indent=1) + "\n")
    if options.plot:
        plot(everything, options.plot)


if __name__ == "__main__":
    main()
