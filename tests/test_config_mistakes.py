"""Mistakes of a command line: all are told at once, none hides another or makes one up."""

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
MISTAKES = {
    "selector=gpffl": ("selector", "is not a choice of conf/selector/"),
    "nmu_rounds=3": ("nmu_rounds", "is not a known key"),
    "seed=abc": ("seed", "must be an integer"),
    "optimizer.momentum=2": ("optimizer.momentum", "must lie in [0, 1)"),
    "partition=../../etc": ("partition", "must not lead out of conf/"),
    "cohort_size=0": ("cohort_size", "must be >= 1"),
    "local.epochs=x": ("local.epochs", "must be an integer or null"),
    "hydra.callbacks={}": ("hydra.callbacks", "must not be set by an override"),
    "local.batch_size=0": ("local.batch_size", "must be >= 1"),
    "eval_every": ("eval_every", "is neither a command nor key=value"),
    "optimizer/schedule=stepp": ("optimizer/schedule", "is not a choice of conf/optimizer/schedule/"),
    "lr=0.1": ("lr", "is not a known key"),
    "server=5": ("server", "must be a mapping of keys to values"),
    "+aggregator.foo=1": ("aggregator.foo", "is not a known key"),
    "hydra.run.dir=x": ("hydra.run.dir", FOLDER),
    "partition_seed=range(3,0)": ("partition_seed", "has no values: it ends before it begins"),
    "init_seed=1,2": ("init_seed", "is a sweep over several values, and needs -m"),
    "cell=gpfl_3spc": ("cell", "is not a choice of conf/cell/"),
    "device=tpu": ("device", "must be one of auto, cpu, cuda or cuda:<number>"),
    "model=null": ("model", "is not a choice of conf/model/"),
}
WORDS = tuple(MISTAKES)


@pytest.mark.parametrize("word", [*WORDS[:2], *(pytest.param(word, marks=pytest.mark.faults) for word in WORDS[2:])])
def test_a_mistake_alone_is_one_problem(word: str) -> None:
    assert [(p.key, p.rule) for p in problems(word)] == [MISTAKES[word]]


def test_all_of_them_together_are_all_told() -> None:
    assert told(*WORDS) == set(MISTAKES.values())


@pytest.mark.parametrize("number", range(0, len(WORDS), 7))
def test_pairs_and_triples_of_kinds_tell_just_their_own(number: int) -> None:
    pair = (WORDS[number], WORDS[(number + 7) % len(WORDS)])
    for words in (pair, (*pair, WORDS[(number + 2) % len(WORDS)])):
        assert told(*words) == {MISTAKES[word] for word in words}


@pytest.mark.faults
@pytest.mark.parametrize("size", [2, 3])
def test_all_pairs_and_many_triples_tell_just_their_own(size: int) -> None:
    for words in list(combinations(WORDS, size))[:: 1 if size == 2 else 13]:
        assert told(*words) == {MISTAKES[word] for word in words}, words


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (("num_clients=abc", "cohort_size=30"), "num_clients"),
        (("num_client=50", "cohort_size=30"), "num_client"),
        (("preset=gpfl_table2_fmist", "cohort_size=30", "model.dropout=0.5"), "preset"),
        (("selector=gpffl", "selector.metric=cosine"), "selector"),
        (("cohort_size=abc", "selector=power_of_choice", "selector.num_candidates=4", "modl=cnn"), "cohort_size modl"),
    ],
)
def test_what_is_wrong_only_with_a_guess_is_not_told(words: tuple[str, ...], kept: str) -> None:
    """A rule between two values is not told while one of them is mistaken."""
    assert {p.key for p in problems(*words)} == set(kept.split())


def test_ranges_are_told_beside_types_of_the_same_group_and_selectors_beside_the_population() -> None:
    words = ("num_clients=abc", "selector=oort", "selector.clip=7", "optimizer.lr=x", "optimizer.momentum=2")
    assert {key for key, _ in told(*words)} == {"num_clients", "selector.clip", "optimizer.lr", "optimizer.momentum"}


@pytest.mark.parametrize(
    "words",
    [
        "system=lognormal system.latency=-1 selector=oort selector.clip=7",
        "availability=bernoulli availability.probability=-1 model.hidden=[0] model.dropout=5",
        "dataset.mean=[0.5,0.5] model.hidden=[0]",
        "dataset=image_folder dataset.path=nowhere dataset.size=0 model.hidden=[0]",
        "dataset=text_generated model=text_gru dataset.source=x model.hidden=0",
        "model=vgg16_head model.dropout=1 model.input_size=x",
        "model=resnet20 model.groups=3 optimizer.lr=0",
    ],
)
def test_the_ranges_of_all_groups_are_told_at_once(words: str) -> None:
    keys = [word.partition("=")[0] for word in words.split() if "." in word and "nowhere" not in word]
    assert {key for key, _ in told(*words.split())} == set(keys)


def test_a_model_that_does_not_fit_the_data_set_is_told_before_it_is_loaded() -> None:
    assert [p.key for p in problems("model=text_gru", "dataset=digits")] == ["model"]
    assert len(check_jobs(compose_jobs(["model=cnn", "dataset=image_folder", "dataset.path=x"], multirun=False))) == 1


def test_each_value_of_a_sweep_is_judged() -> None:
    found = told("selector=random,gpffl,oort", "seed=0,abc", "modl=x", multirun=True)
    assert found == {MISTAKES["selector=gpffl"], MISTAKES["seed=abc"], ("modl", "is not a known key")}


def test_what_a_preset_sets_and_a_chosen_group_lacks_is_told_by_what_was_typed() -> None:
    words = ("preset=gpfl_table2_fmnist", "cell=gpfl_2spc", "selector=random", "seed=0")
    (cnn,) = problems(*words, "model=cnn")
    assert str(cnn) == (
        "model='cnn': has no dropout, which preset=gpfl_table2_fmnist sets\n    leave out what it sets: "
        "'~model.dropout'; or choose one that has it: model=femnist_cnn|mlp|mlp_64|vgg16_head"
    )
    assert len(check_jobs(compose_jobs([*words, "model=cnn", "~model.dropout"], multirun=False))) == 1
    assert told(*words, "optimizer=adam", "sede=1") == {
        ("sede", "is not a known key"),
        ("optimizer", "has no momentum, which preset=gpfl_table2_fmnist sets"),
    }


def test_the_remedies_name_what_was_meant() -> None:
    words = ["lr=0.1", "schedule=cosine", "alpha=1", "optimizer=adam", "optimizer.momentum=0", "selector=glob(gpfl*)"]
    told = [p.remedy for p in problems(*words, "seed=0,1", "hydra.sweep.dir=x", "hydra/sweeper=optuna")]
    command = "fedsim -m lr=0.1 schedule=cosine alpha=1 optimizer=adam optimizer.momentum=0 'selector=glob(gpfl*)'"
    assert told == [
        "set output_dir=... or name=...; its config.yaml holds every value of the run",
        *[f"{command} seed=0,1 hydra.sweep.dir=x hydra/sweeper=optuna"] * 2,
        "fedsim search 'optimizer.lr=interval(0.01,0.3)' trials=20 searches with Optuna",
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


def test_a_config_of_ones_own_that_is_no_yaml_is_told_with_the_rest(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "bad.yaml").write_text("a: [")
    with search_path(str(tmp_path)):
        found = problems("model=bad", "seed=abc")
    assert any("is not YAML" in p.rule for p in found)
