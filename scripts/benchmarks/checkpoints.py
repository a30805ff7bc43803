"""Measure the cost of checkpoints: their share of a run's time at the default interval.

    uv run python scripts/benchmark.py checkpoints

The command `fedsim` runs a workload in processes of its own, in turns with `checkpoint.every=null`
and with the default. Each save is timed in wall time (what a run waits for, writing to the disk
included) and in CPU time. The difference of the two whole runs is also shown. It is smaller than
the noise between runs.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from scripts.benchmarks.peers.run_fedsim import overrides_of
from scripts.benchmarks.peers.workloads import WORKLOADS
from scripts.benchmarks.processes import in_turns, measure_in_process, print_result, table

ROUNDS = {"W1": 500, "W2": 30}
LIMIT = 0.02
"""Maximum share of a run's wall time that its checkpoints may take."""
Results = Sequence[Mapping[str, float]]


def measure(name: str, rounds: int, every: str) -> dict[str, float]:
    """Run a workload in a process of its own. Return seconds and the number of saves."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            *overrides_of(WORKLOADS[name], num_rounds=rounds),
            "tracker=files_only",
            f"checkpoint.every={every}",
            f"output_dir={folder}",
        ]
        return measure_in_process("checkpoints", "process", folder, *words)


def run_and_report(folder: str, words: Sequence[str]) -> None:
    """Run the command in this process, and print what its saves took."""
    from fedsim.jobs.cli import run
    from fedsim.results.reading import read_metrics
    from fedsim.running.checkpoint import Checkpoint, Checkpoints
    from fedsim.running.process import tune

    tune()
    result = {"saves": 0.0, "save_seconds": 0.0, "save_cpu_seconds": 0.0}
    save = Checkpoints.save

    def timed(self: Checkpoints, origin: Checkpoint) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        save(self, origin)
        result["save_seconds"] += time.perf_counter() - wall
        result["save_cpu_seconds"] += time.process_time() - cpu
        result["saves"] += 1

    Checkpoints.save = timed  # type: ignore[method-assign]
    cpu = time.process_time()
    exit_code = run(words)
    result["cpu_seconds"] = time.process_time() - cpu
    [summary] = Path(folder).glob("*/*/summary.json")
    result["round_seconds"] = read_metrics(summary.parent)[-1]["wall_seconds"]
    print_result(result)
    sys.exit(exit_code)


def wall_share(results: Results) -> float:
    """Return the largest share of a run's wall time that its saves took."""
    return max(r["save_seconds"] / (r["save_seconds"] + r["round_seconds"]) for r in results)


def row_of(name: str, with_saves: Results, without: Results) -> list[str]:
    """Return the cells of a workload."""
    cpu_with, cpu_without = (
        statistics.median(result["cpu_seconds"] for result in results)
        for results in (with_saves, without)
    )
    saves = statistics.median(result["saves"] for result in with_saves)
    seconds = max(r["save_seconds"] / max(r["saves"], 1) for r in with_saves)
    cpu_share = max(r["save_cpu_seconds"] / r["cpu_seconds"] for r in with_saves)
    return [
        name,
        f"{saves:g}",
        f"{1000 * seconds:.1f}",
        f"{wall_share(with_saves):.2%}",
        f"{cpu_share:.2%}",
        f"{cpu_with / cpu_without - 1:+.1%}",
    ]


def main() -> None:
    if sys.argv[1:2] == ["process"]:
        run_and_report(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=["W1", "W2"])
    parser.add_argument("--rounds", type=int, help="of each run (500 of W1, 30 of W2)")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    rows = []
    shares = []
    for name in options.workload:
        results: dict[str, list[dict[str, float]]] = {"null": [], "auto": []}
        for every in in_turns(list(results), options.repeats):
            result = measure(name, options.rounds or ROUNDS[name], every)
            results[every].append(result)
            print(f"{name} checkpoint.every={every}: {result}", flush=True)
        rows.append(row_of(name, results["auto"], results["null"]))
        shares.append(wall_share(results["auto"]))
    columns = ["workload", "saves", "ms each", "of wall time", "of CPU time", "CPU of whole runs"]
    note = f"limit: {LIMIT:.0%} of the wall time"
    Console().print(table("checkpoints at the default interval", columns, rows, note))
    sys.exit(0 if max(shares) < LIMIT else 1)


if __name__ == "__main__":
    main()
