"""Files of the working folder are not imported, unless a config names a class there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run_toys import HANG

FEDSIM = str(Path(sys.executable).with_name("fedsim"))
QUICK = ["num_rounds=1", "local.epochs=1", "tracker=files_only"]
NAMES = (
    "attr",
    "cloudpickle",
    "enum",
    "hydra",
    "numexpr",
    "numpy",
    "opt_einsum",
    "psutil",
    "rich",
    "sqlite3",
    "torch",
    "typing",
    "yaml",
)
MY_LAB = """
from fedsim.selectors.random import Random

class Mine(Random):
    pass
"""


def plant(folder: Path, *names: str) -> None:
    """Write modules that leave a file when they are imported."""
    for name in names:
        (folder / f"{name}.py").write_text(f"open('ran-{name}', 'w')\n")


def check(folder: Path, command: list[str]) -> None:
    """Run a command, which must succeed without importing what was planted."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert not [path.name for path in folder.glob("ran-*")]
    assert "Traceback" not in done.stderr
    assert done.returncode == 0


def test_children_of_launchers_do_not_run_planted_modules_and_find_a_users_own(
    tmp_path: Path,
) -> None:
    """joblib watches its semaphores by a child `python -c`, which would begin with the working
    folder."""
    (tmp_path / "my_lab.py").write_text(MY_LAB)
    plant(tmp_path, "joblib", "multiprocessing")
    launcher = ["-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=1"]
    check(tmp_path, [FEDSIM, *launcher, *QUICK, "selector._target_=my_lab.Mine"])
    assert list(tmp_path.glob("outputs/*/*/summary.json"))


@pytest.mark.parametrize(
    "command",
    [
        [FEDSIM, *QUICK],
        pytest.param([sys.executable, "-m", "fedsim", "show"], marks=pytest.mark.slow),
        [sys.executable, "-m", "fedsim.run", "--version"],
    ],
)
def test_planted_modules_do_not_run(command: list[str], tmp_path: Path) -> None:
    plant(tmp_path, *NAMES)
    (tmp_path / "dill.py").write_text("open('ran-dill', 'w')\nraise SystemError('broken')\n")
    check(tmp_path, command)
