"""Figures of reports: each curve under its own name, what is drawn by hand, and files that a paper
can take."""

import re
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedsim.report.figures import (
    BINS,
    Plot,
    accuracy_plots,
    all_plots,
    clients_plot,
    coverage_plot,
    histogram_edges,
    histogram_plot,
    participation_plot,
    partitions_plot,
    round_plots,
    save,
    sorted_accuracies,
    style,
)
from fedsim.report.page import make_looks
from fedsim.results.curves import accuracy_curve, smooth, spent_until
from fedsim.results.groups import Panel
from fedsim.results.runs import read_runs
from tests.report_toys import PHASES, change_run, panels_of, write_partition, write_run
from tests.test_report_measures import with_clients


def two_panels(folder: Path) -> list[Panel]:
    """random and gpfl with 2 shards; afl, random and gpfl with 10: gpfl is second in one panel,
    third in the other."""
    levels = {
        ("random", 2): 0.1,
        ("gpfl", 2): 0.2,
        ("afl", 10): 0.3,
        ("random", 10): 0.4,
        ("gpfl", 10): 0.5,
    }
    for (selector, shards), level in levels.items():
        setting = {"choices": {"selector": selector}, "partition": {"shards": shards}}
        write_run(folder / str(shards), [level, level + 0.01], [[0, 1], [1]], **setting)
    return panels_of(folder)


def axes_of(plot: Plot) -> list[Axes]:
    return plot.figure.get_axes()


def plots_of(folder: Path) -> list[Plot]:
    return accuracy_plots(panels_of(folder), make_looks(panels_of(folder)))


def drawn(line: Line2D) -> list[float]:
    return np.asarray(line.get_ydata(), float).tolist()


def test_all_bars_of_a_histogram_of_counts_cover_as_many_numbers() -> None:
    for highest in (0, BINS - 1, BINS, 41, 333):
        edges = histogram_edges(highest)
        covered, _ = np.histogram(np.arange(int(edges[-1] + 0.5)), edges)
        assert len(covered) <= BINS
        assert len(set(covered.tolist())) == 1
        assert edges[-2] < highest < edges[-1]


def test_a_curve_has_the_colour_of_its_name_in_every_panel_and_figure(tmp_path: Path) -> None:
    panels = two_panels(tmp_path)
    looks = make_looks(panels)
    assert list(looks) == ["random", "afl", "gpfl"]
    wanted = [{"random": 0.1, "gpfl": 0.2}, {"random": 0.4, "afl": 0.3, "gpfl": 0.5}]
    plots = accuracy_plots(panels, looks)
    assert [plot.name for plot in plots] == [
        f"accuracy_{axis}" for axis in ("rounds", "bytes", "samples", "seconds")
    ]
    for plot in plots:
        for ax, values in zip(axes_of(plot), wanted, strict=True):
            found = {str(line.get_color()): drawn(line)[0] for line in ax.get_lines()}
            assert found == pytest.approx(
                {looks[name]["color"]: value for name, value in values.items()}
            )
    histogram = axes_of(histogram_plot(panels, looks))[1]
    colours = [
        to_hex(patch.get_facecolor(), keep_alpha=False).upper() for patch in histogram.patches
    ]
    assert [label.get_text() for label in histogram.get_yticklabels()] == list(panels[1].lines)
    assert colours == [looks[name]["color"] for name in panels[1].lines]


def test_many_methods_differ_in_colour_dash_or_marker_and_have_a_legend(tmp_path: Path) -> None:
    for number in range(30):
        write_run(tmp_path, [0.1, 0.2], [[0], [1]], choices={"selector": f"method_{number}"})
    panels = panels_of(tmp_path)
    looks = make_looks(panels)
    assert len({(look["color"], look["marker"]) for look in looks.values()}) == 30
    assert (
        len({(look["color"], look["linestyle"]) for look in looks.values()}) == 28
    )  # of 7 colours and 4 dashes
    plot = accuracy_plots(panels, looks)[0]
    assert "faintly" not in plot.caption  # single rounds are all there is
    (legend,) = plot.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(looks)
    assert not axes_of(plot)[0].texts
    shown = [(one.get_color(), one.get_linestyle(), one.get_marker()) for one in legend.get_lines()]
    assert shown == [(look["color"], look["linestyle"], look["marker"]) for look in looks.values()]


