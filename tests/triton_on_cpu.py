"""Modules of Triton kernels, which run on a CPU in tests by Triton's interpreter.

Triton reads the variable when it decorates a kernel, so it is set while the module is imported.
"""

import importlib
import os
from types import ModuleType
from unittest import mock


def interpreted(name: str) -> ModuleType:
    """Return the module `name` of fedsim.engine.graph with interpreted kernels."""
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
        importlib.import_module("triton.experimental.gluon")  # Triton imports it at the first call.
        importlib.import_module("fedsim.engine.graph.update_kernels")  # Step programs import it.
        return importlib.import_module(f"fedsim.engine.graph.{name}")
