"""The problems of one composed config, some of whose values may be unknown (`fedsim.config.mistakes`).

All mistakes of a command line, where composing it has shown that there are some.

Each word is judged with the mistaken ones left out. What a mistaken word leaves open (which choice was meant, which
value) is filled in by several others in turn, and what is told is what is wrong whatever was meant: a mistake hides no
other one, and makes no other one up. A rule between two values is told once both are sound.

To be called inside `fedsim.config.compose.search_path`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from fedsim.config.build import UNKNOWN, told_whatever
from fedsim.config.diagnosis import (
    choices_of,
    compose_one,
    explained,
    group_of,
    lacks,
    plain,
    refused_choice,
    words_of_scale,
)
from fedsim.config.hydra_node import check_words, elsewhere
from fedsim.config.plan import make_plan
from fedsim.config.suggestions import nearest_choices, unknown_choice, unknown_path
from fedsim.config.words import (
    check_count,
    key_of,
    options,
    parse,
    parse_one,
    typed_in,
    values_of,
    without_choice,
    words_of,
)
from fedsim.core.errors import ConfigError, Problem, command, rule


def whole_config(
    config: DictConfig, words: Sequence[str], unknown_keys: Sequence[str], config_name: str
) -> list[Problem]:
    """The problems of a composed config (`fedsim.config.mistakes.Check`)."""
    choices = choices_of(config)
    try:
        values = plain(config, choices)
    except ConfigError as error:
        return list(error.problems)
    for key in unknown_keys:
        _set(values, key.split("."))
    effect = work_without_effect(values, words)
    found = [] if effect is None else [effect]
    try:
        make_plan(values, choices, elsewhere=elsewhere(config.get("hydra", {}).get("launcher", {})))
    except ConfigError as error:
        found += [p for p in error.problems if not _is_of(p.key, unknown_keys)]
    return explained(found, values, choices, words, config_name)


def _is_of(key: str, groups: Sequence[str]) -> bool:
    return any(key == group or key.startswith(f"{group}.") for group in groups)


def _set(config: dict[str, Any], path: Sequence[str]) -> None:
    """Make the value at `path` unknown, if there is one, and it is no group of others."""
    *groups, name = path
    node: Any = config
    for group in groups:
        node = node.get(group) if isinstance(node, Mapping) else None
    if isinstance(node, dict) and name in node and not isinstance(node[name], Mapping):
        node[name] = UNKNOWN


def work_without_effect(config: Mapping[str, Any], words: Sequence[str]) -> Problem | None:
    """`local.epochs` on the command line, although `local.steps` takes its place."""
    local = config.get("local")
    steps = local.get("steps") if isinstance(local, Mapping) else None
    given = [word for word in words if word.startswith("local.epochs=") and not word.endswith("=null")]
    return rule(
        not (given and steps is not None),
        "local.epochs",
        given[0].split("=", 1)[1] if given else None,
        f"has no effect while local.steps={steps}",
        "leave it out, or add local.steps=null",
    )


Check = Callable[[DictConfig, Sequence[str], Sequence[str]], Sequence[Problem]]
"""The problems of a composed config, of the words on the command line, with the values of some keys unknown."""
ROWS = 2
"""Choices that take the place of one that does not exist, besides the default."""
MOST_VALUES = 12
"""Of one key, which are judged one by one; of longer sweeps the first ones and the last."""
MOST_CHOICES = 200
"""Of one group, of which it is seen whether they exist."""
MOST_JOBS = 36
"""Judged as a whole: composing one takes 0.1 s, and several times."""


class _Found:
    """Problems, each once."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def add(self, problems: Iterable[Problem]) -> None:
        self.problems += [p for p in problems if p not in self.problems]

    def of(self, act: Callable[[], object]) -> bool:
        """Whether `act` goes without a `ConfigError`, whose problems are kept."""
        try:
            act()
        except ConfigError as error:
            self.add(error.problems)
            return False
        return True


