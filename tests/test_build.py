"""Objects from config nodes: types, names, targets, what fedsim passes by position, and ranges in
the annotations."""

import inspect
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Interval, Le
from torch import nn

from fedsim.config.build import PASSED, construct, inspect_node, instantiate, resolve
from fedsim.config.compose import compose_jobs, make_plan, search_path
from fedsim.config.parts import BASES
from fedsim.config.typecheck import conform, describe
from fedsim.core.encoding import EncodingError, encode
from fedsim.core.errors import ConfigError, Problem, at_least, check, positive, rule
from fedsim.core.parameters import Positive, Problems, Share, parameters
from fedsim.selectors.base import Selector
from tests.run_toys import ROOT, shell


def told(call: Any, *args: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*args)
    return str(caught.value)


# --- values and annotations -------------------------------------------------------------------------------------------

VALUES = [
    *(None, True, 0, 1, -3, 1.0, 1.5, float("nan"), "", "a", "1"),
    *([], [1, 2], [1, "a"], {"a": 1}, {1: "a"}),
]

# An annotation, in words, and what each of the values becomes for it; - where it does not fit.
TABLE: list[tuple[Any, str, str]] = [
    (int, "an integer", "-|-|0|1|-3|-|-|-|-|-|-|-|-|-|-|-"),
    (float, "a number", "-|-|0.0|1.0|-3.0|1.0|1.5|nan|-|-|-|-|-|-|-|-"),
    (bool, "true or false", "-|True|-|-|-|-|-|-|-|-|-|-|-|-|-|-"),
    (str, "a string", "-|-|-|-|-|-|-|-|''|'a'|'1'|-|-|-|-|-"),
    (
        Path,
        "a path (~ and $HOME are known, other names are not)",
        "-|-|-|-|-|-|-|-|Path .|Path a|Path 1|-|-|-|-|-",
    ),
    (Any, "Any", "|".join(map(repr, VALUES))),
    (Literal["a", "b"], "one of a, b", "-|-|-|-|-|-|-|-|-|'a'|-|-|-|-|-|-"),
    (Literal[1], "one of 1", "-|-|-|1|-|-|-|-|-|-|-|-|-|-|-|-"),
    (int | None, "an integer or null", "None|-|0|1|-3|-|-|-|-|-|-|-|-|-|-|-"),
    (int | float, "an integer or a number", "-|-|0|1|-3|1.0|1.5|nan|-|-|-|-|-|-|-|-"),
    (Literal["a"] | bool, "one of a or true or false", "-|True|-|-|-|-|-|-|-|'a'|-|-|-|-|-|-"),
    (list[float], "a list, each item a number", "-|-|-|-|-|-|-|-|-|-|-|[]|[1.0, 2.0]|-|-|-"),
    (tuple[int, ...], "a list, each item an integer", "-|-|-|-|-|-|-|-|-|-|-|()|(1, 2)|-|-|-"),
    (
        tuple[int, str],
        "a list of 2 items: an integer, a string",
        "-|-|-|-|-|-|-|-|-|-|-|-|-|(1, 'a')|-|-",
    ),
    (dict[str, int], "a mapping", "-|-|-|-|-|-|-|-|-|-|-|-|-|-|{'a': 1}|-"),
]


def outcome(value: Any, hint: Any) -> str:
    try:
        fitted = conform(value, hint)
    except TypeError:
        return "-"
    return f"Path {fitted}" if isinstance(fitted, Path) else repr(fitted)


@pytest.mark.parametrize(("hint", "words", "row"), TABLE, ids=[str(hint) for hint, _, _ in TABLE])
def test_every_value_against_every_annotation(hint: Any, words: str, row: str) -> None:
    assert "|".join(outcome(value, hint) for value in VALUES) == row
    assert describe(hint) == words
    assert outcome(10**400, float) == "-"  # larger than any float


# --- nodes ------------------------------------------------------------------------------------------------------------


class Animal:
    pass


class Dog(Animal):
    def __init__(
        self,
        owner: str,
        *,
        legs: int,
        weight: float,
        mood: Literal["good", "bad"],
        friend: Animal | None,
    ):
        check(at_least("legs", legs, 0), positive("weight", weight))
        self.owner, self.legs, self.weight, self.mood, self.friend = (
            owner,
            legs,
            weight,
            mood,
            friend,
        )


class Herd(Animal):
    def __init__(self, *, leader: Animal, anything: Any = None, unannotated=None):  # type: ignore[no-untyped-def]
        self.leader = leader
        self.extras = [anything, unannotated]


DOG = {"_target_": f"{__name__}.Dog", "legs": 4, "weight": 3, "mood": "good", "friend": None}


