"""Measure all numbers of training on a GPU in less than eight minutes.

    uv run python scripts/benchmark.py gpu --out outputs/gpu                        # on a GPU
    uv run python scripts/benchmark.py gpu --out outputs/gpu --only engines lanes   # some sections
    uv run python scripts/benchmark.py gpu --out outputs/gpu --device cpu --shrink 50   # a try-out

Data are random, because speed does not depend on them. Each number is a line of <out>/gpu.jsonl as
soon as it is known. A section that fails leaves a line with the reason. A section that would begin
after --budget seconds is skipped. `train_ms` is the local training of a cohort, and `rounds_per_s`
adds the test set every so many rounds. `difference` is the distance of the updates from those of
the engine `sequential`, relative to their norm. Products are float32 unless a row says otherwise.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from fedsim.engine.device import prepare
from scripts.benchmarks.gpu.convolutions import convolutions
from scripts.benchmarks.gpu.sections import engines, environment, lanes, loop, native
from scripts.benchmarks.gpu.workloads import CASES, Bench
from scripts.benchmarks.processes import table

SECTIONS: dict[str, Callable[[Bench], None]] = {
    "environment": environment,
    "engines": engines,
    "loop": loop,
    "lanes": lanes,
    "native": native,
    "convolutions": convolutions,
}


def run(bench: Bench, only: list[str]) -> list[dict[str, Any]]:
    """Return the rows of the sections `only`, or of all sections if it is empty."""
    prepare(bench.device, deterministic=None)
    for name in only or SECTIONS:
        if time.perf_counter() - bench.begin > bench.budget:
            bench.put(name, "skipped", reason=f"--budget {bench.budget:g} s is spent")
            continue
        try:
            SECTIONS[name](bench)
        except Exception as error:  # the other sections are worth having
            bench.put(name, "failed", error=f"{type(error).__name__}: {error}"[:300])
    return bench.rows


def cells_of(row: dict[str, Any]) -> list[str]:
    texts = []
    for name, value in row.items():
        if name not in ("section", "case", "at"):
            texts.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    return [row["section"], row["case"], ", ".join(texts)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budget", type=float, default=420.0, help="seconds for new sections")
    parser.add_argument("--shrink", type=int, default=1, help="divides sizes and times")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=[])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    bench = Bench(options.out, options.device, options.shrink, options.budget, options.cases)
    rows = run(bench, options.only)
    cells = [cells_of(row) for row in rows]
    Console(width=160).print(table("a GPU", ["section", "case", "values"], cells))


if __name__ == "__main__":
    main()
