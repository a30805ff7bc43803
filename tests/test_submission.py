"""Submissions to the selection benchmark: what is checked, shipped and read back."""

from pathlib import Path

import pytest

from fedsim.benchmark.reader import read_submissions
from fedsim.results.archive import read_archive, write_archive
from fedsim.results.measures import find_measure
from fedsim.results.runs import read_runs
from tests.report_toys import make_report, write_run


def write_scored_runs(folder: Path, archive: Path) -> None:
    """Write two runs of a setting, of which the second diverged in round 1, and their archive.

    Of five rounds, two are evaluated. Each round takes 3 simulated seconds and 40 bytes.
    """
    choices = {"cell": "v1_toy", "optimizer/schedule": "step", "selector": "random_control"}
    for stream, num_rounds, status in ((1, 5, "done"), (2, 0, "diverged")):
        times = [3.0 * number for number in range(1, num_rounds + 1)]
        write_run(
            folder / str(stream),
            [None, 0.5, None, 0.7, None][:num_rounds],
            [[0, 1]] * num_rounds,
            status=status,
            columns={"simulated_time": times, "simulated_seconds": [3.0] * num_rounds},
            summary={"initial_accuracy": 0.25},
            choices=choices,
            name=f"run {stream}",
        )
        config = next((folder / str(stream)).rglob("config.yaml"))
        text = config.read_text().replace("_target_: random_control", f"stream: {stream}")
        config.write_text(text.replace("num_rounds: 0", "num_rounds: 5"))
    write_archive(read_runs(folder), folder, archive, compact=True)


def test_submissions_are_read_as_a_row_for_each_evaluated_round(tmp_path: Path) -> None:
    write_scored_runs(tmp_path / "runs", tmp_path / "a.parquet")
    (tmp_path / "digests.csv").write_text("setting,seed,num_classes\nv1_toy,0,6\n")
    rows = read_submissions(tmp_path)
    shared = {"setting": "v1_toy", "schedule": "step", "num_rounds": 5, "seed": 0}
    assert (rows[list(shared)] == list(shared.values())).all(axis=None)
    assert (rows["num_classes"] == 6).all()
    columns = ["method", "round", "accuracy", "bytes", "seconds", "status"]
    assert rows[columns].to_numpy().tolist() == [
        ["random_control", 0, 0.25, 0, 0.0, "done"],
        ["random_control", 2, 0.5, 80, 6.0, "done"],
        ["random_control", 4, 0.7, 160, 12.0, "done"],
        ["random_control_2", 0, 0.25, 0, 0.0, "diverged"],
    ]


@pytest.mark.filterwarnings("ignore")
def test_a_compact_archive_has_a_report_without_selections(tmp_path: Path) -> None:
    write_scored_runs(tmp_path / "runs", tmp_path / "a.parquet")
    run, _ = read_archive(tmp_path / "a.parquet")
    assert find_measure("final_accuracy")(run) == pytest.approx(0.6)
    names = ("never_selected", "fewest_selections", "selection_gini", "peak_selections")
    measured = [find_measure(name)(run) for name in names]
    assert measured == pytest.approx([float("nan")] * 4, nan_ok=True)
    assert make_report([str(tmp_path / "a.parquet"), "--to", str(tmp_path / "report")]) == 0
    figures = {path.stem for path in (tmp_path / "report" / "figures").glob("*.csv")}
    assert "coverage" in figures
    assert not figures & {"selections", "selections_rounds"}
