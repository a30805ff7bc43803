"""Figures of reports: each curve under its own name, what is drawn by hand, and files that a paper can take."""

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from fedsim.partitions.division import Division
from fedsim.report.figures import (
    BINS,
    accuracy_plot,
    accuracy_plots,
    all_plots,
    coverage_plot,
    histogram_edges,
    histogram_plot,
    participation_plot,
    partitions_plot,
    round_plots,
)
from fedsim.report.plot import COLOURS, Plot, make_looks, style
from fedsim.results.curves import accuracy_curve, smooth, spent_until
from fedsim.results.groups import Panel, drawn_panels, group_runs, make_panels
from fedsim.results.runs import read_runs
from tests.report_toys import write_run


def panels_of(folder: Path) -> list[Panel]:
    return drawn_panels(make_panels(group_runs(read_runs(folder))))


def two_panels(folder: Path, *, rounds: int = 3) -> list[Panel]:
    """random and gpfl with 2 shards; afl, random and gpfl with 10: gpfl is second in one panel, third in the other."""
    levels = {("random", 2): 0.1, ("gpfl", 2): 0.2, ("afl", 10): 0.3, ("random", 10): 0.4, ("gpfl", 10): 0.5}
    for (selector, shards), level in levels.items():
        accuracies: list[float | None] = [level + 0.01 * t for t in range(rounds)]
        setting = {"choices": {"selector": selector}, "partition": {"shards": shards}}
        write_run(folder / str(shards), accuracies, [[0, 1], *[[1]] * (rounds - 1)], **setting)
    return panels_of(folder)


def axes_of(plot: Plot) -> list[Axes]:
    return plot.figure.get_axes()


def main_lines(ax: Axes) -> dict[str, float]:
    """The first value of each line by its colour."""
    return {str(line.get_color()): float(np.asarray(line.get_ydata())[0]) for line in ax.get_lines()}


@pytest.mark.parametrize("highest", [0, 1, 10, BINS - 1, BINS, 41, 333, 1000])
def test_all_bars_of_a_histogram_of_counts_cover_as_many_numbers(highest: int) -> None:
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
    assert [plot.name for plot in plots] == [f"accuracy_{axis}" for axis in ("rounds", "bytes", "samples", "seconds")]
    for plot in plots:
        for ax, values in zip(axes_of(plot), wanted, strict=True):
            assert main_lines(ax) == pytest.approx({looks[name].colour: value for name, value in values.items()})
    histogram = axes_of(histogram_plot(panels, looks))[1]
    colours = [to_hex(patch.get_facecolor(), keep_alpha=False).upper() for patch in histogram.patches]
    assert [label.get_text() for label in histogram.get_yticklabels()] == list(panels[1].lines)
    assert colours == [looks[name].colour for name in panels[1].lines]


def test_many_methods_differ_in_colour_dash_or_marker_and_have_a_legend(tmp_path: Path) -> None:
    for number in range(30):
        write_run(tmp_path, [0.1, 0.2], [[0], [1]], choices={"selector": f"method_{number}"})
    panels = panels_of(tmp_path)
    looks = make_looks(panels)
    assert len({(look.colour, look.marker) for look in looks.values()}) == 30
    assert len({(look.colour, look.dash) for look in looks.values()}) == 28  # of 7 colours and 4 dashes
    plot = accuracy_plot(panels, looks, "rounds")
    (legend,) = plot.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(looks)
    assert not axes_of(plot)[0].texts
    for handle, look in zip(legend.get_lines(), looks.values(), strict=True):
        assert (handle.get_color(), handle.get_linestyle(), handle.get_marker()) == (
            look.colour,
            look.dash,
            look.marker,
        )


def luminance_for(colour: str, matrix: Sequence[Sequence[float]]) -> np.ndarray:  # type: ignore[type-arg]
    """The colour as somebody sees it whose cones are described by `matrix` (Machado et al. 2009), linear RGB."""
    return np.clip(np.array(matrix) @ np.array(matplotlib.colors.to_rgb(colour)) ** 2.2, 0, 1)


DEUTERANOPIA = ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881))
PROTANOPIA = ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998))


@pytest.mark.parametrize("matrix", [DEUTERANOPIA, PROTANOPIA])
def test_colours_differ_for_the_colour_blind(matrix: Sequence[Sequence[float]]) -> None:
    seen = [luminance_for(colour, matrix) ** (1 / 2.2) for colour in COLOURS]
    nearest = min(float(np.linalg.norm(a - b)) for n, a in enumerate(seen) for b in seen[:n])
    assert nearest > 0.15
    tab10 = [luminance_for(f"C{n}", matrix) ** (1 / 2.2) for n in range(7)]
    assert min(float(np.linalg.norm(a - b)) for n, a in enumerate(tab10) for b in tab10[:n]) < 0.15  # what it replaces


def test_smoothing_by_hand() -> None:
    values = np.array([np.nan, 1.0, np.nan, 4.0, 7.0])
    np.testing.assert_allclose(smooth(values, 3), [np.nan, 1.0, 1.0, 2.5, 5.5])
    np.testing.assert_allclose(smooth(values, 1), values)


