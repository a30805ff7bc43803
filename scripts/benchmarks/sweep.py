"""What a sweep costs beside its rounds: by number of jobs and launcher, when new and when all of it
has ended.

    uv run python scripts/benchmark.py sweep
    uv run python scripts/benchmark.py sweep --jobs 40 500 5000 --launchers basic joblib lanes

Jobs of two rounds of the default experiment. *a job*: the command's wall time less that of rounds,
by number of jobs, once new and once with nothing left to do. Exit code 1 where one is above its
bound.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fedsim.results.reading import read_metrics
from scripts.benchmarks.start_up import TORCH, seconds

BOUND_NEW, BOUND_ENDED = 0.080, 0.0135
"""Seconds a job beside one start: 300 jobs in 35 s, of which 12 are rounds, and in 4 s when they
have ended."""


def measure(jobs: int, launcher: str) -> tuple[float, float, float]:
    """Seconds of the command, of the rounds in it, and of the same command again."""
    with tempfile.TemporaryDirectory() as name:
        words = [
            "-m",
            "num_rounds=2",
            "tracker=files_only",
            f"seed=range({jobs})",
            f"hydra/launcher={launcher}",
        ]
        command = [sys.executable, "-m", "fedsim", *words]
        new, again = seconds(command, Path(name)), seconds(command, Path(name))
        ended = [
            read_metrics(path.parent)[-1]["wall_seconds"]
            for path in Path(name).glob("outputs/*/*/summary.json")
        ]
    if len(ended) != jobs:
        sys.exit(f"{len(ended)} of {jobs} jobs have ended")
    return new, sum(ended), again


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, nargs="+", default=[40, 300])
    parser.add_argument("--launchers", nargs="+", default=["basic"], help="basic joblib lanes")
    options = parser.parse_args()
    start = statistics.median(seconds([sys.executable, "-c", TORCH], Path()) for _ in range(5))
    table = Table(
        title="a sweep beside its rounds",
        caption=f"a job: less the rounds and T, which took {start:.2f} s",
    )
    for column in (
        "jobs",
        "launcher",
        "seconds",
        "rounds",
        "ms a job",
        "seconds again",
        "ms a job again",
    ):
        table.add_column(column, justify="right")
    sound = True
    for jobs in options.jobs:
        for launcher in options.launchers:
            new, rounds, again = measure(jobs, launcher)
            beside, skipped = (new - rounds - start) / jobs, (again - start) / jobs
            sound &= (
                launcher != "basic"
                or jobs < 300
                or (beside <= BOUND_NEW and skipped <= BOUND_ENDED)
            )
            cells = [
                f"{new:.1f}",
                f"{rounds:.1f}",
                f"{1000 * beside:.1f}",
                f"{again:.1f}",
                f"{1000 * skipped:.1f}",
            ]
            table.add_row(str(jobs), launcher, *cells)
    Console().print(table)
    sys.exit(0 if sound else 1)


if __name__ == "__main__":
    main()
