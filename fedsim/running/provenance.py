"""What a result depends on besides its config: versions, the machine, and the commit of fedsim.

`fedsim.running.experiment` writes it into summary.json (`environment` and `revision`). `fedsim
verify` shows what of it differs when a repeated run differs.
"""

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

# Files in which the Linux kernel describes NVIDIA's driver and the processors.
DRIVER = Path("/proc/driver/nvidia/version")
PROCESSORS = Path("/proc/cpuinfo")


def environment(device: torch.device, compiled: torch.dtype | None = None) -> dict[str, Any]:
    """Return versions and facts about the machine that a result depends on.

    `device` is that of the run. `compiled` is the type of numbers of the C library, None for a run
    that does not use this library.
    """
    facts: dict[str, Any] = {
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
        facts["compiled"] = library_description(compiled)
    if device.type == "cuda":
        facts["gpu"] = {
            "driver": driver_version(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
        facts["gpu"] |= switches()
    return facts


def processor() -> str:
    """Return the processor's name, with its family and model if the kernel reports them.

    These numbers tell apart generations of the same name.
    """
    facts: dict[str, str] = {}
    first_processor = _content(PROCESSORS).split("\n\n")[0]
    for line in first_processor.splitlines():
        key, _, value = line.partition(":")
        facts[key.strip()] = value.strip()
    name = facts.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in facts and "model" in facts:
        return f"{name} (family {facts['cpu family']}, model {facts['model']})"
    return name


def blas() -> dict[str, str]:
    """Return the libraries of matrix products that torch and numpy call, such as `mkl 2024.2`."""
    text = torch.__config__.show()
    name = re.search(r"BLAS_INFO=(\w+)", text)
    version = re.search(r"(?:Math Kernel Library Version|OpenBLAS) ([\d.]+)", text)
    torch_name = name.group(1) if name else "unknown"
    torch_version = version.group(1) if version else ""
    numpy_config: Any = np.show_config(mode="dicts")
    library = (numpy_config or {}).get("Build Dependencies", {}).get("blas", {})
    numpy_blas = f"{library.get('name', 'unknown')} {library.get('version', '')}"
    return {"torch": f"{torch_name} {torch_version}".strip(), "numpy": numpy_blas.strip()}


def driver_version() -> str | None:
    """Return the version of NVIDIA's kernel module; None outside Linux."""
    version = re.search(r"\d+\.\d+(\.\d+)?", _content(DRIVER))
    return version.group() if version else None


def _content(path: Path) -> str:
    """Return the text of a file of the Linux kernel; empty if there is no such file."""
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


PACKAGE = Path(fedsim.__file__).parent
"""The folder of the package fedsim."""
TIMEOUT = 30.0
"""Seconds for each git command: `git status` may read every file of a checkout on a busy disk."""
LOCATIONS = {
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_COMMON_DIR",
    "GIT_INDEX_FILE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_PREFIX",
}
"""Environment variables that lead git to another repository. git sets them for hooks."""


@functools.cache
def own_revision() -> dict[str, Any] | None:
    """Return the `revision` of this package.

    It is read once, because later changes of the checkout do not reach loaded modules.
    """
    return revision(PACKAGE)


def revision(package: Path) -> dict[str, Any] | None:
    """Return the `commit` of a package's checkout, and whether a tracked file differs (`dirty`).

    `dirty` is None if git does not report it. Returns None if the package's `__init__.py` is not
    tracked (an installed wheel), without a commit, and if git is missing, refuses or takes longer
    than `TIMEOUT`. Never raises.
    """
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = _git(package, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return None
    changed = _git(package, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changed is None else bool(changed)}


def _git(folder: Path, *words: str) -> str | None:
    """Return the output of the git command `words` in `folder`; None if it fails.

    git takes no lock (`--no-optional-locks`) and starts no other process (`core.fsmonitor`). It
    refuses to read a checkout of another user unless it is a `safe.directory`. This one is safe if
    the same user owns the package's code, which runs in this process anyway.
    """
    root = folder.parent.resolve()
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false"]
    try:
        repository = root / ".git"
        source = folder / "__init__.py"
        if repository.exists() and repository.stat().st_uid == source.stat().st_uid:
            command += ["-c", f"safe.directory={root}"]
        output = subprocess.run(
            [*command, *words],
            cwd=folder,
            env={name: value for name, value in os.environ.items() if name not in LOCATIONS},
            timeout=TIMEOUT,
            check=True,
            capture_output=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return output.decode(errors="replace").strip()
