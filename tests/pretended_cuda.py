"""A pretended CUDA device, for tests without a GPU: tensors that say `cuda:0`, hold a CPU tensor
and compute on it.

    with PretendedCard() as card:
        ...                                  # code with device=cuda; its results are the CPU's, to the last bit
    print(card.counts.table("launches"))     # what the host would have done, by line of fedsim

What CUDA refuses is refused: operations on tensors of two devices, `.numpy()`, generators of the
CPU. What makes the host wait is counted (`Counts`), and refused while a graph is captured or
replayed.

It has neither the numerics of cuBLAS and cuDNN nor autocast to bfloat16, and no concurrency: work
of all streams is done in the order of the calls. Generators of the device draw from torch's global
one.
"""

import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

import fedsim
from tests.pretended_runtime import Runtime, patched_runtime

PACKAGE = f"{Path(fedsim.__file__).parent}/"

Line = tuple[str, str]
"""Where (`engine/engine.py:75`, of the innermost frame in fedsim), and what (an operation's
name)."""

SEVERAL_KERNELS = {
    "convolution_backward": 2,
    "max_pool2d_with_indices_backward": 2,
    "topk": 2,
    "sort": 2,
    "argsort": 2,
}
"""Operations that CUDA runs as more than one kernel: lower bounds, without what cuDNN adds to
change layouts."""


@dataclass
class Counts:
    """`launches`: kernels, copies within the device, and graphs, each of which the host starts by
    one call. `waits`: what makes the host wait until the device has caught up. `copied`: copies
    between host and device, which are waits too unless they are of pinned memory and not blocking.
    `captured` and `replayed`: kernels recorded into graphs, and run by graphs' replays, which cost
    the host one launch each."""

    launches: Counter[Line] = field(default_factory=Counter)
    waits: Counter[Line] = field(default_factory=Counter)
    copied: Counter[Line] = field(default_factory=Counter)
    captured: Counter[Line] = field(default_factory=Counter)
    replayed: Counter[Line] = field(default_factory=Counter)

    def reset(self) -> None:
        for counter in vars(self).values():
            counter.clear()

    def totals(self) -> dict[str, int]:
        return {name: counter.total() for name, counter in vars(self).items()}

    def table(self, name: str, most: int = 60) -> str:
        """One counter, largest numbers first."""
        counter: Counter[Line] = getattr(self, name)
        return "\n".join(
            f"{n:7d}  {where:44s} {what}" for (where, what), n in counter.most_common(most)
        )


def calling_line() -> str:
    """The innermost line of fedsim that is being executed, `?` if there is none."""
    places = ((f.f_code.co_filename, number) for f, number in traceback.walk_stack(sys._getframe()))
    return next(
        (f"{file.removeprefix(PACKAGE)}:{n}" for file, n in places if file.startswith(PACKAGE)), "?"
    )


class Functions(TorchFunctionMode):
    """To C++, the tensors are on `meta`, which autograd needs no driver for. Notes whether a
    function is asked for a tensor on `meta`; makes tensors of lists where C++ would leave them
    uninitialised."""

    asks_for_meta = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.new_tensor and args[0].is_cuda:
            return torch.tensor(
                args[1], device=args[0].device, **{"dtype": args[0].dtype, **kwargs}
            )
        if func in (Tensor.__getitem__, Tensor.__setitem__) and args[0].is_cuda:
            args = (args[0], _without_lists(args[1], args[0].device), *args[2:])
        before, asked = self.asks_for_meta, kwargs.get("device")
        self.asks_for_meta = asked is not None and torch.device(asked).type == "meta"
        try:
            return func(*args, **kwargs)
        finally:
            self.asks_for_meta = before


def _without_lists(index: Any, device: torch.device) -> Any:
    if isinstance(index, tuple):
        return tuple(_without_lists(part, device) for part in index)
    return torch.tensor(index, device=device) if isinstance(index, list) else index


def in_transform() -> bool:
    """Whether a transform of torch.func is running, within which a tensor's own device reads
    `meta`."""
    return any(
        "_functorch" in frame.f_code.co_filename
        for frame, _ in traceback.walk_stack(sys._getframe())
    )


_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)
_NO_KERNEL = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "_reshape_alias",
    "detach", "lift_fresh", "alias", "set_", "squeeze_", "unsqueeze_", "resize_", "record_stream", "split_with_sizes",
}  # fmt: skip
WAITS = {
    "_local_scalar_dense", "nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive",
    "bincount", "equal", "is_nonzero", "_linalg_check_errors",
}  # fmt: skip
_TO_HOST = {"_local_scalar_dense", "equal", "is_nonzero"}
_COPIES = {"_to_copy", "copy_", "_copy_from"}


