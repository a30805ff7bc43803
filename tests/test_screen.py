"""What a command says: before its jobs, about each of them, and what comes next; and a screen that
goes away."""

import errno
import io
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedsim import compose
from fedsim import run as entry
from fedsim.core.record import Record
from fedsim.data.parquet import Parquet
from fedsim.jobs import narration
from fedsim.jobs.cli import run as fedsim
from fedsim.jobs.progress import LEAST_ROUNDS, WINDOW, Progress
from fedsim.results.reading import read_summary
from fedsim.rounds.loop import Simulation
from fedsim.running import experiment
from fedsim.running.assembly import build
from fedsim.running.process import Preempted, StopRequests
from fedsim.tracking import tables as screen
from fedsim.tracking.base import RunInfo, SweepPosition
from fedsim.tracking.console import ConsoleTracker, lanes_accuracy, time_left
from fedsim.tracking.tables import Output, print_line, sweep_table
from fedsim.tracking.wandb_tracker import WandbTracker

pytestmark = pytest.mark.usefixtures("stop")
ROOT = Path(__file__).parents[1]
SMALL = ["num_clients=6", "cohort_size=2", "local.epochs=1", "num_rounds=4"]
QUIET, SHOWN = [*SMALL, "tracker=files_only"], [*SMALL, "tracker.wandb.mode=disabled"]


RUNNING = ("", "seed=1", "-m seed=0,1", "-cd mine ~tracker.wandb", "+tracker.mine=x --multirun")
ASKING = ("--help", "seed=1 --cfg job", "-c job", "report")


def test_a_command_that_runs_jobs_says_at_once_that_it_is_on_its_way_and_one_that_answers_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (*RUNNING, *ASKING):
        entry.announce(words.split())
        told = "fedsim 0.1.0: loading, and checking the config\n" if words in RUNNING else ""
        assert capsys.readouterr() == ("", told), words
    monkeypatch.setattr(sys, "stderr", None)  # closed
    entry.announce([])


