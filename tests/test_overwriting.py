"""`overwrite=true` over several jobs: the same command goes on with those that are not replaced
yet."""

import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsim.api.experiments import run_sweep
from fedsim.commands.show import run as show
from fedsim.config.plan import Plan
from fedsim.core.errors import DataError
from fedsim.core.record import Record
from fedsim.jobs.cli import run
from fedsim.jobs.overwriting import Overwriting
from fedsim.jobs.sweep import Attempts
from fedsim.jobs.task_worker import WorkerTask
from fedsim.results.files import owned
from fedsim.rounds.loop import Simulation
from fedsim.running.process import Preempted, StopRequests
from tests.launcher_toys import plans_of

WORDS = ("num_rounds=4", "local.epochs=1", "tracker=files_only", "num_clients=6", "cohort_size=2")
SWEEP, AGAIN = (*WORDS, "-m", "seed=0,1"), (*WORDS, "-m", "seed=0,1", "overwrite=true")
Steps = list[tuple[int, int]]


@pytest.fixture
def steps(stop: StopRequests, monkeypatch: pytest.MonkeyPatch) -> Steps:
    """The seed and the number of each round that was run."""
    done: Steps = []
    step = Simulation.step

    def noted(self: Simulation) -> Record:
        done.append((self.components.streams.seed, self.round + 1))
        return step(self)

    monkeypatch.setattr(Simulation, "step", noted)
    return done


