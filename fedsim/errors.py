"""Errors that a user can act on: each names the config key, its value, the rule and the remedy.

Exit codes: 0 done, 1 a run failed, 2 config, 3 data, 4 diverged, 130 interrupted.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar


@dataclass(frozen=True)
class Problem:
    """One broken rule. `key` is relative to the object that found it; `instantiate` puts the group's name before it."""

    key: str
    value: Any
    rule: str
    remedy: str = ""

    def within(self, prefix: str) -> "Problem":
        return replace(self, key=f"{prefix}.{self.key}" if self.key else prefix)

    def __str__(self) -> str:
        value = f"={self.value!r}" if self.value is not Ellipsis else ""
        return f"{self.key}{value}: {self.rule}" + (f"\n    {self.remedy}" if self.remedy else "")


class FedsimError(Exception):
    """Base of all errors that end a run with one clear message instead of a traceback."""

    exit_code: ClassVar[int] = 1


class ConfigError(FedsimError, ValueError):
    """One or more values of the config break a rule (exit code 2)."""

    exit_code = 2

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


class DataError(FedsimError):
    """A data set is missing, damaged or cannot be divided as asked (exit code 3)."""

    exit_code = 3


class DivergedError(FedsimError):
    """Every update of a round was non-finite, or the aggregated model is (exit code 4)."""

    exit_code = 4


def check(*problems: Problem | None) -> None:
    """Raise one `ConfigError` that tells all the problems found, or return if there are none."""
    found = [p for p in problems if p is not None]
    if found:
        raise ConfigError(found)


def rule(holds: bool, key: str, value: Any, text: str, remedy: str = "") -> Problem | None:
    """A `Problem` unless `holds`."""
    return None if holds else Problem(key, value, text, remedy)


def positive(key: str, value: float, remedy: str = "") -> Problem | None:
    return rule(math.isfinite(value) and value > 0, key, value, _finite(value) + "> 0", remedy)


def at_least(key: str, value: float, low: float, remedy: str = "") -> Problem | None:
    return rule(math.isfinite(value) and value >= low, key, value, f"{_finite(value)}>= {low:g}", remedy)


def _finite(value: float) -> str:
    return "must be " if math.isfinite(value) else "must be finite and "


def between(key: str, value: float, low: float, high: float, *, open_high: bool = False) -> Problem | None:
    holds = low <= value < high if open_high else low <= value <= high
    return rule(holds, key, value, f"must lie in [{low:g}, {high:g}{')' if open_high else ']'}")


def one_of(key: str, value: Any, allowed: Iterable[Any]) -> Problem | None:
    allowed = list(allowed)
    return rule(value in allowed, key, value, f"must be one of {', '.join(map(str, allowed))}")
