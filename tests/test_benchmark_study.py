"""`fedsim benchmark`: the sampled settings, and what a study of a tiny setting chooses and runs."""

import json
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
from fedsim.core.errors import ConfigError
from fedsim.running import assembly
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


def test_the_files_of_the_first_block_are_the_settings_that_were_drawn() -> None:
    files = {path.stem for path in (conf_dir() / "cell").glob("v1_*.yaml")}
    draws = draw_settings()
    assert len(draws) == 5 + 3 + 5 + 2 + 2 + 3
    assert files - set(VARIATIONS) == {draw.name for draw in draws}
    for draw in draws:
        job = setting_job(draw.name)
        assert job.choices["partition"] == draw.skew, draw
        assert job.config["num_clients"] == draw.num_clients, draw
        assert job.config["cohort_size"] == draw.cohort_size, draw


def test_no_two_settings_have_the_same_division_of_the_same_data() -> None:
    divisions = []
    for name in ["v1_base", *(draw.name for draw in draw_settings())]:
        job = setting_job(name)
        dataset, partition = job.choices["dataset"], job.choices["partition"]
        divisions.append((dataset, partition, job.config["num_clients"]))
    assert len(set(divisions)) == len(divisions)


# --- a tiny study ---

ALL_RATES = (0.003, 1e30, 0.3)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, stop: object) -> list[str]:
    """Shrink the rules. Return the words of a command for a setting `tiny`, in an empty folder.

    All runs diverge at the second rate.
    """
    monkeypatch.setattr(study, "SCHEDULES", ("constant", "step"))
    monkeypatch.setattr(study, "HORIZONS", (4, 8))
    monkeypatch.setattr(study, "RATES", ALL_RATES)
    monkeypatch.setattr(study, "SEEDS", (0,))
    monkeypatch.setattr(study, "NUM_POINTS", 1)
    Path("own/cell").mkdir(parents=True)
    Path("own/cell/tiny.yaml").write_text(TINY)
    return ["cell=tiny", "--config-dir", "own"]


def runs_in(folder: Path) -> pd.DataFrame:
    """Return a row for each run, with what its config and its summary say."""
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


def test_a_study_scores_the_best_rates_and_point_and_runs_nothing_twice(tiny: list[str]) -> None:
    command = ["selector=random,top_loss", *tiny]
    assert study.run(command) == 0
    runs = runs_in(RUNS)
    chosen = json.loads((RUNS / "tiny.json").read_text())

    # 1. Trials are tested on held-out samples, and have seeds of their own.
    is_trial = runs.test_on == "holdout"
    all_trials = runs[is_trial]
    assert set(all_trials.seed) == {1000, 1001}
    trials = all_trials[all_trials.num_rounds == 4]
    assert set(trials[trials.diverged].rate) == {1e30}
    assert len(trials) == 2 * (2 * 2 * 3 + 1)  # seeds; methods, schedules and rates; one point

    # 2. The chosen values have the highest means.
    keys = ["selector", "full", "schedule", "rate"]
    means = trials.groupby(keys).accuracy.mean()
    for method, selector, default in (
        ("random", "Random", "None"),
        ("top_loss", "TopLoss", "True"),
    ):
        rates = chosen[method]["rates"]
        short_rates = {name: of_horizons["4"] for name, of_horizons in rates.items()}
        assert short_rates == {
            "constant": means[selector, default, "Constant"].idxmax(),
            "step": means[selector, default, "Step"].idxmax(),
        }
    best_rate = rates["constant"]["4"]
    of_points = means["TopLoss"].xs(("Constant", best_rate), level=("schedule", "rate"))
    full = "True" if of_points["True"] >= of_points["False"] else "False"
    words = [] if full == "True" else ["selector.first_round_full=False"]
    assert chosen["random"]["words"] == []
    assert chosen["top_loss"]["words"] == words

    # 3. Longer runs have the better one of two rates: that of 4 rounds and the next lower one. Their
    #    trials have the chosen point.
    trials = all_trials[all_trials.num_rounds == 8]
    means = trials.groupby(keys).accuracy.mean()
    assert len(trials) == 2 * len(means)
    for method, selector, point in (("random", "Random", "None"), ("top_loss", "TopLoss", full)):
        for name, schedule in (("constant", "Constant"), ("step", "Step")):
            of_horizons = chosen[method]["rates"][name]
            number = ALL_RATES.index(of_horizons["4"])
            tried = means[selector, point, schedule]
            assert set(tried.index) == set(ALL_RATES[max(number - 1, 0) : number + 1])
            assert of_horizons["8"] == tried.idxmax()

    # 4. The scored runs have the chosen values, and are tested on the test set.
    scored = runs[~is_trial]
    assert set(scored.test_on) == {"None"}
    assert set(scored.seed) == {0}
    expected = set()
    for num_rounds in (4, 8):
        for name, schedule in (("constant", "Constant"), ("step", "Step")):
            random_rate = chosen["random"]["rates"][name][str(num_rounds)]
            rate = chosen["top_loss"]["rates"][name][str(num_rounds)]
            expected.add(("Random", "None", schedule, random_rate, num_rounds))
            expected.add(("TopLoss", full, schedule, rate, num_rounds))
    scored_values = scored[[*keys, "num_rounds"]].itertuples(index=False, name=None)
    assert sorted(scored_values) == sorted(expected)

    # 5. The same command runs nothing again. A command for one method keeps the other's values.
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
        (["cell=tiny,tinier"], "tinier"),
    ],
)
def test_mistakes_are_found_before_any_run(words: list[str], message: str, tiny: list[str]) -> None:
    with pytest.raises(ConfigError, match=message):
        study.run(["selector=random", *words, "--config-dir", "own"])
    assert not RUNS.exists()


