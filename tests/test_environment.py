"""Tests give the same results under `uv run`, on a cluster, in a hook of git, and in a terminal of any width."""

import os
import runpy
from pathlib import Path

import pytest

from fedsim.running.provenance import LOCATIONS
from tests.environment import clear

USERS = {"UV": "/usr/bin/uv", "FEDSIM_DATA": "data", "WANDB_API_KEY": "key", "SLURM_JOB_ID": "1", "COLUMNS": "20"}


def test_what_changes_results_is_cleared_and_the_rest_is_left() -> None:
    variables = {**USERS, **dict.fromkeys(LOCATIONS, "elsewhere"), "NETRC": "~/.netrc", "HOME": "/home", "UVX": "1"}
    clear(variables)
    assert variables == {"NETRC": os.devnull, "HOME": "/home", "UVX": "1"}


def test_it_is_cleared_when_pytest_reads_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in USERS.items():
        monkeypatch.setenv(name, value)
    runpy.run_path(str(Path(__file__).with_name("conftest.py")))
    assert not USERS.keys() & os.environ.keys()