def test_the_smoothed_curve_ends_at_the_final_accuracy_with_the_raw_one_behind(tmp_path: Path) -> None:
    for seed in range(2):
        accuracies: list[float | None] = [*[0.5] * 50, *[0.6 + 0.1 * seed] * 10]
        write_run(tmp_path, accuracies, [[0]] * 60, seed=seed)
    panels = panels_of(tmp_path)
    curve = accuracy_curve(panels[0].lines["random"].complete)
    ends = [(0.5 + 10 * 0.6) / 11, (0.5 + 10 * 0.7) / 11]
    assert curve.smoothed[-1] == pytest.approx(np.mean(ends))
    assert (curve.low[-1], curve.high[-1]) == pytest.approx(ends)
    assert curve.raw[-1] == pytest.approx(0.65)
    behind, front = axes_of(accuracy_plot(panels, make_looks(panels), "rounds"))[0].get_lines()
    assert (np.asarray(behind.get_ydata())[-1], np.asarray(front.get_ydata())[-1]) == pytest.approx(
        (0.65, np.mean(ends))
    )
    assert (behind.get_alpha() or 1) < 0.5 < front.get_linewidth()
    assert behind.get_zorder() < front.get_zorder()


def test_what_is_spent_until_a_round(tmp_path: Path) -> None:
    path = write_run(tmp_path, [0.1, None, 0.2], [[0, 1], [1], [2]])
    text = (path / "metrics.jsonl").read_text()
    (path / "metrics.jsonl").write_text(text.replace('"seconds_evaluate": 1.0', '"seconds_evaluate": 50.0'))
    runs = read_runs(tmp_path)
    np.testing.assert_allclose(spent_until(runs, "rounds"), [1, 2, 3])
    np.testing.assert_allclose(spent_until(runs, "bytes"), [40, 60, 80])
    np.testing.assert_allclose(spent_until(runs, "samples"), [10, 15, 20])
    np.testing.assert_allclose(spent_until(runs, "seconds"), [4, 8, 12])  # all phases but the evaluation
    line = axes_of(accuracy_plot(panels_of(tmp_path), make_looks(panels_of(tmp_path)), "bytes"))[0].get_lines()[0]
    np.testing.assert_allclose(np.asarray(line.get_xdata()), np.array([40, 80]))  # where it was evaluated


def test_bytes_and_samples_are_written_with_a_prefix(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [0.1, 0.2, 0.3], [[0]] * 3)
    panels = panels_of(tmp_path)
    with style():
        plot = accuracy_plot(panels, make_looks(panels), "bytes")
        (ax,) = axes_of(plot)
        formatted = ax.xaxis.get_major_formatter()
        assert [formatted(value) for value in (0, 25_700_000, 3e9)] == ["0 B", "25.7 MB", "3 GB"]


