"""The functions of torch.cuda on a machine with a pretended device."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fedsim.engine.graph import backend, recorder


class Runtime:
    """The state of the pretended device.

    - `wait` is called with what makes the host wait.
    - `issued` counts the device's work, and `completed` the work that the host knows to be done
      because it has waited since.
    - `in_graph`: a graph is being captured or replayed.
    """

    def __init__(self, wait: Callable[[str], None], memory: int) -> None:
        self.wait = wait
        self.memory = memory
        self.issued = 0
        self.completed = 0
        self.in_graph = False
        self._pinned: list[Any] = []

    def pin(self, tensor: Tensor) -> Tensor:
        # Keep the storage, so that no other memory gets this address.
        self._pinned.append(tensor.untyped_storage())
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        if tensor.device.type != "cpu":
            return False
        address = tensor.untyped_storage().data_ptr()
        return any(storage.data_ptr() == address for storage in self._pinned)


class Event:
    """An event with a time. For the host it has happened once the host has waited since."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def record(self, stream: Any = None) -> None:
        self.runtime.issued += 1
        self.place, self.seconds = self.runtime.issued, time.perf_counter()

    def query(self) -> bool:
        return self.runtime.completed >= self.place

    def synchronize(self) -> None:
        if not self.query():
            self.runtime.wait("event.synchronize")

    def elapsed_time(self, end: "Event") -> float:
        assert end.query(), "device not ready"
        return (end.seconds - self.seconds) * 1000


@contextmanager
def patched_runtime(runtime: Runtime) -> Iterator[None]:
    """Make torch.cuda describe `runtime`.

    Autograd stays on its caller's thread, and modules move by new parameters.
    """
    from tests.tape import TapeGraph, captured  # It imports PretendedCard.

    torch._C._ensureCUDADeviceGuardSet()  # Autograd then asks nothing of a driver.
    stream = SimpleNamespace(wait_stream=lambda other: None)
    properties = SimpleNamespace(total_memory=runtime.memory, name="pretended", major=9, minor=0)
    replaced = {
        "CUDAGraph": TapeGraph,
        "graph": captured,
        "graph_pool_handle": lambda: (0, 0),
        "device": lambda device: nullcontext(),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "empty_cache": lambda: None,
        "set_device": lambda device: None,
        "get_device_name": lambda device=None: "pretended",
        "get_device_properties": lambda device=None: properties,
        "synchronize": lambda device=None: runtime.wait("synchronize"),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "is_current_stream_capturing": lambda: runtime.in_graph,
        "Event": lambda enable_timing=False: Event(runtime),
        "Stream": lambda device=None: SimpleNamespace(wait_stream=lambda other: None),
        "stream": lambda stream: nullcontext(),
        "current_stream": lambda device=None: stream,
    }
    future = torch.__future__
    with ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        # Whatever torch is installed:
        stack.enter_context(mock.patch.object(recorder, "FIRST_WITH_OWN_WORKSPACES", "0"))
        # vmap gives functions with rules of their own tensors that hold nothing here.
        stack.enter_context(mock.patch.object(backend, "STACKING_DEVICES", ()))
        stack.enter_context(mock.patch.object(backend, "can_run_triton", return_value=False))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        # torch.tensor makes tensors on the CPU and then copies them.
        stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        overwrites = future.get_overwrite_module_params_on_conversion()
        stack.callback(future.set_overwrite_module_params_on_conversion, overwrites)
        future.set_overwrite_module_params_on_conversion(True)
        yield
