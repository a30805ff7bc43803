"""The texts that a command prints around its jobs.

They say what the command will do, how far the jobs are, how each ended, and what to do next.
`fedsim.jobs.cli` creates a `Narration` and calls `begin` and `end`. `fedsim.jobs.sweep.Attempts`
calls it before and after each job, and tells a `Progress` of every round. A tracker of a run may
print, too (`ConsoleTracker`): then the narration leaves these lines to it.
"""

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedsim.config.plan import Plan
from fedsim.config.user_code import user_code
from fedsim.core.configs import differing_keys, labels_of, short_names
from fedsim.core.text import command
from fedsim.jobs.overwriting import Overwriting
from fedsim.jobs.progress import Progress
from fedsim.results.files import ERROR, NEWEST
from fedsim.results.reading import FINISHED, DamagedError, read_config
from fedsim.running.outcome import Outcome, outcome_on_file, worked_in
from fedsim.running.process import Preempted
from fedsim.tracking.console import ConsoleTracker, headline, job_number, time_left
from fedsim.tracking.tables import (
    CONSOLE,
    print_line,
    show_seconds,
    show_share,
    sweep_table,
)

MAX_NAMED = 3
"""At most this many files and trackers are named one by one."""
CONSOLE_TARGET = f"{ConsoleTracker.__module__}.{ConsoleTracker.__qualname__}"
"""The `_target_` of the tracker on the terminal in a config."""


