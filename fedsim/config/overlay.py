"""Compose the jobs of a sweep fast: Hydra composes a few of them, and fedsim derives the others.

A job is derived from a composed job, its base, in two ways. Plain values of single keys replace the
values in the base's config. And if a choice of conf/ adds only the node of its group (the mapping
at the group's key) to a config, this node replaces the node of another choice. Hydra composes all
other jobs: jobs with `~key`, `+key`, mappings, keys of `hydra`, interpolations, and unknown keys,
for which Hydra has the error message. tests/test_overlay.py compares derived jobs with Hydra's.

The words of a job are its overrides, such as `selector=gpfl`, `seed=1`; the base words are those
that are no plain values.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from fedsim.config.composition import (
    COMMAND_KEYS,
    choices_of,
    compose_config,
    resolved,
    run_name,
    words_of_scale,
)
from fedsim.config.job import ComposedJob
from fedsim.config.sources import known_choices, options
from fedsim.config.words import is_plain_assignment, parse, parse_one, without_sweeps
from fedsim.core.disk import conf_dir

VARIABLE = re.compile(r"\$\{oc\.env:[^${}]*\}")
"""An interpolation of an environment variable, which depends on no other key."""
MAX_BASES = 200
"""Maximum number of bases that are kept, so that a sweep over many choices does not hold them
all."""
Words = tuple[str, ...]


@dataclass(frozen=True)
class Base:
    """A composed job, from which other jobs may be derived.

    `is_closed`: no value of its config depends on another value or is missing. Only then can a
    value be replaced without composing again.
    """

    job: ComposedJob
    is_closed: bool


class JobComposer:
    """Composes the jobs of one command line from their words."""

    def __init__(
        self, config_name: str, typed: frozenset[str], known: Mapping[Words, DictConfig]
    ) -> None:
        """`typed` are the keys and groups on the command line. `known` are configs that Hydra has
        composed already, by their words."""
        self._config_name = config_name
        self._typed = typed
        self._known = known
        self._files = known_choices()
        self._overrides: dict[str, Override] = {}
        """The parsed words; the jobs of a sweep have most words in common."""
        self._bases: dict[Words, Base] = {}
        """The bases so far, by their words."""

    def compose(self, words: Sequence[str]) -> ComposedJob:
        """Return the job of `words`, composed by Hydra, with the changes of the scale that the
        words choose."""
        config = self._config(tuple(words))
        scale_words = without_sweeps(words_of_scale(config, parse(words)))
        if scale_words:
            words = [*scale_words, *words]
            config = self._config(tuple(words))
        return self._base_of(config, tuple(words)).job

    def derive(self, words: Sequence[str]) -> ComposedJob:
        """Return the job of `words`, derived from another job if that is possible.

        The words include the changes of the scale, which is the same for all jobs.
        """
        values: dict[str, Any] = {}
        base_words: list[str] = []
        for word in words:
            if word not in self._overrides:
                self._overrides[word] = parse_one(word)
            override = self._overrides[word]
            if _is_value(override):
                values[override.key_or_group] = override.value()
            else:
                base_words.append(word)
        base = self._base(tuple(base_words))
        config = _with_values(base.job.config, values) if base.is_closed else None
        if config is None:  # not possible: compose the job itself
            base = self._base(tuple(words))
            config = base.job.config
        elif config.get("name", "") is None:
            config["name"] = run_name(base.job.choices)
        return replace(base.job, config=config, overrides=tuple(words))

    def _base(self, words: Words) -> Base:
        """Return the base of `words`, and keep it for other jobs."""
        if words not in self._bases:
            if len(self._bases) >= MAX_BASES:
                self._bases.clear()
            base = self._base_with_other_choice(words)
            self._bases[words] = base or self._base_of(self._config(words), words)
        return self._bases[words]

    def _config(self, words: Words) -> DictConfig:
        """Return the config that Hydra composes of `words`, with Hydra's own node."""
        config = self._known.get(words)
        return compose_config(words, self._config_name) if config is None else config

    def _base_of(self, config: DictConfig, words: Words) -> Base:
        """Return the base that a composed config makes."""
        choices = choices_of(config)
        launcher: Any = OmegaConf.to_container(config.hydra.launcher)
        values = resolved(config, choices)
        job = ComposedJob(values, choices, words, self._typed, launcher, self._files)
        containers: Any = OmegaConf.to_container(config, resolve=False)
        del containers["hydra"]
        return Base(job, _is_closed(containers))

    def _base_with_other_choice(self, words: Words) -> Base | None:
        """Return a base derived from a known base whose words differ in the choice of one group;
        None if there is no such base, or if it cannot be derived."""
        # the latest first: neighbouring jobs of a sweep differ least
        for known_words, base in reversed(self._bases.items()):
            if len(known_words) != len(words) or not base.is_closed:
                continue
            # at least one differs, because the caller has no base of `words`
            differing = [new for old, new in zip(known_words, words, strict=True) if old != new]
            group, _, choice = differing[0].partition("=")
            if len(differing) == 1 and any(w.startswith(f"{group}=") for w in known_words):
                job = _with_choice(base.job, group, choice, words)
                return None if job is None else replace(base, job=job)
        return None


def _with_choice(
    job: ComposedJob, group: str, choice: str, words: Sequence[str]
) -> ComposedJob | None:
    """Return `job` with another choice of `group`; None if that could change more than its node.

    Only choices of conf/ are derived, because tests compare all of them with Hydra's result.
    """
    files = job.files
    old_choice = job.choices.get(group, "")
    is_shipped = files.folders == (conf_dir(),) and files.has(group, choice)
    has_inner_words = any(re.match(rf"[+~]*{group}[/.@]", word) for word in words)
    if not old_choice or not is_shipped or has_inner_words:
        return None

    # 1. Both choices make the node of the group and nothing else, and need no other value.
    old_config = files.config(group, old_choice)
    new_config = files.config(group, choice)
    if old_config.keys() != {group} or new_config.keys() != {group}:
        return None
    if "${" in str(new_config) or not _is_closed(new_config):  # an interpolation is not resolved
        return None

    # 2. No other choice, and no word, has changed the node.
    others = {g: name for g, name in job.choices.items() if g.partition("/")[0] != group}
    for other_group, name in others.items():
        if files.has(other_group, name) and group in files.config(other_group, name):
            return None
    if old_config[group] != job.config[group]:
        return None

    # 3. Replace the node, and the choices in subgroups, in Hydra's order.
    choices: dict[str, str] = {}
    for other_group, name in job.choices.items():
        if other_group == group:
            choices[group] = choice
            choices.update(files.all_included(group, choice))
        elif other_group in others:
            choices[other_group] = name
    return replace(job, config=job.config | {group: new_config[group]}, choices=choices)


def _is_value(override: Override) -> bool:
    """Return whether an override gives a plain value to a key of a run."""
    key = override.key_or_group
    if not is_plain_assignment(override) or override.package is not None:
        return False
    if key.partition(".")[0] in ("hydra", *COMMAND_KEYS) or options(key):
        return False
    value = override.value()
    items = value if isinstance(value, list) else [value]
    is_plain = all(isinstance(item, bool | int | float | str | None) for item in items)
    return is_plain and "${" not in str(value)


def _is_closed(config: Mapping[str, Any]) -> bool:
    """Return whether no value of a config depends on another one or is missing."""
    text = VARIABLE.sub("", str(config))
    return "${" not in text and "'???'" not in text


def _with_values(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a copy of `config` with `values` at dotted keys.

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
