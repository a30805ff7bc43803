"""What one waits for before the first answer, in units of T, the time of `import torch` on the same
machine.

    uv run python scripts/benchmark.py start-up
    uv run python scripts/benchmark.py start-up --repeats 9 --only report

Every command runs in a process of its own, in turns with the bare import that it is compared with,
after one run of each that is not counted. A bound is a multiple of that import's time, plus
seconds; exit code 1 if a median is above.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

TORCH, FIGURES = "import torch", "import plotly, matplotlib.pyplot"
ENDED = ("num_rounds=2", "tracker=files_only", "name=ended")
NINE = (
    "-m",
    "num_rounds=2",
    "tracker=files_only",
    "name=nine",
    "selector=random,full,gpfl",
    "seed=range(3)",
)


@dataclass(frozen=True)
class Case:
    """A command and its bound: `times` the time of the statement `bare`, and `seconds` more."""

    words: tuple[str, ...]
    times: float
    seconds: float = 0.0
    bare: str = TORCH
    code: int = 0


CASES = (
    Case(("--help",), 0.5),
    Case(("--version",), 0.5),
    Case(("list",), 0.5),
    Case(("list", "gpfl"), 0.5),
    Case(("selctor=random",), 0.5, code=2),
    Case(("num_rounds=x",), 0.5, code=2),
    Case(("optimizer.lr=x",), 0.5, code=2),
    Case(("--cfg", "job"), 0.5),
    Case(("sync", "--dry-run", "outputs/ended"), 0.5),
    Case(NINE, 0.5),
    Case(("show", *NINE), 0.5),
    Case(("report", "outputs/ended", "--no-figures"), 0.7),
    Case(("report", "outputs/nine"), 1, 3, FIGURES),
    Case(("num_rounds=2", "tracker=files_only", "overwrite=true"), 1.4, 0.7),
)


def seconds(command: Sequence[str], folder: Path, code: int = 0) -> float:
    """What it takes. Ends the program where it does not end with `code`."""
    start = time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    took = time.perf_counter() - start
    if done.returncode != code:
        sys.exit(
            f"{' '.join(command)} ended with {done.returncode}, not {code}: {done.stderr.strip()[-500:]}"
        )
    return took


def measure(case: Case, folder: Path, repeats: int) -> list[tuple[float, float]]:
    """Seconds of the command and of the bare import, in pairs of which every other one begins with
    the import."""
    own, bare = [sys.executable, "-m", "fedsim", *case.words], [sys.executable, "-c", case.bare]
    pairs = []
    for repeat in range(repeats + 1):
        if repeat % 2:
            imported = seconds(bare, folder)
            pairs.append((seconds(own, folder, case.code), imported))
        else:
            pairs.append((seconds(own, folder, case.code), seconds(bare, folder)))
    return pairs[1:]


def table_of(found: Sequence[tuple[Case, list[tuple[float, float]]]]) -> tuple[Table, bool]:
    """A row for each command, and whether all are within their bounds."""
    table = Table(title="until the answer", caption=f"T: {TORCH}; F: {FIGURES}")
    for column in ("fedsim ...", "seconds", "of the import", "bound"):
        table.add_column(column, justify="left" if column == "fedsim ..." else "right")
    sound = True
    for case, pairs in found:
        took, bare = (
            statistics.median(own for own, _ in pairs),
            statistics.median(bare for _, bare in pairs),
        )
        within = took <= case.times * bare + case.seconds
        unit = "T" if case.bare == TORCH else "F"
        bound = f"{case.times:g} {unit}" + (f" + {case.seconds:g} s" if case.seconds else "")
        words = " ".join(case.words)
        table.add_row(
            words, f"{took:.2f}", f"{took / bare:.2f} {unit}", bound if within else f"above {bound}"
        )
        sound &= within
    return table, sound


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="commands that contain this text")
    options = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as name:
        for words in (ENDED, NINE):
            seconds([sys.executable, "-m", "fedsim", *words], Path(name))
        for case in CASES:
            if options.only in " ".join(case.words):
                found.append((case, measure(case, Path(name), options.repeats)))
                print(f"measured: fedsim {' '.join(case.words)}", file=sys.stderr, flush=True)
    table, sound = table_of(found)
    Console().print(table)
    sys.exit(0 if sound else 1)


if __name__ == "__main__":
    main()
