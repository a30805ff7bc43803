"""Figures of reports: each curve under its own name, what is drawn by hand, and files that a paper
can take."""

import re
import zlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedsim.report.accuracy_figures import accuracy_plots
from fedsim.report.client_figures import (
    clients_plot,
    labels_plot,
    partitions_plot,
    sorted_accuracies,
)
from fedsim.report.curves import accuracy_curve, smooth, spent_until
from fedsim.report.drawing import Plot, save, style
from fedsim.report.figures import all_plots
from fedsim.report.selection_figures import (
    BINS,
    coverage_plot,
    histogram_edges,
    histogram_plot,
    participation_plot,
    round_plots,
)
from fedsim.report.time_figures import phases_plot
from fedsim.results.runs import read_runs
from tests.report_toys import (
    PHASES,
    change_run,
    drawn_runs,
    lines_of,
    looks_of,
    write_partition,
    write_run,
)
from tests.test_report_measures import with_clients
from tests.test_report_presentation import BLINDNESS, cie_lab


def write_two_settings(folder: Path) -> None:
    """Write random and gpfl with 2 shards; afl, random and gpfl with 10. The first accuracies are
    0.1 to 0.5 in this order."""
    methods = [("random", 2), ("gpfl", 2), ("afl", 10), ("random", 10), ("gpfl", 10)]
    for number, (selector, shards) in enumerate(methods, 1):
        setting = {"choices": {"selector": selector}, "partition": {"shards": shards}}
        accuracies = [0.1 * number, 0.1 * number + 0.01]
        write_run(folder / str(shards), accuracies, [[0, 1], [1]], **setting)


def accuracy_plots_of(folder: Path) -> list[Plot]:
    runs = drawn_runs(folder)
    return accuracy_plots(lines_of(runs), looks_of(runs))


def first_axes(plot: Plot) -> Axes:
    return plot.figure.get_axes()[0]


def heights(line: Line2D) -> list[float]:
    return np.asarray(line.get_ydata(), float).tolist()


@pytest.mark.parametrize("highest", [0, BINS - 1, BINS, 41, 333])
def test_all_bars_of_a_histogram_of_counts_cover_as_many_numbers(highest: int) -> None:
    edges = histogram_edges(highest)
    covered, _ = np.histogram(np.arange(int(edges[-1] + 0.5)), edges)
    assert len(covered) <= BINS
    assert len(set(covered.tolist())) == 1
    assert edges[-2] < highest < edges[-1]


def test_a_curve_has_the_colour_of_its_name_in_every_panel_and_figure(tmp_path: Path) -> None:
    write_two_settings(tmp_path)
    runs = drawn_runs(tmp_path)
    looks = looks_of(runs)
    colours = {method: look["color"] for method, look in looks.items()}
    assert list(colours) == ["random", "afl", "gpfl"]
    plots = accuracy_plots(lines_of(runs), looks)
    names = [f"accuracy_{axis}" for axis in ("rounds", "bytes", "samples", "seconds")]
    assert [plot.name for plot in plots] == names
    for plot in plots:
        two_shards, ten_shards = (
            {str(line.get_color()): heights(line)[0] for line in axes.get_lines()}
            for axes in plot.figure.get_axes()
        )
        assert two_shards == pytest.approx({colours["random"]: 0.1, colours["gpfl"]: 0.2})
        assert ten_shards == pytest.approx(
            {colours["afl"]: 0.3, colours["random"]: 0.4, colours["gpfl"]: 0.5}
        )


def test_the_histogram_of_selections_has_the_colours_of_the_curves(tmp_path: Path) -> None:
    write_two_settings(tmp_path)
    runs = drawn_runs(tmp_path)
    looks = looks_of(runs)
    _, axes = histogram_plot(lines_of(runs), looks).figure.get_axes()
    methods = [label.get_text() for label in axes.get_yticklabels()]
    assert methods == ["random", "afl", "gpfl"]
    colours = [to_hex(patch.get_facecolor(), keep_alpha=False) for patch in axes.patches]
    assert colours == [to_hex(looks[method]["color"]) for method in methods]


