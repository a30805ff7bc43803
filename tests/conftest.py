"""All tests have the same environment, however they are started. Each process that runs tests has
one thread: the tensors are small, and threads that share cores wait for each other."""

import gc
import os

import pytest

from tests import environment

# torch and other libraries read the environment when they are imported; child processes inherit it
environment.clear(os.environ)
os.environ.setdefault("OMP_NUM_THREADS", "1")
if not environment.ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton's kernels run on the CPU.

pytest_plugins = ["tests.fixtures"]
MAX_WORKERS = 8
"""Each takes 1 to 1.5 GB of memory, most of it torch and its libraries."""


def pytest_configure() -> None:
    import torch

    torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Exclude the million objects of imported libraries from garbage collection."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Include them again: libraries written in C++ complain if they are not collected at the
    end."""
    gc.unfreeze()


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of processes of `-n auto`: one for each core for folders, and 0, which
    means no other process, for named files."""
    if all(".py" in argument for argument in config.args):
        return 0
    from fedsim.core.disk import num_cores

    return min(num_cores(), MAX_WORKERS)
