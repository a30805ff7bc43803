"""A deployment in processes of Flower: the clients that the simulator selects, and what happens when
a node or the server is killed."""

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr")

from fedsim.flower import Example, command
from fedsim.results.reading import read_metrics
from tests.flower_processes import WAIT_SECONDS, Federation, wait_until
from tests.flower_runs import simulated

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc").exists(), reason="processes are found in /proc"),
]
NUM_CLIENTS = 5
COMMON = (
    f"num_clients={NUM_CLIENTS}",
    "dataset=digits",
    "partition=shards",
    "model=logistic",
    "engine=sequential",
    "device=cpu",
    "local.epochs=1",
)


@pytest.fixture
def deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Federation]:
    monkeypatch.chdir(tmp_path)
    with Federation(Path("flower_home"), NUM_CLIENTS) as federation:
        yield federation
    assert federation.processes() == []


def submit(deployment: Federation, *words: str, config_dir: Path | None = None) -> None:
    """Write an app with `fedsim flower new`, and run it."""
    words = (*words, *COMMON)
    command.run(Namespace(folder=Path("my_app"), words=words, config_dir=config_dir))
    server = Path("my_app/server_app.py")
    text = server.read_text()
    assert "timeout=300" in text
    server.write_text(text.replace("timeout=300", f"timeout={WAIT_SECONDS}"))
    deployment.run(Path("my_app"))


def folder() -> Path:
    """Return the folder of the run, which need not exist yet."""
    return next(Path("flower_home/outputs").glob("*/flower-*"), Path("outputs/none"))


def records() -> list[dict[str, Any]]:
    return read_metrics(folder())


def wait_for_the_end(deployment: Federation) -> None:
    wait_until(lambda: (folder() / "summary.json").exists(), deployment.link)


def assert_equal_to_the_simulator(*words: str, config_dir: Path | None = None) -> None:
    expected, params = simulated(Example(*words, *COMMON, config_dir=config_dir))
    assert [record["selected"] for record in records()] == [record.selected for record in expected]
    assert [record["bytes_up"] for record in records()] == [record.bytes_up for record in expected]
    model = load_file(folder() / "model.safetensors")
    for name, value in params.items():
        assert torch.equal(model[name], value), name


def test_processes_select_as_the_simulator_and_end_with_the_same_bits(
    deployment: Federation,
) -> None:
    words = (
        "selector=power_of_choice",
        "selector.num_candidates=3",
        "cohort_size=2",
        "num_rounds=3",
    )
    submit(deployment, *words)
    wait_for_the_end(deployment)
    assert_equal_to_the_simulator(*words)


def test_processes_find_the_users_own_class_in_the_app(deployment: Federation) -> None:
    """They do not start in the folder in which the class is."""
    lab = Path("lab")
    (lab / "selector").mkdir(parents=True)
    (lab / "selector/mine.yaml").write_text("_target_: process_lab.MyOwn\nmode: uniform\n")
    code = "from fedsim.selectors.random import Random\n\n\nclass MyOwn(Random):\n    pass\n"
    Path("process_lab.py").write_text(code)
    words = ("selector=mine", "cohort_size=2", "num_rounds=2")
    submit(deployment, *words, config_dir=lab)
    wait_for_the_end(deployment)
    assert_equal_to_the_simulator(*words, config_dir=lab)


def test_a_server_that_is_killed_resumes_with_the_same_bits(deployment: Federation) -> None:
    words = ("selector=oort", "aggregator=fedavgm", "cohort_size=1", "num_rounds=4")
    submit(deployment, *words)
    wait_until(lambda: len(records()) >= 2, deployment.link)
    deployment.kill_server()
    first = records()[0]
    deployment.start_link()
    deployment.run(Path("my_app"))
    wait_for_the_end(deployment)
    assert records()[0] == first  # the round was not run again: its seconds are the same
    assert_equal_to_the_simulator(*words)


def test_a_node_that_is_killed_in_a_round_is_late_and_comes_back(deployment: Federation) -> None:
    victim = 3
    apps: set[int] = set()

    def trains_in_round_2() -> bool:
        """The node starts a process for each message: who it is, then training."""
        apps.update(deployment.apps(victim))
        return len(apps) == 3

    def is_back() -> bool:
        return any(victim in record["selected"] for record in records()[2:])

    submit(deployment, "selector=full", f"cohort_size={NUM_CLIENTS}", "num_rounds=100")
    wait_until(trains_in_round_2, deployment.link)
    deployment.kill_node(victim)
    deployment.start_node(victim)
    wait_until(is_back, deployment.link)
    first, second, *others = (record["late"] for record in records())
    assert (first, second) == ([], [victim])
    assert not any(others)


def test_a_secure_sum_over_processes_is_the_simulators_up_to_rounding(
    deployment: Federation,
) -> None:
    words = ("secure_aggregation=true", "cohort_size=2", "num_rounds=2")
    submit(deployment, *words)
    wait_for_the_end(deployment)
    expected, params = simulated(Example(*words, *COMMON))
    assert [record["selected"] for record in records()] == [record.selected for record in expected]
    assert [record["late"] for record in records()] == [[], []]
    model = load_file(folder() / "model.safetensors")
    for name, value in params.items():
        torch.testing.assert_close(model[name], value, rtol=0, atol=1e-4)
