"""A stand-in for the commands of Slurm that submitit calls: sbatch, srun, sacct, scontrol requeue,
and scancel.

`install(folder)` writes them into `folder`, which is to be put in front of PATH. Tasks of an array
are processes here, as many at a time as the array allows. One that is requeued runs again as soon
as it has ended. What is known of them is in files in the same folder, named by their ids
(<job>_<task>, or <job> where there is no array).
"""

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path


def install(folder: Path) -> None:
    folder.mkdir()
    for name in ("sbatch", "srun", "sacct", "scontrol", "scancel"):
        text = f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" {name} "{folder}" "$@"\n'
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


def states(folder: Path) -> dict[str, str]:
    return {file.stem: file.read_text() for file in folder.glob("*.state")}


def states_in_the_end(folder: Path) -> dict[str, str]:
    """The same when all have ended."""
    while {"PENDING", "RUNNING", "REQUEUED"} & set(states(folder).values()):
        time.sleep(0.1)
    return states(folder)


def requeues(folder: Path) -> list[str]:
    """Tasks that were requeued."""
    return [file.stem for file in folder.glob("*.requeued")]


def sbatch(folder: Path, script: str) -> None:
    """Start the tasks of an array in a process that outlives this one."""
    job = str(1 + len(list(folder.glob("*.script"))))
    text = Path(script).read_text()
    (folder / f"{job}.script").write_text(text)
    array = re.search(r"--array='?0-(\d+)%(\d+)", text)
    last, at_a_time = (int(array[1]), int(array[2])) if array else (0, 1)
    tasks = [f"{job}_{number}" for number in range(last + 1)] if array else [job]
    for task in tasks:
        (folder / f"{task}.state").write_text("PENDING")
    command = [sys.executable, __file__, "supervise", str(folder), str(at_a_time), *tasks]
    subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    sys.stdout.write(f"Submitted batch job {job}\n")


def supervise(folder: Path, at_a_time: str, *tasks: str) -> None:
    with ThreadPoolExecutor(int(at_a_time)) as pool:
        list(pool.map(lambda task: _run(folder, task), tasks))


def _run(folder: Path, task: str) -> None:
    """Run a task until it ends without being requeued."""
    job, _, number = task.partition("_")
    state, requeue = folder / f"{task}.state", folder / f"{task}.requeue"
    environment = {**os.environ, "SLURM_JOB_ID": job, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    if number:
        environment |= {"SLURM_ARRAY_JOB_ID": job, "SLURM_ARRAY_TASK_ID": number}
    while state.read_text() != "CANCELLED by 0":
        state.write_text("RUNNING")
        code = subprocess.run(
            ["bash", folder / f"{job}.script"], env=environment, check=False
        ).returncode
        if requeue.exists():
            requeue.unlink()
            state.write_text("REQUEUED")
            continue
        state.write_text("FAILED" if code else "COMPLETED")
        return


def srun(folder: Path, *words: str) -> None:
    """Become the command, with its output in files."""
    options = dict(pairwise(words))
    behind = words[words.index("--error") + 2 :]
    command = behind[next(i for i, word in enumerate(behind) if not word.startswith("-")) :]
    job, number = os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_ARRAY_TASK_ID", "")
    for descriptor, option in ((1, "--output"), (2, "--error")):
        path = (
            options[option]
            .replace("%A", job)
            .replace("%j", job)
            .replace("%a", number)
            .replace("%t", "0")
        )
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    (folder / (f"{job}_{number}.pid" if number else f"{job}.pid")).write_text(str(os.getpid()))
    os.execvp(command[0], command)


def sacct(folder: Path, *words: str) -> None:
    wanted = {second for first, second in pairwise(words) if first == "-j"}
    sys.stdout.write("JobID|State|NodeList\n")
    for task, state in states(folder).items():
        if task.partition("_")[0] in wanted:
            sys.stdout.write(f"{task}|{state}|here\n")


def scontrol(folder: Path, _: str, task: str) -> None:
    for name in ("requeue", "requeued"):
        (folder / f"{task}.{name}").touch()


def scancel(folder: Path, how: str, *wanted: str) -> None:
    for task, state in states(folder).items():
        if task not in wanted:
            continue
        if how == "--state=PENDING" and state == "PENDING":
            (folder / f"{task}.state").write_text("CANCELLED by 0")
        if how.startswith("--signal=") and state == "RUNNING":
            number = getattr(signal, f"SIG{how.partition('=')[2]}")
            with suppress(OSError):
                os.kill(int((folder / f"{task}.pid").read_text()), number)


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
