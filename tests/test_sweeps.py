"""Several processes at the same jobs: each job is run by one of them, and all end when all jobs are done."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from fedsim.core.record import Record
from fedsim.jobs import sweep
from fedsim.jobs.cli import run
from fedsim.results.files import MODEL, HeldError, is_free, owned, read_summary
from fedsim.rounds.loop import Simulation
from fedsim.running import process as signals
from fedsim.running.process import StopRequests
from tests.run_toys import without_seconds

pytestmark = pytest.mark.usefixtures("stop")
ROOT = Path(__file__).parents[1]
WORDS = ("num_rounds=4", "local.epochs=1", "tracker=files_only", "num_clients=6", "cohort_size=2", "selector=oort")
SWEEPS = {"alone": (), "basic": ("-m", "seed=0,1,2"), "lanes": ("-m", "seed=0,1,2", "hydra/launcher=lanes")}


@pytest.fixture
def holder() -> Iterator[ExitStack]:
    """Holds locks as another process would: they are not inherited, and not shared within a process."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], list[float]]:
    """Call a function instead of every pause between two looks; the list of pauses."""

    def install(pause: Callable[[], None]) -> list[float]:
        pauses: list[float] = []
        monkeypatch.setattr(sweep.time, "sleep", lambda seconds: (pauses.append(seconds), pause()))
        return pauses

    return install


def folders(place: str) -> list[Path]:
    return sorted(p.parent for p in Path(place).glob("*/*/config.yaml"))


def result(folder: Path) -> Any:
    return without_seconds(folder), (read_summary(folder) or {})["status"], (folder / MODEL).read_bytes()


def counterpart(folder: Path) -> Path:
    """The same run under outputs/."""
    return Path("outputs", *folder.parts[-2:])


@pytest.mark.parametrize("kind", SWEEPS)
def test_what_another_process_runs_is_waited_for_and_taken_as_it_is(
    kind: str, holder: ExitStack, waiting: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*WORDS, *SWEEPS[kind]]
    assert run([*words, "output_dir=whole"]) == 0
    whole = folders("whole")
    theirs = counterpart(whole[-1])
    holder.enter_context(owned(theirs))
    finished_first: list[list[Path]] = []

    def end_the_other() -> None:
        if len(pauses) == 3:
            finished_first.append(folders("outputs"))
            theirs.parent.mkdir(parents=True, exist_ok=True)
            whole[-1].rename(theirs)
            holder.close()

    pauses = waiting(end_the_other)
    capsys.readouterr()
    assert run(words) == 0
    assert len(pauses) == 3
    assert finished_first == [[counterpart(folder) for folder in whole[:-1]]]
    printed = capsys.readouterr().out
    assert printed.count(f"waiting for {theirs}: another process is running this now (process {os.getpid()} on ") == 1
    assert f"already done: {theirs}" in printed


@pytest.mark.parametrize("kind", SWEEPS)
def test_a_job_whose_process_has_died_is_taken_over_from_its_checkpoint(
    kind: str, stop: StopRequests, holder: ExitStack, waiting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*WORDS, *SWEEPS[kind]]
    assert run([*words, "output_dir=whole"]) == 0
    step, asked, began = Simulation.step, [signal.SIGTERM], []

    def observed(self: Simulation) -> Record:
        began.append(self.round)
        if self.round == 2 and asked:
            stop.handle(asked.pop())
        return step(self)

    monkeypatch.setattr(Simulation, "step", observed)
    with pytest.raises(signals.Preempted):
        run([*WORDS])  # the job with seed 0, in all of them
    stop.__init__()  # type: ignore[misc]
    (theirs,) = folders("outputs")
    assert began == [0, 1, 2]
    began.clear()
    holder.enter_context(owned(theirs))
    pauses = waiting(lambda: holder.close())
    assert run(words) == 0
    assert len(pauses) == 1
    assert began[-1] == 3
    assert len(began) == 1 + 4 * (len(folders("whole")) - 1)
    assert [result(f) for f in folders("outputs")] == [result(f) for f in folders("whole")]


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, signals.Preempted)])
def test_a_signal_ends_the_wait_and_touches_nothing(
    number: int, error: type[BaseException], stop: StopRequests, holder: ExitStack, waiting: Any
) -> None:
    assert run([*WORDS, "output_dir=whole"]) == 0
    theirs = counterpart(*folders("whole"))
    holder.enter_context(owned(theirs))
    pauses = waiting(lambda: stop.handle(number))
    with pytest.raises(error):
        run([*WORDS])
    assert len(pauses) == 1
    assert not theirs.exists()


def test_a_lock_names_its_holder_until_it_is_released_and_an_old_name_harms_nobody(tmp_path: Path) -> None:
    folder = tmp_path / "place" / "run"
    note = folder.parent / ".locks" / "run.holder.txt"
    with owned(folder):
        assert note.read_text().startswith(f"process {os.getpid()} on ")
        assert not is_free(folder)
        note.write_bytes(b"\xff")
        with pytest.raises(HeldError, match=r"another process is running this now \(unknown which\)"), owned(folder):
            pass
    assert is_free(folder)
    assert not note.exists()
    assert is_free(tmp_path / "nowhere" / "run")
    assert not (tmp_path / "nowhere").exists()


TOGETHER = """
import json, os, random, signal, sys, time
from fedsim.jobs.cli import run
from fedsim.jobs import sweep

words, kills, seed = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
run([*words, "num_rounds=1", "output_dir=first"])  # imports all that a run needs
sweep.POLL_SECONDS = 0.05

def begin():
    pid = os.fork()
    if pid:
        return pid
    code = run(words)
    sys.stdout.flush()
    os._exit(code)

draw = random.Random(seed)
processes = [begin() for _ in range(3)]
for _ in range(kills):
    time.sleep(draw.uniform(0.05, 0.4))
    os.kill(processes.pop(), signal.SIGKILL)
statuses = [os.waitpid(pid, 0)[1] for pid in processes]
print([os.waitstatus_to_exitcode(status) for status in statuses])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    ("kind", "kills", "seed"),
    [
        ("basic", 1, 0),
        *(pytest.param(k, n, s, marks=pytest.mark.slow) for k in ("basic", "lanes") for n in (1, 2) for s in range(5)),
    ],
)
def test_sweeps_at_the_same_time_share_the_jobs_and_outlive_each_other(
    kind: str, kills: int, seed: int, tmp_path: Path
) -> None:
    words = [*WORDS, "num_rounds=30", "-m", "seed=range(4)", *SWEEPS[kind][2:]]
    command = [sys.executable, "-c", TOGETHER, json.dumps(words), str(kills), str(seed)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == [str([0] * (3 - kills))], done.stdout + done.stderr
    assert run([*words, "output_dir=whole"]) == 0
    assert [result(f) for f in folders("outputs")] == [result(f) for f in folders("whole")]
    assert len(folders("outputs")) == 4
    assert not list(Path("outputs").rglob("*.tmp"))
