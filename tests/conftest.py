"""One thread per test process: the tensors are small, and threads that share cores with others wait for each other."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before the first import of a library that reads it; children inherit it

import pytest
import torch

torch.set_num_threads(1)

MOST_WORKERS = 8
"""Each has 1 to 1.5 GB in memory, most of it torch and its libraries."""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Number of processes of `-n auto`: one per core for folders; 0, which is no other process, for named files."""
    if all(".py" in word for word in config.args):
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_WORKERS)
