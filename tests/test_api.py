"""Experiments from Python: the same as on the command line, with callbacks, own classes and
DataFrames."""

import doctest
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from matplotlib import pyplot
from matplotlib.colors import to_hex
from omegaconf import OmegaConf

import fedsim
from fedsim import Record, StopRun, compose, load_rounds, load_runs, run_experiment, run_sweep
from fedsim.api import experiments
from fedsim.api.results import SweepResult
from fedsim.config.plan import Plan
from fedsim.core.errors import ConfigError, DataError, FedsimError
from fedsim.report.looks import colour_on_page, make_looks
from fedsim.results.archive import write_archive
from fedsim.results.files import MODEL, HeldError, owned
from fedsim.results.reading import read_metrics, read_summary
from fedsim.results.runs import read_runs
from fedsim.running.outcome import Outcome
from fedsim.selectors.random import Random
from fedsim.tracking.tables import show_share
from tests.report_toys import write_run

RESULTS = Path(__file__).parents[1] / "docs" / "results"
SMALL = ["num_clients=6", "cohort_size=2", "local.epochs=1", "tracker=files_only"]
WORDS = [*SMALL, "num_rounds=4"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def without_seconds(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in record.items() if "seconds" not in key} for record in records
    ]


def test_a_run_is_that_of_the_command_line_to_the_last_bit() -> None:
    words = [*WORDS, "model.dropout=0.3", "selector=oort"]
    command = [sys.executable, "-m", "fedsim.run", *words, "output_dir=shell"]
    subprocess.run(
        command, check=True, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    )
    result = run_experiment([*words, "output_dir=here"])
    (folder,) = Path("shell/default").glob("digits*")
    assert result.folder == Path("here/default", folder.name)
    assert (result.folder / MODEL).read_bytes() == (folder / MODEL).read_bytes()
    assert without_seconds(result.records) == without_seconds(read_metrics(folder))
    assert (result.status, result.kept) == ("done", True)
    summary = read_summary(folder) or {}
    assert result.final_accuracy == summary["final_accuracy"]
    assert summary["last_accuracy"] == result.records[-1]["test_accuracy"]
    assert result.params is not None
    assert sum(value.numel() for value in result.params.values()) > 1000
    again = run_experiment([*words, "output_dir=here"])
    assert again.skipped
    assert again.records == result.records


