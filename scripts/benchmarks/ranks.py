"""Measure the gain of a second process: one core against two processes on one core each.

    FEDSIM_DATA=path uv run python scripts/benchmark.py ranks W1:10 W2:10 --rounds 20 1

One and two processes run in turns. The table shows medians over the repeats: the wall time of a
round, and the CPU time of each process in it. On a machine with other work the CPU time says more,
because it leaves out what others take. It also leaves out the waiting for messages.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from scripts.benchmarks.peers.run_fedsim import overrides_of
from scripts.benchmarks.peers.workloads import WORKLOADS
from scripts.benchmarks.processes import ROOT, in_turns, table

COLUMNS = ("workload", "K", "rounds", "one: wall", "CPU", "two: wall", "CPU, rank 0", "rank 1")
Seconds = dict[str, float]


def run_rank(core: int, folder: Path, words: Sequence[str]) -> None:
    """Run one process of a run on one core, and write down how long it works for the rounds."""
    os.sched_setaffinity(0, {core})
    from fedsim.commands.dispatch import main
    from fedsim.rounds.loop import Simulation
    from fedsim.running.process import world
    from fedsim.running.ranks import Worker

    seconds = {"wall": 0.0, "cpu": 0.0}

    def time_calls(owner: type, name: str, counts: Callable[..., bool]) -> None:
        method = getattr(owner, name)

        def timed(self: Any, *args: Any) -> Any:
            wall, cpu = time.perf_counter(), time.process_time()
            result = method(self, *args)
            if counts(*args):
                seconds["wall"] += time.perf_counter() - wall
                seconds["cpu"] += time.process_time() - cpu
            return result

        setattr(owner, name, timed)

    time_calls(Simulation, "step", lambda: True)
    training = ("train", "forward", "gradients")
    time_calls(Worker, "answered", lambda request: request.kind in training)
    sys.argv = ["fedsim", *words]
    try:
        main()
    finally:
        (folder / f"{world().rank}.json").write_text(json.dumps(seconds))


def measure(name: str, cohort_size: int, rounds: int, num_ranks: int) -> list[Seconds]:
    """Return the seconds per round of each process of one run: `wall` and `cpu`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    overrides = overrides_of(
        WORKLOADS[name], num_rounds=rounds, cohort_size=cohort_size, eval_every=1
    )
    with tempfile.TemporaryDirectory() as folder:
        words = [
            *overrides,
            f"output_dir={folder}/outputs",
            "engine=native",
            "tracker=files_only",
            "checkpoint.every=null",
            "overwrite=true",
        ]
        processes = []
        for rank in range(num_ranks):
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            if num_ranks > 1:
                environment["MASTER_ADDR"] = "127.0.0.1"
                environment["MASTER_PORT"] = str(port)
                environment["WORLD_SIZE"] = str(num_ranks)
                environment["RANK"] = environment["LOCAL_RANK"] = str(rank)
            module = "scripts.benchmarks.ranks"
            command = [sys.executable, "-m", module, "rank", str(rank), folder, *words]
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            processes.append(process)
        for process in processes:
            _, errors = process.communicate()
            if process.returncode:
                sys.exit(f"{name}: {errors.strip()}")
        of_ranks = []
        for rank in range(num_ranks):
            seconds = json.loads((Path(folder) / f"{rank}.json").read_text())
            of_ranks.append({clock: value / rounds for clock, value in seconds.items()})
    return of_ranks


def row_of(one: Sequence[Sequence[Seconds]], two: Sequence[Sequence[Seconds]]) -> list[str]:
    """Return the cells of a workload from its runs with one and with two processes."""

    def median(runs: Sequence[Sequence[Seconds]], rank: int, clock: str) -> str:
        return f"{statistics.median(run[rank][clock] for run in runs):.3g}"

    pairs = list(zip(one, two, strict=True))
    gains = [alone[0]["wall"] / both[0]["wall"] for alone, both in pairs]
    gains_by_cpu = [alone[0]["cpu"] / max(both[0]["cpu"], both[1]["cpu"]) for alone, both in pairs]
    return [
        median(one, 0, "wall"),
        median(one, 0, "cpu"),
        median(two, 0, "wall"),
        median(two, 0, "cpu"),
        median(two, 1, "cpu"),
        f"{statistics.median(gains):.2f}",
        f"{statistics.median(gains_by_cpu):.2f}",
    ]


def main() -> None:
    if sys.argv[1:2] == ["rank"]:
        run_rank(int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="+", metavar="workload:cohort_size", help="such as W1:10")
    parser.add_argument("--rounds", nargs="+", type=int, required=True, help="of each case")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    console = Console(width=140)
    rows = []
    for case, rounds in zip(options.cases, options.rounds, strict=True):
        name, _, cohort_size = case.partition(":")
        runs: dict[int, list[list[Seconds]]] = {1: [], 2: []}
        for num_ranks in in_turns([1, 2], options.repeats):
            runs[num_ranks].append(measure(name, int(cohort_size), rounds, num_ranks))
            console.print(f"{case}, {num_ranks}: {runs[num_ranks][-1]}", highlight=False)
        rows.append([name, cohort_size, str(rounds), *row_of(runs[1], runs[2])])
    console.print(table("seconds a round", [*COLUMNS, "gain", "by CPU"], rows))


if __name__ == "__main__":
    main()
