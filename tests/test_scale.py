"""Many clients: as many as a data set allows, measurements of runs at such sizes, and methods that
compare all pairs of clients. These are rejected before the run if their tables would not fit."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsim.config.build import instantiate
from fedsim.config.choice_files import ChoiceFiles
from fedsim.config.compose import compose_jobs, make_plan, search_path
from fedsim.config.plan import Plan
from fedsim.core.disk import conf_dir
from fedsim.core.errors import ConfigError, DataError
from fedsim.core.types import Population
from fedsim.data.femnist_generated import FemnistGenerated
from fedsim.running.assembly import build
from fedsim.selectors.base import Selector
from scripts.benchmarks import clients as scale

FILES = ChoiceFiles([conf_dir()])
COMMON = ("num_clients=100000", "cohort_size=100", "model=logistic", "system=lognormal")
SERVER = ("server.validation_fraction=0.1", "server.public_samples=20", "optimizer.momentum=0.9")
ALL_PAIRS = {
    "clustered2",
    "divfl",
    "divfl_no_overhead",
    "fedabc",
    "fedgs",
    "fedlecc",
    "fl_dp3s",
    "haccs",
    "hics",
    "hics_code",
    "lefl",
    "pair_study",
    "pncs",
    "pncs_each",
    "pncs_gradient",
    "pncs_q0",
    "pncs_q2",
    "pncs_q4",
    "pncs_q6",
    "pncs_two",
}
"""Choices whose tables of 100,000 x 100,000 numbers are rejected. All others start."""


@pytest.fixture(scope="module", autouse=True)
def _conf() -> Iterator[None]:
    with search_path():
        yield


def plan(*words: str) -> Plan:
    (job,) = compose_jobs(["num_rounds=2", "tracker=files_only", *words], multirun=False)
    return make_plan(job.config, job.choices)


def test_digits_take_a_client_for_each_sample() -> None:
    words = (
        "partition=quantity_skew",
        "cohort_size=100",
        "model=logistic",
        "server.validation_fraction=0",
    )
    made = build(plan("num_clients=1438", *words))
    assert made.division.sizes.tolist() == [1] * 1438
    assert [len(record.selected) for record in made.simulation] == [100, 100]
    with pytest.raises(DataError, match=r"num_clients=1439: .*there are 1438; lower num_clients"):
        build(plan("num_clients=1439", *words))


def test_the_whole_shape_of_femnist_is_a_choice(tmp_path: Path) -> None:
    """Writers, classes and numbers of samples, without drawing the images."""
    (job,) = compose_jobs(["dataset=femnist_generated_full"], multirun=False)
    made = instantiate(job.config["dataset"], FemnistGenerated, "dataset", tmp_path, tmp_path)
    assert made.form() == ((1, 28, 28), 62)
    rng = np.random.default_rng(made.seed)
    made._handwriting(rng)
    labels, owners = made._training_labels(rng)
    sizes = np.bincount(owners) / 0.9  # a tenth is the test set
    assert (len(sizes), len(np.unique(labels))) == (3550, 62)
    assert len(labels) + made.test_samples == pytest.approx(805_263, abs=10)
    assert sizes.mean() == pytest.approx(226.83, rel=0.001)
    assert sizes.std() == pytest.approx(88.94, rel=0.01)


MEASURE = """
import json, sys
from fedsim.config.compose import search_path
from scripts.benchmarks.clients import measure_apart
with search_path():
    print(json.dumps([measure_apart(name, int(num), sys.argv[1]) for name, num in map(str.split, sys.argv[2:])]))
"""


@pytest.mark.slow
def test_a_case_of_scale_is_measured_apart_or_refused(tmp_path: Path) -> None:
    # in another process: torch refuses gradients in a fork of one in which its threads for them
    # have started
    command = [
        sys.executable,
        "-c",
        MEASURE,
        str(tmp_path),
        "random 120",
        "divfl 120",
        "pncs 100000",
    ]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True
    )
    *found, refused = json.loads(done.stdout)
    random, divfl = found
    assert [one["error"] for one in found if "error" in one] == []
    assert random["rounds"] == scale.NUM_ROUNDS
    assert random["later"]["round"] >= random["later"]["select"] + random["later"]["train"]
    assert divfl["checkpoint_bytes"] > 120 * (120 + 610) * 4 > random["checkpoint_bytes"]
    assert random["later"]["record_bytes"] > 100 * 3
    table = scale.markdown(found, [120, 1200]).splitlines()
    assert len(table) == 4
    assert table[2].startswith("| random | < .001 / - |")
    assert "| partition, s | 0.0" in scale.common(found, [120])
    assert "compares all pairs" in refused["refused"]
    assert "refused" in scale.markdown([refused], [100_000])
    times = {n: {"later": {"round": (n / 100) ** 2 + 1, "train": 1.0}} for n in (10, 100, 1000)}
    assert scale.growth(times, [10, 100, 1000]) == "N^2.0"


# --- all pairs


def rejection(choice: str, num_clients: int, **values: Any) -> str:
    """Return the error of a selector for K = 100 of so many clients, "" without any."""
    population = Population(np.ones(num_clients, np.int64), 100, 10)
    if choice.endswith("_d10"):  # d = 10 candidates are fewer than K
        values["num_candidates"] = 100
    node = FILES.config("selector", choice)["selector"] | values
    try:
        instantiate(node, Selector, "selector", population)
    except ConfigError as error:
        return str(error)
    return ""


def test_exactly_these_choices_reject_a_hundred_thousand_clients() -> None:
    names = [path.stem for path in (conf_dir() / "selector").glob("*.yaml")]
    assert {name for name in names if rejection(name, 100_000)} == ALL_PAIRS


@pytest.mark.parametrize("choice", sorted(ALL_PAIRS - {"pair_study"}))
def test_a_rejection_names_size_bytes_and_remedy(choice: str) -> None:
    text = rejection(choice, 100_000)
    assert "selector: compares all pairs of num_clients=100000 clients in tables of" in text
    assert "must take at most 16 GiB, which suffices up to num_clients=" in text
    assert "lower num_clients" in text
    assert not rejection(choice, 10_000)


@pytest.mark.parametrize(
    ("choice", "num_clients", "values", "text"),
    [
        ("hics", 20_000, {"fallback": "never", "ward_on": "distances"}, ""),
        ("fedcor", 100_000, {}, ""),
        (
            "fedcor",
            20_000,
            {"objective": "loo"},
            "selector.kernel=linear selector.objective=mml is linear",
        ),
        ("fedcor", 3_000, {"kernel": "se"}, ""),
        ("pncs_each", 23_170, {}, ""),
        ("pncs_each", 23_171, {}, "must take at most 16 GiB"),
        ("pair_study", 1_001, {}, "must have at most 1000 clients"),
        ("pair_study", 1_000, {}, ""),
    ],
)
def test_limits_depend_on_the_parameters(
    choice: str, num_clients: int, values: dict[str, Any], text: str
) -> None:
    error = rejection(choice, num_clients, **values)
    assert text in error
    assert bool(text) == bool(error)


def test_a_config_is_rejected_before_its_data_are_read() -> None:
    with pytest.raises(ConfigError, match="compares all pairs of num_clients=100000 clients"):
        plan("selector=pncs", *COMMON, *SERVER)
    plan("selector=random", *COMMON, *SERVER)