class Narration:
    """The lines on the terminal about one command, whose jobs are `plans`.

    `overrides` has the overrides of each job, and `argv` the words of the command line. A label is
    an override as key and value. In lines about a job, its name is made of the labels in which jobs
    differ, such as `lr=0.1 seed=2`.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        overrides: Sequence[Sequence[str]],
        argv: Sequence[str],
        progress: Progress,
        overwriting: Overwriting | None = None,
    ) -> None:
        self.plans = plans
        self.progress = progress
        self._overwriting = overwriting or Overwriting()
        pairs = zip(plans, overrides, strict=True)
        self._labels = {plan.folder: labels_of(words) for plan, words in pairs}
        self._names = short_names(differing_keys(list(self._labels.values())))
        self._sets_trackers = any(map(_sets_tracker, itertools.chain.from_iterable(overrides)))
        self._command = command("fedsim", *argv)
        self._is_sweep = len(plans) > 1
        self._ended_before: set[Path] = set()  # folders of jobs that had ended at the start

    def begin(self, cost: str = "") -> None:
        """Print what the command is about to do, and remember which jobs have ended before.

        `cost` is what the jobs take. It is printed before a sweep that has work left.
        """
        ended_plans = []
        for plan in self.plans:
            if outcome_on_file(plan).final and not plan.settings.overwrite:
                ended_plans.append(plan)
                self._ended_before.add(plan.folder)
                self.progress.job_ended(plan.folder)
        if self._is_sweep:
            self._describe_sweep()
            if cost and len(self._ended_before) < len(self._labels):
                print_line(cost)
        if self._sets_trackers:
            _print_new_trackers(ended_plans)
        if self._overwriting.notice:
            print_line(self._overwriting.notice)

    def _describe_sweep(self) -> None:
        """Print how many jobs there are, how many of them have ended, and how many are equal."""
        line = f"{len(self.plans)} jobs, results in {self.folder}"
        num_ended = len(self._ended_before - self._overwriting.replaced)
        if num_ended == 1:
            line += "; 1 has ended before (overwrite=true runs it again)"
        elif num_ended:
            line += f"; {num_ended} have ended before (overwrite=true runs them again)"
        num_runs = len(self._labels)
        if num_runs < len(self.plans):
            line += f"; different runs among them: {num_runs}"
        print_line(line)

    def job_begins(self, plan: Plan) -> None:
        """Print what a job is if no tracker does, or that its data are being loaded."""
        if plan.folder in self._ended_before:
            return
        from fedsim.running.assembly import is_prepared  # imports PyTorch, which takes time

        if not self._is_sweep and not has_console(plan):
            print_line(headline(plan.settings.name, plan.choices, plan.settings.seed))
        elif not is_prepared(plan):
            print_line(f"loading the data set {plan.choices.get('dataset', '')}".rstrip())

    def job_ended(self, plan: Plan, outcome: Outcome) -> None:
        """Print how a job ended, unless it is a single job with a tracker on the terminal.

        A job that was skipped has ended in this sweep, because two jobs are the same run, or in
        another process, or before: jobs that had ended before a sweep are counted at its beginning.
        """
        if outcome.skipped:
            if not self._is_sweep or plan.folder not in self._ended_before:
                remedy = "" if plan.config.get("overwrite") else " (overwrite=true runs it again)"
                print_line(f"already {outcome.status}: {plan.folder}{remedy}")
        elif self._is_sweep:
            self._print_end_in_sweep(plan, outcome)
        elif not has_console(plan) and outcome.status not in ("data", "config"):
            print_line(" · ".join([outcome.status, *_results(outcome)]))
            print_line(f"results in {plan.folder}")

    def _print_end_in_sweep(self, plan: Plan, outcome: Outcome) -> None:
        """Print how a job of a sweep ended: its number, status, name and results, and the time that
        is left."""
        position = self.progress.position(plan.folder)
        parts = [outcome.status, self._name_of(plan), *_results(outcome), time_left(position)]
        CONSOLE.print(
            job_number(position) + " · ".join(part for part in parts if part),
            style=None if outcome.status in FINISHED else "red",
            soft_wrap=not CONSOLE.is_terminal,
            markup=False,
        )

    def _name_of(self, plan: Plan) -> str:
        """Return the labels of a job in which jobs differ, such as "seed=1"; empty for one job."""
        labels = self._labels[plan.folder]
        parts = [f"{name}={labels[key]}" for key, name in self._names.items() if key in labels]
        return " ".join(parts)

    def end(self, outcomes: Mapping[Path, Outcome]) -> None:
        """Close the command: a table of its jobs, the place of results, and what to do next.

        `outcomes` has the outcome of each job by its folder. A job without one was not run.
        """
        plans = {plan.folder: plan for plan in self.plans if plan.folder in outcomes}
        ended = [(plan, outcomes[folder]) for folder, plan in plans.items()]
        if self._is_sweep:
            sweep_table([self._row(plan, outcome) for plan, outcome in ended])
            print_line(f"results in {self.folder}")
        _print_failed_trackers(ended)
        self._print_remedies(ended)
        if any(outcome.status in FINISHED for _, outcome in ended):
            print_line(f"next: {command('fedsim', 'report', str(self.folder))}")

    def _row(self, plan: Plan, outcome: Outcome) -> dict[str, Any]:
        """Return the row of a job in the table of a sweep."""
        labels = dict(self._labels[plan.folder])
        labels.pop("seed", None)
        return {
            "labels": labels,
            "seed": plan.settings.seed,
            "status": outcome.status,
            "summary": outcome.summary,
        }

    @contextmanager
    def with_resume_hint(self) -> Iterator[None]:
        """Run jobs within this context. If a signal ends it, print how to resume the command."""
        try:
            yield
        except (KeyboardInterrupt, Preempted):
            ended = sum(map(self._overwriting.has_ended, self.plans))
            total = len(self.plans)
            if self._is_sweep:
                print_line(f"{ended} of {total} jobs have ended, results in {self.folder}")
            if ended < total:
                print_line(f"the same command resumes them: {self._command}")
            raise

    @property
    def folder(self) -> Path:
        """The closest folder that contains all results; the parent of a single job's folder."""
        parents = {plan.folder.parent for plan in self.plans}
        common = os.path.commonpath(map(os.path.abspath, parents))
        is_absolute = any(map(Path.is_absolute, parents))
        return Path(common if is_absolute else os.path.relpath(common))

    def _print_remedies(self, ended: Sequence[tuple[Plan, Outcome]]) -> None:
        """Print what the user can do about jobs that are not done."""
        num_left = 0
        tracebacks = []
        has_checkpoint_of_user_code = False
        for plan, outcome in ended:
            if outcome.final:
                continue
            num_left += 1
            overwrite = plan.settings.overwrite
            place = worked_in(plan.folder, outcome_on_file(plan), overwrite=overwrite)
            if (place / ERROR).is_file():
                job = f"traceback of {self._name_of(plan)}" if self._is_sweep else "its traceback"
                tracebacks.append(f"{job}: {place / ERROR}")
            if (place / NEWEST).is_file() and user_code(plan.config) is not None:
                has_checkpoint_of_user_code = True
        for line in tracebacks[:MAX_NAMED]:
            print_line(line)
        if num_left:
            jobs = f"{num_left} jobs that are not done"
            if num_left == 1:
                jobs = "the one that is not done" if self._is_sweep else "it"
            print_line(f"the same command resumes {jobs}: {self._command}")
        if has_checkpoint_of_user_code:  # a checkpoint of other code is rejected
            print_line("after a change of your code, add checkpoint.other_code=true")


