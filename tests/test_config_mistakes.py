"""Mistakes of a command line: key, value, rule and remedy; those of a stage at once, and none makes
another up."""

import shlex
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

import fedsim as api
from fedsim.config.compose import check_jobs, compose_jobs, outlined, search_path
from fedsim.config.words import expand, parse, quoted, without_sweeps, words_of
from fedsim.core.disk import conf_dir
from fedsim.core.errors import ConfigError, FedsimError, Problem
from fedsim.core.types import Population
from fedsim.jobs.cli import run
from fedsim.running.process import print_error
from fedsim.selectors.random import Random
from tests.run_toys import Run, refused, shell


@pytest.fixture(scope="module", autouse=True)
def _conf() -> Iterator[None]:
    with search_path():
        yield


def problems(*words: str) -> list[Problem]:
    sweep = words[:1] == ("-m",)
    with pytest.raises(ConfigError) as caught:
        check_jobs(compose_jobs(words[sweep:], multirun=sweep))
    return list(caught.value.problems)


def told(*words: str) -> set[tuple[str, str]]:
    return {(p.key, p.rule) for p in problems(*words)}


# --- one at a time: the words, and what is told of them, with `//` before the remedy ---------------------------------

TABLE = """
cohort_size=30 -> cohort_size=30: must lie in [1, num_clients=20]
num_rounds=0 -> num_rounds=0: must be >= 1
seed=-1 -> seed=-1: must be >= 0
optimizer.lr=nan -> optimizer.lr=nan: must be finite and > 0
optimizer.lr=1e39 -> optimizer.lr=1e+39: must be finite in float32 and > 0
num_clients=1000000000 -> num_clients=1000000000: must be at most 1000000
num_clients=9223372036854775808 -> must be an integer of at most 64 bits
selector=power_of_choice selector.num_candidates=4 -> selector.num_candidates=4: must lie in
local.evaluate_on=holdout -> local.evaluate_on='holdout': needs samples that are held out
selector=fedabc -> server.public_samples=0: must be > 0 for FedABC
selector=gpfl server.validation_fraction=0 -> server.validation_fraction=0: must be > 0 for GPFL
local.epochs=null -> one of local.epochs and local.steps must be given
local.steps=5 local.epochs=2 -> local.epochs=2: has no effect while local.steps=5
model=cnn -> model: model=cnn needs images
selector=greedy_shapley selector/valuation=exact cohort_size=20 -> // selector/valuation=sampled estimates
~model.dropout -> model.dropout: is missing; MLP needs it
server=2 -> server=2: must be a mapping of keys to values // set its keys one by one, as in server.validation_fraction=
name=../evil -> name='../evil': must be usable as a folder's name // 1 to 255 bytes
device=tpu -> device='tpu': must be one of auto, cpu, cuda or cuda:<number>
optimizer._target_=os.system -> optimizer._target_='os.system': must be the dotted path of a subclass
optimizer.schedule._target_=subprocess.Popen -> optimizer.schedule._target_='subprocess.Popen'
tracker.console._target_=builtins.open tracker=default -> tracker.console._target_='builtins.open'
partition_seed=${oc.create:[]} -> partition_seed=[]: must be an integer or null
name=${oc.env:NO_SUCH_VARIABLE} -> NO_SUCH_VARIABLE
scale=small -> scale='small': has no effect here // it is for presets with a `small`
scale=smal -> scale='smal': must be one of full, small, debug
num_rounds -> num_rounds: is neither a command nor key=value
dataset=../../etc -> dataset='../../etc': must not lead out of conf/
num_round=3 -> num_round: is not a known key // did you mean num_rounds?
+num_round=3 -> num_round: is not a known key // did you mean num_rounds?
optimizer.momentun=3 -> optimizer.momentun: is not a known key // did you mean optimizer.momentum?
++optimizer.learning_rate=3 -> optimizer.learning_rate: is not a known key
+local.step=3 -> local.step: is not a known key // did you mean local.steps?
selector=random selector.exploration.rhoo=1 -> selector.exploration: is not a known key // known here: mode
+a={b:{b:1}} -> a: is not a known key
-m seed=range(1e9) -> seed: must make at most 10000 jobs // split the sweep into several commands
-m seed=range(3000) optimizer.lr=1,2,3,4 -> seed, optimizer.lr: must make at most 10000 jobs
-m a=range(0) -> a='range(0)': has no values // range(start,stop,step) ends before stop
-m a=range(0,5,0) -> a='range(0,5,0)': must have a step other than 0
-m a=0,1,0 -> a='0,1,0': has 0 twice
-m selector=glob(xyz*) -> selector='glob(xyz*)': has no values // known here: adapow_d
seed=0,1 -> seed='0,1': is a sweep over several values, and needs -m
selector=randon -> selector='randon': is not a choice of conf/selector/ // did you mean random?
dataset=tiny_imagenet -> // images in folders: dataset=image_folder; a set of Hugging Face: dataset=parquet
partition=dirichlet -> dirichlet_class: Each class is spread over the clients by a Dirichlet draw
K=5 -> K: is not a known key // did you mean cohort_size?
selector.Q=4 -> // did you mean selector.queue_length (selector=pncs)?
selector.alpha=1 -> // it is a key of selector=fedgs|linucb; or did you mean selector.exploration.value (selector=gpfl
optimizer.eta=1 -> // did you mean optimizer.lr?
selector=gpfl selector.alpha=x -> selector.exploration.value='x': must be a number
selector=none -> selector='none': is not a choice of conf/selector/ // known here
selector=a/own -> selector='a/own': is not a choice of conf/selector/ // known here
dataset=dirichlet_qp -> // did you mean partition=dirichlet_qp?
optimizer=cosine -> // did you mean optimizer/schedule=cosine?
selector/threshold=linear -> has no effect: the choice of selector has no such group // choose a selector that has one
hydra/sweeper=optuna -> hydra/sweeper='optuna': is not supported // sweep over values
selector=random selector.exploration.rho=1 -> // it is a key of selector=gpfl|gpfl_cosine
selector=md selector.exploration.value=1 -> // it is a key of selector=gpfl_alpha0
selector=gpfl_alpha0 selector.exploration.rho=1 -> // it is a key of selector/exploration=decreasing|linear|
selector=gpfl selector.threshold.start=1 -> // it is a key of selector=fedabc
selector=gpfl selector.sketch.size=3 -> |topk_100
optimizer=adam +optimizer.momentum=0 -> optimizer.momentum: is not a known key // it is a key of optimizer=sgd
system.devices.path=x -> // it is a key of system=trace
hydra.launcher.max_lanes=1 -> // it is a key of hydra/launcher=lanes
hydra/launcher=lanes hydra.launcher.n_jobs=1 -> hydra.launcher.n_jobs: is not a known key
lr=0.1 -> // did you mean optimizer.lr?
schedule=cosine -> // did you mean optimizer/schedule?
rho=1 -> // did you mean selector.exploration.rho (selector=gpfl|gpfl_cosine)?
selector=gpfl exploration.rho=1 -> // did you mean selector.exploration.rho?
selector=gpfl selector.alpha=1 selector.rho=1 -> selector.alpha: and selector.rho exclude each other
output_dir=/x/lr=0.1 -> output_dir='/x/lr=0.1': has '=' outside of quotes // quote it for fedsim, and once more
output_dir=/x/lr=0.1 -> for the shell: 'output_dir="/x/lr=0.1"'
output_dir=/x/a,b -> has a comma, which separates values // quote a text that has one: 'output_dir="/x/a,b"'
name=a,b -> // quote a text that has one: 'name="a,b"'
output_dir=/x/[a] -> output_dir='/x/[a]': has '[' outside of quotes
output_dir=/x/数据 -> output_dir='/x/数据': has '数' outside of quotes // quote it for fedsim, and once more
model.hidden=[64 -> // a list is [a,b], a mapping {a:1}; a text is quoted: 'model.hidden="[64"'
+seed=5 -> seed='5': is a key already, and + adds one // leave out the +: seed=5
+optimizer.lr=5 -> // leave out the +: optimizer.lr=5
+selector=gpfl -> selector='gpfl': is a key already, and + adds one // leave out the +: selector=gpfl
++selector=gpfl -> // leave out the +: selector=gpfl
~seed=5 -> seed='5': Could not delete from config. The value of 'seed' is 0 and not 5.
name=2024 -> name=2024: must be a string // quote a text: 'name="2024"'
name=1e3 -> // quote a text: 'name="1e3"'
name=true -> // quote a text: 'name="true"'
output_dir=2024 -> // quote a text: 'output_dir="2024"'
seed=010 -> seed='010': must be an integer // write 10
seed=1:30 -> seed='1:30': must be an integer // write 90
seed='5' -> seed='5': must be an integer // write 5
num_rounds=1e3 -> num_rounds=1000.0: must be an integer // write 1000
overwrite=yes -> overwrite='yes': must be true or false // write true
alpha=1 -> dataset.alpha (dataset=synthetic) or local_algorithm.alpha (local_algorithm=feddyn) or partition.alpha (
"""


