"""What a result depends on besides its config."""

import platform
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedsim
from fedsim.engine.native.library import library_description
from fedsim.engine.precision import switches

DRIVER = Path("/proc/driver/nvidia/version")
PROCESSORS = Path("/proc/cpuinfo")


def environment(device: torch.device, compiled: torch.dtype | None = None) -> dict[str, Any]:
    """Versions and machine, as far as a result depends on them; on a GPU also its driver, libraries and switches.

    `compiled`: the type of numbers of the C library that trained, if it did.
    """
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
        "blas": {"torch": torch_blas(), "numpy": numpy_blas()},
    }
    if compiled is not None:
        found["compiled"] = library_description(compiled)
    if device.type == "cuda":
        found["gpu"] = {
            "driver": driver_version(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            **switches(),
        }
    return found


def processor() -> str:
    """The name of the processor, with the numbers that tell generations of one name apart where they are known."""
    try:
        lines = PROCESSORS.read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = told.get("model name") or platform.processor() or platform.machine()
    known = {"cpu family", "model"} <= set(told)
    return f"{name} (family {told['cpu family']}, model {told['model']})" if known else name


def torch_blas() -> str:
    """The library of matrix products that torch was built with, such as `mkl 2024.2`."""
    text = torch.__config__.show()
    name = re.search(r"BLAS_INFO=(\w+)", text)
    version = re.search(r"Math Kernel Library Version ([\d.]+)|OpenBLAS ([\d.]+)", text)
    return " ".join([name.group(1) if name else "unknown", *([g for g in version.groups() if g] if version else [])])


def numpy_blas() -> str:
    """That of NumPy, such as `scipy-openblas 0.3.31`."""
    shown: Any = np.show_config(mode="dicts")
    blas = (shown or {}).get("Build Dependencies", {}).get("blas", {})
    return " ".join(filter(None, [blas.get("name", "unknown"), blas.get("version", "")]))


def driver_version() -> str | None:
    """Of NVIDIA's kernel module, as the kernel tells it; None elsewhere than on Linux."""
    try:
        found = re.search(r"\d+\.\d+(\.\d+)?", DRIVER.read_text(encoding="utf-8"))
    except OSError:
        return None
    return found.group() if found else None
