"""The command line of an experiment: composes its jobs, checks them, and runs them.

A process enters in `fedsim.run`, and `fedsim.commands.dispatch` calls `run`. `fedsim race` and
`fedsim tune` call `run_jobs`. Jobs run from the plans that were checked. Neither `--cfg job` nor
jobs that have ended import PyTorch.
"""

import sys
from collections.abc import Callable, Iterable, Sequence

from fedsim.config.command_line import read_command_line
from fedsim.config.compose import config_page, outlined, search_path
from fedsim.config.job import ComposedJob
from fedsim.config.plan import Plan
from fedsim.config.yaml_files import head_of, read_text
from fedsim.core.errors import FedsimError
from fedsim.jobs.narration import Narration
from fedsim.jobs.prepare import check_all, compose_words, prepare
from fedsim.jobs.progress import Progress
from fedsim.jobs.sweep import Attempts
from fedsim.running.exits import EXIT_CODES, print_error
from fedsim.running.process import STOP

SEVERITY = ("done", "reached", "diverged", "data", "config", "failed", "preempted", "interrupted")
"""Statuses of outcomes, the worst one last. The worst one of a sweep decides its exit code."""
Batches = Callable[[Sequence[Plan], Attempts], Iterable[Sequence[Plan]]]
"""A generator function that decides the order of jobs.

It gets all plans, and yields those that run next. After these have ended, `run_jobs` takes the next
batch, for which the function may look at their outcomes in the `Attempts`.
"""


def run(argv: Sequence[str]) -> int:
    """Run the jobs of the command line, or print their config (`--cfg`), and return the exit code.

    Raises `FedsimError` before any work is done.
    """
    args = read_command_line(argv)
    jobs = compose_words(args)
    if not args.cfg:
        return run_jobs(jobs, argv)
    if args.config_name == "config" and args.config_path is None:
        outlined(jobs)  # raises what the same command without --cfg raises
    with search_path(args.config_dir, args.config_path):
        page = config_page(args.overrides, config_name=args.config_name, resolve=args.resolve)
    print(page, end="", flush=True)
    return 0


def all_at_once(plans: Sequence[Plan], attempts: Attempts) -> Iterable[Sequence[Plan]]:
    """Yield all plans as one batch."""
    yield plans


def run_jobs(
    jobs: Sequence[ComposedJob], argv: Sequence[str] = (), batches: Batches = all_at_once
) -> int:
    """Check all jobs, run them in `batches`, and close a sweep with one table.

    `argv` are the words of the command that resumes them. Returns the exit code. Raises
    `FedsimError`: before any work is done, or if the only job failed before its first round.
    """
    # 1. Check everything.
    plans, overwriting = prepare(jobs)
    launcher = check_all(jobs, plans)
    progress = Progress(plans)
    words = [job.overrides for job in jobs]
    screen = Narration(plans, words, argv, progress, overwriting)
    attempts = Attempts(progress, screen, overwriting=overwriting)

    # 2. Run the jobs.
    def run_batch(batch: Sequence[Plan]) -> None:
        if launcher is None:
            attempts.run_in_turn(batch)
        else:
            launcher.run(attempts, batch)

    screen.begin(cost_of(jobs))
    with STOP.working(), overwriting.noted(), screen.with_resume_hint():
        for batch in batches(plans, attempts):
            run_batch(batch)
            attempts.run_held(run_batch)

    # 3. Print each error once, and the results. `fedsim race` may have left out jobs, and two jobs
    #    may mean the same run.
    if attempts.errors and len(plans) == 1:
        raise attempts.errors[0]
    errors_by_text: dict[str, list[FedsimError]] = {}
    for error in attempts.errors:
        errors_by_text.setdefault(str(error), []).append(error)
    for equal_errors in errors_by_text.values():
        print_error(equal_errors[0], after="")
        print(f"    concerns {len(equal_errors)} of {len(plans)} jobs", file=sys.stderr)
    screen.end(attempts.ended)
    worst = max((outcome.status for outcome in attempts.ended.values()), key=SEVERITY.index)
    return EXIT_CODES[worst]


def cost_of(jobs: Sequence[ComposedJob]) -> str:
    """Return the costs that the jobs' presets declare; empty if they declare none."""
    costs = []
    for name in dict.fromkeys(job.choices.get("preset") for job in jobs):
        if name:
            _, head = head_of(read_text(jobs[0].files.read("preset", name).path))
            if "cost" in head:
                costs.append(f"cost of preset={name}: {head['cost']}")
    return "; ".join(costs)
