"""The jobs of a sweep as words, before they are composed."""

import math
from collections.abc import Sequence
from unittest import mock

from hydra.core.override_parser.types import Override

from fedsim.config.compose import compose_jobs, search_path
from fedsim.config.sources import options
from fedsim.config.sweeps import expand

Words = list[str]
"""The words `key=value` of one job."""


def axes_of(found: Sequence[Override]) -> dict[str, Words]:
    """A word for each value of each key; a later override replaces an earlier one of the same
    key."""
    return {o.get_key_element(): [word for (word,) in expand([o])] for o in found}


def diagonal(axes: Sequence[Words]) -> list[Words]:
    """Jobs in which each value of each key occurs, as many as the key with the most values has."""
    return [[words[i % len(words)] for words in axes] for i in range(max(map(len, axes)))]


def few_choices(found: Sequence[Override], *, max_choices: int) -> list[Words]:
    """In place of `fedsim.config.compose.expand`: some of the jobs of a sweep, for which Hydra
    composes few configs.

    Each selector and each value of a key occurs, because such jobs are derived from others. Of
    another group, at most `max_choices` choices occur, evenly spaced. A choice that does not exist
    occurs always, so that it is noticed.
    """
    axes = axes_of(found)
    for key, words in axes.items():
        existing = options(key)
        if key != "selector" and existing:
            missing = [word for word in words if word.partition("=")[2] not in existing]
            axes[key] = missing + words[:: math.ceil(len(words) / max_choices)]
    return diagonal(list(axes.values()))


def jobs_of(words: Sequence[str]) -> list[Words]:
    """All jobs that a command line with a sweep makes. Composes what they have in common, and none
    of them."""
    jobs: list[Words] = []

    def note(found: Sequence[Override]) -> list[Words]:
        jobs.extend(expand(found))
        return []

    with search_path(), mock.patch("fedsim.config.compose.expand", note):
        assert not compose_jobs(words, multirun=True)
    return jobs
