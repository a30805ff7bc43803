"""What a report says first, on the screen and on its page."""

from pathlib import Path

import pytest

from fedsim.papers.published import RULES
from fedsim.report.headline import MOST, best, headline
from fedsim.report.tables import by_group
from fedsim.results.groups import make_panels
from fedsim.tracking.tables import show_seconds
from tests.report_toys import groups_of, make_report, two_methods, write_run


def write_lines(folder: Path, lines: dict[str, tuple[float, ...]], shards: int = 2) -> None:
    """Runs of selectors with these final accuracies, one a seed."""
    for selector, finals in lines.items():
        for seed, final in enumerate(finals):
            setting = {"choices": {"selector": selector}, "partition": {"shards": shards}}
            write_run(folder / str(shards), [final], [[0]], seed=seed, **setting)


def test_the_best_is_compared_with_the_next_and_with_random_selection_by_hand(
    tmp_path: Path,
) -> None:
    write_lines(
        tmp_path,
        {"random": (0.50, 0.52, 0.51), "afl": (0.60, 0.63, 0.60), "gpfl": (0.61, 0.62, 0.63)},
    )
    (told,) = best(make_panels(groups_of(tmp_path)))
    # over afl .01, -.01, .03: mean .01, t = .01 / (.02 / sqrt 3) = .866, p = .478; the interval
    # reaches 4.303 * .01155 over random .11, .10, .12: t = 19.05, p = .0027, which Holm's method
    # doubles as the table has two rows
    over_afl = "over afl: +0.0100 [-0.0397, +0.0597] (p = 0.478, 3 pairs), not beyond chance (p = 0.478 by Holm)"
    over_random = "over random: +0.1100 [+0.0852, +0.1348] (p = 0.003, 3 pairs), beyond chance (p = 0.005 by Holm)"
    assert told == f"best is gpfl, 0.6200; its lead {over_afl}; {over_random}"


def test_two_pairs_decide_nothing_and_diverged_runs_do_not_count(tmp_path: Path) -> None:
    write_lines(tmp_path, {"random": (0.5, 0.5), "gpfl": (0.6, 0.6)})
    write_run(
        tmp_path,
        [0.9],
        [[0]],
        choices={"selector": "afl"},
        partition={"shards": 2},
        status="diverged",
    )
    few = "too few seeds in common to tell (3 are needed)"
    assert best(make_panels(groups_of(tmp_path))) == [
        f"best is gpfl, 0.6000; its lead over random: {few}"
    ]


def test_the_leads_over_the_next_are_corrected_over_settings(tmp_path: Path) -> None:
    """p = .035 in one setting is .070 in two; random selection is best here, so that no other
    difference is told."""
    finals = {"random": (0.62, 0.64, 0.63), "gpfl": (0.60, 0.60, 0.60)}
    write_lines(tmp_path, finals)
    own = "+0.0300 [+0.0052, +0.0548] (p = 0.035, 3 pairs)"
    assert f"{own}, beyond chance (p = 0.035 by Holm)" in best(make_panels(groups_of(tmp_path)))[0]
    write_lines(tmp_path, finals, shards=10)
    found = best(make_panels(groups_of(tmp_path)))
    assert [one.partition(":")[0] for one in found] == ["shards=2", "shards=10"]
    assert all(
        f"{own}, not beyond chance (p = 0.070 by Holm)" in one and one.count("over") == 1
        for one in found
    )


def test_many_settings_are_told_by_their_number(tmp_path: Path) -> None:
    for shards in range(MOST + 2):
        write_lines(tmp_path, {"random": (0.5,), "gpfl": (0.6,)}, shards)
    first, *found, more = headline(make_panels(groups_of(tmp_path)))
    assert first.startswith(
        f"random, gpfl on digits · iid · mlp in {MOST + 2} settings: 1 seed (0), rounds: 1, runs: "
    )
    assert (len(found), more) == (MOST, "and 2 more settings (all of them: fedsim report --all)")
    assert len(headline(make_panels(groups_of(tmp_path)), None)) == 1 + MOST + 2


def test_the_screen_has_what_one_came_for_and_more_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two_methods(tmp_path)
    assert make_report([str(tmp_path), "--no-figures"]) == 0
    short = capsys.readouterr().out
    first = "random, gpfl on digits · iid · mlp: 3 seeds (0 to 2), rounds: 2, runs: 6 (6 done)"
    assert short.splitlines()[0] == first
    assert "best is gpfl, 0.4600; its lead over random: +0.0500" in short
    assert all(
        text in short for text in ("Results", "10.0 s", "40 B", f"report in {tmp_path / 'report'}")
    )
    assert not any(title in short for title in ("Overview", "Paired", "Time by phase"))
    page = (tmp_path / "report" / "report.html").read_text()
    opened, _, folded = page.partition("<details>")
    assert all(
        text in opened for text in (first, "best is gpfl", 'id="table-results"', 'id="table-costs"')
    )
    assert all(f'id="table-{name}"' in folded for name in ("overview", "pairs", "configs", "runs"))
    assert 'id="table-times"' in opened
    assert (tmp_path / "report" / "times.csv").is_file()
    assert not (tmp_path / "report" / "results.csv").exists()
    assert make_report([str(tmp_path), "--no-figures", "--all"]) == 0
    printed = capsys.readouterr().out
    assert all(
        title in printed for title in (first, "Overview", "Paired differences", "Time by phase")
    )


def test_the_rules_of_verdicts_are_printed_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        make_report(["--rules"])
    assert not ended.value.code
    printed = capsys.readouterr().out
    assert all(rule in printed for rule in RULES.values())


def test_simulated_seconds_stand_beside_wall_time(tmp_path: Path) -> None:
    write_run(tmp_path, [0.5, 0.6], [[0], [1]], columns={"simulated_seconds": [30.0, 60.0]})
    table = by_group("results", groups_of(tmp_path))
    cells = dict(zip(table.header, table.rows[0], strict=True))
    assert [cells[name] for name in ("time", "simulated")] == [show_seconds(10), show_seconds(90)]
