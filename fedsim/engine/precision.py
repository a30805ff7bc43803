"""The precision of forward and backward passes; parameters, updates and losses are float32 always.

What torch computes in on a GPU depends on switches of the whole process, of which the one for convolutions stands at
TF32 by default. They are set here, both ways, by every backend that computes with torch: outside of passes, products
are those of float32 whatever a config says, so that averages and what a selector sees are float32's, too.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch

from fedsim.errors import Problem, rule

Precision = Literal["float32", "tf32", "bf16"]
"""`tf32`: products and convolutions of tensors rounded to 10 bits behind the point, summed in float32 (a GPU's tensor
cores). `bf16`: the same in bfloat16 (torch.autocast)."""

_CUDNN: Any = torch.backends.cudnn


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """The context of a forward pass."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def precision_problem(precision: Precision, device: torch.device) -> Problem | None:
    """TF32 is refused on a CPU, whose results would pass for those of a GPU's."""
    possible = precision != "tf32" or device.type == "cuda"
    return rule(possible, "precision", precision, "needs a CUDA GPU", "use engine.precision=float32")


def prepare(device: torch.device, deterministic: bool | None) -> None:
    """Set the switches of a GPU for what is computed outside of passes.

    `deterministic`: cuDNN takes only algorithms that add in the same order every time (None: yes).
    """
    if device.type == "cuda":
        _set_products("ieee")
        _CUDNN.deterministic = deterministic is not False
        _CUDNN.benchmark = False  # which would choose an algorithm by its time


@contextmanager
def passes_in(precision: Precision, device: torch.device) -> Iterator[None]:
    """The context of forward and backward passes, or of their recording."""
    if precision != "tf32" or device.type != "cuda":
        yield
        return
    _set_products("tf32")
    try:
        yield
    finally:
        _set_products("ieee")


def switches() -> dict[str, Any]:
    """How they stand, for the summary."""
    return {
        "products": torch.backends.cuda.matmul.fp32_precision,
        "convolutions": _CUDNN.conv.fp32_precision,
        "deterministic": _CUDNN.deterministic,
    }


def _set_products(kind: Literal["ieee", "tf32"]) -> None:
    _CUDNN.allow_tf32 = kind == "tf32"  # the older name: torch refuses to read it where it disagrees
    torch.backends.cuda.matmul.fp32_precision = kind
    _CUDNN.conv.fp32_precision = kind
    _CUDNN.rnn.fp32_precision = kind
