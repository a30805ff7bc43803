"""The scripts in examples/ run in a tiny size and write the files that they name."""

import runpy
import sys
from pathlib import Path

import pytest

import fedsim

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = ["num_clients=6", "cohort_size=2", "local.epochs=1", "num_rounds=3"]


@pytest.fixture(autouse=True)
def empty_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_a_sweep_and_its_finished_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("compare_selectors.py", monkeypatch, *TINY)
    output = capsys.readouterr().out
    assert output.count(": done, final accuracy") == 9
    assert "power_of_choice" in output
    run("finished_runs.py", monkeypatch, "outputs/default")
    output = capsys.readouterr().out
    assert "digits   shards     oort               3" in output
    for picture in ("compare_selectors.png", "finished_runs.png"):
        assert Path(picture).read_bytes().startswith(b"\x89PNG")


def test_a_selector_that_a_script_defines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("own_selector.py", monkeypatch, *TINY, "partition=iid")
    output = capsys.readouterr().out
    assert "round   3: [" in output
    assert "test_accuracy_mine" in output
    assert not Path("outputs").exists()


@pytest.mark.parametrize(
    ("method", "selector"),
    [
        ("random", ["selector=random"]),
        ("top_loss", ["selector=top_loss", "selector.first_round_full=false"]),
    ],
)
def test_the_script_without_the_engine_selects_the_same_clients_and_reaches_the_same_accuracy(
    method: str, selector: list[str]
) -> None:
    config = ["num_rounds=10", "server.validation_fraction=0", "seed=3", "tracker=files_only"]
    result = fedsim.run_experiment([*config, *selector], keep=False)
    script = runpy.run_path(str(EXAMPLES / "one_round.py"))
    selected, accuracies = zip(*script["run"](method, seed=3), strict=True)
    assert list(selected) == result.rounds["selected"].tolist()
    assert list(accuracies) == result.rounds["test_accuracy"].tolist()
