"""`fedsim benchmark`: tune methods in settings of the selection benchmark, and run them there.

A study of a setting has four phases. Each phase is a sweep of ordinary runs, in the folder
outputs/benchmark_v1, and needs the results of those before it:

1. Trials of the learning rate: each method, with its defaults, for each schedule.
2. Trials of a method's own parameters, at its rate for the constant schedule.
3. Trials of the learning rate for longer runs: the rate of phase 1 and the next lower one.
4. The scored runs: each method with its chosen values, in each regime, at each seed.

Runs that have ended are not run again, so the same command resumes. A word is an override such as
`num_rounds=200`, as on the command line.
"""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedsim.benchmark.rules import (
    CONTROLS,
    HORIZONS,
    NUM_LONG_RATES,
    NUM_POINTS,
    PRESET,
    RATES,
    SCALED_SPACES,
    SCHEDULES,
    SEEDS,
    TUNING_SEEDS,
    TUNING_WORDS,
)
from fedsim.config.command_line import read_words
from fedsim.config.compose import check_jobs, compose_jobs, outlined, search_path
from fedsim.config.job import ComposedJob
from fedsim.config.plan import Plan
from fedsim.core.disk import write_atomically
from fedsim.core.errors import ConfigError, check, rule
from fedsim.jobs.cli import run_jobs
from fedsim.running.outcome import outcome_on_file
from fedsim.search.command import take_settings
from fedsim.search.tune import points_of, space_of
from fedsim.tracking.tables import print_line

Key = tuple[str, ...]
"""Name of a group of runs that differ only in their seeds: a method, and what its phase varies."""
SummaryOf = Callable[[Plan], Mapping[str, Any]]
"""A function that returns the summary of a planned run that has ended."""


def method_words(method: str) -> list[str]:
    """Return the words that choose a method: its selector, and for a control also its values."""
    return list(CONTROLS.get(method, (f"selector={method}",)))


def regime_words(schedule: str, num_rounds: int) -> list[str]:
    """Return the words of a regime.

    A step schedule divides the rate by 10 after a half and after three quarters of the rounds.
    """
    words = [f"optimizer/schedule={schedule}", f"num_rounds={num_rounds}"]
    if schedule == "step":
        milestones = f"[{num_rounds // 2},{3 * num_rounds // 4}]"
        words += [f"optimizer.schedule.milestones={milestones}", "optimizer.schedule.factor=0.1"]
    return words


def summary_on_file(plan: Plan) -> Mapping[str, Any]:
    """Return the summary of a planned run. Raises `ConfigError` if the run has not ended."""
    outcome = outcome_on_file(plan)
    fault = "has not ended, so the study cannot continue"
    remedy = "see its error.txt; the same command resumes"
    check(rule(outcome.final, "run", plan.folder.name, fault, remedy))
    return outcome.summary


def seed_word(seeds: Sequence[int]) -> str:
    """Return the word that sweeps over seeds."""
    return f"seed={','.join(map(str, seeds))}"


@dataclass
class Phase:
    """Runs of one phase of a study, in groups. A group has a run for each seed.

    The keys of `groups` begin with the method. Then come the schedule, the number of rounds and the
    rate for trials of rates, the words of the point for trials of points, and the schedule and the
    number of rounds for scored runs.
    """

    kind: Literal["rates", "points", "long_rates", "scored"]
    groups: dict[Key, list[ComposedJob]] = field(default_factory=dict)

    def run(self, command: Sequence[str]) -> None:
        """Run everything that has not ended. Raises `FedsimError` as `run_jobs` does.

        `command` are the words after `fedsim benchmark`: `run_jobs` prints how to resume.
        """
        jobs: list[ComposedJob] = []
        for group in self.groups.values():
            jobs += group
        if jobs:
            run_jobs(jobs, ["benchmark", *command])

    def accuracies(self, summary_of: SummaryOf) -> dict[Key, float]:
        """Return the mean final accuracy of each group. A run that diverged counts as 0.

        Raises whatever `summary_of` raises.
        """
        means = {}
        for key, jobs in self.groups.items():
            values = []
            for summary in map(summary_of, outlined(jobs)):
                diverged = summary["status"] == "diverged"
                values.append(0.0 if diverged else float(summary["final_accuracy"]))
            means[key] = float(np.mean(values))
        return means

    def folder(self) -> Path:
        """Return the folder that holds the folders of the runs."""
        [plan, *_] = outlined(next(iter(self.groups.values())))
        return plan.folder.parent


