"""One trial: its runs, one for each seed, which are ordinary run folders.

A trial that is pruned ends as a run does that is interrupted: it is saved after its round, and its folder can go on by
any later command. What a folder already holds is not run again, so the same search goes on where it was.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fedsim.config.plan import Plan
from fedsim.jobs.sweep import Attempts
from fedsim.running.outcome import Outcome, outcome_on_file
from fedsim.running.signals import STOP
from fedsim.tracking.files import read_metrics
from fedsim.tracking.final_accuracy import mean_of_last


class Judge(Protocol):
    """What is asked of an Optuna trial."""

    def report(self, value: float, step: int) -> None: ...

    def should_prune(self) -> bool: ...


@dataclass(frozen=True)
class Result:
    """`accuracy`: the mean of the final accuracies over the seeds; None of a trial that was pruned, diverged or failed.

    `rounds`: those of its first run. `reason`: which run has failed, and why; None if none has.
    """

    status: str
    accuracy: float | None
    rounds: int
    reason: str | None = None


class Rounds:
    """The rounds of a trial's first run, which decide whether it is pruned: on its accuracy as of now, smoothed as the
    final one is."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._accuracies: list[float | None] = []
        self.seen = 0
        self.pruned = False

    def see(self, round: int, accuracy: float | None) -> str | None:
        """The test accuracy after a round (None: not measured). Returns why the run is to end there, if it is.

        A round that was seen before is ignored: a killed run repeats those since its checkpoint.
        """
        if round <= self.seen:
            return None
        self.seen = round
        self._accuracies.append(accuracy)
        smoothed = mean_of_last(self._accuracies)
        if smoothed is not None and accuracy is not None:
            self._judge.report(smoothed, round)
            self.pruned = self.pruned or self._judge.should_prune()
        return "pruned" if self.pruned else None


def run_trial(plans: Sequence[Plan], judge: Judge) -> Result:
    """Run `plans`, one for each seed. Raises what stops a search: what refuses a run, or the user.

    The first run that fails is the trial's end: the accuracy up to its failure is not that of a run.
    """
    rounds = Rounds(judge)
    accuracies = []
    for number, plan in enumerate(plans):
        if number == 0 and not plan.settings.overwrite:
            for record in read_metrics(plan.folder):
                rounds.see(record["round"], record["test_accuracy"])
            if rounds.pruned and not outcome_on_file(plan).final:
                return Result("pruned", None, rounds.seen)
            rounds.pruned = False
        outcome = _run(plan, rounds if number == 0 else None)
        if outcome.status == "failed":
            return Result("failed", None, rounds.seen, f"{plan.folder}: {outcome.summary.get('error')}")
        if number == 0 and rounds.pruned:
            return Result("pruned", None, rounds.seen)
        accuracy = outcome.summary.get("smoothed_accuracy")
        if outcome.status == "diverged" or accuracy is None:
            return Result("diverged", None, rounds.seen)
        accuracies.append(accuracy)
    return Result("done", float(np.mean(accuracies)), rounds.seen)


def _run(plan: Plan, rounds: Rounds | None) -> Outcome:
    """How one run has ended, whose `rounds` are watched."""
    attempts = Attempts(
        on_round=None if rounds is None else lambda _, record: rounds.see(record.round, record.test_accuracy)
    )
    outcome = attempts.run(plan)
    attempts.run_held(attempts.run_in_turn)
    STOP.raise_if_asked()
    outcome = attempts.ended.get(plan.folder, outcome)
    if attempts.refused:
        raise attempts.refused[0]
    return outcome
