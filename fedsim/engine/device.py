"""What a device is asked for: compiled functions, the precision of its passes, and how much fits
into its memory.

Parameters, updates and losses are float32 always. What torch computes in on a GPU depends on
switches of the whole process, which every backend that computes with torch sets here: outside of
passes, products are those of float32.
"""

import copy
import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from rich.console import Console
from torch import Tensor, nn

from fedsim.core.disk import memory_of_machine
from fedsim.core.errors import Problem, rule

Compile = Literal["auto"] | bool
WORTH_STEPS = 10_000
"""Local steps of a run, one client's, from which on compiling pays: it takes some 10 s, and saves 1
to 3 ms a step (docs/performance.md)."""


def worth_compiling(choice: Compile, num_steps: int, enough: int = WORTH_STEPS) -> bool:
    """Whether to compile for a run with so many local steps. A fixed rule, so that a repeated run
    is the same run."""
    return num_steps >= enough if choice == "auto" else choice


class Compiled:
    """A function that is compiled at its first call. Where that fails, it is called uncompiled from
    then on, and a warning is printed. It must not change its arguments, because a call that fails
    is repeated."""

    def __init__(self, plain: Callable[..., Any]) -> None:
        logging.getLogger("torch.utils.cpp_extension").setLevel(
            logging.ERROR
        )  # it warns that there is no GPU
        self._plain = plain
        self._fast = torch.compile(plain)
        self.failure: str | None = None

    def __call__(self, *args: Any) -> Any:
        if self.failure is None:
            try:
                return self._fast(*args)
            except Exception as error:  # tracer, code generator or a missing compiler
                if is_out_of_memory(error):
                    raise
                lines = str(error).strip().splitlines() or [type(error).__name__]
                self.failure = lines[0][:200]
                warn_not_compiled(self.failure)
        return self._plain(*args)


@functools.cache
def warn_not_compiled(failure: str) -> None:
    """Print the reason to stderr, once a process however many functions fail for it."""
    tell(f"engine.compile: not compiled, which is slower and else the same: {failure}")


def tell(text: str) -> None:
    """Print one line to stderr, about something that changes how a run computes and not what."""
    Console(stderr=True).print(text, soft_wrap=True, markup=False)


Precision = Literal["float32", "tf32", "bf16"]
"""`tf32`: products and convolutions of tensors rounded to 10 bits behind the point, summed in
float32 (a GPU's tensor cores). `bf16`: the same in bfloat16 (torch.autocast)."""

_CUDNN: Any = torch.backends.cudnn


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """The context of a forward pass."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def precision_problem(precision: Precision, device: torch.device) -> Problem | None:
    """TF32 is refused on a CPU, whose results would pass for those of a GPU's."""
    possible = precision != "tf32" or device.type == "cuda"
    return rule(
        possible, "precision", precision, "needs a CUDA GPU", "use engine.precision=float32"
    )


def prepare(device: torch.device, deterministic: bool | None) -> None:
    """Set the switches of a GPU for what is computed outside of passes. `deterministic`: cuDNN
    takes only algorithms that add in the same order every time (None: yes)."""
    if device.type == "cuda":
        _set_products("ieee")
        _CUDNN.deterministic = deterministic is not False
        _CUDNN.benchmark = False  # which would choose an algorithm by its time


def passes_in(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
    """The context of forward and backward passes, or of their recording; may be entered again, not
    inside itself."""
    return _Tf32() if precision == "tf32" and device.type == "cuda" else nullcontext()


class _Tf32(AbstractContextManager[None]):
    def __enter__(self) -> None:
        _set_products("tf32")

    def __exit__(self, *error: object) -> None:
        _set_products("ieee")


def switches() -> dict[str, Any]:
    return {
        "products": torch.backends.cuda.matmul.fp32_precision,
        "convolutions": _CUDNN.conv.fp32_precision,
        "deterministic": _CUDNN.deterministic,
    }


def _set_products(kind: Literal["ieee", "tf32"]) -> None:
    _CUDNN.allow_tf32 = (
        kind == "tf32"
    )  # the older name: torch refuses to read it where it disagrees
    torch.backends.cuda.matmul.fp32_precision = kind
    _CUDNN.conv.fp32_precision = kind
    _CUDNN.rnn.fp32_precision = kind


MEMORY_SHARE = 0.2
"""Share of the device's memory that the stacked models of one chunk may take with `chunk_size:
auto`, and a pass."""
COPIES = 6
"""A model's size counts so often while it trains: parameters, gradients, optimiser state and
results."""
PASSES = 2
"""Outputs of layers count so often: what functions without a layer keep, and gradients, take as
much again."""


def device_memory(device: torch.device) -> int:
    """Bytes of the whole memory, and not of what is free, so that a run on the same machine is
    always cut alike."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return memory_of_machine()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether there was no memory left; torch has no class of error for that on a CPU."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(
        error
    )


def rows_that_fit(model: nn.Module, device: torch.device, activations: int = 0) -> int:
    """Clients that fit into a share of the memory; `activations`: bytes of the outputs of one
    client's layers."""
    row = COPIES * model_bytes(model) + PASSES * activations
    return max(1, int(device_memory(device) * MEMORY_SHARE / max(row, 1)))


def samples_that_fit(activations: int, device: torch.device, least: int) -> int:
    """Samples in one forward pass, `activations` bytes each: at least `least`."""
    return max(least, int(device_memory(device) * MEMORY_SHARE / max(PASSES * activations, 1)))


def model_bytes(model: nn.Module) -> int:
    """Of the parameters that are trained."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def activation_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes of the outputs of all layers for one sample of `x` [n, ...], and of the sample; 0
    without samples."""
    if not len(x):
        return 0
    found = [x[0].nbytes]

    def count(layer: nn.Module, given: Any, output: object) -> None:
        found.append(output.nbytes if isinstance(output, Tensor) else 0)

    probe = copy.deepcopy(model).to(x.device).eval()
    for layer in probe.modules():
        if not list(layer.children()):
            layer.register_forward_hook(count)
    with torch.no_grad():
        probe(x[:1])
    return sum(found)
