"""The opening of a report: its sentences on the best methods, and the tables on its first screen.

The sentences are compared with values worked out by hand. `write_run` of `report_toys.py` writes a
run's folder with made-up accuracies, one for each round. By default the data set is digits, the
partition is called iid, each of the five phases of a round takes a second, and an upload has 10
bytes.
"""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fedsim.papers.published import RULES
from fedsim.report.contrasts import to_references
from fedsim.report.headline import (
    MAX_LISTED,
    best,
    conclusions,
    opening,
    show_lead,
    unequal_keys,
)
from fedsim.report.sections import Material
from fedsim.report.summary import compare_summaries
from fedsim.report.tables import by_group, name_columns
from fedsim.results.frames import by
from fedsim.results.statistics import Difference
from tests.report_toys import frame_of, make_report, rows_of, two_methods, write_run


def write_runs(folder: Path, accuracies: Mapping[str, tuple[float, ...]], shards: int = 2) -> None:
    """Add runs of one round: each selector has the given final accuracies at seeds 0, 1, 2, ...

    `shards` only makes a difference between settings.
    """
    for selector, of_seeds in accuracies.items():
        for seed, accuracy in enumerate(of_seeds):
            config = {"choices": {"selector": selector}, "partition": {"shards": shards}}
            write_run(folder / str(shards), [accuracy], [[0]], seed=seed, **config)


def write_diverged_runs(folder: Path, selector: str) -> None:
    """Add three runs of a selector next to those of `write_runs`, none of which is finished."""
    config = {"choices": {"selector": selector}, "partition": {"shards": 2}}
    for seed in range(3):
        write_run(folder / "2", [None], [[0]], seed=seed, status="diverged", **config)


def test_the_best_is_compared_with_the_next_and_with_random_selection(tmp_path: Path) -> None:
    """Paired t-tests over 3 seeds, so with 2 degrees of freedom, and 95 % intervals.

    gpfl minus afl: 0.01, -0.01, 0.03. Mean 0.01, standard deviation 0.02, standard error
    0.02 / sqrt 3 = 0.01155, so t = 0.866 and p = 0.478. Half the interval is 4.303 * 0.01155, where
    4.303 is the 0.975 quantile of t. It is the only comparison with a next method, so Holm's method
    changes nothing.

    gpfl minus random: 0.11, 0.10, 0.12. Standard error 0.00577, so t = 19.05 and p = 0.0027. Two
    methods are compared with random, and this p is the smaller of the two (afl has t = 17.3). Holm's
    method doubles it to 0.0055. Half the interval is 6.205 * 0.00577, where 6.205 is the quantile of
    t at 1 - 0.05 / 2 / 2.
    """
    accuracies = {
        "random": (0.50, 0.52, 0.51),
        "afl": (0.60, 0.63, 0.60),
        "gpfl": (0.61, 0.62, 0.63),
    }
    write_runs(tmp_path, accuracies)
    over_afl = "over afl: +0.0100 [-0.0397, +0.0597] (p = 0.478, p and interval by Holm, 3 pairs), not beyond chance"
    over_random = "over random: +0.1100 [+0.0742, +0.1458] (p = 0.005, p and interval by Holm, 3 pairs), beyond chance"
    expected = f"best is gpfl, 0.6200; its lead {over_afl}; {over_random}"
    assert best(frame_of(tmp_path)) == [expected]


def test_methods_that_differ_in_more_than_their_selectors_are_named(tmp_path: Path) -> None:
    """A rate that all methods are swept over is part of their names, and a value of a selector is
    its own. If only one of them is swept over it, the rate is no part of the other's name."""
    rates: dict[str, dict[str, tuple[float, ...]]] = {
        "equal": {"random": (0.1,), "oort": (0.1,)},
        "swept": {"random": (0.1, 0.2), "oort": (0.1, 0.2)},
        "unequal": {"random": (0.1,), "oort": (0.4,)},
        "swept by one": {"random": (0.1, 0.2), "oort": (0.1,)},
    }
    for name, by_method in rates.items():
        for selector, of_method in by_method.items():
            config = {"choices": {"selector": selector}, "selector": {"name": selector}}
            for rate, seed in itertools.product(of_method, range(3)):
                folder = tmp_path / name / str(rate)
                write_run(folder, [0.5], [[0]], seed=seed, optimizer={"lr": rate}, **config)
    for name in rates:
        keys = unequal_keys(frame_of(tmp_path / name))
        assert keys == (["optimizer.lr"] if name in ("unequal", "swept by one") else [])


