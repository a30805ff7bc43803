"""The command line of an experiment: composes it, checks it, runs every job. `fedsim.run` is where
a process enters.

Jobs run from the plans that were checked. Hydra answers questions (`--cfg job`, `--info`). Neither
they nor jobs that have ended wait for PyTorch.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from functools import partial
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
Batches = Callable[[Sequence[Plan], Attempts], Iterable[Sequence[Plan]]]


def run(argv: Sequence[str]) -> int:
    """Do what the command line asks for and return the exit code. Raises `FedsimError` before any
    work is done."""
    args = read(argv)
    if args.experimental_rerun:
        raise ConfigError(
            [Problem("--experimental-rerun", ..., "is not supported: it would unpickle a file")]
        )
    if not asks_hydra(args):
        return run_jobs(compose_words(args), argv)
    if args.cfg == "job" and args.config_name is args.config_path is None:
        outlined(compose_words(args))  # it is refused where the same command without it is
    hand_to_hydra(question(args))
    return 0


def question(args: Namespace) -> list[str]:
    """The words for Hydra of a command line that asks it something. Raises `ConfigError`."""
    with search_path(args.config_dir, args.config_path):
        args.overrides = long_form(args.overrides, on_search_path())
        if args.shell_completion:
            return for_hydra(args)
        more = implied(args.overrides, args.config_name or "config")  # which checks, too
        args.overrides = [as_hydra_reads(override) for override in parse(args.overrides)]
        return for_hydra(args, more if args.cfg else [])


def run_jobs(
    jobs: Sequence[Composed], argv: Sequence[str] = (), batches: Batches = lambda plans, _: [plans]
) -> int:
    """Check all jobs, run them, and close a sweep with one table. `argv`: the words with which it
    goes on. `batches`: of the plans of all jobs, those to be run next, asked when the ones before
    have ended, until no more are to be."""
    plans, overwriting = prepare(jobs)
    launcher = check_all(jobs, plans)
    progress = Progress(plans)
    screen = Narration(plans, [job.overrides for job in jobs], argv, progress, overwriting)
    attempts = Attempts(progress, screen, overwriting=overwriting)
    run = attempts.run_in_turn if launcher is None else partial(launcher.run, attempts)
    screen.begin(cost_of(jobs))
    with STOP.working(), overwriting.noted(), screen.broken_off():
        for batch in batches(plans, attempts):
            run(batch)
            attempts.run_held(run)
    if attempts.refused and len(plans) == 1:
        raise attempts.refused[0]
    refusals = [str(error) for error in attempts.refused]
    for text, error in {str(error): error for error in attempts.refused}.items():
        print_error(error)
        print(f"    concerns {refusals.count(text)} of {len(plans)} jobs", file=sys.stderr)
    screen.plans = [plan for plan in plans if plan.folder in attempts.ended]
    outcomes = [attempts.ended[plan.folder] for plan in screen.plans]
    screen.end(outcomes)
    return EXIT_CODES[max((outcome.status for outcome in outcomes), key=SEVERITY.index)]


def cost_of(jobs: Sequence[Composed]) -> str:
    """What the files of the jobs' presets say that these take, empty if nothing."""
    names = dict.fromkeys(job.choices["preset"] for job in jobs if job.choices.get("preset"))
    heads = {name: head_of(read_text(jobs[0].files.read("preset", name).path))[1] for name in names}
    return "; ".join(
        f"cost of preset={name}: {head['cost']}" for name, head in heads.items() if "cost" in head
    )


def hand_to_hydra(words: Sequence[str]) -> None:
    """Let Hydra do what the command line `words` says, with a task that does nothing."""

    def task(config: DictConfig) -> None:
        """After whose module Hydra names the job."""

    sys.argv = [sys.argv[0], *words]
    page = StringIO()
    try:
        with safeguards(), redirect_stdout(page):  # Hydra prints a traceback where it cannot print
            hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(
                task
            )()
    finally:  # it exits after its own help
        print(page.getvalue(), end="", flush=True)
