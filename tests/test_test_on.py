"""With `test_on=holdout` a run is tested on the samples that its clients hold out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedsim import compose
from fedsim.core.errors import ConfigError
from fedsim.results.reading import read_metrics
from fedsim.running.assembly import build, prepare
from tests.run_toys import Run

WORDS = ("num_rounds=2", "num_clients=10", "cohort_size=3", "local.epochs=1")
HELD_OUT = (*WORDS, "local.holdout_fraction=0.25")


def folder_below(path: Path) -> Path:
    [folder] = [summary.parent for summary in path.rglob("summary.json")]
    return folder


def records(path: Path) -> list[dict[str, Any]]:
    return read_metrics(folder_below(path))


def test_the_accuracy_is_that_on_the_held_out_samples(fedsim: Run, tmp_path: Path) -> None:
    assert fedsim(*HELD_OUT, "test_on=holdout", "output_dir=tuning") == 0
    [plan] = compose([*HELD_OUT])
    data = prepare(plan)
    experiment = build(plan)
    held_out = torch.as_tensor(np.concatenate(experiment.division.holdout))
    experiment.model.load_state_dict(
        load_file(folder_below(tmp_path / "tuning") / "model.safetensors")
    )
    with torch.no_grad():
        predicted = experiment.model.eval()(data.samples(held_out.numpy())).argmax(1)
    expected = (predicted == data.y[held_out]).double().mean().item()
    assert records(tmp_path / "tuning")[-1]["test_accuracy"] == pytest.approx(expected, abs=1e-12)


def test_nothing_but_the_test_changes(fedsim: Run, tmp_path: Path) -> None:
    assert fedsim(*HELD_OUT, "test_on=holdout", "output_dir=tuning") == 0
    assert fedsim(*HELD_OUT, "output_dir=scored") == 0
    tuning = records(tmp_path / "tuning")
    scored = records(tmp_path / "scored")
    for name in ("selected", "train_loss", "bytes_down", "bytes_up"):
        assert [record[name] for record in tuning] == [record[name] for record in scored]
    assert tuning[-1]["test_accuracy"] != scored[-1]["test_accuracy"]


def test_it_needs_samples_that_are_held_out(fedsim: Run) -> None:
    with pytest.raises(ConfigError, match="test_on='holdout': needs samples that are held out"):
        fedsim(*WORDS, "test_on=holdout")
