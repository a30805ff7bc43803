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
from fedsim.core.errors import ConfigError, FedsimError
from fedsim.jobs.prepare import compose_words, prepare
from fedsim.results.statistics import Share
from fedsim.running import experiment
from fedsim.running.outcome import Outcome
from fedsim.search import race
from fedsim.search.race import Race, RaceSettings, accuracy_of, stops

pytestmark = pytest.mark.usefixtures("stop")
NAMES, SEEDS, SETTINGS = "abcdef", 12, 3
WORDS = [
    "num_rounds=2",
    "local.steps=8",
    "local.batch_size=16",
    "engine=native",
    "num_clients=6",
    "cohort_size=1",
]
WORDS += [
    "optimizer.lr=0.3",
    "seed=range(5)",
    "selector=random,full,round_robin",
    "tracker=files_only",
]
OWN = ["min_seeds=3", "batch=1", "alpha=0.4"]


def race_of(*keep: str) -> Race:
    words = [
        (f"x={x}", f"selector={m}", f"seed={s}")
        for x in range(SETTINGS)
        for m in NAMES
        for s in range(SEEDS)
    ]
    jobs: Any = [SimpleNamespace(overrides=one, choices={"selector": one[1][-1]}) for one in words]
    return Race(jobs, RaceSettings(keep=keep))


def stopped(made: Race, accuracies: Any) -> list[dict[str, race.Stop]]:
    """By setting, of accuracies [settings, methods, seeds]."""
    return [
        stops(dict(zip(NAMES, one.tolist(), strict=True)), made.looks, made.level)
        for one in accuracies
    ]


@pytest.mark.parametrize("ahead", [0.0, 0.3, 3.0])
def test_the_best_method_is_stopped_in_at_most_a_share_alpha_of_races(ahead: float) -> None:
    """All methods equal, and the first better than the others by .3 and 3 standard deviations, in
    all settings."""
    made, rng, num = race_of(), np.random.default_rng(3), 300
    assert made.level == 0.05 / (SETTINGS * (len(NAMES) - 1) * len([4, 6, 8, 10]))
    draws = rng.normal(size=(num, SETTINGS, len(NAMES), SEEDS)) + rng.normal(
        size=(num, SETTINGS, 1, SEEDS)
    )
    draws[:, :, 0] += ahead
    found = [stopped(made, one) for one in draws]
    assert (
        Share(sum(any("a" in setting for setting in one) for one in found), num).p_above(0.05)
        > 0.001
    )
    if ahead == 3:
        assert sum(len(setting) for one in found for setting in one) > 0.5 * num * SETTINGS * len(
            NAMES
        )


def test_large_differences_save_more_than_half() -> None:
    """Methods one behind the other by 10 standard deviations: all but the first are stopped, nearly
    all at 4 seeds."""
    draws = (
        np.random.default_rng(0).normal(size=(SETTINGS, len(NAMES), SEEDS))
        - 10 * np.arange(len(NAMES))[:, None]
    )
    found = [stop for setting in stopped(race_of(), draws) for stop in setting.values()]
    assert sum(SEEDS - stop.seeds for stop in found) > 0.5 * draws.size
    assert {stop.by for stop in found} == {"a"}


def test_kept_methods_are_not_tested_and_what_has_no_result_is_not_compared() -> None:
    assert race_of("a", "b").level == 0.05 / (SETTINGS * (len(NAMES) - 3) * 4)
    values = {"a": [0.9, 0.91, 0.92, 0.9, 0.2], "b": [0.1, 0.12, 0.1, 0.11, 0.9], "c": [0.99]}
    p = stats.ttest_rel(values["a"][:4], values["b"][:4], alternative="greater").pvalue
    stop = stops(values, [4], 1.1 * p)["b"]
    assert (stop.seeds, stop.by, stop.lead, stop.p) == (
        4,
        "a",
        pytest.approx(0.8),
        pytest.approx(p),
    )
    assert stops(values, [4], 0.9 * p) == {}
    ends = [
        ("done", {"smoothed_accuracy": 0.5}),
        ("diverged", {"smoothed_accuracy": 0.5}),
        ("failed", {}),
    ]
    assert [accuracy_of(Outcome(*end)) for end in ends] == [0.5, 0.0, None]


def results() -> dict[str, float]:
    found = Path("outputs").glob("*/*/summary.json")
    return {path.parent.name: json.loads(path.read_text())["smoothed_accuracy"] for path in found}


def decisions() -> Any:
    return json.loads(Path("outputs/default/race.json").read_text())


def test_lanes_make_the_same_race_of_ordinary_runs(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS, "partition=shards_2,iid"]
    assert race.run([*words, *OWN]) == 0
    told, runs, decided = capsys.readouterr().out, results(), decisions()
    seeds = {
        name: len(method["accuracies"])
        for name, method in decided["settings"]["partition=iid"].items()
    }
    assert seeds["random"] == seeds["full"] == 5 > seeds["round_robin"]
    assert told.startswith("30 jobs, results in outputs/default\n")
    assert f"{30 - len(runs)} of 30 runs saved" in told
    assert "already done" not in told
    plans, _ = prepare(compose_words(read_command_line(["-m", *words])))
    assert set(runs) < {plan.folder.name for plan in plans}
    shutil.rmtree("outputs")
    assert race.run([*words, *OWN, "hydra/launcher=lanes"]) == 0
    assert (results(), decisions()) == (runs, decided)


def test_a_race_goes_on_after_failures_and_kills_and_runs_nothing_twice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    execute, made, stage = experiment.execute, list[Path](), ["failing"]

    def observed(plan: Plan, *more: Any) -> Outcome:
        if stage == ["failing"] and plan.choices["selector"] == "full" and plan.settings.seed == 1:
            raise FedsimError("mine")
        if stage == ["killed"] and plan.settings.seed == 3:
            raise KeyboardInterrupt
        made.append(plan.folder)
        return execute(plan, *more)

    monkeypatch.setattr(experiment, "execute", observed)
    words = [*WORDS, *OWN, "partition=iid"]
    assert race.run(words) == 1
    assert "waits for a run that is not done" in capsys.readouterr().out
    assert not any("full-s3" in folder.name for folder in made)
    stage[:] = ["killed"]
    with pytest.raises(KeyboardInterrupt):
        race.run(words)
    assert "the same command resumes them: fedsim race num_rounds=" in capsys.readouterr().out
    stage.clear()
    assert race.run(words) == 0
    assert len(made) == len(set(made))
    decided = decisions()
    number = sum(
        len(method["accuracies"]) for method in decided["settings"]["the setting"].values()
    )
    assert number < 15
    for more, again in (([], 0), (["overwrite=true"], number), (["overwrite=true"], number)):
        made.clear()
        assert race.run([*words, *more]) == 0
        assert (len(made), decisions()) == (again, decided)


@pytest.mark.parametrize(
    ("words", "told"),
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
    ],
)
def test_mistakes_are_told_before_a_run(words: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        race.run(words.split())
    assert not list(tmp_path.rglob("*"))