class _Doubts:
    """What mistaken words leave open: the choice of a group, and the values of keys."""

    def __init__(self) -> None:
        self.groups: dict[str, list[str | None]] = {}
        self.keys: list[str] = []

    def leave_open(self, key: str, typed: Any) -> None:
        """`key` was mistyped, or given a value that is no value."""
        if known := options(key):
            kept = {key: [None, *nearest_choices(typed, known, ROWS)]}
            self.groups.update(kept if key.partition("/")[0] != "hydra" else {})
        elif key and not key.startswith("hydra"):
            self.keys.append(key)

    def rows(self) -> list[list[str]]:
        """Choices that may have been meant, as words: one list for each of several possibilities."""
        count = max(map(len, self.groups.values()), default=1)
        picked = [{g: choices[row % len(choices)] for g, choices in self.groups.items()} for row in range(count)]
        return [[f"{group}={choice}" for group, choice in row.items() if choice is not None] for row in picked]


def find(
    words: Sequence[str], config_name: str, check: Check, flags: Sequence[str], *, multirun: bool
) -> list[Problem]:
    """All problems of the jobs that `words` describe, behind `flags`; `check` tells those of a config as a whole."""
    found, doubts = _Found(), _Doubts()
    axes: dict[str, list[str]] = {}
    swept: list[Override] = []
    for word in words:
        override = _sound(word, found, doubts)
        if override is not None:
            axes[key_of(override)] = values = _values(override, found, doubts)
            swept += [override] if values and override.is_sweep_override() else []
    axes = {key: values for key, values in axes.items() if values}
    found.of(lambda: check_count(map(len, axes.values())))
    judge = _Judge(config_name, check)
    fixed = [values[0] for values in axes.values() if len(values) == 1]
    sweeps = multirun or judge.sweeps_by_itself(fixed, doubts)
    if swept and not sweeps:
        found.add(_without_flag(override, [*flags, *words]) for override in swept)
    for job in _one_at_a_time(axes)[:MOST_JOBS]:
        found.add(judge.job(job, doubts, multirun=sweeps))
    choices = [word for key, values in axes.items() if options(key) for word in values[:MOST_CHOICES]]
    found.add(mistake for word in choices if (mistake := _mistaken_choice(parse_one(word))))
    return found.problems


def _sound(word: str, found: _Found, doubts: _Doubts) -> Override | None:
    """The override that `word` is, if it can be read and may be given."""
    key, _, typed = word.lstrip("+~").partition("=")
    parsed: list[Override] = []
    if not found.of(lambda: parsed.append(parse_one(word))):
        doubts.leave_open(key, typed)
        return None
    return parsed[0] if found.of(lambda: check_words(parsed)) else None


def _values(override: Override, found: _Found, doubts: _Doubts) -> list[str]:
    """Its values as words, those in the middle of a long sweep left out."""
    if not override.is_sweep_override():
        return [override.input_line or ""]
    values: list[str] = []
    if not found.of(lambda: values.extend(islice(values_of(override), 10_001))):
        doubts.leave_open(override.key_or_group, "")
        return []
    long = len(values) > MOST_VALUES and not options(override.key_or_group)
    return [*values[: MOST_VALUES - 1], values[-1]] if long else values


def _without_flag(override: Override, words: Sequence[str]) -> Problem:
    remedy = command("fedsim", "-m", *words)
    return Problem(override.key_or_group, typed_in(override), "is a sweep over several values, and needs -m", remedy)


def _one_at_a_time(axes: dict[str, list[str]]) -> list[list[str]]:
    """Jobs in which each value occurs, with the first ones of all other keys."""
    first = {key: values[0] for key, values in axes.items()}
    others = [{**first, key: value} for key, values in axes.items() for value in values[1:]]
    return [list(job.values()) for job in (first, *others)]