@pytest.mark.parametrize("row", TABLE.strip().splitlines())
def test_a_mistake_is_told_with_key_value_rule_and_remedy(row: str) -> None:
    words, _, message = row.partition(" -> ")
    (problem,) = problems(*words.split())
    assert message.removeprefix("// ") in str(problem).replace("\n    ", " // ")


@pytest.mark.parametrize("value", ["{b:" * 900 + "1" + "}" * 900, "[" * 1900 + "]" * 1900])
def test_a_value_that_is_nested_too_deeply(value: str) -> None:
    assert str(problems(f"+a={value}")[0]).startswith("+a: is nested too deeply")
    assert str(problems(f"seed={'[' * 40}1{']' * 40}")[0]) == "seed: is nested too deeply"
    assert "1 to 255 bytes" in problems(f"name={'x' * 300}")[0].remedy
    assert (
        "dotted path of a subclass" in problems(f"selector._target_=fedsim.{'x' * 300}.Y")[0].rule
    )


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("seed=3\r", "leave that out: seed=3"),
        ("output_dir=/x/a b\r\n", "leave that out: 'output_dir=/x/a b'"),
        ("seed = 3", "leave that out: seed=3"),
        ("name=it's", "quote it for fedsim, and once more for the shell: 'name=\"it'\"'\"'s\"'"),
        ("name=a b,c", "quote a text that has one: 'name=\"a b,c\"'"),
    ],
)
def test_a_word_that_cannot_be_read_is_shown_as_it_is_to_be_typed(word: str, remedy: str) -> None:
    (problem,) = problems(word)
    assert problem.remedy == remedy
    typed = shlex.split(remedy.partition(": ")[2])
    assert not any(word in str(problem) for word in ("LexerNoViable", "mismatched input", "EOF"))
    assert len(parse(typed)) == 1