def _print_failed_trackers(ended: Sequence[tuple[Plan, Outcome]]) -> None:
    """Print which trackers failed in runs without a tracker on the terminal.

    Otherwise the tracker on the terminal has printed it.
    """
    failures: Counter[str] = Counter()
    for plan, outcome in ended:
        if outcome.skipped or has_console(plan):
            continue
        for name, error in (outcome.summary.get("trackers") or {}).items():
            if isinstance(error, str):  # it may also be the number of failures
                failures[f"tracker.{name} failed: {error}"] += 1
    for text, count in failures.most_common(MAX_NAMED):
        print_line(text if count == 1 else f"{text} (in {count} jobs)")


def _sets_tracker(override: str) -> bool:
    return override.lstrip("+~").startswith(("tracker=", "tracker."))


def _results(outcome: Outcome) -> list[str]:
    """Return the results of a job in words, or why there are none."""
    summary = outcome.summary
    if outcome.status in ("data", "config"):
        return ["see the error at the end"]
    if outcome.status not in FINISHED:
        return [str(summary["error"])] if summary.get("error") else []
    accuracy = show_share(summary.get("final_accuracy"))
    return [f"final accuracy {accuracy}", show_seconds(summary["wall_seconds"])]


def _print_new_trackers(ended_plans: Sequence[Plan]) -> None:
    """Print which trackers of the command are new for runs that have ended: they get nothing."""
    num_runs: Counter[str] = Counter()
    for plan in ended_plans:
        num_runs.update(_new_trackers(plan))
    for name, num in num_runs.items():
        runs, again = f"{num} runs that have ended without it", "them"
        if num == 1:
            runs, again = "a run that has ended without it", "it"
        print_line(f"tracker.{name} gets nothing of {runs} (overwrite=true runs {again} again)")


def _new_trackers(plan: Plan) -> list[str]:
    """Return the names of trackers that a finished run was made without, except the terminal."""
    try:
        recorded = read_config(plan.folder).get("tracker") or {}
    except DamagedError:
        return []
    targets = {node.get("_target_") for node in recorded.values() if isinstance(node, Mapping)}
    names = []
    for name, node in (plan.config.get("tracker") or {}).items():
        if isinstance(node, Mapping) and node["_target_"] not in {*targets, CONSOLE_TARGET}:
            names.append(name)
    return names


def has_console(plan: Plan) -> bool:
    """Return whether a tracker of the run shows it on the terminal."""
    for node in (plan.config.get("tracker") or {}).values():
        if isinstance(node, Mapping) and node.get("_target_") == CONSOLE_TARGET:
            return True
    return False
