"""Ablations: found in configs, judged at equal seeds, as tables, figures and DataFrames."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsim
from fedsim.core.errors import FedsimError
from fedsim.report.ablation_figures import ablation_plots, is_logarithmic
from fedsim.report.ablations import ablation_table
from fedsim.report.command import report
from fedsim.results.ablations import Point, by_grid, find_ablations
from fedsim.results.runs import read_runs
from tests.report_toys import frame_of, rows_of, write_run


def only_ablation(folder: Path) -> list[Point]:
    (points,) = find_ablations(frame_of(folder))
    return points


def selectors_in(folder: Path) -> dict[str, str]:
    """Return the selector of each group of runs."""
    frame = frame_of(folder)
    return dict(zip(frame["group"], frame["choice.selector"], strict=True))


@pytest.fixture
def alphas(tmp_path: Path) -> Path:
    """gpfl with three alphas at three seeds, and random selection.

    Final accuracies: 0.30, 0.31, 0.33 at alpha 0.1; 0.50, 0.51, 0.53 at 0.2; 0.55, 0.53, 0.49 at
    0.4, which is the best.
    """
    for seed, noise in enumerate((0.0, 0.01, 0.03)):
        write_run(tmp_path / "random", [0.4], [[0]], seed=seed)
        for alpha, final in ((0.1, 0.3 + noise), (0.2, 0.5 + noise), (0.4, 0.55 - 2 * noise)):
            selector = {"_target_": "gpfl", "exploration": {"value": alpha}}
            config = {"selector": selector, "choices": {"selector": "gpfl"}, "seed": seed}
            write_run(tmp_path / str(alpha), [final], [[0]], **config)
    return tmp_path


def test_a_line_has_means_the_best_value_and_p_values_of_the_others(alphas: Path) -> None:
    """Differences to the best: 0.25, 0.22, 0.16, so t = 7.94 and p = 0.0155, doubled by Holm; and
    0.05, 0.02, -0.04, so t = 0.378 and p = 0.742."""
    points = only_ablation(alphas)
    assert [(point.keys, point.setting, point.method) for point in points] == [
        (("selector.alpha",), "", "gpfl")
    ] * 3
    assert [point.value for point in points] == [0.1, 0.2, 0.4]
    means = [point.accuracy.mean for point in points]
    assert means == pytest.approx([0.31333, 0.51333, 0.52333], abs=1e-4)
    assert [point.is_best for point in points] == [False, False, True]
    assert [point.is_level for point in points] == [False, True, False]
    p_values = [point.p_value for point in points]
    assert p_values == pytest.approx([0.0309, 0.7418, np.nan], abs=1e-3, nan_ok=True)


def test_runs_that_end_at_an_accuracy_have_no_best_value(alphas: Path) -> None:
    for path in alphas.glob("*/*/config.yaml"):
        path.write_text(f"{path.read_text()}stop_at: 0.5\n")
    assert find_ablations(frame_of(alphas)) == []


def test_the_table_marks_the_best_and_what_is_level_with_it(alphas: Path) -> None:
    table = ablation_table(only_ablation(alphas))
    low, level = "0.3133 [0.2754, 0.3513]", "0.5133 [0.4754, 0.5513] ≈"
    best = "0.5233 [0.4474, 0.5992]"
    cells = {"alpha=0.1": low, "alpha=0.2": level, "alpha=0.4": best}
    assert rows_of(table) == [{"": "", "run": "gpfl", **cells}]
    assert f"| gpfl | {low} | {level} | **{best}** |" in table.markdown()
    assert rf"{level[:-1]}$\approx$ & \textbf{{{best}}} \\" in table.latex()
    assert f',"{best}"\n' in table.csv()


def test_the_table_counts_diverged_runs_and_may_show_the_standard_deviation(tmp_path: Path) -> None:
    for alpha in (1, 2, 3):
        for seed in range(3):
            status = "diverged" if (alpha, seed) == (3, 0) else "done"
            final = [0.1 * alpha + 0.01 * seed]
            values = {"_target_": "gpfl", "alpha": alpha}
            choices = {"selector": "gpfl"}
            folder = tmp_path / str(alpha)
            write_run(
                folder, final, [[0]], seed=seed, status=status, choices=choices, selector=values
            )
    (cells,) = rows_of(ablation_table(only_ablation(tmp_path), "sd"))
    assert cells["alpha=1"] == "0.1100 ± 0.0100 ≈"
    assert cells["alpha=3"] == "0.3150 ± 0.0071 (1 diverged)"


def test_the_figure_of_a_line_has_means_intervals_and_seeds(alphas: Path) -> None:
    (plot,) = ablation_plots([only_ablation(alphas)], selectors_in(alphas))
    (axes,) = plot.figure.axes
    drawn = [np.asarray(line.get_ydata(), float).round(4).tolist() for line in axes.get_lines()]
    assert [0.3133, 0.5133, 0.5233] in drawn
    assert [0.55, 0.53, 0.49] in drawn
    assert (axes.get_xlabel(), axes.get_xscale()) == ("selector.alpha (log scale)", "symlog")
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0.1", "0.2", "0.4"]
    low, high = axes.get_ylim()
    assert low < 0.3133 - 0.0379 < 0.5233 + 0.0759 < high
    left, right = axes.get_xlim()
    assert 0.08 < left < 0.1 < 0.4 < right < 0.5


def write_grid(folder: Path, cells: list[tuple[float, int]]) -> None:
    """Write runs at three seeds; the cohort of 3 at lr = 0.3 or 0.299 is best."""
    for lr, cohort in cells:
        for seed in range(3):
            noise = 0.001 * seed if cohort == 3 else 0.0
            final = 0.1 * cohort + lr + (noise if lr < 0.3 else -noise)
            write_run(folder / str(cohort), [final], [[0]], seed=seed, lr=lr, cohort_size=cohort)


CELLS = [(lr, cohort) for lr in (0.2, 0.299, 0.3) for cohort in (1, 2, 3)]


def test_three_by_three_values_of_two_numbers_make_a_map(tmp_path: Path) -> None:
    write_grid(tmp_path, CELLS)
    points = only_ablation(tmp_path)
    assert points[0].keys == ("cohort_size", "lr")
    assert [point.values for point in points] == sorted((cohort, lr) for lr, cohort in CELLS)
    (best,) = [point for point in points if point.is_best]
    assert best.values[0] == 3
    assert [row["cohort_size"] for row in rows_of(ablation_table(points))] == ["1", "2", "3"]


def test_the_map_frames_the_best_and_hatches_what_is_level_with_it(tmp_path: Path) -> None:
    write_grid(tmp_path, CELLS)
    points = only_ablation(tmp_path)
    (plot,) = ablation_plots([points], selectors_in(tmp_path))
    axes = plot.figure.axes[0]
    framed = []
    for text in axes.texts:
        box = text.get_bbox_patch()
        if box is not None and box.get_edgecolor()[:3] != (0, 0, 0):
            framed.append(text.get_text())
    assert len(axes.texts) == 9
    assert framed == [f"{max(point.accuracy.mean for point in points):.3f}"]
    assert len(axes.patches) == sum(point.is_level for point in points) == 1


def test_values_of_two_numbers_through_a_common_point_make_two_lines(tmp_path: Path) -> None:
    """Five of nine cells of the map are less than 75 %."""
    write_grid(tmp_path, [cell for cell in CELLS if cell[0] == 0.2 or cell[1] == 1])
    ablations = find_ablations(frame_of(tmp_path))
    lengths = {points[0].keys: len(points) for points in ablations}
    assert lengths == {("cohort_size",): 3, ("lr",): 3}


def test_each_method_and_setting_has_its_line(tmp_path: Path) -> None:
    for lr in (1, 2, 3):
        for selector in ("random", "gpfl"):
            for shards in (2, 10):
                setting = {"choices": {"selector": selector}, "partition": {"shards": shards}}
                write_run(tmp_path / str(shards), [0.1 * lr], [[0]], lr=lr, **setting)
    assert sorted(by_grid(only_ablation(tmp_path))) == [
        ("shards=10", "gpfl"),
        ("shards=10", "random"),
        ("shards=2", "gpfl"),
        ("shards=2", "random"),
    ]


def test_two_values_make_no_ablation_and_a_truth_value_is_no_number(tmp_path: Path) -> None:
    """flag splits the three cohorts into one and two."""
    for cohort in (1, 2, 3):
        write_run(tmp_path / str(cohort), [0.1], [[0]], flag=cohort > 1, cohort_size=cohort)
    assert find_ablations(frame_of(tmp_path)) == []


def test_numbers_that_change_together_are_one_and_lines_of_one_name_are_told_apart(
    tmp_path: Path,
) -> None:
    """The choices of cells set both numbers, and so name none of the lines."""
    for value in (1, 2, 3):
        numbers: dict[str, Any] = {"cohort_size": value, "twice": {"it": 2 * value}}
        for cell in ("a", "b"):
            choice = {"choices": {"cell": f"{cell}{value}"}, "partition": {"_target_": cell}}
            write_run(tmp_path / str(value), [0.1 * value], [[0]], **choice, **numbers)
    points = only_ablation(tmp_path)
    assert points[0].keys == ("cohort_size",)
    lines = by_grid(points)
    assert list(lines) == [("", "random"), ("", "random (b1)")]
    for line in lines.values():  # one seed tells nothing apart from the best
        assert [point.is_level for point in line] == [True, True, False]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2, 4], True),
        ([0.1, 0.5, 3], True),
        ([0, 0.01, 0.1, 1], True),
        ([1, 2, 3], False),
        ([0, 2, 4, 6], False),
        ([-1, 0, 1, 10], False),
        ([-3, -2, -1], False),
    ],
)
def test_the_axis_is_that_on_which_close_values_are_further_apart(
    values: list[float], expected: bool
) -> None:
    assert is_logarithmic(values) is expected


def test_the_report_shows_ablations_after_the_curves(
    alphas: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report(read_runs(alphas), alphas)
    assert "Final accuracy by selector.alpha" in capsys.readouterr().out
    page = (alphas / "report/report.html").read_text()
    places = [page.index(f'id="{name}"') for name in ("curves", "ablations", "table-costs")]
    assert places == sorted(places)
    assert 'style="font-weight: bold">0.5233 [0.4474, 0.5992]</td>' in page
    figures = {path.name for path in (alphas / "report/figures").glob("ablation_*")}
    endings = ("png", "pdf", "svg", "csv")
    assert figures == {f"ablation_selector_alpha.{ending}" for ending in endings}


def test_load_ablations_returns_the_points(alphas: Path) -> None:
    frame = fedsim.load_ablations(alphas)
    assert frame["keys"].tolist() == ["selector.alpha"] * 3
    assert frame["value"].tolist() == [0.1, 0.2, 0.4]
    assert frame["best"].tolist() == [False, False, True]
    assert np.allclose(frame["high"] - frame["mean"], [0.0379, 0.0379, 0.0759], atol=1e-4)
    assert np.allclose(frame["p_value"][:2], [0.0309, 0.7418], atol=1e-3)
    with pytest.raises(FedsimError, match="neither a folder"):
        fedsim.load_ablations(alphas / "missing")