class _Judge:
    """The problems of single jobs."""

    def __init__(self, config_name: str, check: Check) -> None:
        self._config_name, self._check = config_name, check
        self._known: dict[tuple[str, ...], DictConfig] = {}

    def sweeps_by_itself(self, fixed: Sequence[str], doubts: _Doubts) -> bool:
        """Whether a preset makes a sweep of the job, or may."""
        choices, _ = _split([word for word in fixed if _mistaken_choice(parse_one(word)) is None])
        configs = [self._composed([*choices, *row]) for row in doubts.rows()]
        return any(config is not None and str(config.hydra.mode).endswith("MULTIRUN") for config in configs)

    def job(self, words: Sequence[str], doubts: _Doubts, *, multirun: bool) -> list[Problem]:
        """The problems of the job that `words` describe."""
        found, open_here = _Found(), _Doubts()
        open_here.groups.update(doubts.groups)
        sound = []
        for word in words:
            override = parse_one(word)
            if mistake := _mistaken_choice(override):
                found.add([mistake])
                open_here.leave_open(override.key_or_group, override.value())
            else:
                sound.append(word)
        rows = [self._row(sound, row, doubts.keys, multirun) for row in open_here.rows()]
        found.add(told_whatever(rows))
        return found.problems

    def _row(
        self, words: Sequence[str], guessed: Sequence[str], doubted: Sequence[str], multirun: bool
    ) -> list[Problem]:
        """The problems of a job with `guessed` choices in the place of those that are open."""
        found, unknown_keys = _Found(), [*doubted]
        implied = self._implied([*words, *guessed], multirun, found)
        choices, plain = _split([*implied, *words, *guessed])
        base = self._composed(choices, found)
        if base is None:
            return found.problems
        known: Any = OmegaConf.to_container(base, resolve=False)
        chosen = choices_of(base)
        lacking: dict[str, list[str]] = {}
        kept: list[str] = []
        for word in plain:
            override = parse_one(word)
            added = override.is_add() or override.is_force_add()
            mistake = None if added else unknown_path(known, override.key_or_group)
            if mistake is None:
                kept.append(word)
            elif word in implied:
                group = group_of(override.key_or_group, chosen) or "config"
                lacking.setdefault(group, []).append(override.key_or_group)
            else:
                found.add(mistake[:1])
                unknown_keys += [key for key in mistake[1] if key not in map(key_of, parse(words))]
        source = f"preset={chosen.get('preset')}"
        found.add(lacks(group, chosen.get(group), source, keys, swept=True) for group, keys in lacking.items())
        given = [*choices, *kept]
        config = self._composed(given) or self._composed(self._that_compose(choices, kept, found), found)
        if config is not None:
            typed = [word for word in given if word not in implied]
            found.add(self._check(config, typed, unknown_keys))
        return found.problems

    def _implied(self, words: Sequence[str], multirun: bool, found: _Found) -> list[str]:
        """What a preset adds to the words: the first job of its sweep, and its size."""
        choices, plain = _split(words)
        sizes = [word for word in plain if parse_one(word).key_or_group == "scale"]
        base = self._composed([*choices, *sizes])
        if base is None:
            return []
        params = words_of(base.hydra.sweeper.get("params") or {}) if multirun else []
        sized: list[str] = []
        found.of(lambda: sized.extend(words_of_scale(base, parse(words))))
        given = set(map(key_of, parse(words)))
        added = {key_of(o): next(values_of(o)) for o in parse([*params, *sized])}
        return [word for key, word in added.items() if key not in given]

    def _that_compose(self, choices: Sequence[str], plain: Sequence[str], found: _Found) -> list[str]:
        """The choices, and those of `plain` that Hydra takes after them; the problems of others are told."""
        kept = [*choices]
        for word in plain:
            try:
                compose_one([*kept, word], self._config_name)
                kept.append(word)
            except ConfigError as error:
                override = parse_one(word)
                typed = typed_in(override) or ...
                found.add(
                    Problem(override.key_or_group, typed, p.rule) if p.key == "config" else p for p in error.problems
                )
        return kept

    def _composed(self, words: Sequence[str], found: _Found | None = None) -> DictConfig | None:
        try:
            if tuple(words) not in self._known:
                self._known[tuple(words)] = compose_one(words, self._config_name)
            return self._known[tuple(words)]
        except ConfigError as error:
            if found is not None:
                found.add(error.problems)
            return None


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Choices of groups (a later one replaces an earlier), and all others."""
    parsed = parse(words)
    choices = {key_of(o): o.input_line or "" for o in parsed if options(o.key_or_group)}
    return list(choices.values()), [o.input_line or "" for o in parsed if not options(o.key_or_group)]


def _mistaken_choice(override: Override) -> Problem | None:
    """What is wrong with the choice of a group."""
    group, choice = override.key_or_group, override.value()
    known = options(group)
    if not known or override.is_delete():
        return None
    if group == "hydra/sweeper" and choice != "basic":
        return unknown_choice(group, choice)
    if refused := refused_choice(override):
        return refused
    if without_choice(override):
        return None
    chosen = choice if isinstance(choice, list) else [choice]
    return next((unknown_choice(group, one) for one in chosen if one not in known), None)
