"""Experiments from Python: what `fedsim` does on the command line, as functions (`import fedsim` has them, too)."""

from fedsim.api.experiments import StopRun, compose, run_experiment, run_sweep
from fedsim.api.results import RunFailedError, RunResult, SweepResult, load_runs
from fedsim.core.record import Record

__all__ = [
    "Record",
    "RunFailedError",
    "RunResult",
    "StopRun",
    "SweepResult",
    "compose",
    "load_runs",
    "run_experiment",
    "run_sweep",
]
