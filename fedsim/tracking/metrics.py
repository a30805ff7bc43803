"""The names under which trackers log the numbers of a round, and sums over rounds.

A section is the part of a name before the slash, such as `test/`. W&B, TensorBoard and MLflow show
the charts of a section together. The keys of metrics.jsonl have no sections.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedsim.core.arrays import Ints
from fedsim.tracking.base import RunInfo

NAMES = {
    "test_accuracy": "test/accuracy",
    "test_loss": "test/loss",
    "client_accuracy_mean": "test/client_accuracy_mean",
    "client_accuracy_std": "test/client_accuracy_std",
    "client_accuracy_worst_tenth": "test/client_accuracy_worst_tenth",
    "client_accuracy_best_tenth": "test/client_accuracy_best_tenth",
    "client_accuracy_never_selected": "test/client_accuracy_never_selected",
    "train_loss": "train/loss",
    "learning_rate": "train/learning_rate",
    "nonfinite_reports": "train/nonfinite_reports",
    "dropped_updates": "train/dropped_updates",
    "participation_ratio": "selection/participation_ratio",
    "contacted": "selection/contacted",
    "trained": "selection/trained",
    "uploaded": "selection/uploaded",
    "coverage": "selection/coverage",
    "bytes_down": "cost/bytes_down",
    "bytes_up": "cost/bytes_up",
    "wire_bytes_down": "cost/wire_bytes_down",
    "wire_bytes_up": "cost/wire_bytes_up",
    "forward_samples": "cost/forward_samples",
    "train_samples": "cost/train_samples",
    "server_forward_samples": "cost/server_forward_samples",
    "seconds_select": "cost/seconds_select",
    "seconds_ask": "cost/seconds_ask",
    "seconds_train": "cost/seconds_train",
    "seconds_aggregate": "cost/seconds_aggregate",
    "seconds_evaluate": "cost/seconds_evaluate",
    "simulated_seconds": "cost/simulated_seconds",
    "simulated_seconds_ask": "cost/simulated_seconds_ask",
    "simulated_seconds_train": "cost/simulated_seconds_train",
    "wall_seconds": "total/wall_seconds",
    "simulated_time": "total/simulated_time",
    "epsilon": "total/epsilon",
}
"""The name of each number of a record but `round`. Numbers in `total/` are of all rounds so far."""
ENDING = {
    "final_accuracy": "final/accuracy",
    "last_accuracy": "final/last_accuracy",
    "best_accuracy": "final/best_accuracy",
}
"""The name of each number of summary.json that is logged once, when a run has ended."""
SUMMED = {
    "total/bytes": ("bytes_down", "bytes_up"),
    "total/samples": ("train_samples", "forward_samples"),
}
"""Sums over all rounds until now, as reports measure costs, and the fields that they add up."""
SELECTIONS = "selection/clients"
"""The name of the histogram of selections over clients."""
NUM_HISTOGRAMS = 10
"""Number of histograms in a run, at equal distances."""
MAX_BINS = 64
"""Maximum number of bins of a histogram. With more clients, a bin has several of them."""


def final_numbers(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the accuracies of a run that has ended, by name, as far as they were measured."""
    values = {name: summary.get(key) for key, name in ENDING.items()}
    return {name: value for name, value in values.items() if value is not None}


class RoundMetrics:
    """The numbers and histograms of a run that a tracker logs.

    `add` is called with the record of each round from the first on, also for rounds that earlier
    processes have run.
    """

    def __init__(self, info: RunInfo) -> None:
        num_clients = info.config["num_clients"]
        self._num_rounds = info.num_rounds
        self._totals = dict.fromkeys(SUMMED, 0)
        self.counts: Ints = np.zeros(min(num_clients, MAX_BINS), dtype=np.int64)
        """Number of selections of the clients of each bin until now."""
        self.edges = np.linspace(0, num_clients, len(self.counts) + 1)
        """The bounds of the bins: bin b has the clients from edge b up to, not including, b + 1."""

    def add(self, record: Mapping[str, Any]) -> dict[str, float]:
        """Add the record of a round, and return its finite numbers and the sums by name."""
        numbers = {}
        for field, name in NAMES.items():
            value = record.get(field)
            if value is not None and math.isfinite(value):
                numbers[name] = value
        for name, fields in SUMMED.items():
            self._totals[name] += sum(record[field] for field in fields)
        self.counts += np.histogram(record["selected"], self.edges)[0]
        return numbers | self._totals

    def has_histogram(self, round: int) -> bool:
        """Return whether a histogram is logged after `round`."""
        interval = max(self._num_rounds // NUM_HISTOGRAMS, 1)
        return round % interval == 0 or round == self._num_rounds
