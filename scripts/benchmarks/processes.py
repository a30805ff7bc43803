"""Measure in other processes, in turns, and show what was measured. Used by the benchmarks.

A process that measures prints one line that begins with `RESULT`, and anything else around it.
Nothing here needs a package, because frameworks of the speed race run in their own environments.
"""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rich.table import Table

ROOT = Path(__file__).parents[2]
RESULT = "RESULT "
T = TypeVar("T")


def print_result(result: Mapping[str, Any]) -> None:
    print(RESULT + json.dumps(result), flush=True)


def result_in(output: str) -> dict[str, Any] | None:
    """Return the last result that a process printed, or None."""
    lines = [line for line in output.splitlines() if line.startswith(RESULT)]
    return json.loads(lines[-1].removeprefix(RESULT)) if lines else None


def measure_in_process(
    module: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run `python -m scripts.benchmarks.<module> <arguments>` and return its result.

    Raises RuntimeError with the last line of stderr if the process fails.
    """
    finished = subprocess.run(
        [sys.executable, "-m", f"scripts.benchmarks.{module}", *arguments],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    result = result_in(finished.stdout)
    if finished.returncode or result is None:
        lines = finished.stderr.strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"{module} printed no result")
    return result


def seconds_of(command: Sequence[str], folder: Path, exit_code: int = 0) -> float:
    """Return the wall time of a command in seconds. Stop if it does not exit with `exit_code`."""
    start = time.perf_counter()
    finished = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if finished.returncode != exit_code:
        error = finished.stderr.strip()[-500:]
        sys.exit(f"{' '.join(command)} exited with {finished.returncode}: {error}")
    return seconds


def in_turns(cases: Sequence[T], repeats: int) -> Iterator[T]:
    """Yield all cases `repeats` times, every other time in reverse, so that no case is favoured."""
    for repeat in range(repeats):
        yield from cases if repeat % 2 == 0 else reversed(cases)


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = ""
) -> "Table":
    """Return a table for the terminal. The first column is aligned to the left."""
    from rich.table import Table

    shown = Table(title=title, caption=note or None)
    for i, column in enumerate(columns):
        shown.add_column(column, justify="right" if i else "left")
    for row in rows:
        shown.add_row(*row)
    return shown


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def growth_exponent(seconds: Mapping[int, float], negligible: float) -> str:
    """Return the exponent of N between the two largest sizes, for example `N^1.0`.

    `seconds` has times by size. Times below `negligible` seconds have no exponent.
    """
    if len(seconds) < 2:
        return "-"
    (small_size, small), (large_size, large) = sorted(seconds.items())[-2:]
    if large < negligible:
        return f"< {1e3 * negligible:g} ms"
    return f"N^{math.log(large / small) / math.log(large_size / small_size):.1f}"
