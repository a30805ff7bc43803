"""The memory of a run does not grow with its rounds."""

import gc
import os
from pathlib import Path
from typing import Any

import pytest

from fedsim.cli import run
from fedsim.selectors.random import Random
from fedsim.simulation import Record, Simulation

WORDS = [
    *("num_rounds=200", "local.epochs=1", "tracker=files_only", "num_clients=6", "cohort_size=2", "selector=random"),
    *("model.hidden=[200]", "checkpoint.every=20", "eval_every=10"),
]
FIRST, LAST = 80, 200
MOST = 10_000
"""Bytes a round that count as flat: a line of metrics.jsonl is kept, and allocators are not exact."""


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def growth(folder: Path, monkeypatch: pytest.MonkeyPatch) -> float:
    """Bytes a round by which the process grows from round `FIRST` to `LAST`."""
    found = {}
    step = Simulation.step

    def measured(self: Simulation) -> Record:
        record = step(self)
        if record.round in (FIRST, LAST):
            found[record.round] = resident()
        return record

    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "step", measured)
        assert run([*WORDS, f"output_dir={folder}"]) == 0
    return (found[LAST] - found[FIRST]) / (LAST - FIRST)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_memory_is_flat_over_200_rounds_and_a_selector_that_leaks_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat = growth(tmp_path / "flat", monkeypatch)
    kept = []

    def leaking(self: Random, round: int, cohort: Any, server: Any) -> None:
        kept.append({name: value.clone() for name, value in cohort.delta.items()})  # 2 x 60 kB

    monkeypatch.setattr(Random, "observe", leaking)
    leak = growth(tmp_path / "leak", monkeypatch)
    assert flat < MOST < leak
