"""How much fits into a device's memory: stacked models while they train, and samples in one pass of one model."""

import copy
import os

import torch
from torch import Tensor, nn

MEMORY_SHARE = 0.2
"""Share of the device's memory that the stacked models of one chunk may take with `chunk_size: auto`, and a pass."""
COPIES = 6
"""A model's size counts so often while it trains: parameters, gradients, optimiser state and results."""
PASSES = 2
"""Outputs of layers count so often: what functions without a layer keep, and gradients, take as much again."""


def device_memory(device: torch.device) -> int:
    """Bytes of the whole memory, and not of what is free, so that a run on the same machine is always cut alike."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch could not allocate memory; for a CPU it has no class of error."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def rows_that_fit(model: nn.Module, device: torch.device, activations: int = 0) -> int:
    """Clients that fit into a share of the memory; `activations`: bytes of the outputs of one client's layers."""
    row = COPIES * model_bytes(model) + PASSES * activations
    return max(1, int(device_memory(device) * MEMORY_SHARE / max(row, 1)))


def samples_that_fit(activations: int, device: torch.device, least: int) -> int:
    """Samples in one forward pass, `activations` bytes each: at least `least`."""
    return max(least, int(device_memory(device) * MEMORY_SHARE / max(PASSES * activations, 1)))


def model_bytes(model: nn.Module) -> int:
    """Of the parameters that are trained."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def activation_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes of the outputs of all layers for one sample of `x` [n, ...], and of the sample; 0 without samples."""
    if not len(x):
        return 0
    found = [x[0].numel() * x.element_size()]
    probe = copy.deepcopy(model).to(x.device).eval()
    for layer in probe.modules():
        if not list(layer.children()):
            layer.register_forward_hook(lambda layer, given, output: found.append(_bytes(output)))
    with torch.no_grad():
        probe(x[:1])
    return sum(found)


def _bytes(output: object) -> int:
    return output.numel() * output.element_size() if isinstance(output, Tensor) else 0
