"""Modules of Triton kernels, which run on a CPU in tests by Triton's interpreter.

Triton reads TRITON_INTERPRET, which conftest.py sets, when it decorates a kernel.
"""

import importlib
from types import ModuleType


def interpreted(name: str) -> ModuleType:
    """Return the module `name` of fedsim.engine.graph with interpreted kernels."""
    return importlib.import_module(f"fedsim.engine.graph.{name}")
