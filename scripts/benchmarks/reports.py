"""Measure `fedsim report` for thousands of runs: processor time, peak memory and size of the page.

    uv run python scripts/benchmark.py reports
    uv run python scripts/benchmark.py reports --folders 600 --rounds 100 --keep folder

Six runs of the default experiment (three selectors, two seeds) are copied with other seeds,
learning rates, cohort sizes and shards: groups of five seeds in five panels. Their records are hard
links to those of the six runs. The exit code is 1 if a number is above its bound.
"""

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from scripts.benchmarks.processes import table

BOUNDS = {"seconds": 60.0, "GB of memory": 1.5, "MB of the page": 8.0}
SELECTORS = ("random", "gpfl", "oort")
SEEDS = range(5)
SHARDS = (1, 2, 3, 5, 10)
COHORT_SIZES = (5, 10, 20, 30, 50)


def make_originals(folder: Path, rounds: int) -> dict[tuple[str, int], Path]:
    """Make the runs that are copied. Return their folders by selector and seed."""
    words = [
        "-m",
        "tracker=files_only",
        "name=original",
        f"num_rounds={rounds}",
        "num_clients=100",
        "cohort_size=10",
        "local.steps=1",
        f"selector={','.join(SELECTORS)}",
        "seed=0,1",
        f"output_dir={folder}",
    ]
    subprocess.run([sys.executable, "-m", "fedsim", *words], check=True, stdout=subprocess.DEVNULL)
    originals = {}
    for selector, seed in itertools.product(SELECTORS, (0, 1)):
        [originals[selector, seed]] = (folder / "original").glob(f"*-{selector}-s{seed}-*")
    return originals


def copy_run(original: Path, folder: Path, changes: Mapping[str, str]) -> None:
    """Copy a run with other lines in its config.yaml."""
    folder.mkdir(parents=True)
    config = (original / "config.yaml").read_text(encoding="utf-8")
    for line, new_line in changes.items():
        if config.count(f"{line}\n") != 1:
            sys.exit(f"{original}/config.yaml has no single line {line!r}")
        config = config.replace(f"{line}\n", f"{new_line}\n")
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    for name in ("metrics.jsonl", "summary.json", "partition.npz"):
        os.link(original / name, folder / name)


def make_copies(folder: Path, number: int, rounds: int) -> None:
    """Make `number` copies, with as many learning rates as it takes."""
    originals = make_originals(folder / "originals", rounds)
    rates = (f"{0.001 * i:.3f}" for i in itertools.count(1))
    per_rate = list(itertools.product(COHORT_SIZES, SHARDS, SELECTORS, SEEDS))
    values = ((rate, *others) for rate in rates for others in per_rate)
    for rate, cohort_size, shards, selector, seed in itertools.islice(values, number):
        changes = {
            "  lr: 0.1": f"  lr: {rate}",
            "cohort_size: 10": f"cohort_size: {cohort_size}",
            "  shards_per_client: 2": f"  shards_per_client: {shards}",
            f"seed: {seed % 2}": f"seed: {seed}",
        }
        copy = folder / "copies" / f"{selector}-{shards}-{cohort_size}-{rate}-s{seed}"
        copy_run(originals[selector, seed % 2], copy, changes)


def measure(folder: Path, words: Sequence[str]) -> list[float]:
    """Return the numbers that have `BOUNDS`, and the MB of all files of the report."""
    command = [sys.executable, "-m", "fedsim", "report", str(folder), *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status):
        sys.exit(f"{' '.join(command)} failed")
    report = folder / "report"
    sizes = [path.stat().st_size for path in report.rglob("*") if path.is_file()]
    return [
        usage.ru_utime + usage.ru_stime,
        usage.ru_maxrss * 1024 / 1e9,
        (report / "report.html").stat().st_size / 1e6,
        sum(sizes) / 1e6,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folders", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--keep", type=Path, help="where to make the runs, or an earlier call did")
    options = parser.parse_args()
    rows = []
    within_all = True
    with tempfile.TemporaryDirectory() as name:
        folder = options.keep.resolve() if options.keep else Path(name)
        if not (folder / "copies").exists():
            make_copies(folder, options.folders, options.rounds)
        for words in ([], ["--no-figures"]):
            numbers = measure(folder / "copies", words)
            for number, bound in zip(numbers, BOUNDS.values(), strict=False):
                within_all = within_all and number <= bound
            rows.append([" ".join(words), *(f"{number:.2f}" for number in numbers)])
    bounded = [f"{name} (bound {bound:g})" for name, bound in BOUNDS.items()]
    Console().print(table("fedsim report", ["words", *bounded, "MB of all files"], rows))
    sys.exit(0 if within_all else 1)


if __name__ == "__main__":
    main()
