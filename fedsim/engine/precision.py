"""The precision of forward and backward passes; parameters, updates and losses are float32 always."""

from contextlib import AbstractContextManager
from typing import Literal

import torch

Precision = Literal["float32", "bf16"]
"""`bf16`: matrix products and convolutions in bfloat16 (torch.autocast)."""


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """The context of a forward pass."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