def test_the_smoothed_curve_ends_at_the_final_accuracy_with_the_raw_one_behind(
    tmp_path: Path,
) -> None:
    for seed in range(2):
        accuracies = [*[0.5] * 50, *[0.6 + 0.1 * seed] * 10]
        write_run(tmp_path, accuracies, [[0]] * 60, seed=seed)
    curve = accuracy_curve(read_runs(tmp_path))
    ends = [(0.5 + 10 * 0.6) / 11, (0.5 + 10 * 0.7) / 11]
    assert curve.smoothed[-1] == pytest.approx(np.mean(ends))
    assert (curve.low[-1], curve.high[-1]) == pytest.approx(ends)
    assert curve.raw[-1] == pytest.approx(0.65)
    behind, front = axes_of(plots_of(tmp_path)[0])[0].get_lines()
    assert (drawn(behind)[-1], drawn(front)[-1]) == pytest.approx((0.65, np.mean(ends)))
    assert (behind.get_alpha() or 1) < 0.5 < front.get_linewidth()
    assert behind.get_zorder() < front.get_zorder()
    values = np.array([np.nan, 1.0, np.nan, 4.0, 7.0])
    np.testing.assert_allclose(smooth(values, 3), [np.nan, 1.0, 1.0, 2.5, 5.5])
    np.testing.assert_allclose(smooth(values, 1), values)


def test_what_is_spent_until_a_round(tmp_path: Path) -> None:
    write_run(
        tmp_path, [0.1, None, 0.2], [[0, 1], [1], [2]], columns={"seconds_evaluate": [50.0] * 3}
    )
    runs = read_runs(tmp_path)
    np.testing.assert_allclose(spent_until(runs, "rounds"), [1, 2, 3])
    np.testing.assert_allclose(spent_until(runs, "bytes"), [40, 60, 80])
    np.testing.assert_allclose(spent_until(runs, "samples"), [10, 15, 20])
    np.testing.assert_allclose(
        spent_until(runs, "seconds"), [4, 8, 12]
    )  # all phases but the evaluation
    with style():
        (ax,) = axes_of(plots_of(tmp_path)[1])
        written = [ax.xaxis.get_major_formatter()(value) for value in (0, 25_700_000, 3e9)]
    assert np.asarray(ax.get_lines()[0].get_xdata()).tolist() == [40, 80]  # where it was evaluated
    assert written == ["0 B", "25.7 MB", "3 GB"]


