"""The search: trials proposed by Optuna's tree-structured Parzen estimator, run one after another, and their table."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna
from optuna.pruners import BasePruner, MedianPruner, NopPruner
from optuna.samplers import TPESampler
from optuna.trial import TrialState
from rich.markup import escape
from rich.table import Table

from fedsim.config.plan import Plan
from fedsim.running.exits import EXIT_CODES
from fedsim.search.settings import Settings
from fedsim.search.space import Space
from fedsim.search.trials import Result, run_trial
from fedsim.shell import command
from fedsim.tracking.screen import CONSOLE, tell_line

MOST_SHOWN = 10
"""Trials in the table at the end, the best ones."""


def search(
    space: Space,
    settings: Settings,
    plans_of: Callable[[Mapping[str, Any]], Sequence[Plan]],
    num_rounds: int,
    flags: Sequence[str] = (),
) -> int:
    """Run all trials and print the best ones. Returns the exit code: 1 if a trial has failed, else 4 if none has ended
    with an accuracy.

    `num_rounds`: of a run, of which the first quarter is not pruned unless `settings` says otherwise. `flags`: what
    comes before the words of a run, such as `--config-dir`.

    Trials are asked for in turn from a seeded sampler and told to it in the same order, so that the same command makes
    the same trials; what their folders hold is read, and not run again.
    """
    study = optuna.create_study(
        direction="maximize",
        sampler=TPESampler(seed=settings.search_seed, n_startup_trials=settings.startup),
        pruner=_pruner(settings, num_rounds),
    )
    results: list[tuple[dict[str, Any], Result]] = []
    for number in range(settings.trials):
        trial = study.ask(dict(space.axes))
        params = dict(trial.params)
        tell_line(f"trial {number + 1} of {settings.trials}: {_shown(params)}")
        result = run_trial(plans_of(params), trial)
        results.append((params, result))
        tell_line(f"trial {number + 1}: {_in_words(result)}")
        if result.accuracy is not None:
            study.tell(trial, result.accuracy)
        else:
            study.tell(trial, state=TrialState.FAIL if result.status == "failed" else TrialState.PRUNED)
    return _close(space, results, flags)


def _pruner(settings: Settings, num_rounds: int) -> BasePruner:
    if settings.pruner == "none":
        return NopPruner()
    warmup = num_rounds // 4 if settings.warmup is None else settings.warmup
    return MedianPruner(n_startup_trials=settings.startup, n_warmup_steps=warmup + 1)  # the first step that it may end


def _in_words(result: Result) -> str:
    if result.reason is not None:
        return f"{result.status}, {result.reason}"
    if result.accuracy is None:
        return f"{result.status} after round {result.rounds}"
    return f"final accuracy {100 * result.accuracy:.2f} %"


def _shown(params: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in params.items())


def _close(space: Space, results: Sequence[tuple[dict[str, Any], Result]], flags: Sequence[str]) -> int:
    """The table of the best trials, and the command of the best one."""
    ended = [(params, r.accuracy) for params, r in results if r.accuracy is not None]
    ended.sort(key=lambda one: -one[1])
    pruned, failed = (sum(r.status == status for _, r in results) for status in ("pruned", "failed"))
    title = f"{len(ended)} of {len(results)} trials to the end, {pruned} pruned"
    table = Table(title=f"{title}, {failed} failed" if failed else title, title_justify="left")
    table.add_column("final %", justify="right")
    for key in space.axes:
        table.add_column(escape(key))
    for params, accuracy in ended[:MOST_SHOWN]:
        table.add_row(f"{100 * accuracy:.2f}", *(escape(str(params[key])) for key in space.axes))
    CONSOLE.print(table)
    if failed:
        tell_line("the same command goes on with the runs that have failed")
    if not ended:
        tell_line("no trial has ended with an accuracy")
        return EXIT_CODES["failed" if failed else "diverged"]
    words = space.words_of(ended[0][0])
    tell_line(f"the best one: {command('fedsim', '-m', *flags, *words)}")
    return EXIT_CODES["failed" if failed else "done"]
