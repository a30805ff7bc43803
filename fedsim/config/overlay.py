"""Compose the jobs of a sweep fast: Hydra composes a few of them, and fedsim derives the others.

The *words* of a job are its overrides, such as `selector=gpfl` and `seed=1`. A job is derived from
another composed job, its *base*, in two ways:

- By values: the words of the job are those of the base, and words such as `seed=1`, which give a
  plain value to one key. The job has the base's config with these values.
- By a choice: one word differs, such as `selector=gpfl` in place of `selector=random`, and both
  choices add only the node of their group (the mapping at the group's key) to a config. The job has
  the base's config with the node of the other choice.

For example, `fedsim -m selector=random,gpfl seed=0,1` has four jobs. Hydra composes the words
`selector=random` alone. A base of the words `selector=gpfl` is derived from it by the choice, and
the four jobs are derived from these two bases by the values of `seed`.

Hydra composes all jobs that cannot be derived: jobs with `~key`, `+key`, mappings, keys of `hydra`,
interpolations, and unknown keys, for which Hydra has the error message. tests/test_overlay.py
compares derived jobs with Hydra's.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from fedsim.config.composition import (
    choices_of,
    compose_config,
    resolved,
    run_name,
)
from fedsim.config.job import ComposedJob
from fedsim.config.sources import known_choices, options
from fedsim.config.words import are_related, is_plain_assignment, parse_one
from fedsim.core.configs import COMMAND_KEYS
from fedsim.core.disk import conf_dir

VARIABLE = re.compile(r"\$\{oc\.env:[^${}]*\}")
"""An interpolation of an environment variable, which depends on no other key."""
MAX_BASES = 200
"""Maximum number of bases that are kept, so that a sweep over many choices does not hold them
all."""
Words = tuple[str, ...]
"""The words of a job, in their order."""


@dataclass(frozen=True)
class Base:
    """A composed job, from which other jobs may be derived.

    `is_closed` says that no value of its config depends on another value (`lr: ${rate}`) or is
    missing (`lr: ???`). Only then can a value be replaced without composing again.
    """

    job: ComposedJob
    is_closed: bool


class JobComposer:
    """Composes the jobs of one command line from their words."""

    def __init__(
        self, config_name: str, typed: frozenset[str], configs: Mapping[Words, DictConfig]
    ) -> None:
        """`config_name` is the file at the top of conf/, `config` by default. `typed` has the keys
        and groups on the command line. `configs` has what Hydra has composed already, by the words:
        `{("selector=gpfl",): <the config>}`."""
        self._config_name = config_name
        self._typed = typed
        self._configs = configs
        self._files = known_choices()
        self._overrides: dict[str, Override] = {}
        """The parsed words; the jobs of a sweep have most words in common."""
        self._bases: dict[Words, Base] = {}
        """The bases so far, by their words."""

    def compose(self, words: Sequence[str]) -> ComposedJob:
        """Return the job of `words`, composed by Hydra. They include the changes of the scale."""
        return self._base_from(self._compose_config(tuple(words)), tuple(words)).job

    def derive(self, words: Sequence[str]) -> ComposedJob:
        """Return the same job as `compose`, derived from another job if that is possible."""
        values: dict[str, Any] = {}
        other_words: list[str] = []
        ordered_words: list[str] = []
        for word in words:
            if word not in self._overrides:
                self._overrides[word] = parse_one(word)
            override = self._overrides[word]
            if _sets_plain_value(override):
                values[override.key_or_group] = override.value()
                continue
            other_words.append(word)
            if not _is_choice(override):  # Hydra makes choices first, wherever they stand
                ordered_words.append(word)

        # The order of words counts if they are about the same key: `optimizer.lr=1` and
        # `++optimizer.lr=2` or `optimizer={lr:2}`.
        if any(are_related(*pair) for pair in product(values, ordered_words)):
            return self._base_of(tuple(words)).job

        base = self._base_of(tuple(other_words))
        config = _with_values(base.job.config, values) if base.is_closed else None
        if config is None:  # all words make a base
            return self._base_of(tuple(words)).job
        if config.get("name", "") is None:  # the user typed name=null
            config["name"] = run_name(base.job.choices)
        return replace(base.job, config=config, overrides=tuple(words))

    def _base_of(self, words: Words) -> Base:
        """Return the base of `words`: a kept one, a derived one, or one that Hydra composes. Keep
        it for other jobs."""
        if words not in self._bases:
            if len(self._bases) >= MAX_BASES:
                self._bases.clear()
            base = self._derive_base(words)
            if base is None:
                base = self._base_from(self._compose_config(words), words)
            self._bases[words] = base
        return self._bases[words]

    def _derive_base(self, words: Words) -> Base | None:
        """Return the base of `words`, derived by a choice from a kept base; None if that cannot be.

        Only the latest closed base whose words differ from `words` in one choice is tried.
        """
        for other_words, base in reversed(self._bases.items()):
            change = _differing_word(other_words, words)
            if change is not None and base.is_closed:
                group, choice = change
                job = _with_choice(base.job, group, choice, words)
                return None if job is None else Base(job, is_closed=True)
        return None

    def _compose_config(self, words: Words) -> DictConfig:
        """Return the config that Hydra composes of `words`, with Hydra's own node."""
        config = self._configs.get(words)
        return compose_config(words, self._config_name) if config is None else config

    def _base_from(self, config: DictConfig, words: Words) -> Base:
        """Return the base of a config that Hydra has composed of `words`."""
        choices = choices_of(config)
        launcher: Any = OmegaConf.to_container(config.hydra.launcher)
        values = resolved(config, choices)
        job = ComposedJob(values, choices, words, self._typed, launcher, self._files)
        unresolved: Any = OmegaConf.to_container(config, resolve=False)
        del unresolved["hydra"]
        return Base(job, _is_closed(unresolved))


