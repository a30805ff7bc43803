"""Jobs as tasks of other software: how they are grouped, how many there are at a time, and what a signal leaves."""

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fedsim.config.plan import Plan
from fedsim.jobs.sweep import Attempts
from fedsim.jobs.tasks import TaskLauncher
from fedsim.running.outcome import Outcome
from fedsim.running.process import Preempted, StopRequests
from tests.launcher_toys import plans_of


@dataclass(kw_only=True)
class Pretended(TaskLauncher):
    """Tasks that end in turn, most of them without doing anything; `lost`: one that reports nothing."""

    most: int | None
    lost: int | None = None
    does_them: bool = False
    begun: list[list[Path]] = field(default_factory=list)
    at_a_time: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)

    how = "as tasks that are pretended"

    def problems(self) -> list[None]:
        return []

    @property
    def tasks_at_a_time(self) -> int | None:
        return self.most

    @contextmanager
    def connected(self, place: Path) -> Iterator[None]:
        yield

    def begin(self, groups: Sequence[Sequence[Plan]], since: float) -> Sequence[int]:
        first = len(self.begun)
        self.begun += [[plan.folder for plan in group] for group in groups]
        if self.does_them:
            Attempts().run_in_turn([plan for group in groups for plan in group])
        return range(first, len(self.begun))

    def ended(self, running: Mapping[int, Sequence[Plan]]) -> Sequence[int]:
        self.at_a_time.append(len(running))
        return list(running)[:1]

    def outcomes(self, task: int) -> list[Outcome]:
        if task == self.lost:
            raise OSError("killed")
        return [Outcome("done", {})] * len(self.begun[task])

    def ask_to_end(self, running: Sequence[int]) -> None:
        self.asked.append(len(running))


@pytest.fixture
def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    monkeypatch.chdir(tmp_path)
    return plans_of("seed=0,1,2", "local.batch_size=8,16")


def test_a_task_has_jobs_that_can_train_together_and_all_begin_at_once_where_nothing_limits_them(
    plans: list[Plan],
) -> None:
    tasks, attempts = Pretended(jobs_per_task=2, most=None), Attempts()
    tasks.run(attempts, plans)
    of_batch = {plan.folder: plan.local.batch_size for plan in plans}
    assert [[of_batch[folder] for folder in group] for group in tasks.begun] == [[8, 8], [8], [16, 16], [16]]
    assert tasks.at_a_time == [4, 3, 2, 1]
    assert {folder: one.status for folder, one in attempts.ended.items()} == {plan.folder: "done" for plan in plans}


def test_no_more_tasks_than_asked_for_run_at_a_time_and_one_that_is_lost_takes_no_other_along(
    plans: list[Plan], capsys: pytest.CaptureFixture[str]
) -> None:
    tasks, attempts = Pretended(jobs_per_task=1, most=2, lost=2), Attempts()
    tasks.run(attempts, plans)
    assert tasks.at_a_time == [2, 2, 2, 2, 2, 1]
    statuses = {folder: outcome.status for folder, outcome in attempts.ended.items()}
    assert statuses == {folder: "failed" if n == 2 else "done" for n, (folder,) in enumerate(tasks.begun)}
    assert "its task is lost (OSError: killed); the same command goes on with it" in capsys.readouterr().out

    attempts = Attempts()  # one that is lost has done what its folder says
    Pretended(jobs_per_task=1, most=None, lost=0, does_them=True).run(attempts, plans[:1])
    assert [(one.status, one.summary["rounds"]) for one in attempts.ended.values()] == [("done", 3)]


def test_tasks_are_asked_to_end_at_a_second_ctrl_c_too(plans: list[Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(self: Any, running: Any) -> None:
        raise KeyboardInterrupt

    tasks = Pretended(jobs_per_task=1, most=3)
    monkeypatch.setattr(Pretended, "ended", twice)
    with pytest.raises(KeyboardInterrupt):
        tasks.run(Attempts(), plans)
    assert tasks.asked == [3]


def test_after_a_signal_no_task_begins_and_those_that_run_are_asked_to_end(
    plans: list[Plan], stop: StopRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = Pretended.ended

    def in_the_first_look(self: Pretended, running: Any) -> Sequence[int]:
        stop.handle(signal.SIGTERM)
        return ended(self, running)

    monkeypatch.setattr(Pretended, "ended", in_the_first_look)
    tasks = Pretended(jobs_per_task=1, most=3)
    with stop.working(), pytest.raises(Preempted):
        tasks.run(Attempts(), plans)
    assert len(tasks.begun) == 3
    assert tasks.asked == [2]
