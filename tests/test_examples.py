"""The scripts in examples/ run, in a tiny size, and leave what they say."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = ["num_clients=6", "cohort_size=2", "local.epochs=1", "num_rounds=3"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(name: str, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *words])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_a_sweep_and_its_finished_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("compare_selectors.py", monkeypatch, *TINY)
    told = capsys.readouterr().out
    assert told.count(": done, final accuracy") == 9
    assert "power_of_choice" in told
    run("finished_runs.py", monkeypatch, "outputs/default")
    told = capsys.readouterr().out
    assert "digits   shards     oort               3" in told
    for picture in ("compare_selectors.png", "finished_runs.png"):
        assert Path(picture).read_bytes().startswith(b"\x89PNG")


def test_a_selector_of_a_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("own_selector.py", monkeypatch, *TINY, "partition=iid")
    told = capsys.readouterr().out
    assert "round   3: [" in told
    assert "test_accuracy_mine" in told
    assert not Path("outputs").exists()
