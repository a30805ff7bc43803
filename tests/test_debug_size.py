"""`scale=debug`: two rounds on tiny data, of every preset and without one, in folders of their
own."""

from pathlib import Path

import pytest

from fedsim.config import compose
from fedsim.config.compose import check_jobs, compose_jobs, search_path
from fedsim.config.plan import Plan
from fedsim.jobs.cli import run
from fedsim.results.reading import read_summary
from tests.test_presets import PRESETS


def plans_of(*words: str) -> list[Plan]:
    with search_path():
        return check_jobs(compose_jobs([*words, "scale=debug"], multirun=False))


SOME = ("gpfl_table2_fmnist", "gpfl_fig7a_femnist", "pncs_k2", "fedabc_fig2")


@pytest.mark.parametrize(
    "preset",
    [name if name in SOME else pytest.param(name, marks=pytest.mark.slow) for name in PRESETS],
)
def test_every_preset_has_a_debug_size_with_a_name_of_its_own(
    preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expand = compose.expand
    monkeypatch.setattr(
        compose, "expand", lambda overrides: [(jobs := expand(overrides))[0], jobs[-1]]
    )
    plans = plans_of(f"preset={preset}")
    assert {plan.settings.name for plan in plans} == {f"{preset}_debug"}
    clients = 100 if preset.startswith("gpfl") and "femnist" not in preset else 10
    assert {(p.settings.num_rounds, p.settings.num_clients, p.settings.seed) for p in plans} == {
        (2, clients, 0)
    }
    assert {plan.choices["dataset"] for plan in plans} == {"femnist_generated"}


def test_without_a_preset_it_is_the_default_experiment() -> None:
    (plan,) = plans_of()
    assert (plan.settings.name, plan.local.steps, plan.choices["model"]) == (
        "default_debug",
        2,
        "mlp",
    )


def test_what_is_given_is_kept_and_with_a_choice_all_of_its_group() -> None:
    (plan,) = plans_of("dataset=digits", "cohort_size=5")
    assert (plan.choices["dataset"], plan.settings.cohort_size, plan.settings.num_rounds) == (
        "digits",
        5,
        2,
    )


def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> list[str]:
    monkeypatch.chdir(tmp_path)
    assert run([*words, "scale=debug", "tracker=files_only", "cache_dir=cache"]) == 0
    return [
        (read_summary(path.parent) or {})["status"]
        for path in tmp_path.glob("outputs/*_debug/*/config.yaml")
    ]


@pytest.mark.parametrize(
    "words",
    [
        ("preset=gpfl_table2_fmnist", "cell=gpfl_1spc,gpfl_dir", "selector=gpfl"),
        (
            "preset=gpfl_fig7a_femnist",
            "selector=gpfl_official",
            "selector/exploration=fixed_5,linear_fig7",
        ),
        ("-m", "preset=gpfl_table1_femnist,fashion_mnist_2spc"),
    ],
)
def test_it_runs(words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runs(tmp_path, monkeypatch, *words) == ["done", "done"]


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_runs(preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(runs(tmp_path, monkeypatch, f"preset={preset}", "hydra/launcher=lanes")) == {"done"}
