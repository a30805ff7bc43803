"""The tracker for MLflow, which logs to a database on this machine.

MLflow has closed its store of plain files. So the database is SQLite, with a file for all runs
below `output_dir`.
"""

import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

from fedsim.core.configs import leaves
from fedsim.core.disk import read_regular, write_atomically
from fedsim.results.files import MLFLOW_ID
from fedsim.results.reading import FINISHED
from fedsim.tracking.base import RunInfo, Tracker, require
from fedsim.tracking.metrics import RoundMetrics, final_numbers
from fedsim.tracking.tables import print_if_slow

DATABASE = "mlflow.db"
"""The file in `output_dir`."""
MAX_METRICS = 1000
MAX_PARAMS = 100
"""The most numbers and parameters that MLflow accepts at once."""
FLUSH_SECONDS = 2.0
"""Seconds between two transactions, which take longer than a short round."""
LOCK_SECONDS = 120.0
"""Maximum time to wait for a process that creates the database."""
MAX_ID_BYTES = 100
"""Size limit of the file with a run's id."""


def _address(database: Path) -> str:
    """Return the address of a database's file, in which the characters ? and % are escaped."""
    import sqlalchemy

    url = sqlalchemy.URL.create("sqlite", database=os.fspath(database))
    return url.render_as_string(hide_password=False)


class MlflowTracker(Tracker):
    """A tracker that makes one MLflow run of each run. The experiment is the run's name.

    A run that resumes or begins anew replaces its earlier MLflow run, whose id is in its folder.
    """

    def __init__(self) -> None:
        for package in ("mlflow", "sqlalchemy", "alembic"):
            require(package, extra="mlflow")

    def start(self, info: RunInfo) -> None:
        # 1. Import MLflow, which takes seconds. Its telemetry would use the network.
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param
        from mlflow.exceptions import MlflowException

        self._metric = Metric
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        # 2. Open the database and the experiment.
        database = Path(info.config["output_dir"]).absolute() / DATABASE
        lock = FileLock(f"{database}.lock", timeout=LOCK_SECONDS)
        with print_if_slow("MLflow's database is created"), lock:
            if not database.exists():
                # A killed process, or two at the same time, would leave half a database.
                new = database.with_suffix(".new")
                new.unlink(missing_ok=True)
                MlflowClient(_address(new))
                new.rename(database)
        self._client = MlflowClient(_address(database))
        with suppress(MlflowException):  # it exists
            self._client.create_experiment(info.name)
        experiment: Any = self._client.get_experiment_by_name(info.name)
        # 3. Replace the run.
        id_file = info.folder / MLFLOW_ID
        for folder in dict.fromkeys((info.folder, info.results)):
            with suppress(MlflowException, OSError):
                self._client.delete_run(read_regular(folder / MLFLOW_ID, MAX_ID_BYTES).decode())
        run = self._client.create_run(
            experiment.experiment_id, tags=dict(info.choices), run_name=info.label
        )
        self._id = run.info.run_id
        write_atomically(id_file, self._id.encode())
        # 4. Log the config.
        params = [Param(key, str(value)) for key, value in leaves(info.config)]
        for begin in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._id, params=params[begin : begin + MAX_PARAMS])
        self._metrics = RoundMetrics(info)
        self._waiting: list[Any] = []
        self._flushed = time.monotonic()

    def log(self, record: Mapping[str, Any]) -> None:
        milliseconds = int(1000 * time.time())
        for name, value in self._metrics.add(record).items():
            self._waiting.append(self._metric(name, value, milliseconds, record["round"]))
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self._flush()

    def finish(self, summary: Mapping[str, Any]) -> None:
        milliseconds = int(1000 * time.time())
        for name, value in final_numbers(summary).items():
            self._waiting.append(self._metric(name, value, milliseconds, summary["rounds"]))
        self._flush()
        self._client.set_tag(self._id, "status", summary["status"])
        is_done = summary["status"] in FINISHED
        self._client.set_terminated(self._id, "FINISHED" if is_done else "FAILED")

    def _flush(self) -> None:
        """Log the numbers that wait."""
        for begin in range(0, len(self._waiting), MAX_METRICS):
            self._client.log_batch(self._id, self._waiting[begin : begin + MAX_METRICS])
        self._waiting = []
        self._flushed = time.monotonic()
