"""Helpers whose work depends on the device: compiled functions, precision, and how much fits into
the memory.

Backends that compute with PyTorch use these functions.
"""

import copy
import functools
import importlib.util
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from rich.console import Console
from torch import Tensor, nn

from fedsim.core.disk import memory_of_machine
from fedsim.core.errors import Problem, rule


def tell(text: str) -> None:
    """Print a line to stderr, about something that changes how fedsim computes, but not what."""
    Console(stderr=True).print(text, soft_wrap=True, markup=False)


# --- compiled functions ---------------------------------------------------------------------------

Compile = Literal["auto"] | bool
WORTH_STEPS = 10_000
"""Smallest number of a client's local steps in a run for which compiling by torch pays. It takes
some 10 s, and saves 1 to 3 ms a step (docs/performance.md)."""


def worth_compiling(choice: Compile, num_steps: int, min_steps: int = WORTH_STEPS) -> bool:
    """Return whether to compile for a run in which a client makes `num_steps` local steps.

    `auto` is a fixed rule, so that a repeated run computes the same.
    """
    return num_steps >= min_steps if choice == "auto" else choice


class Compiled:
    """A function that torch compiles at its first call.

    If compiling fails, the function runs as it is from then on, `failure` is the reason, and a
    warning is printed. The function must not change its arguments, because the call is repeated.
    """

    def __init__(self, plain: Callable[..., Any]) -> None:
        # torch's logger warns that there is no GPU.
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        self._plain = plain
        self._fast = torch.compile(plain)
        self.failure: str | None = None

    def __call__(self, *args: Any) -> Any:
        if self.failure is None:
            try:
                return self._fast(*args)
            # The tracer or the code generator may fail in any way, or there is no compiler.
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                text = str(error).strip() or type(error).__name__
                self.failure = text.splitlines()[0][:200]
                warn_not_compiled(self.failure)
        return self._plain(*args)


@functools.cache
def warn_not_compiled(failure: str) -> None:
    """Print why a function is not compiled. The cache prints each reason once in a process."""
    tell(f"engine.compile: not compiled (slower, same results): {failure}")


def can_run_triton(device: torch.device) -> bool:
    """Return whether the device is a GPU on which Triton computes products in tf32."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return torch.version.hip is None and torch.cuda.get_device_properties(device).major >= 8


# --- precision ------------------------------------------------------------------------------------

Precision = Literal["float32", "tf32", "bf16"]
"""Precision of products and convolutions. `tf32` rounds their inputs to 10 bits after the point and
adds in float32 (a GPU's tensor cores). `bf16` uses bfloat16 (torch.autocast). Parameters, updates
and losses are always float32."""

_CUDNN: Any = torch.backends.cudnn


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return the context of a forward pass: for `bf16` that of torch.autocast."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def precision_problem(precision: Precision, device: torch.device) -> Problem | None:
    """Return the problem of TF32 on a CPU, otherwise None.

    A CPU would compute in float32, and the run's record would say TF32.
    """
    possible = precision != "tf32" or device.type == "cuda"
    remedy = "use engine.precision=float32"
    return rule(possible, "precision", precision, "needs a CUDA GPU", remedy)


def prepare(device: torch.device, deterministic: bool | None) -> None:
    """Set torch's switches of this process for a GPU: all products are in full float32.

    `deterministic` (None means True): cuDNN uses only algorithms that always add in the same order.
    """
    if device.type == "cuda":
        _set_products("ieee")
        _CUDNN.deterministic = deterministic is not False
        _CUDNN.benchmark = False  # It would choose an algorithm by its time.


def precision_context(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
    """Return the context of forward and backward passes, or of their recording.

    For `tf32` on a GPU, it switches products to TF32, and back to full float32 in the end. It may
    be entered again, but not inside itself.
    """
    return _Tf32() if precision == "tf32" and device.type == "cuda" else nullcontext()


class _Tf32(AbstractContextManager[None]):
    def __enter__(self) -> None:
        _set_products("tf32")

    def __exit__(self, *error: object) -> None:
        _set_products("ieee")


def switches() -> dict[str, Any]:
    """Return how torch's switches for a GPU are set, for the summary of a run."""
    return {
        "products": torch.backends.cuda.matmul.fp32_precision,
        "convolutions": _CUDNN.conv.fp32_precision,
        "deterministic": _CUDNN.deterministic,
    }


def _set_products(kind: Literal["ieee", "tf32"]) -> None:
    _CUDNN.allow_tf32 = kind == "tf32"  # The older name; torch rejects reading it if they disagree.
    torch.backends.cuda.matmul.fp32_precision = kind
    _CUDNN.conv.fp32_precision = kind
    _CUDNN.rnn.fp32_precision = kind


# --- memory ---------------------------------------------------------------------------------------

MEMORY_SHARE = 0.2
"""Share of the device's memory for the clients that train at once (`chunk_size: auto`), and for the
samples of a forward pass."""
MODEL_COPIES = 6
"""Memory of a model in training, as a multiple of its size: for parameters, gradients, optimiser
state and results."""
ACTIVATION_COPIES = 2
"""Memory of the activations, as a multiple of the size of all layers' outputs. Functions that are
no layers, and gradients, take about as much as the layers."""


def device_memory(device: torch.device) -> int:
    """Return the bytes of the device's whole memory, free or not.

    A run on one machine is then always cut the same way.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return memory_of_machine()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether there was no memory left; torch has no class of error for that on a CPU."""
    no_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return no_memory or "DefaultCPUAllocator" in str(error)


def clients_that_fit(model: nn.Module, device: torch.device, activations: int = 0) -> int:
    """Return how many clients can train at once, at least 1.

    `activations` is the size of the outputs of one client's layers in bytes.
    """
    client_bytes = MODEL_COPIES * model_bytes(model) + ACTIVATION_COPIES * activations
    return max(1, int(device_memory(device) * MEMORY_SHARE / max(client_bytes, 1)))


def samples_that_fit(activations: int, device: torch.device, minimum: int) -> int:
    """Return how many samples fit into one forward pass, with `activations` bytes each."""
    sample_bytes = max(ACTIVATION_COPIES * activations, 1)
    return max(minimum, int(device_memory(device) * MEMORY_SHARE / sample_bytes))


def model_bytes(model: nn.Module) -> int:
    """Return the size of the trained parameters in bytes."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def activation_bytes(model: nn.Module, x: Tensor) -> int:
    """Return the bytes of one sample of `x` [n, ...] and the outputs of all layers for it.

    Without samples it is 0.
    """
    if not len(x):
        return 0
    sizes = [x[0].nbytes]

    def note_size(layer: nn.Module, inputs: Any, output: object) -> None:
        if isinstance(output, Tensor):
            sizes.append(output.nbytes)

    copied = copy.deepcopy(model).to(x.device).eval()
    for layer in copied.modules():
        if not list(layer.children()):
            layer.register_forward_hook(note_size)
    with torch.no_grad():
        copied(x[:1])
    return sum(sizes)
