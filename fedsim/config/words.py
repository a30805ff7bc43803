"""The words behind `fedsim`: Hydra's flags, in any order, and overrides (`key=value`), with the
jobs of a sweep."""

import math
import os
import re
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain, islice, product
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from fedsim.config.build import Gathered
from fedsim.config.choice_files import ChoiceFiles
from fedsim.config.sources import loader, on_search_path
from fedsim.core.configs import SEED_KEYS, SHORTHANDS
from fedsim.core.errors import ConfigError, Problem, check, rule


def read(argv: Sequence[str]) -> Namespace:
    """The command line, one attribute an argument. Exits with code 2 and the usage where it cannot
    be read."""
    parser = get_args_parser()
    parser.prog = "fedsim"
    args, unread = parser.parse_known_intermixed_args(argv)  # flags may stand behind overrides
    check(*map(_no_option, unread))
    if args.help:
        parser.error("it is --help in full")
    if sum(map(bool, (args.run, args.multirun, args.shell_completion, args.cfg, args.info))) > 1:
        parser.error("one of --run, --multirun, --shell-completion, --cfg and --info at a time")
    if args.resolve and not args.cfg:
        parser.error("--resolve goes with --cfg")
    if args.config_path is not None:
        args.config_path = str(
            Path(args.config_path).resolve()
        )  # Hydra would look beside its caller's file
    return args


def _no_option(word: str) -> Problem:
    """The problem of `--num-rounds=5`, or of `--num-rounds` before 5."""
    key, _, value = word.lstrip("-").partition("=")
    remedy = (
        f"values of the config are set without dashes: {key.replace('-', '_')}={value or '...'}"
    )
    return Problem(word, ..., "is not an option", remedy)


def read_words(parser: ArgumentParser, argv: Sequence[str]) -> tuple[Namespace, Namespace]:
    """The options of a command with a `parser` of its own, and the words of an experiment beside
    them. Exits with code 2 and the command's usage where they ask Hydra a question."""
    options, rest = parser.parse_known_args(argv)
    args = read(rest)
    if asks_hydra(args) or args.experimental_rerun:
        parser.error("it takes the words of a run")
    return options, args


def asks_hydra(args: Namespace) -> bool:
    """Whether it asks for configs and the like, which Hydra prints, and for no run."""
    return any(getattr(args, name) for name in ("hydra_help", "cfg", "info", "shell_completion"))


def for_hydra(args: Namespace, implied: Sequence[str] = ()) -> list[str]:
    """The command line as Hydra reads it: flags first, then `implied` overrides, then those that
    were given."""
    given = {name: value for name, value in vars(args).items() if value not in (None, False, [])}
    overrides = given.pop("overrides", [])
    flags = [
        [f"--{name.replace('_', '-')}", *([] if value is True else [value])]
        for name, value in given.items()
    ]
    return [*chain.from_iterable(flags), *implied, *overrides]


def flags_of(args: Namespace) -> list[str]:
    """Where configs are composed from, as words."""
    return for_hydra(
        Namespace(
            **{name: getattr(args, name) for name in ("config_path", "config_dir", "config_name")}
        )
    )


def plugins() -> Plugins:
    """Hydra's registry of plugins. Its first call in a process imports every folder `hydra_plugins`
    on Python's path; not the working folder's, where files may be a stranger's, unless PYTHONPATH
    names it. A plugin for submitit is not asked: conf/ has our own launchers of its names."""
    before, here = sys.path[:], Path.cwd()
    wanted = {
        Path(folder).resolve()
        for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if folder
    }
    sys.path[:] = [folder for folder in before if here in wanted or Path(folder).resolve() != here]
    try:
        found = Plugins.instance()
    finally:
        sys.path[:] = before
    for name in ("submitit_local", "submitit_slurm"):
        ConfigStore.instance().repo.get("hydra", {}).get("launcher", {}).pop(f"{name}.yaml", None)
    return found


