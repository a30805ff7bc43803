"""The machine's rate of matrix products in float32, and in bfloat16 where it has units for it, in
operations a second.

In float32 on a CPU it is the better of torch.mm, which goes to MKL, and oneDNN, which can be twice
as fast (docs/performance.md).
"""

import json
import time
from collections.abc import Callable

import torch
from torch import Tensor

from scripts.benchmarks.peers.stopwatch import RESULT, parse_case

SIDE = 3072
SIDE_CUDA = 8192
FEWEST, LONGEST = 5, 30.0
"""Products of a rate, and seconds after which fewer are enough."""

Product = Callable[[Tensor, Tensor], Tensor]


def rates_of(seconds: float, device: str) -> dict[str, float]:
    """By fedsim's names of precisions, and what torch.mm reaches in float32."""
    side = SIDE if device == "cpu" else SIDE_CUDA
    rate = product_rate(torch.mm, torch.float32, seconds, side, device)
    best = max(
        [rate, *(product_rate(p, torch.float32, seconds, side, device) for p in _others(device))]
    )
    rates = {"float32": best, "float32 by torch.mm": rate}
    if has_bfloat16(device):
        rates["bf16"] = product_rate(torch.mm, torch.bfloat16, seconds, side, device)
    return rates


def has_bfloat16(device: str) -> bool:
    """Whether products in bfloat16 are computed by units of their own; else one takes more than a
    minute on a CPU."""
    return (
        device != "cpu"
        or torch.cpu._is_avx512_bf16_supported()
        or torch.cpu._is_amx_tile_supported()
    )


def _others(device: str) -> list[Product]:
    """oneDNN's product, by the name that torch.compile calls it, where this torch has it."""
    if device != "cpu" or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return []
    return [lambda a, b: torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")]


def product_rate(
    product: Product, dtype: torch.dtype, seconds: float, side: int = SIDE, device: str = "cpu"
) -> float:
    """The best of several products of square matrices within `seconds`, `FEWEST` at least where
    these end in time."""
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    product(a, b)
    _wait(device)
    taken: list[float] = []
    while sum(taken) < seconds or (len(taken) < FEWEST and sum(taken) < LONGEST):
        start = time.perf_counter()
        product(a, b)
        _wait(device)
        taken.append(time.perf_counter() - start)
    return float(2 * side**3 / min(taken))


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def main() -> None:
    case = parse_case()
    torch.set_num_threads(case.threads)
    print(RESULT + json.dumps({"flops": rates_of(case.seconds / 8, case.device)}))


if __name__ == "__main__":
    main()
