"""Archives of runs: the report made from the file is that made from the runs' folders."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from fedsim.config.compose import check_jobs, compose_jobs, search_path
from fedsim.jobs.cli import run as fedsim_run
from fedsim.results import measures
from fedsim.results.archive import META, PLACES, TOLD, read_archive, write_archive
from fedsim.results.runs import ReportError, read_runs
from tests.report_toys import make_report, write_run
from tests.test_report_measures import LATE, with_clients, write_simulated


def published_runs(folder: Path) -> None:
    """Two methods, three seeds of a cell of GPFL's Table II: real configs, made-up records, one
    diverged run."""
    words = ["preset=gpfl_table2_fmnist", "cell=gpfl_2spc", "selector=random,gpfl", "seed=0,1,2"]
    with search_path():
        plans = check_jobs(compose_jobs(words, multirun=True))
    for number, plan in enumerate(plans):
        rng = np.random.default_rng(number)
        status, rounds = ("diverged", 0) if number == 4 else ("done", 500)
        selected = [sorted(rng.choice(100, 5, replace=False).tolist()) for _ in range(rounds)]
        accuracies = [float(value) for value in np.round(rng.uniform(0, 1, rounds), 4)]
        told = {"choices": dict(plan.choices), "engine": "native", "start_up_rounds": 0}
        told |= {"revision": {"commit": "abc", "dirty": False}, "seed": plan.settings.seed}
        made = write_run(
            folder / str(number), accuracies, selected, status=status, summary=told, num_clients=100
        )
        (made / "config.yaml").write_text(yaml.safe_dump({**plan.config, "num_clients": 100}))


def files_of(folder: Path) -> dict[str, bytes]:
    names = sorted(
        p for p in folder.rglob("*") if p.is_file() and p.suffix in (".md", ".csv", ".tex", ".json")
    )
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in names}


@pytest.mark.filterwarnings("ignore")
def test_every_table_and_verdict_of_a_preset_comes_from_the_archive(tmp_path: Path) -> None:
    runs, archive = tmp_path / "gpfl_table2_fmnist", tmp_path / "published" / "runs.pq"
    published_runs(runs)
    assert (
        make_report(
            [str(runs), "--to", str(tmp_path / "first"), "--archive", str(archive), "--no-figures"]
        )
        == 0
    )
    shutil.rmtree(runs)
    copied = tmp_path / "copied.parquet"  # an archive of an archive is the same
    assert (
        make_report(
            [
                str(archive),
                "--to",
                str(tmp_path / "again"),
                "--archive",
                str(copied),
                "--no-figures",
            ]
        )
        == 0
    )
    assert copied.read_bytes() == archive.read_bytes()
    first, again = files_of(tmp_path / "first"), files_of(tmp_path / "again")
    assert {
        "numbers.csv",
        "claims.csv",
        "overview.csv",
        "selections.csv",
        "summary.json",
        "tables.md",
    } <= set(first)
    assert again == first
    assert (
        'class="text"><a href' not in (tmp_path / "again" / "report.html").read_text()
    )  # no links to folders
    table = pq.read_table(archive)
    assert table.num_rows == 5 * 500 + 1
    row = table.slice(500, 1).to_pylist()[0]
    assert (row["run"], row["seed"], row["engine"], row["commit"], row["round"]) == (
        1,
        1,
        "native",
        "abc",
        1,
    )
    assert (row["choice.selector"], row["choice.cell"], len(row["selected"])) == (
        "random",
        "gpfl_2spc",
        5,
    )
    assert json.loads(row["folder"]).startswith("1/")


def test_records_of_real_runs_and_their_partitions_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "-m",
        "selector=random,power_of_choice",
        "num_rounds=3",
        "tracker=files_only",
        "eval_every=2",
    ]
    assert fedsim_run(words) == 0
    runs = read_runs(Path("outputs"))
    write_archive(runs, Path("outputs"), Path("a.parquet"))
    for before, after in zip(runs, read_archive(Path("a.parquet")), strict=True):
        assert set(PLACES) <= before.config.keys()
        assert after.config == {
            key: value for key, value in before.config.items() if key not in PLACES
        }
        assert (after.summary, after.folder) == (
            before.summary,
            before.folder.relative_to("outputs"),
        )
        assert before.histograms is not None
        np.testing.assert_array_equal(after.histograms, before.histograms)
        for one, other in zip(before.records, after.records, strict=True):
            assert one.keys() == other.keys()
            for key, value in one.items():
                rounded = key.endswith(("_loss", "_seconds")) or key.startswith("seconds_")
                assert other[key] == (
                    pytest.approx(value, rel=1e-6) if rounded and value is not None else value
                ), key
    assert make_report(["outputs/default"]) == 0  # of real runs, with figures
    assert (tmp_path / "outputs/default/report/figures/partitions.png").stat().st_size > 1000
    assert 'class="text"><a href' in (tmp_path / "outputs/default/report/report.html").read_text()


def test_simulated_times_and_accuracies_of_clients_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_simulated(tmp_path / "runs", [10.1, 20, 30, 40, 50])
    with_clients(tmp_path / "runs" / "x")
    runs = read_runs(tmp_path / "runs")
    write_archive(runs, tmp_path / "runs", tmp_path / "a.parquet")
    archived = read_archive(tmp_path / "a.parquet")
    (timed,) = [
        run for run in archived if measures.total_cost(run, ["simulated_seconds"]) is not None
    ]
    assert timed.columns["simulated_seconds"].tolist() == [10.1, 20, 30, 40, 50]
    assert [record["late"] for record in timed.records] == LATE
    for run, again in zip(runs, archived, strict=True):
        assert (again.client_accuracies is None) == (run.client_accuracies is None)
        if run.client_accuracies is not None:
            np.testing.assert_array_equal(again.client_accuracies, run.client_accuracies)
    monkeypatch.setattr("fedsim.results.archive.TOLD", TOLD[:-1])  # as an earlier version
    write_archive(runs, tmp_path / "runs", tmp_path / "earlier.parquet")
    assert [run.client_accuracies for run in read_archive(tmp_path / "earlier.parquet")] == [
        None
    ] * 4


def test_another_file_and_a_place_that_cannot_be_written_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "runs", [0.1], [[0]])
    pq.write_table(pa.table({"round": [1]}), tmp_path / "other.parquet")
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1")
    for name in ("other.parquet", "damaged.parquet"):
        assert make_report([str(tmp_path / name)]) == 3
        error = capsys.readouterr().err.replace("\n", "")
        assert name in error
        assert "archive of runs" in error
    below = tmp_path / "damaged.parquet" / "a.parquet"
    assert make_report([str(tmp_path / "runs"), "--no-figures", "--archive", str(below)]) == 1
    assert "--archive: cannot write" in capsys.readouterr().err


def test_damaged_runs_in_an_archive_are_left_out_with_a_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(3):
        write_run(tmp_path / "runs", [0.1, 0.2], [[0], [1]], seed=seed)
    runs = read_runs(tmp_path / "runs")
    write_archive(runs, tmp_path / "runs", tmp_path / "a.parquet")
    sound = pq.read_table(tmp_path / "a.parquet")
    summary = json.loads(sound["summary"][2].as_py())
    damages = {
        "config": [
            ("[" * 100_000, "config is no JSON"),
            ('{"seed": 0}', "config.yaml is not that of a run"),
        ],
        "summary": [
            ("5", "summary.json is not"),
            (json.dumps(summary | {"choices": {"a": []}}), "summary.json is not"),
        ],
        "folder": [("5", "its folder is not a text")],
        "round": [(7, "metrics.jsonl has round 7 where round 1 belongs")],
        "test_accuracy": [
            (49.65, "test_accuracy that is out of range"),
            (0.15, "summary.json has smoothed_accuracy"),
        ],
        "selected": [([9], "metrics.jsonl names clients that the run does not have")],
    }
    damages["summary"] += [
        (json.dumps(summary | {"best_accuracy": 49.65}), "summary.json has best_accuracy=49.65")
    ]
    for name, cases in damages.items():
        for value, reason in cases:
            values = sound[name].to_pylist()
            values[2] = value  # the first row of the second run
            column = pa.array(values, sound[name].type)
            table = sound.set_column(sound.column_names.index(name), name, column)
            pq.write_table(table, tmp_path / "b.parquet")
            assert [run.seed for run in read_archive(tmp_path / "b.parquet")] == [0, 2], name
            (line,) = capsys.readouterr().err.splitlines()
            assert f"left out {tmp_path / 'b.parquet'}: run 1: " in line
            assert reason in line
    texts = sound.set_column(sound.column_names.index("bytes_up"), "bytes_up", pa.array(["10"] * 6))
    pq.write_table(texts, tmp_path / "b.parquet")
    assert read_archive(tmp_path / "b.parquet") == []


def test_archives_that_are_none_or_would_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "runs", [0.1, 0.2], [[0], [1]])
    write_archive(read_runs(tmp_path / "runs"), tmp_path / "runs", tmp_path / "a.parquet")
    sound = pq.read_table(tmp_path / "a.parquet")
    for numbers in ([0, 2**31 - 1], [1, 1], [0, -1], [1, 0]):
        table = sound.set_column(0, "run", pa.array(numbers, pa.int32()))
        pq.write_table(table, tmp_path / "b.parquet")
        with pytest.raises(ReportError, match="not those of one run after another"):
            read_archive(tmp_path / "b.parquet")
    for meta in (b"[" * 100_000, b"[]", b'{"format": 1}', b'{"format": 1, "records": [{}]}'):
        pq.write_table(sound.replace_schema_metadata({META: meta}), tmp_path / "b.parquet")
        with pytest.raises(ReportError, match=r"b\.parquet: "):
            read_archive(tmp_path / "b.parquet")
    monkeypatch.setattr("fedsim.results.archive.MOST_VALUES", 10)
    with pytest.raises(ReportError, match=r"holds .* values, more than an archive that is read"):
        read_archive(tmp_path / "a.parquet")


def test_kept_archives_are_sound() -> None:
    for path in sorted((Path(__file__).parents[1] / "docs" / "results").glob("*/runs.parquet")):
        if path.parent.name == "selection_benchmark":
            continue  # which takes long
        left_out: list[str] = []
        assert read_archive(path, left_out)
        assert left_out == []
