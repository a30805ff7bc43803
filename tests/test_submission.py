"""Submissions to the selection benchmark: what is checked, shipped and read back."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from fedsim.benchmark import study
from fedsim.benchmark.reader import read_submissions
from fedsim.benchmark.rules import VERSION
from fedsim.commands.dispatch import answer
from fedsim.results.archive import read_archive, write_archive
from fedsim.results.measures import find_measure
from fedsim.results.reading import read_metrics
from fedsim.results.runs import read_runs
from fedsim.running import experiment
from tests.report_toys import make_report, summary_of, write_records, write_run

RULES: dict[str, Any] = {
    "SCHEDULES": ("constant", "step"),
    "HORIZONS": (4,),
    "SEEDS": (0, 1),
    "RATES": (0.01, 0.1),
    "TUNING_SEEDS": (1000,),
}
"""Rules of a tiny benchmark."""
CELL = """# @package _global_
defaults:
  - override /dataset: digits
  - override /partition: iid
  - override /model: linear
  - _self_
num_clients: 10
cohort_size: 2
eval_every: 2
final_window: 2
"""
"""A setting whose final accuracy is that of the last of four rounds."""
CLASS = "from fedsim.selectors.random import Random\n\nclass Mine(Random):\n    pass\n"

LINK = "https://lab.example/my_lab.py"


def write_scored_runs(folder: Path, archive: Path) -> None:
    """Write two runs of a setting, of which the second diverged in round 1, and their archive.

    Of five rounds, two are evaluated. Each round takes 3 simulated seconds and 40 bytes. The
    updates of 4, 2, 2, 0 and 2 of four clients arrive.
    """
    choices = {"cell": "v1_toy", "optimizer/schedule": "step", "selector": "random_control"}
    for stream, num_rounds, status in ((1, 5, "done"), (2, 0, "diverged")):
        times = [3.0 * number for number in range(1, num_rounds + 1)]
        write_run(
            folder / str(stream),
            [None, 0.5, None, 0.7, None][:num_rounds],
            [[0, 1]] * num_rounds,
            status=status,
            columns={
                "simulated_time": times,
                "simulated_seconds": [3.0] * num_rounds,
                "participation_ratio": [1.0, 0.5, 0.5, 0.0, 0.5][:num_rounds],
            },
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
    columns = ["method", "round", "accuracy", "bytes", "seconds", "uploads", "status"]
    assert rows[columns].to_numpy().tolist() == [
        ["random_control", 0, 0.25, 0, 0.0, 0.0, "done"],
        ["random_control", 2, 0.5, 80, 6.0, 3.0, "done"],
        ["random_control", 4, 0.7, 160, 12.0, 2.0, "done"],
        ["random_control_2", 0, 0.25, 0, 0.0, 0.0, "diverged"],
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


# --- real runs ---


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the setting `v1_toy` in `mine`, and the runs of three methods in `outputs`."""
    folder = tmp_path_factory.mktemp("honest")
    files = {
        "mine/cell/v1_toy.yaml": CELL,
        "mine/selector/mine.yaml": "_target_: my_lab.Mine\nmode: uniform\n",
        "my_lab.py": CLASS,
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in RULES.items():
            patch.setattr(study, name, value)
        patch.setattr(experiment, "own_revision", lambda: {"commit": "abc", "dirty": False})
        patch.chdir(folder)
        words = ["cell=v1_toy", "selector=random,power_of_choice,mine", "--config-dir", "mine"]
        assert study.run(words) == 0
        sys.modules.pop("my_lab")
        yield folder


@pytest.fixture
def runs(honest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the honest runs, below the working folder."""
    shutil.copytree(honest, tmp_path, dirs_exist_ok=True)
    places = [place for place in sys.path if place != str(honest)]
    monkeypatch.setattr(sys, "path", places)  # `my_lab` is that of the copy
    monkeypatch.chdir(tmp_path)
    return tmp_path / "outputs/benchmark_v1"


def submit(method: str, code: int = 0) -> None:
    """Submit a method to the folder `to`."""
    words = ["outputs", "--to", "to", "--config-dir", "mine", "--author", "Ann", "--link", LINK]
    assert answer(["submit", *words, "--method", method]) == code
    assert Path(f"to/{method}.parquet").exists() == (code == 0)


def folder_of(runs: Path, *, seed: int, **values: Any) -> Path:
    """Return the folder of power_of_choice's only run with this seed and these values."""
    folders = []
    for path in runs.glob(f"*-power_of_choice-s{seed}-*"):
        config = yaml.safe_load((path / "config.yaml").read_text())
        own = {
            "lr": config["optimizer"]["lr"],
            "schedule": config["optimizer"]["schedule"]["_target_"].rpartition(".")[2].lower(),
            "candidates": config["selector"]["num_candidates"],
        }
        if own | values == own:
            folders.append(path)
    [folder] = folders
    return folder


def change_accuracy(folder: Path, accuracy: float) -> None:
    """Give a run another accuracy in the last round. Its summary agrees."""
    records = read_metrics(folder)
    records[-1]["test_accuracy"] = accuracy
    write_records(folder, records)
    path = folder / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | summary_of(records, window=2)))


