"""Ablations: found in configs, judged at equal seeds, as tables, figures and DataFrames."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsim
from fedsim.core.errors import FedsimError
from fedsim.report.ablations import ablation_plots, is_logarithmic
from fedsim.report.command import report
from fedsim.results.ablations import Ablation, find_ablations
from fedsim.results.runs import read_runs
from tests.report_toys import groups_of, write_run


def only(folder: Path) -> Ablation:
    (found,) = find_ablations(groups_of(folder))
    return found


def write_gpfl(folder: Path, seed: int, final: float, **config: Any) -> None:
    selector = {"_target_": "gpfl", "exploration": config}
    write_run(
        folder / str(config),
        [final],
        [[0]],
        seed=seed,
        selector=selector,
        choices={"selector": "gpfl"},
    )


def alphas(folder: Path) -> None:
    """gpfl with three alphas at three seeds, the best of which is 0.2, told apart from 0.1 alone;
    random selection."""
    for seed, noise in enumerate((0.0, 0.01, 0.03)):
        write_run(folder / "random", [0.4], [[0]], seed=seed)
        for alpha, final in ((0.1, 0.3 + noise), (0.2, 0.5 + noise), (0.4, 0.55 - 2 * noise)):
            write_gpfl(folder, seed, final, value=alpha)


def test_a_line_and_its_figure_have_means_the_best_value_and_those_level_with_it(
    tmp_path: Path,
) -> None:
    alphas(tmp_path)
    ablation = only(tmp_path)
    assert (ablation.keys, list(ablation.lines)) == (("selector.alpha",), [("", "gpfl")])
    (points,) = ablation.lines.values()
    assert [point.mean.mean for point in points] == pytest.approx(
        [0.31333, 0.51333, 0.52333], abs=1e-4
    )
    assert [point.best for point in points] == [False, False, True]
    assert [point.level for point in points] == [False, True, False]
    # differences to the best: .25, .22, .16 and .05, .02, -.04: t = 7.94 and .378, p = .0155,
    # doubled, and .742
    assert [point.p_value for point in points] == pytest.approx(
        [0.0309, 0.7418, float("nan")], abs=1e-3, nan_ok=True
    )
    table = ablation.table()
    assert list(table.header) == ["", "run", "alpha=0.1", "alpha=0.2", "alpha=0.4"]
    assert list(table.rows[0]) == [
        "",
        "gpfl",
        "0.3133 ± 0.0379",
        "0.5133 ± 0.0379 ≈",
        "0.5233 ± 0.0759",
    ]
    assert (
        "| gpfl | 0.3133 ± 0.0379 | 0.5133 ± 0.0379 ≈ | **0.5233 ± 0.0759** |" in table.markdown()
    )
    assert r"0.5133 $\pm$ 0.0379 $\approx$ & \textbf{0.5233 $\pm$ 0.0759} \\" in table.latex()
    assert ",0.5233 ± 0.0759\n" in table.csv()
    (plot,) = ablation_plots([ablation])
    (ax,) = plot.figure.axes
    drawn = [np.asarray(line.get_ydata(), float).tolist() for line in ax.get_lines()]
    assert [0.3133, 0.5133, 0.5233] in [np.round(one, 4).tolist() for one in drawn]
    assert pytest.approx([0.55, 0.53, 0.49]) in drawn
    assert (ax.get_xlabel(), ax.get_xscale()) == ("selector.alpha", "symlog")
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["0.1", "0.2", "0.4"]
    low, high = ax.get_ylim()
    assert low < 0.3133 - 0.0379 < 0.5233 + 0.0759 < high
    left, right = ax.get_xlim()
    assert 0.08 < left < 0.1 < 0.4 < right < 0.5


def write_grid(folder: Path, cells: list[tuple[float, int]]) -> None:
    for lr, cohort in cells:
        for seed in range(3):
            final = 0.1 * cohort + lr + (0.001 if lr < 0.3 else -0.001) * seed * (cohort == 3)
            write_run(folder / str(cohort), [final], [[0]], seed=seed, lr=lr, cohort_size=cohort)


def test_two_numbers_make_a_map_and_two_through_a_common_value_lines(tmp_path: Path) -> None:
    cells = [(lr, cohort) for lr in (0.299, 0.2, 0.3) for cohort in (1, 2, 3)]
    write_grid(tmp_path / "map", cells[:2] + cells[3:] + cells[2:3])
    ablation = only(tmp_path / "map")
    assert ablation.keys == ("cohort_size", "lr")
    (points,) = ablation.lines.values()
    (best,) = [
        dict(zip(ablation.keys, point.values, strict=True)) for point in points if point.best
    ]
    assert best["cohort_size"] == 3
    (plot,) = ablation_plots([ablation])
    ax = plot.figure.axes[0]
    framed = [
        text.get_text()
        for text in ax.texts
        if text.get_bbox_patch().get_edgecolor()[:3] != (0, 0, 0)
    ]  # type: ignore[union-attr]
    assert len(ax.texts) == 9
    assert framed == [f"{max(point.mean.mean for point in points):.3f}"]
    assert len(ax.patches) == sum(point.level for point in points) == 1
    assert len(ablation.table().rows) == 3
    write_grid(tmp_path / "cross", [cell for cell in cells if 0.2 in cell or 1 in cell])
    found = [
        (one.keys, *map(len, one.lines.values()))
        for one in find_ablations(groups_of(tmp_path / "cross"))
    ]
    assert sorted(found) == [(("cohort_size",), 3), (("lr",), 3)]


def test_each_method_and_setting_has_its_line(tmp_path: Path) -> None:
    for lr in (1, 2, 3):
        for selector in ("random", "gpfl"):
            for shards in (2, 10):
                setting: dict[str, Any] = {
                    "choices": {"selector": selector},
                    "partition": {"shards": shards},
                }
                write_run(tmp_path / str(shards), [0.1 * lr], [[0]], lr=lr, **setting)
    lines = [
        (f"shards={shards}", selector) for shards in (2, 10) for selector in ("random", "gpfl")
    ]
    assert sorted(only(tmp_path).lines) == sorted(lines)
    assert [list(panel.lines) for panel in only(tmp_path).panels] == [["random", "gpfl"]] * 2


def test_numbers_that_change_together_are_one_and_two_values_are_none(tmp_path: Path) -> None:
    """A truth value is no number: it makes lines of its own. A choice that sets a number does not
    name its line."""
    for value in (1, 2, 3):
        config: dict[str, Any] = {"cohort_size": value, "twice": {"it": 2 * value}}
        write_run(tmp_path / "two" / str(value), [0.1], [[0]], flag=value > 1, **config)
        for cell in ("a", "b"):
            own = {"choices": {"cell": f"{cell}{value}"}, "partition": {"_target_": cell}}
            write_run(tmp_path / "three" / str(value), [0.1 * value], [[0]], **own, **config)
    assert find_ablations(groups_of(tmp_path / "two")) == []
    ablation = only(tmp_path / "three")
    assert ablation.keys == ("cohort_size",)
    assert list(ablation.lines) == [("", "random"), ("", "random (b1)")]
    assert [[point.level for point in points] for points in ablation.lines.values()] == [
        [True, True, False]
    ] * 2


def test_the_axis_is_that_on_which_close_values_are_further_apart() -> None:
    assert all(map(is_logarithmic, ([1, 2, 4], [0.1, 0.5, 3], [0, 0.01, 0.1, 1])))
    assert not any(
        map(is_logarithmic, ([1, 2, 3], [0, 2, 4, 6], [-1, 0, 1, 10], [-1, 0, 1], [-3, -2, -1]))
    )


def test_the_report_shows_ablations_after_the_curves_and_the_api_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alphas(tmp_path)
    report(read_runs(tmp_path), tmp_path)
    assert "Final accuracy by selector.alpha" in capsys.readouterr().out
    page = (tmp_path / "report/report.html").read_text()
    assert page.index('id="curves"') < page.index('id="ablations"') < page.index('id="table-costs"')
    assert 'style="font-weight: bold">0.5233 ± 0.0759</td>' in page
    figures = {path.name for path in (tmp_path / "report/figures").glob("ablation_*")}
    assert figures == {"ablation_selector_alpha.png", "ablation_selector_alpha.pdf"}
    frame = fedsim.load_ablations(tmp_path)
    assert frame["value"].tolist() == [0.1, 0.2, 0.4]
    assert frame["best"].tolist() == [False, False, True]
    assert np.allclose(frame["high"] - frame["mean"], [0.0379, 0.0379, 0.0759], atol=1e-4)
    assert np.allclose(frame["p_value"][:2], [0.0309, 0.7418], atol=1e-3)
    with pytest.raises(FedsimError, match="neither a folder"):
        fedsim.load_ablations(tmp_path / "missing")
