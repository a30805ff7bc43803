"""Races: the level of their tests, what they save, and the runs that they make."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedsim.config.command_line import read_command_line
from fedsim.config.plan import Plan
from fedsim.core.arrays import Floats
from fedsim.core.errors import ConfigError, FedsimError
from fedsim.jobs.prepare import compose_words, prepare
from fedsim.results.statistics import Share
from fedsim.running import experiment
from fedsim.running.outcome import Outcome
from fedsim.search import race
from fedsim.search.race import Race, RaceSettings, accuracy_of, stops

pytestmark = pytest.mark.usefixtures("stop")
METHODS = "abcdef"
NUM_SEEDS = 12
NUM_SETTINGS = 3


# --- tests of methods, on accuracies by setting, method and seed ---


def race_of(*keep: str) -> Race:
    """Return a race of all methods in all settings, without any run."""
    jobs: list[Any] = []
    for setting in range(NUM_SETTINGS):
        for method in METHODS:
            for seed in range(NUM_SEEDS):
                words = (f"x={setting}", f"selector={method}", f"seed={seed}")
                jobs.append(SimpleNamespace(overrides=words, choices={"selector": words[1][-1]}))
    return Race(jobs, RaceSettings(keep=keep))


def stops_of(racing: Race, accuracies: Floats) -> list[dict[str, race.Stop]]:
    """Return the stopped methods of each setting."""
    stopped = []
    for in_setting in accuracies:
        by_method = dict(zip(METHODS, in_setting.tolist(), strict=True))
        stopped.append(stops(by_method, racing.looks, racing.level))
    return stopped


def test_the_level_is_divided_by_settings_rivals_and_looks() -> None:
    looks = [4, 6, 8, 10]
    assert race_of().level == 0.05 / (NUM_SETTINGS * (len(METHODS) - 1) * len(looks))
    assert race_of("a", "b").level == 0.05 / (NUM_SETTINGS * (len(METHODS) - 3) * len(looks))


NUM_RACES = 300


def simulated_stops(lead: float) -> list[list[dict[str, race.Stop]]]:
    """Simulate races whose first method leads all others by some standard deviations."""
    rng = np.random.default_rng(3)
    noise = rng.normal(size=(NUM_RACES, NUM_SETTINGS, len(METHODS), NUM_SEEDS))
    of_seeds = rng.normal(size=(NUM_RACES, NUM_SETTINGS, 1, NUM_SEEDS))
    accuracies = noise + of_seeds
    accuracies[:, :, 0] += lead
    racing = race_of()
    return [stops_of(racing, of_race) for of_race in accuracies]


@pytest.mark.parametrize("lead", [0.0, 0.3, 3.0])
def test_the_best_method_is_stopped_in_at_most_a_share_alpha_of_races(lead: float) -> None:
    wrong = sum(any("a" in setting for setting in settings) for settings in simulated_stops(lead))
    assert Share(wrong, NUM_RACES).p_above(0.05) > 0.001


def test_more_than_half_of_the_methods_are_stopped_behind_a_clear_leader() -> None:
    stopped = sum(len(setting) for settings in simulated_stops(3.0) for setting in settings)
    assert stopped > 0.5 * NUM_RACES * NUM_SETTINGS * len(METHODS)


def test_large_differences_save_more_than_half_of_the_runs() -> None:
    """Each method is 10 standard deviations better than the next one."""
    noise = np.random.default_rng(0).normal(size=(NUM_SETTINGS, len(METHODS), NUM_SEEDS))
    accuracies = noise - 10 * np.arange(len(METHODS))[:, None]
    all_stops = [stop for setting in stops_of(race_of(), accuracies) for stop in setting.values()]
    assert sum(NUM_SEEDS - stop.seeds for stop in all_stops) > 0.5 * accuracies.size
    assert {stop.by for stop in all_stops} == {"a"}


def test_methods_are_compared_by_a_paired_t_test_at_the_looks() -> None:
    accuracies = {"a": [0.9, 0.91, 0.92, 0.9, 0.2], "b": [0.1, 0.12, 0.1, 0.11, 0.9], "c": [0.99]}
    first_look = accuracies["a"][:4], accuracies["b"][:4]
    p = stats.ttest_rel(*first_look, alternative="greater").pvalue
    stop = stops(accuracies, [4], 1.1 * p)["b"]  # "c" has too few seeds to be compared
    assert (stop.seeds, stop.by) == (4, "a")
    assert (stop.lead, stop.p) == (pytest.approx(0.8), pytest.approx(p))
    assert stops(accuracies, [4], 0.9 * p) == {}


@pytest.mark.parametrize(
    ("status", "summary", "accuracy"),
    [
        ("done", {"final_accuracy": 0.5}, 0.5),
        ("diverged", {"final_accuracy": 0.5}, 0.0),
        ("failed", {}, None),
        ("done", {"final_accuracy": 0.0}, 0.0),
        ("done", {"final_accuracy": None}, None),  # no round was evaluated
    ],
)
def test_a_run_that_diverged_counts_as_0_and_one_that_failed_does_not_count(
    status: Any, summary: dict[str, float], accuracy: float | None
) -> None:
    assert accuracy_of(Outcome(status, summary)) == accuracy


# --- races of runs ---

WORDS = [
    "num_rounds=2",
    "local.steps=8",
    "local.batch_size=16",
    "engine=native",
    "num_clients=6",
    "cohort_size=1",
    "optimizer.lr=0.3",
    "seed=range(5)",
    "selector=random,full,round_robin",
    "tracker=files_only",
]
OPTIONS = ["min_seeds=3", "batch=1", "alpha=0.4"]


def accuracies_of_runs() -> dict[str, float]:
    paths = Path("outputs").glob("*/*/summary.json")
    return {path.parent.name: json.loads(path.read_text())["final_accuracy"] for path in paths}


def decisions() -> Any:
    return json.loads(Path("outputs/default/race.json").read_text())


def num_seeds_by_method(setting: str) -> dict[str, int]:
    methods = decisions()["settings"][setting]
    return {name: len(method["accuracies"]) for name, method in methods.items()}


def test_a_race_makes_ordinary_runs_and_saves_those_of_a_beaten_method(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*WORDS, "partition=shards_2,iid"]
    assert race.run([*words, *OPTIONS]) == 0
    output = capsys.readouterr().out
    runs = accuracies_of_runs()
    num_seeds = num_seeds_by_method("partition=iid")
    assert num_seeds["random"] == num_seeds["full"] == 5 > num_seeds["round_robin"]
    assert output.startswith("30 jobs, results in outputs/default\n")
    assert f"{30 - len(runs)} of 30 runs saved" in output
    assert "already done" not in output
    plans, _ = prepare(compose_words(read_command_line(["-m", *words])))
    assert set(runs) < {plan.folder.name for plan in plans}
    # lanes make the same race
    decided = decisions()
    shutil.rmtree("outputs")
    assert race.run([*words, *OPTIONS, "hydra/launcher=lanes"]) == 0
    assert (accuracies_of_runs(), decisions()) == (runs, decided)


RACE = [*WORDS, *OPTIONS, "partition=iid"]


class Runs:
    """Observes the runs of a race. One of them fails, or the user stops the race at a seed."""

    def __init__(self) -> None:
        self.folders: list[Path] = []
        self.failing: tuple[str, int] | None = None
        self.stopping_seed: int | None = None


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    observed = Runs()
    execute = experiment.execute

    def observe(plan: Plan, *arguments: Any) -> Outcome:
        seed = plan.settings.seed
        if observed.failing == (plan.choices["selector"], seed):
            raise FedsimError("mine")
        if observed.stopping_seed == seed:
            raise KeyboardInterrupt
        observed.folders.append(plan.folder)
        return execute(plan, *arguments)

    monkeypatch.setattr(experiment, "execute", observe)
    return observed


def test_a_race_continues_after_a_failure_and_a_stop_and_runs_nothing_twice(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.failing = ("full", 1)
    assert race.run(RACE) == 1
    assert "waits for a run that is not done" in capsys.readouterr().out
    assert not any("full-s3" in folder.name for folder in runs.folders)
    runs.failing, runs.stopping_seed = None, 3
    with pytest.raises(KeyboardInterrupt):
        race.run(RACE)
    assert "the same command resumes them: fedsim race num_rounds=" in capsys.readouterr().out
    runs.stopping_seed = None
    assert race.run(RACE) == 0
    assert len(runs.folders) == len(set(runs.folders))


def test_a_finished_race_runs_nothing_and_overwriting_repeats_its_runs(runs: Runs) -> None:
    assert race.run(RACE) == 0
    decided = decisions()
    number = sum(num_seeds_by_method("the setting").values())
    assert number < 15
    for words, expected in (([], 0), (["overwrite=true"], number), (["overwrite=true"], number)):
        runs.folders.clear()
        assert race.run([*RACE, *words]) == 0
        assert len(runs.folders) == expected
        assert decisions() == decided


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "selector=full,oort seed=0",
            "seed='1 of them': must be more than min_seeds=4\n    sweep over more",
        ),
        (
            "selector=random,oort seed=range(9)",
            "selector='oort,random': must be two that are not in keep\n    name more",
        ),
        ("selector=full,oort seed=range(9) alpha=1", r"alpha=1.0: must lie in \(0, 0.5\)"),
        ("selector=full,oort seed=range(9) batch=1,2", r"batch=\['1', '2'\]: must be an integer"),
        (
            "selector=full,oort seed=range(9) keep=[rndom]",
            "keep='rndom': is not raced\n    selectors here: full,oort",
        ),
        (
            "selector=full,oort seed=range(9) lr=1",
            "lr: is not a known key\n.*keys of the race itself: alpha, batch",
        ),
        ("selector=full,oort,afl seed=range(9) stop_at=0.4", "stop_at=.*: ends runs near the same"),
    ],
)
def test_mistakes_are_reported_before_a_run(words: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        race.run(words.split())
    assert not list(tmp_path.rglob("*"))
