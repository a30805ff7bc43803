"""Parameters that are fields of a class, with their ranges in the annotations (fedsim.core.parameters)."""

import inspect
from typing import Annotated, Any

import pytest
from annotated_types import Ge, Gt, Interval, Le

from fedsim.config.build import construct
from fedsim.core.encoding import EncodingError, encode
from fedsim.core.errors import ConfigError, Problem, rule
from fedsim.core.parameters import Positive, Problems, Share, parameters


@parameters
class Part:
    share: Share
    count: Annotated[int, Ge(1), Le(10)] | None
    below: Annotated[float, Interval(ge=0, lt=1)]

    def problems(self) -> Problems:
        yield rule(self.share != self.below, "below", self.below, "must differ from share")

    def __post_init__(self) -> None:
        self.state = [self.share]


@parameters
class Larger(Part):
    scale: Positive
    asked = 0

    def problems(self) -> Problems:
        yield from super().problems()
        self.asked += 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.state.append(self.scale)


class ByHand(Larger):
    def __init__(self, first: object, *, scale: float) -> None:
        super().__init__(share=0.5, count=None, below=0.1, scale=scale)
        self.first = first


VALUES: dict[str, Any] = {"share": 1, "count": None, "below": 0.5, "scale": 2}


def told(cls: type, values: dict[str, Any], *runtime: object) -> str:
    with pytest.raises(ConfigError) as error:
        construct(cls, values, "part", *runtime)
    return str(error.value)


def test_fields_are_keyword_only_and_attributes() -> None:
    part = construct(Larger, VALUES, "part")
    assert part.state == [1.0, 2.0]
    assert type(part.scale) is float  # as the annotation says, from an integer of the YAML
    assert part.asked == 1  # problems are asked for once, though the base class checks, too
    kinds = {p.kind for p in inspect.signature(Larger).parameters.values()}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}
    assert part != construct(Larger, VALUES, "part")


def test_all_mistakes_are_told_at_once_those_of_the_base_class_first() -> None:
    assert told(Larger, {"share": 2, "count": 11, "below": 1, "scale": 1e39}).splitlines() == [
        "part.share=2.0: must lie in [0, 1]",
        "part.count=11: must be at most 10",
        "part.below=1.0: must lie in [0, 1)",
        "part.scale=1e+39: must be finite in float32 and > 0",
    ]
    assert told(Larger, {**VALUES, "count": 0, "below": 1}).splitlines() == [
        "part.count=0: must be >= 1",
        "part.below=1.0: must lie in [0, 1)",
        "part.below=1.0: must differ from share",
    ]


def test_types_are_told_as_of_plain_annotations() -> None:
    assert told(Larger, {**VALUES, "share": "a", "count": 0.5}).splitlines() == [
        "part.share='a': must be a number",
        "part.count=0.5: must be an integer or null",
    ]
    assert "part.scale: is missing; Larger needs it" in told(Larger, {k: v for k, v in VALUES.items() if k != "scale"})


def test_a_subclass_may_have_a_constructor_of_its_own() -> None:
    assert construct(ByHand, {"scale": 3}, "part", ((1,),)).state == [0.5, 3.0]
    assert told(ByHand, {"scale": 0}, 1) == "part.scale=0.0: must be > 0"


def test_unknown_ranges_are_refused_where_the_class_is_defined() -> None:
    with pytest.raises(TypeError, match=r"size: the range Gt\(gt=3\) is none of"):

        @parameters
        class Odd:
            size: Annotated[int, Ge(1), Gt(3)]


def test_a_checkpoint_holds_no_part_of_which_it_would_restore_the_fields_alone() -> None:
    with pytest.raises(EncodingError, match="which a checkpoint cannot hold"):
        encode(construct(Larger, VALUES, "part"), {}, "state")


def test_problems_keep_the_values_that_they_are_about() -> None:
    with pytest.raises(ConfigError) as error:
        Part(share=-1.0, count=None, below=0.0)
    assert error.value.problems == (Problem("share", -1.0, "must lie in [0, 1]"),)
