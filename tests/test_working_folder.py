"""Files of the working folder are not imported, whatever their names, unless a config names a class
there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run_toys import HANG

NAMES = (
    *(
        "typing",
        "enum",
        "attr",
        "psutil",
        "numexpr",
        "opt_einsum",
        "yaml",
        "numpy",
        "torch",
        "hydra",
        "rich",
    ),
    *("cloudpickle", "sqlite3"),
)


OWN = """
from fedsim.selectors.random import Random

class Mine(Random):
    pass
"""


def test_children_of_launchers_do_not_run_planted_modules_and_find_a_users_own(
    tmp_path: Path,
) -> None:
    """joblib watches its semaphores by a child `python -c`, which would begin with the working
    folder."""
    (tmp_path / "my_lab.py").write_text(OWN)
    for name in ("joblib", "multiprocessing"):
        (tmp_path / f"{name}.py").write_text(f"open('ran-{name}', 'w')\n")
    program = [
        str(Path(sys.executable).with_name("fedsim")),
        "-m",
        "hydra/launcher=joblib",
        "hydra.launcher.n_jobs=1",
    ]
    words = [
        "num_rounds=1",
        "local.epochs=1",
        "tracker=files_only",
        "selector._target_=my_lab.Mine",
    ]
    done = subprocess.run(
        [*program, *words], cwd=tmp_path, capture_output=True, text=True, timeout=HANG, check=False
    )
    assert not [path.name for path in tmp_path.glob("ran-*")]
    assert "Traceback" not in done.stderr
    assert done.returncode == 0
    assert list(tmp_path.glob("outputs/*/*/summary.json"))


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (
            [str(Path(sys.executable).with_name("fedsim"))],
            ["num_rounds=1", "local.epochs=1", "tracker=files_only"],
        ),
        ([sys.executable, "-m", "fedsim"], ["show"]),
        ([sys.executable, "-m", "fedsim.run"], ["--version"]),
    ],
)
def test_planted_modules_do_not_run(program: list[str], words: list[str], tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(f"open('ran-{name}', 'w')\n")
    (tmp_path / "dill.py").write_text("open('ran-dill', 'w')\nraise SystemError('broken')\n")
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*program, *words],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert not [path.name for path in tmp_path.glob("ran-*")]
    assert "Traceback" not in done.stderr
    assert done.returncode == 0
