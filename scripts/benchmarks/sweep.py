"""Measure the cost of a sweep besides its rounds, for new jobs and for finished ones.

    uv run python scripts/benchmark.py sweep
    uv run python scripts/benchmark.py sweep --jobs 40 500 5000 --launchers basic joblib lanes

Each job is two rounds of the default experiment. The cost of a job is the wall time of the command
minus the rounds and one `import torch`, divided by the number of jobs. The same command runs a
second time, when nothing is left to do. The exit code is 1 if a cost is above its bound.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from fedsim.results.reading import read_metrics
from scripts.benchmarks.processes import seconds_of, table

BOUND_NEW = 0.080
"""Seconds for a new job: 300 jobs in 35 s, of which 12 s are rounds."""
BOUND_FINISHED = 0.0135
"""Seconds for a finished job: 300 jobs in 4 s."""
COLUMNS = (
    "jobs",
    "launcher",
    "seconds",
    "rounds",
    "ms a job",
    "seconds again",
    "ms a job again",
)


def measure(jobs: int, launcher: str) -> tuple[float, float, float]:
    """Return the seconds of the command, of its rounds, and of the same command again."""
    words = f"-m num_rounds=2 tracker=files_only seed=range({jobs}) hydra/launcher={launcher}"
    command = [sys.executable, "-m", "fedsim", *words.split()]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        new, again = seconds_of(command, folder), seconds_of(command, folder)
        summaries = list(folder.glob("outputs/*/*/summary.json"))
        rounds = sum(read_metrics(path.parent)[-1]["wall_seconds"] for path in summaries)
    if len(summaries) != jobs:
        sys.exit(f"{len(summaries)} of {jobs} jobs have ended")
    return new, rounds, again


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, nargs="+", default=[40, 300])
    parser.add_argument("--launchers", nargs="+", default=["basic"], help="basic joblib lanes")
    options = parser.parse_args()
    bare_import = [sys.executable, "-c", "import torch"]
    start = statistics.median(seconds_of(bare_import, Path()) for _ in range(5))
    rows = []
    within_all = True
    for jobs in options.jobs:
        for launcher in options.launchers:
            new, rounds, again = measure(jobs, launcher)
            cost_new = (new - rounds - start) / jobs
            cost_finished = (again - start) / jobs
            has_bound = launcher == "basic" and jobs >= 300
            if has_bound and (cost_new > BOUND_NEW or cost_finished > BOUND_FINISHED):
                within_all = False
            rows.append(
                [
                    str(jobs),
                    launcher,
                    f"{new:.1f}",
                    f"{rounds:.1f}",
                    f"{1000 * cost_new:.1f}",
                    f"{again:.1f}",
                    f"{1000 * cost_finished:.1f}",
                ]
            )
    note = f"a job: without its rounds and without `import torch`, which took {start:.2f} s"
    Console().print(table("a sweep besides its rounds", COLUMNS, rows, note))
    sys.exit(0 if within_all else 1)


if __name__ == "__main__":
    main()
