"""The speed race: rounds per second of fedsim, other frameworks and loops by hand.

    uv run python scripts/benchmark.py install              # installs every peer
    uv run python scripts/benchmark.py install jax pfl      # installs some of them
    uv run python scripts/benchmark.py run --quick          # W1 for a second each: a first look
    uv run python scripts/benchmark.py run --json outputs/benchmark/results.json
    uv run python scripts/benchmark.py run --workload W2 --peers loop jax --repeats 5 --seconds 30
    uv run python scripts/benchmark.py run --fedsim engine=batched engine.precision=bf16
    uv run python scripts/benchmark.py run --workload pfl blazefl ResNet-20
    uv run python scripts/benchmark.py run --device cuda --rows outputs/gpu/race.jsonl

A round has all its parts: selection, local training, aggregation, and the test accuracy as often as
the workload says. Everybody does the same arithmetic on the same arrays. fedsim divides them at
seed 0, and they are written to outputs/benchmark/arrays once. All but Flower and FedLab also train
fedsim's cohorts in the first 1,000 rounds, and all begin with fedsim's model. Each peer draws its
own batches. FEDSIM_DATA names the folder of the data sets: Fashion-MNIST, and CIFAR-10 as
torchvision or parquet files.

Each case runs in a process of its own. All peers take turns in a repeat, and every other repeat
runs in reverse. "rounds/s" is the median of the repeats, without warm-up rounds. "start-up" is the
time from the start of the process to the end of the first round. The ceiling is the best rate of a
large matrix product in the same precision, measured in the same run. Its share is that of the
operations counted in scripts/benchmarks/peers/workloads.py. "accuracy @ round" is after the last
round that all measured peers evaluated.

On a GPU, all products are float32 unless --precision tf32 is given. There the default is one repeat
of 6 s, without a ceiling, on the workloads W1, W2 and pfl. --rows adds a line of JSON for each case
as soon as it ends. A case that would begin after --budget seconds is skipped. Without uv, the peers
whose packages this interpreter can import run in it.

Each --fedsim is a variant with its own options, next to plain fedsim. Measure on an idle machine:
torch's threads wait by spinning, and a peer can be fifty times slower if something else uses its
cores.
"""

import argparse
import math
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console

from scripts.benchmarks.peers.workloads import WORKLOADS
from scripts.benchmarks.processes import table, write_json
from scripts.benchmarks.race.entries import ON_CPU, ON_GPU, PEERS, entries_of, install
from scripts.benchmarks.race.measuring import prepare, race
from scripts.benchmarks.race.tables import COLUMNS, ceiling_of, rows_of

INSTALLABLE = [name for name, peer in PEERS.items() if peer.environment]
DEVICES = ("cpu", "cuda")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmark.py", description=(__doc__ or "").splitlines()[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    installing = commands.add_parser("install", help="make the peers' environments")
    installing.add_argument("peers", nargs="*", help=f"of {', '.join(INSTALLABLE)} (all)")
    installing.add_argument("--device", choices=DEVICES, default="cpu")
    running = commands.add_parser("run", help="measure")
    running.add_argument("--workload", nargs="+", choices=WORKLOADS)
    running.add_argument("--peers", nargs="+", choices=PEERS, help="whom to measure (all)")
    running.add_argument("--fedsim", nargs="+", action="append", default=[], metavar="key=value")
    running.add_argument("--repeats", type=int)
    running.add_argument("--seconds", type=float, help="least measured time of a case")
    running.add_argument("--threads", type=int, help="2; on a GPU all cores of the host")
    running.add_argument("--device", choices=DEVICES, default="cpu")
    running.add_argument("--precision", choices=("float32", "tf32"), default="float32")
    running.add_argument("--timeout", type=float, default=600, help="seconds of a case")
    running.add_argument("--budget", type=float, default=math.inf, help="seconds for new cases")
    running.add_argument("--json", type=Path)
    running.add_argument("--rows", type=Path, help="a file with a line of JSON for each case")
    running.add_argument("--markdown", action="store_true")
    running.add_argument("--quick", action="store_true", help="W1, one repeat, a second each")
    running.add_argument("--tiny", action="store_true", help="two clients: tries, measures nothing")
    options = parser.parse_args(arguments)
    possible = INSTALLABLE
    if options.command == "run":
        on_gpu = options.device == "cuda"
        if options.precision == "tf32" and not on_gpu:
            parser.error("--precision tf32 needs --device cuda")
        possible = ON_GPU if on_gpu else ON_CPU
        options.ceiling = not on_gpu and not options.tiny
        options.deadline = time.monotonic() + options.budget
        workloads = ["W1", "W2", "pfl"] if on_gpu else ["W1", "W2"]
        options.workload = options.workload or (["W1"] if options.quick else workloads)
        options.repeats = options.repeats or (1 if options.quick or on_gpu else 3)
        options.seconds = options.seconds or (1.0 if options.quick else 6.0 if on_gpu else 20.0)
        options.threads = options.threads or (os.cpu_count() or 1 if on_gpu else 2)
    options.peers = options.peers or possible
    for name in options.peers:
        if name not in possible:
            parser.error(f"{name}: choose from {', '.join(possible)}")
    return options


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> None:
    options = parse()
    if options.command == "install":
        sys.exit(0 if install(options.peers, options.device) else 1)
    if options.rows:
        options.rows.parent.mkdir(parents=True, exist_ok=True)
        options.rows.write_text("", encoding="utf-8")
    if hasattr(os, "sched_setaffinity"):  # JAX has no option for the number of cores
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    measured: dict[str, Any] = {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "options": {name: str(value) for name, value in vars(options).items()},
    }
    entries = entries_of(options.peers, options.fedsim)
    console = Console(width=160 if options.markdown or not sys.stdout.isatty() else None)
    workloads = [WORKLOADS[name] for name in options.workload]
    prepare(workloads, processes=max(options.threads // 4, 1))  # each needs 2 GB
    if options.tiny:
        workloads = [workload.tiny() for workload in workloads]
    for workload in workloads:
        results, ceilings = race(entries, workload, options)
        ceiling = ceiling_of(ceilings)
        rates = ", ".join(f"{name} {rate / 1e9:.0f} GFLOP/s" for name, rate in ceiling.items())
        note = f"{workload.round_flops / 1e9:.3g} GFLOP a round; matrix products: {rates or '-'}"
        title = f"{workload.name}: {workload.title}"
        shown = table(title, COLUMNS, rows_of(results, workload, ceiling), note)
        if options.markdown:
            shown.box = box.MARKDOWN
        console.print(shown)
        by_label = {entry.label: repeats for entry, repeats in results.items()}
        measured[workload.name] = {"ceiling": ceiling, "results": by_label}
    if options.json:
        write_json(options.json, measured)


if __name__ == "__main__":
    main()
