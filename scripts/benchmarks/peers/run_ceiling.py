"""The machine's rate of matrix products, in operations per second: the ceiling of the speed race.

On a CPU the float32 rate is the better of torch.mm, which calls MKL, and oneDNN, which can be twice
as fast (docs/performance.md). The bfloat16 rate is measured if the processor has units for it.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from scripts.benchmarks.peers.stopwatch import parse_case
from scripts.benchmarks.processes import print_result

SIDE_CPU = 3072
SIDE_GPU = 8192
MIN_PRODUCTS = 5
MAX_SECONDS = 30.0
"""Seconds after which fewer than `MIN_PRODUCTS` are enough."""

Product = Callable[[Tensor, Tensor], Tensor]


def rates_of(seconds: float, device: str) -> dict[str, float]:
    """Return the rates by the names that fedsim gives to precisions."""
    by_mm = product_rate(torch.mm, torch.float32, seconds, device)
    rates = {"float32": by_mm, "float32 by torch.mm": by_mm}
    if device == "cpu" and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        by_onednn = product_rate(onednn_product, torch.float32, seconds, device)
        rates["float32"] = max(by_mm, by_onednn)
    if has_bfloat16_units(device):
        rates["bf16"] = product_rate(torch.mm, torch.bfloat16, seconds, device)
    return rates


def has_bfloat16_units(device: str) -> bool:
    """Return whether the device has units for bfloat16. Without them a product takes a minute."""
    if device != "cpu":
        return True
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def onednn_product(a: Tensor, b: Tensor) -> Tensor:
    """Return oneDNN's product, by the name that torch.compile calls."""
    return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")


def product_rate(product: Product, dtype: torch.dtype, seconds: float, device: str) -> float:
    """Return the best rate of several products of square matrices within `seconds`."""
    side = SIDE_CPU if device == "cpu" else SIDE_GPU
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    times: list[float] = []
    product(a, b)
    _wait(device)
    while sum(times) < seconds or (len(times) < MIN_PRODUCTS and sum(times) < MAX_SECONDS):
        start = time.perf_counter()
        product(a, b)
        _wait(device)
        times.append(time.perf_counter() - start)
    return 2 * side**3 / min(times)


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def main() -> None:
    case = parse_case()
    torch.set_num_threads(case.threads)
    print_result({"flops": rates_of(case.seconds / 8, case.device)})


if __name__ == "__main__":
    main()
