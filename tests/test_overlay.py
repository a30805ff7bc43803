"""Jobs of a sweep, whose values are laid over one composition by Hydra, are what Hydra composes of
the same words."""

import random
from typing import Any
from unittest.mock import Mock

import pytest

from fedsim.config.compose import check_jobs, compose_jobs, search_path
from fedsim.config.composition import choices_of, compose_config, resolved
from fedsim.config.job import ComposedJob
from fedsim.core.disk import conf_dir
from fedsim.core.errors import ConfigError

MOST = 10
SWEEPS = [
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
    "selector=gpfl,gpfl_cosine selector.metric=cosine selector/exploration=fixed selector.exploration.value=1",
    "selector=gpfl selector/exploration=fixed,linear selector.factor=centred,literal2 device=cpu",
]


def types_of(node: Any) -> Any:
    """The config's keys in their order, with values and types."""
    if isinstance(node, dict):
        return [(key, types_of(value)) for key, value in node.items()]
    return [types_of(value) for value in node] if isinstance(node, list) else (type(node), node)


def jobs_of(words: str, multirun: bool = True) -> list[ComposedJob]:
    with search_path():
        return compose_jobs(words.split(" "), multirun=multirun)


@pytest.mark.parametrize("words", SWEEPS)
def test_a_job_equals_what_hydra_composes_of_its_words(words: str) -> None:
    jobs = jobs_of(words)
    with search_path():
        for job in random.Random(1).sample(jobs, min(len(jobs), 4)):
            config = compose_config(job.overrides)
            choices = choices_of(config)
            assert types_of(job.config) == types_of(resolved(config, choices))
            assert job.choices == choices
            assert job.launcher == config.hydra.launcher


def choices_of_group(group: str) -> str:
    return f"{group}={','.join(sorted(path.stem for path in (conf_dir() / group).glob('*.yaml')))}"


GROUPS = (
    "selector",
    "dataset",
    "partition",
    "model",
    "optimizer",
    "aggregator",
    "availability",
    "system",
    "engine",
)


@pytest.mark.parametrize("group", GROUPS)
def test_a_choice_laid_over_equals_what_hydra_composes(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten of each group; all of them were compared when this was written."""
    counted = Mock(side_effect=compose_config)
    monkeypatch.setattr("fedsim.config.overlay.compose_config", counted)
    words = (
        choices_of_group(group)
        .replace(",image_folder", "")
        .replace(",parquet", "")
        .replace("=parquet,", "=")
    )
    jobs = jobs_of(words)
    if group == "selector":
        assert counted.call_count < 5
    with search_path():
        for job in random.Random(1).sample(jobs, min(len(jobs), MOST)):
            config = compose_config(job.overrides)
            assert types_of(job.config) == types_of(resolved(config, choices_of(config)))
            assert list(job.choices.items()) == list(choices_of(config).items())


def test_composed_once_for_all_values_of_single_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Mock(side_effect=compose_config)
    monkeypatch.setattr("fedsim.config.overlay.compose_config", counted)
    assert len(jobs_of("selector=random,gpfl seed=range(20) optimizer.lr=0.1,0.2")) == 80
    assert counted.call_count == 1  # for random; gpfl is derived from it


def test_a_key_that_only_some_choices_have_is_told_as_by_hydra() -> None:
    with pytest.raises(ConfigError, match=r"selector\.metric"):
        jobs_of("selector=random,gpfl selector.metric=cosine,dot")


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
    jobs, others = jobs_of(short), jobs_of(long)
    assert [job.overrides for job in jobs] == [job.overrides for job in others]
    assert [job.config for job in jobs] == [job.config for job in others]
    assert check_jobs(jobs[:1])[0].folder == check_jobs(others[:1])[0].folder


def test_ablations_are_typed_as_in_the_papers() -> None:
    fedabc = "selector=fedabc server.public_samples=100"
    assert len(jobs_of("selector=pncs selector.queue_length=0,2,4,6")) == 4
    assert [
        job.config["selector"]["threshold"]["start"]
        for job in jobs_of(f"{fedabc} selector.threshold.start=0.1,0.4")
    ] == [0.1, 0.4]
    assert len(jobs_of(f"{fedabc} selector/threshold=step,linear,convex")) == 3


def test_jobs_are_the_same_where_few_compositions_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "selector=random,gpfl seed=0,1 model=mlp,logistic"
    kept = jobs_of(words)
    monkeypatch.setattr("fedsim.config.overlay.MAX_BASES", 1)
    assert [job.config for job in jobs_of(words)] == [job.config for job in kept]
