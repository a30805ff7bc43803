"""`fedsim benchmark`: tune methods in settings of the selection benchmark, and run them there.

The benchmark compares methods of client selection. docs/benchmark_rules.md has its rules in words,
and `fedsim.benchmark.rules` as code. Its terms are:

- A *setting* is a data set, a model, and a division of the data among clients (`cell=` on the
  command line). A *regime* is a schedule of the learning rate with a number of rounds.
- A *method* is a selector, or a *control*: random selection with other random numbers.
- A *trial* is a run that serves to choose values. It is tested on samples held out from the
  clients' training data. A *point* is a choice of all of a method's own parameters. *Scored* runs
  are those that are compared. They are tested on the test set.
- A *horizon* is a number of rounds. The first is the shortest.
- A *word* is an override such as `num_rounds=200`, as on the command line.

A study of a setting has four phases:

1. Trials of the learning rate for each method and schedule, with the method's defaults.
2. Trials of the method's points, under the constant schedule with its rate from phase 1.
3. Trials of the learning rate for longer runs, with the point of phase 2. They try the rate of
   phase 1 and the next lower one.
4. Scored runs of each method with its chosen values, in each regime, at each seed.

Each phase is a sweep of ordinary runs in the folder outputs/benchmark_v1, and needs the results of
those before it. Runs that have ended are not run again, so the same command resumes.
"""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from hydra.core.override_parser.types import Override

