"""How every peer is timed: the options of its process, the clock over its rounds, and the line it
reports."""

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from scripts.benchmarks.peers.workloads import WORKLOADS, Workload

RESULT = "RESULT "
"""Begins the line of a peer's output that holds its result; frameworks print all kinds of things
around it."""
STARTED = "FEDSIM_BENCHMARK_STARTED"
"""The environment variable with the time (`time.time()`) at which the process was started."""
MILESTONES = (1, 5, 10, 20, 50, 100, 200, 500, 1000)
"""The rounds whose accuracies are reported, besides the last."""
ENDLESS = 10**6
"""A number of rounds for frameworks that want one; the stopwatch ends them."""


@dataclass(frozen=True)
class Case:
    """What one process measures. `words` are the peer's own options."""

    workload: Workload
    data: Path
    seconds: float
    threads: int
    words: tuple[str, ...]
    device: str = "cpu"


def parse_case(argv: Sequence[str] | None = None) -> Case:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--words", nargs="*", default=[])
    options = parser.parse_args(argv)
    return Case(
        WORKLOADS[options.workload],
        options.data.resolve(),
        options.seconds,
        options.threads,
        tuple(options.words),
        options.device,
    )


class Stopwatch:
    """Counts rounds until `seconds` have been measured.

    Rounds are measured from the end of the warm-up to the end of a cycle of `eval_every` rounds, so
    that the share of evaluations is the same whenever it ends.
    """

    def __init__(self, case: Case) -> None:
        self.workload, self.seconds = case.workload, case.seconds
        self.started = float(os.environ.get(STARTED, time.time()))
        self.startup = 0.0
        self.round = 0
        self.measured_from = 0.0
        self.measured = 0.0
        self.accuracies: list[tuple[int, float]] = []

    @property
    def evaluates(self) -> bool:
        """Whether the round in progress, the one that `end_round` will close, is evaluated."""
        return (self.round + 1) % self.workload.eval_every == 0

    def end_round(self, accuracy: float | None) -> bool:
        """To be called after every round. True: enough has been measured."""
        self.round += 1
        if accuracy is not None:
            self.accuracies.append((self.round, float(accuracy)))
        if self.round == 1:
            self.startup = time.time() - self.started
        if self.round == self.workload.warmup_rounds:
            self.measured_from = time.perf_counter()
        elif (
            self.round > self.workload.warmup_rounds and self.round % self.workload.eval_every == 0
        ):
            self.measured = time.perf_counter() - self.measured_from
            return self.measured >= self.seconds
        return False

    def report(self, packages: Sequence[str], **more: Any) -> None:
        """Print the result, with the versions of `packages`."""
        rounds = self.round - self.workload.warmup_rounds
        told = [(t, a) for t, a in self.accuracies if t in MILESTONES or t == self.round]
        found = {
            "rounds": rounds,
            "rounds_per_second": rounds / self.measured,
            "startup_seconds": self.startup,
            "accuracies": told,
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in packages},
            },
            **more,
        }
        print(RESULT + json.dumps(found), flush=True)
