"""Every preset composes in every size, is accepted as a whole, and says what it is."""

from functools import cache
from pathlib import Path

import pytest

from fedsim.cli import check_jobs
from fedsim.config.compose import compose_jobs, search_path
from fedsim.config.plan import Plan
from fedsim.errors import ConfigError

CONF = Path(__file__).parents[1] / "conf"
PRESETS = sorted(p.stem for p in (CONF / "preset").glob("*.yaml"))
SCALED = sorted(p.stem.removesuffix("_small") for p in (CONF / "scaled").glob("*_small.yaml"))


@cache
def plans_of(preset: str, scale: str = "full") -> list[Plan]:
    """All jobs of a preset at one seed."""
    with search_path():
        return check_jobs(compose_jobs([f"preset={preset}", f"scale={scale}", "seed=0"], multirun=False))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_accepted_and_says_command_cost_and_sources(preset: str) -> None:
    text = (CONF / "preset" / f"{preset}.yaml").read_text()
    assert "command:" in text
    assert "sources:" in text
    plans = plans_of(preset)
    assert len({plan.folder for plan in plans}) == len(plans)


@pytest.mark.parametrize("preset", SCALED)
def test_a_small_preset_is_the_same_comparison_and_has_a_name_of_its_own(preset: str) -> None:
    full, small = plans_of(preset), plans_of(preset, "small")
    assert {plan.settings.name for plan in small} == {f"{preset}_small"}
    assert {plan.choices["selector"] for plan in small} <= {plan.choices["selector"] for plan in full}
    assert small[0].config_hash != full[0].config_hash


def test_a_size_that_a_preset_does_not_have_is_told() -> None:
    with search_path(), pytest.raises(ConfigError, match="scale='small'"):
        compose_jobs(["scale=small"], multirun=False)
