"""The progress of a command's jobs, and an estimate of the time that is left."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from fedsim.config.plan import Plan
from fedsim.tracking.base import SweepPosition

WINDOW = 500
"""The time of a round is averaged over this many latest rounds of all jobs together."""
LEAST_ROUNDS = 5
"""Number of rounds before the first estimate."""


class Progress:
    """The rounds left of each of `plans`, from which the time left is estimated.

    Jobs are identified by their folders. A job that another command runs has no rounds left here.
    `now` is a clock [s].
    """

    def __init__(
        self, plans: Sequence[Plan] = (), now: Callable[[], float] = time.monotonic
    ) -> None:
        self._total = len(plans)
        self._now = now
        self._numbers: dict[Path, int] = {}
        for number, plan in enumerate(plans, 1):
            self._numbers.setdefault(plan.folder, number)
        self._rounds_left = {plan.folder: plan.settings.num_rounds for plan in plans}
        # The ends of the latest rounds. WINDOW + 1 of them bound WINDOW intervals.
        self._times: deque[float] = deque(maxlen=WINDOW + 1)
        self._accuracies: dict[Path, float] = {}

    def position(self, folder: Path) -> SweepPosition | None:
        """Return the position of a job in its sweep; None if it is not one of several."""
        if folder not in self._numbers or self._total < 2:
            return None
        return SweepPosition(self._numbers[folder], self._total, self.remaining_seconds)

    def round_ended(self, folder: Path, rounds_left: int, accuracy: float | None) -> None:
        """Count a round of a job. `accuracy` (test) is None if it was not measured."""
        self._rounds_left[folder] = rounds_left
        self._times.append(self._now())
        if accuracy is not None:
            self._accuracies[folder] = accuracy

    def job_ended(self, folder: Path) -> None:
        """Count a job as having no rounds left here: it has ended, or another command runs it."""
        self._rounds_left[folder] = 0

    def remaining_seconds(self) -> float | None:
        """Return the rounds left times the mean seconds of a round: the time since the end of one
        of the latest rounds, divided by the rounds that have ended since.

        It is None before that can be estimated, and when no rounds are left.
        """
        num_rounds = len(self._times) - 1
        rounds_left = sum(self._rounds_left.values())
        if num_rounds < LEAST_ROUNDS or not rounds_left:
            return None
        return (self._now() - self._times[0]) / num_rounds * rounds_left

    def accuracies(self, folders: Sequence[Path]) -> list[float]:
        """Return the latest test accuracies of jobs that have any."""
        return [self._accuracies[folder] for folder in folders if folder in self._accuracies]