def test_a_callback_ends_a_run_by_its_answer_or_an_exception_and_the_same_call_goes_on() -> None:
    seen: list[int] = []

    def stop_and_fail(record: Record) -> None:
        seen.append(record.round)
        raise StopRun if record.round == 2 else KeyError("mine")

    def stop(record: Record) -> bool:
        seen.append(record.round)
        return True

    words = [*WORDS, "selector=oort"]
    whole = run_experiment([*words, "output_dir=whole"])
    stopped = run_experiment(words, on_round=stop)
    assert (stopped.status, stopped.error) == ("interrupted", "ended by on_round after round 1")
    assert (len(stopped.records), stopped.params) == (1, None)
    assert run_experiment(words, on_round=stop_and_fail).status == "interrupted"
    with pytest.raises(KeyError, match="mine"):
        run_experiment(words, on_round=stop_and_fail)
    assert (read_summary(stopped.folder) or {})[
        "error"
    ] == "ended by on_round (KeyError: 'mine') after round 3"
    gone_on = run_experiment(words, on_round=lambda record: seen.append(record.round))
    assert seen == [1, 2, 3, 4]
    assert gone_on.status == "done"
    assert without_seconds(gone_on.records) == without_seconds(whole.records)
    assert all(
        torch.equal(gone_on.params[name], value) for name, value in (whole.params or {}).items()
    )  # type: ignore[index]


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "values": (
        lambda: run_experiment([*WORDS, "cohort_size=99", "optimizer.lr=-1"]),
        r"(?s)cohort_size=99.*optimizer",
    ),
    "several": (
        lambda: run_experiment([*WORDS, "seed=0,1"]),
        r"describes 2 experiments\n.*run_sweep",
    ),
    "a string": (lambda: run_experiment("selector=oort"), "must be a list of words"),
    "a string of a sweep": (lambda: run_sweep("seed=0,1"), "must be a list of words"),
    "none": (lambda: run_sweep([]), r"has no experiment\n.*run_experiment\(\)"),
    "a part": (
        lambda: run_experiment(compose(WORDS)[0], selector=Random),
        "has no effect on a composed experiment",
    ),
    "both": (lambda: run_sweep([*compose(WORDS), *SMALL]), r"not both\n.*\*compose\(overrides\)"),  # type: ignore[list-item]
    "a plan": (lambda: compose(compose(WORDS)), r"list of words.*\n.*run_experiment runs a Plan"),  # type: ignore[arg-type]
    "useless": (
        lambda: compose(["local.epochs=2", "local.steps=3"]),
        r"local\.epochs=2: has no effect while local\.",
    ),
    "data": (
        lambda: run_experiment(
            [*WORDS, "dataset=parquet", "dataset.path=nowhere", "partition=iid"]
        ),
        "data_dir",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_exceptions_before_anything_runs(case: str) -> None:
    call, told = MISTAKES[case]
    with pytest.raises(DataError if case == "data" else ConfigError, match=told):
        call()
    assert not Path("outputs").exists()


def test_failures_are_exceptions() -> None:
    class Fails(Random):
        def select(self, *_: Any) -> Any:
            raise KeyError("my own mistake")

    with pytest.raises(fedsim.RunFailedError, match="my own mistake") as failed:
        run_experiment(WORDS, selector=partial(Fails, mode="uniform"))
    line = Fails.select.__code__.co_firstlineno + 1
    assert (
        failed.value.result.error
        == f"KeyError: 'my own mistake' (round 1, test_api.py, line {line}, in select)"
    )
    assert isinstance(failed.value.__cause__, KeyError)
    assert failed.value.result.status == "failed"
    (plan,) = compose(WORDS)
    with owned(plan.folder), pytest.raises(HeldError):
        run_experiment(plan)


def test_the_process_stays_as_it_was() -> None:
    """No signal handlers, no environment, no Hydra of the program; and it works outside of the main
    thread."""

    def state() -> object:
        """Without what torch and its OpenMP library set for themselves when they are first used."""
        ours = {
            name: text
            for name, text in os.environ.items()
            if not name.startswith(("TORCHINDUCTOR_", "KMP_"))
        }
        return (
            [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)],
            torch.get_num_threads(),
            ours,
        )

    before, hydra = state(), GlobalHydra.instance().hydra
    GlobalHydra.instance().hydra = mine = object()  # type: ignore[assignment]
    results: list[fedsim.RunResult] = []
    try:
        thread = threading.Thread(target=lambda: results.append(run_experiment(WORDS)))
        thread.start()
        thread.join()
        assert GlobalHydra.instance().hydra is mine  # type: ignore[comparison-overlap]
    finally:
        GlobalHydra.instance().hydra = hydra
    assert [result.status for result in results] == ["done"]
    assert state() == before
    assert (
        OmegaConf.create({"path": "${oc.env:PATH}"}).path == os.environ["PATH"]
    )  # configs of fedsim may not name it


def test_importing_fedsim_imports_no_torch_before_a_name_is_used() -> None:
    code = "import sys, fedsim; assert 'run_sweep' in dir(fedsim); sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], cwd=Path(__file__).parents[1], check=False
        ).returncode
        == 0
    )
    with pytest.raises(AttributeError, match="no attribute 'run_everything'"):
        fedsim.run_everything  # noqa: B018
    assert all(getattr(fedsim, name) is not None for name in fedsim.__all__)
    assert doctest.testmod(experiments) == (0, 1)


