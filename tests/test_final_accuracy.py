"""Final accuracy is the mean of the last `final_window` rounds, and `stop_at` ends a run that
reaches an accuracy."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsim.core.errors import ConfigError
from fedsim.core.record import mean_of_last, reaches, short_run_warning
from fedsim.jobs.cli import run
from fedsim.results.reading import read_metrics, read_summary
from fedsim.results.statistics import corrected_alike, differences, holm
from tests.checkpoint_toys import WORDS, folder_in
from tests.run_toys import Run, without_seconds

LENGTH = 8
"""Rounds of the runs here (`num_rounds` in `WORDS`)."""


@pytest.mark.parametrize(
    ("accuracies", "is_reached"),
    [
        ([0.75, 0.75], False),  # fewer rounds than a window
        ([0.25, 0.75, 0.5], True),  # mean 0.5
        ([0.75, 0.25, 0.75, 0.25], False),  # the last three have the mean 5 / 12
        ([0.25, 0.75, None], False),  # the round was not evaluated
        ([0.25, None, 0.75], True),  # the mean of two
        ([None, None, 0.5], True),
    ],
)
def test_a_target_is_reached_by_the_mean_of_a_whole_window_after_an_evaluated_round(
    accuracies: Sequence[float | None], is_reached: bool
) -> None:
    assert reaches(accuracies, target=0.5, window=3, num_rounds=10) == is_reached


def test_a_run_that_is_shorter_than_a_window_can_reach_a_target_in_its_last_round() -> None:
    assert not reaches([0.5], target=0.5, window=3, num_rounds=2)
    assert reaches([0.5, 0.5], target=0.5, window=3, num_rounds=2)


def first_reached(accuracies: Sequence[float], window: int, target: float) -> int:
    """Return the first round at which the mean of the last `window` rounds is at least `target`."""
    for end in range(window, len(accuracies) + 1):
        if math.fsum(accuracies[end - window : end]) / window >= target:
            return end
    raise AssertionError("never")


@pytest.fixture
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return the records of a run without `stop_at`, without seconds."""
    monkeypatch.chdir(tmp_path)
    assert run([*WORDS, "output_dir=whole"]) == 0
    return without_seconds(folder_in("whole"))


def target_of(whole: Sequence[dict[str, Any]]) -> tuple[float, int]:
    """Return the mean of two rounds that a run reaches before its end, and its round."""
    accuracies = [record["test_accuracy"] for record in whole]
    target = mean_of_last(accuracies[:5], 2)
    assert target is not None
    end = first_reached(accuracies, 2, target)
    assert 2 < end < LENGTH
    return target, end


def test_a_run_that_reaches_stop_at_ends_there_with_the_same_bits(
    whole: list[dict[str, Any]], tmp_path: Path
) -> None:
    target, end = target_of(whole)
    words = [*WORDS, "final_window=2", f"stop_at={target!r}"]
    assert run(words) == 0
    folder = folder_in("outputs")
    assert without_seconds(folder) == whole[:end]
    summary = read_summary(folder) or {}
    assert (summary["status"], summary["rounds"], summary["error"]) == ("reached", end, None)
    assert summary["final_accuracy"] == mean_of_last([r["test_accuracy"] for r in whole[:end]], 2)
    # It has ended for good: the same command runs no round, and no checkpoint is left.
    assert run(words) == 0
    assert read_metrics(folder)[-1]["round"] == end
    assert not list(folder.glob("checkpoint*"))


def test_a_run_that_is_killed_or_in_a_lane_ends_at_the_same_round(
    whole: list[dict[str, Any]], killed: Any
) -> None:
    target, end = target_of(whole)
    words = ["final_window=2", f"stop_at={target!r}", "checkpoint.every=1"]
    killed(*words, "output_dir=cut", before=end)
    assert run([*WORDS, *words, "output_dir=cut"]) == 0
    assert without_seconds(folder_in("cut")) == whole[:end]
    lanes = ["-m", "seed=0,1", "hydra/launcher=lanes", "output_dir=lanes"]
    assert run([*WORDS, *words, *lanes]) == 0
    first, _ = sorted(path.parent for path in Path("lanes").glob("*/*/summary.json"))
    assert without_seconds(first) == whole[:end]


def test_every_run_reaches_an_accuracy_of_zero(fedsim: Run, tmp_path: Path) -> None:
    assert fedsim("stop_at=0.0", "final_window=1") == 0
    summary = read_summary(folder_in("outputs")) or {}
    assert (summary["status"], summary["rounds"]) == ("reached", 1)