def long_form(words: Sequence[str], files: ChoiceFiles) -> list[str]:
    """`words` without shorthands: `selector=gpfl selector.alpha=0,1` is `selector/exploration=fixed
    selector.exploration.value=0,1`. Others than selectors that have the group may have such a key
    of their own."""
    words = list(map(meant, words))
    given = dict(word.partition("=")[::2] for word in words)
    if SHORTHANDS.keys().isdisjoint(given):
        return words
    presets = [name for name in given.get("preset", "").split(",") if name in files.names("preset")]
    names = given.get(
        "selector", ",".join(files.made("preset", name).get("selector", "") for name in presets)
    )
    chosen = [name for name in names.split(",") if name in files.names("selector")]
    groups = {group for name in chosen for group in files.made("selector", name)}
    if SHORTHANDS.keys() <= given.keys() and "selector/exploration" in groups:
        text = "and selector.rho exclude each other: a constant weight of exploration, and one that changes"
        raise ConfigError([Problem("selector.alpha", ..., text, "leave one of them out")])
    found: list[str] = []
    for word in words:
        key, _, value = word.partition("=")
        group, choice, long = SHORTHANDS.get(key, ("", "", ""))
        if choice and group in groups and group not in given:
            found.append(f"{group}={choice}")
        found.append(f"{long}={value}" if group in groups else word)
    return found


def meant(word: str) -> str:
    """`word` with the choices that it means: `selector=GPFL` is `selector=gpfl`."""
    key, _, value = word.partition("=")
    group = key.lstrip("+")
    if not re.fullmatch(r"[\w., -]+", value) or not options(group):
        return word
    files = on_search_path()
    return f"{key}={','.join(files.meant(group, name.strip()) for name in value.split(','))}"


MAX_JOBS = 10_000
"""Of one command."""
MAX_WORD = 4_000
"""Characters of one override; the time that Hydra's parser takes grows with their square."""
MAX_NESTING = 20
"""Brackets in brackets of one override."""
BAD_INPUT = (
    HydraException,
    OmegaConfBaseException,
    YAMLError,
    RecursionError,
    ValueError,
    TypeError,
    KeyError,
)
"""What Hydra raises for bad input."""


def parse(words: Sequence[str]) -> list[Override]:
    """The overrides that `words` are. Raises `ConfigError` with all malformed ones."""
    found = Gathered()
    parsed = [found.run(parse_one, word) for word in words]
    check(*found.problems)
    return [override for override in parsed if override is not None]


def parse_one(word: str) -> Override:
    """The override that `word` is; `glob(...)` is of the choices of its group, if Hydra is ready to
    compose."""
    if len(word) > MAX_WORD:
        text = f"must have at most {MAX_WORD} characters"
        raise ConfigError(
            [Problem(f"{word[:60]}...", ..., text, "put it into a file of --config-dir")]
        )
    depth = max(accumulate((c in "[{(") - (c in ")}]") for c in word), default=0)
    check(rule(depth <= MAX_NESTING, word.partition("=")[0], ..., "is nested too deeply"))
    try:
        override = OverridesParser.create(loader()).parse_overrides([meant(word)])[0]
    except BAD_INPUT as error:
        raise ConfigError([_unreadable(word)]) from error
    check(rule(bool(override.key_or_group), word[:200], ..., "is not key=value"))
    return override


def single_values(words: Sequence[str]) -> dict[str, Any]:
    """Return the value that each word gives to a key. Raises `ConfigError` for words that do not
    give one."""
    parsed = parse(words)
    text, remedy = (
        "must give one value to a key of the run",
        "write key=value, and quote a text that has a comma",
    )
    for word, override in zip(words, parsed, strict=True):
        check(
            rule(word[0] not in "+~" and not override.is_sweep_override(), word, ..., text, remedy)
        )
    return {override.key_or_group: override.value() for override in parsed}


def _unreadable(word: str) -> Problem:
    """The problem of a word that Hydra's parser rejects, with the quotes that make it one."""
    key, equals, value = word.partition("=")
    if not equals:
        remedy = "`fedsim --help` has the commands, and the groups in which to choose"
        return Problem(word[:200], ..., "is neither a command nor key=value", remedy)
    bare = f"{key.strip()}={value.strip()}"
    if bare != word:
        text = "has a blank or the end of a line at its beginning or end"
        return Problem(key[:200], value[:200], text, f"leave that out: {shlex.quote(bare)}")
    if not re.fullmatch(r"[+~]*[\w$-]+([./@:][\w$-]+)*", key, re.ASCII):
        return Problem(
            key[:200],
            value[:200],
            "is not a key: names of letters, digits and _, with dots between them",
        )
    character = re.search(r"[^\w/\\+.$%*@?|: \t-]", value, re.ASCII)
    text = f"has {character[0]!r} outside of quotes" if character else "is no value"
    remedy = f"quote it for fedsim, and once more for the shell: {quoted(key, value)}"
    if value[0] in "[{":
        remedy = f"a list is [a,b], a mapping {{a:1}}; a text is quoted: {quoted(key, value)}"
    return Problem(key, value[:200], text, remedy)