@pytest.mark.parametrize("lanes", [None, 4])
def test_a_sweep_gives_rows_for_rounds_and_runs(lanes: int | None) -> None:
    seen: list[tuple[int, int]] = []

    def on_round(plan: Plan, record: Record) -> bool:
        seen.append((plan.settings.seed, record.round))
        return plan.settings.seed == 1 and record.round == 2

    sweep = run_sweep([*WORDS, "selector=random,full", "seed=0,1"], lanes=lanes, on_round=on_round)
    assert [result.status for result in sweep] == ["done", "interrupted"] * 2
    assert sorted(seen) == sorted([(0, t) for t in (1, 2, 3, 4)] * 2 + [(1, t) for t in (1, 2)] * 2)
    rounds, runs = sweep.rounds, sweep.runs
    assert len(rounds) == 12
    told = [
        [name, seed, ("done", "interrupted")[seed]]
        for name in ("random", "full")
        for seed in (0, 1)
    ]
    assert runs[["selector", "seed", "status"]].to_numpy().tolist() == told
    assert runs["final_accuracy"].tolist() == [result.final_accuracy for result in sweep]
    assert rounds.groupby("selector")["uploaded"].first().to_dict() == {"random": 2, "full": 6}
    assert runs["bytes_up"].iloc[0] == rounds["bytes_up"].iloc[:4].sum()
    assert [len(result) for result in (sweep, sweep[1:])] == [4, 3]


def test_a_run_that_a_sweep_names_twice_is_one_run() -> None:
    """A final window of 11 rounds is the default."""
    sweep = run_sweep([*WORDS, "final_window=11,null"])
    assert [result.status for result in sweep] == ["done"]
    assert len(sweep.runs) == 1


@pytest.mark.parametrize("lanes", [None, 2])
def test_a_sweep_with_a_job_that_cannot_begin_still_has_its_frames(lanes: int | None) -> None:
    """The digits cannot be divided among 900 clients by two shards each."""
    sweep = run_sweep([*WORDS, "partition=shards", "num_clients=20,900"], lanes=lanes)
    assert [result.status for result in sweep] == ["done", "data"]
    assert sweep.runs["status"].tolist() == ["done", "data"]
    assert sweep.rounds["num_clients"].unique().tolist() == [20]


def test_a_callback_that_fails_ends_all_runs_of_a_sweep() -> None:
    def fail(plan: Plan, record: Record) -> None:
        if plan.settings.seed == 1:
            raise RuntimeError("mine")

    for lanes in (None, 3):
        with pytest.raises(RuntimeError, match="mine"):
            run_sweep(
                [*WORDS, "seed=1,2,0", f"output_dir=lanes_{lanes}"], lanes=lanes, on_round=fail
            )
    ended = {
        place: [
            str((read_summary(path) or {})["error"])
            for path in sorted(Path(place).glob("*/digits*"))
        ]
        for place in ("lanes_None", "lanes_3")
    }
    mine, beside = (
        "ended by on_round (RuntimeError: mine) after round 1",
        "ended with another run after round 1",
    )
    assert ended == {"lanes_None": [mine], "lanes_3": [beside, mine, beside]}


def test_finished_runs_are_read_from_folders_and_archives_alike(tmp_path: Path) -> None:
    sweep = run_sweep([*WORDS, "selector=random,full", "optimizer.lr=0.1,0.2"])
    runs = load_rounds("outputs/default")
    assert runs.index.tolist() == list(range(16))
    columns = {"run", "status", "seed", "selector", "optimizer.lr", "round", "test_accuracy"}
    assert columns <= set(runs)
    assert "final_accuracy" not in runs  # .std() of which would be wrong
    assert "num_clients" not in runs  # in which they do not differ
    assert "selector.mode" not in runs  # random has it, but all runs of random have the same
    assert runs["run"].nunique() == 4
    assert sorted(runs["optimizer.lr"].unique()) == [0.1, 0.2]
    ours = sweep.rounds.sort_values(["run", "round"], ignore_index=True)
    assert ours["test_accuracy"].tolist() == runs["test_accuracy"].tolist()
    write_archive(
        read_runs(Path("outputs/default")), Path("outputs/default"), tmp_path / "runs.parquet"
    )
    archived = load_rounds(tmp_path / "runs.parquet")
    assert archived["test_accuracy"].tolist() == runs["test_accuracy"].tolist()
    assert list(archived["optimizer.lr"]) == list(runs["optimizer.lr"])
    final = sorted(result.final_accuracy or 0.0 for result in sweep)
    for source in ("outputs/default", tmp_path / "runs.parquet"):
        frame = load_runs(source)
        assert sorted(frame["final_accuracy"]) == final
        assert frame["final_accuracy"].std() == pytest.approx(statistics.stdev(final))
        assert set(frame["bytes_up"]) == set(sweep.runs["bytes_up"])


