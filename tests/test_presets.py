"""Every preset composes in every size, is accepted as a whole, and says what it is."""

from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fedsim.config.compose import check_jobs, compose_jobs, search_path
from fedsim.config.plan import Plan
from fedsim.core.errors import ConfigError
from tests.sweep_words import few_choices

CONF = Path(__file__).parents[1] / "conf"
PRESETS = sorted(p.stem for p in (CONF / "preset").glob("*.yaml"))
WITHOUT_SMALL = {
    "benchmark_v1",  # its rules fix all sizes
    "fashion_mnist_2spc",
    "gpfl_table1_cifar10",
    "gpfl_table1_femnist",
    "gpfl_table1_fmnist",
}
FEW_JOBS = partial(few_choices, max_choices=2)
"""In place of `expand` in fast tests. tests/test_run.py composes all cells and sketches."""
SCALED = [preset for preset in PRESETS if preset not in WITHOUT_SMALL]


@cache
def plans_of(preset: str, scale: str = "full") -> list[Plan]:
    """Return some jobs of a preset at one seed."""
    with search_path(), mock.patch("fedsim.config.compose.expand", FEW_JOBS):
        return check_jobs(
            compose_jobs([f"preset={preset}", f"scale={scale}", "seed=0"], multirun=False)
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "scale"), [*((p, "full") for p in PRESETS), *((p, "small") for p in SCALED)]
)
def test_all_jobs_of_a_preset_are_accepted(preset: str, scale: str) -> None:
    with search_path():
        plans = check_jobs(
            compose_jobs([f"preset={preset}", f"scale={scale}", "seed=0"], multirun=False)
        )
    assert len({plan.folder for plan in plans}) == len(plans)
    assert {plan.folder for plan in plans_of(preset, scale)} <= {plan.folder for plan in plans}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_accepted_and_says_command_cost_and_sources(preset: str) -> None:
    text = (CONF / "preset" / f"{preset}.yaml").read_text()
    assert "command:" in text
    assert "sources:" in text
    plans = plans_of(preset)
    assert len({plan.folder for plan in plans}) == len(plans)
    assert {plan.settings.name for plan in plans} == {preset}
    if preset in SCALED:  # its small size is the same comparison under a name of its own
        small = plans_of(preset, "small")
        assert {plan.settings.name for plan in small} == {f"{preset}_small"}
        assert {plan.choices["selector"] for plan in small} <= {
            plan.choices["selector"] for plan in plans
        }
        assert small[0].config_hash != plans[0].config_hash


def test_a_size_that_a_preset_does_not_have_is_told() -> None:
    for preset in ("gpfl_table1_fmnist", None):
        words = ["scale=small"] if preset is None else [f"preset={preset}", "scale=small"]
        with search_path(), pytest.raises(ConfigError) as caught:
            compose_jobs(words, multirun=False)
        (problem,) = caught.value.problems
        assert (problem.key, problem.value) == ("scale", "small")
        assert problem.remedy == "it is for presets that have the key `small`"


def configs_of(*words: str) -> list[dict[str, Any]]:
    with search_path():
        return [job.config for job in compose_jobs(words, multirun=True)]


def test_values_on_the_command_line_replace_those_of_the_small_size() -> None:
    words = ("preset=gpfl_table2_cifar10", "scale=small", "cell=gpfl_1spc", "selector=random")
    small, ours = (
        configs_of(*words),
        configs_of(*words, "num_rounds=7", "model=logistic", "seed=8", "name=ours"),
    )
    assert [c["seed"] for c in small] == [0, 1, 2]
    assert {(c["num_rounds"], c["model"]["_target_"].rpartition(".")[2]) for c in small} == {
        (400, "EfficientNetHead")
    }
    assert [(c["num_rounds"], c["seed"], c["name"]) for c in ours] == [(7, 8, "ours")]
    assert ours[0]["model"]["_target_"].endswith("Logistic")


def test_swept_presets_and_sizes_are_those_of_single_commands() -> None:
    """Each preset and each size has a sweep of its own, also over seeds."""
    more = ("selector/exploration=linear", "selector.metric=cosine")
    presets = "gpfl_alpha", "gpfl_rho"
    alone = [configs_of(f"preset={preset}", "scale=small", *more) for preset in presets]
    assert configs_of("preset=gpfl_alpha,gpfl_rho", "scale=small", *more) == sum(alone, [])
    table = ("preset=gpfl_table2_fmnist", "cell=gpfl_2spc", "selector=gpfl")
    sizes = [configs_of(*table, f"scale={scale}") for scale in ("small", "debug")]
    assert [len(configs) for configs in sizes] == [3, 1]
    assert configs_of(*table, "scale=small,debug") == sum(sizes, [])


def test_keys_that_only_swept_cells_bring_are_known() -> None:
    more = ("partition.alpha=0.3", "num_clients=10", "cohort_size=3")
    found = configs_of("cell=gpfl_dir,gpfl_dir_by_size", *more)
    assert [config["partition"]["alpha"] for config in found] == [0.3, 0.3]


def test_presets_and_sizes_can_be_swept_over() -> None:
    found = configs_of("preset=gpfl_alpha,gpfl_fig6", "scale=full,small", "seed=0")
    assert list(dict.fromkeys((c["name"], c["num_rounds"]) for c in found)) == [
        *(("gpfl_alpha", 500), ("gpfl_alpha_small", 100)),
        *(("gpfl_fig6", 200), ("gpfl_fig6_small", 60)),
    ]
    assert not any({"scale", "small"} & set(config) for config in found)
