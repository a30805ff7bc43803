"""The jobs of a sweep that fedsim derives equal what Hydra composes of the same words."""

import random
from typing import Any
from unittest.mock import Mock

import hydra
import pytest

from fedsim.config.compose import check_jobs, compose_jobs, search_path
from fedsim.config.composition import choices_of, compose_config, resolved
from fedsim.config.job import ComposedJob
from fedsim.core.disk import conf_dir
from fedsim.core.errors import ConfigError

MAX_COMPARED = 10
"""Jobs of a sweep that are compared, because Hydra takes 0.1 s for each."""


def with_types(node: Any) -> Any:
    """Return nested containers with the order of their keys and the types of their values."""
    if isinstance(node, dict):
        return [(key, with_types(value)) for key, value in node.items()]
    if isinstance(node, list):
        return [with_types(value) for value in node]
    return type(node), node


def jobs_of(line: str) -> list[ComposedJob]:
    with search_path():
        return compose_jobs(line.split(" "), multirun=True)


def assert_equal_to_hydras(jobs: list[ComposedJob]) -> None:
    with search_path():
        for job in random.Random(1).sample(jobs, min(len(jobs), MAX_COMPARED)):
            config = hydra.compose("config", list(job.overrides), return_hydra_config=True)
            choices = choices_of(config)
            assert with_types(job.config) == with_types(resolved(config, choices))
            assert list(job.choices.items()) == list(choices.items())
            assert job.launcher == config.hydra.launcher


@pytest.mark.parametrize(
    "line",
    [
        "selector=random,gpfl,pncs optimizer.lr=0.01,1 seed=range(3)",
        "preset=gpfl_table2_fmnist scale=small selector=gpfl",
        "preset=gpfl_rho,gpfl_alpha scale=small",
        "preset=fedabc_lambda scale=small num_rounds=3,4",
        "scale=debug num_clients=10,11 selector=gpfl,oort",
        "+extra=1,2 name=null,a model.hidden=[8],[9,9]",
        "output_dir=${name}x seed=1,2",
        "~tracker seed=1,2",
        "hydra/launcher=lanes hydra.launcher.max_lanes=2,3",
        "local.steps=null,5 local.epochs=1,2",
        "local={epochs:1},{epochs:2} name='a',\"c\"",
        "selector=gpfl,gpfl_cosine selector.metric=cosine selector/exploration=fixed "
        "selector.exploration.value=1",
        "selector=gpfl selector/exploration=fixed,linear selector.factor=centred,literal2",
        "optimizer.lr=0.1 ++optimizer.lr=0.2 seed=0,1",
        "++optimizer.lr=0.2 optimizer.lr=0.1 seed=0,1",
        "local.epochs=2 local={epochs:3} seed=0,1",
        "local={epochs:3} local.epochs=2 seed=0,1",
        "+extra=1 extra=2,3 seed=0,1",
        "optimizer.lr=2 ~optimizer.lr seed=0,1",
        "+extra.a=1 extra.a=2,3 ++extra={a:4,b:5}",
    ],
)
def test_a_sweep_equals_what_hydra_composes(line: str) -> None:
    assert_equal_to_hydras(jobs_of(line))


GROUPS = [
    "selector",
    "dataset",
    "partition",
    "model",
    "optimizer",
    "aggregator",
    "availability",
    "system",
    "engine",
    "tracker",
]


@pytest.mark.parametrize("group", GROUPS)
def test_the_choices_of_a_group_equal_what_hydra_composes(group: str) -> None:
    names = {path.stem for path in (conf_dir() / group).glob("*.yaml")}
    names -= {"image_folder", "parquet"}  # which have no default path
    assert_equal_to_hydras(jobs_of(f"{group}={','.join(sorted(names))}"))


@pytest.fixture
def composed_by_hydra(monkeypatch: pytest.MonkeyPatch) -> Mock:
    counted = Mock(side_effect=compose_config)
    for module in ("compose", "overlay"):
        monkeypatch.setattr(f"fedsim.config.{module}.compose_config", counted)
    return counted


def test_hydra_composes_a_sweep_over_choices_and_values_once(composed_by_hydra: Mock) -> None:
    jobs = jobs_of("selector=random,gpfl seed=range(20) optimizer.lr=0.1,0.2")
    assert len(jobs) == 80
    assert composed_by_hydra.call_count == 1