def test_a_value_that_is_no_part_of_a_groups_name_is_that_of_its_config(tmp_path: Path) -> None:
    """Only gpfl is swept over two keys."""
    for selector, rates in {"random": (0.1,), "gpfl": (0.1, 0.2)}.items():
        for rate, epochs in itertools.product(rates, (1, 2) if selector == "gpfl" else (1,)):
            write_run(
                tmp_path / f"{rate} {epochs}",
                [0.5],
                [[0]],
                choices={"selector": selector},
                selector={"name": selector},
                optimizer={"lr": rate},
                local={"epochs": epochs},
            )
    columns = name_columns(by(frame_of(tmp_path), "group"))
    place = columns["run"].index("random")
    assert (columns["lr"][place], columns["epochs"][place]) == ("0.1", "1")


def test_a_first_method_without_finished_runs_is_no_reference(tmp_path: Path) -> None:
    write_diverged_runs(tmp_path, "afl")
    write_runs(tmp_path, {"gpfl": (0.5, 0.52, 0.51), "oort": (0.6, 0.63, 0.60)})
    contrasts = to_references(frame_of(tmp_path))
    references = {contrast.method: contrast.reference for contrast in contrasts}
    assert references == {"afl": "gpfl", "oort": "gpfl"}


@pytest.mark.filterwarnings("error")
def test_random_selection_without_finished_runs_is_still_the_reference(tmp_path: Path) -> None:
    write_diverged_runs(tmp_path, "random")
    write_runs(tmp_path, {"gpfl": (0.5, 0.52, 0.51), "oort": (0.6, 0.63, 0.60)})
    (sentence,) = best(frame_of(tmp_path))
    assert sentence.endswith("over random: too few seeds in common to tell (3 are needed)")


def test_the_best_of_an_unfinished_sweep_has_its_number_of_seeds(tmp_path: Path) -> None:
    write_runs(tmp_path, {"random": (0.5, 0.52, 0.51), "gpfl": (0.61,)})
    (sentence,) = best(frame_of(tmp_path))
    assert sentence.startswith("best is gpfl, 0.6100 (over 1 seeds, while others have up to 3); ")


def test_runs_of_the_best_method_that_diverged_are_counted(tmp_path: Path) -> None:
    write_runs(tmp_path, {"random": (0.5, 0.52, 0.51), "gpfl": (0.61, 0.62)})
    config = {"choices": {"selector": "gpfl"}, "partition": {"shards": 2}}
    write_run(tmp_path / "2", [None], [[0]], seed=2, status="diverged", **config)
    (sentence,) = best(frame_of(tmp_path))
    assert sentence.startswith("best is gpfl, 0.6150 (1 of 3 runs diverged); its lead over random")


def test_runs_that_all_diverged_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, [None], [[0]], status="diverged")
    assert make_report([str(tmp_path), "--no-figures"]) == 0
    assert "0, 1 diverged" in capsys.readouterr().out


def test_a_lead_that_is_significantly_negative_is_no_lead() -> None:
    """The best mean over all seeds may be behind at the seeds that both methods have."""
    behind = Difference((-0.11, -0.10, -0.12))
    shown = show_lead(behind, behind.p_value, behind.interval)
    assert shown.endswith("behind it beyond chance")
    assert show_lead(behind, 0.2, behind.interval).endswith(", not beyond chance")


def test_a_final_accuracy_of_0_is_compared_with_an_earlier_summary() -> None:
    def summary(accuracy: float) -> dict[str, Any]:
        seeds = {"0": {"final_accuracy": accuracy}}
        group = {"config": "x", "name": "random", "labels": {}, "choices": {}, "seeds": seeds}
        return {"groups": [group], "verdicts": {}}

    (row,) = compare_summaries(summary(0.25), summary(0.0)).values.to_numpy().tolist()
    assert row[1:4] == [1, 0.25, 0.25]


TOO_FEW = "too few seeds in common to tell (3 are needed)"


def test_two_common_seeds_decide_nothing(tmp_path: Path) -> None:
    write_runs(tmp_path, {"random": (0.5, 0.51), "gpfl": (0.6, 0.62)})
    assert best(frame_of(tmp_path)) == [f"best is gpfl, 0.6100; its lead over random: {TOO_FEW}"]


