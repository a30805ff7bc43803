"""Settings of the running process that make torch on a CPU faster. To be called before torch is imported."""

import ctypes
import os
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""glibc's numbers of these options of mallopt."""


def tune() -> None:
    """Short spinning of idle threads, and freed memory kept; each only where the user has not chosen otherwise.

    torch's OpenMP threads spin while they wait, which stalls runs that share cores (`OMP_WAIT_POLICY` or
    `GOMP_SPINCOUNT` in the environment are left as they are). glibc gives freed activations back to the kernel, and
    every step pays for getting them anew (`MALLOC_TRIM_THRESHOLD_` or `MALLOC_MMAP_THRESHOLD_` keep its own way).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    if sys.platform == "linux" and not {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & set(os.environ):
        _keep_freed_memory()


def _keep_freed_memory() -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return
    mallopt(_MMAP_THRESHOLD, 2**30)
    mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_TOP_PAD, 64 * 2**20)
