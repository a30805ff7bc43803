"""What a second process gains: rounds of a workload on one core, and divided between two processes
of one core each.

    FEDSIM_DATA=path uv run python scripts/benchmark.py ranks measure W1:10 W2:10 --rounds 20 1
    --repeats 3 uv run python scripts/benchmark.py ranks compute                # bytes of a round,
    and how long they take to 8 GPUs

One and two processes take turns, each run anew. Shown are medians over the repeats, of the wall
time of a round and of the CPU time of each process in it. On a machine with other work the CPU time
says more: it leaves out what others take, and also the waiting for each other and for messages.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.benchmarks.peers.run_fedsim import overrides_of
from scripts.benchmarks.peers.workloads import WORKLOADS, Workload

ROOT = Path(__file__).parents[2]
LINKS = {"NVLink 4": 450e9, "PCIe 5 x16": 63e9, "PCIe 4 x16": 31.5e9, "100 Gb/s Ethernet": 12.5e9}
"""Bytes a second in one direction, as their makers give them."""


def words_of(workload: Workload, cohort: int, rounds: int, folder: Path) -> list[str]:
    """The command line of a run with cohorts of another size, in C, with the test set passed in
    every round."""
    changed = ("num_rounds=", "cohort_size=", "eval_every=")
    words = [word for word in overrides_of(workload) if not word.startswith(changed)]
    own = [f"num_rounds={rounds}", f"cohort_size={cohort}", "eval_every=1", f"output_dir={folder}"]
    return [
        *words,
        *own,
        "engine=native",
        "tracker=files_only",
        "checkpoint.every=null",
        "overwrite=true",
    ]


def run_process(core: int, place: Path, words: Sequence[str]) -> None:
    """One process of a run, on one core: it notes the wall and CPU time that it works for the
    rounds."""
    os.sched_setaffinity(0, {core})
    from fedsim.commands.dispatch import main
    from fedsim.rounds.loop import Simulation
    from fedsim.running.process import world
    from fedsim.running.ranks import Worker

    found = {"wall": 0.0, "cpu": 0.0, "rounds": 0}

    def timed(owner: type, name: str, in_rounds: Any) -> None:
        plain = getattr(owner, name)

        def call(self: Any, *args: Any) -> Any:
            wall, cpu = time.perf_counter(), time.process_time()
            result = plain(self, *args)
            if in_rounds(*args):
                found["wall"] += time.perf_counter() - wall
                found["cpu"] += time.process_time() - cpu
                found["rounds"] += 1
            return result

        setattr(owner, name, call)

    timed(Simulation, "step", lambda: True)
    timed(Worker, "answered", lambda request: request.kind in ("train", "forward", "gradients"))
    sys.argv = ["fedsim", *words]
    try:
        main()
    finally:
        (place / f"{world().rank}.json").write_text(json.dumps(found))


def measure(workload: Workload, cohort: int, rounds: int, count: int) -> list[dict[str, float]]:
    """Seconds a round of each process of one run: `wall` (of the first alone) and `cpu`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as place:
        words = words_of(workload, cohort, rounds, Path(place) / "outputs")
        processes = []
        for rank in range(count):
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            if count > 1:
                own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": port}
                environment |= {name: str(value) for name, value in own.items()} | {
                    "MASTER_ADDR": "127.0.0.1"
                }
            command = [
                sys.executable,
                "-m",
                "scripts.benchmarks.ranks",
                "process",
                str(rank),
                place,
                *words,
            ]
            pipe = subprocess.PIPE
            processes.append(
                subprocess.Popen(
                    command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True
                )
            )
        for process in processes:
            _, told = process.communicate()
            if process.returncode:
                sys.exit(f"{workload.name}: {told.strip()}")
        found = [json.loads((Path(place) / f"{rank}.json").read_text()) for rank in range(count)]
    return [{"wall": one["wall"] / rounds, "cpu": one["cpu"] / rounds} for one in found]