class Study:
    """The study of one setting: its four phases, and what they choose.

    `words` are words of all runs. `chosen_rates` has the learning rate by method, schedule and
    number of rounds, and `chosen_words` the words of the chosen point by method; the defaults have
    none.
    """

    def __init__(self, setting: str, methods: Sequence[str], words: Sequence[str]) -> None:
        self.setting = setting
        self.methods = methods
        self.words = [f"preset={PRESET}", f"cell={setting}", *words]
        self.chosen_rates: dict[tuple[str, str, int], float] = {}
        self.chosen_words: dict[str, Sequence[str]] = {}

    def run(self, command: Sequence[str]) -> Path:
        """Run all phases, and return the file of the chosen values.

        `command` are the words after `fedsim benchmark`. Raises `FedsimError`.
        """
        for phase in self.phases(summary_on_file):
            phase.run(command)
        phase.accuracies(summary_on_file)  # raises if a scored run has failed
        return self._write_chosen(phase.folder())

    def phases(self, summary_of: SummaryOf) -> Iterator[Phase]:
        """Yield the four phases in turn. The runs of a phase must have ended before the next.

        Raises whatever `summary_of` raises.
        """
        rate_trials = self._rate_trials()
        yield rate_trials
        self._choose_rates(rate_trials.accuracies(summary_of))
        point_trials = self._point_trials()
        yield point_trials
        self._choose_points(point_trials.accuracies(summary_of))
        long_rate_trials = self._long_rate_trials()
        yield long_rate_trials
        self._choose_rates(long_rate_trials.accuracies(summary_of))
        yield self._scored_runs()

    def _compose(self, words: Sequence[str]) -> list[ComposedJob]:
        return compose_jobs([*self.words, *words], multirun=True)

    def _tuned_methods(self) -> list[str]:
        """Return the methods that need trials of the rate. A control needs those of random."""
        needed = ["random" if method in CONTROLS else method for method in self.methods]
        return list(dict.fromkeys(needed))

    def _rate_trials(self) -> Phase:
        phase = Phase("rates")
        for method in self._tuned_methods():
            for schedule in SCHEDULES:
                self._add_rates(phase, method, schedule, HORIZONS[0], RATES)
        return phase

    def _long_rate_trials(self) -> Phase:
        """Return trials of the rates for the later horizons, with the chosen points."""
        phase = Phase("long_rates")
        for method in self._tuned_methods():
            for schedule in SCHEDULES:
                index = RATES.index(self.chosen_rates[method, schedule, HORIZONS[0]])
                rates = RATES[max(index + 1 - NUM_LONG_RATES, 0) : index + 1]
                for num_rounds in HORIZONS[1:]:
                    self._add_rates(phase, method, schedule, num_rounds, rates)
        return phase

    def _add_rates(
        self, phase: Phase, method: str, schedule: str, num_rounds: int, rates: Sequence[float]
    ) -> None:
        """Add a trial of each rate, at each of the seeds, to a phase."""
        words = [
            *method_words(method),
            *self.chosen_words.get(method, ()),
            *regime_words(schedule, num_rounds),
            *TUNING_WORDS,
            f"optimizer.lr={','.join(map(str, rates))}",
            seed_word(TUNING_SEEDS),
        ]
        for job in self._compose(words):
            key = (method, schedule, str(num_rounds), str(job.config["optimizer"]["lr"]))
            phase.groups.setdefault(key, []).append(job)

    def _choose_rates(self, accuracies: Mapping[Key, float]) -> None:
        """Choose the rate of highest accuracy in each regime that has trials; of equal ones the
        lowest. The controls have the rates of random selection."""
        best: dict[tuple[str, str, int], float] = {}
        for (method, schedule, num_rounds, rate), accuracy in accuracies.items():
            regime = (method, schedule, int(num_rounds))
            if regime not in best or accuracy > best[regime]:  # the lowest rate comes first
                best[regime] = accuracy
                self.chosen_rates[regime] = float(rate)
        for method, schedule, rounds in best:
            if method == "random":
                rate_of_random = self.chosen_rates[method, schedule, rounds]
                for control in CONTROLS:
                    self.chosen_rates[control, schedule, rounds] = rate_of_random

    def _point_trials(self) -> Phase:
        """Return trials of the points of each method's space, the defaults first.

        Points that are not valid in the setting, or that are the defaults, are left out.
        """
        phase = Phase("points")
        for method in self.methods:
            if method in CONTROLS:
                continue
            common = [
                *method_words(method),
                *regime_words("constant", HORIZONS[0]),
                *TUNING_WORDS,
                f"optimizer.lr={self.chosen_rates[method, 'constant', HORIZONS[0]]}",
                seed_word(TUNING_SEEDS),
            ]
            defaults = self._compose(common)
            phase.groups[method,] = defaults
            for point in point_words(method, defaults[0]):
                jobs = self._compose([*common, *point])
                try:
                    check_jobs(jobs)
                except ConfigError:
                    print_line(f"{self.setting}, {method}: {' '.join(point)} is not valid here")
                    continue
                if jobs[0].config != defaults[0].config:
                    phase.groups[method, *point] = jobs
        return phase

    def _choose_points(self, accuracies: Mapping[Key, float]) -> None:
        """Choose the point of highest accuracy. Of equal ones it is the first: the defaults stay if
        nothing is better."""
        best: dict[str, float] = {}
        for (method, *point), accuracy in accuracies.items():
            if method not in best or accuracy > best[method]:
                best[method] = accuracy
                self.chosen_words[method] = point

    def point_of(self, phase: Phase, key: Key) -> Sequence[str]:
        """Return the words of the point that the runs of a group have; the defaults have none."""
        if phase.kind == "rates":
            return ()
        return key[1:] if phase.kind == "points" else self.chosen_words.get(key[0], ())

    def _scored_runs(self) -> Phase:
        phase = Phase("scored")
        for method in self.methods:
            for schedule in SCHEDULES:
                for num_rounds in HORIZONS:
                    words = [
                        *method_words(method),
                        *self.chosen_words.get(method, ()),
                        *regime_words(schedule, num_rounds),
                        f"optimizer.lr={self.chosen_rates[method, schedule, num_rounds]}",
                        seed_word(SEEDS),
                    ]
                    phase.groups[method, schedule, str(num_rounds)] = self._compose(words)
        return phase

    def chosen(self, method: str) -> dict[str, Any]:
        """Return what was chosen for a method: its rates by schedule and number of rounds, and the
        words of its point."""
        rates = {
            schedule: {rounds: self.chosen_rates[method, schedule, rounds] for rounds in HORIZONS}
            for schedule in SCHEDULES
        }
        return {"rates": rates, "words": list(self.chosen_words.get(method, ()))}

    def _write_chosen(self, folder: Path) -> Path:
        """Write the chosen values into `folder`, for users, next to those of other methods. Return
        the file."""
        path = folder / f"{self.setting}.json"
        chosen = json.loads(path.read_bytes()) if path.exists() else {}
        chosen |= {method: self.chosen(method) for method in self.methods}
        write_atomically(path, json.dumps(chosen, indent=1).encode(), alone=False)
        return path


