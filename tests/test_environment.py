"""Tests give the same results under `uv run`, on a cluster, in a hook of git, and in a terminal of
any width."""

import os

from fedsim.running.provenance import LOCATIONS
from tests.environment import clear

USERS = {
    "UV": "/usr/bin/uv",
    "FEDSIM_DATA": "data",
    "WANDB_API_KEY": "key",
    "SLURM_JOB_ID": "1",
    "COLUMNS": "20",
}


def test_what_changes_results_is_cleared_and_the_rest_is_left() -> None:
    variables = {
        **USERS,
        **dict.fromkeys(LOCATIONS, "elsewhere"),
        "NETRC": "~/.netrc",
        "HOME": "/home",
        "UVX": "1",
    }
    clear(variables)
    assert variables == {
        "NETRC": os.devnull,
        "HOME": "/home",
        "UVX": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
