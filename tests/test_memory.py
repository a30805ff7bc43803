"""The memory of a run does not grow with its rounds."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORDS = [
    *("num_rounds=200", "local.epochs=1", "tracker=files_only", "num_clients=6", "cohort_size=2", "selector=random"),
    *("model.hidden=[200]", "checkpoint.every=20", "eval_every=10"),
]
FIRST, LAST = 80, 200
MOST = 10_000
"""Bytes a round that count as flat: a line of metrics.jsonl is kept, and allocators are not exact."""
RUN = """
import gc, os, sys
from fedsim.cli import run
from fedsim.selectors.random import Random
from fedsim.simulation import Simulation

first, last, leak, *words = sys.argv[1:]
step, found, kept = Simulation.step, {}, []

def measured(self):
    record = step(self)
    if record.round in (int(first), int(last)):
        gc.collect()
        pages = int(open("/proc/self/statm").read().split()[1])
        found[record.round] = pages * os.sysconf("SC_PAGE_SIZE")
    return record

def leaking(self, round, cohort, server):
    kept.append({name: value.clone() for name, value in cohort.delta.items()})  # 2 x 60 kB

Simulation.step = measured
if leak == "leak":
    Random.observe = leaking
assert run(words) == 0
print("bytes", found[int(last)] - found[int(first)])
"""


def growth(folder: Path, leak: str) -> float:
    """Bytes a round by which a process of its own grows from round `FIRST` to `LAST`. (One that has run other things
    before has free memory of theirs, in which it would grow unseen.)"""
    words = [*WORDS, f"output_dir={folder}"]
    command = [sys.executable, "-c", RUN, str(FIRST), str(LAST), leak, *words]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.rsplit("bytes", 1)[1]) / (LAST - FIRST)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_memory_is_flat_over_200_rounds_and_a_selector_that_leaks_is_found(tmp_path: Path) -> None:
    assert growth(tmp_path / "flat", "no leak") < MOST < growth(tmp_path / "leak", "leak")
