"""Ranks as processes of their own, connected by gloo: equal to one process, also where one of them
is killed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedsim.results.reading import read_summary
from tests.ranks import result
from tests.wandb_toys import wait_for

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
WORDS = ("tracker=files_only", "num_clients=12", "cohort_size=5", "partition=dirichlet_class")
SCRIPT = """
import json, os, signal, sys, time, traceback
from pathlib import Path
import torch.distributed as dist
from fedsim.jobs import cli
from fedsim.commands import dispatch
from fedsim.running.process import STOP

cli.run(["num_rounds=1", "output_dir=warm", "tracker=files_only", "engine=native"])  # imports what a run needs


def start(words, rank, count):
    pid = os.fork()
    if pid:
        return pid
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    sys.argv, code = ["fedsim", *words], 99
    try:
        STOP.install()
        dispatch.main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


codes = []
for case in json.loads(sys.argv[1]):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ranks = [start(case["words"], rank, case["count"]) for rank in range(case["count"])]
    if case["signal"]:
        for attempt in range(6000):
            if list(Path(case["place"]).glob("*/*/checkpoint.safetensors")):
                break
            time.sleep(0.01)
        os.kill(ranks[-1], case["signal"])
    codes.append([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks])
print(json.dumps(codes))
"""


def case(words: list[str], count: int, place: str, number: int = 0) -> dict[str, Any]:
    """A command over `count` processes; the signal `number`, sent to the last one as soon as there
    is a checkpoint."""
    return {
        "words": [*words, f"output_dir={place}"],
        "count": count,
        "signal": number,
        "place": place,
    }


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_processes_are_equal_to_one_process_also_where_one_is_killed(place: Path) -> None:
    words = [
        *WORDS,
        "num_rounds=20",
        "engine=native",
        "selector=power_of_choice",
        "checkpoint.every=1",
    ]
    killed = case(words, 2, "killed", signal.SIGKILL), case(words, 3, "killed")
    command = [
        sys.executable,
        "-c",
        SCRIPT,
        json.dumps([case(words, 1, "alone"), case(words, 2, "over"), *killed]),
    ]
    done = subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[0], [0, 0], [1, -9], [0, 0, 0]], (
        done.stderr
    )
    assert result(place / "over") == result(place / "alone")
    assert result(place / "killed") == result(place / "alone")
    assert "rank 1 of 2 has ended or cannot be reached any more" in done.stdout
    assert "the same command resumes" in done.stdout
    assert done.stdout.count("done · final accuracy") == 1 + 3  # of each command, one process tells


# --- torchrun itself -------------------------------------------------------------------------------------------------

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def started(words: list[str]) -> subprocess.Popen[str]:
    """A command under torchrun, two processes."""
    command, out = (
        [*TORCHRUN, "-m", "fedsim.run", *words],
        {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT},
    )
    return subprocess.Popen(command, env=ENVIRONMENT, text=True, encoding="utf-8", **out)  # type: ignore[call-overload]


def pids_of(agent: int) -> dict[int, int]:
    """The processes that torchrun has started, by rank."""
    found = {}
    for child in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
        values = dict(
            v.split("=", 1)
            for v in Path(f"/proc/{child}/environ").read_text().split("\0")
            if "=" in v
        )
        if "RANK" in values:
            found[int(values["RANK"])] = int(child)
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_torchrun_ends_as_told_leaves_no_process_and_the_same_command_goes_on(place: Path) -> None:
    long = [*WORDS, "num_rounds=400", "engine=native", "selector=oort", "checkpoint.every=3"]
    subprocess.run(
        [sys.executable, "-m", "fedsim.run", *long, "output_dir=alone"], env=ENVIRONMENT, check=True
    )
    for what in ("nothing", "rank_0", "SIGTERM", "torchrun"):
        run = started([*long, f"output_dir={what}"])
        if what != "nothing":
            wait_for(lambda what=what: list(place.glob(f"{what}/*/*/checkpoint.safetensors")))
            ranks = pids_of(run.pid)
            assert sorted(ranks) == [0, 1]
            os.kill(
                ranks[0] if what == "rank_0" else run.pid,
                signal.SIGTERM if what == "SIGTERM" else signal.SIGKILL,
            )
            run.communicate(timeout=120)  # until the last process has closed its end
            assert run.returncode != 0
            wait_for(
                lambda ranks=ranks: not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())
            )
            (folder,) = (path.parent for path in (place / what).glob("*/*/config.yaml"))
            assert (read_summary(folder) or {}).get("status") == (
                None if what == "rank_0" else "preempted"
            )
            run = started([*long, f"output_dir={what}"])
        printed, _ = run.communicate(timeout=300)
        assert run.returncode == 0, printed
        assert result(place / what) == result(place / "alone")