def test_an_object_is_built_from_its_node_or_all_its_mistakes_are_told() -> None:
    dog = instantiate(DOG, Dog, "pet", "Ann")
    assert (dog.owner, dog.legs, dog.weight, type(dog.weight)) == ("Ann", 4, 3.0, float)
    text = told(
        instantiate,
        {**DOG, "leg": 4, "legs": "four", "mood": "sad", "weigth": 1},
        Animal,
        "pet",
        "Ann",
    )
    assert "pet.leg: is not a known key\n    did you mean pet.legs?" in text
    assert "pet.weigth: is not a known key\n    did you mean pet.weight?" in text
    assert "pet.legs='four': must be an integer" in text
    assert "pet.mood='sad': must be one of good, bad" in text
    without = {key: value for key, value in DOG.items() if key != "legs"}
    assert "pet.legs: is missing" in told(instantiate, without, Animal, "pet", "Ann")
    text = told(instantiate, {**DOG, "legs": -1, "weight": float("nan")}, Animal, "pet", "Ann")
    assert text.splitlines() == [
        "pet.legs=-1: must be >= 0",
        "pet.weight=nan: must be finite and > 0",
    ]
    herd = {
        "_target_": f"{__name__}.Herd",
        "leader": {"_target_": f"{__name__}.Herd", "leader": {"_target_": "x.Y"}},
    }
    assert "pet.leader.leader._target_='x.Y'" in told(instantiate, herd, Animal, "pet")


def test_a_node_for_a_parameter_of_any_type_stays_a_mapping() -> None:
    leader = {"_target_": f"{__name__}.Animal"}
    herd = construct(Herd, {"leader": leader, "anything": DOG, "unannotated": DOG}, "pet")
    assert type(herd.leader) is Animal
    assert herd.extras == [DOG, DOG]


