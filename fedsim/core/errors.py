"""Errors for users. Each names the config key, its value, the violated rule and a remedy."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")
LARGEST = (2 - 2**-23) * 2.0**127
"""The largest finite number of float32, in which models are trained."""


@dataclass(frozen=True)
class Problem:
    """A violated rule.

    `key` is relative to the object that checks it; `within` adds the name of its config group. A
    value of `...` is not shown.
    """

    key: str
    value: Any
    rule: str
    remedy: str = ""

    def within(self, prefix: str) -> "Problem":
        """Return the same problem with the key `prefix`.`key`."""
        return replace(self, key=f"{prefix}.{self.key}" if self.key else prefix)

    def __str__(self) -> str:
        value = "" if self.value is Ellipsis else f"={self.value!r}"
        remedy = f"\n    {self.remedy}" if self.remedy else ""
        return f"{self.key}{value}: {self.rule}{remedy}"


class FedsimError(Exception):
    """Base class of errors that end a run with a message for the user instead of a traceback."""

    exit_code: ClassVar[int] = 1


class ConfigError(FedsimError, ValueError):
    """One or more config values violate a rule (exit code 2)."""

    exit_code = 2

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the problems, for launchers that send errors between processes."""
        return ConfigError, (self.problems,)


class DataError(FedsimError):
    """A data set is missing, damaged or cannot be partitioned as configured (exit code 3)."""

    exit_code = 3


class DivergedError(FedsimError):
    """All updates of a round, the aggregated model or a validation loss that a replay compares
    contain nan or infinity (exit code 4)."""

    exit_code = 4


class ProblemCollector:
    """Collects the problems of several checks. If problems have the same key and value, it keeps
    the first."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def run(self, function: Callable[..., T], *arguments: Any) -> T | None:
        """Return what `function` returns; None if it raises a `ConfigError`, which is collected."""
        try:
            return function(*arguments)
        except ConfigError as error:
            self.add(*error.problems)
            return None

    def run_user_code(self, function: Callable[..., T], *arguments: Any) -> T | None:
        """Do the same as `run` for a function that may call a class of the user's.

        Other exceptions of this class are ignored here: None is returned. The job that uses the
        class will meet them again, and it alone ends.
        """
        try:
            return self.run(function, *arguments)
        except (Exception, SystemExit):
            return None

    def add(self, *problems: Problem | None) -> None:
        """Add all problems that are not None and whose key and value are not known yet."""
        for problem in problems:
            if problem is None:
                continue
            # a list, because values may be lists, which no set can hold
            known_keys = [(known.key, known.value) for known in self.problems]
            if (problem.key, problem.value) not in known_keys:
                self.problems.append(problem)


def check(*problems: Problem | None) -> None:
    """Raise one `ConfigError` with all `problems` that are not None, if there are any."""
    violated = [problem for problem in problems if problem is not None]
    if violated:
        raise ConfigError(violated)


def rule(holds: bool, key: str, value: Any, text: str, remedy: str = "") -> Problem | None:
    """Return None if `holds`, otherwise a `Problem` with the rule `text`, such as "must be even".

    A `value` of `...` is not shown.
    """
    return None if holds else Problem(key, value, text, remedy)


def positive(key: str, value: float) -> Problem | None:
    """Return a `Problem` unless `value` is > 0 and finite, also in float32."""
    return rule(0 < value <= LARGEST, key, value, f"{_must_be(value)}> 0")


def at_least(key: str, value: float, low: float) -> Problem | None:
    """Return a `Problem` unless `value` is >= `low` and finite, also in float32."""
    return rule(low <= value <= LARGEST, key, value, f"{_must_be(value)}>= {low:g}")


def at_most(key: str, value: float, high: float, remedy: str = "") -> Problem | None:
    """Return a `Problem` unless `value` is <= `high`."""
    return rule(value <= high, key, value, f"must be at most {high}", remedy)


def between(
    key: str, value: float, low: float, high: float, *, open_high: bool = False
) -> Problem | None:
    """Return a `Problem` unless `value` lies in [`low`, `high`], or in [`low`, `high`) if
    `open_high`."""
    if open_high:
        return rule(low <= value < high, key, value, f"must lie in [{low:g}, {high:g})")
    return rule(low <= value <= high, key, value, f"must lie in [{low:g}, {high:g}]")


def _must_be(value: float) -> str:
    """Return the beginning of a rule; it says that a number must be finite if this one is not."""
    if value <= LARGEST:
        return "must be "
    return "must be finite in float32 and " if math.isfinite(value) else "must be finite and "