def test_many_methods_have_one_legend(tmp_path: Path) -> None:
    for number in range(30):
        write_run(tmp_path, [0.1, 0.2], [[0], [1]], choices={"selector": f"method_{number}"})
    plot = accuracy_plots_of(tmp_path)[0]
    assert "faintly" not in plot.caption  # single rounds are all there is
    (legend,) = plot.figure.legends
    looks = looks_of(drawn_runs(tmp_path))
    places = {}
    plot.figure.draw_without_rendering()
    for text, line in zip(legend.get_texts(), legend.get_lines(), strict=True):
        look = looks[text.get_text()]
        assert (line.get_color(), line.get_marker()) == (look["color"], look["marker"])
        box = text.get_window_extent()
        places[-round(box.y0), box.x0] = text.get_text()
    assert [places[place] for place in sorted(places)] == list(looks)  # read row by row


def test_the_smoothed_curve_ends_at_the_final_accuracy_with_the_raw_one_behind(
    tmp_path: Path,
) -> None:
    """The last ten of 60 rounds have 0.6 and 0.7, the 50 before 0.5."""
    for seed, last in enumerate((0.6, 0.7)):
        write_run(tmp_path, [0.5] * 50 + [last] * 10, [[0]] * 60, seed=seed)
    curve = accuracy_curve(read_runs(tmp_path))
    low, high = (0.5 + 10 * 0.6) / 11, (0.5 + 10 * 0.7) / 11
    assert curve.smoothed[-1] == pytest.approx((low + high) / 2)
    assert (curve.low[-1], curve.high[-1]) == pytest.approx((low, high))
    assert curve.raw[-1] == pytest.approx(0.65)
    behind, front = first_axes(accuracy_plots_of(tmp_path)[0]).get_lines()
    assert (heights(behind)[-1], heights(front)[-1]) == pytest.approx((0.65, (low + high) / 2))
    assert (behind.get_alpha() or 1) < 0.5
    assert behind.get_zorder() < front.get_zorder()


def test_panels_of_a_figure_have_single_rounds_behind_if_its_caption_says_so(
    tmp_path: Path,
) -> None:
    """One setting has a method, the other four, which are too many."""
    for number in range(4):
        write_run(tmp_path, [0.1] * 60, [[0]] * 60, choices={"selector": f"method_{number}"})
    write_run(tmp_path, [0.1] * 60, [[0]] * 60, choices={"partition": "shards"})
    plot = accuracy_plots_of(tmp_path)[0]
    assert [len(axes.get_lines()) for axes in plot.figure.get_axes()] == [4, 1]
    assert "faintly" not in plot.caption


def test_smoothing_leaves_out_rounds_that_were_not_evaluated() -> None:
    values = np.array([np.nan, 1.0, np.nan, 4.0, 7.0])
    np.testing.assert_allclose(smooth(values, 3), [np.nan, 1.0, 1.0, 2.5, 5.5])
    np.testing.assert_allclose(smooth(values, 1), values)


def test_what_is_spent_until_a_round(tmp_path: Path) -> None:
    """An upload costs 10 bytes each way and 5 samples; four phases other than the evaluation take a
    second each."""
    columns = {"seconds_evaluate": [50.0] * 3}
    write_run(tmp_path, [0.1, None, 0.2], [[0, 1], [1], [2]], columns=columns)
    runs = read_runs(tmp_path)
    assert spent_until(runs, "rounds").tolist() == [1, 2, 3]
    assert spent_until(runs, "bytes").tolist() == [40, 60, 80]
    assert spent_until(runs, "samples").tolist() == [10, 15, 20]
    assert spent_until(runs, "seconds").tolist() == [4, 8, 12]


def test_the_axis_of_bytes_has_prefixes_and_points_where_rounds_were_evaluated(
    tmp_path: Path,
) -> None:
    write_run(tmp_path, [0.1, None, 0.2], [[0, 1], [1], [2]])
    with style():
        axes = first_axes(accuracy_plots_of(tmp_path)[1])
        written = [axes.xaxis.get_major_formatter()(value) for value in (0, 25_700_000, 3e9)]
    assert written == ["0 B", "25.7 MB", "3 GB"]
    assert np.asarray(axes.get_lines()[0].get_xdata()).tolist() == [40, 80]


def test_a_single_round_has_a_marker(tmp_path: Path) -> None:
    for seed, accuracy in enumerate((0.3, 0.5)):
        write_run(tmp_path, [accuracy], [[0]], seed=seed)
    lines = first_axes(accuracy_plots_of(tmp_path)[0]).get_lines()
    (line, *_) = [line for line in lines if line.get_marker() not in ("None", "_")]
    assert (line.get_marker(), heights(line), line.get_markevery()) == ("o", [0.4], (0, 1))


