"""Runs that are killed at random moments and repeated end as if nothing had happened.

The moments include those in which a checkpoint is saved. A timer kills the run (SIGALRM, for which
there is no handler), and not its parent, which a busy machine may delay until the run has ended.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedsim.jobs.cli import run
from tests.ranks import result
from tests.run_toys import ROOT

SCRIPT = """
import json, os, random, signal, sys, traceback
from fedsim.jobs.cli import run

words, kills, seed = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
run([*words, "num_rounds=1", "output_dir=first"])  # imports all that a run needs
draw, killed = random.Random(seed), 0
while True:
    delay = draw.uniform(0.03, 0.25) if killed < kills else 0  # 0: no timer
    pid = os.fork()
    if not pid:
        code = 99
        signal.setitimer(signal.ITIMER_REAL, delay)  # the kernel ends the process, wherever it is
        try:
            code = run(words)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    if os.WIFEXITED(status):
        print(killed)
        sys.exit(os.WEXITSTATUS(status))
    killed += 1
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(("kills", "seed"), [(2, 0), pytest.param(50, 1, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_again_and_again_ends_as_if_it_had_not_been(
    kills: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["num_clients=6", "cohort_size=2", "local.epochs=1", "tracker=files_only"]
    words += ["selector=oort", "engine=batched", "aggregator=fedadam"]
    words += ["checkpoint.every=1", f"num_rounds={100 * kills}"]
    command = [sys.executable, "-c", SCRIPT, json.dumps(words), str(kills), str(seed)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) == kills
    monkeypatch.chdir(tmp_path)
    assert run([*words, "output_dir=alone"]) == 0
    outputs = tmp_path / "outputs"
    alone = tmp_path / "alone"
    assert result(outputs) == result(alone)
    files = {path.relative_to(outputs) for path in outputs.rglob("*")}
    assert files == {path.relative_to(alone) for path in alone.rglob("*")}
