"""fedsim compares client selection methods of federated learning: accuracy, and its cost in bytes,
samples and seconds.

From Python, an experiment is composed of the words of the command line and run in this process:

    import fedsim

    result = fedsim.run_experiment(["selector=oort", "num_rounds=20"])
    runs = fedsim.load_runs("outputs/default")

These names are imported at their first use, because they import PyTorch.
"""

import os

# MKL, which computes PyTorch's products, then gives the same bits wherever numbers lie in memory.
# On some processors, runs in lanes would otherwise differ from the same runs alone.
os.environ.setdefault("MKL_CBWR", "AUTO")

TYPE_CHECKING = False  # `python -m fedsim` would import typing from the working folder
if TYPE_CHECKING:
    from typing import Any

    from fedsim.api.experiments import StopRun, compose, run_experiment, run_sweep
    from fedsim.api.finished_runs import (
        Report,
        load_ablations,
        load_report,
        load_rounds,
        load_runs,
    )
    from fedsim.api.results import RunFailedError, RunResult, SweepResult
    from fedsim.core.record import Record

__version__ = "0.1.0"
__all__ = [
    "Record",
    "Report",
    "RunFailedError",
    "RunResult",
    "StopRun",
    "SweepResult",
    "compose",
    "load_ablations",
    "load_report",
    "load_rounds",
    "load_runs",
    "run_experiment",
    "run_sweep",
]


def __getattr__(name: str) -> "Any":
    if name == "flower":  # a room of its own, which needs Flower
        from importlib import import_module

        return import_module("fedsim.flower")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fedsim.api import experiments, finished_runs, results

    names = vars(finished_runs) | vars(results) | vars(experiments)
    return names[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