@pytest.mark.parametrize("target", ["os.system", "builtins.eval", "", "nowhere", 3, None])
def test_a_target_that_is_not_of_the_base_is_never_called(target: Any, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    node = {
        "_target_": target,
        "command": f"touch {marker}",
        "args": f"touch {marker}",
        "file": str(marker),
    }
    assert "must be the dotted path of a subclass of" in told(
        instantiate, node, Animal, "pet", "Ann"
    )
    assert not marker.exists()


@pytest.mark.parametrize(
    ("target", "remedy"),
    [
        ("fedsim.selectors.random.Randm", "did you mean fedsim.selectors.random.Random?"),
        ("fedsim.selectors.random.Zzzzzzzz", "correct the class's name, or the module"),
        ("my_absent_lab.Mine", "is its module on PYTHONPATH?"),
        ("lab_that_needs_another.Mine", "install absent, or correct the import in lab_that_needs_"),
        ("lab_that_raises.Mine", "correct the module lab_that_raises: it was found, and raised"),
        ("Mine", "a file of your own needs the line `_target_: <module>.<Class>`"),
    ],
)
def test_the_remedy_for_a_target_says_what_is_wrong_with_it(
    target: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lab_that_needs_another.py").write_text("import absent\n")
    (tmp_path / "lab_that_raises.py").write_text("raise RuntimeError('boom')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert f"\n    {remedy}" in told(resolve, {"_target_": target}, Selector, "selector")


# --- what fedsim passes by position -----------------------------------------------------------------------------------


def test_a_positional_parameter_that_nobody_passes_is_told_before_the_run(tmp_path: Path) -> None:
    source = "class Mine(Random):\n    def __init__(self, n, k):\n        self.k = k\n"
    (tmp_path / "my_lab.py").write_text("from fedsim.selectors.random import Random\n\n" + source)
    (tmp_path / "conf/selector").mkdir(parents=True)
    (tmp_path / "conf/selector/mine.yaml").write_text("_target_: my_lab.Mine\n")
    words = ("--config-dir", "conf", "selector=mine", "num_rounds=1", "tracker=files_only")
    ended = shell(tmp_path, *words, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert (ended.returncode, (tmp_path / "outputs").exists()) == (2, False)
    assert "selector.k: is missing; Mine needs it\n" in ended.stderr
    assert "Traceback" not in ended.stderr


class Alone:
    def __init__(self, q: float, *, r: int = 1) -> None: ...


class Nothing:
    def __init__(self, *, r: int = 1) -> None: ...


class Strict:
    def __init__(self, population: Any, q: float, /, *, r: int = 1) -> None: ...


class Sound:
    def __init__(self, population: Any, more: int = 3, *rest: Any, r: int = 1) -> None: ...


class OnlyFirst:
    def __init__(self, population: Any, /, q: float) -> None: ...


class Unresolved:
    def __init__(self, population: Any, q: "Absent") -> None: ...  # type: ignore[name-defined]  # noqa: F821


class Width(nn.Linear):
    def __init__(self, input_shape: Any, num_classes: int, width: int) -> None: ...


@pytest.mark.parametrize(
    ("made", "key", "values", "message"),
    [
        (Alone, "partition", {}, "partition.q: is missing; Alone needs it"),
        (Nothing, "dataset", {}, "dataset: Nothing must take .*: data_dir, cache_dir "),
        (Strict, "selector", {}, "selector: Strict must take .*: population .*'q'"),
        (Sound, "selector", {"population": 3}, "selector.population: is not a known key"),
        (Sound, "selector", {"more": "x"}, "selector.more='x': must be an integer"),
        (Alone, "selector", {"q": 1.0}, "selector.q: Alone has it where fedsim passes population"),
        (Unresolved, "selector", {}, "the annotations of Unresolved cannot be .*'Absent'"),
    ],
)
def test_a_signature_is_compared_with_what_fedsim_passes(
    made: Any, key: str, values: Any, message: str
) -> None:
    runtime = [None] * len(PASSED.get(key, ()))
    assert re.search(f"(?s){message}", told(construct, made, values, key, *runtime))
    construct(Sound, {"r": 2, "more": 4}, "selector", None)
    construct(Alone, {"q": 1.0}, "partition")
    construct(OnlyFirst, {"q": 1.0}, "selector", None)
    construct(nn.Sequential, {}, "model", nn.Flatten(), nn.Flatten())
    assert "model.width: is missing" in told(
        inspect_node, {"_target_": f"{__name__}.Width"}, nn.Module, "model"
    )


def test_what_fedsim_passes_is_what_the_shipped_classes_take_and_what_contributing_says() -> None:
    with search_path():
        (job,) = compose_jobs(["clients=label_noise"], multirun=False)
    assert make_plan(job.config, job.choices)
    for group, names in PASSED.items():
        parameters = inspect.signature(
            resolve(job.config[group], object, group)
        ).parameters.values()
        assert tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD) == names
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [\w ]+ \| `conf/(\w+)/` \| `([\w.]+)` \| (.+?) \|", text, re.MULTILINE)
    bases = {group: f"{base.__module__}.{base.__qualname__}" for group, base in BASES.items()}
    assert {
        group: base.replace("torch.nn.Module", bases["model"]) for group, base, _ in rows
    } == bases
    passed = {
        group: tuple(re.findall(r"\w+", names)) for group, _, names in rows if names != "none"
    }
    assert passed == {group: PASSED[group] for group in bases if group in PASSED}


# --- parameters as fields of a class, with their ranges (fedsim.core.parameters) --------------------------------------


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


FIELDS: dict[str, Any] = {"share": 1, "count": None, "below": 0.5, "scale": 2}


def test_fields_are_keyword_only_and_attributes() -> None:
    part = construct(Larger, FIELDS, "part")
    assert part.state == [1.0, 2.0]
    assert type(part.scale) is float  # as the annotation says, from an integer of the YAML
    assert part.asked == 1  # problems are asked for once, though the base class checks, too
    assert {p.kind for p in inspect.signature(Larger).parameters.values()} == {
        inspect.Parameter.KEYWORD_ONLY
    }
    assert part != construct(Larger, FIELDS, "part")
    assert construct(ByHand, {"scale": 3}, "part", ((1,),)).state == [0.5, 3.0]
    with pytest.raises(
        EncodingError, match="which a checkpoint cannot hold"
    ):  # it would restore the fields alone
        encode(part, {}, "state")


@pytest.mark.parametrize(
    ("values", "lines"),
    [
        (
            {"share": 2, "count": 11},
            ["share=2.0: must lie in [0, 1]", "count=11: must be at most 10"],
        ),
        ({"below": 1}, ["below=1.0: must lie in [0, 1)", "below=1.0: must differ from share"]),
        (
            {"below": 2, "scale": 1e39},
            ["below=2.0: must lie in [0, 1)", "scale=1e+39: must be finite in float32 and > 0"],
        ),
        (
            {"share": "a", "count": 0.5},
            ["share='a': must be a number", "count=0.5: must be an integer or null"],
        ),
    ],
)
def test_all_mistakes_are_told_at_once_those_of_the_base_class_first(
    values: dict[str, Any], lines: list[str]
) -> None:
    assert told(construct, Larger, {**FIELDS, **values}, "part").splitlines() == [
        f"part.{line}" for line in lines
    ]
    assert told(construct, ByHand, {"scale": 0}, "part", 1) == "part.scale=0.0: must be > 0"
    with pytest.raises(ConfigError) as error:
        Part(share=-1.0, count=None, below=0.0)
    assert error.value.problems == (Problem("share", -1.0, "must lie in [0, 1]"),)


def test_an_interval_may_be_open_at_0() -> None:
    @parameters
    class HalfOpen:
        step: Annotated[float, Interval(gt=0, le=1)]

    assert HalfOpen(step=1.0).step == 1.0
    for step, fault in ((0.0, "must be > 0"), (1.5, "must be at most 1")):
        with pytest.raises(ConfigError) as error:
            HalfOpen(step=step)
        assert error.value.problems == (Problem("step", step, fault),)


def test_unknown_ranges_are_refused_where_the_class_is_defined() -> None:
    with pytest.raises(TypeError, match=r"size: the range Gt\(gt=3\) is none of"):

        @parameters
        class Odd:
            size: Annotated[int, Ge(1), Gt(3)]
