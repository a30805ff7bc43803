"""The search: trials proposed by Optuna's tree-structured Parzen estimator, and their table.

The search space is written in Hydra's syntax of sweeps:
`optimizer.lr=tag(log,interval(0.001,0.1))`, `local.steps=int(interval(5,40))`,
`cohort_size=range(2,10,2)`, or a choice, `selector=gpfl,random`.

A trial is a point of the search space. It has one run for each seed, in ordinary run folders. Its
value is the mean of the final accuracies. Optuna prunes a trial (stops it early) if it is worse
than earlier trials at the same round; its run then ends as interrupted. Trials run one after
another. Runs that have ended are not run again, and the sampler is seeded, so the same command
resumes the search. `fedsim.search.command` calls `search`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import optuna
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import BasePruner, MedianPruner, NopPruner
from optuna.samplers import TPESampler
from optuna.trial import TrialState
from rich.markup import escape
from rich.table import Table

from fedsim.config.plan import Plan
from fedsim.config.sweeps import values_of
from fedsim.config.user_code import changed_since
from fedsim.config.words import key_of, typed_in
from fedsim.core.configs import SEED_KEYS
from fedsim.core.errors import ConfigError, DataError, Problem, at_least, check, rule
from fedsim.core.record import Record, mean_of_last
from fedsim.core.text import command
from fedsim.jobs.sweep import Attempts
from fedsim.results.reading import DamagedError, Rounds, read_metrics, window_of
from fedsim.running.exits import EXIT_CODES
from fedsim.running.outcome import Outcome, outcome_on_file
from fedsim.running.process import STOP
from fedsim.tracking.tables import CONSOLE, print_line

optuna.logging.set_verbosity(optuna.logging.WARNING)  # fedsim itself prints each trial

Axis = CategoricalDistribution | FloatDistribution | IntDistribution
MAX_SHOWN = 10
"""Maximum number of trials in the table at the end."""
TRIAL_STATES = {
    "done": TrialState.COMPLETE,
    "pruned": TrialState.PRUNED,
    "diverged": TrialState.PRUNED,
    "failed": TrialState.FAIL,
    "invalid": TrialState.FAIL,
}
"""Optuna's state of a trial by the status of its `Result`. Its sampler also learns from pruned
trials, by the accuracies of their rounds, but not from failed ones."""


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """The keys of the command line that belong to the search itself.

    `trials` is the number of trials. The first `startup` trials are drawn at random and never
    pruned. No trial is pruned up to round `warmup` (None: a quarter of a run's rounds), or at the
    last round.
    `search_seed` is the seed of Optuna's sampler.
    """

    trials: int = 20
    startup: int = 5
    search_seed: int = 0
    pruner: Literal["median", "none"] = "median"
    warmup: int | None = None

    def __post_init__(self) -> None:
        check(
            at_least("trials", self.trials, 1),
            at_least("startup", self.startup, 1),
            at_least("search_seed", self.search_seed, 0),
            None if self.warmup is None else at_least("warmup", self.warmup, 0),
        )


OWN_KEYS = tuple(field.name for field in fields(SearchSettings))


@dataclass(frozen=True)
class Space:
    """A search space: `axes` by key of the config, and `words`, all other overrides."""

    axes: Mapping[str, Axis]
    words: Sequence[str]

    def words_of(self, params: Mapping[str, Any]) -> list[str]:
        """Return the words of the trial that has the values `params` on the axes."""
        axis_words = [f"{key}={value}" for key, value in params.items()]
        return [*self.words, *axis_words]

    def corners(self) -> list[dict[str, Any]]:
        """Return the values of trials in which each choice and each end of a range occurs.

        The first trial has the first value of every axis. Each other trial differs from it on one
        axis. `fedsim.search.command` checks these trials before the search.
        """
        ends: dict[str, Sequence[Any]] = {}
        for key, axis in self.axes.items():
            if isinstance(axis, CategoricalDistribution):
                ends[key] = axis.choices
            else:
                ends[key] = (axis.low, axis.high)
        first = {key: values[0] for key, values in ends.items()}
        corners = [first]
        for key, values in ends.items():
            for value in values[1:]:
                corners.append(first | {key: value})
        return corners


def space_of(overrides: Sequence[Override]) -> Space:
    """Return the search space that the sweeps among `overrides` describe.

    A sweep over seeds is no axis: each trial runs at all seeds. Raises `ConfigError` for a sweep
    that cannot be searched in, and if there is no sweep.
    """
    axes: dict[str, Axis] = {}
    words: list[str] = []
    problems: list[Problem | None] = []
    for override in overrides:
        key = override.get_key_element()
        if not override.is_sweep_override() or key_of(override) in SEED_KEYS:
            words.append(override.input_line or "")
            continue
        try:
            axes[key] = _distribution(override)
        except ConfigError as error:
            problems += error.problems
        except ValueError as error:  # Optuna's
            problems.append(Problem(key, typed_in(override), str(error)))
    has_sweep = bool(axes or problems)
    remedy = "for example 'optimizer.lr=interval(0.01,0.3)'"
    problems.append(rule(has_sweep, "search", ..., "has nothing to search in", remedy))
    check(*problems)
    return Space(axes, words)


def mistake_in(override: Override) -> Problem | None:
    """Return the problem of a word that is about the search, and not about its runs, or None."""
    key = override.key_or_group
    if key in OWN_KEYS and override.is_sweep_override():
        fault = "is a setting of the search itself, and takes one value"
        return Problem(key, typed_in(override), fault, "give one")
    if key == "hydra/launcher" and typed_in(override) != "basic":
        fault = "must be basic: a search runs its trials one after another, in this process"
        remedy = (
            "leave it out; on a cluster, let a job of the scheduler run the search "
            "(docs/clusters.md)"
        )
        return Problem(key, typed_in(override), fault, remedy)
    return None


def _distribution(override: Override) -> Axis:
    """Return Optuna's distribution of a sweep: an interval, a range or a choice.

    Raises `ConfigError` for a logarithmic scale (`tag(log,...)`) where Optuna has none, and
    ValueError for values that Optuna rejects.
    """
    value: Any = override.value()
    is_log = "log" in getattr(value, "tags", ())
    if isinstance(value, IntervalSweep):
        low: Any = value.start
        high: Any = value.end
        if isinstance(low, int) and isinstance(high, int):
            return IntDistribution(low, high, log=is_log)
        return FloatDistribution(low, high, log=is_log)
    texts = [word.partition("=")[2] for word in values_of(override)]
    if isinstance(value, RangeSweep) and all(re.fullmatch(r"-?\d+", text) for text in texts):
        numbers = sorted(map(int, texts))
        step = abs(int(value.step or 1))
        if step == 1 or not is_log:
            return IntDistribution(numbers[0], numbers[-1], log=is_log, step=step)
    if is_log:
        fault = (
            "a logarithmic scale is for intervals, and for ranges of whole numbers in steps of 1"
        )
        raise ConfigError([Problem(override.get_key_element(), typed_in(override), fault)])
    return CategoricalDistribution(texts)


@dataclass(frozen=True)
class Result:
    """The result of a trial.

    `status` is done, pruned, diverged, failed or invalid. `accuracy` is the mean of the final
    accuracies over the seeds, None unless the trial is done. `num_rounds` is the number of rounds
    of its first run, or of the run that has diverged. `reason` says which run has failed, and why,
    or why the trial is not valid.
    """

    status: str
    accuracy: float | None
    num_rounds: int
    reason: str | None = None

    def __str__(self) -> str:
        if self.accuracy is not None:
            return f"final accuracy {self.accuracy:.4f}"
        if self.status == "invalid":
            return f"not valid: {self.reason}"
        if self.reason is not None:
            return f"{self.status}, {self.reason}"
        return f"{self.status} after round {self.num_rounds}"


class TrialProgress:
    """The accuracies of a trial's first run, by which Optuna decides whether to prune the trial.

    `trial` is Optuna's. After each round it gets the smoothed accuracy: the mean of the latest
    `window` rounds, because the final accuracy is such a mean, too.
    """

    def __init__(self, trial: Any, window: int) -> None:
        self.pruned = False
        self._trial = trial
        self._window = window
        self._accuracies: list[float | None] = []

    @property
    def num_rounds(self) -> int:
        """Number of rounds that were added."""
        return len(self._accuracies)

    def add_round(self, round: int, accuracy: float | None) -> str | None:
        """Add the test accuracy after a round (None: not measured).

        Returns why the run is to stop there, or None.
        """
        if round <= self.num_rounds:  # a killed run repeats the rounds since its checkpoint
            return None
        self._accuracies.append(accuracy)
        smoothed = mean_of_last(self._accuracies, self._window)
        if smoothed is not None and accuracy is not None:
            self._trial.report(smoothed, round)
            self.pruned = self.pruned or self._trial.should_prune()
        return "pruned" if self.pruned else None


def run_trial(plans: Sequence[Plan], trial: Any) -> Result:
    """Run `plans`, one for each seed, up to the first that does not end with an accuracy.

    `trial` is Optuna's. Raises what stops a search: an error before the first round of a run, or a
    signal.
    """
    # 1. Add the rounds of the first run that are on file. If Optuna prunes the trial there, the run
    #    stays as it is. A run that has ended for good cannot be pruned any more.
    first_plan = plans[0]
    progress = TrialProgress(trial, window_of(first_plan.config))
    recorded = outcome_on_file(first_plan)
    if not changed_since(recorded.summary, first_plan.config):
        _add_rounds_on_file(progress, first_plan)
        if progress.pruned and not recorded.final:
            return Result("pruned", None, progress.num_rounds)
        progress.pruned = False
    # 2. Run the plans.
    accuracies = []
    for plan in plans:
        outcome = _run(plan, progress if plan is first_plan else None)
        if outcome.status == "failed":
            reason = f"{plan.folder}: {outcome.summary.get('error')}"
            return Result("failed", None, progress.num_rounds, reason)
        if progress.pruned and not outcome.final:  # final: it was the last round
            return Result("pruned", None, progress.num_rounds)
        accuracy = outcome.summary.get("final_accuracy")
        if outcome.status == "diverged" or accuracy is None:
            return Result("diverged", None, outcome.summary["rounds"])
        accuracies.append(accuracy)
    return Result("done", float(np.mean(accuracies)), progress.num_rounds)


def _add_rounds_on_file(progress: TrialProgress, plan: Plan) -> None:
    """Add the recorded rounds of a run to `progress`, unless its files are damaged.

    Damaged files are not reported here: the run itself does so when it resumes.
    """
    with suppress(DamagedError):
        records = read_metrics(plan.folder)
        Rounds.of(records)  # raises DamagedError for records that cannot be
        for number, record in enumerate(records, 1):
            progress.add_round(number, record["test_accuracy"])


def _run(plan: Plan, progress: TrialProgress | None) -> Outcome:
    """Run one plan, and return its outcome.

    `progress` gets its rounds and may stop it. Raises an error before the first round, or a signal.
    """

    def on_round(plan: Plan, record: Record) -> str | None:
        if progress is None:
            return None
        return progress.add_round(record.round, record.test_accuracy)

    attempts = Attempts(on_round=on_round)
    attempts.run(plan)
    attempts.run_held(attempts.run_in_turn)  # waits if another process is running it
    STOP.raise_if_asked()
    if attempts.errors:
        raise attempts.errors[0]
    return attempts.ended[plan.folder]


def search(
    space: Space,
    settings: SearchSettings,
    plans_of: Callable[[Mapping[str, Any]], Sequence[Plan]],
    num_rounds: int,
    flags: Sequence[str] = (),
) -> int:
    """Run all trials, print the best ones, and return the exit code.

    `plans_of` returns the plans of a trial from its values, one plan for each seed. `num_rounds` is
    the number of rounds of a run. `flags` come before the words of a run, such as `--config-dir`.

    The code is 1 if a trial has failed, otherwise 4 if no trial has ended with an accuracy,
    otherwise 0. A trial is not valid, and does not run, if its values violate a rule together, or
    if the data cannot be divided as they say. If no trial is valid, raises `ConfigError` or
    `DataError`.
    """
    from fedsim.running.assembly import is_prepared  # imports PyTorch, which takes time

    sampler = TPESampler(seed=settings.search_seed, n_startup_trials=settings.startup)
    pruner = _pruner(settings, num_rounds)
    study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)
    results: list[tuple[dict[str, Any], Result]] = []
    config_errors: list[ConfigError] = []
    data_errors: list[DataError] = []
    for number in range(1, settings.trials + 1):
        trial = study.ask(dict(space.axes))
        words = " ".join(f"{key}={value}" for key, value in trial.params.items())
        print_line(f"trial {number} of {settings.trials}: {words}")
        plans: Sequence[Plan] = ()
        try:
            plans = plans_of(trial.params)
            result = run_trial(plans, trial)
        except ConfigError as error:
            config_errors.append(error)
            result = Result("invalid", None, 0, str(error))
        except DataError as error:
            if not plans or not is_prepared(plans[0]):  # the data are missing for all trials
                raise
            data_errors.append(error)
            result = Result("invalid", None, 0, str(error))
        results.append((trial.params, result))
        print_line(f"trial {number}: {result}")
        study.tell(trial, result.accuracy, TRIAL_STATES[result.status])
    if all(result.status == "invalid" for _, result in results):
        if data_errors:
            raise data_errors[0]
        problems: dict[Problem, None] = {}  # each once, in order
        for config_error in config_errors:
            problems |= dict.fromkeys(config_error.problems)
        raise ConfigError(problems)
    return _print_results(space, results, flags)


def _pruner(settings: SearchSettings, num_rounds: int) -> BasePruner:
    """Return Optuna's pruner for runs of `num_rounds` rounds."""
    if settings.pruner == "none":
        return NopPruner()
    warmup = num_rounds // 4 if settings.warmup is None else settings.warmup
    # n_warmup_steps is the first step that may be pruned.
    return MedianPruner(n_startup_trials=settings.startup, n_warmup_steps=warmup + 1)


def _print_results(
    space: Space, results: Sequence[tuple[dict[str, Any], Result]], flags: Sequence[str]
) -> int:
    """Print the table of the best trials and the command of the best one. Return the exit code.

    `results` has the values and the result of each trial.
    """
    ranking = []
    for params, result in results:
        if result.accuracy is not None:
            ranking.append((result.accuracy, params))
    ranking.sort(key=lambda entry: entry[0], reverse=True)
    statuses = [result.status for _, result in results]
    title = f"{len(ranking)} of {len(results)} trials to the end, {_counts(statuses)}"
    table = Table(title=title, title_justify="left")
    table.add_column("final", justify="right")
    for key in space.axes:
        table.add_column(escape(key))
    for accuracy, params in ranking[:MAX_SHOWN]:
        table.add_row(f"{accuracy:.4f}", *(escape(str(params[key])) for key in space.axes))
    CONSOLE.print(table)
    has_failed = "failed" in statuses
    if has_failed:
        print_line("the same command resumes the runs that have failed")
    if ranking:
        _, best_params = ranking[0]
        best = command("fedsim", "-m", *flags, *space.words_of(best_params))
        print_line(f"the best one: {best}")
    else:
        print_line("no trial has ended with an accuracy")
    if has_failed:
        return EXIT_CODES["failed"]
    return EXIT_CODES["done" if ranking else "diverged"]


def _counts(statuses: Sequence[str]) -> str:
    """Return how many trials have ended without an accuracy, by status: "2 pruned, 0 failed"."""
    counts = [f"{statuses.count('pruned')} pruned"]
    if "diverged" in statuses:
        counts.append(f"{statuses.count('diverged')} diverged")
    counts.append(f"{statuses.count('failed')} failed")
    if "invalid" in statuses:
        counts.append(f"{statuses.count('invalid')} not valid")
    return ", ".join(counts)
