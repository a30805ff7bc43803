"""Accuracies client by client in the report: by hand, from folders and from an archive, and left out where there are
none."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fedsim.report.__main__ import main
from fedsim.report.figures import clients_plot, sorted_accuracies
from fedsim.report.plot import make_looks
from fedsim.report.tables import clients
from fedsim.results.files import CLIENTS
from fedsim.results.groups import drawn_panels, group_runs, make_panels
from fedsim.results.measures import find_measure
from fedsim.results.runs import TOLD, read_archive, read_runs, write_archive
from tests.report_toys import write_run


def measured(folder: Path, accuracies: list[float], mean: float, **config: Any) -> Path:
    """A run of two rounds, the first without an evaluation; clients 2 and 3 are never selected."""
    path = write_run(folder, [None, 0.5], [[0], [1]], client_accuracy="labels", **config)
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    aggregates = {"mean": mean, "std": 0.1, "worst_tenth": 0.2, "best_tenth": 0.9, "never_selected": None}
    lines[1] |= {f"client_accuracy_{name}": value for name, value in aggregates.items()}
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    np.savez(path / CLIENTS, accuracy=np.array(accuracies))
    return path


def two_methods(folder: Path) -> None:
    measured(folder, [0.9, 0.1, 0.5, 0.3], 0.4, seed=0)
    measured(folder, [0.2, 0.2, np.nan, 0.8], 0.6, seed=1)
    write_run(folder, [None, 0.5], [[0], [1]], choices={"selector": "gpfl"})


def test_the_table_and_the_measures_by_hand(tmp_path: Path) -> None:
    two_methods(tmp_path)
    table = clients(group_runs(read_runs(tmp_path)))
    (row,) = (dict(zip(table.header, cells, strict=True)) for cells in table.rows)
    assert (row["run"], row["seeds"], row["measured on"]) == (
        "selector=random" if "=" in row["run"] else "random",
        "2",
        "labels",
    )
    assert row["mean"].startswith("0.5000 [")
    assert (row["never selected"], row["clients never selected"]) == ("-", "2")
    runs = {(run.choices["selector"], run.seed): run for run in read_runs(tmp_path)}
    assert find_measure("client_accuracy_mean")(runs["random", 1]) == 0.6
    assert find_measure("client_accuracy_never_selected")(runs["random", 1]) is None
    assert find_measure("client_accuracy_mean")(runs["gpfl", 0]) is None


def test_the_figure_has_the_mean_at_each_rank(tmp_path: Path) -> None:
    """Three clients of the second run have an accuracy, so the first is read at a sixth, a half and five sixths."""
    two_methods(tmp_path)
    panels = drawn_panels(make_panels(group_runs(read_runs(tmp_path))))
    (group,) = (g for g in panels[0].lines.values() if g.choices["selector"] == "random")
    expected = np.array([[0.1 + 0.2 / 6, 0.4, 0.5 + 0.4 * 5 / 6], [0.2, 0.2, 0.8]])
    found = sorted_accuracies(group)
    assert found is not None
    np.testing.assert_allclose(found, expected)
    plot = clients_plot(panels, make_looks(panels))
    assert plot is not None
    (line,) = plot.figure.axes[0].get_lines()
    np.testing.assert_allclose(np.asarray(line.get_ydata(), float), expected.mean(0))


def test_without_measurements_there_is_neither(tmp_path: Path) -> None:
    write_run(tmp_path, [0.5], [[0]])
    groups = group_runs(read_runs(tmp_path))
    panels = drawn_panels(make_panels(groups))
    assert not clients(groups).rows
    assert clients_plot(panels, make_looks(panels)) is None


def test_a_damaged_file_is_told_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (measured(tmp_path, [0.5] * 4, 0.5) / CLIENTS).write_bytes(b"PK damaged")
    (run,) = read_runs(tmp_path)
    assert run.client_accuracies is None
    assert CLIENTS in capsys.readouterr().err


def test_archives_keep_them_and_earlier_ones_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_methods(tmp_path / "runs")
    runs = read_runs(tmp_path / "runs")
    write_archive(runs, tmp_path / "runs", tmp_path / "a.parquet")
    for run, again in zip(runs, read_archive(tmp_path / "a.parquet"), strict=True):
        if run.client_accuracies is None:
            assert again.client_accuracies is None
        else:
            np.testing.assert_array_equal(again.client_accuracies, run.client_accuracies)
    with monkeypatch.context() as patched:
        patched.setattr("fedsim.results.runs.TOLD", TOLD[:-1])
        write_archive(runs, tmp_path / "runs", tmp_path / "earlier.parquet")
    assert [run.client_accuracies for run in read_archive(tmp_path / "earlier.parquet")] == [None] * 3


@pytest.mark.filterwarnings("ignore")
def test_the_command_writes_them(tmp_path: Path) -> None:
    two_methods(tmp_path)
    for path in tmp_path.glob("*/config.yaml"):
        assert yaml.safe_load(path.read_text())["num_clients"] == 4
    assert main([str(tmp_path), "--no-figures"]) == 0
    with (tmp_path / "report" / "clients.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 1
