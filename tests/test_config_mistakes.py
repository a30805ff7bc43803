"""Mistakes of a command line are reported with key, value, rule and remedy, all of a stage at
once."""

import shlex
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

import fedsim as api
from fedsim.config.compose import check_jobs, compose_jobs, outlined, search_path
from fedsim.config.plan import Plan
from fedsim.config.sweeps import expand, without_sweeps
from fedsim.config.words import parse, quoted, words_of
from fedsim.core.disk import conf_dir
from fedsim.core.errors import ConfigError, FedsimError, Problem
from fedsim.core.types import Population
from fedsim.jobs.cli import run
from fedsim.running import experiment
from fedsim.running.exits import print_error
from fedsim.running.outcome import Outcome
from fedsim.selectors.random import Random
from tests.run_toys import Run, refused, shell


@pytest.fixture(autouse=True)
def _conf() -> Iterator[None]:
    with search_path():
        yield


def problems(*words: str) -> list[Problem]:
    multirun = words[0] == "-m"
    with pytest.raises(ConfigError) as caught:
        check_jobs(compose_jobs(words[1:] if multirun else words, multirun=multirun))
    return list(caught.value.problems)


def keys_and_rules(*words: str) -> set[tuple[str, str]]:
    return {(problem.key, problem.rule) for problem in problems(*words)}


def test_epochs_without_effect_hide_no_other_mistake() -> None:
    found = problems("local.epochs=2", "local.steps=3", "num_rounds=-1")
    assert [problem.key for problem in found] == ["local.epochs", "num_rounds"]


