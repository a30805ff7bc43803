"""The tracker that writes the records of a run as a table, for spreadsheets."""

import csv
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fedsim.core.record import Record
from fedsim.results.files import TABLE, json_ready
from fedsim.tracking.base import RunInfo, Tracker


class CsvTracker(Tracker):
    """A tracker that writes a row for each round to metrics.csv in the run's folder.

    The columns are the keys of metrics.jsonl. A cell is empty if the value was not measured, and
    lists are in JSON.
    """

    def start(self, info: RunInfo) -> None:
        path = info.folder / TABLE
        self._file = path.open("x", newline="", encoding="utf-8")  # `x` follows no link
        columns = [field.name for field in fields(Record)]
        self._writer = csv.DictWriter(self._file, columns)
        self._writer.writeheader()

    def log(self, record: Mapping[str, Any]) -> None:
        self._writer.writerow(json_ready(record))
        self._file.flush()

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._file.close()
