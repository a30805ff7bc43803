"""The memory of a run does not grow with its rounds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORDS = [
    *("local.epochs=1", "tracker=files_only", "num_clients=6", "cohort_size=2", "selector=random"),
    *("model.hidden=[200]", "checkpoint.every=20", "eval_every=10"),
]
MOST = 10_000
"""Bytes a round that count as flat: a line of metrics.jsonl is kept, and allocators are not exact."""
RUN = """
import gc, os, sys
import fedsim.running.assembly
from fedsim.jobs.cli import run
from fedsim.selectors.random import Random
from fedsim.rounds.loop import Simulation

first, last, *words = sys.argv[1:]
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
for place in ("flat", "leak"):
    if not (pid := os.fork()):
        if place == "leak":
            Random.observe = leaking
        code = run([*words, f"output_dir={place}"])
        print("bytes", found[int(last)] - found[int(first)], flush=True)
        os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
"""


def growths(folder: Path, first: int, last: int) -> list[float]:
    """Bytes a round by which a process grows between two rounds, without a leak and with one. (Each runs in a process
    of its own: one that has run other things before has free memory of theirs, in which it would grow unseen.)"""
    words = [*WORDS, f"num_rounds={last}"]
    command = [sys.executable, "-c", RUN, str(first), str(last), *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, check=False, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("bytes")]
    return [int(line.split()[1]) / (last - first) for line in lines]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_memory_is_flat_over_many_rounds_and_a_selector_that_leaks_is_found(tmp_path: Path) -> None:
    flat, leaking = growths(tmp_path, 30, 70)
    assert flat < MOST < leaking
