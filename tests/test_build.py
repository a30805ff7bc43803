from pathlib import Path
from typing import Any, Literal

import pytest

from fedsim.config.build import instantiate, resolve
from fedsim.core.errors import ConfigError, at_least, check, positive
from fedsim.selectors.base import Selector


class Animal:
    pass


class Dog(Animal):
    def __init__(self, owner: str, *, legs: int, weight: float, mood: Literal["good", "bad"], friend: Animal | None):
        check(at_least("legs", legs, 0), positive("weight", weight))
        self.owner, self.legs, self.weight, self.mood, self.friend = owner, legs, weight, mood, friend


class Herd(Animal):
    def __init__(self, *, leader: Animal):
        self.leader = leader


DOG = {"_target_": f"{__name__}.Dog", "legs": 4, "weight": 3, "mood": "good", "friend": None}


def problems(node: Any, base: type = Animal) -> str:
    with pytest.raises(ConfigError) as caught:
        instantiate(node, base, "pet", "Ann")
    return str(caught.value)


def test_an_object_is_built_from_its_node() -> None:
    dog = instantiate(DOG, Dog, "pet", "Ann")
    assert (dog.owner, dog.legs, dog.weight) == ("Ann", 4, 3.0)
    assert isinstance(dog.weight, float)


def test_unknown_missing_and_mistyped_values_are_told_at_once() -> None:
    text = problems({**DOG, "leg": 4, "legs": "four", "mood": "sad"} | {"friend": None} | {"weigth": 1})
    assert "pet.leg: is not a known key\n    did you mean pet.legs?" in text
    assert "pet.weigth: is not a known key\n    did you mean pet.weight?" in text
    assert "pet.legs='four': must be an integer" in text
    assert "pet.mood='sad': must be one of good, bad" in text
    assert "pet.legs: is missing" in problems({k: v for k, v in DOG.items() if k != "legs"})


def test_ranges_carry_the_key_of_the_node() -> None:
    text = problems({**DOG, "legs": -1, "weight": float("nan")})
    assert "pet.legs=-1: must be >= 0" in text
    assert "pet.weight=nan: must be finite and > 0" in text


def test_nested_nodes_are_built_and_their_problems_carry_the_whole_key() -> None:
    herd = {"_target_": f"{__name__}.Herd", "leader": {"_target_": f"{__name__}.Herd", "leader": {"_target_": "x.Y"}}}
    with pytest.raises(ConfigError, match=r"pet\.leader\.leader\._target_"):
        instantiate(herd, Animal, "pet")


@pytest.mark.parametrize(
    "target",
    ["os.system", "builtins.eval", "", "nowhere", 3, None],
)
def test_a_target_that_is_not_of_the_base_is_never_called(target: Any, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    text = problems({"_target_": target, "command": f"touch {marker}", "args": f"touch {marker}", "file": str(marker)})
    assert "must be the dotted path of a subclass of" in text
    assert not marker.exists()


@pytest.mark.parametrize(
    ("target", "remedy"),
    [
        ("fedsim.selectors.random.Randm", "did you mean fedsim.selectors.random.Random?"),
        ("fedsim.selectors.random.Zzzzzzzz", "correct the class's name, or the module"),
        ("my_absent_lab.Mine", "is its module on PYTHONPATH?"),
    ],
)
def test_a_class_that_is_not_in_its_module_is_not_looked_for_on_the_path(target: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({"_target_": target}, Selector, "selector")
    assert [problem.remedy for problem in caught.value.problems] == [remedy]
