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
from fedsim.report.__main__ import main
from fedsim.results.runs import PLACES, read_archive, read_runs, write_archive
from tests.report_toys import write_run


def published_runs(folder: Path) -> None:
    """Two methods, three seeds of a cell of GPFL's Table II: real configs, made-up records, one diverged run."""
    words = ["preset=gpfl_table2_fmnist", "cell=gpfl_2spc", "selector=random,gpfl", "seed=0,1,2"]
    with search_path():
        plans = check_jobs(compose_jobs(words, multirun=True))
    for number, plan in enumerate(plans):
        rng = np.random.default_rng(number)
        status, rounds = ("diverged", 0) if number == 4 else ("done", 500)
        selected = [sorted(rng.choice(100, 5, replace=False).tolist()) for _ in range(rounds)]
        accuracies = [float(value) for value in np.round(rng.uniform(0, 1, rounds), 4)]
        made = write_run(folder / str(number), accuracies, selected, status=status)
        config = {**plan.config, "num_clients": 100}
        (made / "config.yaml").write_text(yaml.safe_dump(config))
        summary = json.loads((made / "summary.json").read_text()) | {"choices": dict(plan.choices)}
        summary |= {"engine": "native", "revision": {"commit": "abc", "dirty": False}, "start_up_rounds": 0}
        (made / "summary.json").write_text(json.dumps(summary))


def files_of(folder: Path) -> dict[str, bytes]:
    names = sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix in (".md", ".csv", ".tex", ".json"))
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in names}


@pytest.mark.filterwarnings("ignore")
def test_every_table_and_verdict_of_a_preset_comes_from_the_archive(tmp_path: Path) -> None:
    runs, archive = tmp_path / "gpfl_table2_fmnist", tmp_path / "published" / "runs.parquet"
    published_runs(runs)
    assert main([str(runs), "--to", str(tmp_path / "first"), "--archive", str(archive), "--no-figures"]) == 0
    shutil.rmtree(runs)
    assert main([str(archive), "--to", str(tmp_path / "again"), "--no-figures"]) == 0
    copied = tmp_path / "copied.parquet"  # an archive of an archive is the same
    assert main([str(archive), "--to", str(tmp_path / "third"), "--archive", str(copied), "--no-figures"]) == 0
    assert copied.read_bytes() == archive.read_bytes()
    first, again = files_of(tmp_path / "first"), files_of(tmp_path / "again")
    assert {"numbers.csv", "claims.csv", "overview.csv", "selections.csv", "summary.json", "tables.md"} <= set(first)
    assert again == first


def test_the_rows_say_what_they_are(tmp_path: Path) -> None:
    published_runs(tmp_path / "runs")
    write_archive(read_runs(tmp_path / "runs"), tmp_path / "runs", tmp_path / "a.parquet")
    table = pq.read_table(tmp_path / "a.parquet")
    assert table.num_rows == 5 * 500 + 1
    row = table.slice(500, 1).to_pylist()[0]
    assert (row["run"], row["seed"], row["engine"], row["commit"], row["round"]) == (1, 1, "native", "abc", 1)
    assert (row["choice.selector"], row["choice.cell"], len(row["selected"])) == ("random", "gpfl_2spc", 5)
    assert json.loads(row["folder"]).startswith("1/")


def test_records_of_real_runs_and_their_partitions_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        fedsim_run(["-m", "selector=random,power_of_choice", "num_rounds=3", "tracker=files_only", "eval_every=2"]) == 0
    )
    assert all(set(PLACES) <= run.config.keys() for run in read_runs(Path("outputs")))
    runs = read_runs(Path("outputs"))
    write_archive(runs, Path("outputs"), Path("a.parquet"))
    for before, after in zip(runs, read_archive(Path("a.parquet")), strict=True):
        assert (after.config, after.summary, after.folder) == (
            {key: value for key, value in before.config.items() if key not in PLACES},
            before.summary,
            before.folder.relative_to("outputs"),
        )
        assert before.histograms is not None
        np.testing.assert_array_equal(after.histograms, before.histograms)
        for one, other in zip(before.records, after.records, strict=True):
            assert one.keys() == other.keys()
            for key, value in one.items():
                rounded = key.endswith(("_loss", "_seconds")) or key.startswith("seconds_")
                assert other[key] == (pytest.approx(value, rel=1e-6) if rounded and value is not None else value), key


@pytest.mark.parametrize("content", [b"PAR1", b"", None])
def test_another_file_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None) -> None:
    path = tmp_path / "a.parquet"
    if content is None:
        pq.write_table(pa.table({"round": [1]}), path)
    else:
        path.write_bytes(content)
    assert main([str(path)]) == 3
    error = capsys.readouterr().err
    assert str(path) in error.replace("\n", "")
    assert "archive of runs" in error


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs", [0.1], [[0]])
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path / "runs"), "--no-figures", "--archive", str(tmp_path / "file" / "a.parquet")]) == 1
    assert "--archive: cannot write" in capsys.readouterr().err
