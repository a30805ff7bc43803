"""The decorator for classes of components, such as selectors, models and data sets.

A component declares each of its parameters once, as an annotated attribute of its class. The
annotation has the type and the range of values. The decorator `parameters` makes a constructor that
checks the ranges. fedsim also reads the annotations without importing the class
(`fedsim.config.declared`).
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
"""The return type of a component's method `problems`. It yields a `Problem` for each violated rule,
and may yield None for a rule that holds."""
RangeCheck = Callable[[str, Any], Problem | None]
"""A function of a parameter's name and value that returns a problem if the value is out of
range."""
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Interval(ge=0, le=1)]
Count = Annotated[int, Ge(1)]
CountOrZero = Annotated[int, Ge(0)]


@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(field,))
def parameters(cls: type[T]) -> type[T]:
    """Make the annotated attributes of `cls` keyword-only parameters of its constructor, and
    attributes of its objects.

    Attributes without an annotation, or with `ClassVar`, are no parameters. An annotation may have
    a range of the package annotated_types:

    - `Gt(0)`, `Ge(low)` or `Le(high)`;
    - `Interval(gt=0, le=high)`, `Interval(ge=low, le=high)` or `Interval(ge=low, lt=high)`.

    A range without an upper end excludes numbers that are not finite in float32. None and texts are
    never out of range. The constructor raises one `ConfigError` with all values that are out of
    their range and all problems that the method `problems` yields. Then it calls `__post_init__`.
    Raises TypeError for any other kind of range.
    """
    prepare = getattr(cls, "__post_init__", None)

    def check_and_prepare(self: Any) -> None:
        # An object of a decorated subclass arrives here through `prepare` of the subclass, which
        # has already checked all parameters, also those of this class.
        if type(self).__parameters__ is cls.__parameters__:  # type: ignore[attr-defined]
            _check_values(self)
        if prepare is not None:
            prepare(self)

    cls.__post_init__ = check_and_prepare  # type: ignore[attr-defined]
    cls = dataclass(kw_only=True, eq=False, repr=False)(cls)
    hints = get_type_hints(cls.__init__, include_extras=True)
    hints.pop("return", None)
    range_checks: dict[str, list[RangeCheck]] = {}
    for name, hint in hints.items():
        range_checks[name] = [_range_check(name, limits) for limits in _ranges(hint)]
    cls.__parameters__ = range_checks  # type: ignore[attr-defined]
    return cls


def _check_values(component: Any) -> None:
    """Raise one `ConfigError` with all problems of a component's values, if there are any."""
    problems: list[Problem | None] = []
    for name, range_checks in component.__parameters__.items():
        value = getattr(component, name)
        if isinstance(value, int | float):  # other values, such as None and texts, have no range
            for range_check in range_checks:
                problem = range_check(name, value)
                if problem is not None:
                    problems.append(problem)
                    break
    if hasattr(component, "problems"):
        problems += component.problems()
    check(*problems)


def _ranges(hint: Any) -> list[Any]:
    """Return the ranges in an annotation. A union has the ranges of all its members.

    An interval with an open lower end gives two ranges, such as Gt(0) and Le(1).
    """
    if get_origin(hint) in (Union, types.UnionType):
        ranges = []
        for member in get_args(hint):
            ranges += _ranges(member)
        return ranges
    ranges = []
    for item in getattr(hint, "__metadata__", ()):
        if isinstance(item, Interval) and item.gt is not None:
            ranges += list(item)  # annotated_types yields its two ends
        elif isinstance(item, BaseMetadata | GroupedMetadata):
            ranges.append(item)
    return ranges


def _range_check(name: str, limits: Any) -> RangeCheck:
    """Return the check of the range `limits`, which is part of the annotation of `name`.

    Raises TypeError for a kind of range that `parameters` does not name.
    """
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