def test_a_run_that_never_reaches_stop_at_is_done(fedsim: Run, tmp_path: Path) -> None:
    assert fedsim("stop_at=1.0") == 0
    summary = read_summary(folder_in("outputs")) or {}
    assert (summary["status"], summary["rounds"]) == ("done", 3)


def test_stop_at_is_a_share(fedsim: Run) -> None:
    with pytest.raises(ConfigError, match=r"stop_at=80.*must lie in \[0, 1\]"):
        fedsim("stop_at=80")


def test_the_window_is_in_the_summary_which_agrees_with_its_rounds(
    fedsim: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fedsim("final_window=2", "tracker=default", "tracker.wandb.mode=disabled") == 0
    assert "mean of the last 2 rounds" in capsys.readouterr().out
    folder = folder_in("outputs")
    accuracies = [record["test_accuracy"] for record in read_metrics(folder)]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["final_accuracy"] == (accuracies[1] + accuracies[2]) / 2
    assert summary["final_window"] == 2
    # The finished run is found: its summary agrees with its rounds by that window.
    assert fedsim("final_window=2", "tracker=default", "tracker.wandb.mode=disabled") == 0
    assert "already done" in capsys.readouterr().out


def test_a_sweep_of_short_runs_warns_once(fedsim: Run, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-m", "seed=0,1", "tracker=default", "tracker.wandb.mode=disabled"]
    assert fedsim(*words) == 0
    out = capsys.readouterr().out
    assert out.count("final accuracy is the mean of the last 3 of only 3 rounds") == 1
    assert fedsim(*words, "final_window=1") == 0
    assert "of only" not in capsys.readouterr().out


def test_runs_of_three_windows_are_not_short() -> None:
    assert short_run_warning(33, 11) is None
    assert "final_window=10:" in (short_run_warning(32, 11) or "")


def test_a_warning_suggests_no_window_that_is_in_use() -> None:
    assert short_run_warning(5, 2) == (
        "final accuracy is the mean of the last 2 of only 5 rounds, so early rounds weigh much "
        "(final_window=1: the mean of the last third)"
    )
    assert short_run_warning(8, 3) == (
        "final accuracy is the mean of the last 3 of only 8 rounds, so early rounds weigh much "
        "(final_window=2: the mean of the last third)"
    )
    assert short_run_warning(1, 11) is None  # one round is no mean
    assert short_run_warning(2, 1) is None


def test_an_interval_that_is_corrected_alike_excludes_0_exactly_if_p_is_below_0_05() -> None:
    """For random families of one to eight comparisons with effects of many sizes."""
    rng = np.random.default_rng(0)
    decisions = set()
    for _ in range(300):
        family = []
        for _ in range(rng.integers(1, 9)):
            values = rng.normal(rng.choice([0.0, 1.0, 3.0]), 1.0, rng.integers(2, 7))
            difference = differences(values.tolist())
            assert difference is not None
            family.append(difference)
        corrected = corrected_alike(family)
        p_values = holm([difference.p_value for difference in family])
        assert [p_holm for p_holm, _ in corrected] == p_values
        for difference, (p_holm, (low, high)) in zip(family, corrected, strict=True):
            assert (low > 0 or high < 0) == (p_holm < 0.05)
            assert high - low >= (2 - 1e-9) * difference.half_width
            decisions.add((p_holm < 0.05, difference.p_value < 0.05))
    assert decisions == {(True, True), (False, True), (False, False)}


def test_intervals_that_are_corrected_alike_by_hand() -> None:
    """p is 0.0742 for 1, 2, 3 and 0.4226 for 0, 0, 1. Holm's factors are 2, and 1. With 2 degrees
    of freedom the quantile of t at 1 - 0.05 / 2 / 2 is 6.2053, and the standard error of the first
    is 0.5774. Equal values have an interval without width, and None counts for nothing."""
    first, second = differences([1.0, 2.0, 3.0]), differences([0.0, 0.0, 1.0])
    (p_first, interval), none, (p_second, other) = corrected_alike([first, None, second])
    assert (p_first, p_second) == pytest.approx((0.1484, 0.4226), abs=1e-4)
    assert interval == pytest.approx((2 - 6.2053 * 0.57735, 2 + 6.2053 * 0.57735), abs=1e-3)
    assert second is not None
    assert other == second.interval
    assert all(map(math.isnan, (none[0], *none[1])))
    equal = differences([0.5, 0.5, 0.5])
    assert corrected_alike([equal, equal]) == [(0.0, (0.5, 0.5))] * 2
