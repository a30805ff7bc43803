"""What a result depends on besides its config."""

import platform
import sys
from typing import Any

import numpy as np
import torch

import fedsim


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and machine, as far as a result depends on them."""
    return {
        "fedsim": fedsim.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": f"{sys.platform}-{platform.machine()}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
    }
