"""What a report says of methods over several settings: tables, advice, figures, classes."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from fedsim.report.drawing import style
from fedsim.report.settings_figures import costs_plot, gains_plot
from fedsim.report.settings_tables import advice_table, costs_table, over_settings, ranks_table
from fedsim.results.frames import by
from fedsim.results.measures import BYTES, accuracy_by_bytes
from fedsim.results.ranking import Comparison, class_of, compare
from tests.report_toys import change_run, frame_of, make_report, only_run, rows_of, write_run

GAINS = {"random": 0.0, "gpfl": 0.1, "oort": 0.2, "pncs": -0.3, "clairvoyant": 0.4}
"""Gains over random selection after the last of two rounds. A final accuracy is the mean of both
rounds, so that it gains half as much."""


def write_settings(
    folder: Path,
    gains: Mapping[str, float] = GAINS,
    shards: Sequence[int] = (1, 2),
    num_seeds: int = 3,
) -> None:
    """Write runs in settings with so many shards a client.

    oort selects two clients and so sends twice as many bytes. In the setting with two shards, a
    client is imperfect.
    """
    for num_shards in shards:
        for seed in range(num_seeds):
            for name, gain in gains.items():
                noise = 0.001 * ((seed * len(name)) % 3)
                last = 0.4 + 0.01 * seed * num_shards + gain + noise
                path = write_run(
                    folder / str(num_shards),
                    [0.1, last],
                    [[0, 1] if name == "oort" else [0]] * 2,
                    summary={"asks": "nothing"} if name == "mine" else {},
                    choices={"selector": name},
                    partition={"shards": num_shards},
                    seed=seed,
                )
                if num_shards == 2:
                    (path / "imperfect.json").write_text('{"clients": [3]}')


def comparison_in(folder: Path) -> Comparison:
    comparison = compare(frame_of(folder))
    assert comparison is not None
    return comparison


def test_the_table_ranks_and_judges(tmp_path: Path) -> None:
    write_settings(tmp_path)
    table = ranks_table(comparison_in(tmp_path))
    rows = {row["method"]: row for row in rows_of(table)}
    assert {method: row["verdict"] for method, row in rows.items()} == {
        "oort": "better, preliminary",
        "gpfl": "better, preliminary",
        "random": "reference",
        "pncs": "worse, preliminary",
    }
    asks = [row["asks for"] for row in rows.values()]
    assert asks == ["losses", "nothing", "nothing", "updates"]
    assert (rows["random"]["rank"], rows["random"]["in its class"]) == ("3.00", "2.00")
    assert rows["gpfl"]["of possible gain"].startswith("+0.25 [")  # 0.1 of 0.4
    assert "only seeds that the ceiling has count" in table.meanings["of possible gain"]
    bytes_until = [row["bytes"] for row in rows.values()]
    # Two of three seeds of random selection end at its mean or above it, in each setting.
    assert bytes_until == ["2.00", "1.00", "1.00 (4/6)", "never (0/6)"]


def test_costs_until_random_selections_accuracy_and_2_points_more(tmp_path: Path) -> None:
    write_settings(tmp_path)
    oort = rows_of(costs_table(comparison_in(tmp_path)))[0]
    assert oort == {
        "method": "oort",
        "asks for": "losses",
        "bytes to random's final": "2.00",
        "bytes to 0.02 more": "2.00",
        "samples to random's final": "2.00",
        "samples to 0.02 more": "2.00",
        "simulated time to random's final": "-",
        "simulated time to 0.02 more": "-",
        "area over bytes": "0.0000 [0.0000, 0.0000]",  # all of random's bytes are round 1 of oort
        "worst tenth": "-",
    }


def test_costs_are_no_multiples_of_a_reference_that_spent_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody could be reached in the runs of random selection."""
    write_settings(tmp_path)
    nothing = {"bytes_down": 0, "bytes_up": 0, "participation_ratio": 0.0}
    for path in tmp_path.glob("*/random-*"):
        change_run(path, lambda records: [record.update(nothing) for record in records])
    comparison = comparison_in(tmp_path)
    assert math.isnan(comparison.share("oort", BYTES))
    assert comparison.spent("oort", BYTES) == []
    assert make_report([str(tmp_path), "--no-figures"]) == 0
    shown = capsys.readouterr().out
    assert "best is oort, " in shown
    assert "times the bytes" not in shown


def test_the_advice_names_the_better_methods_of_each_case(tmp_path: Path) -> None:
    write_settings(tmp_path)
    advice = {row["if"]: row["use"] for row in rows_of(advice_table(comparison_in(tmp_path)))}
    assert advice == {
        "nothing can be asked of clients": "gpfl",
        "losses are cheap": "oort, gpfl",
        "updates or gradients of everybody are cheap": "gpfl",
        "traffic is dear": "random",  # it needs as few bytes as gpfl
        "labels are noisy, or clients otherwise imperfect": "oort, gpfl",
    }


