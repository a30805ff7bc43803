"""One convolution of several clients, each with weights of its own: ways to compute it, timed."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsim.engine.device import passes_in
from fedsim.engine.graph.recorder import recorder_for
from scripts.benchmarks.gpu.workloads import Bench


def convolutions(bench: Bench) -> None:
    """Forward and backward of one layer of K clients: grouped, one by one, and as products of
    unfolded images."""
    layers = {
        "W2, second": (5, 50, 32, 64, 15),
        "W2, 16 lanes": (80, 50, 32, 64, 15),
        "ResNet-20, last": (10, 64, 64, 64, 8),
    }
    for name, (clients, batch, inputs, outputs, side) in layers.items():
        clients, batch = bench.size(clients, 2), bench.size(batch, 2)
        for precision in ("float32", "tf32", "bf16"):
            dtype = torch.bfloat16 if precision == "bf16" else torch.float32
            x = torch.randn(
                clients,
                batch,
                inputs,
                side,
                side,
                device=bench.device,
                dtype=dtype,
                requires_grad=True,
            )
            w = torch.randn(
                clients, outputs, inputs, 3, 3, device=bench.device, dtype=dtype, requires_grad=True
            )
            for how, forward in FORWARD.items():

                def step(
                    x: Tensor = x, w: Tensor = w, forward: Callable[..., Tensor] = forward
                ) -> None:
                    torch.autograd.grad(forward(x, w).sum(), (x, w))

                with passes_in("tf32" if precision == "tf32" else "float32", bench.device):
                    replay = recorder_for(bench.device).record(step, 5, lambda: None, 0)
                    bench.put(
                        "convolutions",
                        f"{name}, {precision}, {how}",
                        ms=bench.milliseconds(replay, 0.2) / 5,
                    )


def grouped(x: Tensor, w: Tensor) -> Tensor:
    clients, batch, inputs, side, _ = x.shape
    together = x.transpose(0, 1).reshape(batch, clients * inputs, side, side)
    return F.conv2d(together, w.reshape(-1, inputs, 3, 3), padding=1, groups=clients)


def unfolded(x: Tensor, w: Tensor) -> Tensor:
    clients, batch, inputs, side, _ = x.shape
    columns = F.unfold(x.reshape(-1, inputs, side, side), 3, padding=1).view(
        clients, batch, inputs * 9, -1
    )
    return torch.bmm(w.flatten(2), columns.transpose(1, 2).reshape(clients, inputs * 9, -1))


def one_by_one(
    x: Tensor, w: Tensor, layout: torch.memory_format = torch.contiguous_format
) -> Tensor:
    pairs = zip(x, w, strict=True)
    return torch.stack(
        [F.conv2d(a.contiguous(memory_format=layout), b, padding=1) for a, b in pairs]
    )


FORWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "grouped": grouped,
    "one by one": one_by_one,
    "one by one, channels last": lambda x, w: one_by_one(x, w, torch.channels_last),
    "unfolded": unfolded,
}
