"""The search over run folders: its space, its trials, pruning, and going on."""

import json
import re
import shlex
import signal
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna")

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from fedsim.config.command_line import read_command_line
from fedsim.config.compose import check_jobs, compose_jobs, search_path
from fedsim.config.plan import Plan
from fedsim.config.words import parse
from fedsim.core.errors import ConfigError, DataError, Problem
from fedsim.jobs import cli
from fedsim.jobs.prepare import compose_words
from fedsim.rounds.loop import Simulation
from fedsim.running import experiment
from fedsim.running.outcome import Outcome
from fedsim.running.process import Preempted, StopRequests
from fedsim.search import command, study
from fedsim.search.own_keys import take_settings
from fedsim.search.study import Result, SearchSettings, TrialProgress, _pruner, run_trial, space_of

FEW = ("num_rounds=4", "local.steps=1", "tracker=files_only", "num_clients=6", "cohort_size=2")


@pytest.fixture(autouse=True)
def _own_folder_and_signals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fresh = StopRequests()
    for module in (
        "running.experiment",
        "jobs.sweep",
        "search.study",
        "search.command",
        "jobs.cli",
        "running.process",
    ):
        monkeypatch.setattr(f"fedsim.{module}.STOP", fresh)


def summaries() -> list[dict[str, Any]]:
    return [
        json.loads(path.read_text()) for path in sorted(Path().glob("outputs/*/*/summary.json"))
    ]


def test_the_space_is_in_hydras_syntax_of_sweeps_and_seeds_are_no_part_of_it() -> None:
    words = [
        "a=tag(log,interval(0.001,0.1))",
        "b=int(interval(1,9))",
        "c=range(2,10,3)",
        "d=x,y",
        "e=1",
        "seed=0,1",
    ]
    space = space_of(parse(words))
    assert space.axes == {
        "a": FloatDistribution(0.001, 0.1, log=True),
        "b": IntDistribution(1, 9),
        "c": IntDistribution(2, 8, step=3),
        "d": CategoricalDistribution(["x", "y"]),
    }
    assert space.words_of({"a": 0.01, "d": "x"}) == ["e=1", "seed=0,1", "a=0.01", "d=x"]
    assert len(space.corners()) == 5
    assert space_of(parse(["a=tag(log,range(1,100))"])).axes == {
        "a": IntDistribution(1, 99, log=True)
    }
    with pytest.raises(
        ConfigError, match=r"a='tag\(log,range\(10,100,10\)\)': a logarithmic scale is for"
    ):
        space_of(parse(["a=tag(log,range(10,100,10))"]))
    with pytest.raises(ConfigError, match="has nothing to search in"):
        space_of(parse(["seed=0,1"]))


@pytest.mark.parametrize(("warmup", "spared"), [(3, 3), (0, 0), (None, 2)])
def test_rounds_up_to_the_warm_up_are_not_pruned(warmup: int | None, spared: int) -> None:
    """A quarter of 8 rounds by default. The later trial is below the earlier one in every round."""
    trials = optuna.create_study(
        direction="maximize", pruner=_pruner(SearchSettings(startup=1, warmup=warmup), num_rounds=8)
    )
    trials.add_trial(
        optuna.create_trial(value=0.9, intermediate_values=dict.fromkeys(range(1, 9), 0.9))
    )
    progress = TrialProgress(trials.ask(), 11)
    for round in range(1, 9):
        assert (progress.add_round(round, 0.1) is None) == (round <= spared)
        assert progress.add_round(1, 0.9) is None  # one that a killed run repeats counts once
        assert progress.num_rounds == round


