"""`fedsim verify`: runs again, and the first round that is not equal, with what differs around
it."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsim.commands.verify import run, spread
from fedsim.core.errors import ConfigError, FedsimError
from fedsim.core.record import Record
from fedsim.results.archive import write_archive
from fedsim.results.reading import read_summary
from fedsim.results.runs import read_runs
from fedsim.rounds.loop import Simulation
from fedsim.running import provenance as module
from tests.report_toys import change_run
from tests.run_toys import Run, folders

RESULTS = Path(__file__).parents[1] / "docs" / "results"


def test_equal_runs_and_the_first_round_that_differs(
    fedsim: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fedsim("-m", "selector=random,power_of_choice")
    random = next(folder for folder in folders(tmp_path) if "-random-s0" in folder.name)
    runs = read_runs(tmp_path / "outputs")
    assert {one.choices["selector"] for one in spread(runs, 2)} == {"random", "power_of_choice"}
    before = sorted(tmp_path.rglob("*"))
    assert run(["outputs", "--runs", "1"]) == 0
    assert "equal, 3 rounds\n1 of 1 equal; 2 runs in outputs" in capsys.readouterr().out

    def falsify(records: list[dict[str, Any]]) -> None:
        records[1] |= {"train_samples": 1, "seconds_train": 1e9}  # seconds do not count
        records[2] |= {"selected": [0]}

    change_run(random, falsify)
    write_archive(read_runs(tmp_path / "outputs"), tmp_path / "outputs", tmp_path / "runs.parquet")
    monkeypatch.setattr(module, "processor", lambda: "Z80")
    for source in ("outputs", "runs.parquet"):
        assert run([source, "--all"]) == 1
        printed = capsys.readouterr().out
        assert "differs from round 2 on: train_samples 1, now " in printed
        assert ("round 3" in printed, ", now Z80" in printed) == (False, True)
        assert printed.count("equal, 3 rounds") == 1
    (random / "config.yaml").write_text(
        (random / "config.yaml").read_text().replace("device: auto", "device: cuda")
    )
    assert (run(["outputs", "--all"]), run(["outputs", "--all", "device=cpu"])) == (0, 1)
    assert (
        "left out: 1 of 2 runs need a GPU; device=cpu compares them with a CPU's\n"
        in capsys.readouterr().out
    )
    with pytest.raises(FedsimError, match="1 of 1 runs need a GPU"):
        run([str(random)])
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "runs.parquet"])


def test_a_run_from_before_learning_rates_were_recorded_is_equal(
    fedsim: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fedsim()
    (folder,) = folders(tmp_path)

    def as_before(records: list[dict[str, Any]]) -> None:
        for record in records:
            del record["learning_rate"]

    change_run(folder, as_before)
    assert run(["outputs"]) == 0
    assert "1 of 1 equal" in capsys.readouterr().out


def test_mistakes(fedsim: Run, tmp_path: Path) -> None:
    fedsim()
    for words in (
        "nowhere",
        "outputs datset.path=x",
        "outputs seed.x=1",
        "outputs local.epochs=x",
        "outputs --runs 0",
        "outputs name=[a",
        "outputs seed=0,1",
        "outputs ~seed=0",
    ):
        with pytest.raises(FedsimError) as caught:
            run(words.split())
        assert caught.value.exit_code == 2


def test_a_run_is_not_compared_with_itself(
    fedsim: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A falsified accuracy is found; words that would lead to the falsified run itself are refused
    by their names."""
    fedsim()
    (folder,) = folders(tmp_path)
    change_run(folder, lambda records: records[1].update(test_accuracy=0.999))
    assert run(["outputs"]) == 1
    assert "differs from round 2 on: test_accuracy 0.999, now " in capsys.readouterr().out
    words = [
        f"output_dir={tmp_path / 'outputs'}",
        "name=default",
        "overwrite=true",
        "checkpoint.every=1",
        "tracker={}",
    ]
    for word in words:
        with pytest.raises(ConfigError, match=f"{word.partition('=')[0]}.*cannot be changed"):
            run(["outputs", word])


def test_words_that_are_no_yaml_are_refused_by_their_keys(fedsim: Run) -> None:
    fedsim()
    for text in (
        "[1",
        "{a: 1",
        "'",
        "[" * 2000,  # more than Python's limit of recursions
        "{a: &x [*x]}",
        "!!python/object:os.system x",
        "2020-01-01",
    ):
        with pytest.raises(ConfigError, match=r"dataset\.path"):
            run(["outputs", f"dataset.path={text}"])


def test_damaged_runs_are_counted(
    fedsim: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fedsim("-m", "seed=0,1")
    first, _ = folders(tmp_path)
    lines = (first / "metrics.jsonl").read_text().splitlines(keepends=True)
    (first / "metrics.jsonl").write_text("".join([lines[1], lines[0], *lines[2:]]))
    assert run(["outputs"]) == 1
    told = capsys.readouterr().out
    assert (
        f"left out {first.relative_to(tmp_path)}: metrics.jsonl has round 2 where round 1 belongs"
        in told
    )
    assert "1 of 1 equal; 1 runs in outputs; 1 are damaged and left out" in told


def test_the_environment_names_what_sums_depend_on(
    fedsim: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fedsim("engine=native")
    fedsim("engine=batched")
    native, batched = (read_summary(f)["environment"] for f in folders(tmp_path))  # type: ignore[index]
    if "compiled" not in native:
        native, batched = batched, native
    assert re.fullmatch(r"(gcc|clang) [\d.]+.*, [\w -]+", native.pop("compiled"))
    assert native == batched
    assert all(
        [native["processor"], native["blas"]["torch"], native["blas"]["numpy"], native["threads"]]
    )
    assert native["instructions"] == torch.backends.cpu.get_cpu_capability().lower()
    monkeypatch.setattr(module, "PROCESSORS", tmp_path / "cpuinfo")
    monkeypatch.setattr(module.platform, "processor", lambda: "6502")
    assert module.processor() == "6502"
    (tmp_path / "cpuinfo").write_text(
        "model name\t: Z80\ncpu family\t: 8\nmodel\t: 1\n\nmodel name\t: Z81\n"
    )
    assert module.processor() == "Z80 (family 8, model 1)"


def test_three_shipped_runs_are_equal(capsys: pytest.CaptureFixture[str]) -> None:
    """On whatever processor this is. GPFL's Fig. 7b on generated handwriting needs no files of
    data."""
    assert run([str(RESULTS / "gpfl_fig7b_femnist_small" / "runs.parquet"), "--runs", "3"]) == 0
    assert "equal, 160 rounds\n3 of 3 equal; 180 runs" in capsys.readouterr().out


def test_the_error_of_a_repetition_that_fails_is_named(
    fedsim: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fedsim("selector=random")
    step = Simulation.step

    def fail_in_round_3(self: Simulation) -> Record:
        if self.round == 2:
            raise ZeroDivisionError("of the third round")
        return step(self)

    monkeypatch.setattr(Simulation, "step", fail_in_round_3)
    assert run(["outputs"]) == 1
    printed = capsys.readouterr().out
    assert "differs from round 3 on: it is missing now; done, now failed: " in printed
    assert "ZeroDivisionError: of the third round" in printed