def test_a_sweep_says_what_it_does_which_job_runs_and_what_comes_next(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert fedsim(["-m", *SHOWN, "selector=random,full", "name=trial"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 jobs, results in outputs/trial"
    assert "job 1/2 trial: digits · shards · mlp · random · seed 0" in lines
    assert "job 2/2 trial: digits · shards · mlp · full · seed 0" in lines
    assert (
        sum(line.startswith("job 2/2 done · selector=full · final accuracy ") for line in lines)
        == 1
    )
    assert lines[-2:] == ["results in outputs/trial", "next: fedsim report outputs/trial"]
    assert not any("participation" in line for line in lines)  # the table of one run
    assert fedsim(["-m", *SHOWN, "selector=random,full", "name=trial"]) == 0
    again = capsys.readouterr().out
    assert (
        "2 jobs, results in outputs/trial; 2 have ended before (overwrite=true runs them again)"
        in again
    )
    assert "already done" not in again


def test_a_preset_says_what_it_costs_before_its_first_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own" / "preset" / "mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(
        "# @package _global_\n# Mine.\n#   cost:     two minutes,\n#             or three\nname: mine\n"
    )
    shown = []
    for _ in range(2):  # nothing is left the second time
        assert (
            fedsim(["-m", "--config-dir", str(path.parents[1]), "preset=mine", *QUIET, "seed=0,1"])
            == 0
        )
        shown.append(capsys.readouterr().out)
    assert shown[0].startswith(
        "2 jobs, results in outputs/mine\ncost of preset=mine: two minutes, or three\n"
    )
    assert "cost of" not in shown[1]


def test_a_set_up_that_takes_long_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = threading.Event()
    monkeypatch.setattr(screen, "SLOW_SECONDS", 0.0)
    monkeypatch.setattr(screen, "print_line", lambda text: (told.set(), print_line(text)))
    monkeypatch.setattr(experiment, "build", lambda plan: (told.wait(60), build(plan))[1])
    fedsim(QUIET)
    assert (
        capsys.readouterr().out.splitlines()[1] == "setting up 6 clients: their data, and the model"
    )


def test_files_only_has_a_line_at_the_start_and_one_at_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert fedsim(QUIET) == 0
    first, last, *where = capsys.readouterr().out.splitlines()
    assert first == "default: digits · shards · mlp · random · seed 0"
    assert last.startswith("done · final accuracy ")
    (folder,) = Path("outputs/default").glob("digits*")
    assert where == [f"results in {folder}", "next: fedsim report outputs/default"]


def test_a_tracker_that_failed_is_told_where_no_other_could_tell_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken = "+tracker.pen={_target_: tests.test_tracking.OutOfInk}"
    assert fedsim(["-m", *QUIET, "seed=1,2", broken]) == 0
    first, *told, last, _ = capsys.readouterr().out.splitlines()
    assert first == "2 jobs, results in outputs/default"
    assert [line.partition(" ·")[0] for line in told if line.startswith("job ")] == [
        "job 1/2 done",
        "job 2/2 done",
    ]
    assert last == "tracker.pen failed: RuntimeError: out of ink (in 2 jobs)"
    assert fedsim([*QUIET, "seed=1", broken]) == 0  # already done
    assert "tracker.pen" not in capsys.readouterr().out
    assert fedsim([*SHOWN, "seed=4", broken]) == 0  # told by the tracker `console`
    assert capsys.readouterr().out.count("tracker.pen") == 1


def test_a_tracker_that_is_named_too_late_is_told_to_get_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pen = "+tracker.pen={_target_: tests.test_tracking.OutOfInk}"
    assert fedsim([*QUIET, "seed=1"]) == 0
    capsys.readouterr()
    for words in ([], ["tracker=console"]):
        assert fedsim([*QUIET, "seed=1", *words]) == 0
        assert capsys.readouterr().out.startswith("already done: ")
    assert fedsim([*QUIET, "seed=1", pen]) == 0
    assert capsys.readouterr().out.startswith(
        "tracker.pen gets nothing of a run that has ended without it (overwrite=true runs it again)\n"
        "already done: "
    )


def test_results_are_shown_before_wandb_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        WandbTracker, "finish", lambda self, summary: said.append(capsys.readouterr().out)
    )
    assert fedsim(SHOWN) == 0
    assert said[0].splitlines()[-1].startswith("results in ")


def test_a_run_with_a_terminal_ends_with_its_table_and_the_next_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert fedsim(SHOWN) == 0
    told = capsys.readouterr().out
    assert "\x1b" not in told
    counts = [
        told.count(part)
        for part in ("digits · shards · mlp · random · seed 0", "participation", "results in")
    ]
    assert counts == [1, 1, 1]
    assert told.endswith("next: fedsim report outputs/default\n")
    assert fedsim([*SHOWN, "-m", "seed=1,2", "hydra/launcher=lanes"]) == 0
    assert re.search(r"round 4/4 .*test accuracy 0\.\d{4}", capsys.readouterr().out)


def test_the_same_missing_data_are_looked_for_and_told_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    load = Parquet.load
    monkeypatch.setattr(Parquet, "load", lambda self: looked.append("") or load(self))
    monkeypatch.setattr("fedsim.jobs.prepare._source_problem", lambda plan: None)
    words = [*QUIET, "-m", "dataset=parquet", "dataset.path=nowhere", "partition=iid", "seed=0,1,2"]
    for launcher in ("basic", "lanes"):
        assert fedsim([*words, f"hydra/launcher={launcher}"]) == 3
        told = capsys.readouterr()
        assert told.err.count("dataset.path=nowhere: is missing a parquet file") == 1
        assert "parquet file" not in told.out
        assert "job 3/3 data · seed=2 · see the error at the end" in told.out
        assert told.err.endswith("    concerns 3 of 3 jobs\n")
        assert "the same command resumes 3 jobs that are not done: fedsim num_clients=6" in told.out
        assert "next:" not in told.out
    assert len(looked) == 2


def in_round(
    monkeypatch: pytest.MonkeyPatch, round: int, seed: int, call: Callable[[], object]
) -> None:
    """What happens after this round of the run with this seed."""
    step = Simulation.step

    def stepping(self: Simulation) -> Record:
        if (self.components.streams.seed, self.round) == (seed, round):
            call()
        return step(self)

    monkeypatch.setattr(Simulation, "step", stepping)


def test_what_failed_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise KeyError("mine")

    in_round(monkeypatch, 2, 1, fail)
    monkeypatch.setenv("UV", "/usr/bin/uv")
    words = ["-m", *QUIET, "seed=0,1", "name=with space"]
    assert fedsim(words) == 1
    told = capsys.readouterr().out
    (folder,) = Path("outputs/with space").glob("*-s1-*")
    assert "job 2/2 failed · seed=1 · KeyError: 'mine'" in told
    assert f"traceback of seed=1: {folder / 'error.txt'}" in told
    assert (
        f"resumes the one that is not done: uv run fedsim {' '.join(words[:-1])} 'name=with space'"
        in told
    )
    assert "next: uv run fedsim report 'outputs/with space'" in told


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_command_that_is_asked_to_end_says_how_it_goes_on(
    jobs: int,
    stop: StopRequests,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    in_round(monkeypatch, 1, jobs - 1, lambda: stop.handle(15))
    words = [*QUIET, "-m", "seed=0,1,2"] if jobs > 1 else QUIET
    with pytest.raises(Preempted):
        fedsim(words)
    told = capsys.readouterr().out.splitlines()
    assert told[-1] == f"the same command resumes them: fedsim {' '.join(words)}"
    assert ("2 of 3 jobs have ended, results in outputs/default" in told) == (jobs > 1)


def test_results_of_several_names_are_below_one_folder() -> None:
    plans = compose([*QUIET, "name=a,b"])
    assert narration.Narration(plans, [[], []], (), Progress(plans)).folder == Path("outputs")
    plans = [
        plans[0],
        replace(plans[1], folder=Path.cwd() / "elsewhere" / "b" / plans[1].folder.name),
    ]
    assert narration.Narration(plans, [[], []], (), Progress(plans)).folder == Path.cwd()
    folders = [Path("..") / "a" / "run", Path("b") / "run"]
    plans = [replace(plan, folder=folder) for plan, folder in zip(plans, folders, strict=True)]
    assert narration.Narration(plans, [[], []], (), Progress(plans)).folder == Path("..")


def test_the_remaining_time_is_rounds_left_times_recent_seconds_a_round() -> None:
    clock = [100.0]
    plans = compose([*QUIET, "seed=0,1,2", "num_rounds=1000"])
    progress = Progress(plans, lambda: clock[0])
    position: Any = progress.position(plans[1].folder)
    assert (position.number, position.total) == (2, 3)
    progress.job_ended(plans[2].folder)  # was done before
    clock[0] += 500  # imports and data
    for t in range(1, LEAST_ROUNDS + 2):
        assert progress.remaining_seconds() is None
        clock[0] += 2
        progress.round_ended(plans[0].folder, 1000 - t, 0.5)
    assert progress.remaining_seconds() == 2 * (2000 - LEAST_ROUNDS - 1)
    for t in range(LEAST_ROUNDS + 2, 1001):
        clock[0] += 4
        progress.round_ended(plans[0].folder, 1000 - t, None)
    assert 1000 - LEAST_ROUNDS > WINDOW
    assert (
        progress.remaining_seconds() == 4 * 1000
    )  # the faster rounds at the beginning count no more
    assert progress.accuracies([plan.folder for plan in plans]) == [0.5]
    progress.job_ended(plans[1].folder)
    assert progress.remaining_seconds() is None
    assert Progress(plans[:1]).position(plans[0].folder) is None  # one job is no sweep
    assert Progress().position(plans[0].folder) is None


def test_lines_of_a_job_have_its_number_and_the_sweeps_time_and_those_of_lanes_their_accuracies(
    tmp_path: Path,
) -> None:
    tracker = ConsoleTracker(progress=True)
    tracker.console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    tracker.start(
        RunInfo(
            "trial", tmp_path, {}, {"model": "mlp"}, 0, 10, sweep=SweepPosition(2, 4, lambda: 30.0)
        )
    )
    tracker.log({"round": 1, "test_accuracy": 0.5})
    tracker.finish({"status": "done"})
    assert tracker.console.export_text().splitlines() == [
        "job 2/4 trial: mlp · seed 0",
        "  round 1/10  test accuracy 0.5000  sweep: 30.0 s left",
    ]
    assert (time_left(None), time_left(SweepPosition(1, 2, lambda: None))) == ("", "")
    shown = [lanes_accuracy(accuracies) for accuracies in ([], [0.5], [0.7, 0.25, 0.5])]
    assert shown == ["-", "0.5000", "0.2500 to 0.7000"]


WORST = {
    "selector": "power_of_choice_trained_d10",
    "server.validation_fraction": "0.0125",
    "selector.valuation.num_permutations": "1000",
}


def test_tables_fit_80_columns_break_no_word_and_say_what_they_leave_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    summary = {
        **{
            "final_accuracy": 0.5,
            "last_accuracy": 0.25,
            "mean_participation_ratio": 1.0,
            "wall_seconds": 512.0,
        },
        "totals": {"bytes_down": 2_567_000_000, "bytes_up": 2_567_000},
    }
    labels = [WORST, {name: f"{value}5" for name, value in WORST.items()}]
    common = {"status": "preempted", "summary": summary}
    sweep_table(
        [{"labels": one, "seed": seed, **common} for one in labels for seed in range(2)],
        Console(width=80),
    )
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    words = Counter(word for line in lines for word in line.split())
    assert words["preempted"] == 4
    for word in (value for one in labels for value in one.values()):
        assert words[word] == 3  # once a job, and once in the means over seeds
    heads = ("selector", "validation_fraction", "num_permutations")  # the keys' last parts
    assert [words[name] for name in heads] == [2] * 3
    assert (
        "left out at this width: part., up, down mean [95 % interval] over the seeds"
        in " ".join(" ".join(lines).split())
    )


class Stream(io.TextIOWrapper):
    """A standard output that fails with an `error`, if any."""

    def __init__(self, error: OSError | None) -> None:
        super().__init__(io.BytesIO(), encoding="ascii", write_through=True)
        self.error = error

    def write(self, text: str) -> int:
        if self.error is not None:
            raise self.error
        return super().write(text)


FULL, BROKEN = (
    OSError(errno.ENOSPC, "No space left on device"),
    BrokenPipeError(errno.EPIPE, "Broken pipe"),
)
REFUSED = (
    "fedsim: cannot write to the standard output (No space left on device); continuing without it\n"
)


@pytest.mark.parametrize(
    ("stdout", "told"),
    [(Stream(FULL), REFUSED), (None, ""), (Stream(BROKEN), ""), (Stream(None), "")],
)
def test_an_output_that_cannot_be_written_is_no_error_and_is_told_once_at_most(
    stdout: Any, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", stdout)
    output = Output()
    for _ in range(3):
        assert output.write("lost: 2 ± 1\n") == 12
        output.flush()
    assert not output.isatty()
    assert capsys.readouterr().err == told
    if stdout is not None:
        assert stdout.buffer.getvalue() == (b"lost: 2 ? 1\n" * 3 if stdout.error is None else b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
@pytest.mark.parametrize(
    "told",
    [
        pytest.param("", id="closed"),
        pytest.param("cannot write to the standard output", marks=pytest.mark.slow, id="full"),
    ],
)
def test_a_sweep_whose_screen_goes_away_runs_to_its_end(told: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedsim.run", *SHOWN, "-m", "seed=0,1"]
    reading, stdout = os.pipe()
    os.close(reading)
    if told:
        stdout = os.open("/dev/full", os.O_WRONLY)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, env=environment, text=True, check=False
    )
    os.close(stdout)
    assert done.returncode == 0, done.stderr
    first, *others = done.stderr.splitlines()
    assert first.startswith("fedsim 0.1.0: loading")
    assert [told in line for line in others] == ([True] if told else [])
    statuses = [
        (read_summary(path.parent) or {})["status"]
        for path in Path("outputs").glob("*/*/summary.json")
    ]
    assert statuses == ["done", "done"]
