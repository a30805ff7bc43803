"""What a config is checked for as a whole, and the folder that is named by it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsim.config.compose import compose_jobs, make_plan, search_path
from fedsim.config.job import ComposedJob
from fedsim.config.plan import Plan, hash_config
from fedsim.core.configs import IRRELEVANT_KEYS
from fedsim.core.errors import ConfigError


@pytest.fixture(scope="module", autouse=True)
def _conf() -> Iterator[None]:
    with search_path():
        yield


def job(*words: str) -> ComposedJob:
    return compose_jobs(words, multirun=False)[0]


def plan(*words: str) -> Plan:
    composed = job(*words)
    return make_plan(composed.config, composed.choices)


def changed(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    key, _, rest = path.partition(".")
    return {**config, key: changed(config[key], rest, value) if rest else value}


DECISIVE = [
    *(
        ("seed", 1),
        ("partition_seed", 1),
        ("init_seed", 1),
        ("num_rounds", 7),
        ("num_clients", 7),
        ("cohort_size", 2),
    ),
    *(("eval_every", 3), ("client_accuracy", "train"), ("device", "cpu")),
    *(("local.epochs", 9), ("local.batch_size", 9), ("local.evaluate_on", "x")),
    *(
        ("server.validation_fraction", 0.2),
        ("server.public_samples", 9),
        ("dataset.mean", [0.1]),
        ("partition.x", 9),
    ),
    *(
        ("availability.x", 1),
        ("model.dropout", 0.2),
        ("optimizer.lr", 0.3),
        ("optimizer.schedule.x", 1),
    ),
    *(("selector.mode", "size"), ("aggregator.weighting", "uniform"), ("engine.precision", "bf16")),
]


def test_every_value_that_can_change_a_result_changes_the_hash_and_no_other_does() -> None:
    config = job().config
    for path, value in DECISIVE:
        assert hash_config(changed(config, path, value)) != hash_config(config), path
    for key in IRRELEVANT_KEYS:
        assert hash_config({**config, key: "another"}) == hash_config(config)
    assert set(IRRELEVANT_KEYS) == {
        "name",
        "data_dir",
        "cache_dir",
        "output_dir",
        "overwrite",
        "checkpoint",
        "tracker",
    }
    assert {p.partition(".")[0] for p, _ in DECISIVE} == set(config) - set(IRRELEVANT_KEYS)
    backwards = {
        k: dict(reversed(v.items())) if isinstance(v, dict) else v
        for k, v in reversed(config.items())
    }
    assert hash_config(backwards) == hash_config(config)


def with_checksum() -> list[str]:
    """The data sets that docs/configuration.md names."""
    page = (Path(__file__).parents[1] / "docs" / "configuration.md").read_text(encoding="utf-8")
    (names,) = re.findall(r"`dataset\.sha256=\.\.\.` \((.*?)\)", page)
    return names.split(", ")


@pytest.mark.parametrize("dataset", with_checksum())
def test_a_checksum_may_be_given_and_the_key_does_not_change_the_hash_while_it_is_null(
    dataset: str,
) -> None:
    words = (
        f"dataset={dataset}",
        *(["dataset.path=x"] if dataset in ("parquet", "image_folder") else []),
    )
    assert plan(*words, f"dataset.sha256={'0' * 64}").config["dataset"]["sha256"] == "0" * 64
    config = job(*words).config
    before = {**config, "dataset": {k: v for k, v in config["dataset"].items() if k != "sha256"}}
    assert before != config
    assert hash_config(before) == hash_config(config)


def test_a_folder_is_named_by_choices_seed_and_hash() -> None:
    found = plan("selector=md", "seed=4", "name=x", "output_dir=there")
    assert found.folder == Path("there") / "x" / f"digits-shards-mlp-md-s4-{found.config_hash[:8]}"
    assert found.choices["selector"] == "md"


def test_steps_take_the_place_of_epochs_and_one_of_them_is_enough() -> None:
    with_steps, with_epochs = plan("local.steps=3"), plan("local.epochs=2")
    assert (with_steps.local.steps, with_steps.local.epochs) == (3, None)
    assert with_steps.config["local"]["epochs"] is None
    assert (with_epochs.local.steps, with_epochs.local.epochs) == (None, 2)


def problems(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        plan(*words)
    return [str(p) for p in caught.value.problems]


OF_GROUPS = """
partition.shards_per_client=0
optimizer.lr=0
aggregator=fedavgm aggregator.momentum=-1
selector=oort selector.clip=7
tracker.wandb.timeout=21
seed=-1
server.public_samples=-1
"""
OF_RULES = ("dataset.mean=[0.5,0.5]", "availability=bernoulli availability.probability=2")
"""What shows when parts are built."""


@pytest.mark.parametrize(
    ("word", "other"),
    [
        *((word, "local.epochs=0") for word in OF_GROUPS.strip().splitlines()),
        *((word, "client_accuracy=holdout") for word in OF_RULES),
    ],
)
def test_the_problems_of_every_group_are_told_with_those_of_others(word: str, other: str) -> None:
    key = word.split()[-1].partition("=")[0]
    found = problems(*word.split(), other)
    assert len(found) == 2
    assert any(text.startswith(f"{key}=") for text in found)
    assert any(text.startswith(other.partition("=")[0]) for text in found)


def test_a_selector_is_told_what_the_server_lacks_for_it() -> None:
    told = problems("selector=gpfl", "server.validation_fraction=0", "server.public_samples=5")[0]
    assert "server.validation_fraction=0.0: must be > 0 for GPFL" in told
    plan("selector=gpfl", "server.public_samples=0")
    plan("selector=fedabc", "server.validation_fraction=0", "server.public_samples=5")


def test_a_value_is_told_of_once() -> None:
    assert problems("local=5") == [
        "local=5: must be a mapping of keys to values\n    set its keys one by one, as in local.epochs=..."
    ]


def test_a_gpu_is_asked_for_only_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert problems("device=cuda") == [
        "device='cuda': needs a CUDA GPU that torch can see\n    use device=cpu or device=auto"
    ]
    assert plan("device=cpu").settings.device == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert plan("device=cuda").settings.device == "cuda"
