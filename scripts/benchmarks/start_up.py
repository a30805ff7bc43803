"""Measure the time until a command's first answer, relative to a bare import.

    uv run python scripts/benchmark.py start-up
    uv run python scripts/benchmark.py start-up --repeats 9 --only report

T is the time of `import torch` on the same machine, F that of the figure libraries. Each command
runs in its own process, in turns with the bare import, after one run of each that does not count.
The exit code is 1 if the median of a command is above its bound.
"""

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from scripts.benchmarks.processes import in_turns, seconds_of, table

IMPORTS = {"T": "import torch", "F": "import plotly, matplotlib.pyplot"}
ONE_RUN = "num_rounds=2 tracker=files_only name=ended"
NINE_RUNS = "-m num_rounds=2 tracker=files_only name=nine selector=random,full,gpfl seed=range(3)"


@dataclass(frozen=True)
class Case:
    """A command, and its bound: `times` the time of the import `unit`, plus `seconds`."""

    words: str
    times: float = 0.5
    seconds: float = 0.0
    unit: str = "T"
    exit_code: int = 0

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "fedsim", *self.words.split()]


CASES = (
    Case("--help"),
    Case("--version"),
    Case("list"),
    Case("list gpfl"),
    Case("selctor=random", exit_code=2),
    Case("num_rounds=x", exit_code=2),
    Case("optimizer.lr=x", exit_code=2),
    Case("--cfg job"),
    Case("sync --dry-run outputs/ended"),
    Case(NINE_RUNS),
    Case(f"show {NINE_RUNS}"),
    Case("report outputs/ended --no-figures", 0.7),
    Case("report outputs/nine", 1, 3, "F"),
    Case("num_rounds=2 tracker=files_only overwrite=true", 1.4, 0.7),
)


def medians(case: Case, folder: Path, repeats: int) -> tuple[float, float]:
    """Return the median seconds of the command, and of the bare import."""
    bare_import = [sys.executable, "-c", IMPORTS[case.unit]]
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for is_command in in_turns([True, False], repeats + 1):
        if is_command:
            seconds[True].append(seconds_of(case.command, folder, case.exit_code))
        else:
            seconds[False].append(seconds_of(bare_import, folder))
    return statistics.median(seconds[True][1:]), statistics.median(seconds[False][1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="commands that contain this text")
    options = parser.parse_args()
    rows = []
    within_all = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for words in (ONE_RUN, NINE_RUNS):
            seconds_of(Case(words).command, folder)
        for case in CASES:
            if options.only not in case.words:
                continue
            seconds, unit_seconds = medians(case, folder, options.repeats)
            within = seconds <= case.times * unit_seconds + case.seconds
            within_all = within_all and within
            bound = f"{case.times:g} {case.unit}"
            if case.seconds:
                bound += f" + {case.seconds:g} s"
            if not within:
                bound = f"above {bound}"
            ratio = f"{seconds / unit_seconds:.2f} {case.unit}"
            rows.append([case.words, f"{seconds:.2f}", ratio, bound])
            print(f"measured: fedsim {case.words}", file=sys.stderr, flush=True)
    note = "; ".join(f"{unit}: {statement}" for unit, statement in IMPORTS.items())
    columns = ["fedsim ...", "seconds", "of the import", "bound"]
    Console().print(table("until the answer", columns, rows, note))
    sys.exit(0 if within_all else 1)


if __name__ == "__main__":
    main()
