"""`fedsim benchmark`: the sampled settings, and what a study of a tiny setting chooses and runs.

The terms are those of `fedsim.benchmark.study`. A *setting* is a file in conf/cell/, and a *draw* is
what it was made from. A *trial* is a run that serves to choose a learning rate or a *point*, which
is a choice of all of a method's own parameters. *Scored* runs are those that are compared. *Words*
are overrides, such as `num_rounds=200`. A *control* is random selection with other random numbers.
"""

import json
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from fedsim.benchmark import study
from fedsim.benchmark.rules import VARIATIONS, draw_settings
from fedsim.clients.context import LabelledSamples
from fedsim.config.compose import compose_jobs, search_path
from fedsim.config.job import ComposedJob
from fedsim.config.plan import Plan
from fedsim.core.disk import conf_dir
from fedsim.core.errors import ConfigError, FedsimError
from fedsim.core.record import Record
from fedsim.rounds.loop import Simulation
from fedsim.running import assembly
from fedsim.running.exits import exit_code
from fedsim.running.outcome import Outcome

RUNS = Path("outputs/benchmark_v1")
TINY = """\
# @package _global_
defaults:
  - override /dataset: digits
  - override /model: mlp
  - override /partition: shards_2
  - _self_
num_clients: 6
cohort_size: 2
eval_every: 1
local: {steps: 2}
server: {public_samples: 0}
"""


def setting_job(name: str) -> ComposedJob:
    with search_path(None, None):
        [job] = compose_jobs(["preset=benchmark_v1", f"cell={name}"], multirun=False)
    return job


# --- the settings ---


DATASETS = {
    "fmnist": "fashion_mnist",
    "lenet": "fashion_mnist",
    "cifar": "cifar10",
    "plays": "shakespeare",
    "watch": "smartwatch",
    "writers": "femnist_generated",
}
"""The data set of each stratum of settings."""


def test_the_files_of_settings_are_the_draws_and_the_variations() -> None:
    files = {path.stem for path in (conf_dir() / "cell").glob("v1_*.yaml")}
    draws = draw_settings()
    assert len(draws) == 20
    assert files == {draw.name for draw in draws} | set(VARIATIONS)  # v1_base is among these
    for draw in draws:
        job = setting_job(draw.name)
        assert job.choices["dataset"] == DATASETS[draw.stratum], draw
        assert job.choices["partition"] == draw.skew, draw
        assert job.config["num_clients"] == draw.num_clients, draw
        assert job.config["cohort_size"] == draw.cohort_size, draw


def test_no_two_settings_have_the_same_division_of_the_same_data() -> None:
    """The variations of `v1_base` have its division on purpose."""
    divisions = []
    for name in ["v1_base", *(draw.name for draw in draw_settings())]:
        job = setting_job(name)
        dataset, partition = job.choices["dataset"], job.choices["partition"]
        divisions.append((dataset, partition, job.config["num_clients"]))
    assert len(set(divisions)) == len(divisions)


# --- a tiny study ---

ALL_RATES = (0.003, 1e30, 0.3)
"""All runs diverge at the second rate. It stands before 0.3, so that longer runs try it, too."""
TRIAL_SEEDS = (1000, 1001)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, stop: object) -> list[str]:
    """Patch the rules of the benchmark to a few short runs, and write a setting `tiny` to the
    current folder, which is empty. Return the words that choose the setting."""
    monkeypatch.setattr(study, "SCHEDULES", ("constant", "step"))
    monkeypatch.setattr(study, "HORIZONS", (4, 8))
    monkeypatch.setattr(study, "RATES", ALL_RATES)
    monkeypatch.setattr(study, "TUNING_SEEDS", TRIAL_SEEDS)
    monkeypatch.setattr(study, "SEEDS", (0,))
    monkeypatch.setattr(study, "NUM_POINTS", 1)
    Path("own/cell").mkdir(parents=True)
    Path("own/cell/tiny.yaml").write_text(TINY)
    return ["cell=tiny", "--config-dir", "own"]


def runs_in(folder: Path) -> pd.DataFrame:
    """Return a row for each run in a folder, with values of its config and its summary.

    Values that may be missing are strings, because pandas drops groups of None. A run that diverged
    has the accuracy 0, as in a study.
    """
    rows = []
    for path in sorted(folder.glob("*/summary.json")):
        config = yaml.safe_load((path.parent / "config.yaml").read_text())
        summary = json.loads(path.read_text())
        diverged = summary["status"] == "diverged"
        rows.append(
            {
                "selector": config["selector"]["_target_"].rpartition(".")[2],
                "full": str(config["selector"].get("first_round_full")),
                "schedule": config["optimizer"]["schedule"]["_target_"].rpartition(".")[2],
                "rate": config["optimizer"]["lr"],
                "num_rounds": config["num_rounds"],
                "seed": config["seed"],
                "test_on": str(config["test_on"]),
                "diverged": diverged,
                "accuracy": 0.0 if diverged else summary["final_accuracy"],
                "written": path.stat().st_mtime_ns,
            }
        )
    return pd.DataFrame(rows)


