"""What a result depends on besides its config."""

import platform
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedsim
from fedsim.engine.precision import switches

DRIVER = Path("/proc/driver/nvidia/version")


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and machine, as far as a result depends on them; on a GPU also its driver, libraries and switches."""
    found = {
        "fedsim": fedsim.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": f"{sys.platform}-{platform.machine()}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        found["gpu"] = {
            "driver": driver_version(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            **switches(),
        }
    return found


def driver_version() -> str | None:
    """Of NVIDIA's kernel module, as the kernel tells it; None elsewhere than on Linux."""
    try:
        found = re.search(r"\d+\.\d+(\.\d+)?", DRIVER.read_text(encoding="utf-8"))
    except OSError:
        return None
    return found.group() if found else None
