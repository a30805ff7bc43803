"""The jobs of a sweep: Hydra composes one, and again where it must. Values of single keys are laid
over it, and choices of conf/ that make no more than the node of their group.

Words whose effect that would not show (`~key`, `+key`, mappings, keys of `hydra`, what holds an
interpolation) are left to Hydra, which composes such a job anew; so are keys that there are not,
for its error.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from fedsim.config.choice_files import ChoiceFiles
from fedsim.config.diagnosis import OWN_KEYS, run_name, words_of_scale
from fedsim.config.words import options, parse_one, without_sweeps
from fedsim.core.disk import conf_dir

VARIABLE = re.compile(r"\$\{oc\.env:[^${}]*\}")
"""An interpolation that depends on no other key."""
MOST_BASES = 200
"""Compositions that are kept, so that a sweep over many choices does not hold them all."""


@dataclass(frozen=True)
class Composed:
    """One job's config as plain containers, the choice made in each group, and how jobs are
    launched.

    `overrides`: the words that it was composed of. `typed`: the keys and groups of those that are
    on the command line; a preset adds others. `launcher`: the node hydra.launcher. `files`: what it
    could be composed from.
    """

    config: dict[str, Any]
    choices: dict[str, str]
    overrides: tuple[str, ...]
    typed: frozenset[str]
    launcher: dict[str, Any]
    files: ChoiceFiles


@dataclass(frozen=True)
class Base:
    """What words compose to, and whether values can be laid over it."""

    hydra: DictConfig
    job: Composed
    open: bool


class Jobs:
    """Composes jobs; `by_hydra` makes the config, and the job, of all words of one. Of a single one
    Hydra composes all, where there are not `several`."""

    def __init__(
        self, by_hydra: Callable[[Sequence[str]], tuple[DictConfig, Composed]], *, several: bool
    ) -> None:
        self._by_hydra, self._several = by_hydra, several
        self._words: dict[str, tuple[Override, bool]] = {}
        self._bases: dict[tuple[str, ...], Base] = {}

    def compose(self, words: Sequence[str]) -> Composed:
        """The job that `words` describe; where the preset is swept over, its small size is known
        only now."""
        job, base = self._composed(words)
        more = without_sweeps(words_of_scale(base.hydra, [self._parsed(word)[0] for word in words]))
        return self._composed([*more, *words])[0] if more else job

    def _composed(self, words: Sequence[str]) -> tuple[Composed, Base]:
        parsed = {word: self._parsed(word) for word in words}
        base = self._base(tuple(word for word, (_, plain) in parsed.items() if not plain))
        values = {o.key_or_group: o.value() for o, plain in parsed.values() if plain}
        laid = _laid_over(base.job.config, values) if base.open else None
        if laid is None:
            base = self._base(tuple(words))
            laid = base.job.config
        elif laid.get("name", "") is None:
            laid["name"] = run_name(base.job.choices)
        return replace(base.job, config=laid, overrides=tuple(words)), base

    def _base(self, words: tuple[str, ...]) -> Base:
        if words not in self._bases:
            if len(self._bases) >= MOST_BASES:
                self._bases.clear()
            base = self._with_other_choice(words)
            if base is None:
                config, job = self._by_hydra(words)
                base = Base(config, job, _is_open(config))
            self._bases[words] = base
        return self._bases[words]

    def _with_other_choice(self, words: tuple[str, ...]) -> Base | None:
        """From a job that differs in the choice of one group, whose node that choice alone makes;
        None if there is none."""
        for known, base in reversed(self._bases.items()) if self._several else ():
            pairs = [pair for pair in zip(known, words, strict=False) if pair[0] != pair[1]]
            if len(known) == len(words) and len(pairs) == 1 and base.open:
                group, _, choice = pairs[0][1].partition("=")
                if pairs[0][0].startswith(f"{group}="):
                    job = _chosen(base.job, group, choice, words)
                    return None if job is None else replace(base, job=job)
        return None

    def _parsed(self, word: str) -> tuple[Override, bool]:
        if word not in self._words:
            override = parse_one(word)
            self._words[word] = override, self._several and _is_value(override)
        return self._words[word]


def _chosen(job: Composed, group: str, choice: str, words: Sequence[str]) -> "Composed | None":
    """`job` with another choice of `group`; None where more than the group's node would change,
    where another file or word could change it, and where not all files are of conf/, whose choices
    are tested to give what Hydra does."""
    files, before = job.files, job.choices.get(group, "")
    inner = any(re.match(rf"[+~]*{group}[/.@]", word) for word in words)
    if inner or not before or files.folders != (conf_dir(),) or not files.has(group, choice):
        return None
    others = [
        (g, name)
        for g, name in job.choices.items()
        if g.partition("/")[0] != group and files.has(g, name)
    ]
    old, new = files.config(group, before), files.config(group, choice)
    alone = old.keys() == new.keys() == {group} and not any(
        group in files.config(*other) for other in others
    )
    if (
        not alone
        or old[group] != job.config[group]
        or any("${" in text or text == "???" for text in _texts(new))
    ):
        return None
    choices: dict[str, str] = {}
    for key, name in job.choices.items():
        if key == group:
            choices |= {group: choice, **files.made(group, choice)}
        elif key.partition("/")[0] != group:
            choices[key] = name
    return replace(job, config={**job.config, group: new[group]}, choices=choices)


def _is_value(override: Override) -> bool:
    """Whether it gives a key of a run a plain value."""
    key = override.key_or_group
    changes = (
        override.is_delete()
        or override.is_add()
        or override.is_force_add()
        or override.is_sweep_override()
    )
    if (
        changes
        or override.package is not None
        or key.partition(".")[0] in ("hydra", *OWN_KEYS)
        or options(key)
    ):
        return False
    value = override.value()
    return all(_is_plain(item) for item in value) if isinstance(value, list) else _is_plain(value)


def _is_plain(value: Any) -> bool:
    return (
        value is None
        or isinstance(value, bool | int | float)
        or (isinstance(value, str) and "${" not in value)
    )


def _is_open(config: DictConfig) -> bool:
    """Whether no value of the job depends on one of its keys, and none is missing."""
    raw: Any = OmegaConf.to_container(config, resolve=False)
    return not any(
        "${" in VARIABLE.sub("", text) or text == "???" for text in _texts({**raw, "hydra": None})
    )


def _texts(node: Any) -> list[str]:
    items = node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else []
    return [node] if isinstance(node, str) else [text for item in items for text in _texts(item)]


def _laid_over(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any] | None:
    """A copy with values at dotted keys; None where there is no such key, or a mapping."""
    top = dict(config)
    for key, value in values.items():
        *above, last = key.split(".")
        node = top
        for part in above:
            if not isinstance(node.get(part), dict):
                return None
            node[part] = node = dict(node[part])
        if last not in node or isinstance(node[last], dict):
            return None
        node[last] = value
    return top
