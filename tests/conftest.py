"""Every test has the same environment, whoever starts it and how; each process that runs tests has
one thread.

The tensors are small, and threads that share cores with others wait for each other.
"""

import gc
import os

import pytest

from tests import environment

environment.clear(
    os.environ
)  # before torch and others are imported, which read it; children inherit it
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["tests.fixtures"]
MOST_WORKERS = 8
"""Each has 1 to 1.5 GB in memory, most of it torch and its libraries."""


def pytest_configure() -> None:
    import torch

    torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """What is there by now, a million objects of imported libraries, stays: the collector need not
    go through it."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """What is frozen is not collected at the end either, of which libraries written in C++
    complain."""
    gc.unfreeze()


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Number of processes of `-n auto`: one per core for folders; 0, which is no other process, for
    named files."""
    if all(".py" in word for word in config.args):
        return 0
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return min(cores, MOST_WORKERS)