def test_bytes_and_samples_are_added_up_for_each_run() -> None:
    rounds = run_sweep([*WORDS, "seed=0,1"]).rounds
    sent = rounds["bytes_down"] + rounds["bytes_up"]
    assert rounds["bytes_total"].tolist()[3:5] == [sent[:4].sum(), sent[4]]
    passed = rounds["train_samples"] + rounds["forward_samples"]
    assert rounds["samples_total"].tolist()[3:5] == [passed[:4].sum(), passed[4]]


def test_data_at_a_path_have_the_name_of_their_folder(tmp_path: Path) -> None:
    choices = {"selector": "random", "dataset": "parquet"}
    write_run(tmp_path, [0.1], [[0]], choices=choices, dataset={"path": "/data/chest_xray"})
    assert load_runs(tmp_path)["dataset"].tolist() == ["chest_xray"]


def test_values_in_which_runs_differ_are_columns_that_group_runs(tmp_path: Path) -> None:
    """Lists are texts. 1 and 1.0 are one value."""
    for seed, hidden, decay in ((0, [64], 1), (1, [128], 1.0)):
        model = {"hidden": hidden, "decay": decay}
        write_run(tmp_path, [0.1], [[0]], seed=seed, model=model)
    runs = load_runs(tmp_path)
    assert "model.decay" not in runs
    assert list(runs.groupby("model.hidden").groups) == ["[128]", "[64]"]


def test_without_an_ablation_its_columns_are_there(tmp_path: Path) -> None:
    write_run(tmp_path, [0.1], [[0]])
    ablations = fedsim.load_ablations(tmp_path)
    assert len(ablations) == 0
    assert list(ablations)[:4] == ["keys", "setting", "method", "value"]


def test_a_run_without_an_evaluated_round_cannot_be_drawn(tmp_path: Path) -> None:
    write_run(tmp_path, [None, None], [[0], [1]])
    with pytest.raises(ConfigError, match="x='rounds': needs runs with an evaluated round"):
        fedsim.load_report(tmp_path).plot()


def test_a_report_whose_file_contradicts_itself_can_be_shown(tmp_path: Path) -> None:
    for selector in ("gpfl", "random"):
        write_run(tmp_path, [0.1], [[0]], choices={"selector": selector})
    path = tmp_path / "report" / "report.yaml"
    path.parent.mkdir()
    path.write_text("{only: [gpfl], reference: [random]}")
    report = fedsim.load_report(tmp_path)
    assert repr(report) == "<Report of 2 runs: random, gpfl; settings: 1>"
    with pytest.raises(FedsimError, match=re.escape(f"{path}: reference: random is not in only")):
        report.plot()