def test_a_single_round_has_a_marker(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(tmp_path, [0.3 + 0.2 * seed], [[0]], seed=seed)
    panels = panels_of(tmp_path)
    ax = axes_of(accuracy_plot(panels, make_looks(panels), "rounds"))[0]
    (line, *_) = [line for line in ax.get_lines() if line.get_marker() not in ("None", "_")]
    assert (line.get_marker(), np.asarray(line.get_ydata()).tolist()) == ("o", [0.4])
    assert line.get_markevery() == (0, 1)


def test_panels_and_lines_without_finished_runs_are_left_out(tmp_path: Path) -> None:
    for shards, selector, status in ((2, "random", "done"), (2, "afl", "diverged"), (10, "random", "failed")):
        setting: dict[str, Any] = {"choices": {"selector": selector}, "partition": {"shards": shards}}
        write_run(tmp_path / str(shards), [0.1], [[0]], status=status, **setting)
    panels = panels_of(tmp_path)
    assert [(panel.title, list(panel.lines)) for panel in panels] == [("shards=2", ["random"])]
    assert list(make_looks(panels)) == ["random"]
    assert len(axes_of(accuracy_plot(panels, make_looks(panels), "rounds"))) == 1
    assert not list(all_plots([], {}))


def test_participation_and_coverage_are_rows_that_cannot_hide_each_other(tmp_path: Path) -> None:
    """Five methods with the same participation, which as lines would be one."""
    for number in range(5):
        write_run(tmp_path, [0.1, 0.2], [[0], [number % 2]], choices={"selector": f"m{number}"})
    panels = panels_of(tmp_path)
    for plot, last in ((participation_plot(panels), 0.25), (coverage_plot(panels), 0.5)):
        ax = axes_of(plot)[0]
        heights = [sorted({float(y) for y in mesh.get_coordinates()[..., 1].flat}) for mesh in ax.collections]  # type: ignore[attr-defined]
        assert all(one[1] < next_one[0] for one, next_one in pairwise(heights))
        assert [label.get_text() for label in ax.get_yticklabels()] == list(panels[0].lines)
        values = [np.asarray(mesh.get_array()).ravel().tolist() for mesh in ax.collections]
        assert values[1] == [0.25, last]
        assert len(values) == 5
    assert [text.get_text() for text in axes_of(participation_plot(panels))[0].texts] == ["25 %"] * 5


def test_the_map_and_the_histogram_of_selections(tmp_path: Path) -> None:
    write_run(tmp_path, [0.1, 0.2, 0.3], [[0, 1], [1], [1, 3]])
    panels = panels_of(tmp_path)
    (plot,) = round_plots(panels)
    values = np.asarray(axes_of(plot)[0].images[0].get_array())
    assert values.tolist() == [[1, 0, 0], [1, 1, 1], [0, 0, 0], [0, 0, 1]]  # clients by rounds
    ax = axes_of(histogram_plot(panels, make_looks(panels)))[0]
    (patch,) = ax.patches
    heights = np.asarray(patch.get_data().baseline) - np.asarray(patch.get_data().values)  # type: ignore[attr-defined]
    np.testing.assert_allclose(heights / heights.max(), [0.5, 1, 0, 0.5])  # clients selected 0, 1, 2 and 3 times
    assert [text.get_text() for text in ax.texts] == ["1 never"]


def test_many_rounds_are_put_together_in_the_map_of_selections(tmp_path: Path) -> None:
    write_run(tmp_path, [0.1] * 250, [[0], [1]] * 125)
    (plot,) = round_plots(panels_of(tmp_path))
    values = np.asarray(axes_of(plot)[0].images[0].get_array())
    assert values.shape == (4, 125)
    assert values[:2].tolist() == [[0.5] * 125] * 2


def test_panels_of_one_division_share_its_map_of_labels(tmp_path: Path) -> None:
    histograms = np.array([[2, 0], [3, 3], [0, 1]])
    parts, empty = [np.arange(2), np.arange(2, 8), np.arange(8, 9)], np.empty(0, np.int64)
    for hidden in (1, 2):
        for shards in (2, 10):
            path = write_run(tmp_path / f"{hidden}{shards}", [0.1], [[0]], model={"h": hidden}, partition={"s": shards})
            counts = histograms * (1 if shards == 2 else 2)
            division = Division(parts, [empty] * 3, empty, empty, counts)
            (path / "partition.npz").write_bytes(division.to_bytes())
    plot = partitions_plot(panels_of(tmp_path))
    assert plot is not None
    maps = {ax.get_title(): np.asarray(ax.images[0].get_array()) for ax in axes_of(plot) if ax.images}
    assert list(maps) == ["s=2", "s=10"]
    np.testing.assert_array_equal(maps["s=10"], 2 * histograms.T)  # labels by clients


def test_clients_are_counted_in_whole_numbers(tmp_path: Path) -> None:
    path, empty = write_run(tmp_path / "run", [0.1], [[0]]), np.empty(0, np.int64)
    parts = [empty] * 20
    (path / "partition.npz").write_bytes(Division(parts, parts, empty, empty, np.ones((20, 10), np.int64)).to_bytes())
    with style():
        plot = partitions_plot(panels_of(tmp_path))
        assert plot is not None
        plot.figure.draw_without_rendering()
        (ax,) = [ax for ax in axes_of(plot) if ax.images]
        assert all(float(tick).is_integer() for tick in ax.get_xticks())


@pytest.mark.parametrize(("num_panels", "width"), [(1, 3.5), (2, 7.16)])
def test_files_are_as_wide_as_a_column_or_a_page_and_have_truetype_fonts(
    tmp_path: Path, num_panels: int, width: float
) -> None:
    panels = two_panels(tmp_path / "runs")[:num_panels]
    with style():
        plot = accuracy_plot(panels, make_looks(panels), "rounds")
    preview = plot.save(tmp_path)
    pdf = (tmp_path / "accuracy_rounds.pdf").read_bytes()
    assert b"/Subtype /Type3" not in pdf
    assert b"/FontFile2" in pdf
    box = re.search(rb"/MediaBox \[ 0 0 ([\d.]+) ([\d.]+) \]", pdf)
    assert box is not None
    assert float(box[1]) == pytest.approx(72 * width, abs=0.1)
    png = matplotlib.image.imread(tmp_path / "accuracy_rounds.png")
    assert png.shape[1] == int(300 * width)
    assert preview.startswith(b"\x89PNG")


def test_runs_whose_records_lack_quantities_have_the_figures_of_the_others(tmp_path: Path) -> None:
    path = write_run(tmp_path, [0.1, 0.2], [[0], [1]])
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    kept = ("round", "selected", "test_accuracy", "participation_ratio", "coverage", "bytes_down", "bytes_up")
    (path / "metrics.jsonl").write_text("".join(json.dumps({k: line[k] for k in kept}) + "\n" for line in lines))
    panels = panels_of(tmp_path)
    names = [plot.name for plot in all_plots(panels, make_looks(panels))]
    assert names == [
        *("accuracy_rounds", "accuracy_bytes", "coverage", "participation", "selections", "selections_rounds")
    ]
