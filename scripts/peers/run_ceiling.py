"""The machine's rate of matrix products in float32 and bfloat16, in operations a second."""

import json
import time

import torch

from scripts.peers.stopwatch import RESULT, parse_case

SIDE = 3072
SIDE_CUDA = 8192
FEWEST = 5
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
"""By fedsim's names of precisions."""


def matmul_rate(dtype: torch.dtype, seconds: float, side: int = SIDE, device: str = "cpu") -> float:
    """The best of several products of square matrices within `seconds` (`FEWEST` at least), after one to warm up."""
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    torch.mm(a, b)
    _wait(device)
    taken: list[float] = []
    while len(taken) < FEWEST or sum(taken) < seconds:
        start = time.perf_counter()
        torch.mm(a, b)
        _wait(device)
        taken.append(time.perf_counter() - start)
    return float(2 * side**3 / min(taken))


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def main() -> None:
    case = parse_case()
    torch.set_num_threads(case.threads)
    side = SIDE if case.device == "cpu" else SIDE_CUDA
    rates = {name: matmul_rate(dtype, case.seconds / 8, side, case.device) for name, dtype in DTYPES.items()}
    print(RESULT + json.dumps({"flops": rates}))


if __name__ == "__main__":
    main()