def test_a_study_tunes_on_held_out_samples_and_runs_nothing_twice(
    tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["selector=random,top_loss", *tiny]
    assert study.run(command) == 0
    words = "--method top_loss --config-dir own --author NAME --link URL"
    assert capsys.readouterr().out.endswith(f"\nnext: fedsim submit {RUNS} {words}\n")
    runs = runs_in(RUNS)
    chosen = json.loads((RUNS / "tiny.json").read_text())
    schedules = {"constant": "Constant", "step": "Step"}  # classes by choices
    # `full` is top_loss's parameter `first_round_full`: True by default, False in the one point.
    group = ["selector", "full", "schedule", "rate"]

    # 1. Trials are tested on held-out samples, and have seeds of their own.
    is_trial = runs.test_on == "holdout"
    all_trials = runs[is_trial]
    assert set(all_trials.seed) == set(TRIAL_SEEDS)
    trials = all_trials[all_trials.num_rounds == 4]
    assert list(trials.diverged) == list(trials.rate == 1e30)
    num_rate_trials = 2 * 2 * 3  # methods, schedules, rates
    num_point_trials = 1  # of top_loss, under the constant schedule with its best rate
    assert len(trials) == len(TRIAL_SEEDS) * (num_rate_trials + num_point_trials)

    # 2. For each method and schedule, the rate of the highest mean accuracy is chosen.
    means = trials.groupby(group).accuracy.mean()
    for method, selector, default in (
        ("random", "Random", "None"),
        ("top_loss", "TopLoss", "True"),
    ):
        for schedule, schedule_class in schedules.items():
            best_rate = means[selector, default, schedule_class].idxmax()
            assert chosen[method]["rates"][schedule]["4"] == best_rate

    # 3. Then the better one of the defaults and the point is chosen, the defaults if they are equal.
    rate = chosen["top_loss"]["rates"]["constant"]["4"]
    accuracy_of_default = means["TopLoss", "True", "Constant", rate]
    accuracy_of_point = means["TopLoss", "False", "Constant", rate]
    full = "True" if accuracy_of_default >= accuracy_of_point else "False"
    words = [] if full == "True" else ["selector.first_round_full=False"]
    assert chosen["random"]["words"] == []
    assert chosen["top_loss"]["words"] == words

    # 4. Trials of longer runs have the chosen point. They try the rate for 4 rounds, and the one
    #    before it in ALL_RATES, if there is one.
    long_trials = all_trials[all_trials.num_rounds == 8]
    assert set(long_trials.groupby(group).size()) == {len(TRIAL_SEEDS)}
    long_means = long_trials.groupby(group).accuracy.mean()
    for method, selector, point in (("random", "Random", "None"), ("top_loss", "TopLoss", full)):
        for schedule, schedule_class in schedules.items():
            rates = chosen[method]["rates"][schedule]
            position = ALL_RATES.index(rates["4"])
            tried = long_means[selector, point, schedule_class]
            assert set(tried.index) == set(ALL_RATES[max(position - 1, 0) : position + 1])
            assert rates["8"] == tried.idxmax()

    # 5. The scored runs have the chosen values, and are tested on the test set (`test_on=null`).
    scored = runs[~is_trial]
    assert set(scored.test_on) == {"None"}
    assert set(scored.seed) == {0}
    expected = []
    for schedule, schedule_class in schedules.items():
        for num_rounds in (4, 8):
            random_rate = chosen["random"]["rates"][schedule][str(num_rounds)]
            top_loss_rate = chosen["top_loss"]["rates"][schedule][str(num_rounds)]
            expected.append(("Random", "None", schedule_class, random_rate, num_rounds))
            expected.append(("TopLoss", full, schedule_class, top_loss_rate, num_rounds))
    scored_values = scored[[*group, "num_rounds"]].itertuples(index=False, name=None)
    assert sorted(scored_values) == sorted(expected)

    # 6. The same command runs nothing again, so no summary is written anew. A command for one
    #    method keeps the other's values.
    assert study.run(command) == 0
    assert study.run(["selector=random", *tiny]) == 0
    assert list(runs_in(RUNS).written) == list(runs.written)
    assert json.loads((RUNS / "tiny.json").read_text()) == chosen


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cell=tiny", "num_rounds=50"], "num_rounds=50: is fixed by the rules"),
        (
            ["cell=tiny", "selector.mode=weighted"],
            "selector.mode='weighted': is fixed by the rules",
        ),
        (["cell=tiny", "device=cpu,cuda"], "device='cpu,cuda': has several values"),
        (["cell=tiny", "overwrite=true"], "delete outputs/benchmark_v1, or choose another name"),
        (["cell=tiny,tinier"], "cell='tinier'"),  # does not exist
        (["cell=[]"], r"cell=\[\]: must name at least one"),
        (
            ["cell=tiny", "selector=random,lab/deep"],
            "selector='lab/deep': is in a subfolder, .*\n *move the file to selector/deep.yaml",
        ),
        (
            ["cell=tiny", "selector=random,digests"],
            "selector='digests': is the name of another file of submissions, digests.csv",
        ),
    ],
)
def test_mistakes_are_found_before_any_run(words: list[str], message: str, tiny: list[str]) -> None:
    Path("own/selector/lab").mkdir(parents=True)
    for name in ("lab/deep", "digests"):
        text = "_target_: fedsim.selectors.random.Random\nmode: uniform\n"
        Path(f"own/selector/{name}.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        study.run(["selector=random", *words, "--config-dir", "own"])
    assert not RUNS.exists()


def test_trials_do_not_see_the_test_set(tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong labels in the test set change the accuracy of the scored run, but not of the trials."""
    monkeypatch.setattr(study, "SCHEDULES", ("constant",))
    monkeypatch.setattr(study, "HORIZONS", (4,))
    monkeypatch.setattr(study, "RATES", (0.3,))
    command = ["selector=random", *tiny]
    assert study.run(command) == 0

    prepare = assembly.prepare

    def prepare_with_wrong_labels(plan: Plan) -> assembly.PreparedData:
        data = prepare(plan)
        wrong = LabelledSamples(data.test.x, (data.test.y + 1) % data.num_classes)
        return replace(data, test=wrong)

    monkeypatch.setattr(assembly, "prepare", prepare_with_wrong_labels)
    assert study.run([*command, "output_dir=wrong"]) == 0  # runs that have ended are not repeated
    runs = runs_in(RUNS)
    wrong_runs = runs_in(Path("wrong/benchmark_v1"))
    unchanged = runs.accuracy == wrong_runs.accuracy
    assert list(unchanged) == list(runs.test_on == "holdout")
    assert sorted(unchanged) == [False, True, True]  # a scored run and two trials


# --- studies with fake runs ---

OutcomeOf = Callable[[Mapping[str, Any]], Outcome]
"""A function that returns the fake outcome of a run with a config."""
Pretend = Callable[[str, OutcomeOf], list[ComposedJob]]


@pytest.fixture
def pretend(tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Return a function that makes a study of some methods without any run, and returns the jobs
    that would have run."""
    monkeypatch.setattr(study, "SCHEDULES", ("constant",))
    monkeypatch.setattr(study, "HORIZONS", (4,))
    jobs: list[ComposedJob] = []

    def run_jobs(new_jobs: Sequence[ComposedJob], command: Sequence[str]) -> int:
        jobs.extend(new_jobs)
        return 0

    def run(methods: str, outcome_of: OutcomeOf) -> list[ComposedJob]:
        RUNS.mkdir(parents=True)  # the runs would have made it
        monkeypatch.setattr(study, "run_jobs", run_jobs)
        monkeypatch.setattr(study, "outcome_on_file", lambda plan: outcome_of(plan.config))
        assert study.run([f"selector={methods}", *tiny]) == 0
        return jobs

    return run


def done(accuracy: float) -> Outcome:
    return Outcome("done", {"status": "done", "final_accuracy": accuracy})


def chosen_values(method: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((RUNS / "tiny.json").read_text())[method]
    return values


def test_if_all_are_equal_the_lowest_rate_and_the_defaults_are_chosen(
    pretend: Pretend,
) -> None:
    pretend("top_loss", lambda config: done(0.5))
    assert chosen_values("top_loss") == {"rates": {"constant": {"4": 0.003}}, "words": []}


def test_rounding_errors_do_not_decide_between_rates(pretend: Pretend) -> None:
    """The rates have the same two accuracies but for the last digit of one, as it happened in
    v1_watch_20. So the lowest rate is chosen."""

    def outcome_of(config: Mapping[str, Any]) -> Outcome:
        is_first_seed = config["seed"] == TRIAL_SEEDS[0]
        if config["optimizer"]["lr"] == 0.003:
            return done(0.8330815709969788 if is_first_seed else 0.8300604229607251)
        return done(0.8300604229607251 if is_first_seed else 0.8330815709969789)

    pretend("random", outcome_of)
    assert chosen_values("random")["rates"] == {"constant": {"4": 0.003}}


def test_a_diverged_trial_counts_as_0(pretend: Pretend) -> None:
    """Rate 0.3 has the accuracy 0.9 at one seed and diverges at the other. Its mean is 0.45, less
    than the 0.46 of rate 0.003."""

    def outcome_of(config: Mapping[str, Any]) -> Outcome:
        rate = config["optimizer"]["lr"]
        if rate == 0.003:
            return done(0.46)
        if rate == 1e30:
            return done(0.1)
        if config["seed"] == TRIAL_SEEDS[0]:
            return done(0.9)
        return Outcome("diverged", {"status": "diverged", "final_accuracy": 0.9})  # not to be used

    pretend("random", outcome_of)
    assert chosen_values("random")["rates"] == {"constant": {"4": 0.003}}


def test_a_lower_rate_is_chosen_for_longer_runs_where_it_is_better(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 4 rounds, 0.3 is best. With 8 rounds 0.03 would be, but only 0.3 and the next lower rate
    are tried, so 0.1 is chosen. The control has the rates of random selection."""
    monkeypatch.setattr(study, "HORIZONS", (4, 8))
    monkeypatch.setattr(study, "RATES", (0.03, 0.1, 0.3, 1.0))

    def outcome_of(config: Mapping[str, Any]) -> Outcome:
        rate = config["optimizer"]["lr"]
        best = 0.3 if config["num_rounds"] == 4 else 0.03
        return done(0.9 - abs(rate - best))

    jobs = pretend("random,random_control", outcome_of)
    expected = {"rates": {"constant": {"4": 0.3, "8": 0.1}}, "words": []}
    assert chosen_values("random") == chosen_values("random_control") == expected
    scored = [job for job in jobs if job.config["test_on"] is None]
    values = set()
    for job in scored:
        rate = job.config["optimizer"]["lr"]
        values.add((job.choices["selector"], job.config["num_rounds"], rate))
    assert values == {
        ("random", 4, 0.3),
        ("random", 8, 0.1),
        ("random_control", 4, 0.3),
        ("random_control", 8, 0.1),
    }


def test_a_failed_trial_ends_the_study(pretend: Pretend) -> None:
    def outcome_of(config: Mapping[str, Any]) -> Outcome:
        if config["seed"] == 1001:
            return Outcome("failed", {"status": "failed", "error": "killed"})
        return done(0.5)

    error = "-random-s1001-.*: has no final result, so the study cannot continue; .*error.txt"
    with pytest.raises(FedsimError, match=error) as caught:
        pretend("random", outcome_of)
    assert caught.value.exit_code == 1
    assert not (RUNS / "tiny.json").exists()


def test_a_failed_run_ends_the_study_with_exit_code_1(
    tiny: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = Simulation.step

    def failing(self: Simulation) -> Record:
        if self.round == 2 and self.components.streams.seed == TRIAL_SEEDS[1]:
            raise KeyError("mine")
        return step(self)

    command = ["selector=random", *tiny]
    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "step", failing)
        assert exit_code(lambda: study.run(command)) == 1
    printed = capsys.readouterr()
    assert "nothing was run" not in printed.err
    assert "tiny: the study continues after all these runs have ended" in printed.out
    assert study.run(command) == 0  # it resumes


def test_a_control_has_the_rates_that_trials_of_random_selection_choose(
    pretend: Pretend,
) -> None:
    def outcome_of(config: Mapping[str, Any]) -> Outcome:
        return done(1.0 if config["optimizer"]["lr"] == 0.3 else 0.0)

    jobs = pretend("random_control_2", outcome_of)
    trials = [job for job in jobs if job.config["test_on"] == "holdout"]
    scored = [job for job in jobs if job.config["test_on"] is None]
    assert {job.choices["selector"] for job in trials} == {"random"}
    assert [job.choices["selector"] for job in scored] == ["random_control"]
    assert scored[0].config["selector"]["stream"] == 2  # of random numbers
    assert scored[0].config["optimizer"]["lr"] == 0.3


def test_points_that_are_not_valid_in_a_setting_are_not_run(
    pretend: Pretend,
) -> None:
    """The points of power_of_choice are d = 3, 4, 6, 8 and 10 times the cohort size K = 2. A cohort
    is selected from d candidates, so only d = 6 is possible with N = 6 clients."""

    def outcome_of(config: Mapping[str, Any]) -> Outcome:
        return done(1.0 if config["selector"]["num_candidates"] == 6 else 0.0)

    jobs = pretend("power_of_choice", outcome_of)
    assert {job.config["selector"]["num_candidates"] for job in jobs} == {None, 6}  # None: default
    assert chosen_values("power_of_choice")["words"] == ["selector.num_candidates=6"]


def test_names_of_methods_and_settings_are_read_in_any_spelling(tiny: list[str]) -> None:
    args = Namespace(overrides=["selector=Power-of-Choice, random", "seed=1", "cell=TINY"])
    with search_path("own"):
        names = study._take_names(args)
    assert names == (["tiny"], ["power_of_choice", "random"])
    assert args.overrides == ["seed=1"]
