"""Command lines in an empty folder, and what runs leave there."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsim.config.compose import compose_jobs, make_plan
from fedsim.config.plan import Plan
from fedsim.core.errors import FedsimError
from fedsim.results.reading import read_metrics

ROOT = Path(__file__).parents[1]
HANG = 1800
"""Seconds after which a process that hangs is given up; nothing takes that long on any machine."""
QUICK = ("num_rounds=3", "local.epochs=1", "tracker=files_only")
Run = Callable[..., int]


def folders(tmp_path: Path) -> list[Path]:
    return sorted(p.parent for p in tmp_path.glob("outputs/*/*/summary.json"))


def without_seconds(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if "seconds" not in k} for r in read_metrics(folder)]


def plan_of(*words: str) -> Plan:
    """The plan of one job; to be called inside `search_path`."""
    (job,) = compose_jobs(words, multirun=False)
    return make_plan(job.config, job.choices)


def refused(fedsim: Run, tmp_path: Path, *words: str) -> str:
    """The error of a command that is refused and writes nothing."""
    with pytest.raises(FedsimError) as caught:
        fedsim(*words)
    assert not list(tmp_path.rglob("*")), "something was written"
    return str(caught.value)


def shell(folder: Path, *words: str, **env: str) -> "subprocess.CompletedProcess[str]":
    """A command as a user's shell runs it: a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "fedsim.run", *words],
        cwd=folder,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
