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

FILES = {
    "selector/mine.yaml": "defaults: [base, exploration: steep, _self_]\nown: 1\n",
    "selector/base.yaml": "defaults: [threshold: linear]\n_target_: lab.Mine\nown: 0\ninherited: 1\n",
    "selector/two.yaml": "defaults: [base, gpfl_alpha0, _self_]\n",
    "selector/first.yaml": "defaults: [_self_, base]\nown: 1\n",
    "selector/exploration/steep.yaml": "_target_: lab.Steep\nslope: 1\n",
    "selector/sketch/deep.yaml": "defaults: [inner: one]\nwidth: 1\n",
    "selector/sketch/inner/one.yaml": "depth: 1\n",
    "selector/sketched.yaml": "defaults: [sketch/deep, /optimizer: adam, gpfl@elsewhere, none: null]\n",
    "selector/endless.yaml": "defaults: [endless_too]\n",
    "selector/endless_too.yaml": "defaults: [endless]\nslow: 1\n",
    "selector/broken.yaml": "a: [\n",
    "selector/dated.yaml": "day: !!timestamp 2001-99-99\n",
    "model/odd.yaml": "# @package other\nwide: 1\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for --config-dir with `FILES`."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def files(folder: Path) -> ChoiceFiles:
    return ChoiceFiles([conf_dir(), folder])


# --- values -------------------------------------------------------------------------------------------------------

PLAIN = [
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
]


@pytest.mark.parametrize("text", [*PLAIN, "a b"])
def test_a_plain_value_of_a_file_is_that_of_the_command_line(text: str) -> None:
    value = yaml.load(f"a: {text}", Loader)["a"]
    assert repr(value) == repr(parse([f"a={text}"])[0].value())


@pytest.mark.parametrize("path", sorted(conf_dir().rglob("*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_file_is_read_as_omegaconf_reads_it(path: Path) -> None:
    """So that the hashes of runs do not depend on the reader."""
    content = parse_yaml(path, path.read_text())
    assert repr(OmegaConf.create(content)) == repr(OmegaConf.load(path))


@pytest.mark.parametrize("name", ["broken", "dated"])
def test_a_file_that_cannot_be_read_is_named(files: ChoiceFiles, folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is not YAML") as caught:
        files.read("selector", name)
    assert caught.value.problems[0].key == str(folder / "selector" / f"{name}.yaml")


# --- what a choice adds to a config -------------------------------------------------------------------------------


def leaf_keys(node: Any, prefix: str = "") -> set[str]:
    if not isinstance(node, dict) or not node:
        return {prefix}
    keys: set[str] = set()
    for key, value in node.items():
        keys |= leaf_keys(value, f"{prefix}.{key}")
    return keys


@pytest.mark.parametrize(
    "group", ["dataset", "model", "optimizer", "partition", "selector", "system", "tracker"]
)
def test_a_choice_adds_the_keys_that_hydra_composes(group: str) -> None:
    shipped = ChoiceFiles([conf_dir()])
    with search_path():
        names = options(group)
        if group == "selector":
            names = [*names[::6], "gpfl_alpha0", "pncs_q2"]
        for name in names:
            config: Any = OmegaConf.to_container(compose_config([f"{group}={name}"]))
            added = shipped.config(group, name).get(group) or {}
            assert leaf_keys(added) == leaf_keys(config.get(group) or {}), name


def test_a_choice_has_the_keys_of_its_base_and_of_its_subgroups(files: ChoiceFiles) -> None:
    node = files.config("selector", "mine")["selector"]
    assert (node["own"], node["inherited"]) == (1, 1)
    assert node["exploration"] == {"_target_": "lab.Steep", "slope": 1}
    assert node["threshold"]["schedule"] == "linear"


def test_an_entry_after_self_replaces_the_files_own_values(files: ChoiceFiles) -> None:
    assert files.config("selector", "first")["selector"]["own"] == 0


def test_a_choice_may_build_on_two(files: ChoiceFiles) -> None:
    node = files.config("selector", "two")["selector"]
    assert (node["inherited"], node["metric"]) == (1, "projection")
    assert set(node["exploration"]) == {"_target_", "value"}


def test_a_choice_may_make_choices_in_any_group(files: ChoiceFiles) -> None:
    config = files.config("selector", "sketched")
    assert config["selector"]["sketch"] == {"width": 1, "inner": {"depth": 1}}
    assert "beta1" in config["optimizer"]
    assert "metric" not in config["selector"]  # gpfl is put elsewhere


def test_a_package_places_the_keys_of_a_file(files: ChoiceFiles) -> None:
    assert files.config("model", "odd") == {"other": {"wide": 1}}


# --- which choices have a key -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("selector.exploration.rho", ["gpfl", "gpfl_cosine"]),
        ("selector.exploration.slope", ["mine"]),
        ("selector.inherited", ["base", "first", "mine", "two"]),
        ("selector.slow", ["endless", "endless_too"]),
        # A value; for gpfl, this is the place of a subgroup.
        ("selector.exploration", ["fedcbs", "oort", "oort_by_speed", "oort_code"]),
    ],
)
def test_the_choices_that_have_a_key(files: ChoiceFiles, key: str, names: list[str]) -> None:
    assert files.choices_by_key[key]["selector"] == names


def test_a_key_of_the_users_choice_is_suggested_although_another_file_is_broken(
    folder: Path,
) -> None:
    with search_path(str(folder)), pytest.raises(ConfigError) as caught:
        compose_jobs(["selector.exploration.slope=1"], multirun=False)
    (problem,) = caught.value.problems
    assert problem.remedy == "it is a key of selector=mine"
