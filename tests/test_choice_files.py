"""Choice files are read as Hydra composes them."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from fedsim.config.choice_files import ChoiceFiles
from fedsim.config.compose import compose_jobs, search_path
from fedsim.config.composition import compose_config
from fedsim.config.sources import options
from fedsim.config.words import parse
from fedsim.config.yaml_files import Loader, parse_yaml
from fedsim.core.disk import conf_dir
from fedsim.core.errors import ConfigError

OWN = {
    "selector/mine.yaml": "defaults:\n  - base\n  - exploration: steep\n  - _self_\nown: 1\n",
    "selector/base.yaml": "defaults:\n  - threshold: linear\n_target_: my_lab.Mine\nown: 0\ninherited: 1\n",
    "selector/two.yaml": "defaults:\n  - base\n  - gpfl_alpha0\n  - _self_\n",
    "selector/first.yaml": "defaults:\n  - _self_\n  - base\nown: 1\n",
    "selector/exploration/steep.yaml": "_target_: my_lab.Steep\nslope: 1\n",
    "selector/sketch/deep.yaml": "defaults:\n  - inner: one\nwidth: 1\n",
    "selector/sketch/inner/one.yaml": "depth: 1\n",
    "selector/sketched.yaml": "defaults:\n  - sketch/deep\n  - /optimizer: adam\n  - gpfl@elsewhere\n  - none: null\n",
    "selector/endless.yaml": "defaults:\n  - endless_too\n",
    "selector/endless_too.yaml": "defaults:\n  - endless\nslow: 1\n",
    "selector/broken.yaml": "a: [\n",
    "selector/dated.yaml": "day: !!timestamp 2001-99-99\n",
    "model/odd.yaml": "# @package other\nwide: 1\n",
}


@pytest.fixture
def own(tmp_path: Path) -> Path:
    for name, text in OWN.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


PLAIN = (
    *(
        "010",
        "1:30",
        "1:30:00",
        "0x1F",
        "0b1",
        "0o17",
        "00",
        "1__0",
        "1_000",
        "+3",
        "-0",
        "0",
        "on",
        "Off",
        "yes",
        "NO",
    ),
    *(
        "true",
        "FALSE",
        "null",
        "1e3",
        "1e-3",
        "12e03",
        "1.",
        "-.5",
        "0.1_2",
        ".e3",
        "inf",
        "nan",
        "2024-01-01",
        "a b",
    ),
)


@pytest.mark.parametrize("text", PLAIN)
def test_a_plain_value_of_a_file_is_that_of_the_command_line(text: str) -> None:
    in_file = yaml.load(f"a: {text}", Loader)["a"]
    assert repr(in_file) == repr(parse([f"a={text}"])[0].value())


@pytest.mark.parametrize("path", sorted(conf_dir().rglob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_files_are_read_as_omegaconf_reads_them(path: Path) -> None:
    """So that no run of theirs has another hash."""
    assert repr(OmegaConf.create(parse_yaml(path, path.read_text()))) == repr(OmegaConf.load(path))


def leaves(node: Any, prefix: str = "") -> set[str]:
    if not isinstance(node, dict) or not node:
        return {prefix.removesuffix(".")}
    return set().union(*(leaves(value, f"{prefix}{key}.") for key, value in node.items()))


@pytest.mark.parametrize(
    "group", ["dataset", "model", "optimizer", "partition", "selector", "system", "tracker"]
)
def test_what_a_choice_adds_is_what_hydra_composes(group: str) -> None:
    files = ChoiceFiles([conf_dir()])
    with search_path():
        names = options(group)
        for name in names if group != "selector" else [*names[::6], "gpfl_alpha0", "pncs_q2"]:
            composed: Any = OmegaConf.to_container(compose_config([f"{group}={name}"]))
            assert leaves(files.config(group, name).get(group) or {}) == leaves(
                composed.get(group) or {}
            ), name


def test_the_keys_of_subgroups_and_of_choices_built_upon_are_a_choices_own(own: Path) -> None:
    files = ChoiceFiles([conf_dir(), own])
    node = files.config("selector", "mine")["selector"]
    assert {key: node[key] for key in ("own", "inherited")} == {"own": 1, "inherited": 1}
    assert node["exploration"] == {"_target_": "my_lab.Steep", "slope": 1}
    assert node["threshold"]["schedule"] == "linear"
    assert (
        files.config("selector", "first")["selector"]["own"] == 0
    )  # what follows _self_ replaces it
    both = files.config("selector", "two")["selector"]
    assert (both["inherited"], both["metric"], set(both["exploration"])) == (
        1,
        "projection",
        {"_target_", "value"},
    )
    sketched = files.config("selector", "sketched")
    assert sketched["selector"]["sketch"] == {"width": 1, "inner": {"depth": 1}}
    assert "beta1" in sketched["optimizer"]
    assert "metric" not in sketched["selector"]  # of a choice that is put elsewhere
    assert files.config("model", "odd") == {"other": {"wide": 1}}


def test_choices_that_take_a_whole_key(own: Path) -> None:
    files = ChoiceFiles([conf_dir(), own])

    def taking(group: str, key: str) -> list[str]:
        return files.keys.get(key, {}).get(group, [])

    assert taking("selector", "selector.exploration.rho") == ["gpfl", "gpfl_cosine"]
    assert taking("selector", "selector.exploration.slope") == ["mine"]
    assert taking("selector", "selector.inherited") == ["base", "first", "mine", "two"]
    assert "adapow_d" in taking(
        "selector", "selector.num_candidates"
    )  # by the choice that it builds on
    assert taking("selector", "selector.exploration") == [
        *(
            "fedcbs",
            "oort",
            "oort_by_speed",
            "oort_code",
        )  # a value; that of gpfl is a group of choices
    ]
    assert taking("selector", "selector.slow") == ["endless", "endless_too"]
    assert taking("tracker", "tracker.console.progress") == ["default"]


@pytest.mark.parametrize("name", ["broken", "dated"])
def test_a_file_that_cannot_be_read_is_named(own: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is not YAML") as caught:
        ChoiceFiles([conf_dir(), own]).read("selector", name)
    assert caught.value.problems[0].key == str(own / "selector" / f"{name}.yaml")


def test_choices_of_ones_own_are_named_and_a_broken_one_beside_them_is_not_in_the_way(
    own: Path,
) -> None:
    for word, remedy in (("selector.exploration.slope=1", "it is a key of selector=mine"),):
        with search_path(str(own)), pytest.raises(ConfigError) as caught:
            compose_jobs([word], multirun=False)
        assert [problem.remedy for problem in caught.value.problems] == [remedy]
