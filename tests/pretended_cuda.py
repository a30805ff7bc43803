"""A pretended CUDA device, for tests without a GPU.

    with PretendedCard() as card:
        ...  # code with device=cuda; its results are the CPU's, to the last bit
    print(card.counts.launches.total(), card.counts.waits)

Its tensors say that they are on `cuda:0`, hold a CPU tensor, and compute with it. It rejects what
CUDA rejects: operations on tensors of two devices, `.numpy()`, and generators of the CPU. It counts
what makes the host wait, and rejects that while a graph is captured or replayed.

It has neither the numerics of cuBLAS and cuDNN nor autocast to bfloat16 nor concurrency. Tests of
these need a real GPU (`TEST_ON_GPU=1`, tests/test_cuda_path.py).
"""

import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

from tests.pretended_runtime import Runtime, patched_runtime

CUDA = torch.device("cuda", 0)
KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)
WITHOUT_KERNEL = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "_reshape_alias",
    "detach", "lift_fresh", "alias", "set_", "squeeze_", "unsqueeze_", "resize_", "record_stream", "split_with_sizes",
}  # fmt: skip
WITH_TWO_KERNELS = {"convolution_backward", "max_pool2d_with_indices_backward", "topk", "sort"}
WAITS = {
    "_local_scalar_dense", "nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive",
    "bincount", "equal", "is_nonzero", "_linalg_check_errors",
}  # fmt: skip
TO_HOST = {"_local_scalar_dense", "equal", "is_nonzero"}
COPIES = {"_to_copy", "copy_", "_copy_from"}


@dataclass
class Counts:
    """Counts of what the host does, by the names of operations.

    - `launches`: kernels, copies within the device, and graphs, which take one call each.
    - `waits`: operations after which the host waits until the device has finished.
    - `copied`: copies between host and device. They wait, unless they are non-blocking copies of
      pinned memory.
    - `in_graphs`: kernels in captured and replayed graphs, which are no launches.
    """

    launches: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    copied: Counter[str] = field(default_factory=Counter)
    in_graphs: Counter[str] = field(default_factory=Counter)

    def reset(self) -> None:
        for counter in vars(self).values():
            counter.clear()


class CardTensor(Tensor):
    """A tensor on the pretended device; `held` is the CPU tensor behind it."""

    held: Tensor
    device = CUDA  # type: ignore[assignment]
    is_cuda = True  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> "CardTensor":
        self = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device="meta",  # to C++: autograd would ask a driver about a device of CUDA
            _extra_dispatch_keys=KEYS,
        )
        self.held = held
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copied = CardTensor(self.held.detach().clone()).requires_grad_(self.requires_grad)
            if isinstance(self, torch.nn.Parameter):
                copied._is_param = True  # torch.nn.Parameter sets it on tensors of other classes.
            memo[id(self)] = copied
        return memo[id(self)]

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"CardTensor({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return PretendedCard.present().compute(func, args, kwargs or {})


def held(tensor: Tensor) -> Tensor:
    """Return the CPU tensor behind a tensor of the pretended device, or a CPU tensor itself."""
    return tensor.held if isinstance(tensor, CardTensor) else tensor