def _differing_word(old_words: Words, new_words: Words) -> tuple[str, str] | None:
    """Return key and value of the word in `new_words` that alone differs from `old_words`.

    These are `selector`, `gpfl` for the words `selector=random seed=1` and `selector=gpfl seed=1`.
    Returns None if several words differ, or if the words that differ have other keys.
    """
    if len(old_words) != len(new_words):
        return None
    pairs = zip(old_words, new_words, strict=True)
    differing = [(old, new) for old, new in pairs if old != new]
    if len(differing) != 1:
        return None
    old_word, new_word = differing[0]
    key, _, value = new_word.partition("=")
    return (key, value) if old_word.startswith(f"{key}=") else None


def _with_choice(job: ComposedJob, group: str, choice: str, words: Words) -> ComposedJob | None:
    """Return the job of `words`, which differ from those of `job` only in the `choice` of `group`.

    It has the config of `job` with the node of the new choice, for example the value of
    `config["selector"]` for `selector=gpfl`. Returns None if the choice could change more of the
    config than this node. Only choices of conf/ are derived, because tests compare all of them with
    Hydra's result.
    """
    files = job.files
    old_choice = job.choices.get(group, "")
    is_shipped = files.folders == (conf_dir(),) and files.has(group, choice)
    if not old_choice or not is_shipped:
        return None

    # 1. Both choices make the node of the group and nothing else. The new node has no missing value
    # and no interpolation, which would have to be resolved.
    old_config = files.config(group, old_choice)
    new_config = files.config(group, choice)
    if old_config.keys() != {group} or new_config.keys() != {group}:
        return None
    if "${" in str(new_config) or not _is_closed(new_config):
        return None

    # 2. Nothing outside of the group changes the node.
    # a. No word does, such as `selector.metric=dot` or `selector/exploration=fixed`.
    if any(re.match(rf"[+~]*{group}[/.@]", word) for word in words):
        return None
    # b. No choice of another group has keys of the node, as a preset may. Subgroups, such as
    # `selector/exploration`, are a part of the node.
    outer_choices: dict[str, str] = {}
    for other_group, name in job.choices.items():
        if other_group.partition("/")[0] == group:
            continue
        outer_choices[other_group] = name
        if files.has(other_group, name) and group in files.config(other_group, name):
            return None
    # c. The job has the node that the file of its choice makes.
    if old_config[group] != job.config[group]:
        return None

    # 3. Replace the node, and the choices in subgroups, in Hydra's order.
    choices: dict[str, str] = {}
    for other_group, name in job.choices.items():
        if other_group == group:
            choices[group] = choice
            choices.update(files.all_included(group, choice))
        elif other_group in outer_choices:
            choices[other_group] = name
    config = job.config | {group: new_config[group]}
    return replace(job, config=config, choices=choices, overrides=words)


def _sets_plain_value(override: Override) -> bool:
    """Return whether an override sets a key of a run to a plain value: a number, a text, a truth
    value, null, or a list of these."""
    key = override.key_or_group
    if not is_plain_assignment(override) or override.package is not None:
        return False
    if key.partition(".")[0] in ("hydra", *COMMAND_KEYS) or options(key):
        return False
    value = override.value()
    items = value if isinstance(value, list) else [value]
    is_plain = all(isinstance(item, bool | int | float | str | None) for item in items)
    return is_plain and _is_closed(value)


def _is_choice(override: Override) -> bool:
    """Return whether an override makes a choice in a config group, such as `selector=gpfl`."""
    return isinstance(override.value(), str) and bool(options(override.key_or_group))


def _is_closed(node: Any) -> bool:
    """Return whether no value in a node of a config depends on another one or is missing.

    A node is a mapping, a list or a single value, with interpolations not yet resolved.
    """
    if isinstance(node, Mapping):
        return all(map(_is_closed, node.values()))
    if isinstance(node, list):
        return all(map(_is_closed, node))
    return node != "???" and "${" not in VARIABLE.sub("", str(node))


def _with_values(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a copy of `config` with `values`, such as `{"optimizer.lr": 0.1}`, at dotted keys.

    Returns None if a key is unknown or has a mapping. Only the mappings on the way to a changed
    value are copied; the others are shared with `config`.
    """
    top = dict(config)
    for key, value in values.items():
        *parents, name = key.split(".")
        node = top
        for parent in parents:
            if not isinstance(node.get(parent), dict):
                return None
            node[parent] = dict(node[parent])
            node = node[parent]
        if name not in node or isinstance(node[name], dict):
            return None
        node[name] = value
    return top