def test_equal_accuracies_whose_mean_is_above_them_by_rounding(tmp_path: Path) -> None:
    for seed in range(3):
        write_run(tmp_path, [0.4], [[0]], seed=seed)
    assert accuracy_plots_of(tmp_path)


def test_settings_and_methods_without_finished_runs_are_not_drawn(tmp_path: Path) -> None:
    for shards, selector, status in (
        (2, "random", "done"),
        (2, "afl", "diverged"),
        (10, "random", "failed"),
    ):
        setting = {"choices": {"selector": selector}, "partition": {"shards": shards}}
        write_run(tmp_path / str(shards), [0.1], [[0]], status=status, **setting)
    lines = lines_of(drawn_runs(tmp_path))
    assert {title: list(methods) for title, methods in lines.items()} == {"shards=2": ["random"]}


@pytest.mark.parametrize(
    ("make", "texts"), [(participation_plot, ["25 %"] * 5), (coverage_plot, ["never (0/1)"] * 5)]
)
def test_participation_and_coverage_are_rows_that_cannot_hide_each_other(
    make: type, texts: Sequence[str], tmp_path: Path
) -> None:
    """Five methods with the same participation, which as lines would be one."""
    for number in range(5):
        write_run(tmp_path, [0.1, 0.2], [[0], [number % 2]], choices={"selector": f"m{number}"})
    axes = first_axes(make(drawn_runs(tmp_path)))
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"m{n}" for n in range(5)]
    assert [text.get_text() for text in axes.texts] == texts
    rows = []
    for mesh in axes.collections:
        rows.append(sorted({float(y) for y in mesh.get_coordinates()[..., 1].flat}))  # type: ignore[attr-defined]
    assert all(bottom < next_top for (_, bottom), (next_top, _) in pairwise(rows))
    second = np.asarray(axes.collections[1].get_array()).ravel().tolist()
    assert second == [0.25, 0.25 if make is participation_plot else 0.5]


def test_shares_have_a_scale_from_0_to_1_whose_least_can_be_told_from_paper(
    tmp_path: Path,
) -> None:
    """Half of the clients upload in each round. 0 is at least 14 darker than white (CIE L*)."""
    write_run(tmp_path, [0.1, 0.2], [[0, 1], [0, 1]])
    with style():
        for make in (participation_plot, coverage_plot):
            mesh = first_axes(make(drawn_runs(tmp_path))).collections[0]
            assert mesh.get_clim() == (0, 1)
            assert lightness(mesh.get_cmap()(0.0)) < 86


def lightness(colour: Any) -> float:
    """Return the CIE L* of a colour: 0 for black, 100 for white."""
    return float(cie_lab(to_hex(colour), BLINDNESS["none"])[0])


def test_all_phases_can_be_seen_on_a_dark_background(tmp_path: Path) -> None:
    write_run(tmp_path, [0.1], [[0]])
    with style("dark"):
        figure = phases_plot(
            "phases", lines_of(drawn_runs(tmp_path)), PHASES, "seconds_", ""
        ).figure
        background = lightness(figure.get_facecolor())
    for patch in figure.axes[0].patches:
        assert lightness(patch.get_facecolor()) > background + 25


def test_axes_of_costs_and_coverage_show_that_they_are_logarithmic(tmp_path: Path) -> None:
    write_run(tmp_path, [0.1] * 30, [[0]] * 30)
    with style():
        axes = first_axes(coverage_plot(drawn_runs(tmp_path)))
        axes.figure.draw_without_rendering()
    assert axes.get_xlabel() == "round (log scale)"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2", "5", "10", "20"]
    assert len(axes.get_xticks(minor=True)) > 10


def map_of(folder: Path) -> np.ndarray:
    """Return the only map of selections, clients by columns. Cells without any are empty."""
    (plot,) = round_plots(lines_of(drawn_runs(folder)))
    return np.nan_to_num(np.asarray(first_axes(plot).images[0].get_array()))