class CardTensor(Tensor):
    """A tensor on the pretended device `device`; `held` is the CPU tensor behind it."""

    held: Tensor
    _index: int
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor, index: int = 0) -> "CardTensor":
        self = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device="meta",  # to C++: autograd would ask a driver about a device of CUDA
            _extra_dispatch_keys=_KEYS,
        )
        self.held, self._index = held, index
        return self

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self._index)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            new = CardTensor(self.held.detach().clone(), self._index).requires_grad_(
                self.requires_grad
            )
            if isinstance(self, torch.nn.Parameter):
                new._is_param = True  # what torch.nn.Parameter sets on tensors of other classes
            memo[id(self)] = new
        return memo[id(self)]

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"CardTensor({self.held!r}, device='{self.device}')"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return PretendedCard.present().compute(func, args, kwargs or {})


def held(tensor: Tensor) -> Tensor:
    """The CPU tensor behind a tensor of the pretended device; a CPU tensor itself. Not counted."""
    return tensor.held if isinstance(tensor, CardTensor) else tensor


class PretendedCard(TorchDispatchMode):
    """While it is entered, `cuda` and `cuda:<n>` are pretended devices (`devices` of them) with
    `memory` bytes each.

    `refuses`: called with an operation's name and arguments before it is computed; may raise, such
    as `torch.OutOfMemoryError`.
    """

    _entered: ClassVar["PretendedCard | None"] = None

    def __init__(
        self,
        *,
        memory: int = 80 * 10**9,
        devices: int = 1,
        refuses: Callable[[str, tuple[Any, ...]], None] | None = None,
    ) -> None:
        super().__init__()
        self.counts = Counts()
        self.runtime = Runtime(self.wait, memory, devices)
        self.refuses = refuses
        self._in_graph = ""  # "captured" or "replayed"
        self._functions = Functions()
        self._stack = ExitStack()

    @classmethod
    def present(cls) -> "PretendedCard":
        if cls._entered is None:
            raise RuntimeError(
                "a tensor of a pretended CUDA device is used outside of PretendedCard"
            )
        return cls._entered

    def __enter__(self) -> "PretendedCard":
        assert PretendedCard._entered is None, "one pretended device at a time"
        self._stack.enter_context(patched_runtime(self.runtime))
        self._stack.enter_context(self._functions)
        PretendedCard._entered = self
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        PretendedCard._entered = None
        self._stack.close()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """What is computed inside is captured into a graph: its kernels are no launches, and waits
        raise."""
        yield from self._inside_graph("captured")

    @contextmanager
    def replay(self) -> Iterator[None]:
        """What is computed inside is one replay of a graph: one launch, its kernels counted apart;
        waits raise."""
        self.counts.launches[calling_line(), "graph replay"] += 1
        yield from self._inside_graph("replayed")

    def _inside_graph(self, counter: str) -> Iterator[None]:
        assert not self._in_graph, "a graph within a graph"
        self._in_graph = self.runtime.capturing = counter
        try:
            yield
        finally:
            self._in_graph = self.runtime.capturing = ""

    def wait(self, what: str) -> None:
        if self._in_graph:
            raise RuntimeError(f"{what}: operation not permitted when stream is capturing")
        self.counts.waits[calling_line(), what] += 1
        self.runtime.completed = self.runtime.issued

    def _launch(self, name: str) -> None:
        counter = getattr(self.counts, self._in_graph or "launches")
        counter[calling_line(), name] += SEVERAL_KERNELS.get(name, 1)
        self.runtime.issued += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.compute(func, args, kwargs or {})

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func._schema.name.partition("::")[2]
        if self.refuses is not None:
            self.refuses(name, args)
        if kwargs.get("pin_memory") or name in ("is_pinned", "_pin_memory", "pin_memory"):
            return self._pinned(func, name, args, kwargs)
        if name in _COPIES and isinstance(
            args[0], Tensor
        ):  # and not a number, as in torch.func's rules
            return self._copy(func, name, args, kwargs)
        flat, spec = pytree.tree_flatten((args, kwargs))
        ours = [value for value in flat if isinstance(value, CardTensor)]
        asked = self._device_asked_for(kwargs)
        if not ours and (asked is None or asked.type != "cuda"):
            return func(*args, **kwargs)
        index = ours[0]._index if ours else self.runtime.index_of(asked)
        if asked is not None and asked.type == "cuda":
            index = self.runtime.index_of(asked)
        self._refuse_strangers(name, flat, index)
        plain_args, plain_kwargs = pytree.tree_unflatten([_plain(value) for value in flat], spec)
        if asked is not None:
            plain_kwargs["device"] = torch.device("cpu") if asked.type == "cuda" else asked
        self._count(func, name, flat)
        with torch._C._DisableTorchDispatch():
            out = func(*plain_args, **plain_kwargs)
        if name in _TO_HOST:
            return out
        wrapped = pytree.tree_map_only(Tensor, lambda t: CardTensor(t, index), out)
        return return_and_correct_aliasing(func, args, kwargs, wrapped)

    def _count(self, func: Any, name: str, flat: list[Any]) -> None:
        if (
            name in WAITS
            or (name.startswith("index") and _has_mask(flat))
            or _repeats_by_tensor(func)
        ):
            self.wait(name)
        is_view = any(
            r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
        )
        if not (is_view or name in _NO_KERNEL or name in _TO_HOST):
            self._launch(name)

    def _refuse_strangers(self, name: str, flat: list[Any], index: int) -> None:
        for value in flat:
            if isinstance(value, torch.Generator) and value.device.type != "cuda":
                raise RuntimeError(
                    f"{name}: Expected a 'cuda' device type for generator but found '{value.device}'"
                )
            if isinstance(value, CardTensor) and value._index != index and value.dim():
                raise RuntimeError(
                    f"{name}: Expected all tensors to be on one device: {value.device}, cuda:{index}"
                )
        strangers = [
            value
            for value in flat
            if isinstance(value, Tensor) and not isinstance(value, CardTensor)
        ]
        for stranger in strangers:
            if (
                name.startswith("index")
                and stranger.dtype in (torch.int64, torch.bool)
                and name != "index_select"
            ):
                self.counts.copied[calling_line(), "index from the host"] += (
                    1  # torch copies it, and waits
                )
                self.wait("index from the host")
            elif stranger.dim():
                device = f"cuda:{index} and {stranger.device}"
                raise RuntimeError(
                    f"{name}: Expected all tensors to be on the same device, but found {device}"
                )

    def _device_asked_for(self, kwargs: dict[str, Any]) -> torch.device | None:
        """The card where the operation's own code asks for the device of a tensor on it, which to
        C++ is `meta`."""
        device = None if kwargs.get("device") is None else torch.device(kwargs["device"])
        if (
            device is None
            or device.type != "meta"
            or (self._functions.asks_for_meta and not in_transform())
        ):
            return device
        return torch.device("cuda", 0)

    def _copy(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "_to_copy":
            source, asked = args[0], self._device_asked_for(kwargs)
            target_device = source.device if asked is None else asked
        else:
            source, target_device = args[1], args[0].device
        pinned = self.runtime.is_pinned(source if source.device.type == "cpu" else args[0])
        quietly = pinned and bool(kwargs.get("non_blocking") or args[2:3] == (True,))
        self._moved(source.device, target_device, quietly=quietly)
        plain = [_plain(value) for value in args]
        with torch._C._DisableTorchDispatch():
            out = func(*plain, **{k: v for k, v in kwargs.items() if k != "device"})
        if name != "_to_copy":
            return args[0]
        if target_device.type == "meta":
            return out.to("meta")
        return (
            CardTensor(out, self.runtime.index_of(target_device))
            if target_device.type == "cuda"
            else out
        )

    def _moved(self, before: torch.device, after: torch.device, *, quietly: bool) -> None:
        if before.type != "cuda" and after.type != "cuda":
            return
        if before.type == after.type:
            self._launch("copy")
            return
        what = "copy to the device" if after.type == "cuda" else "copy to the host"
        if self._in_graph and quietly:
            self._launch(what)
            return
        self.counts.copied[calling_line(), what] += 1
        if not quietly:
            self.wait(what)

    def _pinned(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "is_pinned":
            return self.runtime.is_pinned(args[0])
        if name in ("_pin_memory", "pin_memory"):
            return self.runtime.pin(args[0].clone())
        return self.runtime.pin(func(*args, **{**kwargs, "pin_memory": False}))


def _plain(value: Any) -> Any:
    return value.held if isinstance(value, CardTensor) else value


def _has_mask(flat: list[Any]) -> bool:
    return any(
        isinstance(value, Tensor) and value.dtype in (torch.bool, torch.uint8) for value in flat[1:]
    )


def _repeats_by_tensor(func: Any) -> bool:
    return func in (
        torch.ops.aten.repeat_interleave.Tensor,
        torch.ops.aten.repeat_interleave.self_Tensor,
    )
