"""Several processes at the same jobs: each job is run by one of them, and all end when all jobs are
done."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from hydra import compose

from fedsim.config.parts import check_parts
from fedsim.config.plan import outline
from fedsim.core.record import Record
from fedsim.jobs import sweep
from fedsim.jobs.cli import run
from fedsim.results.files import LOCKS, MODEL, owned
from fedsim.results.reading import read_metrics, read_summary
from fedsim.rounds.loop import Simulation
from fedsim.running import process as signals
from fedsim.running.process import StopRequests
from tests.run_toys import QUICK, Run, shell, without_seconds

pytestmark = pytest.mark.usefixtures("stop")
ROOT = Path(__file__).parents[1]
WORDS = (
    "num_rounds=4",
    "local.epochs=1",
    "tracker=files_only",
    "num_clients=6",
    "cohort_size=2",
    "selector=oort",
)
SWEEPS = {
    "alone": (),
    "basic": ("-m", "seed=0,1,2"),
    "lanes": ("-m", "seed=0,1,2", "hydra/launcher=lanes"),
}


@pytest.fixture
def holder() -> Iterator[ExitStack]:
    """Holds locks as another process would: they are not inherited, and not shared within a
    process."""
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
    return (
        without_seconds(folder),
        (read_summary(folder) or {})["status"],
        (folder / MODEL).read_bytes(),
    )


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
    assert (
        printed.count(
            f"waiting for {theirs}: another process is running this now (process {os.getpid()} on "
        )
        == 1
    )
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


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, signals.Preempted)]
)
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
        *(
            pytest.param(k, n, s, marks=pytest.mark.slow)
            for k in ("basic", "lanes")
            for n in (1, 2)
            for s in range(5)
        ),
    ],
)
def test_sweeps_at_the_same_time_share_the_jobs_and_outlive_each_other(
    kind: str, kills: int, seed: int, tmp_path: Path
) -> None:
    words = [*WORDS, "num_rounds=15", "-m", "seed=range(4)", *SWEEPS[kind][2:]]
    command = [sys.executable, "-c", TOGETHER, json.dumps(words), str(kills), str(seed)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1:] == [str([0] * (3 - kills))], done.stdout + done.stderr
    assert run([*words, "output_dir=whole"]) == 0
    assert [result(f) for f in folders("outputs")] == [result(f) for f in folders("whole")]
    assert len(folders("outputs")) == 4
    # A killed process may leave the note that it holds a lock, half-written or whole.
    assert not [f for f in Path("outputs").rglob("*.tmp") if f.parent.name != LOCKS]


# --- jobs are composed once, each for itself ---


OUTSIDE = """
from pathlib import Path
from fedsim.core.types import Selection
from fedsim.selectors.base import Selector

class Lowest(Selector):
    def __init__(self, population, *, skip: int):
        super().__init__(population)
        self.skip = skip
        Path("my_conf/selector/lowest.yaml").write_text("_target_: my_lab.Lowest\\nskip: 7\\nnew_key: 1\\n")

    def select(self, round, clients, rng):
        return Selection(clients.available[self.skip : self.skip + self.cohort_size(clients)])
"""


def test_a_selector_outside_the_package_is_two_files_and_editing_them_does_not_reach_later_jobs(
    tmp_path: Path,
) -> None:
    """As a user's shell sees it."""
    (tmp_path / "my_lab.py").write_text(OUTSIDE)
    (tmp_path / "my_conf" / "selector").mkdir(parents=True)
    own = tmp_path / "my_conf" / "selector" / "lowest.yaml"
    own.write_text("_target_: my_lab.Lowest\nskip: 2\n")
    result = shell(Path(), "-m", "--config-dir", "my_conf", "selector=lowest", "seed=0,1", *QUICK)
    assert result.returncode == 0, result.stderr
    assert "new_key" in own.read_text()
    assert [f.name.rpartition("-")[0] for f in folders("outputs")] == [
        f"digits-shards-mlp-lowest-s{s}" for s in (0, 1)
    ]
    for folder in folders("outputs"):
        assert yaml.safe_load((folder / "config.yaml").read_text())["selector"]["skip"] == 2
        assert read_metrics(folder)[0]["selected"] == [2, 3, 4, 5, 6]


PRESET = """# @package _global_
hydra:
  mode: MULTIRUN
  sweeper:
    params:
      selector: random,gpfl
      seed: range(3)
"""


def test_jobs_are_composed_and_planned_once_also_those_of_a_preset(
    fedsim: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_conf" / "preset").mkdir(parents=True)
    (tmp_path / "my_conf" / "preset" / "mine.yaml").write_text(PRESET)
    planned, composed = mock.Mock(side_effect=outline), mock.Mock(side_effect=compose)
    checked = mock.Mock(side_effect=check_parts)
    monkeypatch.setattr("fedsim.config.compose.outline", planned)
    monkeypatch.setattr("fedsim.config.parts.check_parts", checked)
    monkeypatch.setattr("fedsim.config.kept_configs.hydra.compose", composed)
    monkeypatch.setattr("fedsim.config.kept_configs.KEPT", {})
    assert fedsim("--config-dir", "my_conf", "preset=mine", "seed=0,1", "hydra.verbose=false") == 0
    assert sorted(call.args[1]["selector"] for call in planned.mock_calls) == [
        "gpfl",
        "gpfl",
        "random",
        "random",
    ]
    assert checked.call_count == 4
    assert (
        composed.call_count == 1 + 2
    )  # what is common to all first, which says what is swept over; then each choice
    assert {folder.parent.name for folder in folders("outputs")} == {"mine"}


def test_a_run_that_a_sweep_names_twice_is_one_run_in_its_table(
    fedsim: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """A final window of 11 rounds is the default."""
    assert fedsim("-m", "final_window=11,null") == 0
    assert len(folders("outputs")) == 1
    printed = capsys.readouterr().out
    assert "2 jobs, results in outputs/default; different runs among them: 1" in printed
    assert "interval] over the seeds" not in printed
