"""Can data be read or fetched, and is there room for the results? Asked before any work starts."""

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from fedsim.config.build import instantiate
from fedsim.config.plan import Plan
from fedsim.data.base import Dataset
from fedsim.disk import room_problem
from fedsim.errors import ConfigError, Problem
from fedsim.running.outcome import outcome_on_file

BYTES_OF_RUN, BYTES_OF_ROUND, BYTES_OF_ID = 2_000_000, 1_000, 8
"""Roughly what a run's files need: division, config and summary; a line of metrics.jsonl; an id of a client in it."""


def require_room(plans: Iterable[Plan]) -> None:
    """Raise `ConfigError` unless the folders for results can be written and have room for the runs still to come, and
    source files of their data can be read, or fetched where they are missing.

    The need for results is estimated without models, whose size is not known yet.
    """
    to_come = [p for p in plans if not outcome_on_file(p).final or p.settings.overwrite]
    if problems := [*output_problems(to_come), *source_problems(to_come)]:
        raise ConfigError(problems)


def output_problems(to_come: Iterable[Plan]) -> list[Problem]:
    """The problems of folders for the results of runs that are to come."""
    needs: dict[Path, int] = {}
    for plan in to_come:
        needs[plan.settings.output_dir] = needs.get(plan.settings.output_dir, 0) + _bytes_of(plan)
    return [problem for folder, need in needs.items() if (problem := room_problem("output_dir", folder, need))]


def source_problems(to_come: Iterable[Plan]) -> list[Problem]:
    """The problems of the source files of their data that show before those are read."""
    return list(dict.fromkeys(problem for plan in by_source(to_come) if (problem := _source_problem(plan))))


def by_source(plans: Iterable[Plan]) -> list[Plan]:
    """One plan for each data set and `data_dir`."""
    keys = {json.dumps([p.config["dataset"], str(p.data_dir)], sort_keys=True, default=str): p for p in plans}
    return list(keys.values())


def _source_problem(plan: Plan) -> Problem | None:
    with suppress(Exception):  # whatever else is wrong with a data set, or a user's class of one, its own job tells
        return instantiate(plan.config["dataset"], Dataset, "dataset", plan.data_dir, plan.cache_dir).source_problem()
    return None


def _bytes_of(plan: Plan) -> int:
    settings = plan.settings
    per_round = BYTES_OF_ROUND + BYTES_OF_ID * min(settings.cohort_size, settings.num_clients)
    return BYTES_OF_RUN + settings.num_rounds * per_round
