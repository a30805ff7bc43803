"""Plugins of Hydra in the working folder are not imported, unless PYTHONPATH names that folder."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CODE = "import sys; sys.argv = ['fedsim', '--cfg', 'job']; from fedsim.run import main; main()"


def test_hydra_plugins_of_the_working_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "mine.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')")

    def shows_config(*path: Path) -> bool:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
        command = [sys.executable, "-c", CODE]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        return "cohort_size" in done.stdout

    assert shows_config(ROOT)
    assert not (tmp_path / "marker").exists()
    assert shows_config(ROOT, tmp_path)  # the negative control
    assert (tmp_path / "marker").exists()
