"""`fedsim search`: the command line of a search by Optuna (`fedsim.search.study`)."""

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from fedsim.config.build import construct
from fedsim.config.command_line import place_flags, read_words
from fedsim.config.compose import check_jobs, search_path
from fedsim.config.plan import Plan
from fedsim.config.words import parse
from fedsim.core.configs import SEED_KEYS
from fedsim.core.errors import ConfigError, Problem, check, rule
from fedsim.jobs.prepare import check_files, compose_words
from fedsim.running.process import STOP
from fedsim.search.own_keys import (
    overwrite_problem,
    stop_at_problem,
    take_settings,
    with_own_keys,
)


def run(words: Sequence[str]) -> int:
    """Search as the command line says. Raises `FedsimError` before any work is done."""
    _, args = read_words(_parser(), words)
    try:
        from fedsim.search.study import OWN_KEYS, SearchSettings, mistake_in, search, space_of
    except ModuleNotFoundError as error:
        fault = f"needs {error.name}, which is not installed"
        remedy = "pip install 'fedsim-selection[search]'"
        raise ConfigError([Problem("search", ..., fault, remedy)]) from error
    # 1. Read the settings of the search, and the search space.
    with search_path(args.config_dir, args.config_path):
        check(*map(mistake_in, parse(args.overrides)))
        settings = construct(SearchSettings, take_settings(args, OWN_KEYS), "")
        space = space_of(parse(args.overrides))

    def plans_of(params: Mapping[str, Any]) -> list[Plan]:
        """Return the checked plans of the trial with the values `params`, one for each seed."""
        return _plans_of_trial(args, space.words_of(params))

    # 2. Check all corners of the space: trials with each choice and each end of an interval.
    plans: list[Plan] = []
    problems: dict[Problem, None] = {}  # each once, in order
    for corner in space.corners():
        try:
            plans += plans_of(corner)
        except ConfigError as error:
            problems |= dict.fromkeys(error.problems)
    check(*(with_own_keys(problem, OWN_KEYS, "search") for problem in problems))
    check(stop_at_problem(plan.config for plan in plans), overwrite_problem(plans))
    check_files(plans)
    # 3. Search.
    num_rounds = plans[0].settings.num_rounds
    with STOP.working():
        return search(space, settings, plans_of, num_rounds, place_flags(args))


def _plans_of_trial(args: Namespace, words: list[str]) -> list[Plan]:
    """Return the checked plans of one trial, one for each seed.

    `words` are the overrides of the trial. All else is as `args` of the command line say. Raises
    `ConfigError`, also if the plans differ in more than their seeds, as with a preset that is a
    sweep.
    """
    trial_args = Namespace(**vars(args))
    trial_args.overrides = words
    trial_args.multirun = True
    plans = check_jobs(compose_words(trial_args))
    experiments = set()
    for plan in plans:
        config = {key: value for key, value in plan.config.items() if key not in SEED_KEYS}
        experiments.add(repr((sorted(plan.choices.items()), config)))
    preset = plans[0].choices.get("preset", ...)
    fault = "makes each trial a sweep over more than seeds"
    remedy = "give one value, or values to search in, for each key that the preset sweeps over"
    check(rule(len(experiments) == 1, "preset", preset, fault, remedy))
    return plans


def _parser() -> ArgumentParser:
    return ArgumentParser(
        prog="fedsim search",
        usage="fedsim search KEY=VALUES ... [trials=20] [startup=5] [warmup=ROUNDS]\n"
        "                     [pruner=median|none] [search_seed=0]\n"
        "                     [words of a run: key=value ..., --config-dir DIR]",
        description="Searches in everything that is swept over except seeds, of which a trial is "
        "the mean. The value of a trial is the final accuracy, the mean of the last `final_window` "
        "rounds. A trial whose accuracy is below the median of earlier ones at the same round is "
        "pruned (never with pruner=none, in the first 5 trials, `startup`, and in the first "
        "quarter of the rounds, `warmup`): its run is saved, and `fedsim` with its words resumes "
        "it. The same command resumes the search; with trials=40 it adds to what is there.",
        epilog="example: fedsim search 'optimizer.lr=tag(log,interval(0.01,0.3))' "
        "selector=gpfl,random seed=0,1",
        allow_abbrev=False,
    )
