"""Mistakes of a command line: those of a stage are told at once, and none makes another up."""

import shlex
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest

from fedsim.config.compose import check_jobs, compose_jobs, search_path
from fedsim.core.errors import ConfigError, Problem


@pytest.fixture(scope="module", autouse=True)
def _conf() -> Iterator[None]:
    with search_path():
        yield


def problems(*words: str, multirun: bool = False) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        check_jobs(compose_jobs(words, multirun=multirun))
    return list(caught.value.problems)


def told(*words: str, multirun: bool = False) -> set[tuple[str, str]]:
    return {(p.key, p.rule) for p in problems(*words, multirun=multirun)}


FOLDER = "has no effect: a run's folder is <output_dir>/<name>/<choices>-<seed>-<hash of its config>"
OF_WORDS = {
    "selector=gpffl": ("selector", "is not a choice of conf/selector/"),
    "nmu_rounds=3": ("nmu_rounds", "is not a known key"),
    "partition=../../etc": ("partition", "must not lead out of conf/"),
    "hydra.callbacks={}": ("hydra.callbacks", "must not be set by an override"),
    "eval_every": ("eval_every", "is neither a command nor key=value"),
    "optimizer/schedule=stepp": ("optimizer/schedule", "is not a choice of conf/optimizer/schedule/"),
    "lr=0.1": ("lr", "is not a known key"),
    "hydra.run.dir=x": ("hydra.run.dir", FOLDER),
    "partition_seed=range(3,0)": ("partition_seed", "has no values: it ends before it begins"),
    "model=null": ("model", "is not a choice of conf/model/"),
    "aggregator.momentun=3": ("aggregator.momentun", "is not a known key"),
    "dataset=digts": ("dataset", "is not a choice of conf/dataset/"),
}
OF_TYPES = {
    "seed=abc": ("seed", "must be an integer"),
    "optimizer.lr=x": ("optimizer.lr", "must be a number"),
    "local.epochs=x": ("local.epochs", "must be an integer or null"),
    "local.batch_size=x": ("local.batch_size", "must be an integer"),
    "server=5": ("server", "must be a mapping of keys to values"),
    "+aggregator.foo=1": ("aggregator.foo", "is not a known key"),
    "~model.dropout": ("model.dropout", "is missing; MLP needs it"),
    "selector.mode=[1]": ("selector.mode", "must be one of uniform, size"),
}
OF_RULES = {
    "cohort_size=0": ("cohort_size", "must be >= 1"),
    "device=tpu": ("device", "must be one of auto, cpu, cuda or cuda:<number>"),
    "optimizer.momentum=2": ("optimizer.momentum", "must lie in [0, 1)"),
    "local.batch_size=0": ("local.batch_size", "must be >= 1"),
    "partition.shards_per_client=0": ("partition.shards_per_client", "must be >= 1"),
    "model.hidden=[0]": ("model.hidden", "must be a list of widths >= 1"),
}
STAGES = [OF_WORDS, OF_TYPES, OF_RULES]
ALONE = {**OF_WORDS, "init_seed=1,2": ("init_seed", "is a sweep over several values, and needs -m")}


@pytest.mark.parametrize("stage", STAGES)
def test_all_mistakes_of_a_stage_are_told_together(stage: dict[str, tuple[str, str]]) -> None:
    assert told(*stage) == set(stage.values())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [ALONE, OF_TYPES, OF_RULES])
def test_each_alone_and_all_pairs_tell_just_their_own(stage: dict[str, tuple[str, str]]) -> None:
    for words in (*((word,) for word in stage), *combinations(stage, 2)):
        assert told(*words) == {stage[word] for word in words}, words


def test_a_mistake_may_hide_one_of_a_later_stage_and_makes_none_up() -> None:
    assert told("selector=gpffl", "selector.metric=cosine", "seed=abc") == {OF_WORDS["selector=gpffl"]}
    assert told("preset=gpfl_table2_fmist", "cohort_size=30", "model.nothing=0.5") == {
        ("preset", "is not a choice of conf/preset/")
    }
    assert told("seed=abc", "cohort_size=0", "optimizer.momentum=2") == {
        OF_TYPES["seed=abc"],
        OF_RULES["optimizer.momentum=2"],
    }
    words = ("num_clients=abc", "cohort_size=30", "selector=oort", "selector.clip=7")
    assert told(*words) == {("num_clients", "must be an integer")}


@pytest.mark.parametrize(
    "words",
    [
        "system=lognormal system.latency=-1 model.dropout=5",
        "availability=bernoulli availability.probability=-1 selector=oort selector.clip=7 system=lognormal",
        "dataset=image_folder dataset.path=nowhere dataset.size=0 optimizer.lr=0",
        "dataset=text_generated model=text_gru aggregator=fedavgm aggregator.momentum=-1 dataset.num_words=x",
        "model=vgg16_head model.dropout=x tracker.wandb.timeout=21",
    ],
)
def test_the_problems_of_all_groups_are_told_at_once(words: str) -> None:
    keys = [word.partition("=")[0] for word in words.split() if "." in word and "nowhere" not in word]
    assert {key for key, _ in told(*words.split())} == set(keys)


