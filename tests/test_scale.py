"""Many clients: one sample each, as many of them as a data set allows, and what is measured of runs at such sizes."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fedsim.config.build import instantiate
from fedsim.config.compose import compose_jobs, search_path
from fedsim.config.plan import Plan, make_plan
from fedsim.core.errors import DataError
from fedsim.data.femnist_generated import FemnistGenerated
from fedsim.running.assembly import build
from scripts.benchmarks import clients as scale


@pytest.fixture(scope="module", autouse=True)
def _conf() -> Iterator[None]:
    with search_path():
        yield


def plan(*words: str) -> Plan:
    (job,) = compose_jobs(["num_rounds=2", "tracker=files_only", *words], multirun=False)
    return make_plan(job.config, job.choices)


def test_digits_take_a_client_for_each_sample() -> None:
    words = ("partition=quantity_skew", "cohort_size=100", "model=logistic", "server.validation_fraction=0")
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


def test_a_case_of_scale_is_measured_apart(tmp_path: Path) -> None:
    found = [scale.measure_apart(name, 120, str(tmp_path)) for name in ("random", "divfl")]
    random, divfl = found
    assert "error" not in random
    assert random["rounds"] == scale.NUM_ROUNDS
    assert random["later"]["round"] >= random["later"]["select"] + random["later"]["train"]
    assert divfl["checkpoint_bytes"] > 120 * (120 + 610) * 4 > random["checkpoint_bytes"]
    assert random["later"]["record_bytes"] > 100 * 3
    table = scale.markdown(found, [120, 1200]).splitlines()
    assert len(table) == 4
    assert table[2].startswith("| random | < .001 / - |")
    assert "| partition, s | 0.0" in scale.common(found, [120])


def test_a_case_that_is_refused_is_told(tmp_path: Path) -> None:
    found = scale.measure_apart("pncs", 100_000, str(tmp_path))
    assert "compares all pairs" in found["refused"]
    assert "refused" in scale.markdown([found], [100_000])
    times = {n: {"later": {"round": (n / 100) ** 2 + 1, "train": 1.0}} for n in (10, 100, 1000)}
    assert scale.growth(times, [10, 100, 1000]) == "N^2.0"
