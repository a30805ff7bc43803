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
"""Bytes a round that count as flat: a line of metrics.jsonl is kept, and allocators are not
exact."""
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
    for _ in range(4):
        kept.append([value.clone() for value in server.params.values()])  # 60 kB

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


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.slow
def test_memory_is_flat_over_many_rounds_and_a_selector_that_leaks_is_found(tmp_path: Path) -> None:
    """Each runs in a process of its own: one that has run other things has free memory, and would
    grow unseen."""
    command = [sys.executable, "-c", RUN, "30", "70", *WORDS, "num_rounds=70"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, check=False, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    flat, leaking = [
        int(line.split()[1]) / 40 for line in done.stdout.splitlines() if line.startswith("bytes")
    ]
    assert flat < MOST < leaking
