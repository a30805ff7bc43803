"""What is searched in, in Hydra's syntax of sweeps.

`optimizer.lr=tag(log,interval(0.001,0.1))`, `local.steps=int(interval(5,40))`, `cohort_size=range(2,10,2)`, a choice:
`selector=gpfl,random`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from fedsim.config.overrides import key_of, typed_in, values_of
from fedsim.config.plan import SEEDS
from fedsim.errors import ConfigError, Problem, rule


@dataclass(frozen=True)
class Space:
    """`axes`: what is searched in, by key. `words`: everything else of the command line."""

    axes: Mapping[str, BaseDistribution]
    words: Sequence[str]

    def words_of(self, params: Mapping[str, Any]) -> list[str]:
        """The words of the trial with these values, which are sampled from `axes`."""
        return [*self.words, *(f"{key}={value}" for key, value in params.items())]

    def corners(self) -> list[dict[str, Any]]:
        """Values of trials in which each choice and each end of a range occurs: what is checked before any is run."""
        ends = {key: _ends(axis) for key, axis in self.axes.items()}
        first = {key: values[0] for key, values in ends.items()}
        return [first, *({**first, key: value} for key, values in ends.items() for value in values[1:])]


def space_of(overrides: Sequence[Override]) -> Space:
    """The space that sweeps describe. Raises `ConfigError` for what cannot be searched in, or without any sweep."""
    swept = [o for o in overrides if o.is_sweep_override() and key_of(o) not in SEEDS]
    axes: dict[str, BaseDistribution] = {}
    problems: list[Problem] = []
    for override in swept:
        try:
            axes[override.get_key_element()] = _distribution(override)
        except ConfigError as error:
            problems += error.problems
        except ValueError as error:  # Optuna's
            problems.append(Problem(override.get_key_element(), typed_in(override), str(error)))
    if not swept:
        problems.append(Problem("search", ..., "has nothing to search in", "'optimizer.lr=interval(0.01,0.3)', say"))
    if problems:
        raise ConfigError(problems)
    return Space(axes, [o.input_line or "" for o in overrides if o not in swept])


def _distribution(override: Override) -> BaseDistribution:
    value: Any = override.value()
    log = "log" in getattr(value, "tags", ())
    if isinstance(value, IntervalSweep):
        low: Any = value.start
        high: Any = value.end
        whole = isinstance(low, int) and isinstance(high, int)
        return IntDistribution(low, high, log=log) if whole else FloatDistribution(low, high, log=log)
    texts = [word.partition("=")[2] for word in values_of(override)]
    if isinstance(value, RangeSweep) and all(_is_whole(text) for text in texts):
        numbers = sorted(map(int, texts))
        step = abs(int(value.step or 1))
        if not log or step == 1:
            return IntDistribution(numbers[0], numbers[-1], log=log, step=step)
    text = "a logarithmic scale is for intervals, and for ranges of whole numbers in steps of 1"
    if wrong := rule(not log, override.get_key_element(), typed_in(override), text):
        raise ConfigError([wrong])
    return CategoricalDistribution(texts)


def _ends(axis: BaseDistribution) -> list[Any]:
    if isinstance(axis, CategoricalDistribution):
        return list(axis.choices)
    assert isinstance(axis, IntDistribution | FloatDistribution)
    return [axis.low, axis.high]


def _is_whole(text: str) -> bool:
    return text.lstrip("-").isdigit()


def quiet() -> None:
    """Optuna tells of each trial by itself."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
