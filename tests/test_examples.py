"""The scripts in examples/ run in a tiny size and write the files that they name. The notebook runs
as it is."""

import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

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
    assert re.search(r"digits +shards +oort +0\.\d+ +3\n", output)
    for picture in ("compare_selectors.png", "finished_runs.png"):
        assert Path(picture).read_bytes().startswith(b"\x89PNG")


def texts_of(notebook: Any) -> list[str]:
    """Return what its cells print, in which 0 stands for all numbers and one space for several."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    texts = [output["data"]["text/plain"] for output in outputs]
    return [" ".join(re.sub(r"-?\d+(\.\d+)?", "0", text).split()) for text in texts]


def test_the_notebook_goes_from_a_sweep_to_a_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stored texts are those that it prints. Numbers may differ from machine to machine."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    stored = nbformat.read(EXAMPLES / "from_sweep_to_figure.ipynb", as_version=4)
    executed = nbformat.from_dict(stored)
    NotebookClient(executed, kernel_name="python3").execute(cwd=str(tmp_path))
    assert texts_of(executed) == texts_of(stored)
    assert "oort 0 0 0 power_of_choice 0 0 0 random 0 0 0" in texts_of(stored)[1]
    assert Path("accuracy_over_bytes.pdf").read_bytes().startswith(b"%PDF")


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
