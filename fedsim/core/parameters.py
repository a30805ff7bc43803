"""Parameters of a part, written once: keyword-only fields of its class, with their ranges in the
annotations."""

import copy
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import (
    Annotated,
    Any,
    ClassVar,
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
Rule = Callable[[str, Any], Problem | None]
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Interval(ge=0, le=1)]
Count = Annotated[int, Ge(1)]
CountOrZero = Annotated[int, Ge(0)]


class Stateful:
    """A part with values that cross rounds."""

    state: ClassVar[tuple[str, ...]] = ()
    """Names of the attributes that persist between rounds: everything that an exact resume has to
    restore."""

    def state_dict(self) -> dict[str, Any]:
        """A deep copy of the attributes named in `state`."""
        return {name: copy.deepcopy(getattr(self, name)) for name in self.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state taken by `state_dict`."""
        for name in self.state:
            setattr(self, name, copy.deepcopy(state[name]))


@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(field,))
def parameters(cls: type[T]) -> type[T]:
    """Make the annotated attributes of `cls` keyword-only parameters of its constructor, and
    attributes of its objects.

    The constructor raises `ConfigError` with every value that is out of its range, and with what
    the method `problems` yields; `__post_init__` comes after that. Ranges are `Gt(0)`, `Ge`, `Le`
    and `Interval(ge, le or lt)` of annotated_types, which numbers that are not finite in float32
    are outside of; None and text are in all. Attributes without an annotation, or with `ClassVar`,
    are no parameters.
    """
    prepare = getattr(cls, "__post_init__", None)

    def check_and_prepare(self: Any) -> None:
        if self.__parameters__ is rules:  # and not those of a subclass, which hold these, too
            given = [(name, getattr(self, name), ranges) for name, ranges in rules.items()]
            numbers = [one for one in given if isinstance(one[1], int | float)]
            broken = [[one(name, value) for one in ranges] for name, value, ranges in numbers]
            first = [next(filter(None, problems), None) for problems in broken]  # of each parameter
            check(*first, *getattr(self, "problems", tuple)())
        if prepare is not None:
            prepare(self)

    cls.__post_init__ = check_and_prepare  # type: ignore[attr-defined]
    made = dataclass(kw_only=True, eq=False, repr=False)(cls)
    hints = get_type_hints(made.__init__, include_extras=True)
    rules = {
        name: [_rule(name, one) for one in _ranges(hint)]
        for name, hint in hints.items()
        if name != "return"
    }
    made.__parameters__ = rules  # type: ignore[attr-defined]
    return made


def _ranges(hint: Any) -> list[Any]:
    if get_origin(hint) in (Union, types.UnionType):
        return [found for arg in get_args(hint) for found in _ranges(arg)]
    return [
        m
        for m in getattr(hint, "__metadata__", ())
        if isinstance(m, BaseMetadata | GroupedMetadata)
    ]


def _rule(name: str, limits: Any) -> Rule:
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
        f"{name}: the range {limits} is none of Gt(0), Ge, Le and Interval(ge=, le= or lt=)"
    )
