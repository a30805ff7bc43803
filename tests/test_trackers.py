"""Every tracker that keeps numbers: what it logs is read back by its own library.

More about Weights & Biases is in test_wandb.py, test_wandb_faults.py and test_wandb_online.py.
"""

import csv
import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsim.config.compose import check_jobs, compose_jobs, search_path
from fedsim.core.errors import ConfigError
from fedsim.core.record import Record
from fedsim.results.files import RunFolder
from fedsim.results.reading import METRICS, read_metrics
from fedsim.tracking.base import RunInfo, Tracker, Trackers
from fedsim.tracking.csv_tracker import CsvTracker
from fedsim.tracking.metrics import NAMES, RoundMetrics
from fedsim.tracking.mlflow_tracker import MlflowTracker
from fedsim.tracking.tensorboard_tracker import TensorBoardTracker
from fedsim.tracking.wandb_messages import start_message
from tests.test_tracking import summary
from tests.wandb_toys import history_of, offline_records, tracker

NUM_CLIENTS = 4
Series = dict[str, list[tuple[int, float]]]
"""Rounds and values of each number by its name."""


def record(round: int) -> Record:
    """Return the record of a round; every other round has no test accuracy."""
    is_evaluated = round % 2 == 0
    return Record(
        round=round,
        test_accuracy=round / 7 if is_evaluated else None,
        test_loss=1 / round if is_evaluated else None,
        train_loss=2.5 / round,
        participation_ratio=0.5,
        contacted=3,
        trained=2,
        uploaded=2,
        bytes_down=3_000_000_017,
        bytes_up=20 + round,
        forward_samples=7,
        train_samples=50,
        server_forward_samples=0,
        seconds_select=0.001,
        seconds_ask=0.0,
        seconds_train=0.25,
        seconds_aggregate=0.5,
        seconds_evaluate=0.125,
        wall_seconds=0.875 * round,
        selected=[0, round % NUM_CLIENTS],
        coverage=0.75,
        nonfinite_reports=0,
        dropped_updates=1,
        simulated_seconds=8.0,
        simulated_seconds_ask=1.0,
        simulated_seconds_train=7.0,
        simulated_time=8.0 * round,
        late=[],
        learning_rate=0.1 / round,
    )


@pytest.fixture(scope="module")
def output_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that keeps MLflow's database, which takes seconds to create."""
    return tmp_path_factory.mktemp("outputs")


@pytest.fixture
def info(output_dir: Path, request: pytest.FixtureRequest) -> RunInfo:
    """Describe a run of four rounds, with a folder of its own for each test."""
    folder = output_dir / request.node.name / "run"
    config = {
        "name": request.node.name,
        "seed": 0,
        "num_rounds": 4,
        "num_clients": NUM_CLIENTS,
        "output_dir": str(output_dir),
    }
    RunFolder.create(folder, config)
    return RunInfo(request.node.name, folder, config, {"selector": "random"}, 0, num_rounds=4)


def log_rounds(trackers: Trackers, info: RunInfo, rounds: range) -> None:
    """Write the records of `rounds` to metrics.jsonl, and pass them to the trackers."""
    for t in rounds:
        RunFolder(info.folder).append(record(t).as_dict())
        trackers.log(record(t).as_dict())


def started(make: Callable[[], Tracker], info: RunInfo) -> Trackers:
    """Return a started tracker."""
    trackers = Trackers(["x"], lambda name: make())
    trackers.start(info)
    return trackers


# --- readers ---


def in_metrics_jsonl(info: RunInfo) -> Series:
    """Return the numbers in metrics.jsonl, under the names that trackers use, and their sums."""
    series: Series = {"total/bytes": [], "total/samples": []}
    num_bytes = 0
    num_samples = 0
    for row in read_metrics(info.folder):
        for key, value in row.items():
            if isinstance(value, int | float) and key != "round":
                series.setdefault(NAMES[key], []).append((row["round"], value))
        num_bytes += row["bytes_down"] + row["bytes_up"]
        num_samples += row["train_samples"] + row["forward_samples"]
        series["total/bytes"].append((row["round"], num_bytes))
        series["total/samples"].append((row["round"], num_samples))
    return series


