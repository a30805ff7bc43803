"""The first word of the command line: a command, or the beginning of an experiment's `key=value`s.

What commands do is imported when one is called, so that help and lists are there at once.
"""

import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import fedsim
from fedsim.commands.table import COMMANDS
from fedsim.config.spelling import nearest
from fedsim.distributed.world import World, world
from fedsim.running.exits import exit_code

MISTAKE = 2
"""Exit code of a command line that cannot be read."""


def main() -> None:
    """Do what the command line asks for, and exit with its code."""
    argv = sys.argv[1:]
    if world().rank and asks(argv):  # of several processes of torchrun, the first answers
        sys.exit(0)
    code = answer(argv)
    sys.exit(run_experiment(argv) if code is None else code)


def asks(argv: Sequence[str]) -> bool:
    """Whether it is a command, help or the version, and no experiment's."""
    return bool(argv and argv[0] in (*COMMANDS, "help")) or _asks(argv, "--help", "-h", "--version")


def answer(argv: Sequence[str]) -> int | None:
    """Do what the command line asks for if it is a command, help or the version, and return the exit code; None if it
    is an experiment's."""
    program = f"fedsim {argv[0]}" if argv and argv[0] in COMMANDS else "fedsim"
    return exit_code(partial(_answer, argv), program)


def run_experiment(argv: Sequence[str]) -> Any:
    """Run the jobs that the command line describes, and return what the process is to exit with."""
    from fedsim.cli import run

    place = world()
    try:
        code: Any = exit_code(partial(run, argv) if place.size == 1 else partial(_run_over_ranks, place, argv))
    except SystemExit as end:  # of argparse, or of Hydra
        code = end.code
    if code == MISTAKE and not place.rank and (meant := suggestion(argv)):
        print(f"  did you mean `{meant}`?", file=sys.stderr)
    return code


def _run_over_ranks(place: World, argv: Sequence[str]) -> int:
    from fedsim.cli import composed, run
    from fedsim.config.check import check_jobs
    from fedsim.running.torchrun import run_over_ranks

    return run_over_ranks(place, lambda: exit_code(lambda: run(argv)), lambda: check_jobs(composed(argv)[0]))


def _answer(argv: Sequence[str]) -> int | None:
    first = argv[0] if argv else ""
    if first in COMMANDS:
        code = _run(first, argv[1:])
    elif first == "help" or _asks(argv, "--help", "-h"):
        from fedsim.commands.help import show_help

        code = show_help()
    elif _asks(argv, "--version"):
        print(f"fedsim {fedsim.__version__}")
        code = 0
    else:
        return None
    sys.stdout.flush()  # here, where a closed pipe is no error
    return code


def suggestion(argv: Sequence[str]) -> str | None:
    """The command line that may have been meant where a word that is neither a flag nor `key=value` is a command that
    should come first, or is like one; None if there is no such word."""
    plain = [word for word in argv if "=" not in word and not word.startswith(("-", "~", "+"))]
    word = next((word for word in plain if word in COMMANDS), None) or next((w for w in plain if _like(w)), None)
    if word is None:
        return None
    position = list(argv).index(word)
    meant = word if word in COMMANDS else str(_like(word))
    return shlex.join(["fedsim", meant, *argv[:position], *argv[position + 1 :]])


def _like(word: str) -> str | None:
    return nearest(word, COMMANDS)


def _asks(argv: Sequence[str], *flags: str) -> bool:
    return any(word in flags for word in argv)


def _run(name: str, words: Sequence[str]) -> int:
    command = COMMANDS[name]
    module = import_module(command.module)
    if command.words:
        run_words: Callable[[Sequence[str]], int] = module.run
        return run_words(words)
    parser = ArgumentParser(prog=f"fedsim {name}", description=f"{command.about[0].upper()}{command.about[1:]}.")
    module.arguments(parser)
    run: Callable[[Namespace], int] = module.run
    return run(parser.parse_args(words))
