"""Parameters of a component (a selector, a model, a data set, ...), written once: keyword-only
fields of its class, with their ranges in the annotations.

The decorator `parameters` makes the constructor from them, and the constructor checks the ranges.
fedsim also reads the annotations without importing the class (`fedsim.config.declared`).
"""

import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import (
    Annotated,
    Any,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import BaseMetadata, Ge, GroupedMetadata, Gt, Interval, Le

from fedsim.core.errors import Problem, at_least, at_most, between, check, positive

T = TypeVar("T")
Problems = Iterable[Problem | None]
"""Violated rules, as `problems` methods yield them; None stands for a rule that holds."""
RangeCheck = Callable[[str, Any], Problem | None]
"""A function of a parameter's name and value; it returns a problem if the value is out of range."""
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Interval(ge=0, le=1)]
Count = Annotated[int, Ge(1)]
CountOrZero = Annotated[int, Ge(0)]


@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(field,))
def parameters(cls: type[T]) -> type[T]:
    """Make the annotated attributes of `cls` keyword-only parameters of its constructor, and
    attributes of its objects.

    The constructor raises one `ConfigError` with all values that are out of their range and all
    problems that the method `problems` yields. Then it calls `__post_init__`. Ranges are `Gt(0)`,
    `Ge`, `Le`, `Interval(gt=0, le)` and `Interval(ge, le or lt)` of annotated_types. Numbers that
    are not finite in float32 are outside of every range that has no upper end; None and text are
    never out of range. Attributes without an annotation, or with `ClassVar`, are no parameters.
    """
    prepare = getattr(cls, "__post_init__", None)

    def check_and_prepare(self: Any) -> None:
        # a subclass checks all parameters, inherited ones included
        if self.__parameters__ is range_checks:
            range_problems = [
                _first_problem(name, getattr(self, name), checks)
                for name, checks in range_checks.items()
            ]
            problems = self.problems() if hasattr(self, "problems") else ()
            check(*range_problems, *problems)
        if prepare is not None:
            prepare(self)

    cls.__post_init__ = check_and_prepare  # type: ignore[attr-defined]
    new_class = dataclass(kw_only=True, eq=False, repr=False)(cls)
    hints = get_type_hints(new_class.__init__, include_extras=True)
    hints.pop("return", None)
    range_checks: dict[str, list[RangeCheck]] = {}
    for name, hint in hints.items():
        range_checks[name] = [_range_check(name, limits) for limits in _ranges(hint)]
    new_class.__parameters__ = range_checks  # type: ignore[attr-defined]
    return new_class


def _first_problem(name: str, value: Any, checks: list[RangeCheck]) -> Problem | None:
    """Return the first problem of a number; None for other values, such as None and text."""
    if isinstance(value, int | float):
        for range_check in checks:
            problem = range_check(name, value)
            if problem is not None:
                return problem
    return None


def _ranges(hint: Any) -> list[Any]:
    """Return the ranges in an annotation; for a union, the ranges of all its members.

    An interval that is open at its lower end is two ranges, such as Gt(0) and Le(1).
    """
    if get_origin(hint) in (Union, types.UnionType):
        ranges = []
        for member in get_args(hint):
            ranges += _ranges(member)
        return ranges
    ranges = []
    for item in getattr(hint, "__metadata__", ()):
        if isinstance(item, Interval) and item.gt is not None:
            ranges += list(item)
        elif isinstance(item, BaseMetadata | GroupedMetadata):
            ranges.append(item)
    return ranges


def _range_check(name: str, limits: Any) -> RangeCheck:
    """Return the check of a range. Raises TypeError if the annotation of `name` has another kind of
    range."""
    match limits:
        case Interval(gt=None, ge=int() | float() as low, lt=None, le=int() | float() as high):
            return partial(between, low=low, high=high)
        case Interval(gt=None, ge=int() | float() as low, lt=int() | float() as high, le=None):
            return partial(between, low=low, high=high, open_high=True)
        case Gt(gt=0):
            return positive
        case Ge(ge=int() | float() as low):
            return partial(at_least, low=low)
        case Le(le=int() | float() as high):
            return partial(at_most, high=high)
    raise TypeError(
        f"{name}: the range {limits} is none of Gt(0), Ge, Le, Interval(gt=0, le=) and "
        "Interval(ge=, le= or lt=)"
    )