def by_tensorboard(info: RunInfo) -> Series:
    """Return all scalars that TensorBoard's reader finds."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(info.folder / "tensorboard"))
    reader.Reload()
    series: Series = {}
    for name in reader.Tags()["scalars"]:
        series[name] = [(event.step, event.value) for event in reader.Scalars(name)]
    return series


def by_mlflow(info: RunInfo) -> Series:
    """Return all metrics of the only MLflow run of this name."""
    run = mlflow_run(info)
    series: Series = {}
    for name in run.data.metrics:
        history = mlflow_client(info).get_metric_history(run.info.run_id, name)
        series[name] = [(metric.step, metric.value) for metric in history]
    return series


def mlflow_client(info: RunInfo) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(f"sqlite:///{info.config['output_dir']}/mlflow.db")


def mlflow_run(info: RunInfo) -> Any:
    """Return the only MLflow run of the experiment that has the name of the run."""
    client = mlflow_client(info)
    experiment = client.get_experiment_by_name(info.name)
    (run,) = client.search_runs([experiment.experiment_id])
    return run


def by_wandb(info: RunInfo) -> Series:
    """Return the numbers in the offline file of W&B, but those that only W&B has."""
    series: Series = {}
    for row in history_of(offline_records(info.folder)):
        for name, value in row.items():
            is_own = name.startswith(("_", "accuracy/", "selection/clients"))
            if not is_own and name != "round":
                series.setdefault(name, []).append((row["round"], value))
    return series


READERS: dict[str, tuple[Callable[[], Tracker], Callable[[RunInfo], Series]]] = {
    "tensorboard": (TensorBoardTracker, by_tensorboard),
    "mlflow": (MlflowTracker, by_mlflow),
    "wandb": (lambda: tracker("offline"), by_wandb),
}


def expected(info: RunInfo, name: str) -> Series:
    """Return what a tracker must have of a run with the outcome `summary()`."""
    series = in_metrics_jsonl(info)
    if name != "wandb":  # its summary has these numbers
        outcome = summary()
        for key in ("final_accuracy", "last_accuracy", "best_accuracy"):
            series[f"final/{key.removeprefix('final_')}"] = [(outcome["rounds"], outcome[key])]
    return as_stored(series, name)


def as_stored(series: Series, name: str) -> Series:
    """Return numbers as the tracker stores them: TensorBoard keeps single precision."""
    if name != "tensorboard":
        return series
    return {
        key: [(round, float(np.float32(value))) for round, value in values]
        for key, values in series.items()
    }


# --- the contract ---


@pytest.mark.usefixtures("no_account")
@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_every_number_of_every_round_is_read_back(name: str, info: RunInfo) -> None:
    make, read = READERS[name]
    trackers = started(make, info)
    log_rounds(trackers, info, range(1, 5))
    trackers.finish(summary())
    assert trackers.degraded == {}
    assert read(info) == expected(info, name)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_a_killed_and_resumed_run_has_every_round_once_and_in_order(
    name: str, info: RunInfo
) -> None:
    """TensorBoard's thread of the killed tracker lives on in this process, so its queue is emptied
    before: a killed process writes nothing later."""
    make, read = READERS[name]
    killed = started(make, info)  # after round 3; its checkpoint is of round 2
    log_rounds(killed, info, range(1, 4))
    for ended in killed._trackers.values():
        if isinstance(ended, TensorBoardTracker):
            ended._writer.flush()
    first_two = (info.folder / METRICS).read_bytes().splitlines(keepends=True)[:2]
    RunFolder(info.folder).reopen({METRICS: len(b"".join(first_two))})
    resumed = started(make, info)
    resumed.replay(record(1).as_dict())
    resumed.replay(record(2).as_dict())
    log_rounds(resumed, info, range(3, 5))
    resumed.finish(summary())
    assert resumed.degraded == {}
    series = read(info)
    assert [round for round, _ in series["train/loss"]] == [1, 2, 3, 4]
    assert series == expected(info, name)


def test_every_number_of_a_record_has_a_name() -> None:
    lists = {"selected", "late"}
    assert {field.name for field in fields(Record)} - lists - {"round"} == NAMES.keys()


# --- csv ---


def csv_rows(info: RunInfo) -> list[dict[str, str]]:
    text = (info.folder / "metrics.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(io.StringIO(text)))


def test_csv_has_the_keys_and_values_of_metrics_jsonl(info: RunInfo) -> None:
    trackers = started(CsvTracker, info)
    log_rounds(trackers, info, range(1, 5))
    trackers.finish(summary())
    rows = csv_rows(info)
    records = read_metrics(info.folder)
    assert len(rows) == len(records) == 4
    for row, values in zip(rows, records, strict=True):
        for key, cell in row.items():
            assert (json.loads(cell) if cell else None) == values.get(key)


def test_csv_of_a_killed_and_resumed_run_has_every_round_once(info: RunInfo) -> None:
    killed = started(CsvTracker, info)
    log_rounds(killed, info, range(1, 4))
    RunFolder(info.folder).reopen({})
    resumed = started(CsvTracker, info)
    resumed.replay(record(1).as_dict())
    log_rounds(resumed, info, range(2, 4))
    resumed.finish(summary())
    assert resumed.degraded == {}
    assert [row["round"] for row in csv_rows(info)] == ["1", "2", "3"]


def test_csv_writes_through_no_link(info: RunInfo, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    (info.folder / "metrics.csv").symlink_to(victim)
    trackers = started(CsvTracker, info)
    assert "FileExistsError" in trackers.degraded["x"]
    assert victim.read_text() == "untouched"


# --- histograms and sums ---


def test_selections_are_counted_client_by_client(info: RunInfo) -> None:
    """Round t selects the clients 0 and t modulo 4: 0 and 1, 0 and 2, 0 and 3, 0 twice."""
    metrics = RoundMetrics(info)
    for t in range(1, 5):
        metrics.add(record(t).as_dict())
    assert metrics.counts.tolist() == [5, 1, 1, 1]
    assert metrics.edges.tolist() == [0, 1, 2, 3, 4]


def test_many_clients_share_64_bins(tmp_path: Path) -> None:
    info = RunInfo("x", tmp_path, {"num_clients": 640}, {}, 0, num_rounds=1)
    metrics = RoundMetrics(info)
    metrics.add({**record(1).as_dict(), "selected": [0, 9, 10, 639]})
    assert metrics.counts.tolist() == [2, 1, *[0] * 61, 1]


def test_a_run_has_ten_histograms_and_one_after_its_last_round(tmp_path: Path) -> None:
    info = RunInfo("x", tmp_path, {"num_clients": 4}, {}, 0, num_rounds=105)
    metrics = RoundMetrics(info)
    rounds = [t for t in range(1, 106) if metrics.has_histogram(t)]
    assert rounds == [10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 105]


def test_tensorboard_has_a_histogram_of_selections(info: RunInfo) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = started(TensorBoardTracker, info)
    log_rounds(trackers, info, range(1, 5))
    trackers.finish(summary())
    reader = EventAccumulator(str(info.folder / "tensorboard"))
    reader.Reload()
    (status,) = reader.Tensors("status/text_summary")
    assert status.tensor_proto.string_val == [b"done"]
    last = reader.Histograms("selection/clients")[-1]
    assert last.step == 4
    counts = dict(zip(last.histogram_value.bucket_limit, last.histogram_value.bucket, strict=True))
    assert counts == {0.0: 0, 1.0: 5, 2.0: 1, 3.0: 1, 4.0: 1}  # by the upper bound of the bin


def test_a_round_in_which_nobody_was_selected_yet_has_no_histogram(info: RunInfo) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoardTracker()
    tracker.start(info)
    tracker.log({**record(1).as_dict(), "selected": []})
    tracker.log(record(2).as_dict())
    tracker.finish(summary())
    reader = EventAccumulator(str(info.folder / "tensorboard"))
    reader.Reload()
    assert [event.step for event in reader.Histograms("selection/clients")] == [2]


# --- MLflow, which takes seconds to import and to create a database ---


@pytest.mark.slow
def test_an_mlflow_run_has_the_config_the_choices_and_the_outcome(info: RunInfo) -> None:
    trackers = started(MlflowTracker, info)
    trackers.finish(summary(status="failed"))
    run = mlflow_run(info)
    assert run.info.run_name == "run"  # the folder's name
    assert run.info.status == "FAILED"
    assert run.data.tags["status"] == "failed"
    assert run.data.params["num_clients"] == "4"
    assert run.data.tags["selector"] == "random"


@pytest.mark.slow
def test_an_mlflow_run_replaces_that_of_the_result_that_is_overwritten(info: RunInfo) -> None:
    """A run that replaces an earlier result has a folder of its own until it ends."""
    started(MlflowTracker, info).finish(summary())
    replacement = replace(info, folder=info.folder / "replacement", final_folder=info.folder)
    replacement.folder.mkdir()
    started(MlflowTracker, replacement).finish(summary())
    experiment: Any = mlflow_client(info).get_experiment_by_name(info.name)
    assert len(mlflow_client(info).search_runs([experiment.experiment_id])) == 1


@pytest.mark.slow
def test_mlflow_takes_a_folder_with_signs_of_addresses(info: RunInfo, tmp_path: Path) -> None:
    folder = tmp_path / "o?a#b%20c"
    folder.mkdir()
    elsewhere = replace(info, config={**info.config, "output_dir": str(folder)})
    trackers = started(MlflowTracker, elsewhere)
    trackers.finish(summary())
    assert not trackers.degraded
    assert (folder / "mlflow.db").is_file()


@pytest.mark.slow
def test_mlflow_without_its_folder_is_skipped_at_once(info: RunInfo, tmp_path: Path) -> None:
    """MLflow itself would try to open the database again for more than a minute."""
    (tmp_path / "file").write_text("a file where a folder belongs")
    config = {**info.config, "output_dir": str(tmp_path / "file")}
    elsewhere = RunInfo("x", info.folder, config, {}, 0, num_rounds=4)
    trackers = started(MlflowTracker, elsewhere)
    log_rounds(trackers, elsewhere, range(1, 3))
    trackers.finish(summary())
    assert "Error" in trackers.degraded["x"]


@pytest.mark.slow
def test_mlflow_databases_of_jobs_that_begin_together_are_whole(tmp_path: Path) -> None:
    """MLflow itself leaves half a database, which no later run can use."""
    (tmp_path / "mlflow.new").write_text("of a killed process")
    words = ["-m", "tracker=mlflow", "seed=0,1", "num_rounds=2", f"output_dir={tmp_path}"]
    launcher = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    command = [sys.executable, "-m", "fedsim", *words, *launcher]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[1])
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment: Any = client.get_experiment_by_name("default")
    names = [run.info.run_name for run in client.search_runs([experiment.experiment_id])]
    assert sorted(names) == ["random s0", "random s1"]


# --- what may be missing ---


@pytest.mark.parametrize(
    ("choice", "package"),
    [("tensorboard", "tensorboard"), ("mlflow", "mlflow"), ("mlflow", "alembic")],
)
def test_a_missing_package_is_an_error_before_the_run_that_names_the_extra(
    choice: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_spec(name: str) -> object:
        return None if name == package else object()

    monkeypatch.setattr("fedsim.tracking.base.find_spec", find_spec)
    message = (
        rf"tracker\.{choice}: needs the package {package}, which is not installed\n"
        rf" +pip install 'fedsim-selection\[{choice}\]'"
    )
    with search_path(), pytest.raises(ConfigError, match=message):
        check_jobs(compose_jobs([f"tracker={choice}"], multirun=False))


@pytest.mark.parametrize("make", [CsvTracker, TensorBoardTracker])
def test_a_tracker_whose_file_cannot_be_written_is_skipped(
    make: Callable[[], Tracker], info: RunInfo
) -> None:
    (info.folder / "metrics.csv").mkdir()
    (info.folder / "tensorboard").write_text("a file where a folder belongs")
    trackers = started(make, info)
    log_rounds(trackers, info, range(1, 3))
    trackers.finish(summary())
    assert "FileExistsError" in trackers.degraded["x"]


# --- names of runs ---


def names(*words: str) -> list[str]:
    """Return the names of the jobs of `fedsim -m ...` by their swept values."""
    with search_path():
        return [plan.swept for plan in check_jobs(compose_jobs(words, multirun=True))]


def test_jobs_of_a_sweep_are_named_by_selector_swept_values_and_seed() -> None:
    assert names("selector=gpfl", "selector.alpha=0.5,1", "seed=0,1", "num_rounds=3") == [
        "gpfl alpha=0.5 s0",
        "gpfl alpha=0.5 s1",
        "gpfl alpha=1 s0",
        "gpfl alpha=1 s1",
    ]


def test_a_job_is_not_named_by_keys_that_it_lacks_or_that_all_jobs_share() -> None:
    assert names("selector=random,gpfl", "dataset=digits,femnist_generated") == [
        "random dataset=digits s0",
        "random dataset=femnist_generated s0",
        "gpfl dataset=digits s0",
        "gpfl dataset=femnist_generated s0",
    ]


def test_the_only_job_of_a_command_has_the_name_of_its_folder(info: RunInfo) -> None:
    assert names("selector=gpfl", "selector.alpha=0.5") == [""]
    assert info.label == "run"


def test_a_trackers_run_has_the_name_of_the_job(info: RunInfo) -> None:
    job = replace(info, swept="gpfl alpha=0.5 s1")
    message = start_message(job, {"project": "fedsim"}, "offline", 1.0)
    assert message["name"] == "gpfl alpha=0.5 s1"
    assert message["config"]["folder"] == "run"