class PretendedCard(TorchDispatchMode):
    """While it is entered, there is one pretended CUDA device with `memory` bytes.

    `on_operation` is called with each operation's name and arguments before it is computed.
    """

    entered: ClassVar["PretendedCard | None"] = None

    def __init__(
        self,
        *,
        memory: int = 80 * 10**9,
        on_operation: Callable[[str, tuple[Any, ...]], None] | None = None,
    ) -> None:
        super().__init__()
        self.counts = Counts()
        self.runtime = Runtime(self.wait, memory)
        self._on_operation = on_operation
        self._in_graph = False
        self._functions = Functions()
        self._stack = ExitStack()

    @classmethod
    def present(cls) -> "PretendedCard":
        assert cls.entered is not None, "a tensor of the pretended device outlives it"
        return cls.entered

    def __enter__(self) -> "PretendedCard":
        assert PretendedCard.entered is None, "one pretended device at a time"
        self._stack.enter_context(patched_runtime(self.runtime))
        self._stack.enter_context(self._functions)
        PretendedCard.entered = self
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        PretendedCard.entered = None
        self._stack.close()

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture a graph: kernels are no launches, and what waits raises."""
        assert not self._in_graph, "a graph within a graph"
        self._in_graph = self.runtime.in_graph = True
        try:
            yield
        finally:
            self._in_graph = self.runtime.in_graph = False

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Replay a graph, as one launch."""
        self.counts.launches["graph replay"] += 1
        with self.capture():
            yield

    def wait(self, name: str) -> None:
        if self._in_graph:
            raise RuntimeError(f"{name}: operation not permitted when stream is capturing")
        self.counts.waits[name] += 1
        self.runtime.completed = self.runtime.issued

    def _launch(self, name: str) -> None:
        counter = self.counts.in_graphs if self._in_graph else self.counts.launches
        counter[name] += 2 if name in WITH_TWO_KERNELS else 1
        self.runtime.issued += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.compute(func, args, kwargs or {})

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute an operation on the CPU tensors, and count it."""
        name = func._schema.name.partition("::")[2]
        if self._on_operation is not None:
            self._on_operation(name, args)
        # 1. Pinned memory and copies
        if name == "is_pinned":
            return self.runtime.is_pinned(args[0])
        if name in ("_pin_memory", "pin_memory"):
            return self.runtime.pin(args[0].clone())
        if kwargs.get("pin_memory"):
            return self.runtime.pin(func(*args, **(kwargs | {"pin_memory": False})))
        if name in COPIES and isinstance(args[0], Tensor):  # and not a number, as in torch.func
            return self._copy(func, name, args, kwargs)
        # 2. Operations without a tensor of the device
        values, spec = pytree.tree_flatten((args, kwargs))
        on_card = any(isinstance(value, CardTensor) for value in values)
        device = self._device_of(kwargs)
        if not on_card and (device is None or device.type != "cuda"):
            return func(*args, **kwargs)
        # 3. Operations on the device
        self._reject_other_devices(name, values)
        self._count(func, name, values)
        plain_args, plain_kwargs = pytree.tree_unflatten([_plain(value) for value in values], spec)
        if device is not None:
            plain_kwargs["device"] = "cpu" if device.type == "cuda" else device
        with torch._C._DisableTorchDispatch():
            out = func(*plain_args, **plain_kwargs)
        if name in TO_HOST:
            return out
        return return_and_correct_aliasing(
            func, args, kwargs, pytree.tree_map_only(Tensor, CardTensor, out)
        )

    def _count(self, func: Any, name: str, values: list[Any]) -> None:
        repeats_by_tensor = func in (
            torch.ops.aten.repeat_interleave.Tensor,
            torch.ops.aten.repeat_interleave.self_Tensor,
        )
        indexes_by_mask = name.startswith("index") and any(
            isinstance(value, Tensor) and value.dtype in (torch.bool, torch.uint8)
            for value in values[1:]
        )
        if name in WAITS or indexes_by_mask or repeats_by_tensor:
            self.wait(name)
        if not is_view(func) and name not in WITHOUT_KERNEL | TO_HOST:
            self._launch(name)

    def _reject_other_devices(self, name: str, values: list[Any]) -> None:
        for value in values:
            if isinstance(value, torch.Generator) and value.device.type != "cuda":
                raise RuntimeError(f"{name}: Expected a 'cuda' device type for generator")
            if not isinstance(value, Tensor) or isinstance(value, CardTensor):
                continue
            is_index = value.dtype in (torch.int64, torch.bool)
            if name.startswith("index") and name != "index_select" and is_index:
                # torch copies an index of the host to the device, and waits.
                self.counts.copied["index from the host"] += 1
                self.wait("index from the host")
            elif value.dim():
                raise RuntimeError(
                    f"{name}: Expected all tensors to be on the same device, but found {CUDA} and "
                    f"{value.device}"
                )

    def _device_of(self, kwargs: dict[str, Any]) -> torch.device | None:
        """Return the device that an operation is asked for.

        Code in C++ that asks for the device of a tensor of the card asks for `meta`.
        """
        if kwargs.get("device") is None:
            return None
        device = torch.device(kwargs["device"])
        if device.type == "meta" and (not self._functions.asks_for_meta or in_transform()):
            return CUDA
        return device

    def _copy(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "_to_copy":
            source, target = args[0].device, self._device_of(kwargs) or args[0].device
            host_tensor = args[0]
        else:
            source, target = args[1].device, args[0].device
            host_tensor = args[1] if source.type == "cpu" else args[0]
        non_blocking = bool(kwargs.get("non_blocking") or args[2:3] == (True,))
        self._count_copy(source, target, non_blocking and self.runtime.is_pinned(host_tensor))
        with torch._C._DisableTorchDispatch():
            values = [_plain(value) for value in args]
            out = func(*values, **{key: v for key, v in kwargs.items() if key != "device"})
        if name != "_to_copy":
            return args[0]
        if target.type == "meta":
            return out.to("meta")
        return CardTensor(out) if target.type == "cuda" else out

    def _count_copy(self, source: torch.device, target: torch.device, no_wait: bool) -> None:
        kinds = source.type, target.type
        if "cuda" not in kinds:
            return
        if kinds == ("cuda", "cuda"):
            self._launch("copy")
            return
        name = "copy to the device" if target.type == "cuda" else "copy to the host"
        if self._in_graph and no_wait:
            self._launch(name)
            return
        self.counts.copied[name] += 1
        if not no_wait:
            self.wait(name)


class Functions(TorchFunctionMode):
    """Notes whether the running function is asked for `meta`, the device that C++ sees.

    It also makes tensors of lists, which C++ would leave uninitialised.
    """

    asks_for_meta = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.new_tensor and args[0].is_cuda:
            options = {"dtype": args[0].dtype, "device": CUDA} | kwargs
            return torch.tensor(args[1], **options)
        if func in (Tensor.__getitem__, Tensor.__setitem__) and args[0].is_cuda:
            args = (args[0], _without_lists(args[1]), *args[2:])
        before = self.asks_for_meta
        device = kwargs.get("device")
        self.asks_for_meta = device is not None and torch.device(device).type == "meta"
        try:
            return func(*args, **kwargs)
        finally:
            self.asks_for_meta = before


def _without_lists(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(_without_lists(part) for part in index)
    return torch.tensor(index, device=CUDA) if isinstance(index, list) else index


def in_transform() -> bool:
    """Return whether torch.func transforms a function. A tensor's device then reads `meta`."""
    frames = traceback.walk_stack(sys._getframe())
    return any("_functorch" in frame.f_code.co_filename for frame, _ in frames)


def is_view(func: Any) -> bool:
    """Return whether an operation returns a view of its input."""
    aliases = [result.alias_info for result in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _plain(value: Any) -> Any:
    return value.held if isinstance(value, CardTensor) else value
