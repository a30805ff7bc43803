"""Local optimisers over stacked parameters and learning-rate schedules over rounds."""

from fedsim.optimizers.base import LocalOptimizer, Schedule

__all__ = ["LocalOptimizer", "Schedule"]