from fedsim.benchmark.reader import DIGESTS
from fedsim.benchmark.rules import (
    CONTROLS,
    FREE_KEYS,
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
from fedsim.config.words import parse, typed_in
from fedsim.core.disk import write_atomically
from fedsim.core.errors import ConfigError, FedsimError, Problem, check, rule
from fedsim.core.text import command
from fedsim.jobs.cli import run_jobs
from fedsim.running.exits import EXIT_CODES
from fedsim.running.outcome import outcome_on_file
from fedsim.search.own_keys import overwrite_problem, take_settings
from fedsim.search.tune import declared_space, points_of, why_not_run
from fedsim.tracking.tables import print_line

Key = tuple[str, ...]
"""Name of a group of runs that differ only in their seeds: the method, and what its phase varies
(`Phase`)."""
SummaryOf = Callable[[Plan], Mapping[str, Any]]
"""A function that returns the summary of a planned run that has ended."""


def method_words(method: str) -> list[str]:
    """Return the words that choose a method: one for its selector, and for a control also those of
    its values."""
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
    """Return the summary of a planned run. Raises `FedsimError` if it failed or was stopped."""
    outcome = outcome_on_file(plan)
    if not outcome.final:
        fault = "has no final result, so the study cannot continue"
        remedy = "see its error.txt; the same command resumes"
        raise FedsimError(f"{plan.folder}: {fault}; {remedy}")
    return outcome.summary


def seed_word(seeds: Sequence[int]) -> str:
    """Return the word that sweeps over seeds."""
    return f"seed={','.join(map(str, seeds))}"


@dataclass
class Phase:
    """Runs of one phase of a study, in groups. A group has a run for each seed.

    The keys of `groups` depend on the kind of phase:

    - "rates" and "long_rates": method, schedule, number of rounds, learning rate.
    - "points": method, and the words of the point. The defaults have no words.
    - "scored": method, schedule, number of rounds.
    """

    kind: Literal["rates", "points", "long_rates", "scored"]
    groups: dict[Key, list[ComposedJob]] = field(default_factory=dict)

    def run(self, command: Sequence[str]) -> int:
        """Run all runs of the phase, and return the exit code. `run_jobs` skips those that have
        ended.

        `command` has the words after `fedsim benchmark`, because `run_jobs` prints how to resume.
        Raises `FedsimError` as `run_jobs` does.
        """
        jobs: list[ComposedJob] = []
        for group in self.groups.values():
            jobs += group
        return run_jobs(jobs, ["benchmark", *command]) if jobs else EXIT_CODES["done"]

    def accuracies(self, summary_of: SummaryOf) -> dict[Key, float]:
        """Return the mean final accuracy of each group. A run that diverged counts as 0.

        Means are rounded to 12 digits, so that rounding errors do not decide between equal ones.
        Raises whatever `summary_of` raises.
        """
        means = {}
        for key, jobs in self.groups.items():
            values = []
            for summary in map(summary_of, outlined(jobs)):
                diverged = summary["status"] == "diverged"
                values.append(0.0 if diverged else float(summary["final_accuracy"]))
            means[key] = round(float(np.mean(values)), 12)
        return means

    def folder(self) -> Path:
        """Return the folder that holds the folders of the runs."""
        first_group = next(iter(self.groups.values()))
        return outlined(first_group)[0].folder.parent


class Study:
    """The study of one setting: its four phases, and what they choose.

    `words` are words of all runs. `chosen_rates` has the learning rate by method, schedule and
    number of rounds. `chosen_words` has the words of the chosen point by method: none if the
    defaults were chosen.
    """

    def __init__(self, setting: str, methods: Sequence[str], words: Sequence[str]) -> None:
        self.setting = setting
        self.methods = methods
        self.words = [f"preset={PRESET}", f"cell={setting}", *words]
        self.chosen_rates: dict[tuple[str, str, int], float] = {}
        self.chosen_words: dict[str, Sequence[str]] = {}

    def check_methods(self) -> Path:
        """Return the folder that holds the folders of the runs.

        Raises `ConfigError` if the setting or a method does not exist, or does not run there, if
        the search space of a method is wrong, or if the runs would overwrite earlier ones.
        """
        for method in self.methods:
            jobs = self._compose(method_words(method))
            plans = check_jobs(jobs)
            check(overwrite_problem(plans))
            point_words(method, jobs[0])
        return plans[0].folder.parent

    def run(self, command: Sequence[str]) -> int:
        """Run all phases, write the chosen values to a file, and return the exit code.

        A phase with a run that failed ends the study with its exit code. `command` are the words
        after `fedsim benchmark`. Raises `FedsimError`.
        """
        for phase in self.phases(summary_on_file):
            code = phase.run(command)
            # A run that diverged has a final result.
            if code not in (EXIT_CODES["done"], EXIT_CODES["diverged"]):
                print_line(f"{self.setting}: the study continues after all these runs have ended")
                return code
        scored_runs = phase
        scored_runs.accuracies(summary_on_file)  # raises if one has not ended
        path = self._write_chosen(scored_runs.folder())
        print_line(f"{self.setting}: all runs have ended; chosen values in {path}")
        return EXIT_CODES["done"]

    def phases(self, summary_of: SummaryOf) -> Iterator[Phase]:
        """Yield the four phases in turn.

        The caller sees to it that the runs of a phase have ended before it asks for the next phase,
        which depends on their results. Raises whatever `summary_of` raises.
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
        """Return the methods that need trials of the rate. A control needs those of random
        selection."""
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
                chosen = RATES.index(self.chosen_rates[method, schedule, HORIZONS[0]])
                lowest = max(chosen - NUM_LONG_RATES + 1, 0)
                rates = RATES[lowest : chosen + 1]
                for num_rounds in HORIZONS[1:]:
                    self._add_rates(phase, method, schedule, num_rounds, rates)
        return phase

    def _add_rates(
        self, phase: Phase, method: str, schedule: str, num_rounds: int, rates: Sequence[float]
    ) -> None:
        """Add trials of rates, each at all seeds of tuning, to a phase."""
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
        """Choose the rate of highest accuracy for each method and regime that have trials. If rates
        are equally good, the lowest is chosen. The controls have the rates of random selection."""
        best: dict[tuple[str, str, int], float] = {}
        for (method, schedule, horizon, rate), accuracy in accuracies.items():
            case = (method, schedule, int(horizon))
            # Trials were added by ascending rates, so of equally good rates the lowest stays.
            if case not in best or accuracy > best[case]:
                best[case] = accuracy
                self.chosen_rates[case] = float(rate)
        for method, schedule, num_rounds in best:
            if method == "random":
                rate_of_random = self.chosen_rates[method, schedule, num_rounds]
                for control in CONTROLS:
                    self.chosen_rates[control, schedule, num_rounds] = rate_of_random

    def _point_trials(self) -> Phase:
        """Return trials of the defaults, and of the points of each method's space.

        Points that are not valid in the setting are left out, as are those that equal the defaults.
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
                except ConfigError as error:
                    print_line(f"{self.setting}, {method}: {why_not_run(point, error)}")
                    continue
                if jobs[0].config != defaults[0].config:
                    phase.groups[method, *point] = jobs
        return phase

    def _choose_points(self, accuracies: Mapping[Key, float]) -> None:
        """Choose the point of highest accuracy. The defaults come first, and stay if no point is
        better."""
        best: dict[str, float] = {}
        for (method, *point), accuracy in accuracies.items():
            if method not in best or accuracy > best[method]:
                best[method] = accuracy
                self.chosen_words[method] = point

    def point_of(self, phase: Phase, key: Key) -> Sequence[str]:
        """Return the words of the point of a group of trials, for the table of trials
        (`fedsim.benchmark.submission`). The defaults have none."""
        method, *others = key
        if phase.kind == "rates":
            return ()
        if phase.kind == "points":
            return others
        return self.chosen_words.get(method, ())

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
        """Add the chosen values to the setting's file in `folder`, for users to read. Return the
        file."""
        path = folder / f"{self.setting}.json"
        chosen = json.loads(path.read_bytes()) if path.exists() else {}
        chosen |= {method: self.chosen(method) for method in self.methods}
        write_atomically(path, json.dumps(chosen, indent=1).encode(), alone=False)
        return path


def point_words(method: str, job: ComposedJob) -> list[Sequence[str]]:
    """Return the words of each point of a method's search space.

    `job` is a run of the method with its defaults in the setting. Raises `ConfigError`.
    """
    if method in SCALED_SPACES:
        parameter, key, multiples = SCALED_SPACES[method]
        values = [round(multiple * job.config[key]) for multiple in multiples]
        distinct_values = dict.fromkeys(values)
        return [[f"{parameter}={value}"] for value in distinct_values]
    space = declared_space(job.choices["selector"])
    if not space:
        return []
    _defaults, *points = points_of(space, NUM_POINTS)
    return [point.words for point in points]


def run(words: Sequence[str]) -> int:
    """Study the settings of the command line, and return the exit code. Raises `FedsimError`.

    Mistakes in the command are found before any run.
    """
    _, args = read_words(_parser(), words)
    with search_path(args.config_dir, args.config_path):
        settings, methods = _take_names(args)
        check(*map(_mistake_in, parse(args.overrides)))
        studies = [Study(setting, methods, args.overrides) for setting in settings]
        for study in studies:
            folder = study.check_methods()
        for study in studies:
            code = study.run(words)
            if code != EXIT_CODES["done"]:
                return code
    to_submit = [method for method in methods if method not in ("random", *CONTROLS)]
    if to_submit:
        submit = ["submit", str(folder), "--method", ",".join(to_submit)]
        if args.config_dir:
            submit += ["--config-dir", args.config_dir]
        print_line(f"next: {command('fedsim', *submit, '--author', 'NAME', '--link', 'URL')}")
    return EXIT_CODES["done"]


def _take_names(args: Namespace) -> tuple[list[str], list[str]]:
    """Remove the words for settings and methods from `args.overrides`, and return their names."""
    values = take_settings(args, ("cell", "selector"))
    names = []
    for key, example in (("cell", "v1_watch_10"), ("selector", "random,flips")):
        value = values.get(key)
        remedy = f"for example {key}={example}"
        check(
            rule(value is not None, key, ..., "must be given", remedy),
            rule(value != [], key, value, "must name at least one", remedy),
        )
        names.append(value if isinstance(value, list) else [str(value)])
    settings, methods = names
    check(*map(name_problem, methods))
    return settings, methods


def name_problem(method: str) -> Problem | None:
    """Return why a method with this name cannot be submitted, if so: the files of a submission have
    the name of the method."""
    if "/" in method:
        fault = "is in a subfolder, but a submission has the name of the selector's file alone"
        remedy = f"move the file to selector/{Path(method).name}.yaml"
        return Problem("selector", method, fault, remedy)
    fault = f"is the name of another file of submissions, {DIGESTS}"
    return rule(f"{method}.csv" != DIGESTS, "selector", method, fault, "rename its file")


def _mistake_in(override: Override) -> Problem | None:
    """Return what is wrong with an override that would apply to all runs, if anything."""
    key = override.key_or_group
    is_free = key.partition(".")[0] in FREE_KEYS
    if override.is_sweep_override():
        fault = "has several values" if is_free else "is fixed by the rules of the benchmark"
        remedy = "give one value" if is_free else "leave it out"
        return Problem(key, typed_in(override), fault, remedy)
    remedy = f"leave it out; only {', '.join(FREE_KEYS)} may be given"
    return rule(is_free, key, override.value(), "is fixed by the rules of the benchmark", remedy)


def _parser() -> ArgumentParser:
    return ArgumentParser(
        prog="fedsim benchmark",
        usage="fedsim benchmark cell=SETTINGS selector=METHODS [KEY=VALUE ...] [--config-dir DIR]",
        description="Tunes methods in settings of the selection benchmark (conf/cell/v1_*.yaml) "
        "and runs them there, by the rules of docs/benchmark_rules.md. The same command resumes.",
        epilog="example: fedsim benchmark cell=v1_watch_10 selector=random,flips",
        allow_abbrev=False,
    )
