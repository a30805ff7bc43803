"""The first word of the command line: a command, or the beginning of an experiment's `key=value`s.

What commands do is imported when one is called, so that help and lists are there at once.
"""

import shlex
import shutil
import sys
import textwrap
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from functools import partial
from importlib import import_module
from io import TextIOWrapper
from typing import Any, cast

import fedsim
from fedsim.commands.catalogue import Catalogue
from fedsim.core.errors import FedsimError
from fedsim.core.text import nearest
from fedsim.running.process import World, exit_code, world


class MistakeError(FedsimError):
    """A command that cannot be done as it was typed."""

    exit_code = 2


WIDTH = 80
"""Characters a line where the output is no terminal, and at most 20 more than that on one."""


def wrap(text: str, indent: int = 0, hanging: int | None = None) -> str:
    """`text` in lines that begin with `indent` spaces, those from the second on with `hanging`."""
    return textwrap.fill(
        text,
        min(shutil.get_terminal_size((WIDTH, 24)).columns, WIDTH + 20),
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent if hanging is None else hanging),
        break_long_words=False,
        break_on_hyphens=False,
    )


def entry(name: str, text: str, indent: int, column: int) -> str:
    """`name`, and beginning at `column` the `text`; on a line of its own where the name is too
    long."""
    head = " " * indent + name
    if not text:
        return head
    body = wrap(text, column)
    return head.ljust(column) + body[column:] if len(head) + 2 <= column else f"{head}\n{body}"


def entries(rows: Iterable[tuple[str, str]], indent: int = 2, widest: int = 26) -> str:
    """One `entry` a row, all texts at one column, which is at most `widest`."""
    rows = list(rows)
    column = min(max((len(name) for name, _ in rows), default=0) + indent + 2, widest)
    return "\n".join(entry(name, text, indent, column) for name, text in rows)


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
    "report": ("fedsim.report.command", "tables, figures and a page of finished runs"),
    "replay": (
        "fedsim.commands.replay",
        "what many selectors choose on one run's models, and how well",
    ),
    "verify": ("fedsim.commands.verify", "runs finished runs again: is every round equal?"),
    "doctor": ("fedsim.commands.doctor", "whether everything that a run needs is here"),
    "cite": ("fedsim.commands.cite", "BibTeX entries of the papers behind choices"),
    "sync": ("fedsim.commands.sync", "sends runs to Weights & Biases that are not there yet"),
}
"""Each with its module, and what it does in a line. The module has `run(words) -> exit code`, or
with `arguments(parser)`, which are then read, `run(options)`."""


HELP = """\
fedsim {version} compares client selection methods of federated learning: which
clients take part in a round, what accuracy that buys, and at what cost.

Usage
  fedsim [key=value ...]  run the experiment that these values describe
  fedsim COMMAND ...      one of the commands below (fedsim COMMAND --help)

Try
  fedsim                                     the default experiment (seconds)
  fedsim -m selector=random,gpfl seed=0,1,2  a sweep: six runs, one table
  fedsim list selectors                      all methods, with source and cost
  fedsim show preset=gpfl_table2_fmnist      what a paper's table would run
  fedsim report default                      tables and figures of the runs

Commands
{commands}

Groups: choose by GROUP=CHOICE; `fedsim list GROUP` has the choices
{groups}

Options
  -m, --multirun    sweep over all combinations of values with commas
  --config-dir DIR  a folder with choices of your own, DIR/selector/mine.yaml
  --cfg job         print the config that the values make
  --version         print the version of fedsim

Docs: README.md and docs/ of the repository; conf/ explains every value"""


def help_page() -> str:
    catalogue = Catalogue()
    groups = entries((name, catalogue.about(name)) for name in catalogue.names if "/" not in name)
    commands = entries((name, about) for name, (_, about) in COMMANDS.items())
    return HELP.format(version=fedsim.__version__, commands=commands, groups=groups)


def main() -> None:
    argv = sys.argv[1:]
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # characters that it does not take
    if world().rank and asks(argv):  # of several processes of torchrun, the first answers
        sys.exit(0)
    code = answer(argv)
    sys.exit(run_experiment(argv) if code is None else code)


def asks(argv: Sequence[str]) -> bool:
    """Whether it is a command, help or the version, and no experiment's."""
    return bool(argv and argv[0] in (*COMMANDS, "help")) or not {
        "--help",
        "-h",
        "--version",
    }.isdisjoint(argv)


def answer(argv: Sequence[str]) -> int | None:
    """Do what the command line asks for if it is a command, help or the version, and return the
    exit code; None if it is an experiment's."""
    if not asks(argv):
        return None
    return exit_code(
        partial(_answer, *argv), f"fedsim {argv[0]}" if argv[0] in COMMANDS else "fedsim"
    )


def _answer(first: str, *rest: str) -> int:
    code = 0
    if first == "show" and rest and not any("=" in word or word.startswith("-") for word in rest):
        first = "list"  # words alone name parts, no jobs
    if first in COMMANDS:
        module_name, about = COMMANDS[first]
        module, words = import_module(module_name), cast(Any, rest)
        if hasattr(module, "arguments"):
            parser = ArgumentParser(
                prog=f"fedsim {first}", description=f"{about[0].upper()}{about[1:]}."
            )
            module.arguments(parser)
            words = parser.parse_args(rest)
        code = module.run(words)
    else:
        print(
            help_page()
            if {"help", "--help", "-h"} & {first, *rest}
            else f"fedsim {fedsim.__version__}"
        )
    print(end="", flush=True)  # here, where output that cannot be written is told
    return code


RUN = ("run", "train", "start")
"""Words for what has no command."""


def run_experiment(argv: Sequence[str]) -> Any:
    """Run the jobs that the command line describes, and return what the process is to exit with."""
    from fedsim.jobs.cli import run

    place = world()
    try:
        code: Any = exit_code(
            partial(run, argv) if place.size == 1 else partial(_run_over_ranks, place, argv)
        )
    except SystemExit as end:  # of argparse, or of Hydra
        code = end.code
    first = argv[0] if argv and "=" not in argv[0] and not argv[0].startswith("-") else ""
    near = "" if first in RUN else nearest(first, COMMANDS)
    if code == MistakeError.exit_code and first and near is not None and not place.rank:
        print(
            f"  did you mean `{shlex.join(filter(None, ['fedsim', near, *argv[1:]]))}`?",
            file=sys.stderr,
        )
    return code


def _run_over_ranks(place: World, argv: Sequence[str]) -> int:
    from fedsim.config.command_line import read_command_line
    from fedsim.config.compose import check_jobs
    from fedsim.jobs.cli import run
    from fedsim.jobs.prepare import compose_words
    from fedsim.running.ranks import run_over_ranks

    return run_over_ranks(
        place,
        lambda: exit_code(lambda: run(argv)),
        lambda: check_jobs(compose_words(read_command_line(argv))),
    )