def test_optuna_gets_the_mean_over_the_final_window() -> None:
    trial = optuna.create_study(direction="maximize").ask()
    progress = TrialProgress(trial, 2)
    for round, accuracy in enumerate([0.1, 0.2, 0.4], 1):
        progress.add_round(round, accuracy)
    reported = trial.study.trials[0].intermediate_values
    assert reported == pytest.approx({1: 0.1, 2: 0.15, 3: 0.3})


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "optimizer.lr=interval(-1,0.3) selector=random,gpffl trials=0",
            {"trials": "must be >= 1"},
        ),
        (
            "optimizer.lr=interval(-1,1) selector=random,gpffl",
            {"optimizer.lr": "must", "selector": "is not a choice"},
        ),
        (
            "optimizer.lr=interval(0.1,0.3) trails=2",
            {"trails": "keys of the search itself: trials"},
        ),
        (
            "optimizer.lr=interval(0.1,0.3) preset=gpfl_table1_fmnist seed=0",
            {"preset": "sweep over more than seeds"},
        ),
        ("optimizer.lr=interval(0.1,0.3) trials=1,2", {"trials": "one value"}),
        (
            "optimizer.lr=interval(0.1,0.3) hydra/launcher=lanes",
            {"hydra/launcher": "must be basic"},
        ),
        ("optimizer.lr=interval(0.1,0.3) seed=interval(0,5)", {"seed": "single values"}),
        (
            "optimizer.lr=interval(0.1,0.3) overwrite=true name=mine",
            {"overwrite": "delete outputs/mine, or choose another name"},
        ),
        ("optimizer.lr=interval(0.1,0.3) stop_at=0.4", {"stop_at": "ends runs near the same"}),
    ],
)
def test_mistakes_in_any_corner_are_told_before_a_run(words: str, told: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        command.run(words.split())
    found = {problem.key: str(problem) for problem in caught.value.problems}
    assert found.keys() == told.keys()
    assert all(text in found[key] for key, text in told.items())
    assert not list(Path().iterdir())


class Pruner:
    """Ends a trial after the round `last`."""

    def __init__(self, last: int) -> None:
        self.last, self.reported = last, list[int]()

    def report(self, value: float, step: int) -> None:
        assert 0 <= value <= 1
        self.reported.append(step)

    def should_prune(self) -> bool:
        return self.reported[-1] >= self.last


def plans(*words: str) -> Any:
    with search_path():
        return check_jobs(compose_jobs([*FEW, *words], multirun=True))


def no_step(self: Simulation) -> None:
    raise AssertionError("a round was run again")


def test_a_trial_is_the_mean_over_its_seeds_and_is_not_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = run_trial(plans("seed=0,1"), judge := Pruner(99))
    final = [s["final_accuracy"] for s in summaries()]
    assert (found.status, found.accuracy) == ("done", pytest.approx(sum(final) / 2))
    assert judge.reported == [1, 2, 3, 4]
    monkeypatch.setattr(Simulation, "step", no_step)
    assert run_trial(plans("seed=0,1"), again := Pruner(2)) == found  # what has ended is not pruned
    assert again.reported == judge.reported


def test_a_pruned_trial_is_saved_after_its_round_stays_pruned_and_can_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pruned = run_trial(plans("seed=0,1"), Pruner(2))
    assert (pruned.status, pruned.accuracy, pruned.num_rounds) == ("pruned", None, 2)
    assert [(s["status"], s["rounds"]) for s in summaries()] == [("interrupted", 2)]
    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "step", no_step)
        assert run_trial(plans("seed=0,1"), Pruner(2)) == pruned
    assert cli.run([*FEW, "seed=0"]) == 0  # an ordinary command
    assert [(s["status"], s["rounds"]) for s in summaries()] == [("done", 4)]
    assert run_trial(plans("seed=0,1"), judge := Pruner(99)).status == "done"
    assert judge.reported == [1, 2, 3, 4]
    assert [(s["status"], s["rounds"]) for s in summaries()] == [("done", 4)] * 2
    whole = run_trial(plans("seed=0", "output_dir=whole"), Pruner(99)).accuracy
    assert whole == summaries()[0]["final_accuracy"]


def test_a_trial_is_not_pruned_at_the_last_round_of_its_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same command again finds a run that has ended, so both must have the same result."""
    trial = run_trial(plans("seed=0,1"), Pruner(4))
    assert trial.status == "done"
    monkeypatch.setattr(Simulation, "step", no_step)
    assert run_trial(plans("seed=0,1"), Pruner(4)) == trial


def test_a_trial_names_the_last_round_of_the_run_that_diverged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run of seed 0 ends, and that of seed 1 diverges in round 2."""

    def execute(plan: Plan, *arguments: Any) -> Outcome:
        if plan.settings.seed == 1:
            return Outcome("diverged", {"rounds": 2})
        return Outcome("done", {"rounds": 4, "final_accuracy": 0.5})

    monkeypatch.setattr(experiment, "execute", execute)
    assert str(run_trial(plans("seed=0,1"), Pruner(99))) == "diverged after round 2"


def test_the_counts_at_the_end_add_up_to_all_trials(capsys: pytest.CaptureFixture[str]) -> None:
    results = [
        ({"lr": 0.1}, Result("done", 0.5, 4)),
        ({"lr": 0.2}, Result("pruned", None, 2)),
        ({"lr": 9.0}, Result("diverged", None, 1)),
    ]
    assert study._print_results(space_of(parse(["lr=0.1,0.2,9.0"])), results, ()) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "1 of 3 trials to the end, 1 pruned, 1 diverged, 0 failed" in printed


