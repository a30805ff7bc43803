"""Shipped runs are made again to the last bit by the code of today, on whatever processor this is."""

from pathlib import Path

import pytest

from fedsim.commands.verify import run

RESULTS = Path(__file__).parents[1] / "docs" / "results"


def test_three_shipped_runs_are_equal(capsys: pytest.CaptureFixture[str]) -> None:
    """160 rounds of GPFL's Fig. 7b on generated handwriting, which needs no files of data."""
    assert run([str(RESULTS / "gpfl_fig7b_femnist_small" / "runs.parquet"), "--runs", "3"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("equal, 160 rounds") == 3
    assert "3 of 3 equal; 180 runs" in printed
