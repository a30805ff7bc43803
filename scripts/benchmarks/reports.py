"""What `fedsim report` takes for thousands of runs: seconds of a processor, peak memory, and the
size of the page.

    uv run python scripts/benchmark.py reports
    uv run python scripts/benchmark.py reports --folders 600 --rounds 100 --keep folder

Six runs of the default experiment (three selectors, two seeds) are copied under other seeds,
learning rates, cohorts and shards a client: groups of five seeds, in five panels. Their records are
those of the six, by hard links. Exit code 1 where a figure is above its bound.
"""

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

BOUNDS = {"seconds": 60.0, "GB of memory": 1.5, "MB of the page": 8.0}
SELECTORS, SEEDS, SHARDS, COHORTS = (
    ("random", "gpfl", "oort"),
    range(5),
    (1, 2, 3, 5, 10),
    (5, 10, 20, 30, 50),
)
"""Of the learning rates there are as many as it takes."""


def make_originals(folder: Path, rounds: int) -> dict[tuple[str, int], Path]:
    """The folders of the runs that are copied, by selector and seed."""
    words = [
        "-m",
        "tracker=files_only",
        "name=original",
        f"num_rounds={rounds}",
        "num_clients=100",
        "cohort_size=10",
    ]
    words += [
        "local.steps=1",
        f"selector={','.join(SELECTORS)}",
        "seed=0,1",
        f"output_dir={folder}",
    ]
    subprocess.run([sys.executable, "-m", "fedsim", *words], check=True, stdout=subprocess.DEVNULL)
    found = folder / "original"
    return {(s, seed): next(found.glob(f"*-{s}-s{seed}-*")) for s in SELECTORS for seed in (0, 1)}


def copy_run(original: Path, folder: Path, values: Sequence[tuple[str, str]]) -> None:
    """`values`: lines of config.yaml and what takes their places."""
    folder.mkdir(parents=True)
    config = (original / "config.yaml").read_text(encoding="utf-8")
    for line, other in values:
        if config.count(f"{line}\n") != 1:
            sys.exit(f"{original}/config.yaml has no single line {line!r}")
        config = config.replace(f"{line}\n", f"{other}\n")
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    for name in ("metrics.jsonl", "summary.json", "partition.npz"):
        os.link(original / name, folder / name)


def make_folders(folder: Path, number: int, rounds: int) -> None:
    originals = make_originals(folder / "originals", rounds)
    rates = [f"{0.001 * (at + 1):.3f}" for at in range(-(-number // 375))]
    each = itertools.product(rates, COHORTS, SHARDS, SELECTORS, SEEDS)
    for rate, cohort, shards, selector, seed in itertools.islice(each, number):
        own = [("  lr: 0.1", f"  lr: {rate}"), ("cohort_size: 10", f"cohort_size: {cohort}")]
        own += [
            ("  shards_per_client: 2", f"  shards_per_client: {shards}"),
            (f"seed: {seed % 2}", f"seed: {seed}"),
        ]
        place = folder / "copies" / f"{selector}-{shards}-{cohort}-{rate}-s{seed}"
        copy_run(originals[selector, seed % 2], place, own)


def measure(folder: Path, words: Sequence[str]) -> tuple[dict[str, float], float]:
    """The measured by `BOUNDS`, and MB of all files of the report."""
    command = [sys.executable, "-m", "fedsim", "report", str(folder), *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status):
        sys.exit(f"{' '.join(command)} failed")
    files = [path.stat().st_size for path in (folder / "report").rglob("*") if path.is_file()]
    page = (folder / "report" / "report.html").stat().st_size
    found = (usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e9, page / 1e6)
    return dict(zip(BOUNDS, found, strict=True)), sum(files) / 1e6


def measure_all(folder: Path) -> bool:
    """Whether all is within the bounds."""
    table, sound = Table(title="fedsim report"), True
    for column in (
        "words",
        *(f"{name} (bound {bound:g})" for name, bound in BOUNDS.items()),
        "MB of all files",
    ):
        table.add_column(column, justify="right")
    for words in ((), ("--no-figures",)):
        found, size = measure(folder, words)
        table.add_row(" ".join(words), *(f"{value:.2f}" for value in found.values()), f"{size:.1f}")
        sound &= all(found[name] <= bound for name, bound in BOUNDS.items())
    Console().print(table)
    return sound


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folders", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument(
        "--keep", type=Path, help="a folder to make the runs in, or with those of an earlier call"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) if options.keep is None else options.keep.resolve()
        if not (folder / "copies").exists():
            make_folders(folder, options.folders, options.rounds)
        sys.exit(0 if measure_all(folder / "copies") else 1)


if __name__ == "__main__":
    main()
