"""Run what the first word of the command line names: a command, or an experiment.

The module of a command is imported when the command is called, so that help and lists come at once.
"""

import shlex
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from io import TextIOWrapper
from typing import Any

import fedsim
from fedsim.commands.catalogue import Catalogue
from fedsim.commands.layout import entries
from fedsim.core.errors import FedsimError
from fedsim.core.text import nearest
from fedsim.running.exits import exit_code
from fedsim.running.process import world


class MistakeError(FedsimError):
    """A command that cannot be run as it was typed."""

    exit_code = 2


COMMANDS = {
    "list": (
        "fedsim.commands.listing",
        "what can be chosen: selectors, presets, data sets, models, ...",
    ),
    "show": (
        "fedsim.commands.show",
        "the jobs that a command would run, and what is already there",
    ),
    "search": ("fedsim.search.command", "hyper-parameters found by Optuna, over ordinary runs"),
    "race": ("fedsim.search.race", "a sweep in which methods that are beaten get no more seeds"),
    "tune": ("fedsim.search.tune", "each selector in the search space that its file declares"),
    "benchmark": (
        "fedsim.benchmark.study",
        "tunes and runs methods in settings of the selection benchmark",
    ),
    "submit": ("fedsim.benchmark.submit", "checks runs of the selection benchmark, to submit them"),
    "report": ("fedsim.report.command", "tables, figures and a page of finished runs"),
    "cite": ("fedsim.commands.cite", "BibTeX entries of the papers behind choices"),
    "replay": (
        "fedsim.commands.replay",
        "what many selectors choose on one run's models, and how well",
    ),
    "verify": ("fedsim.commands.verify", "runs finished runs again: is every round equal?"),
    "doctor": ("fedsim.commands.doctor", "whether everything that a run needs is here"),
    "flower": ("fedsim.flower.command", "writes an app for Flower, which runs on real nodes"),
    "trace": ("fedsim.commands.trace", "FedScale's traces of devices as a table for system=trace"),
    "sync": ("fedsim.commands.sync", "sends runs to Weights & Biases that are not there yet"),
}
"""The module of each command, and what it does in a line.

The module has `run(words) -> exit code`. If it has `arguments(parser)`, too, the parser reads the
words and the module has `run(options)`.
"""
HELP_WORDS = {"--help", "-h"}
RUN_WORDS = ("run", "train", "start")
"""Words that users type for what needs no command."""


HELP = """\
fedsim {version} compares client selection methods of federated learning: which
clients take part in a round, what accuracy that buys, and at what cost.

Usage
  fedsim [key=value ...]  run the experiment that these values describe

Try
  fedsim                                     the default experiment (seconds)
  fedsim -m selector=random,gpfl seed=0,1,2  a sweep: six runs, one table
  fedsim list selectors                      all methods, with source and cost
  fedsim report default                      tables and figures of the runs

Commands: `fedsim COMMAND --help` explains one
{commands}

Groups: choose by GROUP=CHOICE; `fedsim list GROUP` has the choices
{groups}

Options
  -m, --multirun    sweep over all combinations of values with commas
  --config-dir DIR  a folder with choices of your own, DIR/selector/mine.yaml
  --cfg job         print the config that the values make
Docs: README.md and docs/ of the repository; conf/ explains every value"""


def help_page() -> str:
    """Return the page of `fedsim --help`."""
    catalogue = Catalogue()
    groups = [(name, catalogue.about(name)) for name in catalogue.names if "/" not in name]
    commands = [(name, about) for name, (_, about) in COMMANDS.items()]
    version = fedsim.__version__
    return HELP.format(version=version, commands=entries(commands), groups=entries(groups))


def main() -> None:
    """Do what the process's command line says, and exit with its code. `fedsim.run` calls this."""
    argv = sys.argv[1:]
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for characters that its encoding lacks
    if world().rank and asks(argv):  # only the first process of torchrun answers
        sys.exit(0)
    code = answer(argv)
    sys.exit(run_experiment(argv) if code is None else code)


def asks(argv: Sequence[str]) -> bool:
    """Return whether the command line is a command, help or the version, and no experiment."""
    if argv and argv[0] in (*COMMANDS, "help"):
        return True
    return not {*HELP_WORDS, "--version"}.isdisjoint(argv)


def answer(argv: Sequence[str]) -> int | None:
    """Run a command, or print help or the version, and return the exit code.

    Returns None if the command line is an experiment.
    """
    if not asks(argv):
        return None
    first, *words = argv
    program = f"fedsim {first}" if first in COMMANDS else "fedsim"
    return exit_code(partial(_answer, first, words), program)


def _answer(first: str, words: list[str]) -> int:
    """Run the command `first` with `words`, or print help or the version. See `answer`."""
    are_names = all("=" not in word and not word.startswith("-") for word in words)
    if first == "show" and words and are_names:
        first = "list"  # names of choices describe no jobs
    code = 0
    if first in COMMANDS:
        code = _run_command(first, words)
    elif {"help", *HELP_WORDS}.isdisjoint([first, *words]):
        print(f"fedsim {fedsim.__version__}")
    else:
        print(help_page())
    print(end="", flush=True)  # raises here if the output cannot be written
    return code


def _run_command(name: str, words: list[str]) -> int:
    """Import the module of a command, and call its `run` (`COMMANDS`)."""
    module_name, about = COMMANDS[name]
    module: Any = import_module(module_name)
    run: Callable[[Any], int] = module.run
    if not hasattr(module, "arguments"):
        return run(words)
    parser = ArgumentParser(f"fedsim {name}", description=f"{about[0].upper()}{about[1:]}.")
    module.arguments(parser)
    return run(parser.parse_intermixed_args(words))


def run_experiment(argv: Sequence[str]) -> Any:
    """Run the jobs that the command line describes, and return the process's exit code."""
    from fedsim.jobs.cli import run

    place = world()
    try:
        work = partial(run, argv) if place.size == 1 else partial(_run_over_ranks, argv)
        code: Any = exit_code(work)
    except SystemExit as end:  # raised by argparse
        code = end.code
    first = argv[0] if argv else ""
    is_word = first and "=" not in first and not first.startswith(("-", "~", "+"))
    if code == MistakeError.exit_code and is_word and place.rank == 0:
        command = "" if first in RUN_WORDS else nearest(first, COMMANDS)
        if command is not None:
            words = [word for word in ("fedsim", command, *argv[1:]) if word]
            print(f"  did you mean `{shlex.join(words)}`?", file=sys.stderr)
    return code


def _run_over_ranks(argv: Sequence[str]) -> int:
    from fedsim.config.command_line import read_command_line
    from fedsim.config.compose import check_jobs
    from fedsim.jobs.cli import run
    from fedsim.jobs.prepare import compose_words
    from fedsim.running.ranks import run_over_ranks

    return run_over_ranks(
        world(),
        lambda: exit_code(lambda: run(argv)),
        lambda: check_jobs(compose_words(read_command_line(argv))),
    )
