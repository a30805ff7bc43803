"""Configs of choices that are kept, and take the values of later calls, equal Hydra's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import hydra
import pytest
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from fedsim.config import kept_configs
from fedsim.config.compose import search_path
from fedsim.config.words import as_hydra_reads, parse


@pytest.fixture(autouse=True)
def _nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kept_configs, "KEPT", {})
    with search_path():
        yield


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Count the configs that Hydra composes."""
    counted = Mock(side_effect=hydra.compose)
    monkeypatch.setattr("fedsim.config.kept_configs.hydra.compose", counted)
    return counted


def compose(line: str) -> DictConfig:
    return kept_configs.compose_by_hydra(parse(line.split()), "config")


def content(config: DictConfig) -> Any:
    """Return the values of a config as text, in their order and with their types, without words and
    folders of Hydra."""
    values: Any = OmegaConf.to_container(config, resolve=False)
    node = values.pop("hydra")
    return repr(
        (values, node["launcher"], node["mode"], node["sweeper"], node["runtime"]["choices"])
    )


@pytest.mark.parametrize(
    ("earlier", "line"),
    [
        ("", "seed=1 num_rounds=3"),
        ("selector=gpfl", "selector=gpfl selector.metric=cosine model.hidden=[8,9]"),
        ("seed=2", "seed=1 seed=3"),
        ("seed=2", "seed=null name='7' output_dir=${name}x"),
        ("preset=gpfl_rho", "preset=gpfl_rho scale=small optimizer.lr=1e-3"),
        ("hydra/launcher=lanes", "hydra/launcher=lanes seed=1"),
        ("selector=gpfl", "local={steps:5,epochs:null}"),
        ("", "+extra=1 extra=2 ~tracker"),
        ("", "hydra.mode=MULTIRUN seed=4"),
        ("", "name=${hydra.job.override_dirname}"),
    ],
)
def test_the_second_config_of_a_process_is_what_hydra_composes(earlier: str, line: str) -> None:
    compose(earlier)
    config = compose(line)
    words = [as_hydra_reads(override) for override in parse(line.split())]
    by_hydra = hydra.compose("config", words, return_hydra_config=True)
    assert content(config) == content(by_hydra)
    assert OmegaConf.is_struct(config)


def test_hydra_composes_choices_once_for_all_values(composed: Mock) -> None:
    for seed in range(5):
        assert compose(f"selector=gpfl seed={seed}").seed == seed
    assert composed.call_count == 1


def test_values_of_one_call_do_not_reach_the_next() -> None:
    compose("model.hidden=[1] seed=9")
    assert compose("").seed == 0


def test_an_unknown_key_is_hydras_error() -> None:
    compose("")
    with pytest.raises(HydraException, match="Could not override 'nothing'"):
        compose("nothing=1")


def test_a_file_that_was_edited_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "preset").mkdir()
    file = tmp_path / "preset/mine.yaml"
    for num_rounds in (10, 20):
        file.write_text(f"# @package _global_\nnum_rounds: {num_rounds}\n")
        with search_path(str(tmp_path)):
            assert compose("preset=mine").num_rounds == num_rounds


def test_a_config_that_refers_to_the_words_of_a_call_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "preset").mkdir()
    text = "# @package _global_\nname: ${hydra.job.override_dirname}\n"
    (tmp_path / "preset/mine.yaml").write_text(text)
    with search_path(str(tmp_path)):
        assert compose("preset=mine seed=1").name == "preset=mine,seed=1"
        assert compose("preset=mine seed=2").name == "preset=mine,seed=2"


def test_the_number_of_kept_configs_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_configs, "MAX_KEPT", 1)
    for selector in ("gpfl", "oort", "gpfl"):
        assert compose(f"selector={selector}").selector._target_.lower().endswith(selector)
        assert len(kept_configs.KEPT) == 1


def test_a_link_that_leads_nowhere_is_ignored(tmp_path: Path) -> None:
    """Emacs makes such a link next to a file that it edits."""
    (tmp_path / "preset").mkdir()
    (tmp_path / "preset/mine.yaml").write_text("# @package _global_\nnum_rounds: 10\n")
    (tmp_path / "preset/.#mine.yaml").symlink_to("user@host.1234")
    with search_path(str(tmp_path)):
        assert compose("preset=mine").num_rounds == 10
