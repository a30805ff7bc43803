"""All figures of training on a GPU in one go of less than eight minutes, on random data (speed does
not depend on it).

    uv run python scripts/benchmark.py gpu --out outputs/gpu                        # on a GPU uv
    run python scripts/benchmark.py gpu --out outputs/gpu --only engines lanes   # some sections uv
    run python scripts/benchmark.py gpu --out outputs/gpu --device cpu --shrink 50    # whether the
    script works

Each figure is a line of <out>/gpu.jsonl as soon as it is known; a section that fails leaves a line
that says why, and one that would begin after --budget seconds is left out. `train_ms` is the local
training of a cohort, `rounds_per_s` that with the test set every so many rounds; `difference` is
that of the updates from those of the engine `sequential`, by their norms, relative to these. Matrix
products and convolutions are float32 unless a row says otherwise.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedsim.engine.device import prepare
from scripts.benchmarks.gpu.convolutions import convolutions
from scripts.benchmarks.gpu.sections import engines, environment, lanes, latencies, loop, native
from scripts.benchmarks.gpu.workloads import CASES, Bench

SECTIONS: dict[str, Callable[[Bench], None]] = {
    f.__name__: f for f in (environment, latencies, engines, loop, lanes, native, convolutions)
}


def run(bench: Bench, only: list[str]) -> list[dict[str, Any]]:
    """The rows of the sections `only`, of all if it is empty."""
    prepare(bench.device, deterministic=None)
    for name, section in SECTIONS.items():
        if only and name not in only:
            continue
        if time.perf_counter() - bench.begin > bench.budget:
            bench.put(name, "left out", reason=f"--budget {bench.budget:g} s is spent")
            continue
        try:
            section(bench)
        except Exception as error:  # the other sections are worth having
            bench.put(name, "failed", error=f"{type(error).__name__}: {error}"[:300])
    return bench.rows


def table_of(rows: list[dict[str, Any]]) -> Table:
    table = Table("section", "case", "values")
    for row in rows:
        values = {n: v for n, v in row.items() if n not in ("section", "case", "at")}
        texts = [f"{n} {v:.4g}" if isinstance(v, float) else f"{n} {v}" for n, v in values.items()]
        table.add_row(row["section"], row["case"], ", ".join(texts))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--budget", type=float, default=420.0, help="seconds after which no section begins"
    )
    parser.add_argument(
        "--shrink", type=int, default=1, help="divides sizes and times; 1 for figures that are kept"
    )
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=[])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[])
    options = parser.parse_args()
    rows = run(
        Bench(options.out, options.device, options.shrink, options.budget, options.cases),
        options.only,
    )
    Console(width=160).print(table_of(rows))


if __name__ == "__main__":
    main()
