"""A run that has ended is not run again, however early it ended."""

from pathlib import Path

from fedsim.results.reading import read_summary
from fedsim.running.exits import EXIT_CODES
from tests.run_toys import QUICK, Run, folders

EXPLODES = (*QUICK, "optimizer.lr=1e38")
"""All updates of round 1 hold infinities or nans."""


def test_a_run_that_diverged_in_round_1_is_not_run_again(fedsim: Run, tmp_path: Path) -> None:
    assert fedsim(*EXPLODES) == EXIT_CODES["diverged"]
    [folder] = folders(tmp_path)
    summary = read_summary(folder)
    assert summary is not None
    assert (summary["status"], summary["rounds"]) == ("diverged", 0)
    written = (folder / "summary.json").stat().st_mtime_ns

    assert fedsim(*EXPLODES) == EXIT_CODES["diverged"]

    assert (folder / "summary.json").stat().st_mtime_ns == written
