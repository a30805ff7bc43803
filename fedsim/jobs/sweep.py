"""The jobs of a command: one after another, or side by side; those that another process is running
are waited for.

Before any work starts, it is asked whether data can be read or fetched, and whether there is room
for the results.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fedsim.config.build import instantiate
from fedsim.config.plan import Plan
from fedsim.core.disk import space_problem
from fedsim.core.errors import ConfigError, DataError, FedsimError, Problem, check
from fedsim.core.parameters import Count, parameters
from fedsim.core.record import Record
from fedsim.jobs.narration import Narration, Progress
from fedsim.jobs.overwriting import Overwriting
from fedsim.results.files import HeldError, is_free, refuse_links
from fedsim.running.outcome import Outcome, Watch, outcome_on_file
from fedsim.running.process import STOP
from fedsim.tracking.console import lanes_progress, time_left
from fedsim.tracking.tables import print_if_slow, print_line

if TYPE_CHECKING:
    from fedsim.running.lanes import Lane

BYTES_OF_RUN, BYTES_OF_ROUND, BYTES_OF_ID = 2_000_000, 1_000, 8
"""Roughly what a run's files need: division, config and summary; a line of metrics.jsonl; an id of
a client in it. Models are left out."""


def require_room(plans: Iterable[Plan]) -> None:
    """Raise `ConfigError` unless the folders for results can be written and have room for the runs
    still to come, and source files of their data can be read, or fetched where they are missing."""
    plans = to_come(plans)
    for plan in plans:
        refuse_links(plan.folder)
    check(*output_problems(plans), *source_problems(plans))


def to_come(plans: Iterable[Plan]) -> list[Plan]:
    """Those whose runs are not done."""
    return [plan for plan in plans if plan.settings.overwrite or not outcome_on_file(plan).final]


def output_problems(to_come: Iterable[Plan]) -> list[Problem]:
    """The problems of the folders for the results of runs."""
    needs: Counter[Path] = Counter()
    for plan in to_come:
        needs[plan.settings.output_dir] += _bytes_of(plan)
    return [
        problem
        for folder, need in needs.items()
        if (problem := space_problem("output_dir", folder, need))
    ]


def source_problems(to_come: Iterable[Plan]) -> list[Problem]:
    """The problems of the source files of their data that show before those are read."""
    return list(
        dict.fromkeys(problem for plan in by_source(to_come) if (problem := _source_problem(plan)))
    )


def by_source(plans: Iterable[Plan]) -> list[Plan]:
    """One plan for each data set and `data_dir`."""
    keys = {
        json.dumps([p.config["dataset"], str(p.data_dir)], sort_keys=True, default=str): p
        for p in plans
    }
    return list(keys.values())


def _source_problem(plan: Plan) -> Problem | None:
    from fedsim.data.base import Dataset

    with suppress(
        Exception
    ):  # whatever else is wrong with a data set, or a user's class of one, its own job tells
        return instantiate(
            plan.config["dataset"], Dataset, "dataset", plan.data_dir, plan.cache_dir
        ).source_problem()
    return None


def _bytes_of(plan: Plan) -> int:
    settings = plan.settings
    per_round = BYTES_OF_ROUND + BYTES_OF_ID * min(settings.cohort_size, settings.num_clients)
    return BYTES_OF_RUN + settings.num_rounds * per_round


POLL_SECONDS = 1.0
"""Between two looks at the locks of jobs that other processes are running."""
MOST_NAMED = 5
"""Jobs that a message names one by one."""


OnRound = Callable[[Plan, Record], str | None]
"""Is told of every round of every job; returns why the job is to end there, or None."""


@dataclass(eq=False)
class Attempts:
    """Jobs as they are run: how each ended, and which ones other processes hold. `screen` (None:
    nobody) and `on_round` are told of them."""

    progress: Progress = field(default_factory=Progress)
    screen: Narration | None = None
    on_round: OnRound | None = None
    overwriting: Overwriting = field(default_factory=Overwriting)
    ended: dict[Path, Outcome] = field(default_factory=dict, init=False)
    held: dict[Path, Plan] = field(default_factory=dict, init=False)
    _unprepared: dict[str, DataError] = field(default_factory=dict, init=False)

    @property
    def refused(self) -> list[FedsimError]:
        """What has kept jobs from their first round."""
        return [
            outcome.cause
            for outcome in self.ended.values()
            if isinstance(outcome.cause, FedsimError)
        ]

    def run(self, plan: Plan, interleaved: "Lane | None" = None) -> Outcome:
        """Run a job. Raises KeyboardInterrupt or `Preempted` where a signal has stopped it outside
        of its rounds."""
        plan = self.overwriting.as_found(plan)
        if self.screen is not None:
            self.screen.job_begins(plan)
        outcome = replace(outcome_on_file(plan), skipped=True)
        if plan.settings.overwrite or not outcome.final:
            outcome = self._executed(plan, interleaved)
        self.ends(plan, outcome)
        return outcome

    def _executed(self, plan: Plan, interleaved: "Lane | None") -> Outcome:
        from fedsim.running.assembly import data_key, is_prepared  # takes time: it imports PyTorch
        from fedsim.running.experiment import execute

        try:
            if self._unprepared and (missing := self._unprepared.get(data_key(plan))) is not None:
                raise missing  # as an earlier job has: the same data are not looked for again
            outcome = execute(plan, interleaved, _Rounds(plan, self))
        except HeldError:
            return Outcome("held", {})
        except FedsimError as error:
            if isinstance(error, DataError) and not is_prepared(plan):
                self._unprepared[data_key(plan)] = error
            status = {DataError.exit_code: "data", ConfigError.exit_code: "config"}.get(
                error.exit_code, "failed"
            )
            return Outcome(status, {"error": str(error)}, cause=error)
        return replace(outcome, cause=None)  # whose traceback holds the run's data

    def ends(self, plan: Plan, outcome: Outcome) -> None:
        """A job has ended, here or in another process; `held`: a process that is none of this
        command's has it."""
        self.progress.leaves(plan.folder)
        if outcome.status == "held":
            self.held[plan.folder] = plan
            return
        self.ended[plan.folder] = outcome
        if self.screen is not None:
            self.screen.job_ended(plan, outcome)

    def run_in_turn(self, plans: Sequence[Plan]) -> None:
        """Run jobs one after another; after a signal its exception is raised."""
        for plan in plans:
            self.run(plan)
            STOP.raise_if_asked()

    def shown(
        self, plans: Sequence[Plan], num_rounds: int, how: str = "side by side"
    ) -> AbstractContextManager[Callable[[int, int], None]]:
        """Where the progress of runs at the same time is shown (`lanes_progress`): on the terminal,
        if anything is."""
        if self.screen is None:
            return nullcontext(lambda left, round: None)
        accuracies = partial(self.progress.accuracies, [plan.folder for plan in plans])
        left = partial(time_left, self.progress.position(plans[0].folder))
        return lanes_progress(len(plans), num_rounds, accuracies, left, how=how)

    def run_held(self, run: Callable[[Sequence[Plan]], None]) -> None:
        """Wait for the jobs that other processes hold, and let `run` look at each as soon as it is
        free: it takes what was finished meanwhile, and goes on with what was not. A signal ends the
        wait by its exception."""
        told: set[str] = set()
        while self.held:
            free = [plan for plan in self.held.values() if is_free(plan.folder)]
            for plan in free:
                del self.held[plan.folder]
            run([self.overwriting.as_found(plan) for plan in free])
            if not free:
                _tell_holders([plan.folder for plan in self.held.values()], told)
                time.sleep(max(POLL_SECONDS, len(self.held) / 1000))