def test_a_signal_while_a_trial_is_pruned_ends_the_search() -> None:
    class Signalled(Pruner):
        def should_prune(self) -> bool:
            if self.reported == [1]:
                study.STOP._working = study.STOP._deferring = True  # type: ignore[assignment]
                study.STOP.handle(signal.SIGTERM)
            return True

    with pytest.raises(Preempted):
        run_trial(plans("seed=0"), Signalled(1))


def test_the_same_search_makes_the_same_trials_from_its_folders(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine/selector").mkdir(parents=True)
    Path("mine/selector/own.yaml").write_text("_target_: fedsim.selectors.full.Full\n")
    words = [
        "--config-dir",
        "mine",
        "optimizer.lr=tag(log,interval(0.001,0.5))",
        "selector=random,own",
        "trials=3",
    ]
    words += ["startup=2", "hydra/launcher=basic", *FEW]
    assert command.run(words) == 0
    first = capsys.readouterr().out
    monkeypatch.setattr(Simulation, "step", no_step)
    assert command.run(words) == 0
    again = capsys.readouterr().out
    keep = lambda text: [line for line in text.splitlines() if not line.startswith("already ")]
    assert keep(again) == keep(first)
    assert "trial 3: " in again
    best = " ".join(again.split()).partition("the best one: fedsim ")[2]
    assert compose_words(read_command_line(shlex.split(best)))[0].choices["selector"] in (
        "random",
        "own",
    )
    assert {s["status"] for s in summaries()} <= {"done", "interrupted"}


JOINTLY_INVALID = ("aggregator=by_size,krum", "secure_aggregation=null,true")
"""A search space in which the values krum and true are not valid together."""


def test_a_search_skips_a_trial_whose_values_are_not_valid_together(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*FEW[:-1], "cohort_size=5"]
    assert command.run([*JOINTLY_INVALID, "trials=8", *words]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(r"trial (\d): not valid: .*krum", out)
    assert re.search(r"[1-7] of 8 trials to the end, 0 pruned, 0 failed, [1-7] not valid", out)
    assert "trial 8 of 8" in out


def test_a_search_skips_a_trial_whose_values_do_not_fit_the_data(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [word for word in FEW if not word.startswith("num_clients")]
    assert command.run(["num_clients=20,1000", "trials=6", *words]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(r"not valid: .*needs at least 2000 training samples", out)
    assert re.search(r"[1-5] of 6 trials to the end, 0 pruned, 0 failed, [1-5] not valid", out)
    with pytest.raises(DataError, match=r"needs at least 200\d training samples"):
        command.run(["num_clients=1000,1001", "trials=2", *words])


def test_a_search_without_a_valid_trial_ends_with_the_problems() -> None:
    def plans_of(params: Any) -> Any:
        raise ConfigError([Problem("aggregator", params["aggregator"], "must be another")])

    space = space_of(parse(["aggregator=krum,median"]))
    with pytest.raises(ConfigError, match="must be another"):
        study.search(space, SearchSettings(trials=4), plans_of, 4)


def test_missing_data_end_a_search_also_while_a_trial_is_composed() -> None:
    def plans_of(params: Any) -> Any:
        raise DataError("mine")

    space = space_of(parse(["aggregator=krum,median"]))
    with pytest.raises(DataError, match="mine"):
        study.search(space, SearchSettings(trials=4), plans_of, 4)


def test_settings_are_removed_in_any_spelling_of_their_names() -> None:
    args = Namespace(overrides=["seed=0", "selector=GPFL, random"])
    with search_path():
        assert take_settings(args, ["selector"]) == {"selector": ["gpfl", "random"]}
    assert args.overrides == ["seed=0"]


FAILING = """
from fedsim.selectors.random import Random

class Fails(Random):
    def select(self, round, clients, rng):
        if round == 3:
            raise KeyError("mine")
        return super().select(round, clients, rng)
"""


def test_a_search_goes_on_after_a_trial_that_has_failed_and_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_lab.py").write_text(FAILING)
    monkeypatch.syspath_prepend(str(tmp_path))
    targets = "selector._target_=my_lab.Fails,fedsim.selectors.random.Random"
    assert (
        command.run(
            ["selector=random", targets, "optimizer.lr=interval(0.01,0.1)", "trials=6", *FEW]
        )
        == 1
    )
    out = " ".join(capsys.readouterr().out.split())
    assert "failed, outputs/default/" in out
    assert re.search(r"(\d) of 6 trials to the end, 0 pruned, [1-5] failed", out)
    assert "_target_=fedsim.selectors.random.Random" in out.partition("the best one: fedsim -m")[2]
