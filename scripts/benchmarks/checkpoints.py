"""What checkpoints cost: the share of a run's time at the default interval.

    uv run python scripts/benchmark.py checkpoints

A workload is run by the command `fedsim`, files and all, in processes of its own: with
`checkpoint.every=null` and with the default, in turns. Each save is timed where it is made, in wall
time (what a run waits for, forcing to the disk included) and in CPU time of the process. The
difference of the two whole runs is shown besides; it is smaller than what whole runs differ by from
one to the next.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.benchmarks.peers.run_fedsim import overrides_of
from scripts.benchmarks.peers.stopwatch import RESULT
from scripts.benchmarks.peers.workloads import WORKLOADS, Workload

ROUNDS = {"W1": 500, "W2": 30}
LIMIT = 0.02
"""The part of a run's wall time that its checkpoints may take."""


def words_of(workload: Workload, rounds: int, every: str, folder: Path) -> list[str]:
    """The command line of a run."""
    words = [word for word in overrides_of(workload) if not word.startswith("num_rounds=")]
    return [
        *words,
        f"num_rounds={rounds}",
        "tracker=files_only",
        f"checkpoint.every={every}",
        f"output_dir={folder}",
    ]


def measure(workload: Workload, rounds: int, every: str) -> dict[str, float]:
    """One run in a process of its own: seconds of all rounds, number of saves, and the seconds that
    these took."""
    with tempfile.TemporaryDirectory() as folder:
        words = words_of(workload, rounds, every, Path(folder))
        command = [sys.executable, "-m", "scripts.benchmarks.checkpoints", "process", *words]
        done = subprocess.run(
            command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
        )
    lines = [
        line.removeprefix(RESULT) for line in done.stdout.splitlines() if line.startswith(RESULT)
    ]
    if done.returncode or not lines:
        sys.exit(f"{workload.name}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
    found: dict[str, float] = json.loads(lines[-1])
    return found


def run_and_report(words: Sequence[str]) -> None:
    """Run the command in this process and print what its saves took."""
    from fedsim.jobs.cli import run
    from fedsim.results.reading import read_metrics
    from fedsim.running.checkpoint import Checkpoints
    from fedsim.running.process import tune

    tune()
    save, found = Checkpoints.save, {"saves": 0.0, "save_seconds": 0.0, "save_cpu_seconds": 0.0}

    def timed(self: Checkpoints, make: Any) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        save(self, make)
        found["save_seconds"] += time.perf_counter() - wall
        found["save_cpu_seconds"] += time.process_time() - cpu
        found["saves"] += 1

    Checkpoints.save = timed  # type: ignore[method-assign]
    wall, cpu = time.perf_counter(), time.process_time()
    code = run(words)
    found |= {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
    (folder,) = (path.parent for path in Path(words[-1].partition("=")[2]).glob("*/*/summary.json"))
    found["round_seconds"] = read_metrics(folder)[-1]["wall_seconds"]
    print(RESULT + json.dumps(found), flush=True)
    sys.exit(code)


def compare(
    names: Sequence[str], rounds: int | None, repeats: int
) -> dict[str, dict[str, list[dict[str, float]]]]:
    """All measurements by workload and interval; the two intervals take turns, every other repeat
    the other way."""
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for name in names:
        found[name] = {"null": [], "auto": []}
        for repeat in range(repeats):
            for every in ("null", "auto") if repeat % 2 == 0 else ("auto", "null"):
                result = measure(WORKLOADS[name], rounds or ROUNDS[name], every)
                found[name][every].append(result)
                print(
                    f"{name} {repeat + 1}/{repeats} checkpoint.every={every}: {json.dumps(result)}",
                    flush=True,
                )
    return found


def shares(results: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, float]:
    """Of the runs with the default interval: saves a run, and the part of the rounds' time that
    they took, at most."""
    auto, null = results["auto"], results["null"]
    cpu = [statistics.median(r["cpu_seconds"] for r in runs) for runs in (auto, null)]
    return {
        "saves": statistics.median(r["saves"] for r in auto),
        "milliseconds": 1000 * max(r["save_seconds"] / max(r["saves"], 1) for r in auto),
        "share": max(r["save_seconds"] / (r["save_seconds"] + r["round_seconds"]) for r in auto),
        "cpu_share": max(r["save_cpu_seconds"] / r["cpu_seconds"] for r in auto),
        "difference": cpu[0] / cpu[1] - 1,
    }


def table_of(found: Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]]) -> Table:
    table = Table(
        title="checkpoints at the default interval", caption=f"limit: {LIMIT:.0%} of the wall time"
    )
    for column in (
        "workload",
        "saves",
        "ms each",
        "of wall time",
        "of CPU time",
        "CPU of whole runs",
    ):
        table.add_column(column, justify="left" if column == "workload" else "right")
    for name, results in found.items():
        cost = shares(results)
        cells = [
            f"{cost['saves']:g}",
            f"{cost['milliseconds']:.1f}",
            f"{cost['share']:.2%}",
            f"{cost['cpu_share']:.2%}",
        ]
        table.add_row(name, *cells, f"{cost['difference']:+.1%}")
    return table


def within_limit(found: Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]]) -> bool:
    return all(shares(results)["share"] < LIMIT for results in found.values())


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="W1 W2 (both)"
    )
    parser.add_argument(
        "--rounds", type=int, default=None, help="of each run (500 of W1, 30 of W2)"
    )
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args(argv)


def main() -> None:
    if sys.argv[1:2] == ["process"]:
        run_and_report(sys.argv[2:])
    options = parse()
    costs = compare(options.workload, options.rounds, options.repeats)
    Console().print(table_of(costs))
    sys.exit(0 if within_limit(costs) else 1)


if __name__ == "__main__":
    main()