def quoted(key: str, value: str) -> str:
    """The word that sets a key to a text, whatever is in it, as a shell takes it."""
    escaped = re.sub(r'(\\*)("|$)', lambda found: found[1] * 2 + (found[2] and '\\"'), value)
    return shlex.quote(f'{key}="{escaped}"')


def options(group: str) -> list[str]:
    """The choices of a config group, [] where there is no such group."""
    known = loader() if group else None
    return (
        [] if known is None else list(known.repository.get_group_options(group, ObjectType.CONFIG))
    )


def words_of(values: Mapping[str, Any]) -> list[str]:
    """The entries of a YAML mapping as overrides: `{seed: range(3)}` is `seed=range(3)`."""
    return [f"{key}={'null' if value is None else value}" for key, value in values.items()]


def without_sweeps(words: Sequence[str]) -> list[str]:
    """Those of one value."""
    return [
        word
        for word, override in zip(words, parse(words), strict=True)
        if not override.is_sweep_override()
    ]


def without_choice(override: Override) -> bool:
    """Whether it is `group=null`, which Hydra writes as `~group`."""
    plain = not (
        override.is_delete()
        or override.is_add()
        or override.is_force_add()
        or override.is_sweep_override()
    )
    return plain and override.value() is None and bool(options(override.key_or_group))


def as_hydra_reads(override: Override) -> str:
    """The word that it is, with `~group` in the place of `group=null`."""
    return f"~{override.key_or_group}" if without_choice(override) else override.input_line or ""


def key_of(override: Override) -> str:
    """What it sets: a key, or a group with its package."""
    return override.get_key_element().lstrip("+~")


def expand(overrides: Sequence[Override]) -> list[list[str]]:
    """The jobs of a sweep: every combination of the values, the last key's changing fastest. A
    later override replaces an earlier one of the same key. Raises `ConfigError` for more than
    `MAX_JOBS`."""
    axes = {
        o.get_key_element().lstrip("~" if options(o.key_or_group) else ""): list(
            islice(values_of(o), MAX_JOBS + 1)
        )
        for o in overrides
    }
    swept = ", ".join(key for key, values in axes.items() if len(values) > 1)
    few = math.prod(map(len, axes.values())) <= MAX_JOBS
    check(
        rule(
            few,
            swept,
            ...,
            f"must make at most {MAX_JOBS} jobs",
            "split the sweep into several commands",
        )
    )
    return [list(words) for words in product(*axes.values())]


def values_of(override: Override) -> Iterator[str]:
    """One word for each value that it sweeps over, at least one. Raises `ConfigError`."""
    key = override.get_key_element()
    if not override.is_sweep_override():
        yield f"{key}={override.get_value_element_as_str()}"
        return

    def refuse(text: str, remedy: str) -> None:
        raise ConfigError([Problem(key, typed_in(override), text, remedy)])

    if not override.is_discrete_sweep():
        search = f"fedsim search {shlex.quote(override.input_line or '')} trials=20 searches in it"
        remedy = f"{key}=range(0,5) is five of them" if key in SEED_KEYS else search
        refuse("must sweep single values: a,b or range()", remedy)
    if isinstance(value := override.value(), RangeSweep) and value.step == 0:
        refuse("must have a step other than 0", "leave it out for 1")
    given: set[str] = set()
    for word in override.sweep_string_iterator():
        if word in given:
            refuse(f"has {word} twice", "leave it out: a run is made once")
        given.add(word)
        yield f"{key}={word}"
    if not given:
        known = ", ".join(options(override.key_or_group))
        refuse(
            "has no values",
            f"known here: {known}" if known else "range(start,stop,step) ends before stop",
        )


def typed_in(override: Override) -> str:
    return (override.input_line or "").partition("=")[2]


def first_line(error: BaseException) -> str:
    """What a library's error says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [
        type(error).__name__
    ]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