def test_an_honest_submission_is_written_read_and_verified(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    submit("power_of_choice")
    submit("random")
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert last_line.startswith("next: git add to, and open a pull request")
    # 1. The scored runs, and the trials: two rates for each schedule, and a second point. Of the
    #    five points 3, 4, 6, 8 and 10 times K, the last two are more than N. 5 K is the default.
    rows = read_submissions(Path("to"))
    of_runs = rows.groupby(["method", "schedule", "num_rounds", "seed"])["round"].agg(list)
    assert of_runs.tolist() == [[0, 2, 4]] * 8
    assert set(rows["num_classes"]) == {10}
    trials = pd.read_csv("to/power_of_choice.csv", keep_default_na=False)
    points = trials.groupby("point").size().to_dict()
    assert points.pop("") == 4
    assert set(points.values()) == {1}
    # 2. The card.
    card = yaml.safe_load(Path("to/power_of_choice.yaml").read_text())
    assert (card["source"], card["author"], card["class"]) == ("Cho et al. 2022", "Ann", "losses")
    assert card["commits"] == ["abc"]
    best = trials[trials["point"] == ""].sort_values("final_accuracy").groupby("schedule").last()
    rates = {name: {4: rate} for name, rate in best["learning_rate"].items()}
    assert card["settings"]["v1_toy"]["rates"] == rates
    # 3. Others can run it again.
    capsys.readouterr()
    assert answer(["verify", "to/power_of_choice.parquet", "--runs", "9", "--random"]) == 0
    assert "4 of 4 equal" in capsys.readouterr().out


def test_settings_of_an_earlier_submission_stay(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second setting is run and submitted without the runs of the first."""
    submit("random")
    first_runs = read_submissions(Path("to"))
    first_trials = Path("to/random.csv").read_text()
    shutil.rmtree(runs)
    Path("mine/cell/v1_other.yaml").write_text(CELL.replace("cohort_size: 2", "cohort_size: 3"))
    for name, value in RULES.items():
        monkeypatch.setattr(study, name, value)
    monkeypatch.setattr(experiment, "own_revision", lambda: {"commit": "def", "dirty": False})
    assert study.run(["cell=v1_other", "selector=random", "--config-dir", "mine"]) == 0
    capsys.readouterr()
    assert answer(["submit", "outputs", "--to", "to", "--config-dir", "mine"]) == 0
    assert "random: settings 2, scored runs 8" in capsys.readouterr().out
    # 1. All runs and trials of the first setting are there as before.
    both = read_submissions(Path("to"))
    assert set(both["setting"]) == {"v1_toy", "v1_other"}
    kept = both[both["setting"] == "v1_toy"].reset_index(drop=True)
    pd.testing.assert_frame_equal(kept, first_runs)
    assert Path("to/random.csv").read_text().startswith(first_trials)
    # 2. The card has both settings, and the author that was given first.
    card = yaml.safe_load(Path("to/random.yaml").read_text())
    assert list(card["settings"]) == ["v1_toy", "v1_other"]
    assert (card["author"], card["commits"]) == ("Ann", ["abc", "def"])
    # 3. A setting that is submitted again is there once.
    assert answer(["submit", "outputs", "--to", "to", "--config-dir", "mine"]) == 0
    pd.testing.assert_frame_equal(read_submissions(Path("to")), both)
    # 4. Settings under other rules, or of another version of the class, do not stay.
    path = Path("to/random.yaml")
    for line, other, message in (
        (f"rules: '{VERSION}'", "rules: '0.9'", f"version of the rules (0.9, now {VERSION})"),
        ("code: null", "code: lab 12", "version of its class (lab 12, now None)"),
    ):
        path.write_text(yaml.safe_dump(card, sort_keys=False).replace(line, other))
        assert answer(["submit", "outputs", "--to", "to", "--config-dir", "mine"]) == 1
        assert f"has v1_toy with another {message}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("field", "differences"), [("test_accuracy", [-0.1]), ("bytes_up", [1, -1])]
)
def test_verify_finds_an_altered_number_in_a_submission(
    field: str, differences: list[float], runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The altered numbers are those from round 2 on. Totals and final accuracies stay."""
    submit("power_of_choice")
    table = pq.read_table("to/power_of_choice.parquet")
    values = table[field].to_pylist()
    for number, difference in enumerate(differences, 1):
        values[number] += difference
    place = table.column_names.index(field)
    table = table.set_column(place, table.field(field), pa.array(values, table.field(field).type))
    pq.write_table(table, "to/power_of_choice.parquet")
    capsys.readouterr()
    assert answer(["verify", "to/power_of_choice.parquet", "--all"]) == 1
    printed = capsys.readouterr().out
    assert f"differs from round 2 on: {field}" in printed
    assert "3 of 4 equal" in printed


def test_altered_files_of_a_run_are_found(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A final accuracy in the summary, one in the records, a model, a config and a commit."""
    folders = sorted(runs.glob("*-power_of_choice-s[01]-*"))
    summary = json.loads((folders[0] / "summary.json").read_text())
    changes = {"final_accuracy": summary["final_accuracy"] + 1e-7, "revision": {"commit": None}}
    (folders[0] / "summary.json").write_text(json.dumps(summary | changes))
    (folders[1] / "model.safetensors").unlink()
    metrics = (folders[2] / "metrics.jsonl").read_text().splitlines()
    last = json.loads(metrics[-1]) | {"test_accuracy": 0.99}
    (folders[2] / "metrics.jsonl").write_text("\n".join([*metrics[:-1], json.dumps(last)]) + "\n")
    config = (folders[3] / "config.yaml").read_text()
    (folders[3] / "config.yaml").write_text(config.replace("batch_size: 32", "batch_size: 64"))
    submit("power_of_choice", code=1)
    printed = capsys.readouterr().out
    for folder, text in (
        (folders[0], "and its summary another"),
        (folders[0], "was not run by a committed version"),
        (folders[1], "model.safetensors is missing"),
        (folders[2], "summary.json has final_accuracy="),
        (folders[3], "has local.batch_size=64 for 32"),
    ):
        [line] = [line for line in printed.splitlines() if text in line]
        assert folder.name in line


def test_a_config_that_the_run_did_not_have_is_found(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = next(runs.glob("*-power_of_choice-s0-*")) / "summary.json"
    path.write_text(path.read_text().replace('"config_hash": "', '"config_hash": "f'))
    submit("power_of_choice", code=1)
    assert "config.yaml does not fit the hash" in capsys.readouterr().out


def test_missing_runs_are_found(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(folder_of(runs, seed=1, schedule="step"))
    submit("power_of_choice", code=1)
    printed = capsys.readouterr().out
    assert "v1_toy, power_of_choice step 4: no finished run with optimizer.lr=" in printed
    assert "at seed 1\n" in printed
    shutil.rmtree(folder_of(runs, seed=1000, schedule="step", lr=0.01))
    submit("power_of_choice", code=1)
    assert "power_of_choice step 4 0.01: no finished run" in capsys.readouterr().out


def test_a_setting_without_runs_and_a_wrong_name_are_named_in_a_line(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine/cell/v1_other.yaml").write_text(CELL)
    words = ["submit", "outputs", "--to", "to", "--config-dir", "mine", "--link", LINK]
    assert answer([*words, "--method", "mine", "--setting", "v1_toy,v1_other"]) == 1
    command = "`fedsim benchmark cell=v1_other selector=mine`"
    assert capsys.readouterr().out == f"mine: no finished run in v1_other; {command} makes them\n"
    assert answer([*words, "--method", "mime"]) == 2
    assert "did you mean mine?" in capsys.readouterr().err
    assert not Path("to").exists()


def test_methods_that_cannot_be_submitted_do_not_stop_the_others(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The runs of `mine` are those of a selector in a subfolder, as earlier versions allowed."""
    for path in runs.glob("*-mine-s*/summary.json"):
        path.write_text(path.read_text().replace('"selector": "mine"', '"selector": "lab/mine"'))
    Path("mine/selector/lab").mkdir()
    Path("mine/selector/mine.yaml").rename("mine/selector/lab/mine.yaml")
    words = ["submit", "outputs", "--to", "to", "--config-dir"]
    for folder, message in (
        ("mine", "lab/mine: is in a subfolder, "),
        ("empty", "lab/mine: there is no selector/lab/mine.yaml; if it is a file of yours, add"),
    ):
        Path(folder, "cell").mkdir(parents=True, exist_ok=True)
        Path(folder, "cell/v1_toy.yaml").write_text(CELL)
        assert answer([*words, folder]) == 1
        assert message in capsys.readouterr().out
        assert {path.stem for path in Path("to").glob("*.parquet")} == {"power_of_choice", "random"}
        shutil.rmtree("to")


def test_a_method_called_like_a_file_of_all_submissions_is_not_submitted(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in runs.glob("*-mine-s*"):
        summary = (
            (path / "summary.json")
            .read_text()
            .replace('"selector": "mine"', '"selector": "digests"')
        )
        (path / "summary.json").write_text(summary)
        path.rename(path.with_name(path.name.replace("-mine-", "-digests-")))
    Path("mine/selector/mine.yaml").rename("mine/selector/digests.yaml")
    submit("digests", code=1)
    text = (
        "is the name of another file of submissions, digests.csv; rename its file, and run it again"
    )
    assert capsys.readouterr().out == f"digests: {text}\n"


def test_a_run_that_is_there_twice_is_found(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(runs, seed=1, schedule="step")
    shutil.copytree(folder, f"{folder}-again")
    submit("power_of_choice", code=1)
    assert f"{folder.name}-again: has the config of another run" in capsys.readouterr().out


def test_a_rate_that_the_trials_did_not_choose_is_found(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    submit("power_of_choice")
    card = yaml.safe_load(Path("to/power_of_choice.yaml").read_text())
    Path("to/power_of_choice.parquet").unlink()
    chosen = card["settings"]["v1_toy"]["rates"]["step"][4]
    [other] = {0.01, 0.1} - {chosen}
    change_accuracy(folder_of(runs, seed=1000, schedule="step", lr=other), 1.0)
    submit("power_of_choice", code=1)
    printed = capsys.readouterr().out
    assert f"no finished run with optimizer.lr={other} at seed 0, 1; " in printed
    assert f"has optimizer.lr={chosen} for {other}" in printed


def test_other_data_than_those_of_earlier_submissions_are_found(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    submit("random")
    path = Path("to/digests.csv")
    header, first, *rest = path.read_text().splitlines()
    assert first.startswith("v1_toy,0,10,")
    *values, _partition, data = first.split(",")
    path.write_text("\n".join([header, ",".join([*values, "0123", data]), *rest]) + "\n")
    submit("power_of_choice", code=1)
    assert ", not 0123 (to/digests.csv)" in capsys.readouterr().out
    path.write_text("\n".join([path.read_text().strip(), first]) + "\n")  # a maintainer adds a row
    submit("power_of_choice")
    assert len(path.read_text().splitlines()) == 5  # a header, three seeds, and a second row


def test_runs_of_one_submission_with_different_data_are_found(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder_of(runs, seed=1, schedule="step") / "summary.json"
    summary = json.loads(path.read_text())
    path.write_text(json.dumps(summary | {"partition_hash": "0123"}))
    submit("power_of_choice", code=1)
    printed = capsys.readouterr().out
    assert "v1_toy, seed 1: its runs differ in partition" in printed
    assert "other submissions" not in printed


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("random.yaml", b"settings: [", "is not YAML"),
        ("random.yaml", b"- v1_toy", "is not the card of a submission"),
        ("random.yaml", b"settings: [v1_toy]", "is not the card of a submission"),
        ("digests.csv", b"", "is not a CSV file"),
        ("digests.csv", b"setting\n\xff", "is not a CSV file"),
        ("digests.csv", b"setting,config\nv1_toy,1\n", "lacks the columns seed"),
        ("random.csv", b"seed\n0\n", "lacks the columns setting"),
    ],
)
def test_damaged_files_of_an_earlier_submission_are_named(
    name: str, content: bytes, message: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    submit("random")
    card = Path("to/random.yaml")
    earlier = yaml.safe_load(card.read_text())
    earlier["settings"]["v1_earlier"] = {}  # so that the earlier trials are read
    card.write_text(yaml.safe_dump(earlier))
    Path("to", name).write_bytes(content)
    assert answer(["submit", "outputs", "--to", "to", "--config-dir", "mine"]) == 3
    printed = capsys.readouterr()
    assert f"to/{name} {message}" in printed.out + printed.err
    assert Path("to", name).read_bytes() == content


def test_a_class_of_ones_own_needs_a_link(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A method of fedsim needs none. A link that was given earlier stays."""
    words = ["submit", "outputs", "--to", "to", "--config-dir", "mine", "--method"]
    assert answer([*words, "power_of_choice"]) == 0
    capsys.readouterr()
    assert answer([*words, "mine"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("mine: its code is not part of fedsim (my_lab ")
    assert printed.endswith("); add --link with the address of its module\n")
    assert not Path("to/mine.yaml").exists()
    submit("mine")
    assert answer([*words, "mine"]) == 0
    assert yaml.safe_load(Path("to/mine.yaml").read_text())["link"] == LINK


def test_a_class_of_ones_own_is_on_the_card_and_may_not_change(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    submit("mine")
    card = yaml.safe_load(Path("to/mine.yaml").read_text())
    assert card["selector"] == "my_lab.Mine"
    assert card["code"].startswith("my_lab ")
    Path("to/mine.parquet").unlink()
    sys.modules.pop("my_lab", None)
    Path("my_lab.py").write_text(CLASS.replace("pass", "name = 'another'"))
    submit("mine", code=1)
    assert "the code of its class has changed since" in capsys.readouterr().out
