"""Prepares the jobs of a command line: composes and checks them, and returns their launcher.

A job is composed by Hydra (`ComposedJob`); its plan is the checked description of its run. A
launcher says where jobs run: None in turn, `Lanes` together in this process, a `TaskLauncher` in
other processes. `fedsim.jobs.cli` and the commands call `compose_words`, `prepare` and `check_all`
in this order. Before any work starts, they have checked that data can be read or fetched, and that
there is room for results.
"""

import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsim.config.build import instantiate
from fedsim.config.compose import check_rest, compose_jobs, outlined, search_path
from fedsim.config.job import ComposedJob
from fedsim.config.plan import Plan
from fedsim.core.disk import space_problem
from fedsim.core.errors import Problem, check
from fedsim.jobs.overwriting import Overwriting
from fedsim.jobs.sweep import Lanes, plans_to_run
from fedsim.results.files import refuse_links

if TYPE_CHECKING:
    from fedsim.jobs.tasks import TaskLauncher

# Roughly what a run's files need, without models.
BYTES_OF_RUN = 2_000_000  # its division, config and summary
BYTES_OF_ROUND = 1_000  # a line of metrics.jsonl
BYTES_OF_ID = 8  # a client's id in such a line


def compose_words(args: Namespace) -> list[ComposedJob]:
    """Return the jobs of a command line.

    `args` come from `fedsim.config.command_line.read_command_line`. Raises `ConfigError`.
    """
    with search_path(args.config_dir, args.config_path):
        return compose_jobs(args.overrides, multirun=args.multirun, config_name=args.config_name)


def prepare(jobs: Sequence[ComposedJob]) -> tuple[list[Plan], Overwriting]:
    """Return the plans of jobs, and the state of their overwriting (`overwrite=true`).

    Raises `ConfigError` with all mistakes that can be found without PyTorch.
    """
    plans = outlined(jobs)
    overwriting = Overwriting(plans)
    return list(map(overwriting.without_replaced, plans)), overwriting


def check_all(
    jobs: Sequence[ComposedJob], plans: Sequence[Plan], *, with_files: bool = True
) -> "Lanes | TaskLauncher | None":
    """Check everything else that can be checked before work starts, and return the launcher.

    `room` says whether to check the data and the room for results, too. Jobs that have
    ended are not run, so they are not checked, which would import PyTorch. Raises `FedsimError`,
    with all problems of all other jobs if their configs are wrong.
    """
    node = jobs[0].launcher
    plans_left = plans_to_run(plans)
    folders_left = {plan.folder for plan in plans_left}
    jobs_left = []
    for job, plan in zip(jobs, plans, strict=True):
        if plan.folder in folders_left:
            jobs_left.append(job)
    check_rest(jobs_left, plans_left)
    launcher = build_launcher(node)
    # Importing the module takes PyTorch. With several ranks, `dispatch` has imported it.
    ranks = sys.modules.get("fedsim.running.ranks")
    if ranks is not None:
        ranks.RANKS.agree(plans, node)
    if with_files:
        check_files(plans)
    return launcher


def build_launcher(node: Mapping[str, Any]) -> "Lanes | TaskLauncher | None":
    """Return the launcher that `hydra.launcher` describes; None for `basic`, Hydra's own.

    Raises `ConfigError`.
    """
    module_name, _, name = str(node.get("_target_")).rpartition(".")
    if not module_name.startswith("fedsim."):
        return None
    module = import_module(module_name)
    cls = getattr(module, name)
    if hasattr(cls, "cluster"):  # a launcher of submitit, whose parameters have any names
        launcher: TaskLauncher = module.build_submitit_launcher(node, cls)
        return launcher
    return instantiate(node, cls, "hydra.launcher")


def check_files(plans: Iterable[Plan]) -> None:
    """Check that folders for results can be written and have room for the runs still to come.

    Also checks that source files of their data can be read, or fetched. Raises `ConfigError`.
    """
    plans = plans_to_run(plans)
    for plan in plans:
        refuse_links(plan.folder)
    check(*output_problems(plans), *source_problems(plans))


def output_problems(plans: Iterable[Plan]) -> list[Problem]:
    """Return the problems of the folders for results: no room, or not writable."""
    needs: Counter[Path] = Counter()
    for plan in plans:
        needs[plan.settings.output_dir] += _bytes_of(plan)
    problems = []
    for folder, need in needs.items():
        problem = space_problem("output_dir", folder, need)
        if problem is not None:
            problems.append(problem)
    return problems


def _bytes_of(plan: Plan) -> int:
    """Return roughly the size of a run's files, without models."""
    settings = plan.settings
    cohort_size = min(settings.cohort_size, settings.num_clients)
    return BYTES_OF_RUN + settings.num_rounds * (BYTES_OF_ROUND + BYTES_OF_ID * cohort_size)


def source_problems(plans: Iterable[Plan]) -> list[Problem]:
    """Return the problems of source files that can be found without reading them."""
    problems = dict.fromkeys(map(_source_problem, by_source(plans)))  # each once
    return [problem for problem in problems if problem is not None]


def by_source(plans: Iterable[Plan]) -> list[Plan]:
    """Return one plan for each data set and `data_dir`."""
    plans_by_source = {plan.data_source: plan for plan in plans}
    return list(plans_by_source.values())


def _source_problem(plan: Plan) -> Problem | None:
    """Return the problem of a job's source files, or None."""
    from fedsim.data.base import Dataset

    node = plan.config["dataset"]
    # A data set of a user's class may raise anything. The job itself reports such errors.
    with suppress(Exception):
        dataset = instantiate(node, Dataset, "dataset", plan.data_dir, plan.cache_dir)
        return dataset.source_problem()
    return None
