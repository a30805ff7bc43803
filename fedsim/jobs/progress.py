"""How far the jobs of a command are, and how long the rest will take."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from fedsim.config.plan import Plan
from fedsim.tracking.base import SweepPosition

WINDOW = 500
"""Rounds over which the time of a round is averaged: the latest ones of all jobs together."""
LEAST_ROUNDS = 5
"""Rounds before which there is no estimate."""


class Progress:
    """Rounds left of each of `plans`, by folder. `now`: a clock in seconds.

    The remaining time is the number of rounds left times the mean seconds between the ends of the latest rounds: it
    holds for jobs in turn and side by side, with all that they do between rounds. The preparation of the first
    job, jobs that have ended before, and those that other processes are running count for nothing.
    """

    def __init__(self, plans: Sequence[Plan] = (), now: Callable[[], float] = time.monotonic) -> None:
        self._numbers: dict[Path, int] = {}
        for number, plan in enumerate(plans, 1):
            self._numbers.setdefault(plan.folder, number)
        self._total, self._now = len(plans), now
        self._left = {plan.folder: plan.settings.num_rounds for plan in plans}
        self._times: deque[float] = deque(maxlen=WINDOW + 1)
        self.estimates = True
        """Whether there is an estimate at all."""
        self._accuracies: dict[Path, float] = {}

    def position(self, folder: Path) -> SweepPosition | None:
        """Where the job of `folder` stands in its sweep; None if it is none of several."""
        number = self._numbers.get(folder)
        return None if number is None or self._total < 2 else SweepPosition(number, self._total, self.remaining_seconds)

    def round_ended(self, folder: Path, rounds_left: int, accuracy: float | None) -> None:
        """A job has ended a round. `accuracy`: on the test set, None if it was not measured."""
        self._left[folder] = rounds_left
        self._times.append(self._now())
        if accuracy is not None:
            self._accuracies[folder] = accuracy

    def leaves(self, folder: Path) -> None:
        """Nothing more is to be done for a job here."""
        self._left[folder] = 0

    def remaining_seconds(self) -> float | None:
        """The time that all jobs will still take; None before that can be estimated, and where nothing is left."""
        rounds, left = len(self._times) - 1, sum(self._left.values())
        if rounds < LEAST_ROUNDS or not left or not self.estimates:
            return None
        return (self._now() - self._times[0]) / rounds * left

    def accuracies(self, folders: Sequence[Path]) -> list[float]:
        """The latest test accuracies of jobs, as far as they are known."""
        return [self._accuracies[folder] for folder in folders if folder in self._accuracies]
