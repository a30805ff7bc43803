"""The command line, end to end, on the embedded digits."""

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from fedsim.config.compose import check_jobs, compose_jobs, search_path
from fedsim.core.record import TOTAL_FIELDS
from fedsim.partitions.division import Division
from fedsim.results.reading import read_metrics, read_summary
from tests.run_toys import ROOT, Run, folders, without_seconds


def test_a_run_leaves_config_metrics_summary_model_and_partition(
    fedsim: Run, tmp_path: Path
) -> None:
    assert fedsim("selector=power_of_choice", "name=trial", "seed=4") == 0
    (folder,) = folders(tmp_path)
    assert folder.parent == tmp_path / "outputs" / "trial"
    assert folder.name.startswith("digits-shards-mlp-power_of_choice-s4-")
    names = {"config.yaml", "metrics.jsonl", "summary.json", "partition.npz", "model.safetensors"}
    assert {path.name for path in folder.iterdir()} == names
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["seed"] == 4
    assert config["selector"]["estimate"] == "full"


def test_the_files_of_a_run_agree(fedsim: Run, tmp_path: Path) -> None:
    assert fedsim() == 0
    (folder,) = folders(tmp_path)
    records = read_metrics(folder)
    assert [record["round"] for record in records] == [1, 2, 3]
    fields = {"test_accuracy", "test_loss", "train_loss", "selected", "coverage", *TOTAL_FIELDS}
    for record in records:
        assert record.keys() >= fields
    summary = read_summary(folder) or {}
    assert summary["status"] == "done"
    assert summary["last_accuracy"] == records[-1]["test_accuracy"]
    assert summary["wall_seconds"] == records[-1]["wall_seconds"] > 0
    assert summary["totals"]["bytes_up"] == sum(record["bytes_up"] for record in records)
    assert summary["config_hash"].startswith(folder.name[-8:])
    assert summary["environment"]["torch"]
    division = Division.load(folder / "partition.npz")
    assert len(division.train) == 20
    assert division.hash == summary["partition_hash"]


def test_the_default_config_says_how_many_kinds_of_digits_clients_hold(
    fedsim: Run, tmp_path: Path
) -> None:
    assert fedsim() == 0
    (folder,) = folders(tmp_path)
    with np.load(folder / "partition.npz") as partition:
        kinds_of_digits = (partition["histograms"] > 0).sum(1)
    assert sorted(kinds_of_digits.tolist()) == [2] * 14 + [3] * 6
    first_line = (ROOT / "conf" / "config.yaml").read_text().splitlines()[0]
    assert first_line.endswith("20 clients, most of which hold two kinds of digits.")


def test_a_repeated_run_is_identical_and_a_finished_one_is_skipped(
    fedsim: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fedsim("model.dropout=0.5")
    (folder,) = folders(tmp_path)
    first, stamp = without_seconds(folder), (folder / "summary.json").stat().st_mtime_ns
    assert fedsim("model.dropout=0.5") == 0
    assert "already done" in capsys.readouterr().out
    assert (folder / "summary.json").stat().st_mtime_ns == stamp
    assert fedsim("model.dropout=0.5", "overwrite=true") == 0
    assert folders(tmp_path) == [folder]
    assert (folder / "summary.json").stat().st_mtime_ns > stamp
    assert without_seconds(folder) == first


def test_a_job_of_a_sweep_equals_the_same_job_alone(
    fedsim: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fedsim("-m", "selector=random,rpow_d", "seed=0,1", "name=sweep") == 0
    table = capsys.readouterr().out
    assert "4 jobs" in table
    assert "over the seeds" in table
    assert "rpow_d" in table
    assert len(folders(tmp_path)) == 4
    for selector in ("rpow_d", "random"):
        fedsim(f"selector={selector}", "seed=1", "name=alone")
    for folder in (tmp_path / "outputs" / "alone").iterdir():
        assert without_seconds(folder) == without_seconds(
            tmp_path / "outputs" / "sweep" / folder.name
        )


@pytest.mark.parametrize(
    "words",
    [
        ["selector=random,full,md"],
        ["seed=0,1", "partition_seed=7", "init_seed=7"],
    ],
)
def test_runs_that_are_paired_have_the_same_division_and_initial_model(
    words: list[str], fedsim: Run, tmp_path: Path
) -> None:
    """Selectors are paired at a seed, and seeds if those of partition and model are kept."""
    fedsim("-m", *words)
    summaries = [read_summary(folder) or {} for folder in folders(tmp_path)]
    assert len({summary["last_accuracy"] for summary in summaries}) == len(summaries) > 1
    assert len({summary["partition_hash"] for summary in summaries}) == 1
    assert len({summary["initial_accuracy"] for summary in summaries}) == 1


def test_global_generators_are_left_alone(fedsim: Run) -> None:
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002
    expected = (torch.rand(2).tolist(), np.random.rand(2).tolist())  # noqa: NPY002
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002
    assert fedsim("model.dropout=0.5") == 0
    assert (torch.rand(2).tolist(), np.random.rand(2).tolist()) == expected  # noqa: NPY002


CONF = ROOT / "conf"
GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name != "preset")
"""Presets are checked in tests/test_presets.py."""
NEEDS = {
    "hf_folder": "dataset.path=x",
    "parquet": "dataset.path=x",
    "image_folder": "dataset.path=x",
    "shakespeare": "model=text_mlp",
    "cnn": "dataset=fashion_mnist",  # the digits are too small for its convolutions
    "femnist_cnn": "dataset=fashion_mnist",
    "lenet": "dataset=fashion_mnist",
    "cnn1d": "dataset=smartwatch",
    "text_gru": "dataset=text_generated",
    "text_mlp": "dataset=text_generated",
    "text_transformer": "dataset=text_generated",
}
"""What some choices need to be sound."""


@pytest.mark.parametrize("group", GROUPS)
def test_every_choice_of_a_group_composes_into_a_sound_plan(group: str, fedsim: Run) -> None:
    choices = {path.stem for path in (CONF / group).glob("*.yaml")}
    choices.discard("trace")  # needs a file
    common = ["server.public_samples=50", "system=lognormal"] if group == "selector" else []
    by_need: dict[str, list[str]] = {}
    for choice in sorted(choices):
        by_need.setdefault(NEEDS.get(choice, ""), []).append(choice)
    planned = set()
    with search_path():
        for need, alike in by_need.items():
            words = [f"{group}={','.join(alike)}", *([need] if need else common)]
            plans = check_jobs(compose_jobs(words, multirun=True))
            planned |= {plan.choices[group] for plan in plans}
    assert planned == choices


@pytest.mark.parametrize(
    ("group", "selector"),
    [
        ("threshold", "fedabc"),
        ("exploration", "gpfl"),
        ("sketch", "pncs"),
        ("valuation", "s_fedavg"),
    ],
)
def test_every_choice_of_a_selectors_own_groups_runs(
    fedsim: Run, group: str, selector: str
) -> None:
    files = (ROOT / "conf" / "selector" / group).glob("*.yaml")
    choices = ",".join(sorted(path.stem for path in files))
    words = [
        f"selector={selector}",
        f"selector/{group}={choices}",
        "num_rounds=3",
        "server.public_samples=20",
    ]
    assert fedsim("-m", *words, "tracker=files_only") == 0
