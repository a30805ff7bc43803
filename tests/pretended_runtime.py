"""What torch.cuda says on a machine with a pretended device: its properties, events, streams and
pinned memory."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fedsim.engine.graph import recorder


class Runtime:
    """The state of pretended devices. `wait` is told what makes the host wait. `issued` counts the
    device's work as it is asked for, `completed` that which the host knows to be done because it
    has waited since. `capturing` is not empty while a graph is captured or replayed."""

    def __init__(self, wait: Callable[[str], None], memory: int, devices: int) -> None:
        self.wait, self.memory, self.devices = wait, memory, devices
        self.issued = self.completed = self.current = 0
        self.capturing = ""
        self._pinned: list[Any] = []

    def index_of(self, device: Any) -> int:
        """Raises RuntimeError, as torch does, if there is no such device."""
        index = device if device is None or isinstance(device, int) else torch.device(device).index
        if (index or 0) >= self.devices:
            raise RuntimeError(f"CUDA error: invalid device ordinal {index}")
        return self.current if index is None else index

    def set_device(self, device: object) -> None:
        self.current = self.index_of(device)

    def pin(self, tensor: Tensor) -> Tensor:
        self._pinned.append(
            tensor.untyped_storage()
        )  # kept, so that no other memory gets this address
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        if tensor.device.type != "cpu":
            return False
        address = tensor.untyped_storage().data_ptr()
        return any(storage.data_ptr() == address for storage in self._pinned)

    def stream(self, device: Any = None) -> Any:
        return SimpleNamespace(
            device=torch.device("cuda", self.index_of(device)), wait_stream=lambda other: None
        )

    def event(self, enable_timing: bool = False) -> "_Event":
        return _Event(self)


class _Event:
    """An event with a time; it has happened for the host once that has waited for the device
    since."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime, self.place, self.seconds = runtime, 0, 0.0

    def record(self, stream: Any = None) -> None:
        self.runtime.issued += 1
        self.place, self.seconds = self.runtime.issued, time.perf_counter()

    def query(self) -> bool:
        return self.runtime.completed >= self.place

    def synchronize(self) -> None:
        if not self.query():
            self.runtime.wait("event.synchronize")

    def elapsed_time(self, end: "_Event") -> float:
        if not end.query():
            raise RuntimeError("CUDA error: device not ready")
        return (end.seconds - self.seconds) * 1000


@contextmanager
def patched_runtime(runtime: Runtime) -> Iterator[None]:
    """torch.cuda speaks of `runtime`; autograd stays on its caller's thread; modules move by new
    parameters."""
    torch._C._ensureCUDADeviceGuardSet()  # so that autograd asks nothing of a driver
    default = runtime.stream()
    properties = SimpleNamespace(total_memory=runtime.memory, name="pretended", major=9, minor=0)

    def with_valid(value: Any) -> Callable[..., Any]:
        return lambda device=None: (runtime.index_of(device), value)[1]

    from tests.tape import TapeGraph, captured  # which knows the device that is entered

    replaced = {
        "CUDAGraph": TapeGraph,
        "graph": captured,
        "graph_pool_handle": lambda: (0, 0),
        "device": lambda device: nullcontext(),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: runtime.devices,
        "current_device": lambda: runtime.current,
        "is_bf16_supported": lambda *more, **named: True,
        "empty_cache": lambda: None,
        "set_device": runtime.set_device,
        "get_device_name": with_valid("pretended"),
        "get_device_properties": with_valid(properties),
        "synchronize": lambda device=None: runtime.wait("synchronize"),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "is_current_stream_capturing": lambda: bool(runtime.capturing),
        "Event": runtime.event,
        "Stream": runtime.stream,
        "stream": lambda stream: nullcontext(),
        "current_stream": lambda device=None: default,
    }
    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    with ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(
            mock.patch.object(recorder, "FIRST_WITH_OWN_WORKSPACES", "0")
        )  # whatever torch is there
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(
            True
        )  # torch.tensor makes them on the CPU and then copies them
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrites)
        yield
