"""What a result depends on besides its config: versions and machine, and the commit of fedsim."""

import functools
import os
import platform
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedsim
from fedsim.engine.device import switches
from fedsim.engine.native.library import library_description

DRIVER = Path("/proc/driver/nvidia/version")
PROCESSORS = Path("/proc/cpuinfo")


def environment(device: torch.device, compiled: torch.dtype | None = None) -> dict[str, Any]:
    """Versions and machine, as far as a result depends on them. `compiled`: the C library's type of
    numbers, if any."""
    found = {
        "fedsim": fedsim.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": f"{sys.platform}-{platform.machine()}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "processor": processor(),
        "instructions": torch.backends.cpu.get_cpu_capability().lower(),
        "blas": blas(),
    }
    if compiled is not None:
        found["compiled"] = library_description(compiled)
    if device.type == "cuda":
        versions = {
            "driver": driver_version(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
        found["gpu"] = {**versions, **switches()}
    return found


def processor() -> str:
    """The name of the processor, with the numbers that tell generations of one name apart where
    they are known."""
    text = _content(PROCESSORS).split("\n\n")[0]
    told = {
        key.strip(): value.strip()
        for key, _, value in (line.partition(":") for line in text.splitlines())
    }
    name = told.get("model name") or platform.processor() or platform.machine()
    known = {"cpu family", "model"} <= set(told)
    return f"{name} (family {told['cpu family']}, model {told['model']})" if known else name


def blas() -> dict[str, str]:
    """The libraries of matrix products, such as `mkl 2024.2` and `scipy-openblas 0.3.31`."""
    text = torch.__config__.show()
    name = re.search(r"BLAS_INFO=(\w+)", text)
    version = re.search(r"(?:Math Kernel Library Version|OpenBLAS) ([\d.]+)", text)
    of_torch = [name.group(1) if name else "unknown", version.group(1) if version else ""]
    shown: Any = np.show_config(mode="dicts")
    found = (shown or {}).get("Build Dependencies", {}).get("blas", {})
    of_numpy = [found.get("name", "unknown"), found.get("version", "")]
    return {"torch": " ".join(filter(None, of_torch)), "numpy": " ".join(filter(None, of_numpy))}


def driver_version() -> str | None:
    """Of NVIDIA's kernel module, as the kernel tells it; None elsewhere than on Linux."""
    found = re.search(r"\d+\.\d+(\.\d+)?", _content(DRIVER))
    return found.group() if found else None


def _content(path: Path) -> str:
    """Of a file of the kernel; empty where there is none."""
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


PACKAGE = Path(fedsim.__file__).parent
TIMEOUT = 30.0
"""Seconds that each git command gets: `git status` may read every file of a checkout, which a busy
disk slows."""
LOCATIONS = {
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_COMMON_DIR",
    "GIT_INDEX_FILE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_PREFIX",
}
"""Environment variables that lead git to another repository than that of the current folder; it
sets them for hooks."""


@functools.cache
def own_revision() -> dict[str, Any] | None:
    """`revision` of this package, read once per process: later changes of the checkout do not reach
    loaded modules."""
    return revision(PACKAGE)


def revision(package: Path) -> dict[str, Any] | None:
    """The `commit` that the folder of a package is checked out at, and whether any tracked file of
    the checkout differs from it (`dirty`; None where git does not tell that). None if its
    `__init__.py` is not tracked (an installed wheel), there is no commit, or git is missing,
    refuses or takes longer than `TIMEOUT`. Never raises."""
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = _git(package, "rev-parse", "--verify", "HEAD")
    changed = _git(package, "status", "--porcelain", "--untracked-files=no")
    return (
        None
        if commit is None
        else {"commit": commit, "dirty": None if changed is None else bool(changed)}
    )


def _git(folder: Path, *words: str) -> str | None:
    """What `git words` prints in `folder`, None if it fails; it takes no lock and starts no other
    process. A checkout may be another user's, as in a container, where the package's own code is
    that user's, too."""
    root = folder.parent.resolve()
    try:
        own = (root / ".git").exists() and (root / ".git").stat().st_uid == (
            folder / "__init__.py"
        ).stat().st_uid
        trusted = ["-c", f"safe.directory={root}"] if own else []
        command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", *trusted, *words]
        environment = {name: value for name, value in os.environ.items() if name not in LOCATIONS}
        done = subprocess.run(
            command, cwd=folder, env=environment, timeout=TIMEOUT, check=True, capture_output=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip()