def test_jobs_are_the_same_if_few_bases_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "selector=random,gpfl seed=0,1 model=mlp,logistic"
    jobs = jobs_of(line)
    monkeypatch.setattr("fedsim.config.overlay.MAX_BASES", 1)
    assert [job.config for job in jobs_of(line)] == [job.config for job in jobs]


def test_a_key_that_only_some_choices_have_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"selector\.metric: is not a known key"):
        jobs_of("selector=random,gpfl selector.metric=cosine,dot")


@pytest.mark.parametrize(
    "line",
    [
        "local={batch_size:8} local={steps:4}",
        "local={batch_size:8} local.batch_size=16 local={batch_size:4}",
        "optimizer.lr=0.1 ++optimizer.lr=0.2 optimizer.lr=0.3",
        "optimizer.lr=0.1 ~optimizer.lr ++optimizer.lr=0.3",
    ],
)
def test_a_job_of_a_sweep_is_the_single_run_of_its_words(line: str) -> None:
    with search_path():
        [single] = compose_jobs([*line.split(" "), "seed=1"], multirun=False)
    jobs = jobs_of(f"{line} seed=0,1")
    assert [job.config for job in jobs if job.config["seed"] == 1] == [single.config]


@pytest.mark.parametrize("first", ["", "seed=1 "])
def test_a_plain_value_replaces_a_swept_mapping(first: str) -> None:
    (job,) = jobs_of(f"{first}checkpoint={{every:1}},{{every:2}} checkpoint=null")
    assert job.config["checkpoint"] is None


@pytest.mark.parametrize("line", ["scale=debug,full seed=range(3)", "scale=range(6)"])
def test_all_jobs_of_a_command_are_counted(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.setattr("fedsim.config.sweeps.MAX_JOBS", 5)
    with pytest.raises(ConfigError, match="must make at most 5 jobs"):
        jobs_of(line)


def test_large_numbers_that_differ_are_different_values() -> None:
    assert len(jobs_of("seed=9007199254740992,9007199254740993")) == 2


def test_mappings_of_a_sweep_are_merged() -> None:
    jobs = jobs_of("local={batch_size:8},{batch_size:4} local={steps:4}")
    local = [job.config["local"] for job in jobs]
    assert [(values["batch_size"], values["steps"]) for values in local] == [(8, 4), (4, 4)]


@pytest.mark.parametrize(
    "line",
    [
        "extra=2 +extra=1 seed=0,1",
        "~optimizer.lr optimizer.lr=2 seed=0,1",
        "output_dir=??? seed=0,1",
    ],
)
def test_a_sweep_has_the_errors_that_a_single_run_has(line: str) -> None:
    with pytest.raises(ConfigError) as of_a_run, search_path():
        compose_jobs(line.replace("seed=0,1", "seed=0").split(" "), multirun=False)
    with pytest.raises(ConfigError) as of_a_sweep:
        jobs_of(line)
    assert str(of_a_sweep.value) == str(of_a_run.value)


@pytest.mark.parametrize(
    ("short", "long"),
    [
        (
            "selector=gpfl selector.alpha=0,0.1,2",
            "selector=gpfl selector/exploration=fixed selector.exploration.value=0,0.1,2",
        ),
        ("selector=gpfl selector.rho=0.5,1,2", "selector=gpfl selector.exploration.rho=0.5,1,2"),
        (
            "preset=gpfl_rho scale=small selector.rho=3",
            "preset=gpfl_rho scale=small selector.exploration.rho=3",
        ),
    ],
)
def test_a_papers_symbol_is_the_same_job_in_the_same_folder(short: str, long: str) -> None:
    short_jobs = jobs_of(short)
    long_jobs = jobs_of(long)
    assert [job.overrides for job in short_jobs] == [job.overrides for job in long_jobs]
    assert check_jobs(short_jobs[:1])[0].folder == check_jobs(long_jobs[:1])[0].folder


@pytest.mark.parametrize(
    ("line", "num_jobs"),
    [
        ("selector=pncs selector.queue_length=0,2,4,6", 4),
        ("selector=fedabc server.public_samples=100 selector.threshold.start=0.1,0.4", 2),
        ("selector=fedabc server.public_samples=100 selector/threshold=step,linear,convex", 3),
    ],
)
def test_an_ablation_is_typed_as_in_the_paper(line: str, num_jobs: int) -> None:
    assert len(jobs_of(line)) == num_jobs
