"""What a command says around its jobs: what it is about to do, how far they are, how each ended,
what to do next."""

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedsim.config.plan import Plan
from fedsim.config.user_code import user_code
from fedsim.core.text import command
from fedsim.jobs.overwriting import Overwriting
from fedsim.results.files import ERROR
from fedsim.running.outcome import Outcome, outcome_on_file, worked_in
from fedsim.running.process import Preempted
from fedsim.tracking.base import SweepPosition
from fedsim.tracking.console import ConsoleTracker, headline, job_number, time_left
from fedsim.tracking.tables import (
    CONSOLE,
    differing_keys,
    print_line,
    show_seconds,
    show_share,
    sweep_table,
)

WINDOW = 500
"""Rounds over which the time of a round is averaged: the latest ones of all jobs together."""
LEAST_ROUNDS = 5
"""Rounds before which there is no estimate."""


class Progress:
    """Rounds left of each of `plans`, by folder; those of jobs that other processes run count for
    nothing. `now`: a clock in seconds."""

    def __init__(
        self, plans: Sequence[Plan] = (), now: Callable[[], float] = time.monotonic
    ) -> None:
        self._numbers = {
            plan.folder: number for number, plan in reversed([*enumerate(plans, 1)])
        }  # the first of each
        self._total, self._now = len(plans), now
        self._left = {plan.folder: plan.settings.num_rounds for plan in plans}
        self._times: deque[float] = deque(maxlen=WINDOW + 1)
        self._accuracies: dict[Path, float] = {}

    def position(self, folder: Path) -> SweepPosition | None:
        """Where the job of `folder` stands in its sweep; None if it is none of several."""
        number = self._numbers.get(folder)
        return (
            None
            if number is None or self._total < 2
            else SweepPosition(number, self._total, self.remaining_seconds)
        )

    def round_ended(self, folder: Path, rounds_left: int, accuracy: float | None) -> None:
        """`accuracy`: on the test set, None if it was not measured."""
        self._left[folder] = rounds_left
        self._times.append(self._now())
        if accuracy is not None:
            self._accuracies[folder] = accuracy

    def leaves(self, folder: Path) -> None:
        """Nothing more is to be done for a job here."""
        self._left[folder] = 0

    def remaining_seconds(self) -> float | None:
        """The rounds left times the mean seconds between the ends of the latest rounds, in turn or
        side by side; None before that can be estimated, and where nothing is left."""
        rounds, left = len(self._times) - 1, sum(self._left.values())
        if rounds < LEAST_ROUNDS or not left:
            return None
        return (self._now() - self._times[0]) / rounds * left

    def accuracies(self, folders: Sequence[Path]) -> list[float]:
        """The latest test accuracies of jobs, as far as they are known."""
        return [self._accuracies[folder] for folder in folders if folder in self._accuracies]


MOST_NAMED = 3
"""Files and trackers that are named one by one."""