def test_a_diverged_run_is_not_the_best(tmp_path: Path) -> None:
    write_runs(tmp_path, {"random": (0.5, 0.5), "gpfl": (0.6, 0.6)})
    config = {"choices": {"selector": "afl"}, "partition": {"shards": 2}}
    write_run(tmp_path, [0.9], [[0]], status="diverged", **config)
    assert best(frame_of(tmp_path)) == [f"best is gpfl, 0.6000; its lead over random: {TOO_FEW}"]


def test_leads_over_the_next_method_are_corrected_over_settings(tmp_path: Path) -> None:
    """random minus gpfl: 0.02, 0.04, 0.03. Standard error 0.00577, t = 5.196, p = 0.035.

    A second setting with equal runs doubles p to 0.070. The interval becomes 1.4422 times as wide:
    the 0.9875 quantile of t, divided by its 0.975 quantile.
    """
    accuracies = {"random": (0.62, 0.64, 0.63), "gpfl": (0.60, 0.60, 0.60)}
    lead = "over gpfl: +0.0300"
    write_runs(tmp_path, accuracies, shards=2)
    (alone,) = best(frame_of(tmp_path))
    uncorrected = "[+0.0052, +0.0548] (p = 0.035, p and interval by Holm, 3 pairs), beyond chance"
    assert alone.endswith(f"{lead} {uncorrected}")
    write_runs(tmp_path, accuracies, shards=10)  # in addition
    first, second = best(frame_of(tmp_path))
    corrected = "[-0.0058, +0.0658] (p = 0.070, p and interval by Holm, 3 pairs), not beyond chance"
    text = f"best is random, 0.6300; its lead {lead} {corrected}"
    assert (first, second) == (f"shards=2: {text}", f"shards=10: {text}")


def test_of_many_settings_the_first_are_listed(tmp_path: Path) -> None:
    num = MAX_LISTED + 2
    for shards in range(num):
        write_runs(tmp_path, {"random": (0.5,), "gpfl": (0.6,)}, shards)
    material = Material([], frame_of(tmp_path))
    (first,) = opening(material).lines
    where = f"random, gpfl on digits · iid · mlp in {num} settings"
    assert first == f"{where}: 1 seed (0), rounds: 1, runs: {2 * num} ({2 * num} done)"
    *listed, last = conclusions(material).lines
    assert len(listed) == MAX_LISTED
    assert last == "and 2 more settings (all of them: fedsim report --all)"
    assert len(conclusions(Material([], frame_of(tmp_path), is_full=True)).lines) == num


FIRST = "random, gpfl on digits · iid · mlp: 3 seeds (0 to 2), rounds: 2, runs: 6 (6 done)"


def test_the_screen_shows_the_headline_and_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two_methods(tmp_path)
    assert make_report([str(tmp_path), "--no-figures"]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[0] == FIRST
    assert "best is gpfl, 0.4600; its lead over random: +0.0500" in shown
    for text in ("Results", "10.0 s", "40 B", f"report in {tmp_path / 'report'}"):
        assert text in shown
    for title in ("Overview", "Paired", "Time by phase"):
        assert title not in shown


def test_all_tables_are_printed_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two_methods(tmp_path)
    assert make_report([str(tmp_path), "--no-figures", "--all"]) == 0
    shown = capsys.readouterr().out
    for title in (FIRST, "Overview", "Paired differences", "Time by phase"):
        assert title in shown


def test_the_page_opens_with_results_and_costs_and_folds_everything_else(tmp_path: Path) -> None:
    two_methods(tmp_path)
    assert make_report([str(tmp_path), "--no-figures"]) == 0
    page = (tmp_path / "report" / "report.html").read_text()
    opened, _, folded = page.partition("<details>")
    for text in (FIRST, "best is gpfl", "table-results", "table-costs", "table-times"):
        assert text in opened
    for name in ("overview", "pairs", "configs", "runs"):
        assert f'id="table-{name}"' in folded
    assert (tmp_path / "report" / "times.csv").is_file()
    assert not (tmp_path / "report" / "results.csv").exists()


def test_the_rules_of_verdicts_are_printed_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        make_report(["--rules"])
    assert not ended.value.code
    assert capsys.readouterr().out == "\n\n".join(RULES.values()) + "\n"


def test_simulated_seconds_stand_next_to_wall_time(tmp_path: Path) -> None:
    """Two rounds, in which each of five phases takes a second."""
    write_run(tmp_path, [0.5, 0.6], [[0], [1]], columns={"simulated_seconds": [30.0, 60.0]})
    (row,) = rows_of(by_group("results", frame_of(tmp_path)))
    assert (row["time"], row["simulated"]) == ("10.0 s", "90.0 s")
