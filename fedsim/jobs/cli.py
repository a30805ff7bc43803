"""The command line of an experiment: composes its jobs, checks them, and runs them.

Jobs run from the plans that were checked. Hydra answers questions (`--cfg job`, `--info`). Neither
questions nor jobs that have ended import PyTorch. A process enters in `fedsim.run`.
"""

import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from io import StringIO

import hydra
from omegaconf import DictConfig

from fedsim.config.choice_files import head_of, read_text
from fedsim.config.compose import implied, outlined, safeguards, search_path
from fedsim.config.overlay import Composed
from fedsim.config.plan import Plan
from fedsim.config.sources import on_search_path
from fedsim.config.words import as_hydra_reads, asks_hydra, for_hydra, long_form, parse, read
from fedsim.core.disk import conf_dir
from fedsim.core.errors import ConfigError, Problem
from fedsim.jobs.narration import Narration, Progress
from fedsim.jobs.prepare import check_all, compose_words, prepare
from fedsim.jobs.sweep import Attempts
from fedsim.running.process import EXIT_CODES, STOP, print_error

SEVERITY = ("done", "diverged", "data", "config", "failed", "preempted", "interrupted")
"""Outcomes, the worst one last: the worst one of a sweep decides its exit code."""
Batches = Callable[[Sequence[Plan], Attempts], Iterable[Sequence[Plan]]]
"""Yields the plans that run next, of all plans. It goes on after these have ended."""


def run(argv: Sequence[str]) -> int:
    """Do what the command line asks for, and return the exit code.

    Raises `FedsimError` before any work is done.
    """
    args = read(argv)
    if args.experimental_rerun:
        fault = "is not supported: it would unpickle a file"
        raise ConfigError([Problem("--experimental-rerun", ..., fault)])
    if not asks_hydra(args):
        return run_jobs(compose_words(args), argv)
    if args.cfg == "job" and args.config_name is None and args.config_path is None:
        outlined(compose_words(args))  # raises what the same command without --cfg raises
    hand_to_hydra(question(args))
    return 0


def question(args: Namespace) -> list[str]:
    """Return the words for Hydra of a command line that asks a question. Raises `ConfigError`."""
    with search_path(args.config_dir, args.config_path):
        args.overrides = long_form(args.overrides, on_search_path())
        if args.shell_completion:
            return for_hydra(args)
        implied_words = implied(args.overrides, args.config_name or "config")  # checks, too
        args.overrides = [as_hydra_reads(override) for override in parse(args.overrides)]
        return for_hydra(args, implied_words if args.cfg else [])


def all_at_once(plans: Sequence[Plan], attempts: Attempts) -> Iterable[Sequence[Plan]]:
    """Yield all plans as one batch."""
    yield plans


def run_jobs(
    jobs: Sequence[Composed], argv: Sequence[str] = (), batches: Batches = all_at_once
) -> int:
    """Check all jobs, run them, and close a sweep with one table.

    `argv` are the words of the command that resumes it.
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
    with STOP.working(), overwriting.noted(), screen.broken_off():
        for batch in batches(plans, attempts):
            run_batch(batch)
            attempts.run_held(run_batch)

    # 3. Print errors and results.
    if attempts.errors and len(plans) == 1:
        raise attempts.errors[0]
    counts = Counter(str(error) for error in attempts.errors)
    for error in {str(error): error for error in attempts.errors}.values():
        print_error(error)
        print(f"    concerns {counts[str(error)]} of {len(plans)} jobs", file=sys.stderr)
    screen.plans = [plan for plan in plans if plan.folder in attempts.ended]
    outcomes = [attempts.ended[plan.folder] for plan in screen.plans]
    screen.end(outcomes)
    worst = max((outcome.status for outcome in outcomes), key=SEVERITY.index)
    return EXIT_CODES[worst]


def cost_of(jobs: Sequence[Composed]) -> str:
    """Return what the jobs' presets say that they take; empty if they say nothing."""
    costs = []
    for name in dict.fromkeys(job.choices.get("preset") for job in jobs):
        if name:
            _, head = head_of(read_text(jobs[0].files.read("preset", name).path))
            if "cost" in head:
                costs.append(f"cost of preset={name}: {head['cost']}")
    return "; ".join(costs)


def hand_to_hydra(words: Sequence[str]) -> None:
    """Let Hydra do what the command line `words` says, with a task that does nothing."""

    def task(config: DictConfig) -> None:
        """Do nothing. Hydra names the job after this function's module."""

    sys.argv = [sys.argv[0], *words]
    page = StringIO()
    application = hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")
    try:
        with safeguards(), redirect_stdout(page):  # Hydra prints a traceback if it cannot print
            application(task)()
    finally:  # Hydra exits after its own help
        print(page.getvalue(), end="", flush=True)
