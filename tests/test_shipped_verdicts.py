"""The tables in docs/results are those that the rules of now make of the summaries beside them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"


@pytest.mark.slow
def test_no_shipped_verdict_differs() -> None:
    """A minute of a core: the configs of all presets with results are composed."""
    made = subprocess.run(
        [sys.executable, "-m", "scripts.reproduction.verdicts"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert [line for line in made.stdout.splitlines() if ", now " in line or "no claims any more" in line] == []


@pytest.mark.skipif(not RESULTS.is_dir(), reason="the results are not in this copy")
def test_all_shipped_summaries_are_read() -> None:
    paths = sorted(RESULTS.glob("*/summary.json"))
    assert paths
    for path in paths:
        for group in json.loads(path.read_text())["groups"]:
            assert group["seeds"], path
            assert set(group.get("made_by", group["seeds"])) == set(group["seeds"]), path
