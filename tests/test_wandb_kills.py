"""A run that is killed while W&B logs it offline, and one whose W&B process is killed: nothing is lost or piles up.

W&B writes its offline records in blocks of 32 KiB: a kill loses what is not on the disk yet. The run's files have it.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedsim.results.files import read_metrics, read_summary
from fedsim.tracking.wandb_tracker import COMMAND
from tests.run_toys import ROOT
from tests.test_signals import children_of
from tests.wandb_toys import history_of, offline_records, wait_for

ROUNDS, PARKED = 20, 10
WORDS = (f"num_rounds={ROUNDS}", "local.epochs=1", "num_clients=6", "cohort_size=2", "checkpoint.every=3")
SCRIPT = """
import json, os, sys, time, traceback
from pathlib import Path
from fedsim.jobs.cli import run
from fedsim.rounds.loop import Simulation

words, parked = json.loads(sys.argv[1]), int(sys.argv[2])
run([*words, "num_rounds=1", "output_dir=first", "tracker=files_only"])  # imports all that a run needs
step = Simulation.step

def parking(self):
    while self.round >= parked and Path("parking").exists():
        time.sleep(0.02)
    return step(self)

Simulation.step = parking
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        code = 99
        try:
            code = run([*words, "tracker.wandb.mode=offline"])
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    print("PID", pid, flush=True)
    print("CODE", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_kills_of_a_run_and_of_its_wandb_process_lose_no_round(tmp_path: Path) -> None:
    (tmp_path / "parking").touch()
    script = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, json.dumps(WORDS), str(PARKED)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "NETRC": str(tmp_path / "none")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def said(word: str) -> int:
        assert script.stdout is not None
        return next(int(line.split()[1]) for line in script.stdout if line.startswith(f"{word} "))

    def begin() -> int:
        assert script.stdin is not None
        print("begin", file=script.stdin, flush=True)
        return said("PID")

    def folder() -> Path:
        return next(p.parent for p in tmp_path.glob("outputs/*/*/config.yaml"))

    try:
        pid = begin()
        wait_for(lambda: list(tmp_path.glob("outputs/*/*/wandb/offline-run-*/*.wandb")))
        wait_for(lambda: len(read_metrics(folder())) == PARKED)
        os.kill(pid, signal.SIGKILL)
        assert said("CODE") == -signal.SIGKILL
        assert [r["round"] for r in read_metrics(folder())] == list(range(1, PARKED + 1))
        assert (folder() / "metrics.jsonl").read_bytes().endswith(b"}\n")

        killed_run = list(folder().glob("wandb/offline-run-*"))
        pid = begin()
        wait_for(lambda: set(folder().glob("wandb/offline-run-*")) - set(killed_run))
        (mirror,) = children_of(pid)
        os.kill(mirror, signal.SIGKILL)
        (tmp_path / "parking").unlink()
        assert said("CODE") == 0
    finally:
        script.kill()
    summary = read_summary(folder()) or {}
    assert (summary["status"], summary["trackers"]) == ("done", {"wandb": 1})
    assert [r["round"] for r in read_metrics(folder())] == list(range(1, ROUNDS + 1))
    assert len(list(folder().glob("wandb/offline-run-*"))) == 1

    command = [*COMMAND, str(folder())]
    environment = {**os.environ, "WANDB_MODE": "offline"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert [h["round"] for h in history_of(offline_records(folder()))] == list(range(1, ROUNDS + 1))
