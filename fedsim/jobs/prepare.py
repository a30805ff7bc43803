"""Prepares the jobs of a command line: composes and checks them, and returns their launcher.

`fedsim.jobs.cli` and the commands call three functions in this order, before any work starts:

1. `compose_words` lets Hydra compose the jobs (`ComposedJob`) of the command line.
2. `prepare` makes the plan of each job, which is the checked description of its run.
3. `check_all` checks everything else, and returns the launcher. A launcher says where jobs run:
   `Lanes` together in this process, a `TaskLauncher` in other processes. Without a launcher, jobs
   run one after another.
"""

import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsim.config.build import instantiate
from fedsim.config.compose import check_components, compose_jobs, outlined, search_path
from fedsim.config.hydra_node import CHECKED_LAUNCHERS, SUBMITIT_LAUNCHERS
from fedsim.config.job import ComposedJob
from fedsim.config.plan import Plan
from fedsim.core.disk import space_problem
from fedsim.core.errors import Problem, check
from fedsim.jobs.overwriting import Overwriting
from fedsim.jobs.sweep import Lanes, plans_to_run
from fedsim.results.files import refuse_links

if TYPE_CHECKING:
    from fedsim.jobs.tasks import TaskLauncher

BYTES_OF_RUN = 2_000_000
"""Rough size of a run's division, config and summary."""
BYTES_OF_ROUND = 1_000
"""Rough size of a line of metrics.jsonl without the ids of clients."""
BYTES_OF_ID = 8
"""Rough size of a client's id in such a line."""


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
    return [overwriting.without_replaced(plan) for plan in plans], overwriting


def check_all(
    jobs: Sequence[ComposedJob], plans: Sequence[Plan], *, with_files: bool = True
) -> "Lanes | TaskLauncher | None":
    """Check the components of all jobs, their launcher and their files. Return the launcher.

    Files are checked only `with_files` (`check_files`). Components of jobs that have ended are not
    checked, because their check imports PyTorch. Raises `FedsimError`. If components are wrong, it
    is a `ConfigError` with all problems of all jobs.
    """
    node = jobs[0].launcher
    plans_left = plans_to_run(plans)
    folders_left = {plan.folder for plan in plans_left}
    plans_of_jobs = zip(jobs, plans, strict=True)
    jobs_left = [job for job, plan in plans_of_jobs if plan.folder in folders_left]
    check_components(jobs_left, plans_left)
    launcher = build_launcher(node)
    # `dispatch` has imported this module if torchrun has started several ranks. It is not imported
    # here, because that takes as long as importing PyTorch.
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
    target = node.get("_target_")
    if target in SUBMITIT_LAUNCHERS:
        from fedsim.jobs.launchers import build_submitit_launcher  # imports joblib

        return build_submitit_launcher(node)
    if target not in CHECKED_LAUNCHERS:
        return None
    launcher: Any = instantiate(node, object, "hydra.launcher")
    return launcher


def check_files(plans: Iterable[Plan]) -> None:
    """Check that the results of runs still to come can be written, and that there is room for them.

    Also checks that source files of their data can be read or fetched. Raises `ConfigError`.
    """
    plans = plans_to_run(plans)
    for plan in plans:
        refuse_links(plan.folder)
    check(*output_problems(plans), *source_problems(plans))


def output_problems(plans: Iterable[Plan]) -> list[Problem]:
    """Return the problems of the folders for results: not writable, or too little room."""
    num_bytes: Counter[Path] = Counter()
    for plan in plans:
        num_bytes[plan.settings.output_dir] += _bytes_of(plan)
    problems = []
    for folder, needed in num_bytes.items():
        problem = space_problem("output_dir", folder, needed)
        if problem is not None:
            problems.append(problem)
    return problems


def _bytes_of(plan: Plan) -> int:
    """Return roughly the size of a run's files, without models."""
    settings = plan.settings
    cohort_size = min(settings.cohort_size, settings.num_clients)
    return BYTES_OF_RUN + settings.num_rounds * (BYTES_OF_ROUND + BYTES_OF_ID * cohort_size)


def source_problems(plans: Iterable[Plan]) -> list[Problem]:
    """Return the problems of the plans' source files that can be found without reading them."""
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
