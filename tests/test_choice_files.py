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
    "selector/alice.yaml": "defaults: [bob]\ncircular: 1\n",
    "selector/bob.yaml": "defaults: [alice]\ncircular: 2\n",
    "selector/narcissus.yaml": "defaults: [narcissus]\ncircular: 3\n",
    # Files that set what they include
    "selector/includes_mid.yaml": "defaults: [sketch: mid]\nown: 1\n",
    "selector/sketch/mid.yaml": "defaults: [inner: low]\ninner: {depth: mid}\n",
    "selector/sketch/inner/low.yaml": "depth: low\nwidth: low\n",
    "selector/included_wins.yaml": "defaults: [_self_, sketch/inner: low]\n"
    "sketch: {inner: {depth: own, own: 1}}\n",
    "selector/elsewhere.yaml": "# @package other\nwide: 1\n",
    "selector/base_elsewhere.yaml": "defaults: [elsewhere]\nown: 1\n",
    "selector/overrides.yaml": "defaults: [mine, override exploration: flat]\n"
    "exploration: {slope: 2}\n",
    "selector/exploration/flat.yaml": "slope: 0\nflat: 1\n",
    # The example at the head of fedsim/config/choice_files.py
    "selector/example.yaml": "defaults:\n  - gpfl\n  - override exploration: fixed\n"
    "  - _self_\nmetric: dot\n",
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


def test_a_choice_may_include_choices_of_any_group(files: ChoiceFiles) -> None:
    config = files.config("selector", "sketched")
    assert config["selector"]["sketch"] == {"width": 1, "inner": {"depth": 1}}
    assert "beta1" in config["optimizer"]
    assert "metric" not in config["selector"]  # gpfl is put elsewhere


@pytest.mark.parametrize(
    "name", ["mine", "includes_mid", "included_wins", "base_elsewhere", "overrides", "example"]
)
def test_values_that_several_files_set_are_merged_as_by_hydra(
    files: ChoiceFiles, folder: Path, name: str
) -> None:
    with search_path(str(folder)):
        config: Any = OmegaConf.to_container(compose_config([f"selector={name}"]))
    added = files.config("selector", name)
    assert added == {group: config[group] for group in added}


def test_the_example_of_the_module_is_right(files: ChoiceFiles) -> None:
    node = files.config("selector", "example")["selector"]
    assert node["exploration"] == {"_target_": "fedsim.selectors.gpfl.Fixed", "value": 0.0}
    assert (node["metric"], node["init"]) == ("dot", "all_clients")


@pytest.mark.parametrize(
    ("name", "cycle"),
    [
        ("alice", "alice -> bob -> alice"),
        ("bob", "bob -> alice -> bob"),
        ("narcissus", "narcissus -> narcissus"),
    ],
)
def test_a_choice_that_is_its_own_base_is_rejected(folder: Path, name: str, cycle: str) -> None:
    """Hydra would say `maximum recursion depth exceeded`."""
    with search_path(str(folder)), pytest.raises(ConfigError, match=f"is its own base: {cycle}"):
        compose_jobs([f"selector={name}"], multirun=False)


def test_an_absolute_path_is_no_choice(tmp_path: Path, files: ChoiceFiles) -> None:
    (tmp_path / "outside.yaml").write_text("a: 1\n")
    name = str(tmp_path / "outside")
    assert not files.has("selector", name)
    with search_path(), pytest.raises(ConfigError) as caught:
        compose_jobs([f"selector={name}"], multirun=False)
    (problem,) = caught.value.problems
    assert problem.rule == "is not a choice of conf/selector/"
    assert "--config-dir" not in problem.remedy


def test_a_package_places_the_keys_of_a_file(files: ChoiceFiles) -> None:
    assert files.config("model", "odd") == {"other": {"wide": 1}}


# --- which choices have a key -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("selector.exploration.rho", ["gpfl", "gpfl_cosine"]),
        ("selector.exploration.slope", ["mine", "overrides"]),
        ("selector.inherited", ["base", "first", "mine", "overrides", "two"]),
        # A value of these. For gpfl, it is the mapping of an included choice.
        ("selector.exploration", ["fedcbs", "oort", "oort_by_speed", "oort_code"]),
    ],
)
def test_the_choices_that_have_a_key(files: ChoiceFiles, key: str, names: list[str]) -> None:
    assert files.choices_by_key[key]["selector"] == names


def test_a_choice_that_cannot_be_read_has_no_keys(files: ChoiceFiles) -> None:
    assert "selector.circular" not in files.choices_by_key  # alice, bob and narcissus


def test_a_key_of_the_users_choice_is_suggested_although_another_file_is_broken(
    folder: Path,
) -> None:
    with search_path(str(folder)), pytest.raises(ConfigError) as caught:
        compose_jobs(["selector.exploration.slope=1"], multirun=False)
    (problem,) = caught.value.problems
    assert problem.remedy == "it is a key of selector=mine|overrides"


def test_a_link_that_leads_nowhere_and_a_folder_are_no_choices(folder: Path) -> None:
    (folder / "selector/lost.yaml").symlink_to("nowhere.yaml")
    (folder / "selector/folder.yaml").mkdir()
    with search_path(str(folder)):
        assert {"lost", "folder"}.isdisjoint(options("selector"))
    files = ChoiceFiles([folder])
    assert {"lost", "folder"}.isdisjoint(files.names("selector"))
    assert "selector.inherited" in files.choices_by_key  # all choices can be read, or are skipped


def test_hidden_files_and_folders_have_no_choices(folder: Path) -> None:
    """macOS, Emacs and Jupyter make such files."""
    (folder / "selector/._mine.yaml").write_bytes(b"\0\5\x16\7")
    (folder / "selector/.#mine.yaml").symlink_to("user@host.1234")
    (folder / "selector/.ipynb_checkpoints").mkdir()
    (folder / "selector/.ipynb_checkpoints/mine-checkpoint.yaml").write_text("own: 1\n")
    with search_path(str(folder)):
        names = options("selector")
    files = ChoiceFiles([folder])
    assert "mine" in names
    for name in [*names, *files.names("selector"), *files.groups]:
        assert "." not in name