# --- one mistake at a time: the words -> what is reported, with // before the remedy ------------------------------

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
selector=fedabc -> server.public_samples=0: must be > 0 for FedABC // set it to 100, say
selector=gpfl server.validation_fraction=0 -> server.validation_fraction=0.0: must be > 0 for GPFL
secure_aggregation=true selector=gpfl -> =true hides from the server // choose random or aocs, say
secure_aggregation=true aggregator=krum -> `is_mean = True`) // aggregator=by_size or uniform
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
tracker.wandb=null -> must be the dotted path of a subclass of fedsim.tracking.base.Tracker // ~tracker.wandb leaves it out
+tracker.foo=bar -> // a file of your own needs the line `_target_: <module>.<Class>`; fedsim's are in conf/tracker/
+tracker.csv._target_=fedsim.tracking.csv_tracker.CSVTracker -> // did you mean fedsim.tracking.csv_tracker.CsvTracker?
partition_seed=${oc.create:[]} -> partition_seed=[]: must be an integer or null
name=${oc.env:NO_SUCH_VARIABLE} -> NO_SUCH_VARIABLE
scale=small -> scale='small': has no effect here // it is for presets that have the key `small`
debug=true -> debug=True: must be a mapping of keys to the values that they have at this scale // scale=debug chooses the scale
hydra.launcher=null -> hydra.launcher=None: is no launcher // hydra/launcher=lanes chooses one
scale=smal -> scale='smal': must be one of full, small, debug
num_rounds -> num_rounds: is neither a command nor key=value
num_round=3 -> num_round: is not a known key // did you mean num_rounds?
+num_round=3 -> num_round: is not a known key // did you mean num_rounds?
optimizer.momentun=3 -> optimizer.momentun: is not a known key // did you mean optimizer.momentum?
++optimizer.learning_rate=3 -> optimizer.learning_rate: is not a known key
+local.step=3 -> local.step: is not a known key // did you mean local.steps?
+a={b:{b:1}} -> a: is not a known key
selector=random selector.exploration.rhoo=1 -> selector.exploration: is not a known key // known here: mode
-m seed=range(1e9) -> seed: must make at most 10000 jobs // split the sweep into several commands
-m seed=range(3000) optimizer.lr=1,2,3,4 -> seed, optimizer.lr: must make at most 10000 jobs
-m seed=range(0) -> seed='range(0)': has no values // range(start,stop,step) ends before stop
-m seed=range(0,5,0) -> seed='range(0,5,0)': must have a step other than 0
-m seed=range(0,nan) -> seed='range(0,nan)': must have finite numbers
-m seed=range(0,3),7 -> seed='range(0,3),7': mixes single values with range(), choice(), interval() or glob()
-m seed=range(0,3),7 -> // write the values out, as in seed=0,1,2,7
-m seed=choice(0,1),3 -> seed='choice(0,1),3': mixes single values with range()
-m seed=interval(0,1),3 -> seed='interval(0,1),3': mixes single values with range()
-m selector=glob(gp*),random -> selector='glob(gp*),random': mixes single values with range()
model.hidden=[range(0,3),7] -> model.hidden='[range(0,3),7]': mixes single values with range()
-m model.hidden=[choice(1,2),7],[3] -> mixes single values with range()
+a={b:range(3)} -> +a='{b:range(3)}': mixes single values with range()
-m seed=0,1,0 -> seed='0,1,0': has 0 twice
-m optimizer.lr=1,2,1.0 -> optimizer.lr='1,2,1.0': has 1.0 twice
-m selector=glob(xyz*) -> selector='glob(xyz*)': has no values // known here: adapow_d
-m selector=GPFL,gpfl -> selector='gpfl,gpfl': has gpfl twice
seed=0,1 -> seed='0,1': has several values, and needs -m // put -m after fedsim
name=a,b -> // put -m after fedsim; a text that has a comma is quoted: 'name="a,b"'
selector=randon -> selector='randon': is not a choice of conf/selector/ // did you mean random?
dataset=../../etc -> dataset='../../etc': is not a choice of conf/dataset/ // known here: cifar10
partition=dirichlet -> // 3 of its choices are called dirichlet; write which one
selector=Clustered -> clustered2: Clustered sampling
selector=none -> selector='none': is not a choice of conf/selector/ // known here
selector=a/own -> selector='a/own': is not a choice of conf/selector/ // known here
dataset=dirichlet_qp -> // did you mean partition=dirichlet_qp?
optimizer=cosine -> // did you mean optimizer/schedule=cosine?
hydra/sweeper=optuna -> hydra/sweeper: must not be set // leave it out
selector/threshold=linear -> has no effect: the choice of selector has no such group // choose a selector that has one
K=5 -> K: is not a known key // did you mean cohort_size?
selector.Q=4 -> // did you mean selector.queue_length (selector=pncs)?
selector.alpha=1 -> // it is a key of selector=fedgs|linucb; or did you mean selector.exploration.value (selector=gpfl
~selector selector.alpha=1 -> selector.alpha: is not a known key // it is a key of selector=fedgs|linucb; or did you mean selector.exploration.value
optimizer.eta=1 -> // did you mean optimizer.lr?
selector=gpfl selector.alpha=x -> selector.exploration.value='x': must be a number
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
rho=1 -> // did you mean selector.exploration.rho (selector=gpfl)?
selector=gpfl exploration.rho=1 -> // did you mean selector.exploration.rho?
output_dir=/x/lr=0.1 -> output_dir='/x/lr=0.1': cannot be read as key=value // a list is [a,b], a mapping {a:1}
output_dir=/x/lr=0.1 -> a text is quoted for the shell, too: 'output_dir="/x/lr=0.1"'
output_dir=/x/[a] -> output_dir='/x/[a]': cannot be read as key=value
output_dir=/x/数据 -> output_dir='/x/数据': cannot be read as key=value
model.hidden=[64 -> model.hidden='[64': cannot be read as key=value
+seed=5 -> seed='5': is a key already, and + adds one // leave out the +: seed=5
+optimizer.lr=5 -> // leave out the +: optimizer.lr=5
+selector=gpfl -> selector='gpfl': is a key already, and + adds one // leave out the +: selector=gpfl
++selector=gpfl -> // leave out the +: selector=gpfl
~seed=5 -> seed='5': Could not delete from config. The value of 'seed' is 0 and not 5.
name=2024 -> name=2024: must be a string // quote a text: 'name="2024"'
name=1e3 -> // quote a text: 'name="1e3"'
name=true -> // quote a text: 'name="true"'
output_dir=2024 -> // quote a text: 'output_dir="2024"'
seed=010 -> seed='010': must be an integer
overwrite=yes -> overwrite='yes': must be true or false
--num_rounds=5 -> --num_rounds=5: is not an option // values of the config are set without dashes: num_rounds=5
seed=1 --num-rounds=5 -> without dashes: num_rounds=5
--seed 5 -> --seed: is not an option // values of the config are set without dashes: seed=...
"""


@pytest.mark.parametrize("row", TABLE.strip().splitlines())
def test_a_mistake_is_reported_with_key_value_rule_and_remedy(row: str) -> None:
    words, _, message = row.partition(" -> ")
    if words.startswith("--") or " --" in words:
        with pytest.raises(ConfigError) as caught:
            run(words.split())
        reported = caught.value.problems
    else:
        reported = tuple(problems(*words.split()))
    assert len(reported) == 1
    assert message.removeprefix("// ") in str(reported[0]).replace("\n    ", " // ")


@pytest.mark.parametrize(
    ("sweep", "values"),
    [
        ("range(0.1,0.5,0.1)", ["0.1", "0.2", "0.3", "0.4"]),
        ("range(0,0.9,0.3)", ["0.0", "0.3", "0.6"]),
        ("range(0.3,0,-0.1)", ["0.3", "0.2", "0.1"]),
        ("range(1e-5,4e-5,1e-5)", ["1e-05", "2e-05", "3e-05"]),
        ("range(1,3)", ["1", "2"]),
    ],
)
def test_a_range_has_the_numbers_that_a_user_would_write(sweep: str, values: list[str]) -> None:
    assert expand(parse([f"optimizer.lr={sweep}"])) == [
        [f"optimizer.lr={value}"] for value in values
    ]


@pytest.mark.parametrize("value", ["{b:" * 900 + "1" + "}" * 900, "[" * 1900 + "]" * 1900])
def test_a_value_that_is_nested_too_deeply_is_rejected(value: str) -> None:
    (problem,) = problems(f"+a={value}")
    assert (problem.key, problem.rule) == ("+a", "cannot be read as key=value")


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("seed=3\r", "leave out the blanks: seed=3"),
        ("output_dir=/x/a b\r\n", "leave out the blanks: 'output_dir=/x/a b'"),
        ("seed = 3", "leave out the blanks: seed=3"),
        ("name=it's", "for the shell, too: 'name=\"it'\"'\"'s\"'"),
    ],
)
def test_a_word_that_cannot_be_read_is_shown_as_it_is_to_be_typed(word: str, remedy: str) -> None:
    (problem,) = problems(word)
    assert problem.remedy.endswith(remedy)
    (typed,) = shlex.split(remedy.rpartition(": ")[2])
    assert parse([typed])


@pytest.mark.parametrize(
    "text",
    ["/x/lr=0.1", "a,b", "数据", "it's", 'a"b', "a\\", '\\"', 'a\\\\"', "[a", "${a", "", "x\ny"],
)
def test_a_quoted_text_is_read_as_it_is(text: str) -> None:
    (word,) = shlex.split(quoted("name", text))
    assert parse([word])[0].value() == text


def test_the_search_that_a_remedy_names_can_be_typed_in_a_shell() -> None:
    sweep = "optimizer.lr=interval(0.01,0.3)"
    (problem,) = problems("-m", sweep)
    assert shlex.split(problem.remedy)[:3] == ["fedsim", "search", sweep]


# --- other names of choices ---------------------------------------------------------------------------------------


def composed(line: str, *, multirun: bool = False) -> list[tuple[dict[str, str], Path]]:
    plans = outlined(compose_jobs(line.split(), multirun=multirun))
    return [(dict(plan.choices), plan.folder) for plan in plans]


@pytest.mark.parametrize(
    ("typed", "name"),
    [
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
    ],
)
def test_a_run_is_the_same_by_any_name_of_its_choices(typed: str, name: str) -> None:
    assert composed(typed) == composed(name)


def test_other_names_may_be_swept_over() -> None:
    typed = composed("selector=GPFL,random,Pow-D seed=0,1", multirun=True)
    assert typed == composed("selector=gpfl,random,power_of_choice seed=0,1", multirun=True)


def test_other_names_may_be_used_in_python() -> None:
    assert api.compose(["selector=GPFL"])[0].folder == api.compose(["selector=gpfl"])[0].folder


# --- several mistakes ---------------------------------------------------------------------------------------------

IN_WORDS = {
    "selector=gpffl": ("selector", "is not a choice of conf/selector/"),
    "nmu_rounds=3": ("nmu_rounds", "is not a known key"),
    "partition=../../etc": ("partition", "is not a choice of conf/partition/"),
    "hydra.callbacks={}": ("hydra.callbacks", "must not be set"),
    "eval_every": ("eval_every", "is neither a command nor key=value"),
    "optimizer/schedule=stepp": (
        "optimizer/schedule",
        "is not a choice of conf/optimizer/schedule/",
    ),
    "hydra.run.dir=x": ("hydra.run.dir", "must not be set"),
    "partition_seed=1,2": ("partition_seed", "has several values, and needs -m"),
    "model=null": ("model", "is not a choice of conf/model/"),
    "aggregator.momentun=3": ("aggregator.momentun", "is not a known key"),
}
IN_TYPES = {
    "seed=abc": ("seed", "must be an integer"),
    "optimizer.lr=x": ("optimizer.lr", "must be a number"),
    "local.epochs=x": ("local.epochs", "must be an integer or null"),
    "server=5": ("server", "must be a mapping of keys to values"),
    "+aggregator.foo=1": ("aggregator.foo", "is not a known key"),
    "selector.mode=[1]": ("selector.mode", "must be one of uniform, size"),
}
IN_RANGES = {
    "cohort_size=0": ("cohort_size", "must be >= 1"),
    "device=tpu": ("device", "must be one of auto, cpu, cuda or cuda:<number>"),
    "optimizer.momentum=2": ("optimizer.momentum", "must lie in [0, 1)"),
    "local.batch_size=0": ("local.batch_size", "must be >= 1"),
    "partition.shards_per_client=0": ("partition.shards_per_client", "must be >= 1"),
}
IN_COMPONENTS = {
    "model.hidden=[0]": ("model.hidden", "must be a list of widths >= 1"),
    "client_accuracy=holdout": ("client_accuracy", "needs samples that are held out"),
    "device=cuda:99": ("device", "needs a CUDA GPU that torch can see"),
}
STAGES = [IN_WORDS, IN_TYPES, IN_RANGES, IN_COMPONENTS]


@pytest.mark.parametrize("stage", STAGES)
def test_all_mistakes_of_a_stage_are_reported_together(stage: dict[str, tuple[str, str]]) -> None:
    assert keys_and_rules(*stage) == set(stage.values())


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_every_pair_of_mistakes_of_a_stage_is_reported(stage: dict[str, tuple[str, str]]) -> None:
    for words in combinations(stage, 2):
        assert keys_and_rules(*words) == {stage[word] for word in words}, words


@pytest.mark.parametrize(
    ("line", "keys"),
    [
        ("selector=gpffl selector.metric=cosine seed=abc", "selector"),
        ("preset=gpfl_table2_fmist cohort_size=30 model.nothing=0.5", "preset"),
        ("seed=abc cohort_size=0 optimizer.momentum=2", "seed optimizer.momentum"),
        (
            "num_clients=abc cohort_size=30 selector=oort selector.clip=7",
            "num_clients selector.clip",
        ),
        ("system=lognormal system.latency=-1 optimizer.lr=0", "system.latency optimizer.lr"),
        ("dataset=image_folder dataset.path=no dataset.size=0", "dataset.size"),
        ("model=vgg16_head model.dropout=x local.batch_size=0", "model.dropout local.batch_size"),
        ("-m selector=random,gpffl,oort seed=0,abc modl=x", "selector modl"),
        ("-m selector=random,oort seed=0,abc optimizer.lr=0,1", "seed optimizer.lr"),
    ],
)
def test_a_mistake_may_hide_one_of_a_later_stage_and_makes_none_up(line: str, keys: str) -> None:
    assert {problem.key for problem in problems(*line.split())} == set(keys.split())


def test_a_model_is_compared_with_the_form_of_a_data_set_only_if_that_is_known() -> None:
    assert [p.key for p in problems("model=text_gru", "dataset=digits")] == ["model"]
    words = ["model=cnn", "dataset=image_folder", "dataset.path=x"]
    assert len(check_jobs(compose_jobs(words, multirun=False))) == 1


PRESET = ("preset=gpfl_table2_fmnist", "cell=gpfl_2spc", "selector=random", "seed=0")


def test_the_remedy_for_a_key_that_a_preset_sets_and_a_chosen_model_lacks() -> None:
    (problem,) = problems(*PRESET, "model=cnn")
    assert str(problem) == (
        "model.dropout: is not a known key\n    it is a key of model=femnist_cnn|mlp|mlp_64|"
        "text_transformer|vgg16_head; a file sets it, and '~model.dropout' leaves it out"
    )
    words = [*PRESET, "model=cnn", "~model.dropout"]
    assert len(check_jobs(compose_jobs(words, multirun=False))) == 1


def test_a_key_that_a_preset_sweeps_over_and_the_chosen_selector_lacks() -> None:
    words = ("-m", "preset=gpfl_rho", "selector=random", "cell=gpfl_2spc", "seed=0")
    (problem,) = problems(*words)
    assert problem.key == "selector.exploration.rho"
    assert problem.remedy == "it is a key of selector=gpfl|gpfl_cosine"


# --- sweeps -------------------------------------------------------------------------------------------------------


def test_a_sweep_is_every_combination_with_the_last_key_fastest() -> None:
    assert expand(parse(["a=1,x", "b=7", "c=range(2)", "~d", "+e=[1,2]"])) == [
        ["a=1", "b=7", "c=0", "~d=null", "+e=[1,2]"],
        ["a=1", "b=7", "c=1", "~d=null", "+e=[1,2]"],
        ["a=x", "b=7", "c=0", "~d=null", "+e=[1,2]"],
        ["a=x", "b=7", "c=1", "~d=null", "+e=[1,2]"],
    ]


def test_a_later_word_replaces_an_earlier_one_of_the_same_key() -> None:
    assert expand(parse(["a=1,2", "b=3", "a=4"])) == [["a=4", "b=3"]]


def test_a_quoted_comma_separates_no_values() -> None:
    assert expand(parse(["a='1,2',\"x y\""])) == [["a='1,2'"], ['a="x y"']]


def test_the_entries_of_a_mapping_as_words() -> None:
    values = {"seed": "range(3)", "a.b": [1, 2], "g/h": "topk", "c": None, "d": True, "e": 0.5}
    words = words_of(values)
    assert words == ["seed=range(3)", "a.b=[1, 2]", "g/h=topk", "c=null", "d=True", "e=0.5"]
    assert without_sweeps(words) == words[1:]
    assert [override.value() for override in parse(words[1:])] == [[1, 2], "topk", None, True, 0.5]


def test_a_sweep_may_have_null_as_a_choice() -> None:
    words = ["preset=gpfl_table2_fmnist", "selector=random", "seed=0", "cell=null,gpfl_1spc"]
    jobs = compose_jobs(words, multirun=True)
    cohorts = [(job.choices.get("cell"), job.config["cohort_size"]) for job in jobs]
    assert cohorts == [(None, 5), ("gpfl_1spc", 10)]


def test_glob_stands_for_the_choices_that_match() -> None:
    jobs = compose_jobs(["selector=glob([gpfl*,ra*],exclude=*_*)"], multirun=True)
    assert [job.choices["selector"] for job in jobs] == ["gpfl", "random"]


# --- files of the user's ------------------------------------------------------------------------------------------


class Forgetful(Random):
    def __init__(self, population: Population) -> None:
        self.count = population.cohort_size


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def problems_text(config_dir: str | None, *words: str) -> str:
    with search_path(config_dir):
        return "\n".join(map(str, problems(*words)))


@pytest.mark.parametrize(
    ("file", "config_dir", "remedy"),
    [
        ("conf/selector/own.yaml", None, "conf/selector/own.yaml is there: add --config-dir conf"),
        ("selector/own.yaml", None, "selector/own.yaml is there: add --config-dir ."),
        ("mine/partition/own.yaml", "mine", "did you mean partition=own?"),
    ],
)
def test_the_remedy_for_a_choice_whose_file_is_not_found(
    here: Path, file: str, config_dir: str | None, remedy: str
) -> None:
    write(here / file, f"_target_: {__name__}.Forgetful\n")
    text = problems_text(config_dir, "selector=own")
    assert f"selector='own': is not a choice of conf/selector/\n    {remedy}" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("count: 3\n", "must be the dotted path of a subclass of fedsim.selectors.base.Selector\n"),
        ("count: 3\n", "needs the line `_target_: <module>.<Class>`"),
        ("count: [", "is not YAML"),
        (f"_target_: {__name__}.Forgetful\n", "must call super().__init__(population) in its"),
    ],
)
def test_a_file_without_a_sound_component(here: Path, content: str, message: str) -> None:
    write(here / "mine/selector/own.yaml", content)
    assert message in problems_text("mine", "selector=own")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("seed: 010", "seed='010': must be an integer"),
        ("overwrite: yes", "overwrite='yes': must be true or false"),
        ("name: 2024", 'name=2024: must be a string\n    quote a text: name: "2024"'),
        ("hydra: {mode: MULTIRUN, sweeper: {params: {seed: 010}}}", "seed='010': must be an"),
        ("num_rounds: 5\nseed: 1\nnum_rounds: 6", "num_rounds: is there twice, in lines 2 and 4"),
        ("local: {steps: 5, steps: 6}", "own.yaml: steps: is there twice, in lines 2 and 2"),
        ("local:\n\tsteps: 5", "own.yaml: is not YAML in line 3: found character that cannot"),
        ("defaults: [/selector: gpfl]", "own.yaml: `- /selector: gpfl`: does not replace"),
        ("defaults: [selector: gpfl]", "    write `- override /selector: gpfl`"),
        ("defaults: [override selector: gpfl]", "    write `- override /selector: gpfl`"),
        ("selector: gpfl", "choose it in the file's defaults list: `- override /selector: gpfl`"),
        (
            "defaults: [override /selector: gpffl]",
            "`- override /selector: gpffl`: is not a choice of conf/selector/\n    did you mean gpfl?",
        ),
        (
            "defaults: [override /selectr: gpfl]",
            "is about no group that there is\n    did you mean selector?",
        ),
    ],
)
def test_a_preset_with_a_mistake(here: Path, content: str, message: str) -> None:
    write(here / "mine/preset/own.yaml", f"# @package _global_\n{content}\n")
    assert message in problems_text("mine", "preset=own")


@pytest.mark.parametrize("content", ["num_rounds: 5\n", "defaults: [override /selector: gpfl]\n"])
def test_a_preset_without_its_package(here: Path, content: str) -> None:
    write(here / "mine/preset/own.yaml", content)
    message = "own.yaml: has its keys below `preset`, where none is known\n    make `# @package _gl"
    assert message in problems_text("mine", "preset=own")


def test_a_file_is_read_as_the_command_line(here: Path) -> None:
    choices = "defaults:\n  - override /selector: GPFL\n  - override /dataset: fmnist\n"
    write(here / "mine/preset/own.yaml", f"# @package _global_\n{choices}name: on\nseed: 1_000\n")
    with search_path("mine"):
        (own,) = composed("preset=own")
        (typed,) = composed("selector=gpfl dataset=fashion_mnist name=on seed=1_000")
    assert own == ({**typed[0], "preset": "own"}, typed[1])


def test_a_file_that_a_different_shipped_one_hides_is_rejected(here: Path) -> None:
    shipped = (conf_dir() / "selector/random.yaml").read_text()
    write(here / "mine/selector/random.yaml", shipped)
    assert api.compose(["seed=1"], config_dir="mine")  # an equal file hides nothing
    write(here / "mine/selector/random.yaml", shipped.replace("uniform", "size"))
    with pytest.raises(ConfigError, match=r"is hidden by .*, which differs\n    rename it"):
        run(["--config-dir", "mine", "--cfg", "job"])


# --- the command --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["+selector.foo=1", "optimizer.lr=0"])
def test_a_mistake_of_any_job_stops_a_sweep_before_its_first_job(
    fedsim: Run, tmp_path: Path, word: str
) -> None:
    key = word.lstrip("+").partition("=")[0]
    assert key in refused(fedsim, tmp_path, "-m", "cohort_size=2,21", "seed=0,1", word)
    assert "cohort_size=21" in refused(fedsim, tmp_path, "-m", "cohort_size=2,21", "seed=0,1")


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ("num_rounds=-1 --cfg job selector=gpffl seed=0,1", {"selector", "seed"}),
        ("num_rounds=many --cfg job +typo=1", {"num_rounds", "typo"}),
    ],
)
def test_the_config_of_a_job_that_would_be_rejected_is_not_printed(
    words: str, keys: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        run(words.split())
    assert {problem.key for problem in caught.value.problems} == keys
    assert not capsys.readouterr().out


def test_the_config_that_is_printed_is_that_of_the_choice_meant(
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


def test_mistakes_are_printed_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(ConfigError([Problem("a.b", 3, "must be > 4", "try 5")]))
    text = "fedsim: 1 problem in the config; nothing was run\n  a.b=3: must be > 4\n    try 5\n"
    assert capsys.readouterr().err == text


def test_a_mistake_of_one_job_of_a_sweep_does_not_say_that_nothing_was_run(
    fedsim: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code of a user's class may have changed since a checkpoint of this job, for example."""

    execute = experiment.execute

    def refuse_seed_1(plan: Plan, *others: Any) -> Outcome:
        if plan.settings.seed == 1:
            raise ConfigError([Problem("code", ..., "is another", "")])
        return execute(plan, *others)

    monkeypatch.setattr(experiment, "execute", refuse_seed_1)
    assert fedsim("-m", "seed=0,1") == 2
    told = capsys.readouterr().err
    assert "fedsim: 1 problem in the config\n  code: is another\n    concerns 1 of 2 jobs" in told


def test_mistakes_exit_with_2_and_a_traceback_only_on_demand(tmp_path: Path) -> None:
    result = shell(tmp_path, "cohort_size=99")
    assert (result.returncode, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr
    assert "Traceback" in shell(tmp_path, "cohort_size=99", FEDSIM_DEBUG="1").stderr
    assert not list(tmp_path.iterdir())