def test_trials_do_not_see_the_test_set(tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With wrong labels in the test set, the accuracies of scored runs change, those of trials do
    not."""
    monkeypatch.setattr(study, "SCHEDULES", ("constant",))
    monkeypatch.setattr(study, "HORIZONS", (4,))
    monkeypatch.setattr(study, "RATES", (0.3,))
    command = ["selector=random", *tiny]
    assert study.run(command) == 0

    def prepare_with_wrong_labels(plan: Plan) -> assembly.PreparedData:
        data = prepare(plan)
        wrong = LabelledSamples(data.test.x, (data.test.y + 1) % data.num_classes)
        return replace(data, test=wrong)

    prepare = assembly.prepare
    monkeypatch.setattr(assembly, "prepare", prepare_with_wrong_labels)
    assert study.run([*command, "output_dir=wrong"]) == 0
    runs = runs_in(RUNS)
    wrong_runs = runs_in(Path("wrong/benchmark_v1"))
    unchanged = runs.accuracy == wrong_runs.accuracy
    assert list(unchanged) == list(runs.test_on == "holdout")
    assert sorted(unchanged) == [False, True, True]


# --- studies whose runs are pretended ---

OutcomeOf = Callable[[Mapping[str, Any]], Outcome]


@pytest.fixture
def pretend(tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[ComposedJob]]:
    """A function that runs a study of methods with pretended outcomes, and returns its jobs.

    `outcome_of` returns the outcome of a run with a config.
    """
    monkeypatch.setattr(study, "SCHEDULES", ("constant",))
    monkeypatch.setattr(study, "HORIZONS", (4,))
    jobs: list[ComposedJob] = []

    def run_jobs(new_jobs: Sequence[ComposedJob], command: Sequence[str]) -> int:
        jobs.extend(new_jobs)
        return 0

    def run(methods: str, outcome_of: OutcomeOf) -> list[ComposedJob]:
        RUNS.mkdir(parents=True)
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


def test_of_equal_rates_the_lowest_is_chosen_and_of_equal_points_the_defaults(
    pretend: Callable[..., list[ComposedJob]],
) -> None:
    pretend("top_loss", lambda config: done(0.5))
    assert chosen_values("top_loss") == {"rates": {"constant": {"4": 0.003}}, "words": []}


def test_a_diverged_trial_counts_as_0(pretend: Callable[..., list[ComposedJob]]) -> None:
    """Rate 0.3 has 0.9 at one seed and diverges at the other: 0.45 on average, and not 0.9."""

    def outcome_of(config: Mapping[str, Any]) -> Outcome:
        if config["optimizer"]["lr"] != 0.3:
            return done(0.46 if config["optimizer"]["lr"] == 0.003 else 0.1)
        if config["seed"] == 1000:
            return done(0.9)
        return Outcome("diverged", {"status": "diverged", "final_accuracy": 0.9})

    pretend("random", outcome_of)
    assert chosen_values("random")["rates"] == {"constant": {"4": 0.003}}


def test_a_lower_rate_is_chosen_for_longer_runs_where_it_is_better(
    pretend: Callable[..., list[ComposedJob]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.3 is best after 4 rounds. After 8, 0.1 is, though 0.03, which is not tried, would be even
    better. The control has the same rates."""
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
    values = {
        (job.choices["selector"], job.config["num_rounds"], job.config["optimizer"]["lr"])
        for job in scored
    }
    names = ("random", "random_control")
    assert values == {(name, *case) for name in names for case in ((4, 0.3), (8, 0.1))}


def test_a_failed_trial_ends_the_study(pretend: Callable[..., list[ComposedJob]]) -> None:
    def outcome_of(config: Mapping[str, Any]) -> Outcome:
        if config["seed"] == 1001:
            return Outcome("failed", {"status": "failed", "error": "killed"})
        return done(0.5)

    error = (
        "run='.*-random-s1001-.*': has not ended, so the study cannot continue\n.*see its error.txt"
    )
    with pytest.raises(ConfigError, match=error):
        pretend("random", outcome_of)
    assert not (RUNS / "tiny.json").exists()


def test_a_control_has_the_rates_of_random_selection_and_no_trials(
    pretend: Callable[..., list[ComposedJob]],
) -> None:
    jobs = pretend("random_control_2", lambda config: done(config["optimizer"]["lr"] == 0.3))
    trials = [job for job in jobs if job.config["test_on"] == "holdout"]
    scored = [job for job in jobs if job.config["test_on"] is None]
    assert {job.choices["selector"] for job in trials} == {"random"}
    assert [job.choices["selector"] for job in scored] == ["random_control"]
    assert scored[0].config["selector"]["stream"] == 2
    assert scored[0].config["optimizer"]["lr"] == 0.3


def test_points_that_are_not_valid_in_a_setting_are_not_run(
    pretend: Callable[..., list[ComposedJob]],
) -> None:
    """With K = 2 the points of power_of_choice are d = 6, 8, 12, 16 and 20, of N = 6 clients."""
    jobs = pretend(
        "power_of_choice", lambda config: done(config["selector"]["num_candidates"] == 6)
    )
    assert {job.config["selector"]["num_candidates"] for job in jobs} == {None, 6}
    assert chosen_values("power_of_choice")["words"] == ["selector.num_candidates=6"]
