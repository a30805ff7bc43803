"""The scripts for Slurm on docs/clusters.md, with commands that take the place of srun and
scontrol."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.documentation import DOCS, blocks

SCRIPTS = {b.title: b.text for b in blocks(DOCS / "clusters.md") if "#SBATCH" in b.text}
VARIABLES = {
    "SLURM_CPUS_PER_TASK": "4",
    "SLURM_JOB_ID": "7",
    "SLURM_ARRAY_JOB_ID": "7",
    "SLURM_ARRAY_TASK_ID": "3",
}


def test_the_page_has_two_scripts_that_requeue_themselves() -> None:
    assert sorted(name or "" for name in SCRIPTS) == ["array.sh", "sweep.sh"]


def run(folder: Path, script: str, code: int) -> tuple[int, dict[str, str]]:
    """The exit code of `script` whose `srun` ends with `code`, and the words of each command that
    it called."""
    for name, end in (("srun", code), ("scontrol", 0)):
        (folder / name).write_text(
            f'#!/bin/bash\necho "$@" > "{folder}/{name}.called"\nexit {end}\n'
        )
        (folder / name).chmod(0o755)
    environment = {**VARIABLES, "SCRATCH": "/scratch", "PATH": f"{folder}:{os.environ['PATH']}"}
    ended = subprocess.run(
        ["bash", "-c", script], check=False, cwd=folder, env=environment, timeout=60
    )
    return ended.returncode, {
        file.stem: file.read_text().strip() for file in folder.glob("*.called")
    }


@pytest.mark.parametrize("title", SCRIPTS)
@pytest.mark.parametrize("code", [0, 1, 75])
def test_a_script_requeues_itself_after_75_and_else_ends_as_the_run_did(
    tmp_path: Path, title: str, code: int
) -> None:
    ended, called = run(tmp_path, SCRIPTS[title], code)
    assert ended == (0 if code == 75 else code)
    task = "7_3" if "--array" in SCRIPTS[title] else "7"
    assert called.get("scontrol") == (f"requeue {task}" if code == 75 else None)


@pytest.mark.parametrize("title", SCRIPTS)
def test_a_script_gives_srun_the_cores_that_sbatch_got(tmp_path: Path, title: str) -> None:
    words = run(tmp_path, SCRIPTS[title], 0)[1]["srun"].split()
    cores = re.search(r"#SBATCH.*--cpus-per-task=(\d+)", SCRIPTS[title])
    assert cores is not None
    assert words[: words.index("fedsim")] == [f"--cpus-per-task={cores[1]}"]