def test_the_map_of_selections_has_clients_by_rounds(tmp_path: Path) -> None:
    write_run(tmp_path, [0.1, 0.2, 0.3], [[0, 1], [1], [1, 3]])
    assert map_of(tmp_path).tolist() == [[1, 0, 0], [1, 1, 1], [0, 0, 0], [0, 0, 1]]


def test_the_map_of_many_rounds_has_several_in_a_column(tmp_path: Path) -> None:
    write_run(tmp_path, [0.1] * 250, [[0], [1]] * 125)
    shares = map_of(tmp_path)
    assert shares.shape == (4, 125)
    assert shares[:2].tolist() == [[0.5] * 125] * 2


@pytest.mark.filterwarnings("error")
def test_the_map_of_runs_in_which_nobody_was_selected_is_empty(tmp_path: Path) -> None:
    write_run(tmp_path, [0.1, 0.2], [[], []])
    (plot,) = round_plots(lines_of(drawn_runs(tmp_path)))
    plot.figure.draw_without_rendering()
    assert np.isnan(np.ma.filled(first_axes(plot).images[0].get_array(), np.nan)).all()


def test_the_histogram_of_selections(tmp_path: Path) -> None:
    """Clients are selected once, three times, never and once."""
    write_run(tmp_path, [0.1, 0.2, 0.3], [[0, 1], [1], [1, 3]])
    runs = drawn_runs(tmp_path)
    axes = first_axes(histogram_plot(lines_of(runs), looks_of(runs)))
    (patch,) = axes.patches
    bars = patch.get_data()  # type: ignore[attr-defined]
    counts = np.asarray(bars.baseline) - np.asarray(bars.values)
    np.testing.assert_allclose(counts / counts.max(), [0.5, 1, 0, 0.5])
    assert [text.get_text() for text in axes.texts] == ["1 never"]


def test_settings_of_one_division_share_its_map_of_labels(tmp_path: Path) -> None:
    histograms = np.array([[2, 0], [3, 3], [0, 1]])
    for hidden in (1, 2):
        for shards, times in ((2, 1), (10, 2)):
            setting = {"model": {"h": hidden}, "partition": {"s": shards}}
            path = write_run(tmp_path / f"{hidden}{shards}", [0.1], [[0]], **setting)
            write_partition(path, (times * histograms).tolist())
    with style():
        plot = partitions_plot(drawn_runs(tmp_path))
        assert plot is not None
        plot.figure.draw_without_rendering()
    maps = [axes for axes in plot.figure.get_axes() if axes.images]
    bars_above = [axes for axes in plot.figure.get_axes() if axes.get_ylabel() == "samples"]
    assert [axes.get_title() for axes in bars_above] == ["s=2", "s=10"]
    drawn = np.nan_to_num(np.asarray(maps[1].images[0].get_array()))
    # Client 1 has the most samples of its first label, then client 0; client 2 has another label.
    np.testing.assert_array_equal(drawn, 2 * histograms[[1, 0, 2]].T)
    (bars,) = bars_above[1].patches
    assert bars.get_data().values.tolist() == [12, 4, 2]  # type: ignore[attr-defined]
    for axes in maps:  # clients are counted in whole numbers
        assert all(float(tick).is_integer() for tick in axes.get_xticks())
    columns = {key: np.asarray(values).tolist() for key, values in plot.data[1].items()}
    held = {"client": [0, 1, 1, 2], "label": [0, 0, 1, 1], "samples": [4, 6, 6, 2]}
    assert columns == {"division": "s=10", **held}


def test_divisions_that_differ_in_values_outside_of_the_partition_have_maps_of_their_own(
    tmp_path: Path,
) -> None:
    configs: list[dict[str, Any]] = [
        {"num_clients": 4, "local": {"holdout_fraction": 0.0}, "server": {"validation": 0}},
        {"num_clients": 2, "local": {"holdout_fraction": 0.0}, "server": {"validation": 0}},
        {"num_clients": 4, "local": {"holdout_fraction": 0.2}, "server": {"validation": 0}},
        {"num_clients": 4, "local": {"holdout_fraction": 0.0}, "server": {"validation": 9}},
    ]
    for samples, config in enumerate(configs, 1):
        path = write_run(tmp_path / str(samples), [0.1], [[0]], **config)
        write_partition(path, [[samples, 0]] * config["num_clients"])
    plot = partitions_plot(drawn_runs(tmp_path))
    assert plot is not None
    sizes = [(len(np.asarray(data["client"])), data["samples"][0]) for data in plot.data]
    assert sorted(sizes) == [(2, 2), (4, 1), (4, 3), (4, 4)]
    assert len({data["division"] for data in plot.data}) == len(configs)


