"""Sweeps whose jobs run in other processes: their command, what they leave, and whether processes
are left."""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedsim.config.compose import check_jobs, compose_jobs, search_path
from fedsim.config.plan import Plan
from fedsim.jobs.task_worker import WorkerTask
from fedsim.results.files import MODEL
from fedsim.results.reading import read_metrics, read_summary
from fedsim.running.outcome import Outcome
from tests import slurm_stand_in

WORDS = ("num_rounds=3", "local.epochs=1", "tracker=files_only", "num_clients=6", "cohort_size=2")
HANG = 1800
LAB = """
import time
from pathlib import Path
from fedsim.core.errors import DataError
from fedsim.selectors.random import Random

class Slow(Random):
    def select(self, round, clients, rng):
        if Path("slow").exists():
            time.sleep(0.2)
        return super().select(round, clients, rng)

class Raises(Random):
    def select(self, round, clients, rng):
        if Path("raises").exists() and round == 2:
            raise ValueError("on purpose")
        return super().select(round, clients, rng)

class Refuses(Random):
    def __init__(self, population, *, mode):
        raise DataError("no data")
"""


def plans_of(*words: str) -> list[Plan]:
    with search_path():
        return check_jobs(compose_jobs([*WORDS, *words], multirun=True))


def sent(*plans: Plan) -> list[Outcome]:
    """How jobs end that are sent to another process and back."""
    task = pickle.loads(pickle.dumps(WorkerTask(plans, time.time(), {})))
    found: list[Outcome] = pickle.loads(pickle.dumps(task.outcomes()))
    return found


def folders(place: Path) -> list[Path]:
    return sorted(p.parent for p in place.glob("*/*/config.yaml"))


def result(folder: Path) -> Any:
    records = [{k: v for k, v in r.items() if "seconds" not in k} for r in read_metrics(folder)]
    return (
        folder.name,
        records,
        (read_summary(folder) or {})["status"],
        (folder / MODEL).read_bytes(),
    )


def statuses(place: Path) -> dict[str, int]:
    """How many jobs ended how, by their folders; "None": no summary."""
    return dict(
        Counter(
            str((read_summary(folder) or {}).get("status")) for folder in folders(place / "outputs")
        )
    )


def going(place: Path) -> list[Path]:
    """Runs in their rounds."""
    return [
        f
        for f in folders(place / "outputs")
        if 3 < len(read_metrics(f)) < 20 and not read_summary(f)
    ]


def pid_of_job(folder: Path) -> int:
    """Of the process that is running it."""
    (holder,) = (folder.parent / ".locks").glob(f"{folder.name}*.holder.txt")
    return int(holder.read_text().split()[1])


def left_of(session: int) -> list[str]:
    """Names of the processes in a session that are not zombies."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
            state, _, _, of_session = rest.split()[:4]
            found += [name] if int(of_session) == session and state != "Z" else []
    return found


def none_left(session: int) -> bool:
    """Waits for processes that end a moment after their parent."""
    for _ in range(900):  # agents of a killed Ray look for it every few seconds
        if not left_of(session):
            return True
        time.sleep(0.2)
    raise AssertionError(f"processes are left: {left_of(session)}")


class Sweep:
    """A command in a session of its own whose jobs, of a selector of `LAB`, run in other
    processes."""

    def __init__(self, place: Path, launcher: str, *words: str) -> None:
        (place / "my_lab.py").write_text(LAB)
        (place / "slow").touch()
        self.place = place
        lab = ("num_rounds=60", "checkpoint.every=2", "selector._target_=my_lab.Slow")
        self.command = [sys.executable, "-m", "fedsim.run", "-m", *WORDS, *lab, words[0]]
        self.launcher = [
            f"hydra/launcher={launcher}",
            *(f"hydra.launcher.{word}" for word in words[1:]),
        ]
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if launcher == "submitit_slurm":
            slurm_stand_in.install(place / "slurm")
            self.environment["PATH"] = f"{place / 'slurm'}:{os.environ['PATH']}"

    def start(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [*self.command, *self.launcher],
            cwd=self.place,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        )

    def wait_for(self, count: int, process: "subprocess.Popen[str]") -> None:
        """Until so many jobs are in their rounds."""
        while len(going(self.place)) < count:
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)

    def check_that_it_goes_on(self) -> None:
        """The same command again leaves what the jobs do one after another in a process."""
        place = self.place
        for more in (self.launcher, ["output_dir=whole"]):
            command = [*self.command, *more]
            done = subprocess.run(
                command,
                cwd=place,
                env=self.environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=HANG,
            )
            assert done.returncode == 0, done.stdout + done.stderr
        assert [result(f) for f in folders(place / "outputs")] == [
            result(f) for f in folders(place / "whole")
        ]
