"""Archives of runs: a report made from the file equals one made from the runs' folders."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from fedsim.config.compose import check_jobs, compose_jobs, search_path
from fedsim.jobs.cli import run as fedsim_run
from fedsim.results.archive import (
    MACHINE_KEYS,
    METADATA_KEY,
    RUN_COLUMNS,
    read_archive,
    write_archive,
)
from fedsim.results.measures import is_recorded
from fedsim.results.runs import ReportError, Run, read_runs
from tests.report_toys import make_report, write_run
from tests.test_report_measures import LATE, with_clients, write_simulated


def archived(folder: Path, path: Path) -> list[Run]:
    """Write the runs below `folder` to an archive, and read it."""
    write_archive(read_runs(folder), folder, path)
    return read_archive(path)


def write_table_2(folder: Path) -> None:
    """Write six runs: two methods and three seeds of a setting of GPFL's Table II.

    Configs are real and records are made up. The fifth run diverged in its first round.
    """
    words = ["preset=gpfl_table2_fmnist", "cell=gpfl_2spc", "selector=random,gpfl", "seed=0,1,2"]
    with search_path():
        plans = check_jobs(compose_jobs(words, multirun=True))
    for number, plan in enumerate(plans):
        rng = np.random.default_rng(number)
        status, rounds = ("diverged", 0) if number == 4 else ("done", 500)
        selected = [sorted(rng.choice(100, 5, replace=False).tolist()) for _ in range(rounds)]
        accuracies = np.round(rng.uniform(0, 1, rounds), 4).tolist()
        summary = {
            "choices": dict(plan.choices),
            "engine": "native",
            "start_up_rounds": 0,
            "revision": {"commit": "abc", "dirty": False},
            "seed": plan.settings.seed,
        }
        run_folder = write_run(
            folder / str(number),
            accuracies,
            selected,
            status=status,
            summary=summary,
            num_clients=100,
        )
        config = dict(plan.config)
        config["num_clients"] = 100
        (run_folder / "config.yaml").write_text(yaml.safe_dump(config))


def table_files(folder: Path) -> dict[str, bytes]:
    suffixes = {".md", ".csv", ".tex", ".json"}
    paths = [path for path in folder.rglob("*") if path.suffix in suffixes]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@pytest.mark.filterwarnings("ignore")
def test_a_report_of_an_archive_has_the_tables_and_verdicts_of_the_folders(tmp_path: Path) -> None:
    runs, archive, copy = tmp_path / "gpfl_table2_fmnist", tmp_path / "a.pq", tmp_path / "copy.pq"
    first, again = tmp_path / "first", tmp_path / "again"
    write_table_2(runs)
    options = ["--no-figures", "--archive"]
    assert make_report([str(runs), "--to", str(first), *options, str(archive)]) == 0
    shutil.rmtree(runs)
    assert make_report([str(archive), "--to", str(again), *options, str(copy)]) == 0
    tables = table_files(first)
    assert table_files(again) == tables
    assert {"numbers.csv", "claims.csv", "overview.csv", "selections.csv"} <= set(tables)
    assert 'class="text"><a href' not in (again / "report.html").read_text()  # no links to folders
    assert copy.read_bytes() == archive.read_bytes()


def test_the_window_of_a_report_does_not_change_the_archive(tmp_path: Path) -> None:
    for seed in range(2):
        write_run(tmp_path / "runs", [0.1, 0.2, 0.3], [[0], [1], [2]], seed=seed)
    options = ["--no-figures", "--window", "1", "--archive", str(tmp_path / "a.parquet")]
    assert make_report([str(tmp_path / "runs"), "--to", str(tmp_path / "report"), *options]) == 0
    [first, second] = read_archive(tmp_path / "a.parquet")  # leaves damaged runs out
    assert (first.seed, second.seed) == (0, 1)
    assert first.summary["final_accuracy"] == pytest.approx(0.2)


def test_an_archive_has_a_row_for_each_round(tmp_path: Path) -> None:
    write_table_2(tmp_path / "runs")
    write_archive(read_runs(tmp_path / "runs"), tmp_path / "runs", tmp_path / "a.parquet")
    table = pq.read_table(tmp_path / "a.parquet")
    assert table.num_rows == 5 * 500 + 1  # five whole runs, and one without a round
    first_row_of_the_second_run = table.slice(500, 1).to_pylist()[0]
    expected = {
        "run": 1,
        "seed": 1,
        "engine": "native",
        "commit": "abc",
        "round": 1,
        "choice.selector": "random",
        "choice.cell": "gpfl_2spc",
    }
    assert expected.items() <= first_row_of_the_second_run.items()
    assert json.loads(first_row_of_the_second_run["folder"]).startswith("1/")


def test_selected_clients_are_stored_as_differences(tmp_path: Path) -> None:
    selected = [[1, 3], [], [0, 1, 2]]
    write_run(tmp_path / "runs", [0.1, 0.2, 0.3], selected)
    [run] = archived(tmp_path / "runs", tmp_path / "a.parquet")
    stored = pq.read_table(tmp_path / "a.parquet")["selected"].to_pylist()
    assert stored == [[1, 2], [], [0, 1, 1]]
    assert [record["selected"] for record in run.records] == selected


def test_an_archive_keeps_all_of_real_runs_but_the_folders_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = "selector=random,power_of_choice num_rounds=3 tracker=files_only eval_every=2"
    assert fedsim_run(["-m", *words.split()]) == 0
    runs = read_runs(Path("outputs"))
    write_archive(runs, Path("outputs"), Path("a.parquet"))
    for before, after in zip(runs, read_archive(Path("a.parquet")), strict=True):
        assert after.summary == before.summary
        assert after.folder == before.folder.relative_to("outputs")
        assert before.config.keys() - after.config.keys() == set(MACHINE_KEYS)
        assert after.config.items() <= before.config.items()
        assert before.histograms is not None
        np.testing.assert_array_equal(after.histograms, before.histograms)
        for record, archived_record in zip(before.records, after.records, strict=True):
            assert archived_record.keys() == record.keys()
            for name, value in record.items():
                is_single = name.endswith(("_loss", "_seconds")) or name.startswith("seconds_")
                if is_single and value is not None:
                    value = pytest.approx(value, rel=1e-6)
                assert archived_record[name] == value, name


def test_a_report_of_folders_has_figures_and_links_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert fedsim_run(["num_rounds=3", "tracker=files_only"]) == 0
    assert make_report(["outputs/default"]) == 0
    report = tmp_path / "outputs" / "default" / "report"
    assert (report / "figures" / "partitions.png").stat().st_size > 1000
    assert 'class="text"><a href' in (report / "report.html").read_text()


def test_simulated_times_are_kept(tmp_path: Path) -> None:
    write_simulated(tmp_path / "runs", [10.1, 20, 30, 40, 50])
    runs = archived(tmp_path / "runs", tmp_path / "a.parquet")
    [timed] = [run for run in runs if "simulated_seconds" in run.columns]
    assert timed.columns["simulated_seconds"].tolist() == [10.1, 20, 30, 40, 50]
    assert [record["late"] for record in timed.records] == LATE


def test_accuracies_of_clients_are_kept_and_earlier_archives_may_lack_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_simulated(tmp_path / "runs", [10.1, 20, 30, 40, 50])
    with_clients(tmp_path / "runs" / "x")
    before = [run.client_accuracies for run in read_runs(tmp_path / "runs")]
    after = [run.client_accuracies for run in archived(tmp_path / "runs", tmp_path / "a.parquet")]
    assert [values is None for values in after] == [values is None for values in before]
    for values, archived_values in zip(before, after, strict=True):
        if values is not None:
            np.testing.assert_array_equal(archived_values, values)
    monkeypatch.setattr("fedsim.results.archive.RUN_COLUMNS", RUN_COLUMNS[:-1])
    earlier = archived(tmp_path / "runs", tmp_path / "earlier.parquet")
    assert [run.client_accuracies for run in earlier] == [None] * 4


def test_runs_of_a_compact_archive_lack_selections_next_to_other_runs(tmp_path: Path) -> None:
    """The runs of a compact archive are written to an archive with a run that has selections."""
    write_run(tmp_path / "compact", [0.1, 0.2], [[0], [1]])
    runs = read_runs(tmp_path / "compact")
    write_archive(runs, tmp_path / "compact", tmp_path / "compact.parquet", compact=True)
    write_run(tmp_path / "full", [0.1, 0.2], [[], [1, 3]], seed=1)
    runs = [*read_archive(tmp_path / "compact.parquet"), *read_runs(tmp_path / "full")]
    write_archive(runs, tmp_path, tmp_path / "both.parquet")
    compact, full = read_archive(tmp_path / "both.parquet")
    assert not is_recorded([compact], ["selected"])
    assert full.columns["selected"].tolist() == [0, 2]
    assert full.selections.tolist() == [0, 1, 0, 1]
    write_archive([compact, full], tmp_path, tmp_path / "again.parquet")
    assert (tmp_path / "again.parquet").read_bytes() == (tmp_path / "both.parquet").read_bytes()


@pytest.mark.parametrize("name", ["other.parquet", "damaged.parquet"])
def test_a_file_that_is_no_archive_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    pq.write_table(pa.table({"round": [1]}), tmp_path / "other.parquet")
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1")
    assert make_report([str(tmp_path / name)]) == 3
    error = capsys.readouterr().err.replace("\n", "")
    assert name in error
    assert "archive of runs" in error


def test_an_archive_that_cannot_be_written_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "runs", [0.1], [[0]])
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "a.parquet"
    assert make_report([str(tmp_path / "runs"), "--no-figures", "--archive", str(path)]) == 1
    assert "--archive: cannot write" in capsys.readouterr().err


def with_column(table: pa.Table, name: str, values: Sequence[Any], kind: pa.DataType) -> pa.Table:
    position = table.column_names.index(name)
    return table.set_column(position, name, pa.array(values, kind))


DAMAGES = [
    ("config", "[" * 100_000, "config is no JSON"),
    ("config", '{"seed": 0}', "config.yaml is not that of a run"),
    ("summary", "5", "summary.json is not"),
    ("summary", '{"status": "done", "choices": {"a": []}}', "summary.json is not"),
    ("summary", {"best_accuracy": 49.65}, "summary.json has best_accuracy=49.65"),
    ("folder", "5", "its folder is not a text"),
    ("round", 7, "metrics.jsonl has round 7 where round 1 belongs"),
    ("test_accuracy", 49.65, "test_accuracy that is out of range"),
    ("test_accuracy", 0.15, "summary.json has final_accuracy"),
    ("selected", [9], "metrics.jsonl names clients that the run does not have"),
]


@pytest.mark.parametrize(("name", "value", "reason"), DAMAGES)
def test_a_damaged_run_is_left_out_with_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, value: Any, reason: str
) -> None:
    for seed in range(3):
        write_run(tmp_path / "runs", [0.1, 0.2], [[0], [1]], seed=seed)
    path = tmp_path / "a.parquet"
    archived(tmp_path / "runs", path)
    table = pq.read_table(path)
    values = table[name].to_pylist()
    if isinstance(value, dict):
        value = json.dumps(json.loads(values[2]) | value)
    values[2] = value  # the first row of the second run
    pq.write_table(with_column(table, name, values, table[name].type), path)
    assert [run.seed for run in read_archive(path)] == [0, 2]
    [line] = capsys.readouterr().err.splitlines()
    assert f"left out {path}: run 1: " in line
    assert reason in line


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """An archive of one run with two rounds."""
    write_run(tmp_path / "runs", [0.1, 0.2], [[0], [1]])
    archived(tmp_path / "runs", tmp_path / "a.parquet")
    return tmp_path / "a.parquet"


def test_runs_whose_records_have_another_type_are_left_out(archive: Path) -> None:
    table = with_column(pq.read_table(archive), "bytes_up", ["10", "10"], pa.string())
    pq.write_table(table, archive)
    assert read_archive(archive) == []


def test_a_report_needs_a_sound_run(archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = with_column(pq.read_table(archive), "round", [1, 3], pa.int64())
    pq.write_table(table, archive)
    assert make_report([str(archive), "--no-figures"]) == 3
    assert f"{archive}: no sound run in it" in capsys.readouterr().err


@pytest.mark.parametrize("numbers", [[0, 2**31 - 1], [1, 1], [0, -1], [1, 0]])
def test_rows_must_belong_to_one_run_after_another(archive: Path, numbers: list[int]) -> None:
    pq.write_table(with_column(pq.read_table(archive), "run", numbers, pa.int32()), archive)
    with pytest.raises(ReportError, match="not those of one run after another"):
        read_archive(archive)


@pytest.mark.parametrize(
    "metadata",
    [
        b"[" * 100_000,
        b"[]",
        b'{"format": 1}',
        b'{"format": 1, "records": [{}]}',
        b'{"format": 3, "records": ["round"]}',
    ],
)
def test_a_description_that_no_version_writes_is_rejected(archive: Path, metadata: bytes) -> None:
    table = pq.read_table(archive).replace_schema_metadata({METADATA_KEY: metadata})
    pq.write_table(table, archive)
    with pytest.raises(ReportError, match=r"a\.parquet: "):
        read_archive(archive)


def test_an_archive_that_would_fill_the_memory_is_rejected(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsim.results.archive.MAX_VALUES", 10)
    with pytest.raises(ReportError, match=r"holds .* values, more than an archive that is read"):
        read_archive(archive)