def test_a_model_that_does_not_fit_the_data_set_is_told_before_it_is_loaded() -> None:
    assert [p.key for p in problems("model=text_gru", "dataset=digits")] == ["model"]
    assert len(check_jobs(compose_jobs(["model=cnn", "dataset=image_folder", "dataset.path=x"], multirun=False))) == 1


def test_each_value_of_a_sweep_is_judged() -> None:
    found = told("selector=random,gpffl,oort", "seed=0,abc", "modl=x", multirun=True)
    assert found == {OF_WORDS["selector=gpffl"], ("modl", "is not a known key")}
    assert told("selector=random,oort", "seed=0,abc", "optimizer.lr=0,1", multirun=True) >= {
        OF_TYPES["seed=abc"],
        ("optimizer.lr", "must be > 0"),
    }


def test_what_a_preset_sets_and_a_chosen_group_lacks_is_told_by_what_was_typed() -> None:
    words = ("preset=gpfl_table2_fmnist", "cell=gpfl_2spc", "selector=random", "seed=0")
    (cnn,) = problems(*words, "model=cnn")
    assert str(cnn) == (
        "model='cnn': has no dropout, which preset=gpfl_table2_fmnist sets\n    leave out what it sets: "
        "'~model.dropout'; or choose one that has it: model=femnist_cnn|mlp|mlp_64|vgg16_head"
    )
    assert len(check_jobs(compose_jobs([*words, "model=cnn", "~model.dropout"], multirun=False))) == 1
    assert told(*words, "optimizer=adam") == {("optimizer", "has no momentum, which preset=gpfl_table2_fmnist sets")}
    assert told(*words, "optimizer=adam", "sede=1") == {("sede", "is not a known key")}


def test_the_remedies_name_what_was_meant() -> None:
    words = ["lr=0.1", "schedule=cosine", "alpha=1", "optimizer=adam", "optimizer.momentum=0", "selector=glob(gpfl*)"]
    told = [p.remedy for p in problems(*words, "seed=0,1", "hydra.sweep.dir=x", "hydra/sweeper=optuna")]
    command = "fedsim -m lr=0.1 schedule=cosine alpha=1 optimizer=adam optimizer.momentum=0 'selector=glob(gpfl*)'"
    assert told == [
        "set output_dir=... or name=...; its config.yaml holds every value of the run",
        "fedsim search 'optimizer.lr=interval(0.01,0.3)' trials=20 searches with Optuna",
        *[f"{command} seed=0,1 hydra.sweep.dir=x hydra/sweeper=optuna"] * 2,
        "did you mean optimizer.lr?",
        "did you mean optimizer/schedule?",
        "did you mean dataset.alpha (dataset=synthetic) or partition.alpha "
        "(partition=dirichlet_class|dirichlet_client|dirichlet_qp)?",
        "it is a key of optimizer=sgd",
    ]


def test_the_search_that_a_remedy_names_can_be_typed_in_a_shell() -> None:
    (problem,) = problems("optimizer.lr=interval(0.01,0.3)", multirun=True)
    assert shlex.split(problem.remedy)[:3] == ["fedsim", "search", "optimizer.lr=interval(0.01,0.3)"]
    assert "'" in problem.remedy  # without quotes a shell takes the parentheses for its own


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("selector/threshold=linear", "selector/threshold='linear': has no effect: the choice of selector has no such"),
        ("selector/threshold=linear", "it goes with selector=fedabc"),
        ("system/devices=tiers", "it goes with system=lognormal"),
    ],
)
def test_a_choice_in_a_group_that_no_choice_has_is_told_where_it_goes(word: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        compose_jobs([word], multirun=True)


def test_no_choice_is_a_choice_where_none_need_be_made() -> None:
    preset = ["preset=gpfl_table2_fmnist", "selector=random", "seed=0", "cell=null,gpfl_1spc"]
    jobs = compose_jobs(preset, multirun=True)
    assert [job.choices.get("cell") for job in jobs] == [None, "gpfl_1spc"]
    assert [job.config["cohort_size"] for job in jobs] == [5, 10]


def test_glob_is_a_sweep_over_the_choices_that_fit() -> None:
    jobs = compose_jobs(["selector=glob([gpfl*,r*],exclude=*_*)"], multirun=True)
    assert [job.choices["selector"] for job in jobs] == ["gpfl", "random"]
    assert told("selector=glob(xyz*)", multirun=True) == {("selector", "fits no choice of conf/selector/")}


def test_a_config_of_ones_own_that_is_no_yaml_is_told(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "bad.yaml").write_text("a: [")
    with search_path(str(tmp_path)):
        found = problems("model=bad")
    assert any("is not YAML" in p.rule for p in found)
