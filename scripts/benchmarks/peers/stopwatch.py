"""The clock of the speed race: each peer runs in a process that counts and times its rounds.

A peer's script reads its case with `parse_case`, calls `Stopwatch.end_round` after each round until
that returns True, and ends with `Stopwatch.report`.
"""

import argparse
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from scripts.benchmarks.peers.workloads import WORKLOADS, Workload
from scripts.benchmarks.processes import print_result

STARTED = "FEDSIM_BENCHMARK_STARTED"
"""An environment variable: the time (`time.time()`) at which the process was started."""
MILESTONES = (1, 5, 10, 20, 50, 100, 200, 500, 1000)
"""Rounds whose accuracies are reported, besides the last one."""
ENDLESS = 10**6
"""A number of rounds, for frameworks that need one. The stopwatch ends them."""


@dataclass(frozen=True)
class Case:
    """The case that one process measures. `words` are the peer's own options.

    `precision` of products and convolutions is `float32`, or `tf32` on a GPU.
    """

    workload: Workload
    data: Path
    seconds: float
    threads: int
    words: tuple[str, ...]
    device: str = "cpu"
    precision: str = "float32"


def parse_case(arguments: Sequence[str] | None = None) -> Case:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--words", nargs="*", default=[])
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    workload = WORKLOADS[options.workload]
    return Case(
        workload=workload.tiny() if options.tiny else workload,
        data=options.data.resolve(),
        seconds=options.seconds,
        threads=options.threads,
        words=tuple(options.words),
        device=options.device,
        precision=options.precision,
    )


class Stopwatch:
    """Counts rounds until `seconds` have been measured.

    It measures from the end of the warm-up to the end of a cycle of `eval_every` rounds, so that
    the share of evaluations is always the same.
    """

    def __init__(self, case: Case) -> None:
        self.workload = case.workload
        self.seconds = case.seconds
        self.started = float(os.environ.get(STARTED, time.time()))
        self.startup = 0.0
        self.round = 0
        self.measured_from = 0.0
        self.measured = 0.0
        self.accuracies: list[tuple[int, float]] = []

    @property
    def evaluates(self) -> bool:
        """Whether the round that `end_round` will close is evaluated."""
        return (self.round + 1) % self.workload.eval_every == 0

    def end_round(self, accuracy: float | None) -> bool:
        """Count a round. Return whether enough has been measured."""
        self.round += 1
        if accuracy is not None:
            self.accuracies.append((self.round, float(accuracy)))
        if self.round == 1:
            self.startup = time.time() - self.started
        warmup = self.workload.warmup_rounds
        if self.round == warmup:
            self.measured_from = time.perf_counter()
        if self.round <= warmup or self.round % self.workload.eval_every:
            return False
        self.measured = time.perf_counter() - self.measured_from
        return self.measured >= self.seconds

    def report(self, packages: Sequence[str], **details: Any) -> None:
        """Print the result, with the versions of `packages`."""
        versions = {name: version_of(name) for name in packages}
        versions["python"] = platform.python_version()
        rounds = self.round - self.workload.warmup_rounds
        reported = (*MILESTONES, self.round)
        result = {
            "rounds": rounds,
            "rounds_per_second": rounds / self.measured,
            "clients_per_second": rounds * self.workload.cohort_size / self.measured,
            "startup_seconds": self.startup,
            "accuracies": [pair for pair in self.accuracies if pair[0] in reported],
            "versions": versions,
        }
        print_result(result | details)


def version_of(package: str) -> str:
    """Return the version of a package, or nothing if it runs from its source."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