SHARED = ("dataset", "model", "optimizer", "local", "engine", "device", "data_dir", "cache_dir")
"""Runs that agree in these keys of the config can train together."""


@parameters
class Lanes:
    """The launcher `lanes` (conf/hydra/launcher/lanes.yaml): at most `max_lanes` runs side by
    side."""

    max_lanes: Count

    def groups(self, plans: Sequence[Plan]) -> list[list[Plan]]:
        """Plans that can train together, at most `max_lanes` each; a folder that comes twice is run
        once."""
        alike: dict[str, list[Plan]] = {}
        for plan in {plan.folder: plan for plan in plans}.values():
            key = json.dumps(
                [plan.config.get(name) for name in SHARED], sort_keys=True, default=str
            )
            alike.setdefault(key, []).append(plan)
        size = self.max_lanes
        return [
            group[start : start + size]
            for group in alike.values()
            for start in range(0, len(group), size)
        ]

    def run(self, attempts: Attempts, plans: Sequence[Plan]) -> None:
        """Run jobs, as many at a time as there are lanes and as fit together; a single one as
        without a launcher, and those that have all ended."""
        if len(plans) == 1 or not to_come(plans):
            return attempts.run_in_turn(plans)
        from fedsim.running.lanes import run_in_lanes  # takes time: it imports PyTorch

        for group in self.groups(plans):
            with attempts.shown(group, max(plan.settings.num_rounds for plan in group)) as show:
                run_in_lanes([partial(attempts.run, plan) for plan in group], show)
            STOP.raise_if_asked()


class _Rounds(Watch):
    """Counts the rounds of a job, and hands them on; says on the screen, if any, what its first one
    waits for."""

    def __init__(self, plan: Plan, attempts: Attempts) -> None:
        self.sweep, self._plan, self._attempts = (
            attempts.progress.position(plan.folder),
            plan,
            attempts,
        )

    def setting_up(self) -> AbstractContextManager[None]:
        told = (
            f"setting up {self._plan.settings.num_clients:,} clients: what they hold, and the model"
        )
        return nullcontext() if self._attempts.screen is None else print_if_slow(told)

    def round_ended(self, record: Record) -> str | None:
        left, on_round = self._plan.settings.num_rounds - record.round, self._attempts.on_round
        self._attempts.progress.round_ended(self._plan.folder, left, record.test_accuracy)
        return on_round and on_round(self._plan, record)


def _tell_holders(folders: Sequence[Path], told: set[str]) -> None:
    """Say who has what, once for each process of each job; `told`: what has been said."""
    new = {str(HeldError(folder)) for folder in folders} - told
    told.update(new)
    for text in sorted(new)[:MOST_NAMED]:
        print_line(f"waiting for {text}")
    if len(new) > MOST_NAMED:
        print_line(f"and for {len(new) - MOST_NAMED} more jobs that other processes are running")