@pytest.fixture
def broken_off(stop: StopRequests, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run a command that gets a signal in the second round of the job with seed 1."""

    def call(
        *words: str, number: int = signal.SIGTERM, error: type[BaseException] = Preempted
    ) -> None:
        step = Simulation.step

        def asked(self: Simulation) -> Record:
            if (self.components.streams.seed, self.round) == (1, 1):
                stop.handle(number)
            return step(self)

        with monkeypatch.context() as patch:
            patch.setattr(Simulation, "step", asked)
            with pytest.raises(error):
                run(words)
        stop.__init__()  # type: ignore[misc]

    return call


def rounds_of(seed: int, first: int = 1) -> Steps:
    return [(seed, number) for number in range(first, 5)]


def stamps(seed: int) -> dict[Path, int]:
    """When each file of a finished run was written."""
    (folder,) = Path("outputs/default").glob(f"*-s{seed}-*")
    return {path: path.stat().st_mtime_ns for path in folder.iterdir()}


def notes() -> list[Path]:
    return list(Path().rglob("overwrite-*"))


@pytest.mark.parametrize(
    ("there", "number", "error"),
    [(True, signal.SIGINT, KeyboardInterrupt), (False, signal.SIGTERM, Preempted)],
)
def test_the_same_command_goes_on_with_what_is_not_replaced_and_once_more_starts_anew(
    there: bool,
    number: int,
    error: Any,
    steps: Steps,
    broken_off: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if there:
        assert run(SWEEP) == 0
    steps.clear()
    broken_off(*AGAIN, number=number, error=error)
    assert steps == [*rounds_of(0), (1, 1), (1, 2)]
    printed = capsys.readouterr().out
    assert "1 of 2 jobs have ended, results in outputs/default" in printed
    assert "the same command resumes them: fedsim" in printed
    first = stamps(0)
    steps.clear()
    assert run(AGAIN) == 0
    assert steps == rounds_of(1, 3)
    assert stamps(0) == first
    printed = capsys.readouterr().out
    notice = "resuming with overwrite=true of .*: 1 of 2 jobs are replaced already"
    assert re.search(notice, " ".join(printed.split()))
    assert not notes()
    steps.clear()
    assert run(AGAIN) == 0
    assert steps == [*rounds_of(0), *rounds_of(1)]
    assert {
        path.name for path in Path("outputs/default").iterdir() if path.name.startswith(".")
    } == {".locks"}


def test_what_is_killed_without_warning_goes_on_too(
    stop: StopRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the second job is run, a command that began now would find the first one replaced."""
    found: list[int] = []
    step = Simulation.step

    def seen(self: Simulation) -> Record:
        if self.components.streams.seed == 1:
            found.append(len(Overwriting(plans_of(*WORDS, "seed=0,1", "overwrite=true")).replaced))
        return step(self)

    monkeypatch.setattr(Simulation, "step", seen)
    assert run(AGAIN) == 0
    assert found == [1] * 4
    assert not notes()


def test_it_holds_for_its_own_jobs_in_any_order_and_for_no_others(
    steps: Steps, broken_off: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(SWEEP) == 0
    broken_off(*AGAIN)
    for words, expected in (
        (["seed=0"], rounds_of(0)),
        (["-m", "seed=0,2"], [*rounds_of(0), *rounds_of(2)]),
        (["-m", "seed=1,0"], rounds_of(1, 3)),
    ):
        steps.clear()
        assert run([*WORDS, *words, "overwrite=true"]) == 0
        assert steps == expected
    broken_off(*AGAIN)
    capsys.readouterr()
    assert show([*AGAIN, "--json"]) == 0
    assert [job["state"] for job in json.loads(capsys.readouterr().out)] == ["done", "partial"]
    (note,) = notes()
    note.write_text("[]")  # is damaged: all jobs are run
    steps.clear()
    assert run(AGAIN) == 0
    assert steps == [*rounds_of(0), *rounds_of(1, 3)]


def test_a_job_that_fails_is_run_again_alone_and_its_traceback_is_named(
    steps: Steps, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(self: Simulation) -> Record:
        if self.components.streams.seed == 1:
            raise ZeroDivisionError
        return step(self)

    assert run(SWEEP) == 0
    step = Simulation.step
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "step", failing)
        assert run(AGAIN) == 1
    printed = "".join(capsys.readouterr().out.split())
    (error,) = Path("outputs").rglob("error.txt")
    assert error.parent.parent.name == ".replacements"
    assert f"tracebackofseed=1:{error}" in printed
    steps.clear()
    assert run(AGAIN) == 0
    assert steps == rounds_of(1)


def test_jobs_that_are_refused_leave_nothing(
    stop: StopRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(plan: Any) -> Any:
        raise DataError("no data")

    monkeypatch.setattr("fedsim.running.experiment.build", refuse)
    assert run(AGAIN) == 3
    assert not list(Path().iterdir())


@pytest.mark.parametrize("lanes", [None, 2])
def test_a_sweep_from_python_resumes_with_the_jobs_that_are_not_replaced(
    lanes: int | None, steps: Steps
) -> None:
    words = [*WORDS, "seed=0,1", "overwrite=true"]
    run_sweep(words)

    def stop_seed_1(plan: Plan, record: Record) -> bool:
        return plan.settings.seed == 1 and record.round == 2

    steps.clear()
    sweep = run_sweep(words, lanes=lanes, on_round=stop_seed_1)
    assert [result.status for result in sweep] == ["done", "interrupted"]
    steps.clear()
    sweep = run_sweep(words, lanes=lanes)
    assert steps == rounds_of(1, 3)
    assert [(result.status, result.skipped) for result in sweep] == [
        ("done", True),
        ("done", False),
    ]
    assert not notes()
    steps.clear()
    run_sweep(words)
    assert steps == [*rounds_of(0), *rounds_of(1)]


# --- other processes ---


@pytest.mark.parametrize("number", [1, 2])
def test_a_task_that_is_started_again_does_not_run_again_what_it_has_replaced(
    number: int, steps: Steps
) -> None:
    plans = plans_of("seed=range(2)", "num_rounds=4", "overwrite=true")[:number]
    for plan in plans[:1]:
        Attempts().run(plan)
    work = WorkerTask(plans, time.time(), {})
    for skipped in (False, True):
        steps.clear()
        assert [(one.status, one.skipped) for one in work.outcomes()] == [
            ("done", skipped)
        ] * number
        assert len(steps) == (0 if skipped else 4 * number)


def test_what_another_process_finishes_while_this_one_waits_for_it_is_not_run_again(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was written since the overwriting began."""
    assert run(SWEEP) == 0
    first = stamps(0), stamps(1)
    (plan,) = plans_of("seed=1", "num_rounds=4", "overwrite=true")
    holder = owned(plan.folder)
    holder.__enter__()

    def end(_: float) -> None:
        holder.__exit__(None, None, None)
        Attempts().run(plan)
        steps.clear()

    monkeypatch.setattr("fedsim.jobs.sweep.time.sleep", end)
    assert run(AGAIN) == 0
    assert steps == []
    assert all(stamps(seed) != first[seed] for seed in (0, 1))