@pytest.mark.parametrize(
    "text",
    ["/x/lr=0.1", "a,b", "数据", "it's", 'a"b', "a\\", '\\"', 'a\\\\"', "[a", "${a", "", "x\ny"],
)
def test_a_quoted_text_is_read_as_it_is(text: str) -> None:
    (word,) = shlex.split(quoted("name", text))
    assert parse([word])[0].value() == text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["--num_rounds=5"],
            "--num_rounds=5: is not an option\n    values of the config are set without dashes: num_rounds=5",
        ),
        (["seed=1", "--num-rounds=5"], "without dashes: num_rounds=5"),
        (
            ["--seed", "5"],
            "--seed: is not an option\n    values of the config are set without dashes: seed=...",
        ),
    ],
)
def test_a_value_that_is_typed_as_an_option(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run(words)
    assert told in str(caught.value)


# --- other names of choices -------------------------------------------------------------------------------------------

NAMES = (
    ("selector=GPFL", "selector=gpfl"),
    ("selector=Pow-D", "selector=power_of_choice"),
    ("dataset=fmnist", "dataset=fashion_mnist"),
    ("partition=dir_01", "partition=dirichlet_01"),
    ("aggregator=FedAvg", "aggregator=by_size"),
    ("aggregator=mean", "aggregator=uniform"),
    ("availability=none", "availability=always"),
    ("optimizer/schedule=Cosine", "optimizer/schedule=cosine"),
    ("selector=GPFL selector.alpha=0.5", "selector=gpfl selector.alpha=0.5"),
    (
        "preset=GPFL_Table2_FMNIST cell=GPFL_2spc seed=0 selector=Random",
        "preset=gpfl_table2_fmnist cell=gpfl_2spc seed=0 selector=random",
    ),
)


def composed(line: str, multirun: bool = False) -> list[tuple[dict[str, str], Path]]:
    jobs = compose_jobs(line.split(), multirun=multirun)
    return [(plan.choices, plan.folder) for plan in outlined(jobs)]


@pytest.mark.parametrize(("typed", "name"), NAMES)
def test_a_run_is_the_same_by_any_name_of_its_choices(typed: str, name: str) -> None:
    assert composed(typed) == composed(name)


def test_other_names_in_sweeps_and_in_python() -> None:
    swept = composed("selector=GPFL,random,Pow-D seed=0,1", multirun=True)
    assert swept == composed("selector=gpfl,random,power_of_choice seed=0,1", multirun=True)
    (plan,) = api.compose(["selector=GPFL"])
    assert plan.folder == api.compose(["selector=gpfl"])[0].folder
    assert problems("-m", "selector=GPFL,gpfl")[0].rule == "has gpfl twice"


def test_a_name_of_several_choices_is_explained() -> None:
    assert "clustered2: One client from each" in problems("selector=Clustered")[0].remedy


def test_the_search_that_a_remedy_names_can_be_typed_in_a_shell() -> None:
    (problem,) = problems("-m", "optimizer.lr=interval(0.01,0.3)")
    assert shlex.split(problem.remedy)[:3] == [
        "fedsim",
        "search",
        "optimizer.lr=interval(0.01,0.3)",
    ]
    assert "'" in problem.remedy  # without quotes a shell takes the parentheses for its own


# --- several ----------------------------------------------------------------------------------------------------------

OF_WORDS = {
    "selector=gpffl": ("selector", "is not a choice of conf/selector/"),
    "nmu_rounds=3": ("nmu_rounds", "is not a known key"),
    "partition=../../etc": ("partition", "must not lead out of conf/"),
    "hydra.callbacks={}": ("hydra.callbacks", "must not be set"),
    "eval_every": ("eval_every", "is neither a command nor key=value"),
    "optimizer/schedule=stepp": (
        "optimizer/schedule",
        "is not a choice of conf/optimizer/schedule/",
    ),
    "hydra.run.dir=x": ("hydra.run.dir", "must not be set"),
    "partition_seed=range(3,0)": ("partition_seed", "has no values"),
    "model=null": ("model", "is not a choice of conf/model/"),
    "aggregator.momentun=3": ("aggregator.momentun", "is not a known key"),
}
OF_TYPES = {
    "seed=abc": ("seed", "must be an integer"),
    "optimizer.lr=x": ("optimizer.lr", "must be a number"),
    "local.epochs=x": ("local.epochs", "must be an integer or null"),
    "server=5": ("server", "must be a mapping of keys to values"),
    "+aggregator.foo=1": ("aggregator.foo", "is not a known key"),
    "selector.mode=[1]": ("selector.mode", "must be one of uniform, size"),
}
OF_RANGES = {
    "cohort_size=0": ("cohort_size", "must be >= 1"),
    "device=tpu": ("device", "must be one of auto, cpu, cuda or cuda:<number>"),
    "optimizer.momentum=2": ("optimizer.momentum", "must lie in [0, 1)"),
    "local.batch_size=0": ("local.batch_size", "must be >= 1"),
    "partition.shards_per_client=0": ("partition.shards_per_client", "must be >= 1"),
}
OF_PARTS = {
    "model.hidden=[0]": ("model.hidden", "must be a list of widths >= 1"),
    "client_accuracy=holdout": ("client_accuracy", "needs samples that are held out"),
    "device=cuda:99": ("device", "needs a CUDA GPU that torch can see"),
}
STAGES = [OF_WORDS, OF_TYPES, OF_RANGES, OF_PARTS]


@pytest.mark.parametrize("stage", STAGES)
def test_all_mistakes_of_a_stage_are_told_together(stage: dict[str, tuple[str, str]]) -> None:
    assert told(*stage) == set(stage.values())


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_each_alone_and_all_pairs_tell_just_their_own(stage: dict[str, tuple[str, str]]) -> None:
    for words in (*((word,) for word in stage), *combinations(stage, 2)):
        assert told(*words) == {stage[word] for word in words}, words


GROUPS = (
    "system=lognormal system.latency=-1 optimizer.lr=0",
    "availability=bernoulli availability.probability=-1 model.hidden=[0]",
    "dataset=image_folder dataset.path=nowhere dataset.size=0 optimizer.lr=0",
    "dataset=text_generated model=text_gru aggregator=fedavgm aggregator.momentum=-1 dataset.num_words=x",
    "model=vgg16_head model.dropout=x local.batch_size=0",
)


def test_a_mistake_may_hide_one_of_a_later_stage_and_makes_none_up() -> None:
    assert told("selector=gpffl", "selector.metric=cosine", "seed=abc") == {
        OF_WORDS["selector=gpffl"]
    }
    found = told("preset=gpfl_table2_fmist", "cohort_size=30", "model.nothing=0.5")
    assert found == {("preset", "is not a choice of conf/preset/")}
    found = told("seed=abc", "cohort_size=0", "optimizer.momentum=2")
    assert found == {OF_TYPES["seed=abc"], OF_RANGES["optimizer.momentum=2"]}
    words = ("num_clients=abc", "cohort_size=30", "selector=oort", "selector.clip=7")
    assert told(*words) == {
        ("num_clients", "must be an integer"),
        ("selector.clip", "must lie in [0, 1]"),
    }
    for line in GROUPS:
        keys = [
            word.partition("=")[0] for word in line.split() if "." in word and "nowhere" not in word
        ]
        assert {key for key, _ in told(*line.split())} == set(keys)


def test_a_model_is_compared_with_a_data_set_of_known_form_alone() -> None:
    assert [p.key for p in problems("model=text_gru", "dataset=digits")] == ["model"]
    assert (
        len(
            check_jobs(
                compose_jobs(
                    ["model=cnn", "dataset=image_folder", "dataset.path=x"], multirun=False
                )
            )
        )
        == 1
    )


def test_each_value_of_a_sweep_is_judged() -> None:
    found = told("-m", "selector=random,gpffl,oort", "seed=0,abc", "modl=x")
    assert found == {OF_WORDS["selector=gpffl"], ("modl", "is not a known key")}
    found = told("-m", "selector=random,oort", "seed=0,abc", "optimizer.lr=0,1")
    assert found >= {OF_TYPES["seed=abc"], ("optimizer.lr", "must be > 0")}


def test_what_a_preset_sets_and_a_chosen_group_lacks_is_told_with_how_to_leave_it_out() -> None:
    words = ("preset=gpfl_table2_fmnist", "cell=gpfl_2spc", "selector=random", "seed=0")
    (cnn,) = problems(*words, "model=cnn")
    assert str(cnn) == (
        "model.dropout: is not a known key\n    it is a key of model=femnist_cnn|mlp|mlp_64|vgg16_head; "
        "a file sets it, and '~model.dropout' leaves it out"
    )
    assert (
        len(check_jobs(compose_jobs([*words, "model=cnn", "~model.dropout"], multirun=False))) == 1
    )
    assert told(*words, "optimizer=adam", "sede=1") == {("sede", "is not a known key")}
    (swept,) = problems("-m", "preset=gpfl_rho", "selector=random", "cell=gpfl_2spc", "seed=0")
    assert swept.key == "selector.exploration.rho"
    assert (
        swept.remedy == "it is a key of selector=gpfl|gpfl_cosine; preset=gpfl_rho sweeps over it"
    )


# --- sweeps -----------------------------------------------------------------------------------------------------------


def test_a_sweep_is_every_combination_with_the_last_key_fastest() -> None:
    found = expand(parse(["a=1,x", "b=7", "c=range(2)", "~d", "+e=[1,2]"]))
    assert found == [
        [a, "b=7", c, "~d=null", "+e=[1,2]"] for a in ("a=1", "a=x") for c in ("c=0", "c=1")
    ]
    assert expand(parse(["a=1,2", "b=3", "a=4"])) == [
        ["a=4", "b=3"]
    ]  # a later word takes the place of an earlier one
    assert expand(parse(["a='1,2',\"x y\""])) == [["a='1,2'"], ['a="x y"']]
    words = words_of(
        {
            "seed": "range(3)",
            "a.b": [1, 2],
            "selector/sketch": "topk",
            "c": None,
            "d": True,
            "e": 0.5,
        }
    )
    assert words == [
        "seed=range(3)",
        "a.b=[1, 2]",
        "selector/sketch=topk",
        "c=null",
        "d=True",
        "e=0.5",
    ]
    assert [o.value() for o in parse(words[1:])] == [[1, 2], "topk", None, True, 0.5]
    assert without_sweeps(words) == words[1:]


def test_choices_of_none_and_of_all_that_fit() -> None:
    jobs = compose_jobs(
        ["preset=gpfl_table2_fmnist", "selector=random", "seed=0", "cell=null,gpfl_1spc"],
        multirun=True,
    )
    assert [job.choices.get("cell") for job in jobs] == [None, "gpfl_1spc"]
    assert [job.config["cohort_size"] for job in jobs] == [5, 10]
    jobs = compose_jobs(["selector=glob([gpfl*,ra*],exclude=*_*)"], multirun=True)
    assert [job.choices["selector"] for job in jobs] == ["gpfl", "random"]


# --- files of one's own -----------------------------------------------------------------------------------------------


class Forgetful(Random):
    def __init__(self, population: Population) -> None:
        self.count = population.cohort_size


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, with a folder for `--config-dir` below it."""
    (tmp_path / "mine/selector").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def told_of_own(path: Path, text: str, config_dir: str | None = "mine") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    with search_path(config_dir):
        return "\n".join(map(str, problems("selector=own")))


@pytest.mark.parametrize(
    ("file", "config_dir", "remedy"),
    [
        ("conf/selector/own.yaml", None, "conf/selector/own.yaml is there: add --config-dir conf"),
        ("selector/own.yaml", None, "selector/own.yaml is there: add --config-dir ."),
        ("mine/selectors/own.yaml", "mine", "known here: "),
        ("mine/partition/own.yaml", "mine", "did you mean partition=own?"),
    ],
)
def test_the_file_of_a_choice_that_is_not_found(
    here: Path, file: str, config_dir: str | None, remedy: str
) -> None:
    found = told_of_own(here / file, f"_target_: {__name__}.Forgetful\n", config_dir)
    assert f"selector='own': is not a choice of conf/selector/\n    {remedy}" in found


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "count: 3\n",
            "selector._target_=None: must be the dotted path of a subclass of fedsim.selectors.base.Selector\n",
        ),
        ("count: 3\n", "needs the line `_target_: <module>.<Class>`"),
        ("count: [", "is not YAML"),
        (
            f"_target_: {__name__}.Forgetful\n",
            "selector='Forgetful': must call super().__init__(population) in its",
        ),
    ],
)
def test_a_file_without_a_sound_part(here: Path, text: str, told: str) -> None:
    assert told in told_of_own(here / "mine/selector/own.yaml", text)


GLOBAL = "# @package _global_\n"
FILES = {
    "seed: 010": "seed='010': must be an integer\n    write 10",
    "seed: 1:30": "seed='1:30': must be an integer\n    write 90",
    "seed: 0x1F": "seed='0x1F': must be an integer\n    write 31",
    "overwrite: yes": "overwrite='yes': must be true or false\n    write true",
    "name: 2024": 'name=2024: must be a string\n    quote a text in its file: "2024"',
    "hydra: {mode: MULTIRUN, sweeper: {params: {seed: 010}}}": "seed='010': must be an integer",
    "num_rounds: 5\nseed: 1\nnum_rounds: 6": "own.yaml: num_rounds: is there twice, in lines 2 and 4\n    leave one of",
    "local: {steps: 5, steps: 6}": "own.yaml: steps: is there twice, in lines 2 and 2",
    "local:\n\tsteps: 5": "own.yaml: is not YAML in line 3: found character that cannot start any token",
    "defaults: [/selector: gpfl]": "own.yaml: `- /selector: gpfl`: does not replace the choice made\n    "
    "write `- override /selector: gpfl`",
    "defaults: [selector: gpfl]": "    write `- override /selector: gpfl`",
    "defaults: [override selector: gpfl]": "    write `- override /selector: gpfl`",
    "selector: gpfl": "selector='gpfl': must be a mapping\n    choose it in the file's defaults list: `- override /sel",
    "defaults: [override /selector: gpffl]": "own.yaml: `- override /selector: gpffl`: is not a choice of conf/selec"
    "tor/\n    did you mean gpfl?",
    "defaults: [override /selectr: gpfl]": "own.yaml: `- override /selectr: gpfl`: is about no group that there is\n"
    "    did you mean selector?",
}


@pytest.mark.parametrize(("text", "told"), FILES.items())
def test_a_preset_with_a_mistake(here: Path, text: str, told: str) -> None:
    (here / "mine/preset").mkdir()
    (here / "mine/preset/own.yaml").write_text(GLOBAL + text + "\n")
    with search_path("mine"):
        assert told in "\n".join(map(str, problems("preset=own")))


@pytest.mark.parametrize("text", ["num_rounds: 5\n", "defaults:\n  - override /selector: gpfl\n"])
def test_a_preset_without_its_package(here: Path, text: str) -> None:
    (here / "mine/preset").mkdir()
    (here / "mine/preset/own.yaml").write_text(text)
    with search_path("mine"):
        told = "\n".join(map(str, problems("preset=own")))
    assert (
        "own.yaml: has its keys below `preset`, where none is known\n    make `# @package _global_` its first"
        in told
    )


def test_a_file_is_read_as_the_command_line(here: Path) -> None:
    (here / "mine/preset").mkdir()
    lines = [
        "defaults:",
        "  - override /selector: GPFL",
        "  - override /dataset: fmnist",
        "name: on",
        "seed: 1_000",
    ]
    (here / "mine/preset/own.yaml").write_text(GLOBAL + "\n".join(lines) + "\n")
    with search_path("mine"):
        (own,) = outlined(compose_jobs(["preset=own"], multirun=False))
        words = ["selector=gpfl", "dataset=fashion_mnist", "name=on", "seed=1_000"]
        (typed,) = outlined(compose_jobs(words, multirun=False))
    assert own.folder == typed.folder
    assert {**typed.choices, "preset": "own"} == own.choices


def test_a_file_that_a_shipped_one_would_hide_is_refused(here: Path) -> None:
    mine, shipped = here / "mine/selector/random.yaml", conf_dir() / "selector/random.yaml"
    (here / "mine/selector/my_random.yaml").write_text(
        "_target_: fedsim.selectors.random.Random\nmode: size\n"
    )
    mine.write_text(shipped.read_text())  # hides nothing that matters
    (plan,) = api.compose(["selector=my_random"], config_dir="mine")
    assert plan.config["selector"]["mode"] == "size"
    mine.write_text(shipped.read_text().replace("uniform", "size"))
    with pytest.raises(
        ConfigError, match=r"selector/random\.yaml': is hidden by .*, which differs\n    rename it"
    ):
        run(["--config-dir", "mine", "--cfg", "job"])


# --- the command ------------------------------------------------------------------------------------------------------


def test_a_mistake_of_any_job_stops_a_sweep_before_its_first_job(
    fedsim: Run, tmp_path: Path
) -> None:
    text = refused(
        fedsim, tmp_path, "-m", "cohort_size=2,21", "seed=0,1", "optimizer.lr=0", "+selector.foo=1"
    )
    assert "selector.foo" in text
    assert "cohort_size=21" in refused(fedsim, tmp_path, "-m", "cohort_size=2,21", "seed=0,1")


def test_the_config_of_a_job_that_would_be_refused_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words, keys in (
        (["num_rounds=-1", "--cfg", "job", "selector=gpffl", "seed=0,1"], {"selector", "seed"}),
        (["num_rounds=many", "--cfg", "job", "+typo=1"], {"num_rounds", "typo"}),
        (["--info", "all", "selector=nope"], {"selector"}),
    ):
        with pytest.raises(ConfigError) as caught:
            run(words)
        assert {p.key for p in caught.value.problems} == keys
    assert not capsys.readouterr().out


def test_the_config_that_hydra_prints_is_that_of_the_choice_meant(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pages = []
    for name in ("GPFL", "gpfl"):
        run(["--cfg", "job", f"selector={name}"])
        pages.append(capsys.readouterr().out)
    assert pages[0] == pages[1]
    assert "fedsim.selectors.gpfl.GPFL" in pages[0]


def test_absent_data_are_exit_code_3_and_leave_nothing(
    fedsim: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr("fedsim.data.torchvision_sets._fetch", offline)
    with pytest.raises(FedsimError, match="FEDSIM_DATA") as caught:
        fedsim("dataset=mnist", "data_dir=data")
    assert caught.value.exit_code == 3
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_mistakes_exit_with_2_in_one_screen_on_stderr_and_a_traceback_only_on_demand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_error(ConfigError([Problem("a.b", 3, "must be > 4", "try 5")]))
    told = "fedsim: 1 problem in the config; nothing was run\n  a.b=3: must be > 4\n    try 5\n"
    assert capsys.readouterr().err == told
    result = shell(tmp_path, "cohort_size=99")
    assert (result.returncode, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr
    assert "Traceback" in shell(tmp_path, "cohort_size=99", FEDSIM_DEBUG="1").stderr
    assert not list(tmp_path.iterdir())
