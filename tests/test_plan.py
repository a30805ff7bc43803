"""The plan of a run: the folder that its config names, and the checks of its components."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsim.config.compose import compose_jobs, make_plan, search_path
from fedsim.config.job import ComposedJob
from fedsim.config.plan import Plan, hash_config, outline
from fedsim.core.configs import IRRELEVANT_KEYS
from fedsim.core.disk import conf_dir
from fedsim.core.errors import ConfigError


@pytest.fixture(scope="module", autouse=True)
def _conf() -> Iterator[None]:
    with search_path():
        yield


def job_of(*words: str) -> ComposedJob:
    return compose_jobs(words, multirun=False)[0]


def plan_of(*words: str) -> Plan:
    job = job_of(*words)
    return make_plan(job.config, job.choices)


def problems(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        plan_of(*words)
    return [str(problem) for problem in caught.value.problems]


# --- the hash -----------------------------------------------------------------------------------------------------


def changed(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    key, _, rest = path.partition(".")
    return {**config, key: changed(config[key], rest, value) if rest else value}


DECISIVE: dict[str, Any] = {
    "seed": 1,
    "partition_seed": 1,
    "init_seed": 1,
    "num_rounds": 7,
    "num_clients": 7,
    "cohort_size": 2,
    "eval_every": 3,
    "client_accuracy": "train",
    "secure_aggregation": True,
    "device": "cpu",
    "local.epochs": 9,
    "server.validation_fraction": 0.2,
    "final_window": 5,
    "stop_at": 0.8,
    "test_on": "holdout",
    "dataset.mean": [0.1],
    "partition.x": 9,
    "availability.x": 1,
    "model.dropout": 0.2,
    "optimizer.schedule.x": 1,
    "selector.mode": "size",
    "aggregator.weighting": "uniform",
    "engine.precision": "bf16",
}
"""A value of each top-level key that can change a result."""


@pytest.mark.parametrize("path", DECISIVE)
def test_a_value_that_can_change_a_result_changes_the_hash(path: str) -> None:
    config = job_of().config
    assert hash_config(changed(config, path, DECISIVE[path])) != hash_config(config)


@pytest.mark.parametrize("key", IRRELEVANT_KEYS)
def test_a_value_that_cannot_change_a_result_changes_no_hash(key: str) -> None:
    config = job_of().config
    assert hash_config(config | {key: "another"}) == hash_config(config)


def test_every_key_is_decisive_or_irrelevant() -> None:
    decisive = {path.partition(".")[0] for path in DECISIVE}
    assert decisive == set(job_of().config) - set(IRRELEVANT_KEYS)


def test_the_order_of_keys_changes_no_hash() -> None:
    config = job_of().config
    backwards: dict[str, Any] = {}
    for key, value in reversed(config.items()):
        backwards[key] = dict(reversed(value.items())) if isinstance(value, dict) else value
    assert hash_config(backwards) == hash_config(config)


def test_a_key_that_is_null_changes_no_hash() -> None:
    """So that the runs of earlier versions, without the key, are found."""
    config = job_of("dataset=emnist").config
    dataset = dict(config["dataset"])
    assert dataset.pop("sha256") is None
    assert hash_config(config | {"dataset": dataset}) == hash_config(config)


CHECKED = [p.stem for p in (conf_dir() / "dataset").glob("*.yaml") if "\nsha256:" in p.read_text()]


MORE_WORDS = {
    "parquet": ["dataset.path=x"],
    "image_folder": ["dataset.path=x"],
    "hf_folder": ["dataset.path=x"],
    "shakespeare": ["model=text_gru"],
}
"""What data sets need besides their names to make a plan."""


@pytest.mark.parametrize("dataset", CHECKED)
def test_a_checksum_may_be_given(dataset: str) -> None:
    words = [f"dataset={dataset}", f"dataset.sha256={'0' * 64}", *MORE_WORDS.get(dataset, [])]
    assert plan_of(*words).config["dataset"]["sha256"] == "0" * 64


def test_a_folder_is_named_by_choices_seed_and_hash() -> None:
    plan = plan_of("selector=md", "seed=4", "name=x", "output_dir=there")
    assert plan.folder == Path(f"there/x/digits-shards-mlp-md-s4-{plan.config_hash[:8]}")
    assert plan.choices["selector"] == "md"


def test_the_usual_window_may_be_written_out() -> None:
    assert plan_of("final_window=11").folder == plan_of().folder
    assert plan_of("final_window=10").folder != plan_of().folder


@pytest.mark.parametrize("path", ["data/insects/", "./data/insects", "data//./insects"])
def test_spellings_of_a_path_of_data_name_one_folder(path: str) -> None:
    words = ["dataset=image_folder", "model=cnn"]
    plan = plan_of(*words, "dataset.path=data/insects")
    respelled = plan_of(*words, f"dataset.path={path}")
    assert respelled.folder == plan.folder
    assert respelled.config["dataset"]["path"] == "data/insects"


@pytest.mark.parametrize(
    "path", ["data/insects", "../insects", "a/../insects", "$HOME/insects", "."]
)
def test_other_paths_of_data_stay_as_they_are(path: str) -> None:
    job = job_of("dataset=image_folder", f"dataset.path={path}", "model=cnn")
    plan = make_plan(job.config, job.choices)
    assert plan.config["dataset"]["path"] == path
    assert plan.config_hash == hash_config({**job.config, "final_window": None})


def test_an_address_in_place_of_a_path_stays_as_it_is() -> None:
    config = job_of("dataset=image_folder", "dataset.path=s3://bucket/insects/", "model=cnn").config
    assert outline(config, {}).config["dataset"]["path"] == "s3://bucket/insects/"


def test_steps_replace_epochs_in_the_record() -> None:
    plan = plan_of("local.steps=3")
    assert (plan.local.steps, plan.local.epochs) == (3, None)
    assert plan.config["local"]["epochs"] is None


# --- checks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("partition.shards_per_client=0", "local.epochs=0"),
        ("optimizer.lr=0", "local.epochs=0"),
        ("aggregator=fedavgm aggregator.momentum=-1", "local.epochs=0"),
        ("selector=oort selector.clip=7", "local.epochs=0"),
        ("tracker.wandb.timeout=21", "local.epochs=0"),
        ("seed=-1", "local.epochs=0"),
        ("server.public_samples=-1", "local.epochs=0"),
        ("dataset.mean=[0.5,0.5]", "client_accuracy=holdout"),
        ("availability=bernoulli availability.probability=2", "client_accuracy=holdout"),
    ],
)
def test_the_problems_of_a_group_are_reported_with_those_of_others(line: str, other: str) -> None:
    words = [*line.split(), other]
    keys = [word.partition("=")[0] for word in words[-2:]]
    reported = problems(*words)
    assert len(reported) == 2
    for key in keys:
        assert any(text.startswith(f"{key}=") for text in reported)


def test_a_selector_needs_its_samples_at_the_server() -> None:
    plan_of("selector=gpfl", "server.public_samples=0")
    plan_of("selector=fedabc", "server.validation_fraction=0", "server.public_samples=5")
    (problem,) = problems("selector=gpfl", "server.validation_fraction=0")
    assert "server.validation_fraction=0.0: must be > 0 for GPFL" in problem


def test_a_value_is_reported_once() -> None:
    (problem,) = problems("local=5")
    remedy = "set its keys one by one, as in local.epochs=..."
    assert problem == f"local=5: must be a mapping of keys to values\n    {remedy}"


def test_a_gpu_can_be_chosen_only_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (problem,) = problems("device=cuda")
    remedy = "use device=cpu or device=auto"
    assert problem == f"device='cuda': needs a CUDA GPU that torch can see\n    {remedy}"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert plan_of("device=cuda").settings.device == "cuda"
