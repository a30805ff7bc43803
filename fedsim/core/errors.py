"""Errors for users: each names the config key, its value, the violated rule and a remedy."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

LARGEST = (2 - 2**-23) * 2.0**127
"""The largest finite number of float32, in which models are trained."""


@dataclass(frozen=True)
class Problem:
    """A violated rule. `key` is relative to the object that checks it; `within` adds the config
    group's name."""

    key: str
    value: Any
    rule: str
    remedy: str = ""

    def within(self, prefix: str) -> "Problem":
        """The same problem with the key `prefix`.`key`."""
        return replace(self, key=f"{prefix}.{self.key}" if self.key else prefix)

    def __str__(self) -> str:
        value = f"={self.value!r}" if self.value is not Ellipsis else ""
        return f"{self.key}{value}: {self.rule}" + (f"\n    {self.remedy}" if self.remedy else "")


class FedsimError(Exception):
    """Base class of errors that end a run with a message for the user instead of a traceback."""

    exit_code: ClassVar[int] = 1


class ConfigError(FedsimError, ValueError):
    """One or more config values violate a rule (exit code 2)."""

    exit_code = 2

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))

    def __reduce__(self) -> tuple[Any, ...]:  # as it is sent from a process of a launcher
        return ConfigError, (self.problems,)


class DataError(FedsimError):
    """A data set is missing, damaged or cannot be partitioned as configured (exit code 3)."""

    exit_code = 3


class DivergedError(FedsimError):
    """All updates of a round, or the aggregated model, contain nan or infinity (exit code 4)."""

    exit_code = 4


def check(*problems: Problem | None) -> None:
    """Raise one `ConfigError` with all `problems` that are not None, if there are any."""
    found = [p for p in problems if p is not None]
    if found:
        raise ConfigError(found)


def rule(holds: bool, key: str, value: Any, text: str, remedy: str = "") -> Problem | None:
    """None if `holds`, else a `Problem` with the rule `text`, such as "must be even"."""
    return None if holds else Problem(key, value, text, remedy)


def positive(key: str, value: float) -> Problem | None:
    """None if `value` is finite, in float32 too, and > 0, else a `Problem`."""
    return rule(value <= LARGEST and value > 0, key, value, _finite(value) + "> 0")


def at_least(key: str, value: float, low: float) -> Problem | None:
    """None if `value` is finite, in float32 too, and >= `low`, else a `Problem`."""
    return rule(value <= LARGEST and value >= low, key, value, f"{_finite(value)}>= {low:g}")


def at_most(key: str, value: float, high: float, remedy: str = "") -> Problem | None:
    return rule(value <= high, key, value, f"must be at most {high}", remedy)


def _finite(value: float) -> str:
    if value <= LARGEST:
        return "must be "
    return "must be finite in float32 and " if math.isfinite(value) else "must be finite and "


def between(
    key: str, value: float, low: float, high: float, *, open_high: bool = False
) -> Problem | None:
    holds = low <= value < high if open_high else low <= value <= high
    return rule(holds, key, value, f"must lie in [{low:g}, {high:g}{')' if open_high else ']'}")