def race(cases: Sequence[str], rounds: Sequence[int], repeats: int, console: Console) -> Table:
    """One and two processes in turns, every other repeat the other way."""
    table = Table(title="seconds a round")
    for name in (
        "workload",
        "K",
        "rounds",
        "one: wall",
        "CPU",
        "two: wall",
        "CPU, rank 0",
        "rank 1",
        "gain",
        "by CPU",
    ):
        table.add_column(name, justify="right")
    for case, number in zip(cases, rounds, strict=True):
        name, _, cohort = case.partition(":")
        found: dict[int, list[list[dict[str, float]]]] = {1: [], 2: []}
        for repeat in range(repeats):
            for count in (1, 2) if repeat % 2 == 0 else (2, 1):
                found[count].append(measure(WORKLOADS[name], int(cohort), number, count))
                console.print(f"{case}, {count}: {found[count][-1]}", highlight=False)

        def median(count: int, rank: int, key: str, found: dict[int, Any] = found) -> float:
            return statistics.median(run[rank][key] for run in found[count])

        gains = [
            one[0]["wall"] / two[0]["wall"] for one, two in zip(found[1], found[2], strict=True)
        ]
        by_cpu = [
            o[0]["cpu"] / max(t[0]["cpu"], t[1]["cpu"])
            for o, t in zip(found[1], found[2], strict=True)
        ]
        times = [(1, 0, "wall"), (1, 0, "cpu"), (2, 0, "wall"), (2, 0, "cpu"), (2, 1, "cpu")]
        shown = [f"{median(*time):.3g}" for time in times]
        table.add_row(
            name,
            cohort,
            str(number),
            *shown,
            f"{statistics.median(gains):.2f}",
            f"{statistics.median(by_cpu):.2f}",
        )
    return table


def bytes_of(parameters: int, cohort: int, samples: int, tests: int, ranks: int) -> tuple[int, int]:
    """Bytes that rank 0 sends and receives in a round with an evaluation: the model twice to each
    other rank and its part of the schedule (8 bytes a sample); updates and losses of their clients,
    and 10 logits of each test sample."""
    share = (ranks - 1) / ranks
    down = 2 * (ranks - 1) * parameters * 4 + share * cohort * samples * 8
    return round(down), round(share * (cohort * (parameters + samples) * 4 + tests * 10 * 4))


def computed(ranks: int) -> Table:
    """How long a round's bytes take over the link of rank 0; nothing of it is measured."""
    table = Table(title=f"a round's messages to and from {ranks - 1} other GPUs, computed")
    for name in (
        "model",
        "parameters",
        "K",
        "MB down",
        "MB up",
        *(f"{link}, ms" for link in LINKS),
    ):
        table.add_column(name, justify="right")
    for name, parameters, samples in (
        ("W1", 52_500, 1920),
        ("W2", 122_570, 2000),
        ("25 M", 25_000_000, 2000),
    ):
        for cohort in (10, 100, 1000):
            down, up = bytes_of(parameters, cohort, samples, 10_000, ranks)
            times = [f"{(down + up) / speed * 1e3:.3g}" for speed in LINKS.values()]
            table.add_row(
                name, f"{parameters:,}", str(cohort), f"{down / 1e6:.3g}", f"{up / 1e6:.3g}", *times
            )
    return table


def main() -> None:
    if sys.argv[1:2] == ["process"]:
        run_process(int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure", help="on this machine")
    measuring.add_argument("cases", nargs="+", metavar="workload:cohort_size", help="such as W1:10")
    measuring.add_argument("--rounds", nargs="+", type=int, required=True, help="of each case")
    measuring.add_argument("--repeats", type=int, default=3)
    computing = commands.add_parser("compute", help="bytes and link speeds")
    computing.add_argument("--ranks", type=int, default=8)
    options = parser.parse_args()
    console = Console(width=140)
    if options.command == "compute":
        console.print(computed(options.ranks))
    else:
        console.print(race(options.cases, options.rounds, options.repeats, console))


if __name__ == "__main__":
    main()
