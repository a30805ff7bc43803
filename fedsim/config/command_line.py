"""Read the words after `fedsim`: flags, in any place, and overrides (`key=value`).

`fedsim.config.words` reads the overrides.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from fedsim.core.errors import Problem, check

PLACES = ("config_path", "config_dir", "config_name")
"""Flags that say where configs are composed from."""


def read_command_line(argv: Sequence[str]) -> Namespace:
    """Return the command line, one attribute for each argument.

    Exits with code 2 and the usage if it cannot be read. Raises `ConfigError` for unknown flags.
    """
    parser = ArgumentParser("fedsim", add_help=False)
    parser.add_argument("overrides", nargs="*", help="values of the config: key=value")
    task = parser.add_mutually_exclusive_group()
    task.add_argument("--multirun", "-m", action="store_true", help="run a sweep")
    task.add_argument("--cfg", "-c", choices=["job"], help="print the config, and run nothing")
    parser.add_argument("--resolve", action="store_true", help="resolve interpolations in --cfg")
    parser.add_argument("--config-dir", "-cd", help="a folder with choices of your own")
    parser.add_argument("--config-path", "-cp", help="a folder in place of conf/")
    parser.add_argument("--config-name", "-cn", default="config", help="in place of config.yaml")
    args, unread = parser.parse_known_intermixed_args(argv)
    check(*map(_not_an_option, unread))
    if args.resolve and not args.cfg:
        parser.error("--resolve goes with --cfg")
    return args


def _not_an_option(word: str) -> Problem:
    """Return the problem of `--num-rounds=5`, or of `--num-rounds` before 5."""
    key, _, value = word.lstrip("-").partition("=")
    example = f"{key.replace('-', '_')}={value or '...'}"
    remedy = f"values of the config are set without dashes: {example}"
    return Problem(word, ..., "is not an option", remedy)


def read_words(parser: ArgumentParser, argv: Sequence[str]) -> tuple[Namespace, Namespace]:
    """Return the options of a command, read by its own `parser`, and the words of an experiment.

    Exits with code 2 and the command's usage if the words ask for a config.
    """
    options, words = parser.parse_known_args(argv)
    args = read_command_line(words)
    if args.cfg:
        parser.error("it takes the words of a run")
    return options, args


def place_flags(args: Namespace) -> list[str]:
    """Return the flags that say where configs are composed from, as words."""
    words: list[str] = []
    for name in PLACES:
        value = getattr(args, name)
        if value not in (None, "config"):
            words += [f"--{name.replace('_', '-')}", value]
    return words
