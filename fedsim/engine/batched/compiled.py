"""torch.compile for runs that are long enough to pay for it; where compiling fails, the plain function."""

import functools
import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
from rich.console import Console

from fedsim.engine.memory import is_out_of_memory

Compile = Literal["auto"] | bool
"""conf/engine: `true`, `false`, or `auto`, which is true for models and runs that are worth it."""

WORTH_STEPS = 10_000
"""Local steps of a run, one client's, from which on compiling pays: it takes some 10 s, and saves 1 to 3 ms a step
(docs/performance.md)."""


def worth_compiling(choice: Compile, num_steps: int, enough: int = WORTH_STEPS) -> bool:
    """Whether to compile for a run with so many local steps. A fixed rule, so that a repeated run is the same run."""
    return num_steps >= enough if choice == "auto" else choice


class Compiled:
    """A function that is compiled at its first call. Where that fails, it is called uncompiled from then on, and a
    warning is printed.

    The function must not change its arguments, because a call that fails is repeated. torch keeps compiled code on
    disk for later runs.
    """

    def __init__(self, plain: Callable[..., Any]) -> None:
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns that there is no GPU
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