def test_the_advice_names_what_the_server_must_hold(tmp_path: Path) -> None:
    write_settings(tmp_path)
    for path in tmp_path.glob("*/gpfl-*/summary.json"):
        summary = json.loads(path.read_text())
        path.write_text(json.dumps({**summary, "server_data": "labelled samples"}))
    advice = {row["if"]: row["use"] for row in rows_of(advice_table(comparison_in(tmp_path)))}
    assert advice["nothing can be asked of clients"] == "random: none is better beyond chance"
    assert advice["nothing can be asked of clients; the server holds labelled samples"] == "gpfl"


def test_a_report_over_settings_opens_with_ranks_and_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_settings(tmp_path / "runs")
    monkeypatch.setattr("fedsim.report.figures.all_plots", lambda *_: [])  # tested elsewhere
    assert make_report([str(tmp_path / "runs"), "--to", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "over 2 settings 2 of 3 methods are better than random beyond chance" in shown
    assert shown.index("Over settings") < shown.index("Results")
    assert "Who beats whom" not in shown
    page = (tmp_path / "report.html").read_text()
    order = ("table-settings", "table-advice", "Mean ranks of final accuracy", "table-results")
    places = [page.index(text) for text in order]
    assert places == sorted(places)
    figures = {path.name for path in (tmp_path / "figures").glob("*.png")}
    assert figures == {f"settings_{name}.png" for name in ("ranks", "gains", "costs", "profiles")}


def test_a_users_own_runs_are_compared_with_those_in_an_archive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_settings(tmp_path / "kept")
    write_settings(tmp_path / "own", {"mine": 0.3})
    kept, own, archive = (str(tmp_path / name) for name in ("kept", "own", "kept.parquet"))
    assert make_report([kept, "--archive", archive, "--no-figures"]) == 0
    assert make_report([own, archive, "--no-figures"]) == 0
    assert "nothing: mine (better, preliminary)" in capsys.readouterr().out
    summary = json.loads((tmp_path / "own/report/summary.json").read_text())
    assert len(summary["groups"]) == 12  # six methods in two settings
    assert make_report([own, "absent", "--to", str(tmp_path / "to")]) == 3


def test_what_has_not_run_in_all_settings_of_random_selection_is_left_out(tmp_path: Path) -> None:
    write_settings(tmp_path)
    write_settings(tmp_path / "more", {"afl": 0.5}, shards=[1, 3])
    comparison = comparison_in(tmp_path)
    assert list(comparison.settings) == ["shards=1", "shards=2"]
    assert comparison.methods == ["random", "gpfl", "oort", "pncs"]
    assert comparison.left_out == {"afl": 1}
    text = over_settings(comparison)
    assert text.endswith("finished in fewer settings, and left out: afl (1)")


def test_controls_are_not_counted_and_never_the_best(tmp_path: Path) -> None:
    write_settings(tmp_path, {"random": 0.0, "gpfl": -0.1, "random_control": 0.3})
    comparison = comparison_in(tmp_path)
    assert comparison.controls == ["random_control"]
    assert "0 of 1 methods are better than random" in over_settings(comparison)
    assert comparison.best == {"nothing": "random"}


@pytest.mark.parametrize(
    ("gains", "shards"),
    [
        (GAINS, [1]),
        ({"random": 0.0, "gpfl": 0.1, "clairvoyant": 0.3}, [1, 2]),
        ({"oort": 0.0, "gpfl": 0.1, "pncs": 0.2}, [1, 2]),
    ],
    ids=["one setting", "two methods", "no random selection"],
)
def test_nothing_is_said_over_settings_without(
    gains: Mapping[str, float], shards: Sequence[int], tmp_path: Path
) -> None:
    write_settings(tmp_path, gains, shards)
    assert compare(frame_of(tmp_path)) is None


def test_random_selection_with_plain_local_training_is_the_reference(tmp_path: Path) -> None:
    for shards in (1, 2):
        for algorithm in ("fedprox", "plain", "x"):
            for seed in (0, 1):
                config = {"partition": {"shards": shards}, "local_algorithm": {"is": algorithm}}
                choices = {"selector": "random", "local_algorithm": algorithm}
                write_run(
                    tmp_path / f"{shards}", [0.5], [[0]], choices=choices, seed=seed, **config
                )
    comparison = comparison_in(tmp_path)
    assert (comparison.reference, len(comparison.methods)) == ("plain", 3)


@pytest.mark.parametrize(
    ("choice", "asks", "expected"),
    [
        ("gpfl_alpha0", None, "nothing"),
        ("power_of_choice_d10", None, "losses"),
        ("ocs", None, "updates"),
        ("fedcs", None, "speeds"),
        ("mine", None, "unknown"),
        ("../x", None, "unknown"),
        ("a", "gradients; losses", "updates, losses"),
        ("a", "accuracies; label_counts; resources", "label counts, losses, speeds"),
        ("a", "label_counts", "label counts"),
        ("a", "nothing", "nothing"),
    ],
)
def test_summary_or_the_shipped_file_says_what_a_method_asks(
    choice: str, asks: str | None, expected: str, tmp_path: Path
) -> None:
    write_run(tmp_path / "x", [0.5], [[0]], summary={"asks": asks, "choices": {"selector": choice}})
    assert class_of([frame_of(tmp_path)]) == expected


def test_a_method_in_whose_setting_everybody_trains(tmp_path: Path) -> None:
    for shards, selected in ((0, [0, 1]), (1, [0, 1, 2, 3])):
        write_run(tmp_path / str(shards), [0.5], [selected], partition={"shards": shards})
    settings = by(frame_of(tmp_path), "group").values()
    assert class_of(list(settings)) == "everybody trains"


def test_summary_or_the_selectors_class_says_what_it_needs_at_the_server(tmp_path: Path) -> None:
    summary = {"asks": "losses", "server_data": "unlabelled samples"}
    write_run(tmp_path / "new", [0.5], [[0]], summary=summary)
    assert class_of([frame_of(tmp_path / "new")]) == "losses; server: unlabelled samples"
    selector = {"_target_": "fedsim.selectors.gpfl.GPFL", "reward_eval": "test"}
    write_run(tmp_path / "old", [0.5], [[0]], summary={"asks": "nothing"}, selector=selector)
    assert class_of([frame_of(tmp_path / "old")]) == "nothing; server: the test set"


def test_the_area_over_bytes(tmp_path: Path) -> None:
    """Each round costs 20 bytes; round 2 was not evaluated."""
    write_run(tmp_path, [0.2, None, 0.6, 0.8], [[0]] * 4)
    run = only_run(tmp_path)
    assert accuracy_by_bytes(run, 30) == pytest.approx((20 * 0 + 10 * 0.2) / 30)
    assert accuracy_by_bytes(run, 80) == pytest.approx((20 * 0 + 40 * 0.2 + 20 * 0.6) / 80)
    after_the_end = 80 * 0.8
    assert accuracy_by_bytes(run, 160) == pytest.approx(
        (20 * 0 + 40 * 0.2 + 20 * 0.6 + after_the_end) / 160
    )


def test_the_figure_of_costs_has_gains_and_the_front_of_both(tmp_path: Path) -> None:
    """Half the gain of the last round in points; plus 0.05 of noise where a name has five letters
    less than a multiple of three."""
    write_settings(tmp_path)
    comparison = comparison_in(tmp_path)
    with style():
        gains, *costs = costs_plot(comparison).figure.axes
    names = [text.get_text() for text in gains.get_yticklabels()]
    assert names == ["clairvoyant", "oort", "gpfl", "random", "pncs"]
    means = [float(bars[0].get_xdata()[0]) for bars in gains.containers]
    assert means == pytest.approx([20.05, 10.05, 5.05, 0, -14.95])
    assert [axes.get_xlabel() for axes in costs] == ["bytes", "samples"]  # no time was simulated
    points = [(float(line.get_xdata()[0]), line.get_fillstyle()) for line in costs[0].lines[1:6]]
    oort, gpfl = (2, "full"), (1, "full")
    assert points == [(1, "none"), oort, gpfl, (1, "none"), (1, "none")]


def test_the_figure_of_costs_needs_one_seed(tmp_path: Path) -> None:
    write_settings(tmp_path, num_seeds=1)
    gains = costs_plot(comparison_in(tmp_path)).figure.axes[0]
    means = [float(bars[0].get_xdata()[0]) for bars in gains.containers]
    assert means == pytest.approx([20, 10, 5, 0, -15])


def test_settings_with_imperfect_clients_are_a_comparison_of_their_own(tmp_path: Path) -> None:
    write_settings(tmp_path)
    imperfect = comparison_in(tmp_path).imperfect()
    assert imperfect is not None
    assert list(imperfect.settings) == ["shards=2"]


@pytest.mark.filterwarnings("error")
def test_the_map_of_gains_sets_what_chance_does_not_explain_in_bold(tmp_path: Path) -> None:
    """gpfl gains 0, 0.001 and 0.002 in the last round."""
    write_settings(tmp_path, {**GAINS, "gpfl": 0.0})
    axes = gains_plot(comparison_in(tmp_path)).figure.axes[0]
    rows = [text.get_text() for text in axes.get_yticklabels()]
    assert rows == ["clairvoyant", "oort", "gpfl", "pncs"]
    columns = [text.get_text() for text in axes.get_xticklabels()]
    assert columns == ["all settings", "shards=1", "shards=2"]
    cells = [(text.get_text(), text.get_weight()) for text in axes.texts]
    expected = [("+20", "bold"), ("+10", "bold"), ("+0.1", "normal"), ("-15", "bold")]
    assert cells[::3] == cells[1::3] == cells[2::3] == expected


@pytest.mark.parametrize(("width", "blocks"), [(7.16, 1), (2.5, 1), (1.5, 3)])
def test_a_narrow_map_of_gains_has_its_settings_in_blocks(
    width: float, blocks: int, tmp_path: Path
) -> None:
    write_settings(tmp_path)
    with style(width=width):
        *maps, _ = gains_plot(comparison_in(tmp_path)).figure.axes
    assert len(maps) == blocks
    titles = [text.get_text() for axes in maps for text in axes.get_xticklabels()]
    assert titles == ["all settings", "shards=1", "shards=2"]
