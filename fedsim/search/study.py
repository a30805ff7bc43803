"""The search: trials proposed by Optuna's tree-structured Parzen estimator, run one after another,
and their table.

What is searched in is written in Hydra's syntax of sweeps:
`optimizer.lr=tag(log,interval(0.001,0.1))`, `local.steps=int(interval(5,40))`,
`cohort_size=range(2,10,2)`, or a choice, `selector=gpfl,random`.

A trial has one run for each seed, in ordinary run folders; one that is pruned ends as a run does
that is interrupted. What a folder already holds is not run again, so the same search goes on where
it was.
"""

import math
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
from fedsim.config.user_code import changed_since
from fedsim.config.words import key_of, typed_in, values_of
from fedsim.core.configs import SEED_KEYS
from fedsim.core.errors import ConfigError, Problem, at_least, check, rule
from fedsim.core.record import mean_of_last
from fedsim.core.text import command
from fedsim.jobs.sweep import Attempts
from fedsim.results import reading
from fedsim.results.reading import DamagedError, read_metrics
from fedsim.running.outcome import Outcome, outcome_on_file
from fedsim.running.process import EXIT_CODES, STOP
from fedsim.tracking.tables import CONSOLE, print_line

optuna.logging.set_verbosity(optuna.logging.WARNING)  # it tells of each trial by itself else