def point_words(method: str, job: ComposedJob) -> list[Sequence[str]]:
    """Return the words of each point of a method's search space, without the defaults.

    `job` is a run of the method. Its config has the setting's numbers, of which the values in
    `SCALED_SPACES` are multiples. Raises `ConfigError`.
    """
    if method in SCALED_SPACES:
        parameter, number, multiples = SCALED_SPACES[method]
        values = [round(multiple * job.config[number]) for multiple in multiples]
        return [[f"{parameter}={value}"] for value in dict.fromkeys(values)]
    space = space_of(job.choices["selector"])
    if not space:
        return []
    return [point.words for point in points_of(space, NUM_POINTS)[1:]]


def run(words: Sequence[str]) -> int:
    """Study the settings of the command line. Raises `FedsimError` before any work is done."""
    _, args = read_words(_parser(), words)
    with search_path(args.config_dir, args.config_path):
        settings, methods = _names(args)
        for setting in settings:
            path = Study(setting, methods, args.overrides).run(words)
            print_line(f"{setting}: all runs have ended; chosen values in {path}")
    return 0


def _names(args: Namespace) -> tuple[list[str], list[str]]:
    """Remove the settings and methods from `args.overrides`, and return their names."""
    values = take_settings(args, ("cell", "selector"))
    names = []
    for key, example in (("cell", "v1_watch_10"), ("selector", "random,flips")):
        value = values.get(key)
        remedy = f"for example {key}={example}"
        check(rule(value is not None, key, ..., "must be given", remedy))
        names.append(value if isinstance(value, list) else [str(value)])
    return names[0], names[1]


def _parser() -> ArgumentParser:
    return ArgumentParser(
        prog="fedsim benchmark",
        usage="fedsim benchmark cell=SETTINGS selector=METHODS [KEY=VALUE ...] [--config-dir DIR]",
        description="Tunes methods in settings of the selection benchmark (conf/cell/v1_*.yaml) "
        "and runs them there, by the rules of docs/benchmark.md. The same command resumes.",
        epilog="example: fedsim benchmark cell=v1_watch_10 selector=random,flips",
        allow_abbrev=False,
    )
