"""The tracker for TensorBoard."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedsim.results.files import TENSORBOARD
from fedsim.tracking.base import RunInfo, Tracker, require
from fedsim.tracking.metrics import SELECTIONS, RoundMetrics, final_numbers

FLUSH_SECONDS = 10
"""Seconds after which TensorBoard can see what was logged."""


class TensorBoardTracker(Tracker):
    """A tracker that writes the event file of a run to the folder tensorboard in the run's folder.

    A resumed run writes it anew.
    """

    def __init__(self) -> None:
        require("tensorboard", extra="tensorboard")

    def start(self, info: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._metrics = RoundMetrics(info)
        self._writer = SummaryWriter(info.folder / TENSORBOARD, flush_secs=FLUSH_SECONDS)

    def log(self, record: Mapping[str, Any]) -> None:
        round = record["round"]
        metrics = self._metrics
        for name, value in metrics.add(record).items():
            self._writer.add_scalar(name, value, round)
        # TensorBoard accepts no histogram of nothing.
        if metrics.has_histogram(round) and np.any(metrics.counts):
            selected = np.repeat(metrics.edges[:-1], metrics.counts)  # a bin by its first client
            self._writer.add_histogram(SELECTIONS, selected, round, bins=metrics.edges)

    def finish(self, summary: Mapping[str, Any]) -> None:
        for name, value in final_numbers(summary).items():
            self._writer.add_scalar(name, value, summary["rounds"])
        self._writer.add_text("status", summary["status"], summary.get("rounds"))
        self._writer.close()
