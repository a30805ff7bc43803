"""The first word of the command line: a command, or the beginning of an experiment's `key=value`s.

What commands do is imported when one is called, so that help and lists are there at once.
"""

import shlex
import shutil
import sys
import textwrap
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import fedsim
from fedsim.commands.catalogue import Catalogue
from fedsim.core.errors import nearest
from fedsim.running.process import World, exit_code, world

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
    """`name`, and beginning at `column` the `text`; on a line of its own where the name is too long."""
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


@dataclass(frozen=True)
class Command:
    """What a command does in a line, and its `module`, with `arguments(parser)` and `run(options) -> exit code`.

    `words`: the module reads the rest of the command line itself, in `run(words) -> exit code`.
    """

    module: str
    about: str
    words: bool = False


COMMANDS = {
    "list": Command("fedsim.commands.listing", "what can be chosen: selectors, presets, data sets, models, ..."),
    "show": Command("fedsim.commands.show", "the jobs that a command would run, and what is already there", words=True),
    "search": Command("fedsim.search.command", "hyper-parameters found by Optuna, over ordinary runs", words=True),
    "report": Command("fedsim.report.command", "tables, figures and a page of finished runs"),
    "verify": Command("fedsim.commands.verify", "runs finished runs again: is every round equal?", words=True),
    "doctor": Command("fedsim.commands.doctor", "whether everything that a run needs is here", words=True),
    "sync": Command("fedsim.commands.sync", "sends runs to Weights & Biases that are not there yet"),
}


ABOUT = (
    "compares client selection methods of federated learning: which clients take part in a round, what accuracy that "
    "buys, and what it costs in bytes, samples and seconds."
)
USAGE = (
    ("fedsim [key=value ...]", "run the experiment that these values describe"),
    ("fedsim COMMAND ...", "one of the commands below (fedsim COMMAND --help)"),
)
TRY = (
    ("fedsim", "the default experiment, some seconds"),
    ("fedsim -m selector=random,gpfl seed=0,1,2", "a sweep: six runs, one table"),
    ("fedsim list selectors", "all methods, with source and cost"),
    ("fedsim show preset=gpfl_table2_fmnist", "what a paper's table would run"),
    ("fedsim report default", "tables and figures of the runs"),
)
OPTIONS = (
    ("-m, --multirun", "sweep over all combinations of values with commas"),
    ("--config-dir DIR", "a folder with choices of your own, DIR/selector/mine.yaml"),
    ("--cfg job", "print the config that the values make"),
    ("--hydra-help", "Hydra's other options"),
    ("--version", "of fedsim"),
)


def help_page() -> str:
    catalogue = Catalogue()
    groups = [(name, catalogue.about(name)) for name in catalogue.names if "/" not in name]
    parts = [
        wrap(f"fedsim {fedsim.__version__} {ABOUT}"),
        "Usage\n" + entries(USAGE),
        "Try\n" + entries(TRY, widest=46),
        "Commands\n" + entries((name, command.about) for name, command in COMMANDS.items()),
        "Groups: choose by GROUP=CHOICE; `fedsim list GROUP` has the choices\n" + entries(groups),
        "Options\n" + entries(OPTIONS),
        wrap("Docs: README.md and docs/ of the repository; conf/ explains every value"),
    ]
    return "\n\n".join(parts)


MISTAKE = 2
"""Exit code of a command line that cannot be read."""


def main() -> None:
    argv = sys.argv[1:]
    if world().rank and asks(argv):  # of several processes of torchrun, the first answers
        sys.exit(0)
    code = answer(argv)
    sys.exit(run_experiment(argv) if code is None else code)


def asks(argv: Sequence[str]) -> bool:
    """Whether it is a command, help or the version, and no experiment's."""
    return bool(argv and argv[0] in (*COMMANDS, "help")) or not {"--help", "-h", "--version"}.isdisjoint(argv)


def answer(argv: Sequence[str]) -> int | None:
    """Do what the command line asks for if it is a command, help or the version, and return the exit code; None if it
    is an experiment's."""
    program = f"fedsim {argv[0]}" if argv and argv[0] in COMMANDS else "fedsim"
    return exit_code(partial(_answer, argv), program)


def run_experiment(argv: Sequence[str]) -> Any:
    """Run the jobs that the command line describes, and return what the process is to exit with."""
    from fedsim.jobs.cli import run

    place = world()
    try:
        code: Any = exit_code(partial(run, argv) if place.size == 1 else partial(_run_over_ranks, place, argv))
    except SystemExit as end:  # of argparse, or of Hydra
        code = end.code
    near = nearest(argv[0], COMMANDS) if argv and "=" not in argv[0] and not argv[0].startswith("-") else None
    if code == MISTAKE and near and not place.rank:
        print(f"  did you mean `{shlex.join(['fedsim', near, *argv[1:]])}`?", file=sys.stderr)
    return code


def _run_over_ranks(place: World, argv: Sequence[str]) -> int:
    from fedsim.config.compose import check_jobs
    from fedsim.jobs.cli import composed, run
    from fedsim.running.rank_worker import run_over_ranks

    return run_over_ranks(place, lambda: exit_code(lambda: run(argv)), lambda: check_jobs(composed(argv)[0]))


def _answer(argv: Sequence[str]) -> int | None:
    first = argv[0] if argv else ""
    if first in COMMANDS:
        command = COMMANDS[first]
        module = import_module(command.module)
        words: Any = argv[1:]
        if not command.words:
            about = f"{command.about[0].upper()}{command.about[1:]}."
            parser = ArgumentParser(prog=f"fedsim {first}", description=about)
            module.arguments(parser)
            words = parser.parse_args(words)
        code = module.run(words)
    elif first == "help" or "--help" in argv or "-h" in argv:
        print(help_page())
        code = 0
    elif "--version" in argv:
        print(f"fedsim {fedsim.__version__}")
        code = 0
    else:
        return None
    sys.stdout.flush()  # here, where a closed pipe is no error
    return code