class Narration:
    """The screen of one command, whose jobs are `plans`.

    `overrides`: the words that each was composed of; `argv`: those of the command line.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        overrides: Sequence[Sequence[str]],
        argv: Sequence[str],
        progress: Progress,
        overwriting: Overwriting | None = None,
    ) -> None:
        self.plans, self.progress, self._overwriting = plans, progress, overwriting or Overwriting()
        self._labels = {
            plan.folder: {
                key.lstrip("+"): value for key, _, value in (word.partition("=") for word in words)
            }
            for plan, words in zip(plans, overrides, strict=True)
        }
        self._told_keys = differing_keys(list(self._labels.values()))
        self._command, self._is_sweep = command("fedsim", *argv), len(plans) > 1
        self._ended_before: set[Path] = set()

    def begin(self, cost: str = "") -> None:
        """`cost`: what the jobs take, told before a sweep that has work left."""
        self._ended_before = {
            p.folder for p in self.plans if outcome_on_file(p).final and not p.settings.overwrite
        }
        for folder in self._ended_before:
            self.progress.leaves(folder)
        if self._is_sweep:
            others = len(self._ended_before - self._overwriting.replaced)
            before = (
                f"; {others} have ended before (overwrite=true runs them again)" if others else ""
            )
            print_line(f"{len(self.plans)} jobs, results in {self.folder}{before}")
            if cost and len(self._ended_before) < len(self._labels):
                print_line(cost)
        own = [p for p in self.plans if p.folder in self._ended_before and user_code(p.config)]
        if unknown := sum("code" not in outcome_on_file(plan).summary for plan in own):
            told = f"{unknown} of the results that are there do not say by which code of yours they were made"
            print_line(
                f"{told}; they are taken as those of the present one (overwrite=true runs them again)"
            )
        if self._overwriting.notice:
            print_line(self._overwriting.notice)

    def job_begins(self, plan: Plan) -> None:
        if plan.folder in self._ended_before:
            return
        from fedsim.running.assembly import is_prepared  # takes time: it imports PyTorch

        if not self._is_sweep and not has_console(plan):
            print_line(headline(plan.settings.name, plan.choices, plan.settings.seed))
        elif not is_prepared(plan):
            print_line(f"loading the data set {plan.choices.get('dataset', '')}".rstrip())

    def job_ended(self, plan: Plan, outcome: Outcome) -> None:
        """How a job ended, in a line, where its trackers do not tell that."""
        if outcome.skipped:
            if not self._is_sweep or plan.folder not in self._ended_before:
                remedy = "" if plan.config.get("overwrite") else " (overwrite=true runs it again)"
                print_line(f"already {outcome.status}: {plan.folder}{remedy}")
        elif self._is_sweep:
            position, labels = self.progress.position(plan.folder), self._labels[plan.folder]
            names = " ".join(f"{key}={labels[key]}" for key in self._told_keys if key in labels)
            text = " · ".join(
                filter(None, (outcome.status, names, *_results(outcome), time_left(position)))
            )
            style = None if outcome.status == "done" else "red"
            CONSOLE.print(
                job_number(position) + text,
                style=style,
                soft_wrap=not CONSOLE.is_terminal,
                markup=False,
            )
        elif not has_console(plan) and outcome.status not in ("data", "config"):
            print_line(" · ".join((outcome.status, *_results(outcome))))
            print_line(f"results in {plan.folder}")

    def end(self, outcomes: Sequence[Outcome]) -> None:
        """Close the command: a table over its jobs, where the results are, and what to do next."""
        if self._is_sweep:
            rows = []
            for plan, one in zip(self.plans, outcomes, strict=True):
                labels = {
                    key: value for key, value in self._labels[plan.folder].items() if key != "seed"
                }
                about = {"seed": plan.settings.seed, "status": one.status, "summary": one.summary}
                rows.append({"labels": labels, **about})
            sweep_table(rows)
            print_line(f"results in {self.folder}")
        self._tell_failed_trackers(outcomes)
        self._tell_remedies(outcomes)
        if any(outcome.status == "done" for outcome in outcomes):
            print_line(f"next: {command('fedsim', 'report', str(self.folder))}")

    @contextmanager
    def broken_off(self) -> Iterator[None]:
        """While jobs run: if a signal ends the command, say what it leaves."""
        try:
            yield
        except (KeyboardInterrupt, Preempted):
            ended = sum(self._overwriting.has_ended(plan) for plan in self.plans)
            if self._is_sweep:
                print_line(
                    f"{ended} of {len(self.plans)} jobs have ended, results in {self.folder}"
                )
            if ended < len(self.plans):
                print_line(f"the same command goes on: {self._command}")
            raise

    @property
    def folder(self) -> Path:
        """The folder below which all results are."""
        parents = {plan.folder.parent for plan in self.plans}
        if any(parent.is_absolute() for parent in parents):
            parents = {parent.absolute() for parent in parents}
        return Path(os.path.commonpath(parents))

    def _tell_failed_trackers(self, outcomes: Sequence[Outcome]) -> None:
        """Which trackers failed in runs that had none to tell it on the terminal."""
        failed = Counter(
            (name, error)
            for plan, outcome in zip(self.plans, outcomes, strict=True)
            if not outcome.skipped and not has_console(plan)
            for name, error in (outcome.summary.get("trackers") or {}).items()
            if isinstance(error, str)
        )
        for (name, error), count in failed.most_common(MOST_NAMED):
            print_line(f"tracker.{name} failed{f' in {count} jobs' if count > 1 else ''}: {error}")

    def _tell_remedies(self, outcomes: Sequence[Outcome]) -> None:
        """What is to be done about jobs that are not done."""
        if diverged := sum(outcome.status == "diverged" for outcome in outcomes):
            print_line(f"{diverged} diverged: a lower optimizer.lr may help")
        left = [
            plan for plan, outcome in zip(self.plans, outcomes, strict=True) if not outcome.final
        ]
        for file in [file for plan in left if (file := worked_in(plan) / ERROR).is_file()][
            :MOST_NAMED
        ]:
            print_line(f"its traceback: {file}")
        if left:
            what = (
                f"{len(left)} jobs that are not done"
                if len(left) > 1
                else "the one that is not done"
            )
            print_line(
                f"the same command goes on with {what if self._is_sweep else 'it'}: {self._command}"
            )


def _results(outcome: Outcome) -> tuple[str, ...]:
    summary = outcome.summary
    if outcome.status in ("data", "config"):
        return ("see the error at the end",)
    if outcome.status != "done":
        return (str(summary["error"]),) if summary.get("error") else ()
    return f"final accuracy {show_share(summary.get('smoothed_accuracy'))}", show_seconds(
        summary["wall_seconds"]
    )


def has_console(plan: Plan) -> bool:
    """Whether a tracker of the run shows it on the terminal."""
    path = f"{ConsoleTracker.__module__}.{ConsoleTracker.__qualname__}"
    nodes = (plan.config.get("tracker") or {}).values()
    return any(node.get("_target_") == path for node in nodes if isinstance(node, Mapping))