def test_an_error_of_the_callback_in_a_run_that_was_held_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another process runs the experiment at first."""
    attempted: list[Plan] = []

    def execute(plan: Plan, lane: Any, watch: Any) -> Outcome:
        attempted.append(plan)
        if len(attempted) == 1:
            raise HeldError(plan.folder)
        watch.round_ended(SimpleNamespace(round=1, test_accuracy=None))
        return Outcome("interrupted", {})

    def fail(plan: Plan, record: Record) -> None:
        raise KeyError("mine")

    monkeypatch.setattr("fedsim.running.experiment.execute", execute)
    with pytest.raises(KeyError, match="mine"):
        run_sweep(WORDS, on_round=fail)
    assert len(attempted) == 2


def test_a_report_draws_its_methods_as_the_figures_of_reports_do(tmp_path: Path) -> None:
    for seed in range(2):
        for selector in ("gpfl", "random"):
            choices = {"choices": {"selector": selector}, "seed": seed}
            write_run(tmp_path, [0.1, 0.2 + 0.2 * seed], [[0], [1, 2]], **choices)
    report = fedsim.load_report(tmp_path)
    assert repr(report) == "<Report of 4 runs: random, gpfl; settings: 1>"
    axes = report.plot(x="bytes")
    lines = {line.get_label(): line for line in axes.get_lines()}
    looks = make_looks({"random": "random", "gpfl": "gpfl"})
    assert list(lines) == ["random", "gpfl"]
    assert lines["gpfl"].get_color() == colour_on_page(looks["gpfl"])
    assert lines["gpfl"].get_marker() == looks["gpfl"]["marker"]
    # A client costs 10 bytes in each direction, and the last accuracies are 0.2 and 0.4.
    assert list(lines["gpfl"].get_xdata()) == [20, 60]
    assert list(lines["gpfl"].get_ydata()) == pytest.approx([0.1, 0.3])
    assert report.plot(axes=axes) is axes


def test_a_report_is_drawn_as_its_file_says(tmp_path: Path) -> None:
    """The file hides afl, and names a method that has left the results."""
    for selector in ("gpfl", "random", "afl"):
        write_run(tmp_path, [0.1, 0.2], [[0], [1]], choices={"selector": selector})
    path = tmp_path / "report" / "report.yaml"
    path.parent.mkdir()
    path.write_text(
        "{names: {gpfl: GPFL, oort: Oort}, order: [gpfl], only: [gpfl, random], log_x: true,"
        " width: 3.3in, style: dark, labels: ends}"
    )
    report = fedsim.load_report(tmp_path)
    with pytest.warns(UserWarning, match=re.escape(f"{path}: names: oort is no method")) as warned:
        axes = report.plot(x="bytes")
    assert warned[0].filename == __file__
    assert [text.get_text() for text in axes.texts if text.get_text()] == ["GPFL", "random"]
    assert axes.get_legend() is None
    assert axes.get_xscale() == "log"
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert lines["random"].get_color() == "#FFFFFF"  # on a dark background
    assert axes.figure.get_figwidth() == pytest.approx(3.3)
    assert to_hex(axes.figure.get_facecolor()) == "#111111"
    own_axes = pyplot.figure().subplots()  # a figure of the caller keeps its size and style
    assert report.plot(axes=own_axes) is own_axes
    assert own_axes.figure.get_figwidth() > 3.3
    path.write_text("style: papr")
    with pytest.raises(FedsimError, match=re.escape(f"{path}: style=papr: must be paper")):
        fedsim.load_report(tmp_path)


def test_a_report_is_found_by_its_name_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for selector in ("gpfl", "random"):
        write_run(Path("outputs/mine"), [0.1, 0.2], [[0], [1]], choices={"selector": selector})
    Path("outputs/mine/report").mkdir()
    Path("outputs/mine/report/report.yaml").write_text("names: {gpfl: GPFL}")
    presentation = fedsim.load_report("mine").presentation
    assert presentation is not None
    assert presentation.names == {"gpfl": "GPFL"}


def test_a_report_asks_which_of_several_settings_it_shall_draw(tmp_path: Path) -> None:
    for dataset in ("digits", "mnist"):
        choices = {"selector": "random", "dataset": dataset}
        write_run(tmp_path, [0.1], [[0]], choices=choices, dataset={"_target_": dataset})
    report = fedsim.load_report(tmp_path)
    assert report.plot(setting="mnist").get_ylabel() == "test accuracy"
    with pytest.raises(ConfigError, match=r"setting=None: must be one of \['digits', 'mnist'\]"):
        report.plot()
    with pytest.raises(ConfigError, match="x='simulated': was not recorded"):
        report.plot("simulated", setting="mnist")
    with pytest.raises(ConfigError, match="x='byte': must be one of rounds, bytes"):
        report.plot("byte", setting="mnist")


def test_a_run_draws_itself_and_results_have_short_texts() -> None:
    result = run_experiment(WORDS, on_round=lambda record: record.round == 2)
    (line,) = result.plot().get_lines()
    assert list(line.get_xdata()) == [1, 2]
    assert list(line.get_ydata()) == result.rounds["test_accuracy"].tolist()
    name = result.folder.name
    accuracy = f"final accuracy {show_share(result.final_accuracy)}"
    reason = "ended by on_round after round 2"
    assert repr(result) == f"<RunResult {name}: interrupted, {accuracy}, {reason}>"
    assert repr(result.plan) == f"<Plan {result.folder}>"
    assert repr(SweepResult([result])) == "<SweepResult of 1 runs: 1 interrupted>"


def test_the_last_accuracy_of_earlier_versions_is_not_taken_for_the_final_one() -> None:
    """They called it final_accuracy in summary.json, and in archives of runs. The mean of the last
    rounds was smoothed_accuracy."""
    archive = RESULTS / "fedabc_init_small" / "runs.parquet"
    frame, rounds = load_runs(archive), load_rounds(archive)
    by_run = rounds.dropna(subset="test_accuracy").groupby("run", sort=False)["test_accuracy"]
    assert frame["last_accuracy"].tolist() == by_run.last().tolist()
    assert frame["final_accuracy"].tolist() == pytest.approx(
        by_run.apply(lambda one: one.tail(11).mean()).tolist()
    )
    run_experiment(WORDS)
    (path,) = Path().glob("outputs/*/*/summary.json")
    summary = json.loads(path.read_text())
    final = summary["final_accuracy"]
    early = {"smoothed_accuracy": final, "final_accuracy": summary.pop("last_accuracy")}
    path.write_text(json.dumps(summary | early))
    read = read_summary(path.parent) or {}
    assert read["last_accuracy"] == read_metrics(path.parent)[-1]["test_accuracy"]
    assert read["final_accuracy"] == final
    assert "smoothed_accuracy" not in read


def test_what_holds_no_runs_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_text("no")
    cases = {
        "nowhere": "neither a folder with runs, nor the name of results in outputs/",
        "": "no finished run below it",
        "x.parquet": "cannot be read as an archive",
    }
    for name, told in cases.items():
        with pytest.raises(FedsimError, match=told):
            load_runs(tmp_path / name)


def test_results_have_short_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("outputs/compare"), [0.1], [[0]])
    assert load_runs("compare").equals(load_runs("outputs/compare"))


def test_nothing_is_printed_without_a_tracker_on_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_experiment(WORDS)
    run_sweep([*WORDS, "seed=1,2"])
    run_sweep([*WORDS, "seed=3,4"], lanes=2)
    assert capsys.readouterr() == ("", "")
    shown = [word for word in WORDS if "tracker" not in word] + ["tracker.wandb.mode=disabled"]
    run_sweep([*shown, "seed=5,6"])
    told = capsys.readouterr().out
    assert "job 1/2 default: digits · shards · mlp · random · seed 5" in told
    assert "job 2/2 done · seed=6 · final accuracy" in told


@pytest.mark.parametrize("lanes", [0, 2.5, True])
def test_a_number_of_lanes_that_is_none_is_rejected(lanes: Any) -> None:
    with pytest.raises(ConfigError, match=rf"lanes={lanes}: must be an integer >= 1, or None"):
        run_sweep([*WORDS, "seed=3,4"], lanes=lanes)
