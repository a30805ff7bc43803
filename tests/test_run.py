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


def test_a_run_leaves_config_metrics_summary_and_partition(fedsim: Run, tmp_path: Path) -> None:
    assert fedsim("selector=power_of_choice", "name=trial", "seed=4") == 0
    (folder,) = folders(tmp_path)
    assert folder.parent == tmp_path / "outputs" / "trial"
    assert folder.name.startswith("digits-shards-mlp-power_of_choice-s4-")
    names = {"config.yaml", "metrics.jsonl", "summary.json", "partition.npz", "model.safetensors"}
    assert {p.name for p in folder.iterdir()} == names
    records, summary = read_metrics(folder), read_summary(folder) or {}
    assert [r["round"] for r in records] == [1, 2, 3]
    assert all(
        set(r)
        >= {"test_accuracy", "test_loss", "train_loss", "selected", "coverage", *TOTAL_FIELDS}
        for r in records
    )
    assert summary["status"] == "done"
    assert summary["last_accuracy"] == records[-1]["test_accuracy"]
    assert summary["wall_seconds"] == records[-1]["wall_seconds"] > 0
    assert summary["totals"]["bytes_up"] == sum(r["bytes_up"] for r in records)
    assert summary["config_hash"].startswith(folder.name[-8:])
    assert summary["environment"]["torch"]
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["seed"] == 4
    assert config["selector"]["estimate"] == "full"
    division = Division.load(folder / "partition.npz")
    assert len(division.train) == 20
    assert division.hash == summary["partition_hash"]


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
    assert "over seeds" in table
    assert "rpow_d" in table
    assert len(folders(tmp_path)) == 4
    for selector in ("rpow_d", "random"):
        fedsim(f"selector={selector}", "seed=1", "name=alone")
    for folder in (tmp_path / "outputs" / "alone").iterdir():
        assert without_seconds(folder) == without_seconds(
            tmp_path / "outputs" / "sweep" / folder.name
        )


def test_selectors_are_paired_at_a_seed_and_seeds_where_partition_and_model_are_kept(
    fedsim: Run, tmp_path: Path
) -> None:
    """Same division, same initial model: all that differs is who is chosen, or how clients
    train."""
    fedsim("-m", "selector=random,full,md", "name=selectors")
    fedsim("-m", "seed=0,1", "partition_seed=7", "init_seed=7", "name=seeds")
    for name, count in (("selectors", 3), ("seeds", 2)):
        summaries = [read_summary(f) or {} for f in folders(tmp_path) if f.parent.name == name]
        assert (
            len({s["config_hash"] for s in summaries})
            == len({s["last_accuracy"] for s in summaries})
            == count
        )
        assert len({(s["partition_hash"], s["initial_accuracy"]) for s in summaries}) == 1


def test_global_generators_are_left_alone(fedsim: Run) -> None:
    def drawn(words: tuple[str, ...]) -> tuple[list[float], list[float]]:
        torch.manual_seed(3)
        np.random.seed(3)  # noqa: NPY002
        assert not words or fedsim(*words) == 0
        return torch.rand(2).tolist(), np.random.rand(2).tolist()  # noqa: NPY002

    assert drawn(()) == drawn(("model.dropout=0.5",))


def test_every_group_choice_composes_into_a_sound_plan(fedsim: Run) -> None:
    extra = {
        ("parquet", "image_folder"): ["dataset.path=x"],
        ("cnn", "femnist_cnn"): [
            "dataset=fashion_mnist"
        ],  # the digits are too small for their convolutions
        ("text_gru", "text_mlp"): ["dataset=text_generated"],
    }
    asked = ["server.public_samples=50", "system=lognormal"]  # by some selectors
    groups = sorted(
        p for p in (ROOT / "conf").iterdir() if p.is_dir() and p.name != "preset"
    )  # tests/test_presets.py
    files = {
        group.name: {p.stem for p in group.glob("*.yaml")} - {"trace"} for group in groups
    }  # which wants a file
    assert sum(map(len, files.values())) > 100
    with search_path():
        for group, names in files.items():
            apart = {some: names & set(some) for some in extra}
            sweeps = {(): names - set().union(*apart.values()), **apart}
            for some, choices in sweeps.items():
                words = [
                    f"{group}={','.join(sorted(choices))}",
                    *extra.get(some, asked if group == "selector" else []),
                ]
                plans = check_jobs(compose_jobs(words, multirun=True)) if choices else []
                assert {plan.choices[group] for plan in plans} == choices


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
    choices = ",".join(sorted(p.stem for p in (ROOT / "conf" / "selector" / group).glob("*.yaml")))
    words = [
        f"selector={selector}",
        f"selector/{group}={choices}",
        "num_rounds=3",
        "server.public_samples=20",
    ]
    assert fedsim("-m", *words, "tracker=files_only") == 0
