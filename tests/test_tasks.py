"""Jobs as tasks of other software: how they are grouped, how many there are at a time, and what a signal leaves."""

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fedsim.config.plan import Plan
from fedsim.jobs.sweep import Attempts
from fedsim.jobs.task_worker import Job, Report
from fedsim.jobs.tasks import LostTaskError, Tasks
from fedsim.running.process import StopRequests
from tests.test_ray import plans_of


class Pretended(Tasks):
    """Tasks that end in turn, without doing anything; `lost`: one that reports nothing."""

    how = "as tasks that are pretended"

    def __init__(self, plans: Sequence[Plan], lost: int | None = None, **shape: Any) -> None:
        super().__init__(Attempts(), plans, **shape)
        self.lost = lost
        self.begun: list[list[str]] = []
        self.at_a_time: list[int] = []
        self.asked: list[int] = []

    def begin(self, groups: Sequence[Sequence[Job]]) -> Sequence[int]:
        first = len(self.begun)
        self.begun += [[job["folder"] for job in group] for group in groups]
        return range(first, len(self.begun))

    def ended(self, running: Sequence[int]) -> Sequence[int]:
        self.at_a_time.append(len(running))
        return running[:1]

    def reports(self, task: int) -> list[Report]:
        if task == self.lost:
            raise LostTaskError("its task was killed")
        return [
            Report(folder=folder, status="done", skipped=False, error=None, refused=False)
            for folder in self.begun[task]
        ]

    def ask_to_end(self, running: Sequence[int]) -> None:
        self.asked.append(len(running))


@pytest.fixture
def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    monkeypatch.chdir(tmp_path)
    return plans_of("seed=0,1,2", "local.batch_size=8,16")


def test_a_task_has_jobs_that_can_train_together_and_all_begin_at_once_where_nothing_limits_them(
    plans: list[Plan],
) -> None:
    tasks = Pretended(plans, jobs_per_task=2, max_in_flight=None)
    tasks.run()
    of_batch = {str(plan.folder): plan.local.batch_size for plan in plans}
    assert [[of_batch[folder] for folder in group] for group in tasks.begun] == [[8, 8], [8], [16, 16], [16]]
    assert tasks.at_a_time == [4, 3, 2, 1]
    assert {
        plan.folder: outcome.status for plan, outcome in zip(plans, tasks.attempts.ended.values(), strict=True)
    } == ({plan.folder: "done" for plan in plans})


def test_no_more_tasks_than_asked_for_run_at_a_time_and_one_that_is_lost_takes_no_other_along(
    plans: list[Plan], capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = Pretended(plans, lost=2, jobs_per_task=1, max_in_flight=2)
    tasks.run()
    assert tasks.at_a_time == [2, 2, 2, 2, 2, 1]
    statuses = {str(folder): outcome.status for folder, outcome in tasks.attempts.ended.items()}
    assert statuses == {folder: "failed" if n == 2 else "done" for n, (folder,) in enumerate(tasks.begun)}
    assert "its task was killed; the same command goes on with it" in capsys.readouterr().out


def test_tasks_are_asked_to_end_at_a_second_ctrl_c_too(plans: list[Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    def twice() -> None:
        raise KeyboardInterrupt

    tasks = Pretended(plans, jobs_per_task=1, max_in_flight=3)
    monkeypatch.setattr(tasks, "_look", twice)
    with pytest.raises(KeyboardInterrupt):
        tasks.run()
    assert tasks.asked == [3]


def test_after_a_signal_no_task_begins_and_those_that_run_are_asked_to_end(
    plans: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = StopRequests()
    monkeypatch.setattr("fedsim.jobs.tasks.STOP", stop)
    tasks = Pretended(plans, jobs_per_task=1, max_in_flight=3)
    with stop.working(), stop.deferred():
        monkeypatch.setattr(tasks, "_look", lambda: stop.handle(signal.SIGTERM))  # in the first round of the loop
        tasks.run()
    assert len(tasks.begun) == 3
    assert tasks.asked == [2, 1, 0]
