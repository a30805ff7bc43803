"""Runs that are killed (SIGKILL) at random moments, during saves too, and repeated, end as if
nothing had happened."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedsim.jobs.cli import run
from tests.ranks import result
from tests.run_toys import ROOT

WORDS = [
    *(
        "num_rounds=120",
        "local.epochs=1",
        "tracker=files_only",
        "num_clients=6",
        "cohort_size=2",
        "selector=oort",
    ),
    *("engine=batched", "aggregator=fedadam", "checkpoint.every=1"),
]
SCRIPT = """
import json, os, random, signal, sys, time, traceback
from fedsim.jobs.cli import run

words, kills, seed = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
run([*words, "num_rounds=1", "output_dir=whole"])  # imports all that a run needs
draw, killed = random.Random(seed), 0
while True:
    pid = os.fork()
    if not pid:
        code = 99
        try:
            code = run(words)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    if killed < kills:
        time.sleep(draw.uniform(0.03, 0.25))
        os.kill(pid, signal.SIGKILL)
        killed += 1
    if os.WIFEXITED(status := os.waitpid(pid, 0)[1]):
        print(killed)
        sys.exit(os.WEXITSTATUS(status))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(("kills", "seed"), [(2, 0), pytest.param(50, 1, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_again_and_again_ends_as_if_it_had_not_been(
    kills: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*WORDS, f"num_rounds={20 * kills}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, json.dumps(words), str(kills), str(seed)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) == kills
    monkeypatch.chdir(tmp_path)
    assert run([*words, "output_dir=alone"]) == 0
    assert result(tmp_path / "outputs") == result(tmp_path / "alone")
    trees = [
        {p.relative_to(tmp_path / d) for p in (tmp_path / d).rglob("*")}
        for d in ("outputs", "alone")
    ]
    assert trees[0] == trees[1]