Axis = CategoricalDistribution | FloatDistribution | IntDistribution


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`trials` in all, of which the first `startup` are drawn at random and never pruned; rounds up
    to `warmup` (None: a quarter of a run's) are never pruned either."""

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


OWN_KEYS = tuple(field.name for field in fields(Settings))


@dataclass(frozen=True)
class Space:
    """`axes`: what is searched in, by key. `words`: everything else of the command line."""

    axes: Mapping[str, Axis]
    words: Sequence[str]

    def words_of(self, params: Mapping[str, Any]) -> list[str]:
        """The words of the trial with these values, which are sampled from `axes`."""
        return [*self.words, *(f"{key}={value}" for key, value in params.items())]

    def corners(self) -> list[dict[str, Any]]:
        """Values of trials in which each choice and each end of a range occurs: what is checked
        before any is run."""
        ends: dict[str, Sequence[Any]] = {
            key: axis.choices
            if isinstance(axis, CategoricalDistribution)
            else (axis.low, axis.high)
            for key, axis in self.axes.items()
        }
        first = {key: values[0] for key, values in ends.items()}
        return [
            first,
            *({**first, key: value} for key, values in ends.items() for value in values[1:]),
        ]


def space_of(overrides: Sequence[Override]) -> Space:
    """The space that sweeps describe. Raises `ConfigError` for what cannot be searched in, or
    without any sweep."""
    swept = [o for o in overrides if o.is_sweep_override() and key_of(o) not in SEED_KEYS]
    axes: dict[str, Axis] = {}
    problems: list[Problem] = []
    for override in swept:
        try:
            axes[override.get_key_element()] = _distribution(override)
        except ConfigError as error:
            problems += error.problems
        except ValueError as error:  # Optuna's
            problems.append(Problem(override.get_key_element(), typed_in(override), str(error)))
    check(
        *problems,
        rule(
            bool(swept),
            "search",
            ...,
            "has nothing to search in",
            "'optimizer.lr=interval(0.01,0.3)', say",
        ),
    )
    return Space(axes, [o.input_line or "" for o in overrides if o not in swept])


def mistaken(override: Override) -> Problem | None:
    """What is wrong with a word that is about the search, and not about its runs."""
    key = override.key_or_group
    if key in OWN_KEYS and override.is_sweep_override():
        return Problem(
            key,
            typed_in(override),
            "is a setting of the search itself, and takes one value",
            "give one",
        )
    if key == "hydra/launcher" and typed_in(override) != "basic":
        told = "must be basic: a search runs its trials one after another, in this process"
        remedy = "leave it out; on a cluster, let a job of the scheduler run the search (docs/clusters.md)"
        return Problem(key, typed_in(override), told, remedy)
    return None


def _distribution(override: Override) -> Axis:
    value: Any = override.value()
    log = "log" in getattr(value, "tags", ())
    if isinstance(value, IntervalSweep):
        ends: tuple[Any, Any] = value.start, value.end
        whole = all(isinstance(end, int) for end in ends)
        return IntDistribution(*ends, log=log) if whole else FloatDistribution(*ends, log=log)
    texts = [word.partition("=")[2] for word in values_of(override)]
    if isinstance(value, RangeSweep) and all(text.lstrip("-").isdigit() for text in texts):
        numbers = sorted(map(int, texts))
        step = abs(int(value.step or 1))
        if not log or step == 1:
            return IntDistribution(numbers[0], numbers[-1], log=log, step=step)
    text = "a logarithmic scale is for intervals, and for ranges of whole numbers in steps of 1"
    check(rule(not log, override.get_key_element(), typed_in(override), text))
    return CategoricalDistribution(texts)


@dataclass(frozen=True)
class Result:
    """`accuracy`: the mean of the final accuracies over the seeds; None of a trial that was pruned,
    diverged or failed.

    `rounds`: those of its first run. `reason`: which run has failed, and why; None if none has.
    """

    status: str
    accuracy: float | None
    rounds: int
    reason: str | None = None

    def __str__(self) -> str:
        if self.accuracy is not None:
            return f"final accuracy {100 * self.accuracy:.2f} %"
        return (
            f"{self.status}, {self.reason}"
            if self.reason
            else f"{self.status} after round {self.rounds}"
        )


class Rounds:
    """The rounds of a trial's first run, which decide whether `trial` (Optuna's) is pruned: on its
    accuracy as of now, smoothed as the final one is."""

    def __init__(self, trial: Any) -> None:
        self._trial, self.pruned = trial, False
        self._accuracies: list[float | None] = []

    @property
    def seen(self) -> int:
        return len(self._accuracies)

    def see(self, round: int, accuracy: float | None) -> str | None:
        """The test accuracy after a round (None: not measured). Returns why the run is to end
        there, if it is."""
        if round <= self.seen:  # a killed run repeats those since its checkpoint
            return None
        self._accuracies.append(accuracy)
        smoothed = mean_of_last(self._accuracies)
        if smoothed is not None and accuracy is not None:
            self._trial.report(smoothed, round)
            self.pruned = self.pruned or self._trial.should_prune()
        return "pruned" if self.pruned else None


def run_trial(plans: Sequence[Plan], trial: Any) -> Result:
    """Run `plans`, one for each seed, to the first that fails. Raises what stops a search: what
    refuses a run, or the user."""
    first, rounds = plans[0], Rounds(trial)
    earlier = outcome_on_file(first)
    if not (first.settings.overwrite or changed_since(earlier.summary, first.config)):
        with suppress(DamagedError):  # of which the run itself tells
            accuracies = (
                reading.Rounds.of(read_metrics(first.folder)).columns["test_accuracy"].tolist()
            )
            for round, accuracy in enumerate(accuracies, 1):
                rounds.see(round, None if math.isnan(accuracy) else accuracy)
        if rounds.pruned and not earlier.final:
            return Result("pruned", None, rounds.seen)
        rounds.pruned = False
    accuracies = []
    for plan in plans:
        outcome = _run(plan, rounds if plan is first else None)
        if outcome.status == "failed":
            return Result(
                "failed", None, rounds.seen, f"{plan.folder}: {outcome.summary.get('error')}"
            )
        if rounds.pruned:
            return Result("pruned", None, rounds.seen)
        accuracy = outcome.summary.get("smoothed_accuracy")
        if outcome.status == "diverged" or accuracy is None:
            return Result("diverged", None, rounds.seen)
        accuracies.append(accuracy)
    return Result("done", float(np.mean(accuracies)), rounds.seen)


def _run(plan: Plan, rounds: Rounds | None) -> Outcome:
    attempts = Attempts(
        on_round=None if rounds is None else lambda _, r: rounds.see(r.round, r.test_accuracy)
    )
    outcome = attempts.run(plan)
    attempts.run_held(attempts.run_in_turn)
    STOP.raise_if_asked()
    if attempts.refused:
        raise attempts.refused[0]
    return attempts.ended.get(plan.folder, outcome)


def search(
    space: Space,
    settings: Settings,
    plans_of: Callable[[Mapping[str, Any]], Sequence[Plan]],
    num_rounds: int,
    flags: Sequence[str] = (),
) -> int:
    """Run all trials and print the best ones. Returns the exit code: 1 if a trial has failed, else
    4 if none has ended with an accuracy. `num_rounds`: of a run. `flags`: what comes before the
    words of a run, such as `--config-dir`.

    Trials are asked for in turn from a seeded sampler, so that the same command makes the same
    ones.
    """
    sampler = TPESampler(seed=settings.search_seed, n_startup_trials=settings.startup)
    study = optuna.create_study(
        direction="maximize", sampler=sampler, pruner=_pruner(settings, num_rounds)
    )
    results: list[tuple[dict[str, Any], Result]] = []
    for number in range(settings.trials):
        trial = study.ask(dict(space.axes))
        shown = " ".join(f"{key}={value}" for key, value in trial.params.items())
        print_line(f"trial {number + 1} of {settings.trials}: {shown}")
        result = run_trial(plans_of(trial.params), trial)
        results.append((trial.params, result))
        print_line(f"trial {number + 1}: {result}")
        states = {"done": TrialState.COMPLETE, "failed": TrialState.FAIL}
        study.tell(trial, result.accuracy, states.get(result.status, TrialState.PRUNED))
    return _close(space, results, flags)


def _pruner(settings: Settings, num_rounds: int) -> BasePruner:
    if settings.pruner == "none":
        return NopPruner()
    warmup = num_rounds // 4 if settings.warmup is None else settings.warmup
    return MedianPruner(
        n_startup_trials=settings.startup, n_warmup_steps=warmup + 1
    )  # the first step that it may end


def _close(
    space: Space, results: Sequence[tuple[dict[str, Any], Result]], flags: Sequence[str]
) -> int:
    ended = sorted(
        ((r.accuracy, params) for params, r in results if r.accuracy is not None),
        key=lambda one: -one[0],
    )
    pruned, failed = (
        sum(r.status == status for _, r in results) for status in ("pruned", "failed")
    )
    title = f"{len(ended)} of {len(results)} trials to the end, {pruned} pruned, {failed} failed"
    table = Table(title=title, title_justify="left")
    table.add_column("final %", justify="right")
    for key in space.axes:
        table.add_column(escape(key))
    for accuracy, params in ended[:10]:
        table.add_row(f"{100 * accuracy:.2f}", *(escape(str(params[key])) for key in space.axes))
    CONSOLE.print(table)
    if failed:
        print_line("the same command goes on with the runs that have failed")
    told = "no trial has ended with an accuracy"
    if ended:
        told = f"the best one: {command('fedsim', '-m', *flags, *space.words_of(ended[0][1]))}"
    print_line(told)
    return EXIT_CODES["failed" if failed else "done" if ended else "diverged"]