def test_a_single_round_has_a_marker(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(tmp_path, [0.3 + 0.2 * seed], [[0]], seed=seed)
    (ax,) = axes_of(plots_of(tmp_path)[0])
    (line, *_) = [line for line in ax.get_lines() if line.get_marker() not in ("None", "_")]
    assert (line.get_marker(), drawn(line)) == ("o", [0.4])
    assert line.get_markevery() == (0, 1)
    for seed in range(3):  # the mean of three times .4 is above .4 by rounding
        write_run(tmp_path / "equal", [0.4], [[0]], seed=seed)
    assert plots_of(tmp_path / "equal")


def test_panels_and_lines_without_finished_runs_are_left_out(tmp_path: Path) -> None:
    for shards, selector, status in (
        (2, "random", "done"),
        (2, "afl", "diverged"),
        (10, "random", "failed"),
    ):
        setting: dict[str, Any] = {
            "choices": {"selector": selector},
            "partition": {"shards": shards},
        }
        write_run(tmp_path / str(shards), [0.1], [[0]], status=status, **setting)
    panels = panels_of(tmp_path)
    assert [(panel.title, list(panel.lines)) for panel in panels] == [("shards=2", ["random"])]
    assert list(make_looks(panels)) == ["random"]


def test_participation_and_coverage_are_rows_that_cannot_hide_each_other(tmp_path: Path) -> None:
    """Five methods with the same participation, which as lines would be one."""
    for number in range(5):
        write_run(tmp_path, [0.1, 0.2], [[0], [number % 2]], choices={"selector": f"m{number}"})
    panels = panels_of(tmp_path)
    for plot, last in ((participation_plot(panels), 0.25), (coverage_plot(panels), 0.5)):
        ax = axes_of(plot)[0]
        heights = [
            sorted({float(y) for y in mesh.get_coordinates()[..., 1].flat})
            for mesh in ax.collections
        ]  # type: ignore[attr-defined]
        assert all(one[1] < next_one[0] for one, next_one in pairwise(heights))
        assert [label.get_text() for label in ax.get_yticklabels()] == list(panels[0].lines)
        values = [np.asarray(mesh.get_array()).ravel().tolist() for mesh in ax.collections]
        assert values[1] == [0.25, last]
        assert len(values) == 5
    assert [text.get_text() for text in axes_of(participation_plot(panels))[0].texts] == [
        "25 %"
    ] * 5


def test_the_maps_and_the_histogram_of_selections(tmp_path: Path) -> None:
    write_run(tmp_path / "few", [0.1, 0.2, 0.3], [[0, 1], [1], [1, 3]])
    write_run(tmp_path / "many", [0.1] * 250, [[0], [1]] * 125)
    panels = panels_of(tmp_path / "few")
    few, many = (
        np.asarray(axes_of(plot)[0].images[0].get_array())
        for (plot,) in (round_plots(panels), round_plots(panels_of(tmp_path / "many")))
    )
    assert few.tolist() == [[1, 0, 0], [1, 1, 1], [0, 0, 0], [0, 0, 1]]  # clients by rounds
    assert many.shape == (4, 125)  # two rounds a column
    assert many[:2].tolist() == [[0.5] * 125] * 2
    ax = axes_of(histogram_plot(panels, make_looks(panels)))[0]
    (patch,) = ax.patches
    heights = np.asarray(patch.get_data().baseline) - np.asarray(patch.get_data().values)  # type: ignore[attr-defined]
    np.testing.assert_allclose(
        heights / heights.max(), [0.5, 1, 0, 0.5]
    )  # clients selected 0, 1, 2 and 3 times
    assert [text.get_text() for text in ax.texts] == ["1 never"]


def test_panels_of_one_division_share_its_map_of_labels_and_count_clients_in_whole_numbers(
    tmp_path: Path,
) -> None:
    histograms = [[2, 0], [3, 3], [0, 1]]
    for hidden in (1, 2):
        for shards, times in ((2, 1), (10, 2)):
            setting = {"model": {"h": hidden}, "partition": {"s": shards}}
            path = write_run(tmp_path / f"{hidden}{shards}", [0.1], [[0]], **setting)
            write_partition(path, (times * np.array(histograms)).tolist())
    with style():
        plot = partitions_plot(panels_of(tmp_path))
        assert plot is not None
        plot.figure.draw_without_rendering()
        maps = {ax.get_title(): ax for ax in axes_of(plot) if ax.images}
    assert list(maps) == ["s=2", "s=10"]
    np.testing.assert_array_equal(
        np.asarray(maps["s=10"].images[0].get_array()), 2 * np.array(histograms).T
    )
    assert all(float(tick).is_integer() for ax in maps.values() for tick in ax.get_xticks())


def test_clients_are_drawn_by_rank(tmp_path: Path) -> None:
    """Three clients of the second run have an accuracy, so the first is read at a sixth, a half and
    five sixths."""
    write_run(tmp_path / "without", [0.5], [[0]])
    panels = panels_of(tmp_path / "without")
    assert clients_plot(panels, make_looks(panels)) is None
    with_clients(tmp_path / "with")
    panels = panels_of(tmp_path / "with")
    expected = np.array([[0.1 + 0.2 / 6, 0.4, 0.5 + 0.4 * 5 / 6], [0.2, 0.2, 0.8]])
    found = sorted_accuracies(panels[0].lines["random"])
    assert found is not None
    np.testing.assert_allclose(found, expected)
    plot = clients_plot(panels, make_looks(panels))
    assert plot is not None
    (line,) = axes_of(plot)[0].get_lines()
    np.testing.assert_allclose(np.asarray(line.get_ydata(), float), expected.mean(0))


@pytest.mark.parametrize(("num_panels", "width"), [(1, 3.5), (2, 7.16)])
def test_files_are_as_wide_as_a_column_or_a_page_and_have_truetype_fonts(
    tmp_path: Path, num_panels: int, width: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    panels, drawn = two_panels(tmp_path / "runs")[:num_panels], []
    with style():
        plots = accuracy_plots(panels, make_looks(panels))[:1]
    monkeypatch.setattr(
        Figure, "draw", lambda self, renderer, draw=Figure.draw: drawn.append(draw(self, renderer))
    )
    ((_, preview),) = save(plots, tmp_path)
    assert len(drawn) == 2  # once a file
    pdf = (tmp_path / "accuracy_rounds.pdf").read_bytes()
    assert b"/Subtype /Type3" not in pdf
    fonts = [at.end() for at in re.finditer(rb"/Length1 .*?stream\r?\n", pdf, re.DOTALL)]
    (font, *_) = [zlib.decompressobj().decompress(pdf[at:]) for at in fonts]
    assert b"glyf" in font
    box = re.search(rb"/MediaBox \[ 0 0 ([\d.]+) ([\d.]+) \]", pdf)
    assert box is not None
    assert float(box[1]) == pytest.approx(72 * width, abs=0.1)
    png = matplotlib.image.imread(tmp_path / "accuracy_rounds.png")
    assert png.shape[1] == int(300 * width)
    assert preview.startswith(b"\x89PNG")


def test_runs_whose_records_lack_quantities_have_the_figures_of_the_others(tmp_path: Path) -> None:
    missing = ("train_samples", "forward_samples", *(f"seconds_{phase}" for phase in PHASES))
    run = write_run(tmp_path, [0.1, 0.2], [[0], [1]])
    change_run(run, lambda records: [record.pop(name) for record in records for name in missing])
    panels = panels_of(tmp_path)
    names = [plot.name for plot in all_plots(panels)]
    expected = [
        "accuracy_rounds",
        "accuracy_bytes",
        "coverage",
        "participation",
        "selections",
        "selections_rounds",
    ]
    assert names == expected