def test_many_labels_are_sorted_and_have_a_logarithmic_scale() -> None:
    """Client 1 has 100 samples of label 24 and client 0 has 10 of label 3: the top two rows."""
    histograms = np.ones((2, 25), int)
    histograms[0, 3], histograms[1, 24] = 10, 100
    axes = labels_plot({"": histograms}).figure.axes[0]
    (image,) = axes.images
    drawn = np.asarray(image.get_array())
    assert drawn[:3].tolist() == [[100, 1], [1, 10], [1, 1]]
    assert isinstance(image.norm, LogNorm)
    assert axes.get_ylabel() == "label, most frequent first"


def test_clients_are_drawn_by_rank(tmp_path: Path) -> None:
    """Three clients of the second run have an accuracy, so the first is read at a sixth, a half and
    five sixths of 0.1, 0.3, 0.5, 0.9."""
    with_clients(tmp_path)
    runs = drawn_runs(tmp_path)
    lines = lines_of(runs)
    expected = np.array([[0.1 + 0.2 / 6, 0.4, 0.5 + 0.4 * 5 / 6], [0.2, 0.2, 0.8]])
    ranked = sorted_accuracies(lines[""]["random"])
    assert ranked is not None
    np.testing.assert_allclose(ranked, expected)
    plot = clients_plot(lines, looks_of(runs))
    assert plot is not None
    (line,) = first_axes(plot).get_lines()
    assert heights(line) == pytest.approx(expected.mean(0))


def test_clients_that_were_not_measured_are_not_drawn(tmp_path: Path) -> None:
    write_run(tmp_path, [0.5], [[0]])
    runs = drawn_runs(tmp_path)
    assert clients_plot(lines_of(runs), looks_of(runs)) is None


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures, once for each time that they are drawn."""
    drawn: list[Figure] = []
    draw = Figure.draw

    def counted(figure: Figure, renderer: object) -> None:
        drawn.append(figure)
        draw(figure, renderer)

    monkeypatch.setattr(Figure, "draw", counted)
    return drawn


@pytest.mark.parametrize(("num_settings", "width"), [(1, 3.5), (2, 7.16)])
def test_files_are_as_wide_as_a_column_or_a_page_and_have_truetype_fonts(
    num_settings: int, width: float, tmp_path: Path, draws: list[Figure]
) -> None:
    write_two_settings(tmp_path / "runs")
    runs = drawn_runs(tmp_path / "runs")
    lines = dict(list(lines_of(runs).items())[:num_settings])
    with style():
        plots = accuracy_plots(lines, looks_of(runs))[:1]
        ((_, preview),) = save(plots, tmp_path)
    assert len(draws) == 3  # once a file
    pdf = (tmp_path / "accuracy_rounds.pdf").read_bytes()
    assert b"/Subtype /Type3" not in pdf
    stream = re.search(rb"/Length1 .*?stream\r?\n", pdf, re.DOTALL)
    assert stream is not None
    assert b"glyf" in zlib.decompressobj().decompress(pdf[stream.end() :])  # a TrueType font
    box = re.search(rb"/MediaBox \[ 0 0 ([\d.]+) ([\d.]+) \]", pdf)
    assert box is not None
    assert float(box[1]) == pytest.approx(72 * width, abs=0.1)
    png = matplotlib.image.imread(tmp_path / "accuracy_rounds.png")
    assert png.shape[1] == int(300 * width)
    assert preview.startswith(b"\x89PNG")


def test_runs_whose_records_lack_quantities_have_the_other_figures(tmp_path: Path) -> None:
    missing = ("train_samples", "forward_samples", *(f"seconds_{phase}" for phase in PHASES))
    run = write_run(tmp_path, [0.1, 0.2], [[0], [1]])
    change_run(run, lambda records: [record.pop(name) for record in records for name in missing])
    runs = drawn_runs(tmp_path)
    assert [plot.name for plot in all_plots(runs, looks_of(runs))] == [
        "accuracy_rounds",
        "accuracy_bytes",
        "coverage",
        "participation",
        "selections",
        "selections_rounds",
    ]
